"""Rollouts as one batch, and which hidden state predicts which response token.

1. A sequence is prompt then response. A batch has two layouts: groups of like length, padded on the right, where no
   token of a causal LM sees it; and end to end in one row without padding (``packed.py``), which a GPU takes where the
   model allows it. On a CPU the groups are small, so that what passes from layer to layer stays in its caches; on a GPU
   there is one, unless it would be too large.
2. Response token t of a sequence with P prompt tokens is input index P + t, so the state that *predicts* it, the last
   one that has not seen it, is index P + t − 1.
3. Response tokens of all rollouts lie one after the other, rollout after rollout: the T of every (T, …) array.

Everything is laid out on the host and sent to a GPU without waiting for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rocktokens.errors import RocktokensError
from rocktokens.models.distant import DistantModel
from rocktokens.models.head import hidden_states
from rocktokens.scoring.fused import sent
from rocktokens.scoring.packed import PackedRow, packed_states, packs
from rocktokens.types import Rollout

CPU_GROUP_TOKENS = 1024
"""Padded tokens that pass through a model at once on a CPU."""


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Rollouts with T response tokens in all.

    Example: prompts of 3 and 2 ids with responses of 2 and 1 give one group of R = 2 and L = 5, T = 3, group_index_T =
    [2, 3, 6] and row_index_T = [2, 3, 6]: the second sequence begins at 5 in both layouts.
    """

    groups: tuple[torch.Tensor, ...]
    """Padded input ids (R, L) of each group."""
    group_index_T: torch.Tensor
    """Into the (R · L) states of all groups, one after the other: where each response token is predicted."""
    token_ids_T: torch.Tensor
    """The response tokens themselves."""
    positions_T: torch.Tensor
    """0-based in the response."""
    rollout_ids_T: torch.Tensor
    row: PackedRow
    """The same sequences without padding."""
    row_index_T: torch.Tensor
    """Into its (N,) states: where each response token is predicted."""

    def to(self, device: torch.device | str) -> "RolloutBatch":
        """Return the batch on another device."""

        def moved(record: Any) -> dict[str, Any]:
            return {
                name: to_device(value, device)
                for name in record.__slots__
                if isinstance(value := getattr(record, name), torch.Tensor)
            }

        groups = tuple(to_device(group, device) for group in self.groups)
        return replace(self, groups=groups, row=replace(self.row, **moved(self.row)), **moved(self))


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Move a tensor; the host waits only for what comes to itself, which it could otherwise read before it is there."""
    return x.to(device, non_blocking=torch.device(device).type != "cpu")


def response_states(model: Any, batch: RolloutBatch) -> torch.Tensor:
    """h_TD: for every response token the last hidden state that had not seen it yet."""
    if isinstance(model, DistantModel):
        return model.states(batch)
    if packs(model):
        return packed_states(model, batch.row)[batch.row_index_T]
    states = [hidden_states(model, input_ids_RL).flatten(0, 1) for input_ids_RL in batch.groups]
    return torch.cat(states)[batch.group_index_T]


def collate(
    rollouts: Sequence[Rollout],
    pad_id: int,
    device: torch.device | str,
    tokens_per_group: float = math.inf,
    *,
    one_group: bool = False,
) -> RolloutBatch:
    """Batch rollouts in the given order.

    ``pad_id`` may be any id, its states are never used. A group has at most ``tokens_per_group`` padded tokens, on a
    CPU ``CPU_GROUP_TOKENS``; a sequence that is longer on its own is a group of one. With ``one_group`` all are one,
    for models in shards: they must run as often on every process, whatever the lengths there.
    """
    for rollout in rollouts:
        for name, ids in (("prompt_ids", rollout.prompt_ids), ("token_ids", rollout.token_ids)):
            if not len(ids):
                raise RocktokensError(
                    f"rollout {rollout.rollout_id} of prompt {rollout.prompt_id!r} has no {name}: "
                    "leave it out, there is no token to score or nothing to predict it from"
                )
    prompts_R = np.array([len(rollout.prompt_ids) for rollout in rollouts])
    responses_R = np.array([len(rollout.token_ids) for rollout in rollouts])
    sequences = [np.concatenate([rollout.prompt_ids, rollout.token_ids]) for rollout in rollouts]
    lengths_R = prompts_R + responses_R
    starts = np.concatenate([[0], np.cumsum(lengths_R)])
    positions_T = np.concatenate([np.arange(length) for length in responses_R])
    if one_group:
        tokens_per_group = math.inf
    elif torch.device(device).type != "cuda":
        tokens_per_group = min(tokens_per_group, CPU_GROUP_TOKENS)
    groups, group_starts_R = _padded_groups(sequences, pad_id, tokens_per_group)

    def longs(array: np.ndarray) -> torch.Tensor:
        return sent(array.astype(np.int64), device)

    def predicted_at(starts_R: np.ndarray) -> torch.Tensor:
        return longs(np.repeat(starts_R + prompts_R - 1, responses_R) + positions_T)

    return RolloutBatch(
        groups=tuple(map(longs, groups)),
        group_index_T=predicted_at(group_starts_R),
        token_ids_T=longs(np.concatenate([rollout.token_ids for rollout in rollouts])),
        positions_T=longs(positions_T),
        rollout_ids_T=longs(np.repeat([rollout.rollout_id for rollout in rollouts], responses_R)),
        row=PackedRow(
            input_ids_N=longs(np.concatenate(sequences)),
            position_ids_N=longs(np.concatenate([np.arange(length) for length in lengths_R])),
            starts=sent(starts.astype(np.int32), device),
            longest=int(lengths_R.max()),
        ),
        row_index_T=predicted_at(starts[:-1]),
    )


def _padded_groups(
    sequences: Sequence[np.ndarray], pad_id: int, tokens_per_group: float
) -> tuple[list[np.ndarray], np.ndarray]:
    """Ids (R, L) of groups of like length, and where each sequence begins when all rows lie end to end."""
    groups: list[np.ndarray] = []
    starts_R = np.zeros(len(sequences), np.int64)
    end = 0
    for indices in split_by_length([len(ids) for ids in sequences], tokens_per_group):
        longest = len(sequences[indices[0]])
        input_ids_RL = np.full((len(indices), longest), pad_id)
        for row_L, index in zip(input_ids_RL, indices, strict=True):
            row_L[: len(sequences[index])] = sequences[index]
        starts_R[indices] = end + longest * np.arange(len(indices))
        end += input_ids_RL.size
        groups.append(input_ids_RL)
    return groups, starts_R


def split_by_tokens(rollouts: Sequence[Rollout], tokens_per_batch: int, *, packed: bool = False) -> list[list[int]]:
    """Indices of rollouts in groups of like length, longest first, each of at most ``tokens_per_batch``.

    Padding counts, unless the groups are packed. A rollout that is longer than that on its own is a group of one.
    """
    lengths = [len(rollout.prompt_ids) + len(rollout.token_ids) for rollout in rollouts]
    return split_by_length(lengths, tokens_per_batch, packed=packed)


def split_by_length(lengths: Sequence[int], tokens_per_group: float, *, packed: bool = False) -> list[list[int]]:
    """As ``split_by_tokens``, from the lengths themselves."""
    groups: list[list[int]] = []
    longest, room = 0, -math.inf
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        taken = lengths[index] if packed else longest
        if taken <= room:
            groups[-1].append(index)
            room -= taken
        else:
            groups.append([index])
            longest, room = lengths[index], tokens_per_group - lengths[index]
    return groups
