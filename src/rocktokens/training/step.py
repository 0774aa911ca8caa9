"""One update of the student: weigh its tokens, forward and backward over micro-batches, clip, step.

The loss is that of docs/method.md, section 7.

1. Rank r takes the r-th contiguous block of the update's rollouts and cuts it into micro-batches. Two micro-batches of
   one process and one micro-batch of two processes are therefore the same data in the same places.
2. The policy weighs every response token of the whole update. One that needs no scores weighs tokens and positions
   alone, so rows of weight 0 never reach a head. One that needs scores gets those of all ranks, from a pass without
   gradient or dropout; the teacher's states of that pass are kept, so the teacher runs once.
3. Every part of the loss is divided by the denominator of the whole update. Ranks average their gradients, so each
   rank's part is multiplied by their number; they communicate gradients only in the last backward (``layout.py``).
4. Scores of all ranks are gathered in the order of the rollouts (``gather.py``). Rows that the loss leaves out have
   those of the scoring pass, of a pass without gradient if the policy watches them, or none (NaN).
5. A policy that learns from what both models could have written has that of all ranks, at every position of a small
   update and at a random choice of ``LIKELY_POSITIONS`` of a large one, whatever their weights.

The host queues all of it and waits for a GPU twice: for loss, gradient norm and overlap before the weights are changed,
and for the scores, which is also when the update is done. A policy that needs scores adds one wait before the first.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate, chain
from operator import add
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
from accelerate.utils import gather_object

from rocktokens.classes import TokenClasses
from rocktokens.errors import NonFiniteLossError, TrainingStoppedError
from rocktokens.models.head import LMHead, lm_head, output_head
from rocktokens.policies import Term, WeightPolicy, term_classes
from rocktokens.run_dir import derive_seed
from rocktokens.scoring.batch import RolloutBatch, collate
from rocktokens.scoring.fused import sent
from rocktokens.training.gather import gather_columns
from rocktokens.training.objective import ObjectiveOutput, TeacherStates, teacher_states
from rocktokens.training.session import Session
from rocktokens.types import EXTRA_COLUMNS, LikelyTokens, Rollout, TokenScores, TokenWeights

if TYPE_CHECKING:  # it needs an extra
    from rocktokens.scoring.served import ServedTeacher
    from rocktokens.scoring.served_likely import ServedLikely, Tails

Denominator = Literal["all", "kept"]
"""What the loss is divided by: the number of tokens, or the sum of their weights."""
OVERLAP_POSITIONS, LIKELY_POSITIONS = 256, 4096
"""At most, of an update."""


@dataclass(frozen=True, slots=True)
class Update:
    """What an update measured, over all ranks, tokens in the order of the rollouts."""

    loss: float
    grad_norm: float
    learning_rate: float
    weights: TokenWeights
    scores: TokenScores
    classes: TokenClasses | None
    """What ``scores.kl_choice`` is of."""
    overlap: np.ndarray
    likely: LikelyTokens | None
    """Where the policy sees them."""
    tails: "Tails | None"
    """Of a teacher of which only the likeliest tokens are known."""
    head_compute_saved: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A slice of the update: its rollouts and the span of its tokens in the update."""

    rollouts: Sequence[Rollout]
    tokens: slice
    last: bool
    """Of its rank."""


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
    likely_P: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Sorted positions whose likeliest tokens the policy wants to see."""

    def head_compute_saved(self, student_width: int, teacher_width: int, *, head_is_trained: bool) -> float:
        """The share of the heads' multiply-adds that uniform weights would have cost and this update does not.

        A trained row costs three products of the student's width (forward, and backward to the states and to the head's
        weight), two where the head is not trained (LoRA), and one of the teacher's; a row scored without gradient one
        of each, and so does one whose likeliest tokens are found. Negative where that costs more than dropped rows
        save.
        """
        n_tokens = len(self.watched_T)
        n_trained = int(np.count_nonzero(self.weights.weights))
        n_scored = n_tokens if self.scores is not None else int(np.count_nonzero(self.watched_T))
        n_scored += len(self.likely_P)
        trained_row = (3 if head_is_trained else 2) * student_width + teacher_width
        scored_row = student_width + teacher_width
        return 1.0 - (n_trained * trained_row + n_scored * scored_row) / (n_tokens * trained_row)


def update_student(session: Session, rollouts: Sequence[Rollout], step: int) -> Update:
    """Make one update on ``rollouts`` and return what was measured on the way."""
    before = tails_of(session)
    weighing = weigh(session, rollouts, step)
    require_weight(step, weighing.weights)
    outputs = accumulate_gradients(session, rollouts, weighing, step)
    max_norm = session.config.training.max_grad_norm
    norm = session.layout.clip(session.trainable, max_norm)
    loss = sum((output.loss for output in outputs[1:]), outputs[0].loss)
    numbers = torch.cat([torch.stack([loss, norm]), *(output.overlap for output in outputs)]).cpu()  # one transfer
    own_loss, grad_norm, own_overlap = float(numbers[0]), float(numbers[1]), numbers[2:].float().numpy()
    require_finite(step, own_loss, grad_norm)
    learning_rate = float(session.optimizer.param_groups[0]["lr"])
    session.optimizer.step()
    torch.autograd.graph.increment_version(session.trainable)  # a fused optimizer does not, and a sampler asks for it
    session.layout.follow_masters()
    session.scheduler.step()
    session.optimizer.zero_grad()
    scores = _scores_of_all(session, rollouts, [output.scores for output in outputs])
    now = tails_of(session)
    own_tails = None if now is None or before is None else now - before
    own_likely = [[part.cpu().numpy() for part in output.likely] for output in outputs if output.likely is not None]
    own = (own_loss, own_overlap, own_likely, own_tails)
    losses, overlaps, likely, tails = zip(*gather_object([own]), strict=True)
    w_s_VD, of_teacher = lm_head(session.student).weight_VD, output_head(session.teacher)
    teacher_width = of_teacher.weight_VD.shape[1] if isinstance(of_teacher, LMHead) else 0
    return Update(
        loss=sum(losses),
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        weights=weighing.weights,
        scores=_filled(scores, weighing.scores),
        classes=term_classes(session.policy.term_at(step)),
        overlap=np.concatenate(overlaps),
        likely=_likely_tokens(rollouts, weighing.likely_P, list(chain.from_iterable(likely))),
        tails=None if own_tails is None else reduce(add, tails),
        head_compute_saved=weighing.head_compute_saved(
            w_s_VD.shape[1], teacher_width, head_is_trained=w_s_VD.requires_grad
        ),
    )


# Layout


def micro_batches(rollouts: Sequence[Rollout], size: int, rank: int, num_ranks: int) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches in order."""
    starts = [0, *accumulate(len(rollout.token_ids) for rollout in rollouts)]
    block = rank_blocks(rollouts, num_ranks)[rank]
    for first in block[::size]:
        end = min(first + size, block.stop)
        yield MicroBatch(rollouts[first:end], slice(starts[first], starts[end]), last=end == block.stop)


def rank_blocks(rollouts: Sequence[Rollout], num_ranks: int) -> list[range]:
    """Return which rollouts of an update each rank takes, by their places in it."""
    per_rank = len(rollouts) // num_ranks
    return [range(rank * per_rank, (rank + 1) * per_rank) for rank in range(num_ranks)]


def tokens_per_rank(rollouts: Sequence[Rollout], num_ranks: int) -> list[int]:
    """Return how many response tokens of an update each rank has."""
    blocks = rank_blocks(rollouts, num_ranks)
    return [sum(len(rollouts[place].token_ids) for place in block) for block in blocks]


def token_arrays(rollouts: Sequence[Rollout]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, positions in the response and rollout ids (T,) of all response tokens, rollout after rollout."""
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    return (
        np.concatenate([rollout.token_ids for rollout in rollouts]),
        np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        np.repeat([rollout.rollout_id for rollout in rollouts], lengths),
    )


def numpy_scores(parts: Sequence[TokenScores]) -> TokenScores:
    """Join torch columns, one part after the other, as float32 in numpy; extra columns if there are any.

    A GPU is waited for once, not once per column.
    """
    return _named_scores(parts[0], _score_columns(parts))


def _scores_of_all(session: Session, rollouts: Sequence[Rollout], own: Sequence[TokenScores]) -> TokenScores:
    """Join the torch columns of all ranks' micro-batches, in the order of the rollouts, as float32 in numpy."""
    counts = tokens_per_rank(rollouts, session.accelerator.num_processes)
    return _named_scores(own[0], gather_columns(session.accelerator, _score_columns(own), counts))


def _score_columns(parts: Sequence[TokenScores]) -> torch.Tensor:
    names = [name for name, _ in parts[0].present()]
    return torch.stack([torch.cat([getattr(part, name) for part in parts]).float() for name in names])


def _named_scores(like: TokenScores, table_CT: torch.Tensor) -> TokenScores:
    names = [name for name, _ in like.present()]
    return TokenScores(**dict(zip(names, table_CT.cpu().numpy(), strict=True)))


def concatenated(parts: Sequence[TokenScores]) -> TokenScores:
    """Join numpy columns, one part after the other; extra columns if there are any."""
    names = [name for name, _ in parts[0].present()]
    return TokenScores(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


# Weights


def weigh(session: Session, rollouts: Sequence[Rollout], step: int) -> Weighing:
    """Weigh the tokens of an update, after a scoring pass where the policy needs one."""
    policy, denominator = session.policy, session.config.policy.denominator
    num_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    likely_P = likely_positions(policy, num_tokens, session.config.run.seed, step)
    if policy.needs:
        scores, teacher = _score_update(session, rollouts, policy.term_at(step))
        weights = token_weights(policy, scores, rollouts, denominator, step)
        return Weighing(weights, np.zeros(len(weights.weights), dtype=bool), scores, teacher, likely_P)
    weights = token_weights(policy, None, rollouts, denominator, step)
    watched_T = np.asarray(policy.probe(weights.weights, *token_arrays(rollouts), step)) & (weights.weights == 0)
    return Weighing(weights, watched_T, likely_P=likely_P)


def likely_positions(policy: WeightPolicy, num_tokens: int, seed: int, step: int) -> np.ndarray:
    """Sorted positions of an update where the policy sees what could have been written; ``seed`` is the run's."""
    return sampled_positions(num_tokens, LIKELY_POSITIONS * policy.sees_likely, derive_seed(seed, "likely", step))


def token_weights(
    policy: WeightPolicy,
    scores: TokenScores | None,
    rollouts: Sequence[Rollout],
    denominator: Denominator,
    step: int,
) -> TokenWeights:
    """Weights of a whole update, keyed by the predicted tokens, and the denominator that all its parts share."""
    weights_T = policy(scores, *token_arrays(rollouts), step)
    total = float(np.sum(weights_T, dtype=np.float64)) if denominator == "kept" else float(len(weights_T))
    return TokenWeights(weights_T, total)


def require_weight(step: int, weights: TokenWeights) -> None:
    """Refuse an update in which the policy keeps no token at all."""
    if not float(weights.weights.sum()) > 0:
        raise TrainingStoppedError(
            f"step {step}: the policy gives weight 0 to all {len(weights.weights)} response tokens of the update, so "
            "there is nothing to learn from: freeze fewer tokens, or raise policy.lam, policy.rho or policy.fraction"
        )


@torch.no_grad()
def _score_update(
    session: Session, rollouts: Sequence[Rollout], term: Term | None
) -> tuple[TokenScores, list[TeacherStates]]:
    """Numpy scores of every row of the update, and the teacher's states of this rank's micro-batches."""
    extras = [name for name in EXTRA_COLUMNS if name in session.policy.needs]
    objective = session.accelerator.unwrap_model(session.objective)
    objective.eval()
    parts: list[TokenScores] = []
    teachers: list[TeacherStates] = []
    asked = served_states(session, rollouts)
    for micro in _own_micro_batches(session, rollouts):
        batch = _batch(session, micro)
        with session.accelerator.autocast():
            known = asked[len(teachers)] if asked else None
            teacher = known or teacher_states(session.teacher, batch, session.teacher_stream)
            parts.append(objective.score(batch, teacher, term, extras))
        teachers.append(teacher)
    return _scores_of_all(session, rollouts, parts), teachers


def served_states(session: Session, rollouts: Sequence[Rollout]) -> list[TeacherStates] | None:
    """Ask a served teacher for all of this rank's micro-batches at once, so that the server has enough to do.

    None where the teacher is in memory, and runs when its states are needed.
    """
    if session.config.teacher.engine == "local":
        return None
    batches = [_batch(session, micro) for micro in _own_micro_batches(session, rollouts)]
    return [TeacherStates(h_TE) for h_TE in cast("ServedTeacher", session.teacher).states_of(batches)]


def tails_of(session: Session) -> "Tails | None":
    """Return what this rank knows of the tails of all tokens so far; None of a teacher without."""
    return cast("ServedLikely", session.teacher).tails if session.config.teacher.is_top_k else None


# Gradient


def accumulate_gradients(
    session: Session, rollouts: Sequence[Rollout], weighing: Weighing, step: int
) -> list[ObjectiveOutput]:
    """Leave the gradient of the whole update's loss on the parameters; the outputs are this rank's, detached."""
    accelerator, seed, term = session.accelerator, session.config.run.seed, session.policy.term_at(step)
    overlap_P = sampled_positions(len(weighing.watched_T), OVERLAP_POSITIONS, derive_seed(seed, "overlap", step))
    torch.manual_seed(derive_seed(seed, "dropout", step, accelerator.process_index))
    session.objective.train()
    outputs: list[ObjectiveOutput] = []
    teachers = weighing.teacher_states or served_states(session, rollouts)
    for micro in _own_micro_batches(session, rollouts):
        known = teachers[len(outputs)] if teachers else None
        with session.layout.accumulating(session.objective, is_last=micro.last):
            output = _forward(session, micro, weighing, term, known, overlap_P)
            accelerator.backward(output.loss * accelerator.num_processes)
        outputs.append(output._replace(loss=output.loss.detach()))
    return outputs


def sampled_positions(num_tokens: int, most: int, seed: int) -> np.ndarray:
    """Sorted token positions of the update, ``most`` of them by chance, or all if there are no more."""
    chosen = np.random.default_rng(seed).choice(num_tokens, min(most, num_tokens), replace=False)
    return np.sort(chosen)


def require_finite(step: int, loss: float, grad_norm: float) -> None:
    """Refuse to update the weights with a loss or gradient that is NaN or infinite."""
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            from_here = "start a new run from the last checkpoint (models.student = its directory) with a lower"
            remedy = f"{from_here} training.learning_rate" if step else "use models whose weights are sound"
            raise NonFiniteLossError(f"step {step}: the {name} is {value}: {remedy}")


def _own_micro_batches(session: Session, rollouts: Sequence[Rollout]) -> Iterator[MicroBatch]:
    accelerator, size = session.accelerator, session.config.training.per_device_train_batch_size
    return micro_batches(rollouts, size, accelerator.process_index, accelerator.num_processes)


def _batch(session: Session, micro: MicroBatch) -> RolloutBatch:
    device, one_group = session.accelerator.device, session.layout.one_group
    return collate(micro.rollouts, session.pad_id, device, one_group=one_group)


def _forward(
    session: Session,
    micro: MicroBatch,
    weighing: Weighing,
    term: Term | None,
    known: TeacherStates | None,
    overlap_P: np.ndarray,
) -> ObjectiveOutput:
    """Teacher without gradient unless its states are known, student with, both under the same autocast."""
    device, batch = session.accelerator.device, _batch(session, micro)
    here, weights = micro.tokens, weighing.weights
    overlap_P, likely_P = (
        places[(places >= here.start) & (places < here.stop)] - here.start for places in (overlap_P, weighing.likely_P)
    )
    with session.accelerator.autocast():
        return session.objective(
            batch,
            known or teacher_states(session.teacher, batch, session.teacher_stream),
            weights.weights[here],
            weights.denominator,
            term,
            sent(np.flatnonzero(weighing.watched_T[here]), device),
            sent(overlap_P, device),
            sent(likely_P, device),
        )


def _likely_tokens(
    rollouts: Sequence[Rollout], likely_P: np.ndarray, parts: Sequence[Sequence[np.ndarray]]
) -> LikelyTokens | None:
    """Join what the micro-batches of all ranks found at ``likely_P``, in this order."""
    if not len(likely_P):
        return None
    ids_P2K, logp_P2K = (np.concatenate(column) for column in zip(*parts, strict=True))
    return LikelyTokens(token_arrays(rollouts)[2][likely_P], ids_P2K, logp_P2K)


def _filled(scores: TokenScores, known: TokenScores | None) -> TokenScores:
    """The scores, those of ``known`` where there are none; its extra columns too."""
    if known is None:
        return scores
    columns = {name: np.where(np.isnan(own_T), getattr(known, name), own_T) for name, own_T in scores.present()}
    return replace(known, **columns)
