"""Tensors that may lie in shards over several processes (DTensors of torch's FSDP2), and whole ones."""

import torch
from torch.distributed.tensor import DTensor, Partial, distribute_tensor


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole; where it lies in shards, every process that holds one must call this.

    A gradient goes back to the shards averaged over ranks, as FSDP2 does.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor(grad_placements=[Partial("avg")] * tensor.device_mesh.ndim)


def laid_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, the same on every process, where and in the shards in which a parameter lies."""
    whole = whole.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
