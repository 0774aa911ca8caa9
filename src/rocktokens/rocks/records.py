"""What ``rocktokens find`` says about a set of rocks, as the typed record of find.json.

The fields are the keys of the file. A mean, share or coefficient that is not defined is None; intervals are 95 %
bootstrap-t intervals over clusters of prompts, [low, high]. "Half" is the half of the prompts a number was measured on.
"""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator

from rocktokens.display.numbers import fixed, signed_percent, with_interval
from rocktokens.display.table import Column, Table, number, text
from rocktokens.errors import RocktokensError
from rocktokens.types import Category, Interval, Record, load_record, write_record

if TYPE_CHECKING:
    import altair as alt

    Chart = alt.Chart | alt.LayerChart | alt.FacetChart

FIND_SCHEMA_VERSION = 1
GroupName = Annotated[str, BeforeValidator(lambda name: "high mean kl" if name == "rare high-kl" else name)]
"""Of a group of types; files of before have the second group under a name that it did not always deserve."""


@dataclass(frozen=True, slots=True)
class FunnelColumns(Record):
    """Every type of the selection half, column by column, in order of token id."""

    token_id: list[int]
    text: list[str]
    category: list[Category]
    freq: list[int]
    mean_kl: list[float]
    ccr: list[float | None]
    """None where the contexts of the type were not compared."""
    group: list[GroupName]
    """"rock", "high mean kl" or "other"."""
    rank: list[int | None]
    """None for a type that is no rock."""


@dataclass(frozen=True, slots=True)
class PairedChange(Record):
    """The kl of a group of types at the baseline and at the reference, over the same occurrences."""

    n_occurrences: int
    n_clusters: int
    """Clusters in which the group occurs: the sample size of the test."""
    kl_before: float | None
    """Mean per occurrence, as are ``kl_after`` and ``delta``."""
    kl_after: float | None
    delta: float | None
    delta_interval: Interval | None
    relative: float | None
    """The change as a share of the kl before."""
    relative_interval: Interval | None
    wilcoxon_p: float | None
    rank_biserial: float | None
    """From −1 (the kl fell in every cluster) to 1 (it rose in every one)."""


@dataclass(frozen=True, slots=True)
class GroupChange(PairedChange):
    """How the kl of one group changed on one half of the prompts."""

    group: GroupName
    """"rock", "high mean kl" or "random"."""
    half: str
    n_types: int
    persistent_share: float | None
    """Share of its occurrences that were hard at both checkpoints; None without a context stage."""


@dataclass(frozen=True, slots=True)
class GroupMean(Record):
    """The mean kl of a group of types at one checkpoint, with its interval."""

    checkpoint: int
    half: str
    group: GroupName
    mean_kl: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Crossing(Record):
    """The K that coverage and stability agree on, and what they are there."""

    k: int
    coverage: float
    stability: float
    crossed: bool
    """False where coverage stays below stability up to the last K, which is then taken."""


@dataclass(frozen=True, slots=True)
class CutoffPoint(Record):
    """Coverage and stability of the first K types of a ranking."""

    k: int
    coverage: float | None
    coverage_held_out: float | None
    """Of the same ranking, on the measuring prompts."""
    stability: float | None
    stability_low: float | None
    stability_high: float | None


@dataclass(frozen=True, slots=True)
class Cutoff(Record):
    """How many types were taken, and how many the data suggest."""

    k: int
    auto: Crossing | None
    """None where the crossing is not defined."""
    curve: list[CutoffPoint]


@dataclass(frozen=True, slots=True)
class SampleSizePoint(Record):
    """How close the ranking of a share of the prompts comes to that of all of them."""

    fraction: float
    n_clusters: int
    jaccard: float | None
    """Of the top k."""
    spearman: float | None
    """Of the scores."""


@dataclass(frozen=True, slots=True)
class SelectorAgreement(Record):
    """What one selector is worth on the selection half."""

    selector: str
    jaccard_halves: float | None
    """Of the top k of two disjoint halves of the prompts: what to expect of a second sample of that size."""
    jaccard_full: float | None
    """Of the top k of a half and of the whole that contains it: flattering."""
    spearman_halves: float | None
    """Of the scores of the types that both halves may rank."""
    coverage: float | None
    """Share of the kl in its top k."""
    jaccard_with: dict[str, float | None]
    """Of its top k with that of each other selector, by name."""


@dataclass(frozen=True, slots=True)
class SensitivityRow(Record):
    """What happens to the rocks when one setting has another value."""

    parameter: str
    value: bool | int | float | str
    default: bool
    """Whether this is the value the rocks were found with."""
    jaccard: float | None
    """Of the rocks with those that were found."""
    entered: list[int]
    """Token ids, as is ``left``."""
    left: list[int]
    exact: bool
    """Whether all contexts were compared."""


@dataclass(frozen=True, slots=True)
class CategoryShares(Record):
    """What one category holds of the measuring prompts, and what its rocks do, as shares of the whole."""

    category: Category
    n_types: int
    n_rock_types: int
    token_share: float | None
    kl_share: float | None
    grad_share: float | None
    rock_token_share: float | None
    rock_kl_share: float | None
    rock_grad_share: float | None


@dataclass(frozen=True, slots=True)
class PositionBin(Record):
    """The tokens and rocks of one range of places in a response."""

    bin: str
    n_tokens: int
    n_rock_tokens: int
    share_of_tokens: float | None
    share_of_rocks: float | None
    rock_share: float | None
    """How many of the tokens here are rocks."""
    mean_kl_rocks: float | None


@dataclass(frozen=True, slots=True)
class PositionProfile(Record):
    """Where rocks sit in a response, on the measuring prompts."""

    checkpoint: int
    n_rollouts: int
    n_rollouts_available: int
    n_occurrences: int
    n_rock_occurrences: int
    line_start: list[PositionBin]
    since_newline: list[PositionBin]
    relative_position: list[PositionBin]


@dataclass(frozen=True, slots=True)
class ControlMatch(Record):
    """Whether types as frequent as the rocks exist; what is None is not in the file."""

    matched: bool
    reason: str | None = None
    """Why there are none."""
    draws: int | None = None
    distinct: int | None = None
    total_gaps: list[float] | None = None
    """By draw, how far the occurrences of all partners are off those of the rocks, as a share."""


@dataclass(frozen=True, slots=True)
class ChoiceShares(Record):
    """What share of the kl is a choice within classes of tokens, on the measuring prompts."""

    classes_sha256: str
    """Of the classes, which the traces name too."""
    half: str
    share: float | None
    share_interval: Interval | None
    rock_share: float | None
    """Of the kl of rocks alone."""
    rock_share_interval: Interval | None

    @property
    def sentence(self) -> str:
        """Say how much of the loss is choice, of all tokens and of rocks."""
        if self.share is None:
            return f"There is no loss left that could be choice ({self.half})."
        rocks = ""
        if self.rock_share is not None:
            rocks = f". Of the loss of rocks it is {with_interval(self.rock_share, self.rock_share_interval)}"
        return (
            f"{with_interval(self.share, self.share_interval)} of the remaining loss is choice: which member of "
            f"a class of tokens comes, not whether one of them does{rocks} ({self.half})."
        )


@dataclass(frozen=True, slots=True)
class FindRecord(Record):
    """Everything in find.json."""

    criterion: dict[str, Any]
    """Every parameter of the search, as in rocks.json."""
    source: dict[str, Any]
    funnel: FunnelColumns
    persistence: list[GroupChange]
    """By half and group; none without two checkpoints that scored the same occurrences."""
    trajectory: list[GroupMean]
    """By checkpoint, half and group, over the checkpoints that scored the same occurrences."""
    cutoff: Cutoff
    sample_size: list[SampleSizePoint]
    selectors: list[SelectorAgreement]
    sensitivity: list[SensitivityRow]
    categories: list[CategoryShares]
    positions: PositionProfile
    controls: ControlMatch
    choice: ChoiceShares | None = None
    """Not in the file where the traces do not tell the choice from the decision."""
    schema_version: int = FIND_SCHEMA_VERSION

    def __repr__(self) -> str:
        rocks, types = self.funnel.group.count("rock"), len(self.funnel.token_id)
        return f"FindRecord({rocks} rocks among {types} types at checkpoint {self.criterion.get('reference')})"

    def _repr_html_(self) -> str:
        """Show what training did to the rocks and to other types, as a table in a notebook."""
        columns: list[Column[GroupChange]] = [
            Column("group", lambda own: text(own.group)),
            Column("prompts", lambda own: text(own.half)),
            Column("types", lambda own: number(own.n_types)),
            Column("tokens", lambda own: number(own.n_occurrences)),
            Column("mean kl before", lambda own: number(own.kl_before, fixed(3))),
            Column("after", lambda own: number(own.kl_after, fixed(3))),
            Column("change", lambda own: number(own.relative, signed_percent, own.relative_interval)),
        ]
        return Table.of("persistence", columns, self.persistence, f"{self!r}.").to_html()

    def plot_chart(self, name: str, run: str = "this run") -> "Chart":
        """Draw the chart of that name: funnel, cutoff, loss or sensitivity."""
        from rocktokens.report.charts.find_charts import find_charts

        return find_charts(run, self)[name].chart

    def plot_funnel(self, run: str = "this run") -> "Chart":
        """Draw every type by frequency and mean kl, rocks named."""
        return self.plot_chart("funnel", run)

    def plot_cutoff(self, run: str = "this run") -> "Chart":
        """Draw coverage of the kl and stability of the set against the number of rocks."""
        return self.plot_chart("cutoff", run)

    def plot_loss(self, run: str = "this run") -> "Chart":
        """Draw the mean kl of rocks and of other types over the checkpoints."""
        return self.plot_chart("loss", run)

    def plot_sensitivity(self, run: str = "this run") -> "Chart":
        """Draw how much of the rock set stays when one setting changes."""
        return self.plot_chart("sensitivity", run)

    def to_record(self) -> dict[str, Any]:
        """Return the JSON object of the file."""
        record = asdict(self)
        record["controls"] = {name: value for name, value in record["controls"].items() if value is not None}
        return {name: value for name, value in record.items() if name != "choice" or value is not None}

    def save(self, path: str | Path) -> None:
        """Write find.json, byte for byte the same for the same content."""
        write_record(path, self.to_record(), indent=None)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read find.json; a newer schema or a damaged file is refused by name."""
        record = load_record(cls, path, "find.json", "`rocktokens find`", FIND_SCHEMA_VERSION)
        if len({len(getattr(record.funnel, own.name)) for own in fields(record.funnel)}) > 1:
            raise RocktokensError(
                f"{path} is no find.json (the columns of funnel differ in length): write it again with `rocktokens "
                "find`"
            )
        return record
