"""How an update is laid out over ranks and micro-batches, and how their scores come back in one piece.

Rank r takes the r-th contiguous block of the update's rollouts and cuts it into micro-batches, so that two
micro-batches of one process and one micro-batch of two processes are the same data in the same places.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from rocktokens.types import EXTRA_COLUMNS, Rollout, TokenScores

Columns = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A slice of the update: its rollouts and the span of its tokens in the update."""

    rollouts: Sequence[Rollout]
    tokens: slice
    last: bool
    """Of its rank."""


def micro_batches(rollouts: Sequence[Rollout], size: int, rank: int, num_ranks: int) -> Iterator[MicroBatch]:
    """This rank's micro-batches in order."""
    starts = [0, *accumulate(len(rollout.token_ids) for rollout in rollouts)]
    per_rank = len(rollouts) // num_ranks
    block = range(rank * per_rank, (rank + 1) * per_rank)
    for first in block[::size]:
        end = min(first + size, block.stop)
        yield MicroBatch(rollouts[first:end], slice(starts[first], starts[end]), last=end == block.stop)


def token_arrays(rollouts: Sequence[Rollout]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, positions in the response and rollout ids (T,) of all response tokens, rollout after rollout."""
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    return (
        np.concatenate([rollout.token_ids for rollout in rollouts]),
        np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        np.repeat([rollout.rollout_id for rollout in rollouts], lengths),
    )


def joined_columns(parts: Sequence[TokenScores]) -> Columns:
    """The columns of a rank's micro-batches one after the other, float32 on the CPU; extra ones if there are any.

    A GPU is waited for once, not once a column.
    """
    names = [name for name, _ in parts[0].items()]
    names += [name for name in EXTRA_COLUMNS if getattr(parts[0], name) is not None]
    table_CT = torch.stack([torch.cat([getattr(part, name) for part in parts]).float() for name in names])
    return dict(zip(names, table_CT.cpu().numpy(), strict=True))


def whole_update(ranks: Sequence[Columns]) -> TokenScores:
    """The scores of all ranks in the order of the rollouts."""
    return TokenScores(**{name: np.concatenate([columns[name] for columns in ranks]) for name in ranks[0]})
