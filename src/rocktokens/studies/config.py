"""The configuration of a study: one TOML file with a base config, and arms that differ in their weight policy only.

1. ``[base.*]`` are the sections of an ordinary run, all but ``run`` and ``policy``: what every arm shares.
2. ``[[arm]]`` names a policy. ``"@rocks"`` anywhere in it stands for the study's rocks.json, ``"@controls"`` for the
   types as frequent as each of them, ``"@type_sets"`` for types with as many occurrences and as much kl as all of them;
   ``draws`` runs a random control several times a seed.
3. ``"@classes"`` stands for the study's classes.json. Each seed draws its own controls: ``"@random_classes"``
   of the same frequencies, ``"@other_classes"`` of types that are no rocks, ``"@twins"``, one member of each class.
4. ``[scout]`` is a run of its own whose rocks and classes the arms use; ``study.rocks`` and ``study.classes`` name a
   rocks.json and a classes.json instead.

What can be refused by reading the file is refused here, in one sentence.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from rocktokens.config import (
    EvaluationSection,
    FindSection,
    GradientsSection,
    KnockoutSection,
    LoraSection,
    ModelsSection,
    PolicySection,
    RolloutsSection,
    ScoringSection,
    Section,
    TaskSection,
    TeacherSection,
    TraceSection,
    TrainingSection,
    WholeOrAuto,
    WordmathTask,
    apply_overrides,
    dump_toml,
    forget_removed,
    has_grades,
    read_toml,
    validate,
)
from rocktokens.config.policies import files_of, sections_in
from rocktokens.display.numbers import listed
from rocktokens.errors import ConfigError
from rocktokens.studies.records import MOST_PRIMARY

ROCKS, CONTROLS, TYPE_SETS = "@rocks", "@controls", "@type_sets"
CLASSES, RANDOM_CLASSES, OTHER_CLASSES, TWINS = "@classes", "@random_classes", "@other_classes", "@twins"
CLASS_CONTROLS = (RANDOM_CLASSES, OTHER_CLASSES, TWINS)
PLACEHOLDERS = {
    "rocks": (ROCKS,),
    "protect": (ROCKS,),
    "controls": (CONTROLS, TYPE_SETS, TWINS),
    "classes": (CLASSES, RANDOM_CLASSES, OTHER_CLASSES),
}
"""What stands for the study's own files in the policy of an arm, by key of the policy."""
SCOUT_STAGES = (["find"], ["find", "knockout"], ["find", "classes"], ["find", "knockout", "classes"])


class StudySection(Section):
    """Which runs there are, when they are evaluated, and what is compared."""

    directory: str = Field(min_length=1, description="folder of the study; created when it does not exist")
    seeds: list[int] = Field(min_length=1, description="of the runs of every arm; an arm and a seed is one run")
    evaluate_every: int = Field(ge=1, description="steps between evaluations; the first step and the last count too")
    baseline: str = Field(default="uniform", description="the arm the others are compared with")
    compare: list[tuple[str, str]] | None = Field(
        default=None, min_length=1, description="pairs of arms; default: every other arm against the baseline"
    )
    primary: list[tuple[str, str]] | None = Field(
        default=None,
        min_length=1,
        description="the pairs the study is about, three at most; default: the first three of compare",
    )
    alpha: float = Field(
        default=0.05, gt=0, lt=1, description="one minus the coverage of intervals, over all primary pairs"
    )
    margin: float | None = Field(
        default=None, gt=0, lt=1, description="difference of accuracy named in advance as too small to matter"
    )
    target_accuracy: float | None = Field(
        default=None, gt=0, le=1, description="for steps to accuracy; default: 90 % of what the baseline gains"
    )
    rocks: str | None = Field(default=None, description="a rocks.json for @rocks, instead of a scout")
    classes: str | None = Field(default=None, description="a classes.json for @classes, instead of the scout's")
    processes: WholeOrAuto = Field(
        default="auto", description="runs at a time, one thread each; auto: one a GPU, else one a CPU core"
    )

    @field_validator("seeds", mode="before")
    @classmethod
    def _is_list(cls, seeds: Any) -> Any:
        if not isinstance(seeds, list):
            raise ValueError("give a list, such as [0, 1, 2]")
        return seeds

    @field_validator("compare", "primary", mode="before")
    @classmethod
    def _are_pairs(cls, pairs: Any) -> Any:
        if isinstance(pairs, list) and any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
            raise ValueError('give a list of pairs, such as [["one arm", "another"]]')
        return pairs

    @field_validator("primary")
    @classmethod
    def _are_few(cls, primary: list[tuple[str, str]] | None) -> list[tuple[str, str]] | None:
        if primary is not None and len(primary) > MOST_PRIMARY:
            raise ValueError(f"name {MOST_PRIMARY} pairs at most, the others are exploratory")
        return primary

    @field_validator("seeds")
    @classmethod
    def _each_once(cls, seeds: list[int]) -> list[int]:
        if min(seeds) < 0 or max(seeds) >= 2**63 or len(set(seeds)) < len(seeds):
            raise ValueError("give whole numbers from 0 to 2⁶³ − 1, each once")
        return seeds


class ScoutSection(Section):
    """A uniform run under the base config that finds the rocks and classes the arms use."""

    seed: int = Field(ge=0, lt=2**63, description="not one of the study's seeds: no arm trains on what found its rocks")
    stages: list[Literal["find", "knockout", "classes"]] = Field(
        default=["find"],
        description="knockout also tells which rocks are pillars; classes finds classes of tokens and tests them",
    )

    @field_validator("stages")
    @classmethod
    def _find_comes_first(cls, stages: list[str]) -> list[str]:
        if stages not in SCOUT_STAGES:
            raise ValueError(f"give {listed([json.dumps(own) for own in SCOUT_STAGES], 'or')}")
        return stages


class BaseSections(Section):
    """What every run of the study shares: the sections of an ordinary config but for the run and its policy."""

    models: ModelsSection
    teacher: TeacherSection = TeacherSection()
    task: TaskSection = WordmathTask()
    rollouts: RolloutsSection = RolloutsSection()
    scoring: ScoringSection = ScoringSection()
    lora: LoraSection = LoraSection()
    training: TrainingSection = TrainingSection()
    trace: TraceSection = TraceSection()
    find: FindSection = FindSection()
    evaluation: EvaluationSection = EvaluationSection()
    knockout: KnockoutSection = KnockoutSection()
    gradients: GradientsSection = GradientsSection()


class ArmSection(Section):
    """One weight policy."""

    name: str = Field(min_length=1, description="what tables call it")
    draws: int = Field(default=1, ge=1, description="runs a seed, each with another draw of a random control")
    policy: PolicySection = Field(description="its weights; sections as [policy] of a run")

    @property
    def is_drawn(self) -> bool:
        """Whether the policy knows several draws."""
        return "draw" in type(self.policy).model_fields

    @property
    def slug(self) -> str:
        """The name as a folder: ``rock freeze λ=0`` is ``rock-freeze-λ-0``."""
        return re.sub(r"[\W_]+", "-", self.name.lower()).strip("-")


class StudyConfig(Section):
    """Everything a study depends on."""

    study: StudySection
    scout: ScoutSection | None = None
    base: BaseSections
    arm: list[ArmSection] = Field(min_length=2)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """What is compared with what: the primary pairs, then those of ``compare`` that are not among them."""
        others = [(arm.name, self.study.baseline) for arm in self.arm if arm.name != self.study.baseline]
        compared = others if self.study.compare is None else self.study.compare
        named = {frozenset(pair) for pair in self.study.primary or []}
        return [*(self.study.primary or []), *(pair for pair in compared if frozenset(pair) not in named)]

    @property
    def primary(self) -> list[tuple[str, str]]:
        """The pairs the study is about."""
        return self.pairs[:MOST_PRIMARY] if self.study.primary is None else self.study.primary


def load_study(path: str | Path, overrides: list[str] | None = None) -> StudyConfig:
    """Read a study's TOML file, apply ``section.key=value`` overrides, and validate."""
    record = read_toml(path)
    apply_overrides(record, overrides or [])
    return make_study(record, str(path))


def make_study(record: dict[str, Any], name: str = "study") -> StudyConfig:
    """Validate a record as a study; say in one sentence what does not fit together, which calls it ``name``."""
    _require_study(record, name)
    if isinstance(base := record.get("base"), dict):
        forget_removed(base)
    study = validate(StudyConfig, record, name)
    for arm in study.arm:
        _require_drawable(arm)
        _require_placeholders(arm)
    _require_names(study)
    _require_steps(study.base.training)
    _require_evaluation(study.base.evaluation)
    _require_one_denominator(study.arm)
    _require_rocks(study)
    _require_classes(study)
    return study


def dump_study(study: StudyConfig) -> str:
    """Write the study as TOML with every default; it reads back as the same study."""
    return dump_toml(study.model_dump(mode="json", exclude_none=True))


def arms_with(study: StudyConfig, placeholder: str) -> list[ArmSection]:
    """Return the arms whose policy uses a file of the study."""
    return [arm for arm in study.arm if placeholder in files_of(arm.policy).values()]


def takes_untested(study: StudyConfig) -> bool:
    """Return whether some arm uses classes that no ban has judged."""
    return any(section.untested for arm in study.arm for section in _sections_with(arm, CLASSES))


def _sections_with(arm: ArmSection, placeholder: str) -> list[Any]:
    """Return the parts of an arm's policy that have these classes."""
    return [own for own in sections_in(arm.policy) if getattr(own, "classes", None) == placeholder]


def _require_study(record: dict[str, Any], name: str) -> None:
    """Tell what is plainly something else, before its keys are looked at one by one."""
    if "study" not in record and "arm" not in record:
        raise ConfigError(f"{name} has neither [study] nor [[arm]]: a single run is for `rocktokens distill`")
    if isinstance(record.get("arm"), dict):
        raise ConfigError(f"{name}: [arm] is one table, but a study has several arms: write [[arm]] above each")


def _require_placeholders(arm: ArmSection) -> None:
    for key, value in files_of(arm.policy).items():
        known = PLACEHOLDERS[key.rpartition(".")[2]]
        if value.startswith("@") and value not in known:
            raise ConfigError(
                f"arm {arm.name!r} has {key} = {value!r}, which stands for nothing there: use {listed(known, 'or')}"
            )


def _require_steps(training: TrainingSection) -> None:
    if training.num_train_epochs is not None:
        raise ConfigError(
            f"base.training.num_train_epochs = {training.num_train_epochs}, but arms are compared at equal steps: set "
            "base.training.max_steps instead"
        )
    if training.save_total_limit is not None:
        raise ConfigError(
            f"base.training.save_total_limit = {training.save_total_limit}, but a study evaluates its runs at every "
            "checkpoint when they are trained: remove it, and raise study.evaluate_every for fewer"
        )


def _require_evaluation(evaluation: EvaluationSection) -> None:
    if evaluation.num_prompts < 2:
        raise ConfigError(
            f"base.evaluation.num_prompts = {evaluation.num_prompts} leaves no spread to judge by: ask 2 or more"
        )
    if evaluation.task is not None and not has_grades(evaluation.task):
        raise ConfigError(
            "base.evaluation.task.answer_field is empty, so no answer can be graded and no arm be compared: name the "
            "field, or give a grader that needs no answers"
        )


def _require_drawable(arm: ArmSection) -> None:
    if arm.draws > 1 and not arm.is_drawn:
        raise ConfigError(
            f"arm {arm.name!r} has draws = {arm.draws}, but policy {arm.policy.name} draws nothing: remove draws"
        )
    if arm.draws > 1 and getattr(arm.policy, "draw", 0) > 0:
        raise ConfigError(f"arm {arm.name!r} has draws = {arm.draws} and a policy.draw of its own: give one of them")


def _require_names(study: StudyConfig) -> None:
    """Require arms that can be told apart, also as folders, and that those that are compared exist."""
    if nameless := [arm.name for arm in study.arm if not arm.slug]:
        raise ConfigError(f"arm {nameless[0]!r} has no letter or digit in its name, which names its folder: add one")
    for slug, count in Counter(arm.slug for arm in study.arm).items():
        if count > 1:
            names = " and ".join(repr(arm.name) for arm in study.arm if arm.slug == slug)
            raise ConfigError(f"arms {names} would share the folder {slug!r}: give each arm a name of its own")
    names = [arm.name for arm in study.arm]
    known = ", ".join(map(repr, names))
    if study.study.baseline not in names:
        raise ConfigError(f"study.baseline = {study.study.baseline!r} is not an arm: use one of {known}")
    for key in ("compare", "primary"):
        _require_pairs(f"study.{key}", getattr(study.study, key) or [], names)


def _require_pairs(key: str, pairs: list[tuple[str, str]], names: list[str]) -> None:
    """Require pairs of two arms, each once."""
    for first, second in pairs:
        for name in (first, second):
            if name not in names:
                known = ", ".join(map(repr, names))
                raise ConfigError(f"{key} names {name!r}, which is not an arm: use {known}")
        if first == second:
            raise ConfigError(f"{key} sets {first!r} against itself: name two arms")
    # A pair that is named twice would count twice among the pairs that intervals are widened for.
    for (first, second), count in Counter(tuple(sorted(pair)) for pair in pairs).items():
        if count > 1:
            raise ConfigError(f"{key} has {first!r} and {second!r} {count} times, either way round: keep one")


def _require_one_denominator(arms: list[ArmSection]) -> None:
    """Refuse different normalisers of losses, which are different learning rates: no comparison of policies."""
    by_name = {arm.policy.denominator: arm.name for arm in arms}
    if len(by_name) > 1:
        raise ConfigError(
            f"arm {by_name['all']!r} has policy.denominator = 'all' and arm {by_name['kept']!r} 'kept': they never mix "
            "in one study, give all arms the same"
        )


def _require_rocks(study: StudyConfig) -> None:
    """Require one source for what placeholders stand for, and that no arm trains on what found its rocks."""
    scout, given = study.scout, study.study.rocks
    if scout is not None and given is not None:
        raise ConfigError("study.rocks and [scout] are both given, but rocks come from one of them: remove the other")
    if scout is not None and scout.seed in study.study.seeds:
        raise ConfigError(
            f"scout.seed = {scout.seed} is one of study.seeds, so an arm would be trained on what found its rocks: "
            "give another"
        )
    sources = (
        (ROCKS, scout or given, "set study.rocks"),
        *((placeholder, scout, "name a controls.json") for placeholder in (CONTROLS, TYPE_SETS)),
    )
    for placeholder, source, remedy in sources:
        arms = arms_with(study, placeholder)
        if arms and source is None:
            raise ConfigError(
                f"arm {arms[0].name!r} uses {placeholder}, but nothing provides it: add [scout], or {remedy}"
            )


def _require_classes(study: StudyConfig) -> None:
    """Require one source for the classes of the study, and that their controls have something to be compared with."""
    scout, given, arms = study.scout, study.study.classes, arms_with(study, CLASSES)
    is_scouted = scout is not None and "classes" in scout.stages
    if is_scouted and given is not None:
        raise ConfigError(
            "study.classes is given and scout.stages has 'classes', but classes come from one of them: remove the other"
        )
    if is_scouted and not study.base.trace.top_k:
        raise ConfigError(
            "scout.stages has 'classes', which are found by the top tokens of the scout's traces: set "
            "base.trace.top_k = 8"
        )
    if arms and given is None and not is_scouted:
        raise ConfigError(
            f"arm {arms[0].name!r} uses {CLASSES}, but nothing provides it: add 'classes' to scout.stages, or set "
            "study.classes"
        )
    for placeholder in CLASS_CONTROLS:
        for arm in arms_with(study, placeholder):
            if scout is None:
                raise ConfigError(f"arm {arm.name!r} uses {placeholder}, but nothing provides it: add [scout]")
            if not arms:
                raise ConfigError(f"arm {arm.name!r} uses {placeholder}, but there is no arm with {CLASSES}: add one")
            if not all(section.untested for section in _sections_with(arm, placeholder)):
                raise ConfigError(
                    f"arm {arm.name!r} uses {placeholder}, which no ban has tested: set untested = true in its policy"
                )
