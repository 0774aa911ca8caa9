"""On-policy distillation (docs/method.md, section 7): THE loop, read top to bottom.

Step N starts with the student after N updates:
1. The student answers the prompts of the step. The rollouts are stored before they are trained on; a resumed run reads
   them back instead of sampling them again.
2. The policy weighs every response token, by its scores if it needs them; the loss's denominator covers the whole
   update. Teacher and student forward, weighted divergence, backward, clip, optimizer and scheduler (``step.py``).
3. The policy sees what the update measured, and may remember it: its memory is part of the checkpoint.
4. Trace rows from that same forward, one log line, and every ``save_steps`` a checkpoint, written by a thread while
   the next steps are made: one at a time, from a copy of all tensors.

Every process computes; the main one alone writes, under the lock of the run. Only where the rows of a step fill a part
of the trace does every process write its own, which the main one then lists.

A signal to stop (``interrupts.py``) is obeyed after the step, with a checkpoint: all processes agree on the step. The
run goes on from there, and the next regular checkpoint takes the place of that one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, cast

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from rocktokens.config import Config
from rocktokens.interrupts import HeldSignal, held_signals
from rocktokens.progress import SILENT, Progress
from rocktokens.rollouts.encode import Sampling, make_rollouts
from rocktokens.rollouts.store import read_rollouts, write_rollouts
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.scoring.teachers import note_teacher
from rocktokens.tasks import make_task
from rocktokens.traces.schema import trace_table
from rocktokens.traces.writer import ROWS_PER_PART, TraceWriter, WriteBehind, write_loose
from rocktokens.training.checkpoint import (
    TrainerState,
    begin_checkpoint,
    begin_run,
    finish_checkpoint,
    load_trainer_state,
    open_run,
)
from rocktokens.training.gather import gather_rollouts
from rocktokens.training.length import change_length, describe_change, in_steps, recorded_steps
from rocktokens.training.log import (
    LengthWatch,
    PhaseClock,
    append_log,
    cut_log,
    naming_step,
    step_record,
    truncated_share,
)
from rocktokens.training.retention import STOPPED, note_stop, retain
from rocktokens.training.session import Session, global_batch, make_accelerator, make_session, prompts_per_step
from rocktokens.training.step import Update, rank_blocks, token_arrays, tokens_per_rank, update_student
from rocktokens.types import Rollout, TokenScores

OnStep = Callable[[int, int, dict[str, Any]], None]
"""Told after every step how many are made, of how many, and the log record."""
STOPPING = "stopping after this step, with a checkpoint; a second signal stops at once"
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Where a finished run is and how much it took."""

    directory: Path
    checkpoint: Path
    steps: int
    tokens_seen: int
    """Response tokens trained on."""
    already_complete: bool
    """True when there was nothing left to do."""

    def to_record(self) -> dict[str, Any]:
        """The result as plain numbers and strings."""
        return asdict(self) | {"directory": str(self.directory), "checkpoint": str(self.checkpoint)}


def distill(
    config: Config, *, resume: bool = False, progress: Progress = SILENT, on_step: OnStep | None = None
) -> TrainingResult:
    """Train the student of ``config`` to its last step and leave a complete run directory.

    Args:
        config: The whole configuration; everything random derives from ``run.seed``.
        resume: Continue the run in ``run.directory`` from its latest checkpoint, or start it if there is none. A
            finished run goes on where the config is longer than it was (``length.py``).
        progress: Shown a bar over the steps, and a line at every checkpoint.
        on_step: Called on the main process after every step with (steps made, steps in all, log record).
    """
    accelerator = make_accelerator(config)
    task = make_task(config.task)
    config = in_steps(config, task, prompts_per_step(config, accelerator.num_processes))
    run = RunDir(config.run.directory)
    lock = run.lock() if accelerator.is_main_process else nullcontext()
    with lock, _reporting(config, progress, on_step) as report:
        done = _from_main(accelerator, lambda: open_run(run, config, accelerator.num_processes, resume=resume))
        if done is not None and accelerator.is_main_process:
            retain(run, done, config.training.save_total_limit)
        checkpoint = None if done is None else run.verified_checkpoint(done)
        state = None if checkpoint is None else load_trainer_state(checkpoint)
        left = config.training.max_steps - (done or 0)
        former = _from_main(accelerator, lambda: recorded_steps(run))
        if state is None or left or former != config.training.max_steps:
            session = make_session(config, task, accelerator, checkpoint, state)
            if accelerator.is_main_process:
                _make_ready(session, run, state, former, progress)
            with held_signals(lambda: progress.note(STOPPING) if accelerator.is_main_process else None) as held:
                state = _train(session, run, state, report, held)
                accelerator.wait_for_everyone()  # the main process may still be writing
                if held.number is not None and accelerator.is_main_process:
                    with suppress(Exception, SystemExit):  # who reads it may have got the same signal
                        progress.note(
                            f"stopped after {state.step} steps: the checkpoint of step {state.step} is written"
                        )
    return TrainingResult(run.path, run.checkpoint(state.step), state.step, state.tokens_seen, not left)


def _train(session: Session, run: RunDir, state: TrainerState | None, report: OnStep, held: HeldSignal) -> TrainerState:
    """Make the steps that are left, or those until a signal, and return the state after the last."""
    config, total = session.config, session.config.training.max_steps
    clock = PhaseClock()
    is_traced = config.training.trace and session.accelerator.is_main_process
    writer = TraceWriter(run, source="training") if is_traced else nullcontext()
    with _tracking(session), writer as traces, WriteBehind(waiting=1) as behind:
        if traces is not None:
            traces.drop_loose()
        if state is None:
            state = TrainerState(0, 0, 0, 0, session.scheduler.state_dict())
            _save(session, run, state, traces, behind)
        watch = LengthWatch(config.training.max_truncated_share, state.truncated_streak)
        first = state.step
        for step in range(first, total):
            with clock.phase("sample"), naming_step(step, config.models):
                rollouts, is_reused = _rollouts_of_step(session, run, step)
            watch.observe(step, truncated_share(rollouts))
            with clock.phase("update"), naming_step(step, config.models):
                update = update_student(session, rollouts, step)
                observed = session.policy.observe(update.scores, token_arrays(rollouts)[0], step)
                if update.likely is not None:
                    observed |= session.policy.observe_likely(update.likely, step)
            state = TrainerState(
                step=step + 1,
                tokens_seen=state.tokens_seen + len(update.scores.kl),
                trace_parts=state.trace_parts,
                truncated_streak=watch.streak,
                scheduler=session.scheduler.state_dict(),
            )
            if config.training.trace:
                with clock.phase("write"):
                    _write_rows(session, run, traces, rollouts, update)
            if step == first:
                behind.put(session.layout.room_for_full_state(session.student, session.optimizer))
            if session.accelerator.is_main_process:
                record = step_record(step, rollouts, update, clock.read(), config.scoring.temperature) | observed
                record |= {"rollouts_reused": True} if is_reused else {}  # seconds_sample is then that of reading
                if session.task.size is not None:
                    record["epoch"] = state.step * len(rollouts) / (session.task.size * config.rollouts.num_generations)
                append_log(run, record)
                session.accelerator.log(record, step=step)
                report(state.step, total, record)
            is_stopping = _agree_to_stop(held)
            is_due = state.step == total or state.step % config.training.save_steps == 0
            if is_due or is_stopping:
                with clock.phase("write"):
                    state = _save(session, run, state, traces, behind, is_due=is_due)
            behind.require_sound()
            if is_stopping:
                break
        return state


def _agree_to_stop(held: HeldSignal) -> bool:
    """Whether a signal has come to any process by now; then it has come to all. One that comes meanwhile is kept."""
    told = next(filter(None, gather_object([held.number])), None)
    if told is not None:
        held.number = told
    return told is not None


@contextmanager
def _reporting(config: Config, progress: Progress, on_step: OnStep | None) -> Iterator[OnStep]:
    """Show steps on a bar, checkpoints as lines, and pass every step on."""
    total, made = config.training.max_steps, 0
    with progress.bar("distilling", total) as advance:

        def report(step: int, total: int, record: dict[str, Any]) -> None:
            nonlocal made
            advance(step - made)
            made = step
            if step == 1 or step % config.training.save_steps == 0:
                epoch = f" (epoch {record['epoch']:.2f})" if "epoch" in record else ""
                length = f"{record['response_length']:.0f} tokens per response"
                progress.note(f"step {step}{epoch}: kl {record['kl']:.3f}, {length}")
            if on_step is not None:
                on_step(step, total, record)

        yield report
        advance(total - made)


def _make_ready(
    session: Session, run: RunDir, state: TrainerState | None, former: int | None, progress: Progress
) -> None:
    """Describe a new run, or the new length of one; drop the trace parts and log lines of steps that are made again.

    Rollouts of those steps stay and are trained on again, so that the result is that of an uninterrupted run: byte for
    byte on a CPU, up to rounding on a GPU, whose attention adds up in no fixed order.
    """
    if state is None:
        begin_run(run, session.config, session.tokenizer, session.accelerator.num_processes)
        if session.task.revision is not None:
            run.update_manifest(task_revision=session.task.revision)
    elif former is not None and former != session.config.training.max_steps:
        progress.note(describe_change(session.config, former, state.step))
        change_length(run, session.config, state.step)
        if run.manifest().get(STOPPED) is not None:  # the step at which a length changes keeps its checkpoint
            run.update_manifest(**{STOPPED: None})
    note_teacher(session.teacher, run, session.config)
    if session.layout.summary is not None:
        progress.note(session.layout.summary)
    step, parts = (state.step, state.trace_parts) if state else (0, 0)
    run.drop([entry.path for entry in run.files("traces/training/")][parts:])
    if lost := cut_log(run, step):
        progress.note(f"{run.logs} has {lost} damaged or missing lines of steps before {step}: they are left out")


def _rollouts_of_step(session: Session, run: RunDir, step: int) -> tuple[list[Rollout], bool]:
    """The rollouts of all processes, and whether they are stored ones that an earlier attempt at this step left."""
    relative = f"rollouts/training/step-{step}.parquet"
    accelerator = session.accelerator
    if _from_main(accelerator, lambda: run.lists(relative)):
        return read_rollouts(run, relative), True
    rollouts = gather_rollouts(accelerator, _sample_share(session, step))
    if accelerator.is_main_process:
        write_rollouts(run, relative, rollouts)
    return rollouts, False


def _sample_share(session: Session, step: int) -> list[Rollout]:
    """The student's answers to this process's share of the step's prompts, a contiguous one."""
    config, accelerator = session.config, session.accelerator
    size, count = (own(config, accelerator.num_processes) for own in (global_batch, prompts_per_step))
    prompts = session.task.batch(step, count, derive_seed(config.run.seed, "prompts"))
    rank, ranks = accelerator.process_index, accelerator.num_processes
    return make_rollouts(
        session.sampler,
        session.tokenizer,
        prompts,
        Sampling.of(config.rollouts, derive_seed(config.run.seed, "rollouts", step)),
        num_generations=config.rollouts.num_generations,
        policy_step=step,
        first_rollout_id=step * size,
        share=range(len(prompts) * rank // ranks, len(prompts) * (rank + 1) // ranks),
    )


def _write_rows(
    session: Session, run: RunDir, traces: TraceWriter | None, rollouts: list[Rollout], update: Update
) -> None:
    """Add the rows of a step to the trace: the main process all of them, or each its own where they fill a part."""
    scores, weights = update.scores, update.weights.weights
    labels = {"classes": update.classes, "served": session.config.teacher.label}
    accelerator, ranks = session.accelerator, session.accelerator.num_processes
    if ranks == 1 or len(weights) < ROWS_PER_PART:
        if traces is not None:
            traces.append(trace_table(rollouts, scores, weights, **labels))
        return
    block, rank = rank_blocks(rollouts, ranks)[accelerator.process_index], accelerator.process_index
    ends = [0, *accumulate(tokens_per_rank(rollouts, ranks))]
    here = slice(ends[rank], ends[rank + 1])
    own_scores = TokenScores(**{name: column_T[here] for name, column_T in scores.present()})
    own = trace_table(rollouts[block.start : block.stop], own_scores, weights[here], **labels)
    loose = gather_object(write_loose(run, own, ROWS_PER_PART))
    if traces is not None:
        traces.adopt(loose)


def _save(
    session: Session,
    run: RunDir,
    state: TrainerState,
    traces: TraceWriter | None,
    behind: WriteBehind,
    *,
    is_due: bool = True,
) -> TrainerState:
    """Commit the trace rows so far, then have the checkpoint that counts them written, after the one before it."""
    behind.wait()
    if traces is not None:
        traces.flush()
        state = replace(state, trace_parts=traces.parts)
    full = session.layout.full_state(session.student, session.optimizer)
    if full is not None:
        note_stop(run, state.step, is_due=is_due)
        begin_checkpoint(run, state, session.tokenizer, session.policy.state())
        limit = session.config.training.save_total_limit

        def finish(step: int = state.step) -> None:
            finish_checkpoint(run, step, session.student, full)
            retain(run, step, limit)

        behind.put(finish)
    return state


@contextmanager
def _tracking(session: Session) -> Iterator[None]:
    """Trackers of ``training.report_to``, closed however the run ends."""
    settings = session.config.model_dump(mode="json")
    flat = {f"{section}.{key}": str(value) for section, table in settings.items() for key, value in table.items()}
    session.accelerator.init_trackers("rocktokens", config=flat)
    try:
        yield
    finally:
        for tracker in session.accelerator.trackers:
            tracker.finish()


def _from_main(accelerator: Accelerator, make: Callable[[], Value]) -> Value:
    """A value made on the main process and sent to the others."""
    return cast(Value, broadcast_object_list([make() if accelerator.is_main_process else None])[0])
