"""One update of the student: forward and backward over micro-batches, clip, optimizer and scheduler step.

1. Rank r takes the r-th contiguous block of the update's rollouts and cuts it into micro-batches, so that two
   micro-batches of one process and one micro-batch of two processes are the same data in the same places.
2. Every part of the loss is divided by the denominator of the whole update. DDP averages gradients over ranks, so each
   rank's part is multiplied by their number; ranks talk to each other only in the last backward.
3. Scores of all ranks are gathered back into the order of the rollouts.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import numpy as np
import torch
from accelerate.utils import gather_object

from rocktokens.run_dir import derive_seed
from rocktokens.scoring.batch import collate
from rocktokens.training.health import require_finite
from rocktokens.training.objective import ObjectiveOutput, response_states
from rocktokens.training.session import Session
from rocktokens.types import Rollout, TokenScores, TokenWeights

OVERLAP_POSITIONS = 256


@dataclass(frozen=True, slots=True)
class Update:
    """What an update measured, over all ranks, tokens in the order of the rollouts."""

    loss: float
    grad_norm: float
    learning_rate: float
    scores: TokenScores
    overlap: np.ndarray


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A slice of the update: its rollouts and the span of its tokens in the update."""

    rollouts: Sequence[Rollout]
    tokens: slice


def update_student(session: Session, rollouts: Sequence[Rollout], weights: TokenWeights, step: int) -> Update:
    """Make one update on ``rollouts`` and return what was measured on the way."""
    outputs = accumulate_gradients(session, rollouts, weights, step)
    loss = float(sum(output.loss for output in outputs))
    max_norm = session.config.training.max_grad_norm
    grad_norm = float(cast(torch.Tensor, session.accelerator.clip_grad_norm_(session.trainable, max_norm)))
    require_finite(step, loss, grad_norm)
    learning_rate = float(session.scheduler.get_last_lr()[0])
    session.optimizer.step()
    session.scheduler.step()
    session.optimizer.zero_grad()
    return _gather(loss, outputs, grad_norm, learning_rate)


def accumulate_gradients(
    session: Session, rollouts: Sequence[Rollout], weights: TokenWeights, step: int
) -> list[ObjectiveOutput]:
    """Leave the gradient of the whole update's loss on the parameters; the outputs are this rank's, detached."""
    accelerator, config = session.accelerator, session.config
    rank, ranks = accelerator.process_index, accelerator.num_processes
    probes = probe_positions(len(weights.weights), derive_seed(config.run.seed, "overlap", step))
    torch.manual_seed(derive_seed(config.run.seed, "dropout", step, rank))
    session.objective.train()
    outputs: list[ObjectiveOutput] = []
    for micro, last in micro_batches(rollouts, config.training.per_device_train_batch_size, rank, ranks):
        with nullcontext() if last else accelerator.no_sync(session.objective):
            output = _forward(session, micro, weights, probes)
            accelerator.backward(output.loss * ranks)
        outputs.append(output._replace(loss=output.loss.detach()))
    return outputs


def micro_batches(
    rollouts: Sequence[Rollout], size: int, rank: int, num_ranks: int
) -> Iterator[tuple[MicroBatch, bool]]:
    """This rank's micro-batches in order, each with whether it is the last one."""
    starts = [0, *accumulate(len(rollout.token_ids) for rollout in rollouts)]
    per_rank = len(rollouts) // num_ranks
    block = range(rank * per_rank, (rank + 1) * per_rank)
    for first in block[::size]:
        end = min(first + size, block.stop)
        yield MicroBatch(rollouts[first:end], slice(starts[first], starts[end])), end == block.stop


def probe_positions(num_tokens: int, seed: int) -> np.ndarray:
    """Sorted token positions of the update at which the overlap is measured."""
    chosen = np.random.default_rng(seed).choice(num_tokens, min(OVERLAP_POSITIONS, num_tokens), replace=False)
    return np.sort(chosen)


def _forward(session: Session, micro: MicroBatch, weights: TokenWeights, probes: np.ndarray) -> ObjectiveOutput:
    """Teacher without gradient, student with, both under the same autocast."""
    device = session.accelerator.device
    batch = collate(micro.rollouts, session.pad_id, device)
    here = probes[(probes >= micro.tokens.start) & (probes < micro.tokens.stop)] - micro.tokens.start
    weights_T = torch.as_tensor(weights.weights[micro.tokens], device=device)
    with session.accelerator.autocast():
        with torch.no_grad():
            h_t_TE = response_states(session.teacher, batch)
        return session.objective(batch, h_t_TE, weights_T, weights.denominator, torch.as_tensor(here, device=device))


def _gather(loss: float, outputs: list[ObjectiveOutput], grad_norm: float, learning_rate: float) -> Update:
    columns = {
        name: torch.cat([getattr(output.scores, name) for output in outputs]).float().cpu().numpy()
        for name in TokenScores.__dataclass_fields__
    }
    overlap_P = torch.cat([output.overlap for output in outputs]).float().cpu().numpy()
    ranks = gather_object([(loss, columns, overlap_P)])
    return Update(
        loss=sum(part for part, _, _ in ranks),
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        scores=TokenScores(**{name: np.concatenate([part[name] for _, part, _ in ranks]) for name in columns}),
        overlap=np.concatenate([part for _, _, part in ranks]),
    )
