"""What a study measured and what it found, as records: no torch, no behaviour beyond reading and writing study.json.

Accuracies and their differences are shares (−0.012: 1.2 points lost), intervals are [low, high]. study.json holds what
tables and figures need, so that both can be made again without the runs; the answers prompt by prompt stay in the runs.

Shape legend: S seeds, E evaluated checkpoints of a run, P prompts.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from rocktokens.inference.proportions import clopper_pearson_interval
from rocktokens.types import Interval, Record, load_record, write_record

STUDY_SCHEMA_VERSION = 2
Kind = Literal["equal_steps", "equal_tokens", "equal_seconds", "steps_to_accuracy"]
KINDS: tuple[Kind, ...] = ("equal_steps", "equal_tokens", "equal_seconds", "steps_to_accuracy")
StudyVerdict = Literal["better", "worse", "equivalent", "undecided", "unreached"]
Denominator = Literal["all", "kept"]
PairRole = Literal["primary", "exploratory"]
MOST_PRIMARY = 3
"""Pairs of a study that may be primary."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One run of an arm, evaluated as it trained.

    Example: a run of 64 steps evaluated every 16 on 500 prompts has ``steps == [0, 16, 32, 48, 64]`` and
    ``correct_EP.shape == (5, 500)``.
    """

    arm: str
    seed: int
    draw: int
    steps: np.ndarray
    """int (E,): training steps made at each evaluated checkpoint, ascending, the first is 0."""
    tokens: np.ndarray
    """int64 (E,): response tokens trained on so far."""
    seconds: np.ndarray
    """float (E,): training seconds so far (sampling and update; no evaluation, no writing)."""
    correct_EP: np.ndarray
    """float (E, P): share of the answers to a prompt that were right."""
    prompt_ids: list[str]
    facts: dict[str, float] = field(default_factory=dict)
    """What else is known of the run as a number: head_compute_saved, weight_dropped_share, mean_response_length."""
    is_retimed: bool = False
    """Whether some of its steps read back what an interrupted attempt had sampled, so that its seconds lack that."""


@dataclass(frozen=True, slots=True)
class CurvePoint(Record):
    """An arm at one evaluated checkpoint, over its runs."""

    step: int
    tokens: float
    """Mean over the runs, as seconds."""
    seconds: float
    accuracy: float
    interval: Interval
    """At 1 − α, for this point alone."""


@dataclass(frozen=True, slots=True)
class RunAccuracy(Record):
    """The accuracies of one run, a number an evaluation."""

    seed: int
    draw: int
    steps: list[int]
    tokens: list[int]
    seconds: list[float]
    accuracy: list[float]

    @property
    def has_collapsed(self) -> bool:
        """Whether it ended below its own start."""
        return self.accuracy[-1] < self.accuracy[0]


@dataclass(frozen=True, slots=True)
class CollapsedRuns(Record):
    """How many runs of an arm collapsed: ended below their own start.

    Example: 4 of 5 runs, 80 % [28, 99].
    """

    count: int
    n_runs: int
    interval: Interval
    """Clopper and Pearson's of the share, at 1 − α."""

    @classmethod
    def of(cls, runs: Sequence[RunAccuracy], alpha: float) -> Self:
        """Count them among the runs of an arm."""
        count = sum(run.has_collapsed for run in runs)
        return cls(count, len(runs), clopper_pearson_interval(count, len(runs), alpha))

    @property
    def share(self) -> float:
        """Of all runs of the arm."""
        return self.count / self.n_runs


@dataclass(frozen=True, slots=True)
class Arm(Record):
    """What one weight policy led to."""

    name: str
    points: list[CurvePoint]
    """The checkpoints that all its runs have, from step 0 on."""
    runs: list[RunAccuracy]
    facts: dict[str, float]
    """Means over the runs that state them."""
    collapsed: CollapsedRuns | None = None
    """None only where nobody counted."""

    @property
    def is_unreliable(self) -> bool:
        """Whether some run collapsed: no interval of a mean covers where most samples hold no collapse."""
        return self.collapsed is not None and self.collapsed.count > 0

    @property
    def start(self) -> CurvePoint:
        """Before training."""
        return self.points[0]

    @property
    def end(self) -> CurvePoint:
        """At the last checkpoint of all its runs."""
        return self.points[-1]


@dataclass(frozen=True, slots=True)
class Comparison(Record):
    """The first arm of a pair against the second, in one way.

    Where no run of one of the arms reaches the accuracy there is nothing to estimate: the numbers are None and the
    verdict is ``unreached``.
    """

    first: str
    second: str
    kind: Kind
    at: float
    """Where the arms were read, mean over seeds: the step, tokens, seconds; the accuracy that was to be reached."""
    difference: float | None
    """First minus second: accuracy, or training steps."""
    interval: Interval | None
    """Simultaneous over the pairs of its role: at 1 − α/m for m of them; cut where it leaves what is possible."""
    standard_error: float | None
    degrees_of_freedom: float | None
    p: float | None
    """Two-sided, for this pair alone."""
    p_holm: float | None
    """The same, corrected by Holm for the pairs of its role, within this kind."""
    detectable: Interval | None
    """The smallest true difference that would have been called with 80 % power, as a range; it may lie beyond what is
    possible. None in files of schema 1, which had one number that promised too much."""
    verdict: StudyVerdict
    """Of the first arm; fewer steps to an accuracy are better."""
    never: tuple[int, int] = (0, 0)
    """Runs of the first and of the second arm that never reached the accuracy: counted as reaching it at their end."""
    cut: tuple[bool, bool] = (False, False)
    """Which ends of the interval lie beyond what is possible and stand there cut."""
    within: int | None = None
    """Steps to accuracy: the last step that all runs of the pair have."""
    mean_steps: tuple[float, float] | None = None
    """Steps to accuracy: the mean of each arm, a lower bound where some of its runs never got there."""
    role: PairRole | None = None
    """Primary pairs are corrected together, exploratory ones apart; None in files of schema 1: all together."""
    unreliable: bool | None = None
    """Whether a run of either arm collapsed, so that means and their intervals cannot be relied on."""

    @property
    def largest(self) -> float:
        """No difference can be larger."""
        return 1.0 if self.within is None else float(self.within)

    @property
    def could_be_called(self) -> bool:
        """Whether it is known what difference would have been called, and one that is possible would have been."""
        return self.detectable is not None and self.detectable[0] < self.largest


@dataclass(frozen=True, slots=True)
class StudyResult(Record):
    """Everything in study.json."""

    baseline: str
    alpha: float
    margin: float | None
    """Difference of accuracy named in advance as too small to matter; None: nothing is called equivalent."""
    target_accuracy: float | None
    """For steps to accuracy; None when the baseline gained nothing and none was given."""
    n_pairs: int
    seeds: list[int]
    n_prompts: int
    arms: list[Arm]
    comparisons: list[Comparison]
    """Pair after pair, in the order of ``KINDS``."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what the study cannot say."""
    denominator: Denominator = "all"
    """What the losses of all arms are divided by: all response tokens, or the weights that were kept."""
    n_primary: int | None = None
    """Of the pairs; None in files of schema 1, where all were corrected together."""
    teacher: str = ""
    """How the teacher of all arms gave its values where it named its likeliest tokens alone: top-20 + tail; else ""."""
    schema_version: int = STUDY_SCHEMA_VERSION

    def arm(self, name: str) -> Arm:
        """Return the arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def collapsed_arms(self) -> list[Arm]:
        """The arms some of whose runs collapsed."""
        return [arm for arm in self.arms if arm.is_unreliable]

    def n_together(self, role: PairRole | None) -> int:
        """Return how many pairs are corrected together with one of this role."""
        if role is None or self.n_primary is None:
            return self.n_pairs
        return self.n_primary if role == "primary" else self.n_pairs - self.n_primary

    def of_kind(self, kind: Kind) -> list[Comparison]:
        """Return the comparisons of one kind, pair after pair."""
        return [comparison for comparison in self.comparisons if comparison.kind == kind]

    def mark_collapsed(self) -> Self:
        """Count the collapsed runs of every arm, and mark the comparisons of arms that have some."""
        arms = [replace(arm, collapsed=CollapsedRuns.of(arm.runs, self.alpha)) for arm in self.arms]
        names = {arm.name for arm in arms if arm.is_unreliable}
        comparisons = [
            replace(own, unreliable=not names.isdisjoint((own.first, own.second))) for own in self.comparisons
        ]
        return replace(self, arms=arms, comparisons=comparisons)

    def to_record(self) -> dict[str, Any]:
        """Return the content of study.json: plain numbers, strings, lists and objects."""
        return asdict(self)

    def save(self, path: str | Path) -> None:
        """Write study.json, byte for byte the same for the same content."""
        write_record(path, self.to_record())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read study.json, also of schema 1; a newer schema or a damaged file is refused by name."""
        upgrades = {1: _without_detectable}
        found = load_record(cls, path, "study.json", "`rocktokens study`", STUDY_SCHEMA_VERSION, upgrades)
        return found if all(arm.collapsed for arm in found.arms) else found.mark_collapsed()


def _without_detectable(record: dict[str, Any]) -> dict[str, Any]:
    """Leave out of a record of schema 1 what its comparisons called detectable."""
    comparisons = record.get("comparisons")
    if not isinstance(comparisons, list):
        return record
    kept = [{**own, "detectable": None} if isinstance(own, dict) else own for own in comparisons]
    return {**record, "comparisons": kept}
