"""What a knock-out sweep found, as records that read, write and show knockout.json; no torch.

Accuracy changes are shares (−0.05: five points lost), intervals are [low, high].
"""

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from rocktokens.display.numbers import counted, level, points
from rocktokens.display.table import Column, Table, number, text, token, verdict
from rocktokens.display.text import printable
from rocktokens.types import Interval, Record, Verdict, load_record, write_record

if TYPE_CHECKING:
    import pandas as pd
    from altair import Chart, FacetChart, LayerChart

KNOCKOUT_SCHEMA_VERSION = 3
Role = Literal["tested", "matched", "never"]
"""Tested: a rock or what was asked for; matched: a placebo as frequent as a rock; never: an id in no rollout."""
Mode = Literal["exact", "curtailed", "sequential"]
"""When a ban is settled (rocktokens.knockout.sweep)."""


class BanKey(NamedTuple):
    """What tells one ban from another, whatever it is called.

    Example: ``BanKey((325,))`` acts everywhere, ``BanKey((325,), (17, 40))`` only where id 17 or id 40 is likely.
    """

    ids: tuple[int, ...]
    alternatives: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ban(Record):
    """Ids that are banned together, everywhere or where an alternative is likely.

    Example: ``Ban(ids=(325,), name="So", role="tested", category="discourse")``.
    """

    ids: tuple[int, ...]
    """Ascending."""
    name: str
    """The token's text, or what the set is called."""
    role: Role = "tested"
    category: str = ""
    beside: int | None = None
    """The tested type that a matched placebo is as frequent as."""
    alternatives: tuple[int, ...] = ()
    """Ascending: the ban acts at positions where the model gives one of these at least 0.05, everywhere if there are
    none (docs/method.md, section 10). Files of schema 2 have none."""

    @property
    def key(self) -> BanKey:
        """What is banned, and where."""
        return BanKey(self.ids, self.alternatives)

    @property
    def is_one_type(self) -> bool:
        """Whether it is a single type, banned everywhere."""
        return len(self.ids) == 1 and not self.alternatives


@dataclass(frozen=True, slots=True)
class BanChanges(Record):
    """What else a ban changes, over the rollouts that hold a banned token (docs/method.md, section 6)."""

    n_rollouts: int
    """Free rollouts that hold a banned token: all others are the same under the ban."""
    n_prompts: int
    """Prompts with such a rollout."""
    length: float | None
    """Mean change in tokens; None, as the next three, when nothing was decoded."""
    truncated: float | None
    """Change of the share that runs into the length limit."""
    first_difference: float | None
    """Median position of the first banned token: how far the text goes before it differs."""
    first_difference_share: float | None
    """The same as a share of the free rollout's length."""
    replacements: list[tuple[int, str, float]]
    """Id, text and share of the tokens that took its place at that position, the commonest first; at most five."""
    lost: list[tuple[str, int]]
    """Prompt and sample of answers that were right and are wrong under the ban."""
    gained: list[tuple[str, int]]
    """Prompt and sample of answers that were wrong and are right under the ban."""
    n_changed: int | None = None
    """Rollouts decoded under the ban whose text it changed: none, where it never acts. None in files of schema 2 or
    before."""

    @property
    def lost_prompts(self) -> int:
        """Prompts with a lost answer."""
        return len({prompt for prompt, _ in self.lost})


@dataclass(frozen=True, slots=True)
class Knockout(Record):
    """One ban: what it does to accuracy, how sure that is, and what else changes."""

    ban: Ban
    delta: float | None
    """Accuracy under the ban minus accuracy without; a forecast for all prompts where it was stopped early."""
    interval: Interval | None
    p: float | None
    """Exact paired sign-flip test, two-sided; with looks on the way, the stage-wise p of the sequential one."""
    q: float | None
    """p corrected by Benjamini–Hochberg among the bans of the same role."""
    verdict: Verdict
    """By our rule (docs/method.md, section 6)."""
    paper_verdict: Verdict
    """The paper's rule, which calls everything neutral that is neither pillar nor stumbling."""
    detectable: float
    """Smallest loss that this sample could detect with 80 % power."""
    bounds: Interval
    """What the change can be at most in each direction: answers the ban touches that are right, or wrong."""
    n_looked: int
    """Prompts whose outcome under the ban is known."""
    stopped: str | None
    """Why not all prompts were looked at: "curtailed", "efficacy", "futility", "neutral"; None when all were."""
    changes: BanChanges
    neutral_prompts: int | None = None
    """Prompts with which a ban that changes as many answers, either way alike, would be called neutral with 80 % power;
    None where the engine's noise leaves no room within the margin, where no answer with a banned token was decoded, and
    in files of schema 1."""
    lost_in_gold: int | None = None
    """Prompts with a lost answer whose gold answer has a banned token's text in it, so that the ban may have made it
    unwritable; None where the text is only whitespace, and in files of schema 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions(Record):
    """What rollouts and grades depend on under any ban; not what is banned, nor how the change is judged."""

    model: str
    tokenizer_sha256: str
    config_sha256: str
    eos_ids: list[int]
    versions: dict[str, str]
    dtype: str
    device: str
    task: dict[str, Any]
    """This section of the config."""
    prompts_sha256: str
    """Of prompts as the model sees them, template included, and their answers."""
    num_prompts: int
    num_samples: int
    temperature: float
    max_new_tokens: int
    batch_size: int
    seed: int
    grader_sha256: str = ""
    """Of the task's own grader, "" where it has none."""

    @property
    def digest(self) -> str:
        """What the rollouts decoded under them are filed under; a grader that was changed grades the same ones."""
        return digest({name: value for name, value in asdict(self).items() if name != "grader_sha256"})


def digest(content: Any) -> str:
    """Return the hex SHA-256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnockoutSettings(Record):
    """What the numbers of a sweep depend on: model, task, prompts, sampling, seed, rule."""

    model: str = "unknown"
    conditions: Conditions | None = None
    """None where the sweep was not made in a run."""
    n_prompts: int
    task: str
    temperature: float
    max_new_tokens: int
    seed: int
    num_samples: int
    mode: Mode
    matched: int
    never: int
    tolerance: float
    alpha: float
    epsilon: float
    margin: float
    interval: Literal["score", "bootstrap"] = "score"
    """Of Δ; schema 1 had percentile intervals of a bootstrap over prompts."""


@dataclass(frozen=True, slots=True)
class FreeAnswers(Record):
    """The answers without a ban."""

    accuracy: float
    interval: Interval
    n_prompts: int
    num_samples: int
    mean_length: float
    truncated_share: float


@dataclass(frozen=True, slots=True)
class EngineNoise(Record):
    """What changes when free rollouts are continued once more, under bans that change nothing."""

    rollouts: int
    tokens: int
    differing: int
    flips: int
    """Answers that change sides."""
    delta: float
    interval: Interval


@dataclass(frozen=True, slots=True)
class SweepCost(Record):
    """Jobs and tokens of a sweep, placebos included."""

    jobs: int
    free_tokens: int
    decoded_tokens: int
    retraced_tokens: int
    full_sweep_tokens: int
    share: float
    """Of a full sweep."""


@dataclass(frozen=True, slots=True)
class VerdictCounts(Record):
    """How many bans of one role have each verdict, by rule; None for a rule that could not be applied."""

    method: dict[Verdict, int] | None
    paper: dict[Verdict, int] | None
    corrected: dict[Verdict, int] | None


@dataclass(frozen=True, slots=True)
class DetectableLoss(Record):
    """Smallest loss detectable with 80 % power, of a ban that changes no other answer."""

    single: float
    corrected: float
    """For the number of tested bans."""


@dataclass(frozen=True, slots=True)
class NeutralPrompts(Record):
    """Prompts that a neutral verdict needs; None where the engine's noise leaves no room within the margin."""

    unchanged: int | None
    """Of a ban that changes no answer."""
    typical: int | None
    """With 80 % power, of a ban that changes as many answers as the median tested one, either way alike."""


@dataclass(frozen=True, slots=True)
class Correlation(Record):
    """Spearman's ρ of Δ with one column of the trace; all but ``n`` are None where one of both is constant."""

    name: str
    rho: float | None
    interval: Interval | None
    """95 %; None also with too few types."""
    p: float | None
    n: int


@dataclass(frozen=True, slots=True, repr=False)
class KnockoutSweep(Record):
    """Everything in knockout.json; ``len`` counts the bans, placebos included.

    Example: ``KnockoutSweep(step 64 on wordmath, 200 prompts; 9 bans: 6 pillar, 0 stumbling, 3 neutral, 0 undecided)``.
    """

    tokenizer_sha256: str
    settings: KnockoutSettings
    baseline: FreeAnswers
    noise: EngineNoise
    cost: SweepCost
    counts: dict[Role, VerdictCounts]
    detectable: DetectableLoss
    correlations: list[Correlation]
    """With entropy, log_freq and kl, over the tested types."""
    warnings: list[str]
    knockouts: list[Knockout]
    """Tested, then matched, then never, each in the order asked for."""
    neutral: NeutralPrompts | None = None
    """None in files of schema 1."""
    schema_version: int = KNOCKOUT_SCHEMA_VERSION

    def of_role(self, role: Role) -> list[Knockout]:
        """Return the knock-outs of one role, in order."""
        return [knockout for knockout in self.knockouts if knockout.ban.role == role]

    def of_ban(self, key: BanKey) -> Knockout:
        """Return what a ban of the sweep did."""
        return next(knockout for knockout in self.knockouts if knockout.ban.key == key)

    def __len__(self) -> int:
        return len(self.knockouts)

    def __repr__(self) -> str:
        return f"KnockoutSweep({self._where()}; {self._tally('tested')})"

    def _repr_html_(self) -> str:
        columns: list[Column[Knockout]] = [
            Column("banned", lambda own: token(own.ban.name)),
            Column("category", lambda own: text(own.ban.category)),
            Column("Δ, points", lambda own: number(own.delta, points, own.interval)),
            Column("verdict", lambda own: verdict(own.verdict)),
        ]
        title = f"{self._where()}; {self._tally('tested')}; placebos as frequent: {self._tally('matched')}."
        return Table.of("bans", columns, self.of_role("tested"), printable(title)).to_html()

    def plot_forest(self) -> "Chart | LayerChart | FacetChart":
        """Draw the change of accuracy under each ban with its interval, placebos below."""
        from rocktokens.report.charts.forest import forest_chart, forest_records

        margin, interval_level = 100 * self.settings.margin, level(self.settings.alpha)
        return forest_chart(forest_records(self.knockouts), margin, self._where(), interval_level)

    def _where(self) -> str:
        own = self.settings
        return f"{own.model} on {own.task}, {counted(own.n_prompts, 'prompt')}"

    def _tally(self, role: Role) -> str:
        verdicts = Counter(own.verdict for own in self.of_role(role))
        kinds = ", ".join(f"{verdicts[kind]} {kind}" for kind in ("pillar", "stumbling", "neutral", "undecided"))
        return f"{counted(verdicts.total(), 'ban')}: {kinds}"

    def save(self, path: str | Path) -> None:
        """Write knockout.json, byte for byte the same for the same content."""
        write_record(path, asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read knockout.json; a newer schema or a damaged file is refused by name."""
        upgrades = {1: _from_schema_1, 2: lambda record: record}  # every ban of schema 2 acts everywhere
        return load_record(cls, path, "knockout.json", "`rocktokens knockout`", KNOCKOUT_SCHEMA_VERSION, upgrades)

    def to_frame(self) -> "pd.DataFrame":
        """Return the knock-outs as a pandas frame, one row each; lists of rollouts become their counts."""
        import pandas as pd

        rows = []
        for record in map(asdict, self.knockouts):
            ban, changes = record.pop("ban"), record.pop("changes")
            counts = {name: len(changes.pop(name)) for name in ("lost", "gained")}
            replaced_by = next((text for _, text, _ in changes.pop("replacements")), None)
            rows.append({**ban, **record, **changes, **counts, "replaced_by": replaced_by})
        return pd.DataFrame(rows)


def _from_schema_1(record: dict[str, Any]) -> dict[str, Any]:
    """Read what was written before the score interval: its intervals and verdicts are those of a bootstrap."""
    settings = record.get("settings")
    if not isinstance(settings, dict):
        return record
    kept = {name: value for name, value in settings.items() if name != "resamples"}
    return {**record, "settings": {**kept, "interval": "bootstrap"}}
