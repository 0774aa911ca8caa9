"""Replay: score one probe set of rollouts under several checkpoints, without training (docs/method.md, section 3).

1. The checkpoints are those of the run, or any list of student directories or hub ids, oldest first.
2. One of them writes the probe rollouts (the last, by default); they are stored, and a resumed replay reads them back.
3. Every checkpoint scores the same rollouts, ``rollouts_per_part`` to a part. The teacher sees them once; checkpoints
   go through one model, the next being read while the present one scores; parts are written meanwhile.
4. Parts that are committed are not made again, so a killed replay continues where it was and ends with the same bytes.
5. With classes of tokens (``trace.classes``) every token's choice within them is scored in the same pass. Classes are
   usually found after the replay: then the last checkpoint alone is scored again, and its parts get the column
   ``kl_choice`` and keep the others. Parts that have it of these classes are passed over, so that resumes too.

Nothing is written, and no replay that is there is dropped, before the prompts are read, the checkpoints found and
verified, their tokenizers compared, the teacher loaded, and the first probe answered.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rocktokens.classes import TokenClasses
from rocktokens.config import Config, checkpoint_label, checkpoint_names, checkpoint_steps, traced_students
from rocktokens.errors import ConfigError, NonFiniteLossError, RunDirError, TokenizerMismatchError
from rocktokens.models.fingerprints import same_tokenizer, vocabulary_sha256
from rocktokens.models.head import output_head, require_known_head
from rocktokens.models.load import LoadedModel, load_model, load_tokenizer
from rocktokens.models.projections import lay_side_by_side
from rocktokens.progress import SILENT, Advance, Progress
from rocktokens.replay.checkpoint_swap import Students
from rocktokens.replay.record import (
    begin_record,
    has_replay,
    lacks_checkpoints,
    replay_settings,
    require_same_replay,
    require_vocabulary,
)
from rocktokens.rollouts.encode import Sampling, encode_prompts, make_rollouts
from rocktokens.rollouts.sampler import make_sampler
from rocktokens.rollouts.store import read_rollouts, write_rollouts
from rocktokens.run_dir import RunDir, derive_seed, require_as_listed
from rocktokens.scoring.score import PendingScores, score_pass
from rocktokens.scoring.teacher_pass import StatesRoom, TeacherPass
from rocktokens.scoring.teachers import load_teacher, note_tails, note_teacher, require_noted
from rocktokens.scoring.top_tokens import TopTokens
from rocktokens.tasks import make_task
from rocktokens.tasks.base import Task
from rocktokens.traces.schema import TraceError, trace_table
from rocktokens.traces.writer import TraceWriter, WriteBehind, add_choice, part_classes, parts_folder
from rocktokens.types import Prompt, Rollout


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
    label: str
    """Its number, and beside it the name it has."""


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
    classes: TokenClasses | None = None
    """Whose choice is scored too."""
    progress: Progress = SILENT


def replay(config: Config, *, restart: bool = False, progress: Progress = SILENT) -> Replayed:
    """Score the probe set of ``config.trace`` under every checkpoint and commit the traces.

    ``trace.checkpoints`` names students of your own. With ``restart`` a replay that is there is dropped; otherwise it
    is continued, or refused if its settings were others. One that is finished may have been made with other classes of
    ``trace.classes``, or none: its last checkpoint gets the choice within those of now.
    """
    run, classes = RunDir(config.run.directory), traced_classes(config)
    with ExitStack() as stack:
        run.require_new(beside=("checkpoints", "tokenizer"))
        if run.exists():
            stack.enter_context(run.lock())
        checkpoints = find_checkpoints(run, config)
        students_by_step = {checkpoint.step: checkpoint.model for checkpoint in checkpoints}
        settings = replay_settings(run, config, students_by_step, classes)
        if not restart:
            require_same_replay(run, settings, is_whole=_is_whole(run, config, checkpoints))
        is_new = restart or not has_replay(run)
        if is_new:
            _probe_prompts(config, make_task(config.task))  # what cannot be read is refused before models load
        with progress.status("loading"):
            for checkpoint in checkpoints:
                require_as_listed(checkpoint.model)
            teacher = load_teacher(config, config.models.device)
        require_vocabulary(run, teacher)
        require_known_head(teacher.model)
        require_noted(teacher.model, run, config)
        for name in config.trace.checkpoints:
            _require_tokenizer(name, teacher)
        if classes is not None:
            classes.require_tokenizer(vocabulary_sha256(teacher.tokenizer.get_vocab()))
            classes.require_width(output_head(teacher.model).width)
        students = stack.enter_context(open_students(config, teacher))
        session = ReplaySession(run, config, checkpoints, teacher, students, classes, progress)
        if is_new:
            probe = probes(config, checkpoints)[0]
            student = students.get(probe.writer.model)  # loads before there is a folder
            task = make_task(config.task)
            encode_prompts(student.tokenizer, _probe_prompts(config, task), config.rollouts)
            stack.enter_context(run.lock())
            rollouts = _answer_probe(session, probe, student)  # before anything is replaced
            begin_record(run, config, teacher, settings)
            write_rollouts(run, probe.file, rollouts)
            if task.revision is not None:
                run.update_manifest(task_revision=task.revision)
        stack.enter_context(run.lock())
        note_teacher(teacher.model, run, config)
        rollouts, tokens = score_probes(session)
        if classes is not None:
            _add_choice(session, classes)
    note_tails(teacher.model, config, progress)
    steps = [checkpoint.step for checkpoint in checkpoints]
    return Replayed(str(run.path), steps, rollouts, tokens)


def is_outgrown(config: Config) -> bool:
    """Whether the run was trained further after its replay, whose probe is then not that of the last student."""
    run = RunDir(config.run.directory)
    students = traced_students(run, config)
    settings = replay_settings(run, config, students, traced_classes(config))
    return not config.trace.checkpoints and lacks_checkpoints(run, settings)


def is_replayed(config: Config) -> bool:
    """Whether every checkpoint of the config has scored its whole probe; refused where another replay is there."""
    run, classes = RunDir(config.run.directory), traced_classes(config)
    checkpoints = find_checkpoints(run, config)
    students_by_step = {checkpoint.step: checkpoint.model for checkpoint in checkpoints}
    is_whole = _is_whole(run, config, checkpoints)
    require_same_replay(run, replay_settings(run, config, students_by_step, classes), is_whole=is_whole)
    return is_whole and (classes is None or not _without_choice(run, checkpoints[-1], classes))


def traced_classes(config: Config) -> TokenClasses | None:
    """The classes of ``trace.classes`` that bans have not refuted; refused where there is nothing to choose among."""
    if config.trace.classes is None:
        return None
    classes = TokenClasses.load(config.trace.classes)
    if not classes.unrefuted.groups:
        why = "only classes that bans have refuted" if classes.groups else "no class of two tokens"
        raise ConfigError(
            f"trace.classes = {config.trace.classes!r} has {why}, so there is no choice to score: give other classes, "
            "or leave it out"
        )
    return classes.unrefuted


def _is_whole(run: RunDir, config: Config, checkpoints: list[Checkpoint]) -> bool:
    """Whether every probe is there and every checkpoint that scores it has all its parts."""
    for probe in probes(config, checkpoints):
        rollouts = sum(entry.rows for entry in run.files(probe.file))
        parts = math.ceil(rollouts / config.trace.rollouts_per_part)
        if not rollouts or any(TraceWriter(run, checkpoint=own.step).parts < parts for own in probe.scored_by):
            return False
    return True


def find_checkpoints(run: RunDir, config: Config) -> list[Checkpoint]:
    """The checkpoints to replay through, oldest first."""
    students, listed = traced_students(run, config), config.trace.checkpoints
    if not students:
        raise RunDirError(
            f"{run.path} has no checkpoints: run `rocktokens distill` first, or list students in trace.checkpoints"
        )
    steps = checkpoint_steps(listed)
    if steps != sorted(set(steps)):
        raise ConfigError(f"trace.checkpoints has the steps {steps}: list each checkpoint once, oldest first")
    for name in listed:
        _require_folder(name)
        if sum(own.rstrip("/") == name.rstrip("/") for own in listed) > 1:
            raise ConfigError(f"trace.checkpoints has {name!r} twice: list each checkpoint once, oldest first")
    names = checkpoint_names(config)
    return [Checkpoint(step, model, checkpoint_label(step, names)) for step, model in students.items()]


def _require_folder(name: str) -> None:
    """Refuse a file, and a folder that is not there in one that is: neither is meant as a hub id."""
    path = Path(name)
    if not path.is_dir() and (path.exists() or (path.parent != Path() and path.parent.is_dir())):
        what = "is a file" if path.exists() else "does not exist"
        raise ConfigError(f"trace.checkpoints has {name!r}, which {what}: give folders of saved models, or hub ids")


def probes(config: Config, checkpoints: list[Checkpoint]) -> list[Probe]:
    """The sets of rollouts to replay, in the order of the checkpoints that score them."""
    if config.trace.probe == "each":
        return [Probe(checkpoint, [checkpoint]) for checkpoint in checkpoints]
    return [Probe({"last": checkpoints[-1], "first": checkpoints[0]}[config.trace.probe], checkpoints)]


def open_students(config: Config, teacher: LoadedModel) -> Students:
    """What gives the students, each of which must share the teacher's tokenizer."""

    def load(name: str) -> LoadedModel:
        student = load_model(name, config.models.dtype, config.models.device)
        lay_side_by_side(student.model)
        same_tokenizer(student.tokenizer, teacher.tokenizer)
        return student

    return Students(load)


def _require_tokenizer(name: str, teacher: LoadedModel) -> None:
    """Refuse a student of another tokenizer before any student is loaded: it may be the last to be scored."""
    try:
        same_tokenizer(load_tokenizer(name), teacher.tokenizer)
    except TokenizerMismatchError as error:
        raise TokenizerMismatchError(f"trace.checkpoints has {name!r}: {error}") from error


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
        student = session.students.get(probe.writer.model)
        write_rollouts(session.run, probe.file, _answer_probe(session, probe, student))
    return read_rollouts(session.run, probe.file)


def _probe_prompts(config: Config, task: Task) -> list[Prompt]:
    return task.prompts(config.trace.num_prompts, derive_seed(config.run.seed, "probe prompts"))


def _answer_probe(session: ReplaySession, probe: Probe, student: LoadedModel) -> list[Rollout]:
    """Let the probe's writer answer the probe prompts."""
    config, writer = session.config, probe.writer
    prompts = _probe_prompts(config, make_task(config.task))
    count = len(prompts) * config.trace.num_generations
    with session.progress.bar(f"writing the probe with checkpoint {writer.label}", count) as advance:
        return make_rollouts(
            make_sampler(config, student, session.teacher),
            student.tokenizer,
            prompts,
            Sampling.of(config.rollouts, derive_seed(config.run.seed, "probe")),
            num_generations=config.trace.num_generations,
            policy_step=writer.step,
            first_rollout_id=count * session.checkpoints.index(writer) if config.trace.probe == "each" else 0,
            on_done=advance,
        )


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
    student = session.students.get(checkpoint.model)
    if following is not None:
        session.students.read_ahead(following.model)
    for part in parts[done:]:
        scores = _scores(session, checkpoint, student, part, advance)
        behind.put(partial(_write_part, session, checkpoint, part.teacher_pass.rollouts, scores))


def _scores(
    session: ReplaySession, checkpoint: Checkpoint, student: LoadedModel, part: Part, advance: Advance
) -> PendingScores:
    scoring = session.config.scoring
    with _naming(checkpoint, part.teacher_pass.rollouts):
        return score_pass(
            student,
            part.teacher_pass,
            divergence=scoring.divergence,
            temperature=scoring.temperature,
            tokens_per_chunk=scoring.tokens_per_chunk,
            on_done=advance,
            tops=part.tops,
            classes=session.classes,
        )


def _write_part(
    session: ReplaySession, checkpoint: Checkpoint, rollouts: Sequence[Rollout], scores: PendingScores
) -> None:
    """Commit the scores of some rollouts as one part.

    The number of parts tells how many rollouts are done, so the writer may not cut them by rows.
    """
    with _naming(checkpoint, rollouts):
        table = trace_table(
            rollouts,
            scores.wait(),
            tops=scores.wait_tops(),
            classes=session.classes,
            served=session.config.teacher.label,
        )
    with TraceWriter(session.run, checkpoint=checkpoint.step, rows_per_part=sys.maxsize) as traces:
        traces.append(table)


def _add_choice(session: ReplaySession, classes: TokenClasses) -> None:
    """Score the last checkpoint again where its parts do not have the choice within these classes, and add that."""
    last = session.checkpoints[-1]
    if not (lacking := _without_choice(session.run, last, classes)):
        return
    probe = replace(probes(session.config, session.checkpoints)[-1], scored_by=[last])
    parts = dict(enumerate(_parts(session, probe, read_rollouts(session.run, probe.file))))
    student = session.students.get(last.model)
    count = sum(len(parts[number].teacher_pass.rollouts) for number in lacking)
    with session.progress.bar("adding the choice", count) as advance, WriteBehind() as behind:
        for number, relative in lacking.items():
            scores = _scores(session, last, student, replace(parts[number], tops=None), advance)
            behind.put(partial(_write_choice, session, last, parts[number], relative, scores, classes))


def _write_choice(
    session: ReplaySession,
    checkpoint: Checkpoint,
    part: Part,
    relative: str,
    scores: PendingScores,
    classes: TokenClasses,
) -> None:
    with _naming(checkpoint, part.teacher_pass.rollouts):
        kl_choice_T = scores.wait().kl_choice
    try:
        add_choice(session.run, relative, kl_choice_T, classes)
    except TraceError as error:
        raise RunDirError(
            f"the choice does not fit the kl of {session.run.path / relative} ({error}), as when a replay is scored "
            "again on another device or with other versions: use those of the replay, or start again with `rocktokens "
            "trace --restart`"
        ) from error


def _without_choice(run: RunDir, checkpoint: Checkpoint, classes: TokenClasses) -> dict[int, str]:
    """By number, the parts of a checkpoint that do not have the choice within these classes."""
    parts = run.files(parts_folder("replay", checkpoint.step))
    paths = run.verify_all(parts)
    return {
        number: part.path
        for number, (part, path) in enumerate(zip(parts, paths, strict=True))
        if part_classes(run, part.path, path) != classes.sha256
    }


@contextmanager
def _naming(checkpoint: Checkpoint, rollouts: Sequence[Rollout]) -> Iterator[None]:
    """Add the checkpoint and the part to an error about scores, which come from where neither is known."""
    try:
        yield
    except NonFiniteLossError as error:
        part = f"rollouts {rollouts[0].rollout_id} to {rollouts[-1].rollout_id}"
        raise NonFiniteLossError(f"checkpoint {checkpoint.label}, {part}: {error}") from error
