"""Replay: score one probe set of rollouts under several checkpoints, without training (docs/method.md, section 3).

1. The checkpoints are those of the run, or any list of student directories or hub ids, oldest first.
2. One of them writes the probe rollouts (the last, by default); they are stored, and a resumed replay reads them back.
3. Every checkpoint scores the same rollouts, ``rollouts_per_part`` to a part. The teacher sees them once; checkpoints
   go through one model, the next being read while the present one scores; parts are written meanwhile.
4. Parts that are committed are not made again, so a killed replay continues where it was and ends with the same bytes.

Nothing is written before the checkpoints are found and verified, and the teacher and the student that writes the first
probe loaded.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from rocktokens.config import Config, checkpoint_steps
from rocktokens.errors import ConfigError, NonFiniteLossError, RunDirError
from rocktokens.models.fingerprints import same_tokenizer
from rocktokens.models.load import LoadedModel, load_model
from rocktokens.progress import SILENT, Advance, Progress
from rocktokens.replay.checkpoint_swap import Students
from rocktokens.replay.record import begin_record, has_replay, replay_settings, require_same_replay, require_vocabulary
from rocktokens.rollouts.encode import Sampling, make_rollouts
from rocktokens.rollouts.sampler import make_sampler
from rocktokens.rollouts.store import read_rollouts, write_rollouts
from rocktokens.run_dir import RunDir, derive_seed, require_as_listed
from rocktokens.scoring.score import PendingScores, score_pass
from rocktokens.scoring.teacher_pass import StatesRoom, TeacherPass
from rocktokens.scoring.top_tokens import TopTokens
from rocktokens.tasks import make_task
from rocktokens.traces.schema import trace_table
from rocktokens.traces.writer import TraceWriter, WriteBehind
from rocktokens.types import Rollout


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a finished replay covers; its rows are the traces of the run."""

    directory: str
    checkpoints: list[int]
    """Steps, oldest first."""
    rollouts: int
    """Different ones, over all probes."""
    tokens: int
    """Response tokens of these rollouts."""

    def to_record(self) -> dict[str, Any]:
        """The result as plain numbers, strings and lists."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A student to replay through: the number its traces are filed under, and what to load."""

    step: int
    model: str


@dataclass(frozen=True, slots=True)
class Probe:
    """A set of rollouts: the checkpoint that writes it, and those that score it."""

    writer: Checkpoint
    scored_by: list[Checkpoint]

    @property
    def file(self) -> str:
        """Where its rollouts are, relative to the run."""
        return f"rollouts/probe/checkpoint={self.writer.step}.parquet"


@dataclass(frozen=True, slots=True)
class Part:
    """Rollouts whose scores are committed together, and what is known of them under the teacher."""

    teacher_pass: TeacherPass
    tops: TopTokens | None
    """None where the likeliest tokens are not kept."""


@dataclass(frozen=True, slots=True)
class ReplaySession:
    """A replay in progress: the run, what is replayed through what, and who is told."""

    run: RunDir
    config: Config
    checkpoints: list[Checkpoint]
    teacher: LoadedModel
    students: Students
    progress: Progress = SILENT


def replay(config: Config, *, restart: bool = False, progress: Progress = SILENT) -> Replayed:
    """Score the probe set of ``config.trace`` under every checkpoint and commit the traces.

    ``trace.checkpoints`` names students of your own. With ``restart`` a replay that is there is dropped; otherwise it
    is continued, or refused if its settings were others.
    """
    run = RunDir(config.run.directory)
    with ExitStack() as stack:
        if run.exists():
            stack.enter_context(run.lock())
        checkpoints = find_checkpoints(run, config)
        settings = replay_settings(run, config, {checkpoint.step: checkpoint.model for checkpoint in checkpoints})
        if not restart:
            require_same_replay(run, settings)
        with progress.status("loading"):
            for checkpoint in checkpoints:
                require_as_listed(checkpoint.model)
            teacher = load_model(config.models.teacher, config.models.dtype, config.models.device)
        require_vocabulary(run, teacher)
        students = stack.enter_context(open_students(config, teacher))
        session = ReplaySession(run, config, checkpoints, teacher, students, progress)
        if restart or not has_replay(run):
            probe = probes(config, checkpoints)[0]
            student = students.get(probe.writer.model)  # loads before anything is replaced
            stack.enter_context(run.lock())
            begin_record(run, config, teacher, settings)
            _write_probe(session, probe, student)
        stack.enter_context(run.lock())
        rollouts, tokens = score_probes(session)
    return Replayed(str(run.path), [checkpoint.step for checkpoint in checkpoints], rollouts, tokens)


def is_replayed(config: Config) -> bool:
    """Whether every checkpoint of the config has scored its whole probe; refused where another replay is there."""
    run = RunDir(config.run.directory)
    checkpoints = find_checkpoints(run, config)
    settings = replay_settings(run, config, {checkpoint.step: checkpoint.model for checkpoint in checkpoints})
    require_same_replay(run, settings)
    for probe in probes(config, checkpoints):
        rollouts = sum(entry.rows for entry in run.files(probe.file))
        parts = math.ceil(rollouts / config.trace.rollouts_per_part)
        if not rollouts or any(TraceWriter(run, checkpoint=own.step).parts < parts for own in probe.scored_by):
            return False
    return True


def find_checkpoints(run: RunDir, config: Config) -> list[Checkpoint]:
    """The checkpoints to replay through, oldest first."""
    if not config.trace.checkpoints:
        steps = run.checkpoints()
        if not steps:
            raise RunDirError(
                f"{run.path} has no checkpoints: run `rocktokens distill` first, or list students in trace.checkpoints"
            )
        return [Checkpoint(step, str(run.checkpoint(step))) for step in steps]
    steps = checkpoint_steps(config.trace.checkpoints)
    if steps != sorted(set(steps)):
        raise ConfigError(f"trace.checkpoints has the steps {steps}: list each checkpoint once, oldest first")
    return [Checkpoint(step, name) for step, name in zip(steps, config.trace.checkpoints, strict=True)]


def probes(config: Config, checkpoints: list[Checkpoint]) -> list[Probe]:
    """The sets of rollouts to replay, in the order of the checkpoints that score them."""
    if config.trace.probe == "each":
        return [Probe(checkpoint, [checkpoint]) for checkpoint in checkpoints]
    return [Probe({"last": checkpoints[-1], "first": checkpoints[0]}[config.trace.probe], checkpoints)]


def open_students(config: Config, teacher: LoadedModel) -> Students:
    """What gives the students, each of which must share the teacher's tokenizer."""

    def load(name: str) -> LoadedModel:
        student = load_model(name, config.models.dtype, config.models.device)
        same_tokenizer(student.tokenizer, teacher.tokenizer)
        return student

    return Students(load)


def score_probes(session: ReplaySession) -> tuple[int, int]:
    """Score every probe under its checkpoints; how many different rollouts that were, and their tokens."""
    lengths: list[int] = []
    following = dict(pairwise(session.checkpoints))
    first, *others = probes(session.config, session.checkpoints)
    rollouts = _rollouts(session, first)
    bar = session.progress.bar("replaying", len(rollouts) * len(session.checkpoints))
    with bar as advance, WriteBehind() as behind:
        for probe in (first, *others):
            if probe is not first:
                rollouts = _rollouts(session, probe)
            lengths += [len(rollout.token_ids) for rollout in rollouts]
            parts = _parts(session, probe, rollouts)
            for checkpoint in probe.scored_by:
                _score_under(session, checkpoint, following.get(checkpoint), parts, behind, advance)
    return len(lengths), sum(lengths)


def _rollouts(session: ReplaySession, probe: Probe) -> list[Rollout]:
    """What the probe's writer answers the probe prompts with, written if it is not there yet."""
    if not session.run.files(probe.file):
        _write_probe(session, probe, session.students.get(probe.writer.model))
    return read_rollouts(session.run, probe.file)


def _write_probe(session: ReplaySession, probe: Probe, student: LoadedModel) -> None:
    config, writer = session.config, probe.writer
    prompts = make_task(config.task).prompts(config.trace.num_prompts, derive_seed(config.run.seed, "probe prompts"))
    count = len(prompts) * config.trace.num_generations
    with session.progress.bar(f"writing the probe with checkpoint {writer.step}", count) as advance:
        rollouts = make_rollouts(
            make_sampler(config, student, session.teacher),
            student.tokenizer,
            prompts,
            Sampling.of(config.rollouts, derive_seed(config.run.seed, "probe")),
            num_generations=config.trace.num_generations,
            policy_step=writer.step,
            first_rollout_id=count * session.checkpoints.index(writer) if config.trace.probe == "each" else 0,
            on_done=advance,
        )
    write_rollouts(session.run, probe.file, rollouts)


def _parts(session: ReplaySession, probe: Probe, rollouts: list[Rollout]) -> list[Part]:
    """What the teacher computes is kept only where more than one checkpoint needs it."""
    trace, scoring = session.config.trace, session.config.scoring
    size, room = trace.rollouts_per_part, StatesRoom() if len(probe.scored_by) > 1 else None
    return [
        Part(
            TeacherPass(session.teacher, rollouts[first : first + size], scoring.tokens_per_batch, room),
            TopTokens(trace.top_k, scoring.temperature, scoring.tokens_per_chunk, room) if trace.top_k else None,
        )
        for first in range(0, len(rollouts), size)
    ]


def _score_under(
    session: ReplaySession,
    checkpoint: Checkpoint,
    following: Checkpoint | None,
    parts: list[Part],
    behind: WriteBehind,
    advance: Advance,
) -> None:
    """Score all rollouts under one checkpoint, a part at a time, passing over parts that are committed."""
    done = TraceWriter(session.run, checkpoint=checkpoint.step).parts
    advance(sum(len(part.teacher_pass.rollouts) for part in parts[:done]))
    if done >= len(parts):
        return
    student, scoring = session.students.get(checkpoint.model), session.config.scoring
    if following is not None:
        session.students.read_ahead(following.model)
    for part in parts[done:]:
        with _naming(checkpoint.step, part.teacher_pass.rollouts):
            scores = score_pass(
                student,
                part.teacher_pass,
                divergence=scoring.divergence,
                temperature=scoring.temperature,
                tokens_per_chunk=scoring.tokens_per_chunk,
                on_done=advance,
                tops=part.tops,
            )
        behind.put(partial(_write_part, session.run, checkpoint.step, part.teacher_pass.rollouts, scores))


def _write_part(run: RunDir, step: int, rollouts: Sequence[Rollout], scores: PendingScores) -> None:
    """Commit the scores of some rollouts as one part.

    The number of parts tells how many rollouts are done, so the writer may not cut them by rows.
    """
    with _naming(step, rollouts):
        table = trace_table(rollouts, scores.wait(), tops=scores.wait_tops())
    with TraceWriter(run, checkpoint=step, rows_per_part=sys.maxsize) as traces:
        traces.append(table)


@contextmanager
def _naming(step: int, rollouts: Sequence[Rollout]) -> Iterator[None]:
    """Add the checkpoint and the part to an error about scores, which come from where neither is known."""
    try:
        yield
    except NonFiniteLossError as error:
        part = f"rollouts {rollouts[0].rollout_id} to {rollouts[-1].rollout_id}"
        raise NonFiniteLossError(f"checkpoint {step}, {part}: {error}") from error
