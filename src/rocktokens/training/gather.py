"""Bring what every process has to all of them, as tensors in the order of the processes.

Collectives need equal shapes: what is shorter is padded to the longest and cut again. How long each is follows from the
rollouts of an update, which all processes know; of packed rollouts it is told first. Python objects travel only where
their size does not grow with the update.
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch.nn import functional

from rocktokens.rollouts.store import bytes_rollouts, rollouts_bytes
from rocktokens.types import Rollout


def gather_columns(accelerator: Accelerator, own_CT: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Join the columns of all processes, ``counts`` rows of each; the result is on the device, the same everywhere."""
    if accelerator.num_processes == 1:
        return own_CT
    longest = max(counts)
    padded_CT = functional.pad(own_CT, (0, longest - own_CT.shape[1])).contiguous()
    ranks_RCT = accelerator.gather(padded_CT).view(len(counts), len(own_CT), longest)  # pyright: ignore[reportAttributeAccessIssue]
    return torch.cat([rank_CT[:, :count] for rank_CT, count in zip(ranks_RCT, counts, strict=True)], dim=1)


def gather_rollouts(accelerator: Accelerator, own: list[Rollout]) -> list[Rollout]:
    """Join the rollouts of all processes."""
    if accelerator.num_processes == 1:
        return own
    packed, device = rollouts_bytes(own), accelerator.device
    sizes: list[int] = accelerator.gather(torch.tensor([len(packed)], device=device)).tolist()  # pyright: ignore[reportAttributeAccessIssue]
    own_1T = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(device)[None]
    joined_T = gather_columns(accelerator, own_1T, sizes)[0].cpu()
    return [rollout for part_T in joined_T.split(sizes) for rollout in bytes_rollouts(part_T.numpy().tobytes())]
