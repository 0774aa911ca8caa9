"""The weight of each token in the loss: one section per policy (docs/method.md, section 7; docs/policies.md).

These sections are the one list of policies and their parameters: a TOML file and ``make_policy`` are both checked by
them. Values are not converted: a number written as text is refused. A RockSet, ControlSet or TokenClasses is taken
where validation is told so (``IN_PYTHON``), which ``make_policy`` does: a file could not hold it.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from pydantic import (
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from rocktokens.classes import TokenClasses
from rocktokens.config.base import NamedSection, named_by_default
from rocktokens.types import Category, ControlSet, Label, RockSet, Verdict

S = TypeVar("S", RockSet, ControlSet, TokenClasses)
IN_PYTHON = {"in_python": True}
"""The context of a validation whose result is used at once and never written."""


def _rocks(value: Any, info: ValidationInfo) -> str | list[int] | RockSet:
    """Take a path, token ids in rank order, or in Python a RockSet."""
    if (given := _path_or(RockSet, value, info)) is not None:
        return given
    ids: list[Any] = list(value) if isinstance(value, Iterable) and not isinstance(value, str | dict) else [value]
    if not all(map(_is_id, ids)):
        raise ValueError("give the path of a rocks.json, or token ids, whole numbers of 0 or more")
    return [int(each) for each in ids]


def _classes(value: Any, info: ValidationInfo) -> str | list[list[int]] | list[list[str]] | TokenClasses:
    """Take a path, lists of texts or of token ids, or in Python TokenClasses."""
    if (given := _path_or(TokenClasses, value, info)) is not None:
        return given
    is_lists = isinstance(value, list | tuple) and all(isinstance(group, list | tuple) for group in value)
    members = [each for group in value for each in group] if is_lists else [None]
    if all(map(_is_id, members)):
        return [list(map(int, group)) for group in value]
    if not all(isinstance(each, str) and each for each in members):
        raise ValueError("give the path of a classes.json, or lists of texts, or lists of token ids")
    return [list(group) for group in value]


def _is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 0


def _file_of(kind: type[S], name: str) -> PlainValidator:
    """Take a path, or in Python an object of the kind."""

    def check(value: Any, info: ValidationInfo) -> str | S:
        if (given := _path_or(kind, value, info)) is None:
            raise ValueError(f"give the path of a {name}")
        return given

    return PlainValidator(check)


def _path_or(kind: type[S], value: Any, info: ValidationInfo) -> str | S | None:
    """Take a path as text, or an object of the kind where one may be given; None for anything else."""
    if isinstance(value, kind) and info.context == IN_PYTHON:
        return value
    return str(value) if isinstance(value, str | Path) and str(value) != "" else None


Rocks = Annotated[str | list[int] | RockSet, PlainValidator(_rocks)]
RocksWithVerdicts = Annotated[str | RockSet, _file_of(RockSet, "rocks.json")]
Classes = Annotated[str | list[list[int]] | list[list[str]] | TokenClasses, PlainValidator(_classes)]
Controls = Annotated[str | ControlSet, _file_of(ControlSet, "controls.json")]
Weight = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class PolicyBase(NamedSection):
    """What every policy has, whatever it weighs by."""

    model_config = ConfigDict(strict=True)
    kind: ClassVar[str] = "policy"
    common: ClassVar[frozenset[str]] = frozenset({"denominator", "protect"})

    denominator: Literal["all", "kept"] = Field(
        default="all", description="all: response tokens of the update; kept: the sum of their weights"
    )
    protect: RocksWithVerdicts | None = Field(
        default=None, description="a rocks.json of `rocktokens knockout`: its pillars never weigh less than 1"
    )


class UniformSection(PolicyBase):
    """Weight 1 everywhere: plain on-policy distillation."""

    name: Literal["uniform"] = "uniform"

    @model_validator(mode="before")
    @classmethod
    def _without_old_default(cls, record: Any) -> Any:
        """Drop ``lam = 0``, which configs have from when all policies shared their keys and which meant nothing."""
        if isinstance(record, dict) and record.get("lam") == 0.0:
            return {key: value for key, value in record.items() if key != "lam"}
        return record


class _OfRocks(PolicyBase):
    rocks: Rocks = Field(description="a rocks.json, or token ids in rank order")
    lam: Weight = Field(default=0.0, description="weight of the chosen tokens; 0 freezes them out of the loss")
    window: bool = Field(default=False, description="the windows around the rocks too, by the rule in the rocks.json")
    k: int | None = Field(default=None, ge=1, description="only the first k rocks")
    categories: list[Category] | None = Field(default=None, min_length=1, description="only rocks of these categories")
    verdicts: list[Verdict] | None = Field(default=None, min_length=1, description="only rocks with these verdicts")
    labels: list[Label] | None = Field(default=None, min_length=1, description="only rocks with these labels")


class RocksSection(_OfRocks):
    """Weight ``lam`` on the rocks."""

    name: Literal["rocks"]


class OnlineRocksSection(PolicyBase):
    """Weight ``lam`` on the types that training finds heavy and no longer moving (docs/online.md)."""

    name: Literal["online_rocks"]
    lam: Weight = Field(default=0.0, description="weight of a frozen type's tokens")
    window_steps: int = Field(default=8, ge=2, description="steps of a window; types are judged when one closes")
    decay: float = Field(default=0.8, gt=0, lt=1, description="what a window's evidence still counts one window later")
    min_share: float = Field(
        default=0.005, gt=0, lt=1, description="least share of the summed kl a type must hold to be called"
    )
    tolerance: float = Field(
        default=0.05, gt=0, lt=1, description="a type is still when kl surely changes less than this share per window"
    )
    patience: int = Field(
        default=2, ge=1, description="windows running that must agree before a type is frozen or released"
    )
    freeze_windows: int = Field(
        default=8, ge=1, description="windows frozen before it is trained again on trial; doubles with every term"
    )
    start: int = Field(
        default=0, ge=0, description="no type is called before this step: at least the warm-up of the learning rate"
    )
    stop: int | None = Field(
        default=None, ge=1, description="no type is called from this step on: at a learning rate near 0 all is still"
    )
    probe: Share = Field(
        default=0.05, description="share of the frozen tokens that are scored all the same, without gradient"
    )
    seed: Seed | None = Field(default=None, description="of the probe's choice; default: from the run's seed")


class RandomPositionsSection(PolicyBase):
    """Keep a random share of all positions."""

    name: Literal["random_positions"]
    rho: Share = Field(description="share of positions that is kept")
    seed: Seed | None = Field(default=None, description="default: from the run's seed")


class TypeControlSection(PolicyBase):
    """Weight ``lam`` on types as frequent as the rocks."""

    name: Literal["type_control"]
    controls: Controls = Field(description="a controls.json")
    draw: int = Field(default=0, ge=0, description="which draw of the controls")
    lam: Weight = Field(default=0.0, description="weight of these types")


class OccurrenceControlSection(_OfRocks):
    """Weight ``lam`` on as many random positions of every response as the rocks have, in runs as long."""

    name: Literal["occurrence_control"]
    draw: int = Field(default=0, ge=0, description="draws with one seed differ")
    seed: Seed | None = Field(default=None, description="default: from the run's seed")


class LossControlSection(_OfRocks):
    """Weight ``lam`` on random positions of every response that hold as much kl, or gradient norm, as the rocks."""

    name: Literal["loss_control"]
    by: Literal["kl", "grad_norm"] = Field(default="kl", description="which sum is that of the rocks, per response")
    draw: int = Field(default=0, ge=0, description="draws with one seed differ")
    seed: Seed | None = Field(default=None, description="default: from the run's seed")


class WeightControlSection(_OfRocks):
    """One weight on every token that leaves as much gradient norm as weight ``lam`` on the rocks."""

    name: Literal["weight_control"]


class _TopTypes(PolicyBase):
    k: int = Field(ge=1, description="how many types")
    lam: Weight = Field(default=0.0, description="their weight")


class TopFrequencySection(_TopTypes):
    """Weight ``lam`` on the most frequent types of the update."""

    name: Literal["top_frequency"]


class TopMeanLossSection(_TopTypes):
    """Weight ``lam`` on the types of largest mean kl in the update."""

    name: Literal["top_mean_loss"]


class TopGradNormSection(_TopTypes):
    """Weight ``lam`` on the types of largest mean logit-gradient norm in the update."""

    name: Literal["top_grad_norm"]


class HighEntropySection(PolicyBase):
    """Keep the positions where the student is least sure."""

    name: Literal["high_entropy"]
    rho: Share = Field(default=0.2, description="share that is kept")


class TipSection(PolicyBase):
    """Keep the positions where the student is unsure or far from the teacher."""

    name: Literal["tip"]
    rho: Share = Field(default=0.5, description="share that is kept")


class TeachableSection(PolicyBase):
    """Keep the positions with high kl where the teacher likes what the student likes."""

    name: Literal["teachable"]
    rho: Share = Field(default=0.05, description="share that is kept")


class SelectkdSection(PolicyBase):
    """Weight ``beta`` where the student's first choice is not among the teacher's first five."""

    name: Literal["selectkd"]
    beta: Weight = Field(default=0.01, description="weight of the tokens that are not selected")


class PrefixSection(PolicyBase):
    """Keep the first part of every response."""

    name: Literal["prefix"]
    fraction: Share = Field(description="share of each response that is kept")


class FirstNSection(PolicyBase):
    """Keep the first tokens of every response."""

    name: Literal["first_n"]
    n: int = Field(ge=1, description="how many tokens of each response are kept")


class PrefixImportanceSection(PolicyBase):
    """Weigh a position the more, the less of the response's disagreement lies before it."""

    name: Literal["prefix_importance"]
    w_max: float = Field(default=1.5, ge=1, description="weight of the first position; the last ones approach 1")


class EntropyMixSection(PolicyBase):
    """Weigh by how sure the teacher and how unsure the student is."""

    name: Literal["entropy_mix"]
    alpha: Weight = Field(description="strength of the teacher's certainty")
    beta: Weight = Field(description="strength of the student's uncertainty")


class AsymmetricSection(PolicyBase):
    """Weight 1; reverse KL where the teacher likes the sampled token better than the student, forward KL elsewhere."""

    name: Literal["asymmetric"]


class CoarseSection(PolicyBase):
    """Weight 1; the choice within classes of interchangeable tokens counts ``lam``, the decision between them 1."""

    name: Literal["coarse"]
    classes: Classes = Field(description="a classes.json, or lists of texts that are one token each, or of token ids")
    lam: Weight = Field(default=0.0, description="weight of the choice within classes; 0 leaves it out of the loss")
    untested: bool = Field(
        default=False, description="of a classes.json take classes that are neither safe nor unsafe too"
    )


class OnlineCoarseSection(PolicyBase):
    """Weight 1; the choice within classes that training finds counts ``lam`` (docs/online.md)."""

    name: Literal["online_coarse"]
    lam: Weight = Field(default=0.0, description="weight of the choice within classes; 0 leaves it out of the loss")
    share: Share = Field(
        default=0.1, description="tokens are linked if each has this share of the other's mass where that is written"
    )
    window_steps: int = Field(default=8, ge=1, description="steps of a window; classes are made when one closes")
    decay: float = Field(default=0.8, gt=0, lt=1, description="what a window's evidence still counts one window later")
    patience: int = Field(
        default=2, ge=1, description="windows running that must agree before a link is used or dropped"
    )
    min_freq: int = Field(default=20, ge=1, description="least (decayed) occurrences of a type that is in a class")
    start: int = Field(default=0, ge=0, description="the first step that may leave the choice out of the loss")


class _Composed(PolicyBase):
    policies: list["PolicySection"] = Field(min_length=1, description="the policies, each with its name and keys")

    @field_validator("policies")
    @classmethod
    def _common_keys_stand_outside(cls, parts: list[PolicyBase]) -> list[PolicyBase]:
        for index, part in enumerate(parts):
            if inner := sorted(part.model_fields_set & cls.common):
                raise ValueError(f"{inner[0]} of policy {index} is for the whole: set it beside policies, not within")
        return parts

    @model_validator(mode="after")
    def _one_tracker(self) -> Self:
        names = [section.name for section in sections_in(self)]
        for online in ("online_rocks", "online_coarse"):
            if names.count(online) > 1:
                raise ValueError(f"policies hold {online} more than once, and the log tells of one: keep one")
        return self

    @field_serializer("policies")
    def _without_common_keys(self, parts: list[PolicyBase]) -> list[dict[str, Any]]:
        return [part.model_dump(mode="json", exclude_none=True, exclude=set(self.common)) for part in parts]


class ProductSection(_Composed):
    """The product of the weights of several policies."""

    name: Literal["product"]


class ScheduleSection(_Composed):
    """One policy after the other."""

    name: Literal["schedule"]
    steps: list[Annotated[int, Field(ge=0)]] = Field(description="the step from which each policy holds, ascending")

    @model_validator(mode="after")
    def _one_step_each(self) -> "ScheduleSection":
        if len(self.steps) != len(self.policies):
            raise ValueError(f"steps has {len(self.steps)} entries and policies {len(self.policies)}: give one each")
        if any(later <= earlier for earlier, later in zip(self.steps, self.steps[1:], strict=False)):
            raise ValueError(f"steps = {self.steps} does not ascend: give each policy a later step than the one before")
        return self


PolicySection = Annotated[
    UniformSection
    | RocksSection
    | OnlineRocksSection
    | RandomPositionsSection
    | TypeControlSection
    | OccurrenceControlSection
    | LossControlSection
    | WeightControlSection
    | TopFrequencySection
    | TopMeanLossSection
    | TopGradNormSection
    | HighEntropySection
    | TipSection
    | TeachableSection
    | SelectkdSection
    | PrefixSection
    | FirstNSection
    | PrefixImportanceSection
    | EntropyMixSection
    | AsymmetricSection
    | CoarseSection
    | OnlineCoarseSection
    | ProductSection
    | ScheduleSection,
    Field(discriminator="name"),
    named_by_default("uniform"),
]


def sections_in(section: PolicyBase) -> Iterator[PolicyBase]:
    """Yield a section and all those within it."""
    yield from sections_by_key(section).values()


def sections_by_key(section: PolicyBase, key: str = "policy") -> dict[str, PolicyBase]:
    """Return a section and all those within it by key: ``policy``, ``policy.policies[0]``."""
    found = {key: section}
    for index, part in enumerate(getattr(section, "policies", ())):
        found |= sections_by_key(part, f"{key}.policies[{index}]")
    return found


FILE_KEYS = ("rocks", "controls", "classes", "protect")
"""Keys of a policy whose value may be a file; rocks and classes may be lists as well."""


def files_of(section: PolicyBase, key: str = "policy") -> dict[str, str]:
    """Return the files that a policy reads, by key: ``policy.protect``, ``policy.policies[0].rocks``."""
    sections = sections_by_key(section, key).items()
    named = {f"{place}.{name}": getattr(part, name, None) for place, part in sections for name in FILE_KEYS}
    return {name: value for name, value in named.items() if isinstance(value, str)}


for _section in (ProductSection, ScheduleSection):
    _section.model_rebuild()
