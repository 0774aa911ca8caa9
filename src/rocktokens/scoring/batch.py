"""Rollouts as one right-padded batch, and which hidden state predicts which response token.

1. A sequence is prompt then response, padded on the right, where no token of a causal LM sees it.
2. Response token t of a sequence with P prompt tokens is input index P + t, so the state that *predicts* it, the last
   one that has not seen it, is index P + t − 1.
3. Response tokens of all rollouts lie one after the other, rollout after rollout: the T of every (T, …) array.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rocktokens.errors import RocktokensError
from rocktokens.models.head import hidden_states
from rocktokens.types import Rollout


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """R rollouts of at most L tokens, with T response tokens in all.

    Example: prompts of 3 and 2 ids with responses of 2 and 1 give L = 5, T = 3, flat_index_T = [2, 3, 6].
    """

    input_ids_RL: torch.Tensor
    flat_index_T: torch.Tensor
    """Into the (R · L) states: where each response token is predicted."""
    token_ids_T: torch.Tensor
    """The response tokens themselves."""
    positions_T: torch.Tensor
    """0-based in the response."""
    rollout_ids_T: torch.Tensor

    def predicting_states(self, h_RLD: torch.Tensor) -> torch.Tensor:
        """The states (T, D) that predict the response tokens."""
        return h_RLD.flatten(0, 1)[self.flat_index_T]


def response_states(model: Any, batch: RolloutBatch) -> torch.Tensor:
    """h_TD: for every response token the last hidden state that had not seen it yet."""
    return batch.predicting_states(hidden_states(model, batch.input_ids_RL))


def collate(rollouts: Sequence[Rollout], pad_id: int, device: torch.device | str) -> RolloutBatch:
    """Batch rollouts in the given order; ``pad_id`` may be any id, its states are never used."""
    for rollout in rollouts:
        _require_tokens(rollout)
    prompts = np.array([len(rollout.prompt_ids) for rollout in rollouts])
    responses = np.array([len(rollout.token_ids) for rollout in rollouts])
    longest = int((prompts + responses).max())
    input_ids_RL = np.full((len(rollouts), longest), pad_id, dtype=np.int64)
    for row_L, rollout in zip(input_ids_RL, rollouts, strict=True):
        ids = np.concatenate([rollout.prompt_ids, rollout.token_ids])
        row_L[: len(ids)] = ids
    positions_T = np.concatenate([np.arange(length) for length in responses])
    predicted_at_T = np.repeat(np.arange(len(rollouts)) * longest + prompts - 1, responses) + positions_T
    rollout_ids_T = np.repeat([rollout.rollout_id for rollout in rollouts], responses)
    token_ids_T = np.concatenate([rollout.token_ids for rollout in rollouts])
    arrays = (input_ids_RL, predicted_at_T, token_ids_T, positions_T, rollout_ids_T)
    return RolloutBatch(*(torch.from_numpy(array.astype(np.int64)).to(device) for array in arrays))


def split_by_tokens(rollouts: Sequence[Rollout], tokens_per_batch: int) -> list[list[int]]:
    """Indices of rollouts in groups of like length, longest first, each at most ``tokens_per_batch`` when padded.

    A rollout that is longer than that on its own is a group of one.
    """
    lengths = [len(rollout.prompt_ids) + len(rollout.token_ids) for rollout in rollouts]
    groups: list[list[int]] = []
    for index in sorted(range(len(rollouts)), key=lambda i: -lengths[i]):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= tokens_per_batch:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _require_tokens(rollout: Rollout) -> None:
    for name, ids in (("prompt_ids", rollout.prompt_ids), ("token_ids", rollout.token_ids)):
        if not len(ids):
            raise RocktokensError(
                f"rollout {rollout.rollout_id} of prompt {rollout.prompt_id!r} has no {name}: "
                "leave it out, there is no token to score or nothing to predict it from"
            )
