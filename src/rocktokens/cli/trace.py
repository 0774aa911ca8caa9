"""``rocktokens trace``: replay one probe set through several checkpoints (METHOD 3).

1. The checkpoints are those of the run, or any list of student directories or hub ids, oldest first.
2. One of them writes the probe rollouts (the last, by default); they are stored, and a resumed replay reads them back.
3. Every checkpoint scores the same rollouts, ``rollouts_per_part`` to a part. Parts that are committed are not made
   again, so a killed replay goes on where it was and ends with the same bytes.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocktokens.cli.common import AsJson, ConfigPath, Overrides, notes, output, print_json, progress_bar
from rocktokens.config import Config, load_config
from rocktokens.errors import ConfigError, RocktokensError, RunDirError
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.types import Rollout

if TYPE_CHECKING:
    from rocktokens.models.load import LoadedModel

_STEP = re.compile(r"(?:step|checkpoint|global_step)[-_](\d+)$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A student to replay through: the number its traces are filed under, and what to load."""

    step: int
    model: str


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
    with run.lock():
        checkpoints = find_checkpoints(run, config)
        if not restart:
            _require_same_replay(run, config, checkpoints)
        teacher = load_model(config.models.teacher, config.models.dtype, config.models.device)
        if restart:
            run.drop(_replay_files(run))
        run.update_manifest(replay=_replay_settings(config, checkpoints))
        _describe_run(run, config, teacher)
        tokens = _replay(run, config, checkpoints, teacher)
    count = config.trace.num_prompts * config.trace.num_generations
    return {
        "directory": str(run.path),
        "checkpoints": [checkpoint.step for checkpoint in checkpoints],
        "rollouts": count if config.trace.probe != "each" else count * len(checkpoints),
        "tokens": tokens,
    }


def find_checkpoints(run: RunDir, config: Config) -> list[Checkpoint]:
    """The checkpoints to replay through, oldest first."""
    from rocktokens.training.checkpoint import list_checkpoints

    if not config.trace.checkpoints:
        steps = list_checkpoints(run)
        if not steps:
            raise RunDirError(
                f"{run.path} has no checkpoints: run `rocktokens distill` first, or list students in trace.checkpoints"
            )
        return [Checkpoint(step, str(run.checkpoint(step))) for step in steps]
    named = [_STEP.search(name.rstrip("/")) for name in config.trace.checkpoints]
    numbered = all(named)
    found = [
        Checkpoint(int(match.group(1)) if numbered and match else index, name)
        for index, (name, match) in enumerate(zip(config.trace.checkpoints, named, strict=True))
    ]
    steps = [checkpoint.step for checkpoint in found]
    if steps != sorted(set(steps)):
        raise ConfigError(f"trace.checkpoints has the steps {steps}: list each checkpoint once, oldest first")
    return found


def _replay(run: RunDir, config: Config, checkpoints: list[Checkpoint], teacher: "LoadedModel") -> int:
    count = config.trace.num_prompts * config.trace.num_generations
    tokens = 0
    with progress_bar("replaying", count * len(checkpoints)) as advance:
        for checkpoint in checkpoints:
            writer_of_probe = _probe_writer(config, checkpoint, checkpoints)
            rollouts = _probe(run, config, writer_of_probe, checkpoints, teacher)
            tokens += sum(len(rollout.token_ids) for rollout in rollouts)
            _replay_one(run, config, checkpoint, teacher, rollouts, advance)
    return tokens


def _probe_writer(config: Config, checkpoint: Checkpoint, checkpoints: list[Checkpoint]) -> Checkpoint:
    return {"last": checkpoints[-1], "first": checkpoints[0], "each": checkpoint}[config.trace.probe]


def _probe(
    run: RunDir, config: Config, writer: Checkpoint, checkpoints: list[Checkpoint], teacher: "LoadedModel"
) -> list[Rollout]:
    """The rollouts ``writer`` answers the probe prompts with, stored so that they are written once."""
    from rocktokens.rollouts.encode import make_rollouts
    from rocktokens.rollouts.store import read_rollouts, write_rollouts
    from rocktokens.tasks import make_task

    relative = f"rollouts/probe/checkpoint={writer.step}.parquet"
    if run.files(relative):
        return read_rollouts(run, relative)
    student = load_checkpoint(config, writer, teacher)
    seed = config.run.seed
    prompts = make_task(config.task).prompts(config.trace.num_prompts, derive_seed(seed, "probe prompts"))
    count = len(prompts) * config.trace.num_generations
    with progress_bar(f"writing the probe with checkpoint {writer.step}", count) as advance:
        rollouts = make_rollouts(
            make_sampler(config, student, teacher),
            student.tokenizer,
            prompts,
            num_generations=config.trace.num_generations,
            policy_step=writer.step,
            first_rollout_id=count * checkpoints.index(writer) if config.trace.probe == "each" else 0,
            temperature=config.rollouts.temperature,
            max_new_tokens=config.rollouts.max_completion_length,
            seed=derive_seed(seed, "probe"),
            chat_template=config.rollouts.chat_template,
            max_prompt_length=config.rollouts.max_prompt_length,
            on_done=advance,
        )
    write_rollouts(run, relative, rollouts)
    return rollouts


def _replay_one(
    run: RunDir,
    config: Config,
    checkpoint: Checkpoint,
    teacher: "LoadedModel",
    rollouts: list[Rollout],
    advance: Callable[[int], None],
) -> None:
    """Score all rollouts under one checkpoint, a part at a time, passing over parts that are committed."""
    from rocktokens.scoring.score import score_rollouts
    from rocktokens.traces.schema import trace_table
    from rocktokens.traces.writer import TraceWriter

    size, scoring = config.trace.rollouts_per_part, config.scoring
    with TraceWriter(run, checkpoint=checkpoint.step) as traces:
        done = min(traces.parts * size, len(rollouts))
        advance(done)
        if done == len(rollouts):
            return
        student = load_checkpoint(config, checkpoint, teacher)
        for first in range(done, len(rollouts), size):
            part = rollouts[first : first + size]
            scores = score_rollouts(
                student,
                teacher,
                part,
                divergence=scoring.divergence,
                temperature=scoring.temperature,
                tokens_per_chunk=scoring.tokens_per_chunk,
                tokens_per_batch=scoring.tokens_per_batch,
                on_done=advance,
            )
            traces.append(trace_table(part, scores, None))
            traces.flush()


def load_checkpoint(config: Config, checkpoint: Checkpoint, teacher: "LoadedModel") -> "LoadedModel":
    """A student that speaks the teacher's tokens."""
    from rocktokens.models.fingerprints import same_tokenizer
    from rocktokens.models.load import load_model

    student = load_model(checkpoint.model, config.models.dtype, config.models.device)
    same_tokenizer(student.tokenizer, teacher.tokenizer)
    return student


def make_sampler(config: Config, student: "LoadedModel", teacher: "LoadedModel | None" = None) -> Any:
    """The student's sampler; columns that only one of two heads has are never sampled."""
    from rocktokens.models.head import lm_head
    from rocktokens.rollouts.sampler import TransformersSampler

    widths = [lm_head(model.model).width for model in (student, teacher) if model is not None]
    return TransformersSampler(
        student.model,
        student.eos_ids,
        student.pad_id,
        batch_size=config.rollouts.batch_size,
        vocab_size=min(widths),
    )


def _replay_files(run: RunDir) -> list[str]:
    return [entry.path for prefix in ("traces/checkpoint=", "rollouts/probe/") for entry in run.files(prefix)]


def _replay_settings(config: Config, checkpoints: list[Checkpoint]) -> dict[str, Any]:
    """What the rows of a replay depend on."""
    return {
        "checkpoints": {str(checkpoint.step): Path(checkpoint.model).name for checkpoint in checkpoints},
        "probe": config.trace.probe,
        "num_prompts": config.trace.num_prompts,
        "num_generations": config.trace.num_generations,
        "rollouts_per_part": config.trace.rollouts_per_part,
        "teacher": config.models.teacher,
        "seed": config.run.seed,
        "task": config.task.model_dump(mode="json"),
        "rollouts": config.rollouts.model_dump(mode="json"),
        "scoring": config.scoring.model_dump(mode="json"),
    }


def _require_same_replay(run: RunDir, config: Config, checkpoints: list[Checkpoint]) -> None:
    """Refuse to mix replays made with different settings."""
    settings, recorded = _replay_settings(config, checkpoints), run.manifest().get("replay")
    if not recorded or recorded == settings or not _replay_files(run):
        return
    changed = next(key for key in settings if settings[key] != recorded.get(key))
    raise RocktokensError(
        f"{run.path} holds replays made with {changed} = {recorded.get(changed)!r}, now it is "
        f"{settings[changed]!r}: give --restart to replace them, or another run.directory"
    )


def _describe_run(run: RunDir, config: Config, teacher: "LoadedModel") -> None:
    """Give a run that only replays what a distilled one has: its config, tokenizer and seeds."""
    from rocktokens.training.start import describe_run

    if not run.files(run.config.name):
        describe_run(run, config, teacher.tokenizer, command="trace")
