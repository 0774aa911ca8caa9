"""The loss of one micro-batch (METHOD 7) as a module, so that DDP and FSDP see one forward they can hook.

1. The student's hidden states that predict each response token are picked from one forward.
2. Σ w·kl / D over these tokens, D being the same number on every micro-batch and rank of the update.
3. The scores of the trace and the top-16 overlap of a few probe positions come from the same forward.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from rocktokens.config import ScoringSection
from rocktokens.models.head import LMHead, hidden_states, lm_head
from rocktokens.policies import WeightPolicy
from rocktokens.scoring.batch import RolloutBatch
from rocktokens.scoring.divergence import top_overlap, weighted_kl
from rocktokens.types import Rollout, TokenScores, TokenWeights

OVERLAP_K = 16


class ObjectiveOutput(NamedTuple):
    """What one micro-batch contributes to the update."""

    loss: torch.Tensor
    """Scalar: this micro-batch's part of the update's loss; the parts add up to the whole."""
    scores: TokenScores
    overlap: torch.Tensor
    """(P,): overlap@16 at the probe positions."""


class DistillationObjective(nn.Module):
    """Holds the student; the teacher's head rides along outside the module's parameters."""

    def __init__(self, student: nn.Module, teacher_head: LMHead, section: ScoringSection) -> None:
        super().__init__()
        self.student = student
        self._teacher_head = teacher_head
        self._section = section

    def forward(
        self,
        batch: RolloutBatch,
        h_t_TE: torch.Tensor,
        weights_T: torch.Tensor,
        denominator: float,
        probe_P: torch.Tensor,
    ) -> ObjectiveOutput:
        """Score every kept response token of the batch; ``probe_P`` are the positions to measure overlap at."""
        student_head = lm_head(self.student)
        h_s_TD = response_states(self.student, batch)
        loss, scores = weighted_kl(
            h_s_TD,
            student_head,
            h_t_TE,
            self._teacher_head,
            batch.token_ids_T,
            weights_T,
            denominator,
            divergence=self._section.divergence,
            temperature=self._section.temperature,
            tokens_per_chunk=self._section.tokens_per_chunk,
        )
        with torch.no_grad():
            overlap_P, _ = top_overlap(h_s_TD[probe_P], student_head, h_t_TE[probe_P], self._teacher_head, k=OVERLAP_K)
        return ObjectiveOutput(loss, scores, overlap_P)


def response_states(model: nn.Module, batch: RolloutBatch) -> torch.Tensor:
    """h_TD: for every response token the last hidden state that had not seen it yet."""
    return batch.predicting_states(hidden_states(model, batch.input_ids_RL, batch.attention_mask_RL))


def token_weights(
    policy: WeightPolicy, rollouts: Sequence[Rollout], denominator: Literal["all", "kept"], step: int
) -> TokenWeights:
    """Weights of a whole update, keyed by the predicted tokens, and the denominator all its parts share."""
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    weights_T = policy(
        None,
        np.concatenate([rollout.token_ids for rollout in rollouts]),
        np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        np.repeat([rollout.rollout_id for rollout in rollouts], lengths),
        step,
    )
    total = float(np.sum(weights_T, dtype=np.float64)) if denominator == "kept" else float(sum(lengths))
    return TokenWeights(weights_T, total)
