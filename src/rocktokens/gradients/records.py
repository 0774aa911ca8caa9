"""What ``rocktokens gradients`` found, as records that mirror gradients.json. No torch.

    record = GradientsRecord.load("runs/demo/gradients.json")
    record.settings.reference                                              a checkpoint
    record.trace.groups["rocks"].norm_share                                from the trace, with intervals over prompts
    record.logit.reference.vocabulary.groups["rocks"].cos_balanced.value   logit space: .vocabulary or .hidden
    record.logit.persistence.vocabulary.types.corrected                    None where there is one checkpoint only
    record.parameter.shares.gradient.all.groups["rocks"].share.mean        parameter space, over batches
    record.parameter.shares.update.effects["rocks"].verdict                None without the optimizer's state
    record.claims[0].verdict                                               supported, contradicted or inconclusive

1. Field names are the keys of the file. Dictionaries are keyed by names that come from the data: groups, categories,
   blocks. Tables of types are columns, one entry per type.
2. None stands for what is not defined, such as the cosine of a zero gradient.
3. ``load`` checks every field and refuses a damaged file in one sentence.

How the numbers are defined: docs/method.md, section 5.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Self, TypeVar, get_args

from pydantic import BeforeValidator

from rocktokens.display import table
from rocktokens.rocks.records import PairedChange
from rocktokens.types import Interval, Record, RockSet, read_record, validate_record, write_record

if TYPE_CHECKING:
    import altair as alt

    Chart = alt.Chart | alt.LayerChart | alt.FacetChart

GRADIENTS_SCHEMA_VERSION = 1
ROCKS, HIGH_KL, CONTROL, REST = "rocks", "high mean kl", "control", "rest"
"""The groups of types. ``REST`` is also what the tokens outside any other partition's groups are called."""
Space = Literal["hidden", "vocabulary"]
T = TypeVar("T")
Column = list[float | None]
"""One number per type or per batch; None where it is not defined."""

SUPPORTED: Literal["supported"] = "supported"
CONTRADICTED: Literal["contradicted"] = "contradicted"
INCONCLUSIVE: Literal["inconclusive"] = "inconclusive"
_FORMER_WORDS = {
    "holds": SUPPORTED,
    "does not hold": CONTRADICTED,
    "cannot be told here": INCONCLUSIVE,
    "cannot be told": INCONCLUSIVE,
}
_FORMER_NAMES = {
    "rare high-kl": HIGH_KL,
    "rare_high_kl": "high_mean_kl",
    "n_rare_high_kl": "n_high_mean_kl",
}
_current_word = BeforeValidator(lambda word: _FORMER_WORDS.get(word, word) if isinstance(word, str) else word)
ClaimWord = Literal["supported", "contradicted", "inconclusive"]
ClaimVerdict = Annotated[ClaimWord, _current_word]
AdamVerdict = Annotated[Literal["suppresses", "amplifies", "inconclusive"], _current_word]
"""What Adam does to a group's share."""


@dataclass(frozen=True, slots=True)
class GradientsSettings(Record):
    """What the numbers depend on, and how many tokens they rest on."""

    batches: int
    tokens_per_forward: int
    sketch_width: int | None
    memory: int
    reference: int
    """The checkpoint that is measured."""
    baseline: int
    """The earlier one it is compared with; the same where there is one only."""
    measured_on: str
    n_prompts: int
    n_rollouts: int
    n_tokens: int
    divergence: str
    temperature: float
    dtype: str
    seed: int


@dataclass(frozen=True, slots=True)
class ControlGroup(Record):
    """How well the control group matches the frequency of the rocks, over all prompts."""

    kind: Literal["matched", "partial", "none"]
    tolerance: float
    """By which share the frequency of a control may differ from its rock's."""
    reason: str | None
    """Why not every rock has a partner."""
    n_matched: int
    n_rocks: int
    occurrences: int
    matched_rock_occurrences: int
    rock_occurrences: int
    n_high_mean_kl: int
    """Controls that would otherwise be in the group of high-mean-kl types."""


# What the trace says


@dataclass(frozen=True, slots=True)
class TraceGroup(Record):
    """Shares and means of a group of types in the trace; intervals are over prompts."""

    n_types: int
    n_occurrences: int
    token_share: float | None
    token_share_interval: Interval | None
    norm_share: float | None
    """Of Σ‖g‖."""
    norm_share_interval: Interval | None
    kl_share: float | None
    kl_share_interval: Interval | None
    mean_norm: float | None
    change: PairedChange | None
    """Of the kl since the baseline; None where no other checkpoint scored the same tokens."""


@dataclass(frozen=True, slots=True)
class NormRatio(Record):
    """Mean ‖g‖ of an occurrence of a rock, divided by that of another group."""

    ratio: float | None
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class HighKlTypes(Record):
    """All high-mean-kl types compared with the rocks, controls among them or not."""

    n_types: int
    kl: float | None
    """Mean per occurrence, in nats."""
    rocks_kl: float | None
    norm_ratio: NormRatio


@dataclass(frozen=True, slots=True)
class KeptKl(Record):
    """The share of its kl that each rock kept."""

    token_id: list[int]
    kept: Column


@dataclass(frozen=True, slots=True)
class TraceTypes(Record):
    """Every type that occurs."""

    token_id: list[int]
    text: list[str]
    category: list[str]
    group: list[str]
    freq: list[int]
    kl_before: Column
    kl: Column
    mean_norm: Column


@dataclass(frozen=True, slots=True)
class TraceSummary(Record):
    """What the trace alone says: norms, kl before and after."""

    paired: bool
    """Whether both checkpoints scored the same tokens."""
    groups: dict[str, TraceGroup]
    norm_ratios: dict[str, NormRatio]
    """Rocks against each other group, and against "all" tokens."""
    high_mean_kl: HighKlTypes
    rocks_kept: KeptKl | None
    types: TraceTypes


# Logit space


@dataclass(frozen=True, slots=True)
class BySpace(Record, Generic[T]):
    """One result for each coordinate system of logit space."""

    vocabulary: T
    hidden: T


@dataclass(frozen=True, slots=True)
class WithError(Record):
    """A number and its standard error, 0 where it is exact."""

    value: float | None
    error: float | None


@dataclass(frozen=True, slots=True)
class SketchSettings(Record):
    """Of the count-sketch that stands for the vocabulary."""

    width: int
    seed: int


@dataclass(frozen=True, slots=True)
class WholeGradient(Record):
    """The sums over all types in one space, both exact."""

    space: Space
    pooled_norm: float | None
    """‖G‖."""
    balanced_norm: float | None
    """‖G_bal‖."""
    cosine: float | None
    """Of the two."""
    alignment: float | None
    """‖G‖ / Σ‖g_i‖: 1 where all positions push one way."""


@dataclass(frozen=True, slots=True)
class GroupGradient(Record):
    """What the gradients of a group of types are like in one space."""

    name: str
    space: Space
    n_types: int
    n_occurrences: int
    token_share: float | None
    norm_share: float | None
    """Of Σ‖g_i‖ over all positions; exact."""
    mean_norm: float | None
    """Mean of ‖g_i‖ over the group's occurrences; exact."""
    norm: WithError
    """Of the sum of the group's gradients."""
    alignment: WithError
    """That norm divided by Σ‖g_i‖ of the group: 1 where all of it pushes one way."""
    cos_pooled: WithError
    cos_balanced: WithError
    signed_share: WithError
    medians: dict[str, float | None]
    """Over the types of the group, by column of ``TypeColumns``."""


@dataclass(frozen=True, slots=True)
class RankTest(Record):
    """Mann–Whitney's test on one number of the types of two groups."""

    n_first: int
    """Types for which the number is defined."""
    n_second: int
    median_first: float | None
    median_second: float | None
    superiority: float | None
    """Chance that a type of the first group has the larger number, ties counting half; None for an empty group."""
    p: float | None


@dataclass(frozen=True, slots=True)
class GroupTest(RankTest):
    """A rank test, with what was tested."""

    column: str
    space: Space
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class LargestPart(Record):
    """The type with the largest signed share of a sum of gradients; without an id where there is no such sum."""

    token_id: int | None
    freq: int
    share: float | None


@dataclass(frozen=True, slots=True)
class DirectionTest(RankTest):
    """Do rocks point where other types point? Rocks against other types, on the cosine with the others' sum R."""

    largest: LargestPart
    """Part of R."""


@dataclass(frozen=True, slots=True)
class RockColumns(Record):
    """The rocks that occur."""

    token_id: list[int]
    direction: list[int]
    """Rocks whose mean gradients lie along one line have the same number."""
    alignment: Column
    coherence: Column
    cos_others: Column


@dataclass(frozen=True, slots=True)
class OtherTypes(Record):
    """The types that are not rocks."""

    coherence: float | None
    """The median."""


@dataclass(frozen=True, slots=True)
class TypeColumns(Record):
    """Every type that occurs, in one space; ``*_error`` are standard errors."""

    token_id: list[int]
    freq: list[int]
    norm: Column
    norm_error: Column
    mean_norm: Column
    share: Column
    alignment: Column
    alignment_error: Column
    coherence: Column
    coherence_error: Column
    cos_balanced: Column
    cos_balanced_error: Column
    cos_pooled: Column
    cos_pooled_error: Column
    contribution: Column
    contribution_error: Column
    cos_others: Column
    """With the balanced sum of the types that are not rocks, the type itself left out."""


@dataclass(frozen=True, slots=True)
class SpaceGradients(Record):
    """Everything one space says of one checkpoint."""

    sketch: SketchSettings | None
    """None where the sums are exact."""
    whole: WholeGradient
    groups: dict[str, GroupGradient]
    tests: list[GroupTest]
    categories: dict[str, GroupGradient]
    direction: DirectionTest
    rocks: RockColumns
    others: OtherTypes
    types: TypeColumns


@dataclass(frozen=True, slots=True)
class GroupPersistence(Record):
    """Medians over the types of a group of cosines between the checkpoints."""

    name: str
    space: Space
    n_types: int
    n_split: int
    """Types with halves; the medians after ``cosine`` are over these."""
    cosine: float | None
    """Of all types of the group."""
    cosine_split: float | None
    """Of those with halves."""
    split_half_before: float | None
    split_half_after: float | None
    cross_half: float | None
    corrected: float | None


@dataclass(frozen=True, slots=True)
class RockPersistence(Record):
    """The rocks that occur, in the order of ``RockColumns``."""

    corrected: Column
    """Cosine of the mean gradients at both checkpoints, corrected for the noise of the sample."""


@dataclass(frozen=True, slots=True)
class TypePersistence(Record):
    """Cosines of every type between the checkpoints."""

    token_id: list[int]
    cosine: Column
    split_half_before: Column
    split_half_after: Column
    cross_half: Column
    corrected: Column


@dataclass(frozen=True, slots=True)
class SpacePersistence(Record):
    """How directions changed between the checkpoints in one space."""

    groups: dict[str, GroupPersistence]
    rocks: RockPersistence
    types: TypePersistence


@dataclass(frozen=True, slots=True)
class LogitSummary(Record):
    """Logit space at both checkpoints; the last two are None where there is one checkpoint only."""

    reference: BySpace[SpaceGradients]
    baseline: BySpace[SpaceGradients] | None
    persistence: BySpace[SpacePersistence] | None
    """How directions changed in between."""


# Parameter space


@dataclass(frozen=True, slots=True)
class BatchMean(Record):
    """A mean over batches; None where no batch has a value."""

    mean: float | None
    interval: Interval | None
    """None for fewer than two values."""
    values: Column
    """By batch."""


@dataclass(frozen=True, slots=True)
class GroupGeometry(Record):
    """One group's vector compared with the sum of all groups."""

    norm: BatchMean
    cosine: BatchMean
    share: BatchMean
    rate: BatchMean | None = None
    """Of the update; None for a gradient."""


@dataclass(frozen=True, slots=True)
class Geometry(Record):
    """All groups' vectors in one block, or in all of them."""

    norm: BatchMean
    """Of the sum of all groups."""
    energy: BatchMean
    """Which share of the squared norm of that sum lies in this block."""
    groups: dict[str, GroupGeometry]


@dataclass(frozen=True, slots=True)
class AdamEffect(Record):
    """What Adam does to a group's share."""

    difference: BatchMean
    """Share in the update minus share in the gradient."""
    below: int
    """Batches in which the difference is below 0."""
    above: int
    p: float
    """Of the sign test."""
    verdict: AdamVerdict


@dataclass(frozen=True, slots=True)
class GradientGeometry(Record):
    """The groups' gradients."""

    all: Geometry
    """Over all blocks."""
    blocks: dict[str, Geometry]
    cosines: dict[str, dict[str, BatchMean]]
    """Between any two groups."""


@dataclass(frozen=True, slots=True)
class UpdateGeometry(GradientGeometry):
    """The groups' parts of Adam's next step."""

    step_shares: dict[str, BatchMean]
    """Signed shares of the whole next step: of each group, of momentum and of weight decay."""
    effects: dict[str, AdamEffect]


@dataclass(frozen=True, slots=True)
class SharesRecord(Record):
    """The result of ``gradient_shares`` for one partition of the tokens."""

    groups: list[str]
    blocks: list[str]
    n_batches: int
    tokens: dict[str, list[int]]
    """Of each group, by batch."""
    gradient: GradientGeometry
    update: UpdateGeometry | None
    """None without the optimizer's state."""


@dataclass(frozen=True, slots=True)
class PartitionShares(Record):
    """Shares of the gradient compared with shares of the tokens."""

    shares: SharesRecord
    token_share: dict[str, float]
    excess: dict[str, BatchMean]
    """Signed share of the gradient minus share of the tokens."""


@dataclass(frozen=True, slots=True)
class OptimizerSettings(Record):
    """Of the next step."""

    learning_rate: float


@dataclass(frozen=True, slots=True)
class ParameterSummary(PartitionShares):
    """Parameter space at the reference, by group and by category."""

    categories: PartitionShares
    optimizer: OptimizerSettings | None
    note: str
    """What to know about the optimizer."""


# All of it


@dataclass(frozen=True, slots=True)
class Claim(Record):
    """One claim of the paper and what the numbers say of it."""

    name: str
    claim: str
    because: str
    verdict: ClaimVerdict
    sentence: str = ""
    """The claim, the verdict, and what it rests on."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sentence", f"{self.claim}: {self.verdict}; {self.because}")

    def to_record(self) -> dict[str, str]:
        """Return the JSON object of the claim."""
        return asdict(self)


@dataclass(frozen=True, slots=True, repr=False)
class GradientsRecord(Record):
    """Everything in gradients.json.

    Example: ``GradientsRecord(checkpoint 64 against 0, 11,243 tokens of 192 prompts; supported: total, kept; …)``.
    """

    criterion: dict[str, Any]
    """Of the rocks."""
    source: dict[str, Any]
    """``manifest_sha256`` of the traces."""
    settings: GradientsSettings
    warnings: list[str]
    groups: dict[str, list[int]]
    """Ascending token ids by name: disjoint, and together all that occur."""
    control: ControlGroup
    trace: TraceSummary
    logit: LogitSummary
    parameter: ParameterSummary
    claims: list[Claim]

    schema_version: int = GRADIENTS_SCHEMA_VERSION

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read gradients.json; a newer schema or a damaged file is refused by name."""
        name, maker = "gradients.json", "`rocktokens gradients`"
        record = _with_current_names(read_record(path, name, maker, GRADIENTS_SCHEMA_VERSION))
        return validate_record(cls, {"schema_version": GRADIENTS_SCHEMA_VERSION, **record}, path, name, maker)

    def is_of(self, rocks: RockSet) -> bool:
        """Return whether these are the gradients of these rocks, found by the same criterion in the same traces."""
        source = rocks.source.get("manifest_sha256")
        return self.criterion == rocks.criterion and self.source.get("manifest_sha256") == source

    def save(self, path: str | Path) -> None:
        """Write gradients.json, byte for byte the same for the same content."""
        write_record(path, self.to_record(), indent=None)

    def to_record(self) -> dict[str, Any]:
        """Return the JSON object of the file."""
        return asdict(self)

    def __repr__(self) -> str:
        found = {word: [own.name for own in self.claims if own.verdict == word] for word in get_args(ClaimWord)}
        verdicts = "; ".join(f"{word}: {', '.join(names)}" for word, names in found.items() if names)
        return f"GradientsRecord({self._where()}; {verdicts})"

    def _repr_html_(self) -> str:
        return claim_table(self.claims, f"The paper's claims about gradients, {self._where()}.").to_html()

    def plot_chart(self, name: str, run: str = "this run") -> "Chart":
        """Draw the chart of that name: gradient_norm, gradient_alignment, gradient_kl or gradient_blocks."""
        from rocktokens.report.charts.gradient_charts import gradient_charts

        return gradient_charts(self, run)[name].chart

    def plot_norms(self, run: str = "this run") -> "Chart":
        """Draw how large the gradients of each type are, by group."""
        return self.plot_chart("gradient_norm", run)

    def plot_alignment(self, run: str = "this run") -> "Chart":
        """Draw which way the gradients of each type point, by group."""
        return self.plot_chart("gradient_alignment", run)

    def plot_kl(self, run: str = "this run") -> "Chart":
        """Draw the kl of each type at the baseline against that at the reference."""
        return self.plot_chart("gradient_kl", run)

    def plot_blocks(self, run: str = "this run") -> "Chart":
        """Draw the rocks' signed share of the gradient, and of Adam's step, in each block of the student."""
        return self.plot_chart("gradient_blocks", run)

    def _where(self) -> str:
        own = self.settings
        against = "" if own.baseline == own.reference else f" against {own.baseline}"
        return f"checkpoint {own.reference}{against}, {own.n_tokens:,} tokens of {own.n_prompts} prompts"


def claim_table(claims: Sequence[Claim], title: str = "The paper's claims about gradients.") -> table.Table:
    """Make the table of the paper's claims about gradients: the verdict on each, and why."""
    columns: list[table.Column[Claim]] = [
        table.Column("claim", lambda own: table.text(own.claim)),
        table.Column("verdict", lambda own: table.verdict(own.verdict)),
        table.Column("because", lambda own: table.text(own.because)),
    ]
    records = [{"name": own.name, "claim": own.claim, "verdict": own.verdict, "because": own.because} for own in claims]
    return table.Table.of("claims", columns, claims, title, (), records)


def _with_current_names(content: Any) -> Any:
    """Rename the groups and fields of older files, which called types of a high mean kl rare."""
    if isinstance(content, dict):
        return {_FORMER_NAMES.get(key, key): _with_current_names(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_with_current_names(value) for value in content]
    return _FORMER_NAMES.get(content, content) if isinstance(content, str) else content
