"""``rocktokens trace``: replay one probe set through several checkpoints (METHOD 3).

1. The checkpoints are those of the run, or any list of student directories or hub ids, oldest first.
2. One of them writes the probe rollouts (the last, by default); they are stored, and a resumed replay reads them back.
3. Every checkpoint scores the same rollouts, ``rollouts_per_part`` to a part. The teacher sees them once; checkpoints
   go through one model, the next being read while the present one scores; parts are written meanwhile.
4. Parts that are committed are not made again, so a killed replay goes on where it was and ends with the same bytes.

Nothing is written before checkpoints are found and the teacher and the first student to write a probe have loaded.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocktokens.cli.common import AsJson, ConfigPath, Overrides, notes, output, print_json, progress_bar
from rocktokens.config import Config, checkpoint_steps, load_config
from rocktokens.errors import ConfigError, NonFiniteLossError, RunDirError
from rocktokens.replay.record import (
    begin_record,
    has_replay,
    replay_settings,
    require_same_replay,
    require_vocabulary,
)
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.types import Rollout

if TYPE_CHECKING:
    from rocktokens.models.load import LoadedModel
    from rocktokens.replay.checkpoint_swap import Students
    from rocktokens.scoring.score import PendingScores
    from rocktokens.scoring.teacher_pass import TeacherPass
    from rocktokens.scoring.top_tokens import TopTokens
    from rocktokens.traces.writer import WriteBehind


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


@dataclass(frozen=True, slots=True)
class Part:
    """Rollouts whose scores are committed together, and what is known of them under the teacher."""

    teacher_pass: "TeacherPass"
    tops: "TopTokens | None"
    """None where the likeliest tokens are not kept."""


def trace(
    config: ConfigPath,
    restart: Annotated[bool, typer.Option("--restart", help="Drop the replays that are there and begin anew.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Score one probe set of rollouts under several checkpoints, without training.

    Example: [bold]rocktokens trace runs/mine/config.toml[/bold]

    Your own checkpoints:
    [bold]rocktokens trace run.toml --set 'trace.checkpoints=["ckpt/step-0", "ckpt/step-200"]'[/bold]
    """
    result = run_trace(load_config(config, overrides), restart=restart)
    if as_json:
        return print_json(result)
    steps = ", ".join(map(str, result["checkpoints"]))
    output.print(f"{result['rollouts']} rollouts, {result['tokens']:,} tokens, replayed at checkpoints {steps}")
    output.print(f"next: rocktokens find {result['directory']}", soft_wrap=True, markup=False)


def run_trace(config: Config, *, restart: bool = False) -> dict[str, Any]:
    """Replay with a progress bar and return what was done as a record."""
    with notes.status("loading"):
        from rocktokens.models.load import load_model

    run = RunDir(config.run.directory)
    with ExitStack() as stack:
        if run.exists():
            stack.enter_context(run.lock())
        checkpoints = find_checkpoints(run, config)
        settings = replay_settings(run, config, {checkpoint.step: checkpoint.model for checkpoint in checkpoints})
        if not restart:
            require_same_replay(run, settings)
        teacher = load_model(config.models.teacher, config.models.dtype, config.models.device)
        require_vocabulary(run, teacher)
        students = stack.enter_context(open_students(config, teacher))
        if restart or not has_replay(run):
            _begin(run, config, checkpoints, teacher, students, settings)
        stack.enter_context(run.lock())
        rollouts, tokens = replay(run, config, checkpoints, teacher, students)
    return {
        "directory": str(run.path),
        "checkpoints": [checkpoint.step for checkpoint in checkpoints],
        "rollouts": rollouts,
        "tokens": tokens,
    }


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


def _begin(
    run: RunDir,
    config: Config,
    checkpoints: list[Checkpoint],
    teacher: "LoadedModel",
    students: "Students",
    settings: dict[str, Any],
) -> None:
    """Replace whatever replay is there by the first probe of a new one, once the student that writes it has loaded."""
    writer = probes(config, checkpoints)[0].writer
    student = students.get(writer.model)
    with run.lock():
        begin_record(run, config, teacher, settings)
        _write_probe(run, config, writer, checkpoints, student, teacher)


def replay(
    run: RunDir, config: Config, checkpoints: list[Checkpoint], teacher: "LoadedModel", students: "Students"
) -> tuple[int, int]:
    """Score every probe under its checkpoints; how many different rollouts that were, and their tokens."""
    from rocktokens.traces.writer import WriteBehind

    tokens_of: dict[int, list[int]] = {}
    following = dict(pairwise(checkpoints))
    first, *others = probes(config, checkpoints)
    rollouts = _rollouts(run, config, first, checkpoints, teacher, students)
    with progress_bar("replaying", len(rollouts) * len(checkpoints)) as advance, WriteBehind() as behind:
        for probe in (first, *others):
            if probe is not first:
                rollouts = _rollouts(run, config, probe, checkpoints, teacher, students)
            tokens_of[probe.writer.step] = [len(rollout.token_ids) for rollout in rollouts]
            parts = _parts(config, probe, rollouts, teacher)
            for checkpoint in probe.scored_by:
                _replay_one(run, config, checkpoint, following.get(checkpoint), parts, students, behind, advance)
    return sum(map(len, tokens_of.values())), sum(map(sum, tokens_of.values()))


def probes(config: Config, checkpoints: list[Checkpoint]) -> list[Probe]:
    """The sets of rollouts to replay, in the order of the checkpoints that score them."""
    if config.trace.probe == "each":
        return [Probe(checkpoint, [checkpoint]) for checkpoint in checkpoints]
    return [Probe({"last": checkpoints[-1], "first": checkpoints[0]}[config.trace.probe], checkpoints)]


def _rollouts(
    run: RunDir,
    config: Config,
    probe: Probe,
    checkpoints: list[Checkpoint],
    teacher: "LoadedModel",
    students: "Students",
) -> list[Rollout]:
    """What the probe's writer answers the probe prompts with, written if it is not there yet."""
    from rocktokens.rollouts.store import read_rollouts

    relative = probe_file(probe.writer)
    if not run.files(relative):
        _write_probe(run, config, probe.writer, checkpoints, students.get(probe.writer.model), teacher)
    return read_rollouts(run, relative)


def _parts(config: Config, probe: Probe, rollouts: list[Rollout], teacher: "LoadedModel") -> list[Part]:
    """What the teacher computes is kept only where more than one checkpoint needs it."""
    from rocktokens.scoring.teacher_pass import StatesRoom, TeacherPass
    from rocktokens.scoring.top_tokens import TopTokens

    size, scoring = config.trace.rollouts_per_part, config.scoring
    room = StatesRoom() if len(probe.scored_by) > 1 else None
    return [
        Part(
            TeacherPass(teacher, rollouts[first : first + size], scoring.tokens_per_batch, room),
            TopTokens(config.trace.top_k, scoring.temperature, scoring.tokens_per_chunk, room)
            if config.trace.top_k
            else None,
        )
        for first in range(0, len(rollouts), size)
    ]


def probe_file(writer: Checkpoint) -> str:
    """Where the rollouts of a probe are, relative to the run."""
    return f"rollouts/probe/checkpoint={writer.step}.parquet"


def _write_probe(
    run: RunDir,
    config: Config,
    writer: Checkpoint,
    checkpoints: list[Checkpoint],
    student: "LoadedModel",
    teacher: "LoadedModel",
) -> None:
    from rocktokens.rollouts.encode import Sampling, make_rollouts
    from rocktokens.rollouts.sampler import make_sampler
    from rocktokens.rollouts.store import write_rollouts
    from rocktokens.tasks import make_task

    seed = config.run.seed
    prompts = make_task(config.task).prompts(config.trace.num_prompts, derive_seed(seed, "probe prompts"))
    count = len(prompts) * config.trace.num_generations
    with progress_bar(f"writing the probe with checkpoint {writer.step}", count) as advance:
        rollouts = make_rollouts(
            make_sampler(config, student, teacher),
            student.tokenizer,
            prompts,
            Sampling.of(config.rollouts, derive_seed(seed, "probe")),
            num_generations=config.trace.num_generations,
            policy_step=writer.step,
            first_rollout_id=count * checkpoints.index(writer) if config.trace.probe == "each" else 0,
            on_done=advance,
        )
    write_rollouts(run, probe_file(writer), rollouts)


def _replay_one(
    run: RunDir,
    config: Config,
    checkpoint: Checkpoint,
    following: Checkpoint | None,
    parts: list[Part],
    students: "Students",
    behind: "WriteBehind",
    advance: Callable[[int], None],
) -> None:
    """Score all rollouts under one checkpoint, a part at a time, passing over parts that are committed."""
    from rocktokens.scoring.score import score_pass
    from rocktokens.traces.writer import TraceWriter

    done = TraceWriter(run, checkpoint=checkpoint.step).parts
    advance(sum(len(part.teacher_pass.rollouts) for part in parts[:done]))
    if done >= len(parts):
        return
    student = students.get(checkpoint.model)
    if following is not None:
        students.read_ahead(following.model)
    for part in parts[done:]:
        with _naming(checkpoint.step, part.teacher_pass.rollouts):
            scores = score_pass(
                student,
                part.teacher_pass,
                divergence=config.scoring.divergence,
                temperature=config.scoring.temperature,
                tokens_per_chunk=config.scoring.tokens_per_chunk,
                on_done=advance,
                tops=part.tops,
            )
        behind.put(partial(_write_part, run, checkpoint.step, part.teacher_pass.rollouts, scores))


def _write_part(run: RunDir, step: int, rollouts: Sequence[Rollout], scores: "PendingScores") -> None:
    """Commit the scores of some rollouts as one part.

    The parts tell how many rollouts are done, so the writer may not cut them by rows.
    """
    from rocktokens.traces.schema import trace_table
    from rocktokens.traces.writer import TraceWriter

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


def open_students(config: Config, teacher: "LoadedModel") -> "Students":
    """What gives the students, each of which speaks the teacher's tokens."""
    from rocktokens.models.fingerprints import same_tokenizer
    from rocktokens.models.load import load_model
    from rocktokens.replay.checkpoint_swap import Students

    def load(name: str) -> "LoadedModel":
        student = load_model(name, config.models.dtype, config.models.device)
        same_tokenizer(student.tokenizer, teacher.tokenizer)
        return student

    return Students(load)
