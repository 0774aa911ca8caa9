"""What a run notes about its replay, so that a resumed one goes on with the same models and settings or not at all.

1. ``manifest["replay"]`` holds everything the rows depend on: settings by value, models by their content, so that a run
   can be moved but a student that was trained further is noticed.
2. A run that only replays gets what a distilled one has, config and tokenizer; a distilled one keeps its own.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rocktokens.classes import TokenClasses
from rocktokens.config import Config
from rocktokens.errors import RocktokensError, TokenizerMismatchError
from rocktokens.run_dir import RunDir
from rocktokens.types import ReplayRecord

if TYPE_CHECKING:
    from rocktokens.models.load import LoadedModel


def replay_settings(
    run: RunDir, config: Config, students: Mapping[int, str], classes: TokenClasses | None
) -> ReplayRecord:
    """Describe what the rows of a replay depend on; ``students`` are the models to replay through, by step."""
    from rocktokens.models.fingerprints import model_identity

    return ReplayRecord(
        checkpoints={step: model_identity(model, run) for step, model in students.items()},
        probe=config.trace.probe,
        num_prompts=config.trace.num_prompts,
        num_generations=config.trace.num_generations,
        rollouts_per_part=config.trace.rollouts_per_part,
        teacher=model_identity(config.models.teacher, run),
        dtype=config.models.dtype,
        seed=config.run.seed,
        task=config.task.model_dump(mode="json"),
        rollouts=config.rollouts.determining(),
        scoring=config.scoring.model_dump(mode="json", exclude={"round_logits"}),  # a replay never rounds them
        top_k=config.trace.top_k,
        classes="" if classes is None else classes.sha256,
        served=config.teacher.label,
    )


def has_replay(run: RunDir) -> bool:
    """Whether a probe or trace part of a replay is committed."""
    return bool(_replay_files(run))


def lacks_checkpoints(run: RunDir, settings: ReplayRecord) -> bool:
    """Whether the replay that is there differs from these settings only in checkpoints that it does not have."""
    recorded, now = run.manifest().get("replay"), settings.to_manifest()
    if not recorded or not has_replay(run):
        return False
    before, after = recorded.pop("checkpoints"), now.pop("checkpoints")
    return recorded == now and before.items() < after.items()


def require_same_replay(run: RunDir, settings: ReplayRecord, *, is_whole: bool) -> None:
    """Refuse to mix replays made with different settings, or with traces that came another way.

    One that is whole is not continued, so it may have been made with other classes, or none.
    """
    recorded = run.manifest().get("replay")
    now = settings.to_manifest()
    if is_whole and recorded:
        recorded, now = ({**own, "classes": settings.classes} for own in (recorded, now))
    if recorded == now or not has_replay(run):
        return
    remedy = "replace them with `rocktokens trace --restart`, or give another run.directory"
    if not recorded:
        raise RocktokensError(f"{run.path} holds traces that `rocktokens trace` did not make: {remedy}")
    before, now = _flat(recorded), _flat(now)
    changed = next(key for key in now | before if before.get(key) != now.get(key))
    if changed == "classes":
        began = "with the classes it began with" if "classes" in before else "without --classes and trace.classes"
        raise RocktokensError(
            f"{run.path} holds a replay that is not finished, and other classes can only be added to one that is: "
            f"finish it {began} first, or start again with `rocktokens trace --restart`"
        )
    if changed == "served":
        was, now_is = (f"served ({own['served']})" if "served" in own else "in memory" for own in (before, now))
        raise RocktokensError(f"{run.path} holds replays whose teacher was {was}, now it is {now_is}: {remedy}")
    raise RocktokensError(
        f"{run.path} holds replays made with {changed} = {before.get(changed)!r}, now it is {now.get(changed)!r}: "
        f"{remedy}"
    )


def require_vocabulary(run: RunDir, teacher: "LoadedModel") -> None:
    """Refuse a teacher whose token ids do not mean what those of a distilled run mean."""
    from rocktokens.models.fingerprints import vocabulary_sha256

    found = vocabulary_sha256(teacher.tokenizer.get_vocab())
    if _is_distilled(run) and run.manifest()["tokenizer_sha256"] != found:
        raise TokenizerMismatchError(
            f"models.teacher = {teacher.name!r} has another vocabulary than the run {run.path} was distilled with: "
            "give a teacher of the run's vocabulary, or another run.directory"
        )


def begin_record(run: RunDir, config: Config, teacher: "LoadedModel", settings: ReplayRecord) -> None:
    """Drop whatever replay is there and note the settings of the one that begins."""
    from rocktokens.models.describe_run import describe_run

    run.drop(_replay_files(run))
    run.update_manifest(replay=settings.to_manifest())
    if not _is_distilled(run):
        run.drop([entry.path for entry in run.files("tokenizer/")])
        describe_run(run, _with_student(config), teacher.tokenizer, command="trace")


def _with_student(config: Config) -> Config:
    """Return the config of a run that only replays: its student is the first one traced, unless another is named."""
    if not config.trace.checkpoints or "student" in config.models.model_fields_set:
        return config
    models = config.models.model_copy(update={"student": config.trace.checkpoints[0]})
    return config.model_copy(update={"models": models})


def _replay_files(run: RunDir) -> list[str]:
    return [entry.path for prefix in ("traces/checkpoint=", "rollouts/probe/") for entry in run.files(prefix)]


def _is_distilled(run: RunDir) -> bool:
    return run.manifest().get("command") == "distill"


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Nested settings by dotted names."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= {f"{key}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {key: value}
    return flat
