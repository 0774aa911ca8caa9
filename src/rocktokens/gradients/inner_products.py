"""Inner products of gradients by block of the model, also where every process holds a shard of each parameter.

1. A tensor is looked at a slice at a time, in float64: float32 sums over 10^8 elements lose the small groups.
2. An inner product of sharded tensors is the sum of those of their shards. Sums of parameters sharded over the same
   processes are reduced together, once; a parameter that is whole on every process is not reduced at all.

Shape legend: P tensors (groups, or parts of a step), B blocks, n elements of a slice.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

SLICE = 1 << 22
"""Elements of a parameter that are looked at together: 32 MiB in float64 for every tensor."""

Rows = Callable[[slice], torch.Tensor]
"""Elements of P tensors of one shape, flattened: (P, n) for a slice of n."""


class BlockGrams:
    """Inner products (P, P) between P tensors of each parameter, summed over the parameters of a block."""

    def __init__(self, blocks: Sequence[str], n_tensors: int) -> None:
        self._index = {block: index for index, block in enumerate(blocks)}
        self._n_tensors = n_tensors
        self._sums: dict[tuple[dist.ProcessGroup, ...], torch.Tensor] = {}

    def add(self, block: str, parameter: torch.Tensor, rows: Rows) -> None:
        """Add a parameter; ``rows`` gives the elements of its P tensors that this process holds."""
        shape = (len(self._index), self._n_tensors, self._n_tensors)
        sums_BPP = self._sums.setdefault(
            sharded_over(parameter), torch.zeros(shape, dtype=torch.float64, device=parameter.device)
        )
        for start in range(0, local(parameter).numel(), SLICE):
            rows_Pn = rows(slice(start, start + SLICE)).double()
            sums_BPP[self._index[block]] += rows_Pn @ rows_Pn.T

    def total(self) -> np.ndarray:
        """float64 (B, P, P): over all parameters and processes, the same on every process."""
        total_BPP = np.zeros((len(self._index), self._n_tensors, self._n_tensors))
        for groups, sums_BPP in self._sums.items():
            for group in groups:
                dist.all_reduce(sums_BPP, group=group)
            total_BPP += sums_BPP.cpu().numpy()
        return total_BPP


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that this process holds, flattened."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach().flatten()


def local_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The elements of a whole tensor that belong to this process's shard of ``parameter``, flattened."""
    whole = whole.to(parameter.device)
    if isinstance(parameter, DTensor) and not isinstance(whole, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return local(whole)


def sharded_over(parameter: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups whose members hold different shards; none where the parameter is whole."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(parameter.placements) if placement.is_shard())


def place_among(parameter: torch.Tensor) -> tuple[int, int]:
    """This process's number and how many share the work, by the mesh of a parameter; 0 of 1 where it has none."""
    if not isinstance(parameter, DTensor):
        return 0, 1
    ranks = parameter.device_mesh.mesh.flatten().tolist()
    return ranks.index(dist.get_rank()), len(ranks)
