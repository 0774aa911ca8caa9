"""One update of the student: weights, forward and backward over micro-batches, clip, optimizer and scheduler step.

1. The policy weighs every response token of the update, after a scoring pass if it needs one (``weighing.py``).
2. Every part of the loss is divided by the denominator of the whole update. DDP averages gradients over ranks, so each
   rank's part is multiplied by their number; ranks talk to each other only in the last backward.
3. Scores of all ranks are gathered back into the order of the rollouts; rows that the loss leaves out have those of the
   scoring pass, or of a look without gradient, or none (NaN).

The host queues all of it and waits for a GPU twice: for loss, gradient norm and overlap before the weights are touched,
and for the scores, which is also when the update is done. A policy that needs scores adds one wait before the first.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from accelerate.utils import gather_object

from rocktokens.models.head import lm_head
from rocktokens.run_dir import derive_seed
from rocktokens.scoring.batch import collate, sent
from rocktokens.training.batch import MicroBatch, joined_columns, micro_batches, whole_update
from rocktokens.training.health import require_finite, require_weight
from rocktokens.training.objective import ObjectiveOutput
from rocktokens.training.session import Session
from rocktokens.training.teacher import TeacherStates, teacher_states
from rocktokens.training.weighing import Weighing, weigh
from rocktokens.types import Rollout, TokenScores, TokenWeights

OVERLAP_POSITIONS = 256


@dataclass(frozen=True, slots=True)
class Update:
    """What an update measured, over all ranks, tokens in the order of the rollouts."""

    loss: float
    grad_norm: float
    learning_rate: float
    weights: TokenWeights
    scores: TokenScores
    overlap: np.ndarray
    head_compute_saved: float


def update_student(session: Session, rollouts: Sequence[Rollout], step: int) -> Update:
    """Make one update on ``rollouts`` and return what was measured on the way."""
    weighing = weigh(session, rollouts, step)
    require_weight(step, weighing.weights)
    outputs = accumulate_gradients(session, rollouts, weighing, step)
    max_norm = session.config.training.max_grad_norm
    norm = cast(torch.Tensor, session.accelerator.clip_grad_norm_(session.trainable, max_norm))
    own_loss, grad_norm, own_overlap = _read(outputs, norm)
    require_finite(step, own_loss, grad_norm)
    learning_rate = float(session.scheduler.get_last_lr()[0])
    session.optimizer.step()
    session.scheduler.step()
    session.optimizer.zero_grad()
    loss, scores, overlap = _gather(own_loss, own_overlap, outputs)
    w_s_VD, w_t_VE = (lm_head(model).weight_VD for model in (session.student, session.teacher))
    return Update(
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        weights=weighing.weights,
        scores=scores if weighing.scores is None else filled(scores, weighing.scores),
        overlap=overlap,
        head_compute_saved=weighing.head_compute_saved(
            w_s_VD.shape[1], w_t_VE.shape[1], head_is_trained=w_s_VD.requires_grad
        ),
    )


def accumulate_gradients(
    session: Session, rollouts: Sequence[Rollout], weighing: Weighing, step: int
) -> list[ObjectiveOutput]:
    """Leave the gradient of the whole update's loss on the parameters; the outputs are this rank's, detached."""
    accelerator, config = session.accelerator, session.config
    rank, ranks = accelerator.process_index, accelerator.num_processes
    overlap_P = overlap_positions(len(weighing.watched_T), derive_seed(config.run.seed, "overlap", step))
    torch.manual_seed(derive_seed(config.run.seed, "dropout", step, rank))
    session.objective.train()
    outputs: list[ObjectiveOutput] = []
    for micro in micro_batches(rollouts, config.training.per_device_train_batch_size, rank, ranks):
        known = weighing.teacher_states[len(outputs)] if weighing.teacher_states is not None else None
        with nullcontext() if micro.last else accelerator.no_sync(session.objective):
            output = _forward(session, micro, weighing, known, overlap_P)
            accelerator.backward(output.loss * ranks)
        outputs.append(output._replace(loss=output.loss.detach()))
    return outputs


def overlap_positions(num_tokens: int, seed: int) -> np.ndarray:
    """Sorted token positions of the update at which the overlap is measured."""
    chosen = np.random.default_rng(seed).choice(num_tokens, min(OVERLAP_POSITIONS, num_tokens), replace=False)
    return np.sort(chosen)


def filled(scores: TokenScores, known: TokenScores) -> TokenScores:
    """The scores, those of ``known`` where there are none; its extra columns too."""
    columns = {name: np.where(np.isnan(own_T), getattr(known, name), own_T) for name, own_T in scores.items()}
    return replace(known, **columns)


def _forward(
    session: Session, micro: MicroBatch, weighing: Weighing, known: TeacherStates | None, overlap_P: np.ndarray
) -> ObjectiveOutput:
    """Teacher without gradient unless its states are known, student with, both under the same autocast."""
    device = session.accelerator.device
    batch = collate(micro.rollouts, session.pad_id, device)
    here, weights = micro.tokens, weighing.weights
    overlap_P = overlap_P[(overlap_P >= here.start) & (overlap_P < here.stop)] - here.start
    with session.accelerator.autocast():
        return session.objective(
            batch,
            known or teacher_states(session.teacher, batch, session.teacher_stream),
            weights.weights[here],
            weights.denominator,
            session.policy.term,
            sent(np.flatnonzero(weighing.watched_T[here]), device),
            sent(overlap_P, device),
        )


def _read(outputs: list[ObjectiveOutput], norm: torch.Tensor) -> tuple[float, float, np.ndarray]:
    """Loss, gradient norm and overlap of this rank, in one transfer."""
    loss = sum((output.loss for output in outputs[1:]), outputs[0].loss)
    numbers = torch.cat([torch.stack([loss, norm]), *(output.overlap for output in outputs)]).cpu()
    return float(numbers[0]), float(numbers[1]), numbers[2:].float().numpy()


def _gather(
    loss: float, overlap_P: np.ndarray, outputs: list[ObjectiveOutput]
) -> tuple[float, TokenScores, np.ndarray]:
    """Loss, scores and overlap of all ranks."""
    ranks = gather_object([(loss, joined_columns([output.scores for output in outputs]), overlap_P)])
    losses, columns, overlaps = zip(*ranks, strict=True)
    return sum(losses), whole_update(columns), np.concatenate(overlaps)
