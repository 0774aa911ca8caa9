"""One optimiser step of TRL as our records: whose tokens are trained on, with what weights, and what they scored.

1. The completions of this process become rollouts; those of all processes together are the update.
2. The policy weighs the whole update at once, keyed by the *predicted* tokens, and so does the denominator.
3. Weights go back to TRL's layout, (B, C) and padded, and are then shuffled and split with the completions.
4. The scores of the micro-batches return to the order of the rollouts, whatever order TRL trained them in.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from rocktokens.errors import TrainingStoppedError
from rocktokens.policies import Coarse, WeightPolicy
from rocktokens.scoring.top_tokens import Top
from rocktokens.training.step import (
    Denominator,
    concatenated,
    likely_positions,
    numpy_scores,
    token_arrays,
    token_weights,
)
from rocktokens.types import CHOICE, STANDARD_COLUMNS, LikelyTokens, Rollout, TokenScores, TokenWeights


@dataclass(slots=True)
class TrlStep:
    """The tokens of one optimiser step, rollout after rollout, those of all processes in order of rank."""

    step: int
    rollouts: list[Rollout]
    weights: TokenWeights
    scored_T: np.ndarray
    """bool: whose scores are wanted, which are those of weight above 0 and the policy's probes."""
    own: slice
    """This process's tokens."""
    own_scores: TokenScores
    """Of those, numpy, NaN where there is no score yet."""
    likely_T: np.ndarray
    """bool: where the policy sees what both models could have written."""
    own_likely: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    """That, micro-batch after micro-batch: places among this process's tokens, ids and log-probabilities."""

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens that were predicted."""
        return np.concatenate([rollout.token_ids for rollout in self.rollouts])

    def record(self, index_N: torch.Tensor, scores: TokenScores) -> None:
        """Take in the scores of some of this process's tokens, given by their places among them."""
        index = index_N.cpu().numpy()
        for name, column_N in numpy_scores([scores]).present():
            getattr(self.own_scores, name)[index] = column_N

    def record_likely(self, index_N: torch.Tensor, top: Top) -> None:
        """Take in what could have been written at some of this process's tokens, given by their places among them."""
        self.own_likely.append(tuple(part.cpu().numpy() for part in (index_N, *top)))

    def likely(self) -> LikelyTokens:
        """What could have been written on all processes; every process must ask."""
        places, *columns = (np.concatenate(parts) for parts in zip(*self.own_likely, strict=True))
        ranks = gather_object([[column[np.argsort(places)] for column in columns]])
        ids_P2K, logp_P2K = (np.concatenate(parts) for parts in zip(*ranks, strict=True))
        return LikelyTokens(token_arrays(self.rollouts)[2][self.likely_T], ids_P2K, logp_P2K)

    def scores(self) -> TokenScores:
        """The scores of all processes, NaN where there is none; every process must ask."""
        return concatenated(gather_object([self.own_scores]))

    def layout(self, mask_BC: torch.Tensor) -> dict[str, torch.Tensor]:
        """What each completion of this process carries along through shuffling and splitting, as (B, C) tensors."""
        own = {
            "token_weights": torch.as_tensor(self.weights.weights[self.own]),
            "token_scored": torch.as_tensor(self.scored_T[self.own]),
            "token_likely": torch.as_tensor(self.likely_T[self.own]),
            "token_index": torch.arange(self.own.stop - self.own.start),
        }
        spread = {}
        for name, values_T in own.items():  # rows of the mask come one after the other; 0 at the padding
            spread[name] = values_T.new_zeros(mask_BC.shape).to(mask_BC.device)
            spread[name][mask_BC.bool()] = values_T.to(mask_BC.device)
        return spread


def own_rollouts(
    batch: dict[str, Any], prompts: Sequence[dict[str, Any]], step: int, first_id: int, end_ids: Sequence[int]
) -> list[Rollout]:
    """Return the completions of this process; TRL does not keep the sampler's log-probabilities: they are NaN."""
    rollouts = []
    for row, example in enumerate(prompts):
        token_ids = _unpadded(batch["completion_ids"][row], batch["completion_mask"][row])
        rollouts.append(
            Rollout(
                rollout_id=first_id + row,
                prompt_id=prompt_id(example),
                sample=0,
                prompt_ids=_unpadded(batch["prompt_ids"][row], batch["prompt_mask"][row]),
                token_ids=token_ids,
                logprobs=np.full(len(token_ids), np.nan, dtype=np.float32),
                policy_step=step,
                finished=bool(np.isin(token_ids[-1:], end_ids).any()),
            )
        )
    return rollouts


def prompt_id(example: dict[str, Any]) -> str:
    """Read the column ``prompt_id`` of the data set, or make a name from the prompt itself."""
    if "prompt_id" in example:
        return str(example["prompt_id"])
    text = json.dumps(example["prompt"], sort_keys=True, ensure_ascii=False)
    return f"prompt-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def weigh(
    policy: WeightPolicy,
    denominator: Denominator,
    rollouts: list[Rollout],
    scores: TokenScores | None,
    rank: int,
    seed: int,
) -> TrlStep:
    """Weigh the step that all processes' rollouts make.

    ``rollouts`` and ``scores`` (numpy, of each of their tokens; None where the policy needs none) are this process's,
    ``seed`` is the run's.
    """
    ranks = gather_object([(rollouts, scores)])
    ends = np.cumsum([0, *(sum(len(rollout.token_ids) for rollout in part) for part, _ in ranks)]).tolist()
    everyone = [rollout for part, _ in ranks for rollout in part]
    known = None if scores is None else concatenated([part for _, part in ranks])
    step = everyone[0].policy_step
    weights = token_weights(policy, known, everyone, denominator, step)
    wrong_T = ~(np.isfinite(weights.weights) & (weights.weights >= 0))
    if wrong_T.any():
        raise TrainingStoppedError(
            f"step {step}: policy {policy.name} gives a token the weight {weights.weights[wrong_T][0]}: weights must "
            "be finite and 0 or more"
        )
    scored_T = (weights.weights != 0) | policy.probe(weights.weights, *token_arrays(everyone), step)
    own = slice(ends[rank], ends[rank + 1])
    names = (*STANDARD_COLUMNS, *([CHOICE] if isinstance(policy.term_at(step), Coarse) else []))
    unscored = {name: np.full(own.stop - own.start, np.nan, dtype=np.float32) for name in names}
    likely_T = np.zeros(len(scored_T), dtype=bool)
    likely_T[likely_positions(policy, len(likely_T), seed, step)] = True
    return TrlStep(step, everyone, weights, scored_T, own, scores or TokenScores(**unscored), likely_T)


def _unpadded(ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    return ids[mask.bool()].cpu().numpy().astype(np.int32)
