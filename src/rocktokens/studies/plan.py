"""From a study to its jobs: the ordinary runs, one for every arm, seed and draw, that it is made of.

1. A job is a config: the base, the arm's policy, and the study's seed as the run's seed. So all arms of a seed start
   from one student and see the same prompts in the same order with the same sampling noise.
2. Jobs go seed by seed, so that the arms of a seed run under the same conditions, side by side where there is room.
3. What an earlier call has trained must have been trained by the same config; arms, seeds and draws may be added.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rocktokens.config import Config, RunSection, load_config, validate
from rocktokens.errors import ConfigError
from rocktokens.run_dir import RunDir
from rocktokens.studies.config import (
    CLASS_CONTROLS,
    CLASSES,
    CONTROLS,
    ROCKS,
    TYPE_SETS,
    ArmSection,
    StudyConfig,
)

TRAINED = 3
"""Work of training on a rollout, in answers to an evaluation prompt: it is written, scored and learned from."""
UNUSED = frozenset({"trace", "find", "knockout", "gradients"})
"""Sections that the run of an arm does not read."""
FREE_KEYS = frozenset({"run.directory", "training.report_to"})
SCOUT = "the scout"


@dataclass(frozen=True, slots=True)
class Job:
    """One run of an arm: train it, and evaluate it as it trained."""

    arm: str
    seed: int
    draw: int
    config: Config
    evaluated: tuple[int, ...]
    """Checkpoints it evaluates. Only the first job of a study has step 0 among them: that student is everyone's."""

    @property
    def label(self) -> str:
        """What messages call it."""
        drawn = f", draw {self.draw}" if "-draw-" in Path(self.config.run.directory).name else ""
        return f"{self.arm}, seed {self.seed}{drawn}"

    @property
    def run(self) -> RunDir:
        """Where it lives."""
        return RunDir(self.config.run.directory)

    @property
    def training_work(self) -> int:
        """What its training costs, in answers to an evaluation prompt."""
        return TRAINED * self.config.training.max_steps * self.config.training.rollouts_per_step

    @property
    def evaluation_work(self) -> int:
        """What one evaluation costs: its answers."""
        return self.config.evaluation.num_prompts * self.config.evaluation.num_samples

    @property
    def work(self) -> int:
        """What all of it costs."""
        return self.training_work + len(self.evaluated) * self.evaluation_work


def plan_jobs(study: StudyConfig, given: dict[str, str] | None = None) -> list[Job]:
    """List all runs of the study, seed by seed, in the order of the arms.

    Placeholders in policies stand for the study's own files, but for those that ``given`` has another file for.
    """
    steps = evaluated_steps(study)
    planned = [
        Job(arm.name, seed, draw, _arm_config(study, arm, given or {}, seed, draw), steps[1:])
        for seed in study.study.seeds
        for arm in study.arm
        for draw in (range(arm.draws) if arm.draws > 1 else [getattr(arm.policy, "draw", 0)])
    ]
    return [replace(planned[0], evaluated=steps), *planned[1:]]


def evaluated_steps(study: StudyConfig) -> tuple[int, ...]:
    """Return training steps made at every evaluation: none, every ``evaluate_every``, and all."""
    last = study.base.training.max_steps
    return (*range(0, last, study.study.evaluate_every), last)


def scout_config(study: StudyConfig) -> Config:
    """Return the run that finds the rocks: the base config and uniform weights."""
    if study.scout is None:
        raise ConfigError("the study has no [scout]: add one, or set study.rocks")
    return _run_config(study, f"{study.study.directory}/scout", study.scout.seed, {"name": "uniform"}, {})


def study_files(directory: str | Path, seed: int) -> dict[str, str]:
    """Return what the placeholders in policies stand for; every seed has controls of the classes of its own."""
    shared = {own: own.removeprefix("@") for own in (ROCKS, CONTROLS, TYPE_SETS, CLASSES)}
    names = shared | {own: f"{own.removeprefix('@')}-{seed}" for own in CLASS_CONTROLS}
    return {placeholder: str(Path(directory) / f"{name}.json") for placeholder, name in names.items()}


def draws_of(arms: Sequence[ArmSection]) -> int:
    """Return how many draws of a random control the arms want."""
    return max(max(arm.draws, getattr(arm.policy, "draw", 0) + 1) for arm in arms)


def require_unchanged(study: StudyConfig, jobs: Sequence[Job]) -> None:
    """Refuse to mix runs of two configs in one study."""
    for job in jobs:
        _require_same(job.config, f"arm {job.arm!r}", UNUSED)
    if study.scout is not None:
        knockout = frozenset({"evaluation", "knockout"}) if study.scout.stages == ["find"] else frozenset()
        _require_same(scout_config(study), SCOUT, knockout | {"gradients"})


def _arm_config(study: StudyConfig, arm: ArmSection, given: dict[str, str], seed: int, draw: int) -> Config:
    drawn = {"draw": draw} if arm.is_drawn else {}
    files = study_files(study.study.directory, seed) | given
    policy = _replaced(arm.policy.model_dump(mode="json", exclude_none=True), files)
    folder = f"seed-{seed}" + (f"-draw-{draw}" if drawn else "")
    directory = f"{study.study.directory}/arms/{arm.slug}/{folder}"
    return _run_config(study, directory, seed, policy | drawn, {"save_steps": study.study.evaluate_every})


def _run_config(
    study: StudyConfig, directory: str, seed: int, policy: dict[str, Any], training: dict[str, Any]
) -> Config:
    sections = study.base.model_dump(mode="json", exclude_none=True)
    record = {
        **sections,
        "run": RunSection(directory=directory, seed=seed).model_dump(),
        "policy": policy,
        "training": sections["training"] | training,
    }
    return validate(Config, record, directory)


def _require_same(config: Config, owner: str, unused: frozenset[str]) -> None:
    """Compare with the config the run was started with, if it was."""
    run = RunDir(config.run.directory)
    if not run.lists(run.config.name):
        return
    before, now = (_settings(of, unused) for of in (load_config(run.verified(run.config.name)), config))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise ConfigError(
                f"{_key_in_study(key, owner)} = {now.get(key)!r}, but {run.path} was started with {before.get(key)!r}: "
                "put it back, or give another study.directory (arms, seeds and draws may be added)"
            )


def _settings(config: Config, unused: frozenset[str]) -> dict[str, Any]:
    """Return what a run depends on, as ``section.key``; files of its study by placeholder, wherever that lies."""
    directory = Path(config.run.directory)
    study = directory.parents[2] if directory.parts[-3:-2] == ("arms",) else directory.parent
    placeholders = {path: name for name, path in study_files(study, config.run.seed).items()}
    record = _replaced(config.model_dump(mode="json", exclude=set(unused)), placeholders)
    return {key: value for key, value in _flat(record) if key not in FREE_KEYS}


def _key_in_study(key: str, owner: str) -> str:
    """Return where a key of a run stands in study.toml."""
    if owner == SCOUT and key == "run.seed":
        return "scout.seed"
    if owner != SCOUT and key == "training.save_steps":
        return "study.evaluate_every"
    return f"{owner}: {key}" if key.startswith("policy.") else f"base.{key}"


def _flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _replaced(value: Any, names: dict[str, str]) -> Any:
    """Replace some strings of a record, however deep."""
    if isinstance(value, dict):
        return {key: _replaced(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value
