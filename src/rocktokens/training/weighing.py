"""The weight of every response token of an update, and the scores its policy must see first (METHOD 7).

1. A policy that needs no scores weighs tokens and positions alone: rows of weight 0 then never reach a head.
2. A policy that needs scores gets those of the whole update, of all ranks, from a pass without gradient or dropout. The
   teacher's states of that pass are kept, so that the teacher runs once.
3. Rows of weight 0 may still be watched: the update scores them without gradient.
4. The denominator of the loss covers the whole update: all micro-batches, all ranks.

The host waits for a GPU once, for the scores of the pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from accelerate.utils import gather_object

from rocktokens.models.head import lm_head
from rocktokens.policies import WeightPolicy
from rocktokens.scoring.batch import collate, response_states
from rocktokens.scoring.divergence import token_scores
from rocktokens.training.batch import joined_columns, micro_batches, token_arrays, whole_update
from rocktokens.training.session import Session
from rocktokens.training.teacher import TeacherStates, teacher_states
from rocktokens.types import EXTRA_COLUMNS, Rollout, TokenScores, TokenWeights


@dataclass(frozen=True, slots=True)
class Weighing:
    """What is known of an update before its gradient, tokens in the order of the rollouts."""

    weights: TokenWeights
    watched_T: np.ndarray
    """bool: rows of weight 0 that are to be scored without gradient."""
    scores: TokenScores | None = None
    """Of every row, where the policy needed them."""
    teacher_states: Sequence[TeacherStates] | None = None
    """With them, those of each of this rank's micro-batches."""

    def head_compute_saved(self, student_width: int, teacher_width: int, *, head_is_trained: bool) -> float:
        """The share of the heads' multiply-adds that uniform weights would have cost and this update does not.

        A trained row costs three products of the student's width (forward, and backward to the states and to the head's
        weight), two where the head is not trained (LoRA), and one of the teacher's; a row scored without gradient one
        of each. Negative where scoring costs more than dropped rows save.
        """
        n_tokens = len(self.watched_T)
        n_trained = int(np.count_nonzero(self.weights.weights))
        n_scored = n_tokens if self.scores is not None else int(np.count_nonzero(self.watched_T))
        trained_row = (3 if head_is_trained else 2) * student_width + teacher_width
        scored_row = student_width + teacher_width
        return 1.0 - (n_trained * trained_row + n_scored * scored_row) / (n_tokens * trained_row)


def weigh(session: Session, rollouts: Sequence[Rollout], step: int) -> Weighing:
    """Weights of an update, after a scoring pass where the policy needs one."""
    policy, denominator = session.policy, session.config.policy.denominator
    if policy.needs:
        scores, teacher = score_update(session, rollouts)
        weights = token_weights(policy, scores, rollouts, denominator, step)
        return Weighing(weights, np.zeros(len(weights.weights), dtype=bool), scores, teacher)
    weights = token_weights(policy, None, rollouts, denominator, step)
    watched_T = np.asarray(policy.probe(weights.weights, *token_arrays(rollouts), step)) & (weights.weights == 0)
    return Weighing(weights, watched_T)


def token_weights(
    policy: WeightPolicy,
    scores: TokenScores | None,
    rollouts: Sequence[Rollout],
    denominator: Literal["all", "kept"],
    step: int,
) -> TokenWeights:
    """Weights of a whole update, keyed by the predicted tokens, and the denominator all its parts share."""
    weights_T = policy(scores, *token_arrays(rollouts), step)
    total = float(np.sum(weights_T, dtype=np.float64)) if denominator == "kept" else float(len(weights_T))
    return TokenWeights(weights_T, total)


@torch.no_grad()
def score_update(session: Session, rollouts: Sequence[Rollout]) -> tuple[TokenScores, list[TeacherStates]]:
    """Numpy scores of every row of the update, and the teacher's states of this rank's micro-batches."""
    accelerator, config = session.accelerator, session.config
    section, extras = config.scoring, [name for name in EXTRA_COLUMNS if name in session.policy.needs]
    heads = lm_head(session.student), lm_head(session.teacher)
    session.student.eval()
    parts: list[TokenScores] = []
    teachers: list[TeacherStates] = []
    for micro in micro_batches(
        rollouts, config.training.per_device_train_batch_size, accelerator.process_index, accelerator.num_processes
    ):
        batch = collate(micro.rollouts, session.pad_id, accelerator.device)
        with accelerator.autocast():
            teacher = teacher_states(session.teacher, batch, session.teacher_stream)
            h_s_TD = response_states(session.student, batch)
            states = (h_s_TD, heads[0], teacher.wait(), heads[1], batch.token_ids_T)
            parts.append(
                token_scores(*states, section.divergence, section.temperature, section.tokens_per_chunk, extras)
            )
        teachers.append(teacher)
    return whole_update(gather_object([joined_columns(parts)])), teachers
