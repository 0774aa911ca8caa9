"""The blocks of a student, and inner products of gradients within each, also where parameters are sharded.

Which block a parameter belongs to:

1. Anything called a norm is in the block ``norms``, wherever it stands.
2. Inside layer i, attention is ``layer i attention``, the feed-forward part (experts and router included) is
   ``layer i mlp``, and what is neither is ``layer i other``. An adapter belongs to the layer it adapts.
3. Outside the layers: ``embeddings``, ``lm head``, ``other``. A matrix that is both is ``embeddings and lm head``.

How inner products are summed:

4. A tensor is read a slice at a time, in float64: float32 sums over 10^8 elements lose the small groups.
5. An inner product of sharded tensors is the sum of those of their shards. Sums of parameters sharded over the same
   processes are reduced together, once; a parameter that is whole on every process is not reduced at all.

Shape legend: P tensors (groups, or parts of a step), B blocks, n elements of a slice.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rocktokens.models.shards import laid_like

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.(.+)")
_NORM = re.compile(r"norm|(?:^|\.)ln_|layer_?norm|\.ln\d?\.", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention|mixer|linear_attn", re.IGNORECASE)
_MLP = re.compile(r"mlp|feed_forward|ffn|moe|expert|router|(?:^|\.)fc\d|dense_(?:h_to_4h|4h_to_h)", re.IGNORECASE)
_HEAD = re.compile(r"lm_head|embed_out|output_projection", re.IGNORECASE)
_EMBEDDINGS = re.compile(r"embed|(?:^|\.)w[tp]e\.", re.IGNORECASE)
TIED = "embeddings and lm head"

SLICE = 1 << 22
"""Elements of a parameter that are read together: 32 MiB in float64 for every tensor."""

Rows = Callable[[slice], torch.Tensor]
"""Elements of P tensors of one shape, flattened: (P, n) for a slice of n."""


def block_of(name: str) -> str:
    """Name the block of a parameter by its name alone, such as ``model.layers.3.self_attn.q_proj.weight``."""
    if _NORM.search(name):
        return "norms"
    layer = _LAYER.search(name)
    if layer:
        index, inside = layer.groups()
        part = "attention" if _ATTENTION.search(inside) else "mlp" if _MLP.search(inside) else "other"
        return f"layer {index} {part}"
    if _HEAD.search(name):
        return "lm head"
    return "embeddings" if _EMBEDDINGS.search(name) else "other"


def trainable_blocks(student: Any) -> dict[str, str]:
    """Name the block of every trainable parameter, by the parameter's name, in the order of the model.

    Args:
        student: a transformers causal LM, PEFT-wrapped or not.
    """
    causal_lm = student.get_base_model() if hasattr(student, "get_base_model") else student
    embeddings, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is embeddings.weight
    return {
        name: TIED if tied and parameter is embeddings.weight else block_of(name)
        for name, parameter in student.named_parameters()
        if parameter.requires_grad
    }


def ordered(blocks: set[str]) -> list[str]:
    """Sort blocks in the order of a forward pass; norms and what is left over come last."""
    return sorted(blocks, key=_place)


def _place(block: str) -> tuple[int, int, str]:
    layer = re.fullmatch(r"layer (\d+) (\w+)", block)
    if layer:
        return 1, int(layer[1]), layer[2]
    outside = {"embeddings": 0, TIED: 0, "lm head": 2, "norms": 3}
    return outside.get(block, 4), 0, block


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
        """Return float64 (B, P, P): over all parameters and processes, the same on every process."""
        total_BPP = np.zeros((len(self._index), self._n_tensors, self._n_tensors))
        for groups, sums_BPP in self._sums.items():
            for group in groups:
                dist.all_reduce(sums_BPP, group=group)
            total_BPP += sums_BPP.cpu().numpy()
        return total_BPP


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that this process holds, flattened."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach().flatten()


def local_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the elements of a whole tensor that belong to this process's shard of ``parameter``, flattened."""
    return local(whole if isinstance(whole, DTensor) else laid_like(whole, parameter))


def sharded_over(parameter: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups whose members hold different shards; none where the parameter is whole."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(parameter.placements) if placement.is_shard())


def place_among(parameter: torch.Tensor) -> tuple[int, int]:
    """Return this process's number and how many share the work, by a parameter's mesh; (0, 1) where it has none."""
    if not isinstance(parameter, DTensor):
        return 0, 1
    ranks = parameter.device_mesh.mesh.flatten().tolist()
    return ranks.index(dist.get_rank()), len(ranks)
