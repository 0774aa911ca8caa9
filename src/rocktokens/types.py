"""The records that pass between stages: arrays with their shapes, no torch, no behaviour beyond reading and writing.

Shape legend used in names everywhere: R rollouts, T tokens (response positions, concatenated rollout after rollout),
V vocabulary, D student width, E teacher width, K top-k.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import numpy as np

from rocktokens.errors import RocktokensError, TokenizerMismatchError
from rocktokens.parsing import parse_json
from rocktokens.run_dir import as_listed

if TYPE_CHECKING:
    import altair as alt
    import pandas as pd
    from pydantic import TypeAdapter

    Chart = alt.Chart | alt.LayerChart | alt.FacetChart

ROCKS_SCHEMA_VERSION = 2
NAMED = 5
"""Rocks that the name of a set lists."""
LEAST_OF_HALF = 20
"""Prompts of a half below which there is too little data to find rocks."""
CONTROLS_SCHEMA_VERSION = 2
ONE = 1 << 24
"""1 in fixed point: scores are summed as integers of this unit, the same for any order of the rows."""
Interval = tuple[float, float]
"""Low and high end."""
NO_TOKEN = -1
"""In the place of a token's id where fewer are known than elsewhere."""
TAIL = " + tail"
"""How the label of a teacher ends of which only the likeliest tokens are known: all others are one outcome."""


def has_tail(teacher: str) -> bool:
    """Whether the teacher of this label named its likeliest tokens alone: its kl holds for sums, not for each token."""
    return teacher.endswith(TAIL)


def of_teacher(teacher: str) -> str:
    """Name a teacher of that kind behind what rests on it: " (teacher: top-20 + tail)"; nothing for any other."""
    return f" (teacher: {teacher})" if has_tail(teacher) else ""


Verdict = Literal["untested", "pillar", "stumbling", "neutral", "undecided"]
Label = Literal["stuck", "residual", "moving", "moved", "unclear"]
"""Whether training still moves a type (docs/method.md, section 4.2)."""
Category = Literal[
    "latex_math",
    "markdown_whitespace",
    "discourse",
    "digit",
    "operator",
    "punctuation",
    "function_word",
    "content_word",
    "other",
]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, such as ``Message("user", "What is 3 + 4?")``."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a student answers: one question, or a conversation, with a reference answer if there is one.

    Example: ``Prompt(id="wordmath-test-17", text="Ann has 3 apples …", answer="12")``.
    """

    id: str
    text: str
    """The question; of a conversation, the last message."""
    answer: str | tuple[str, ...] | None = None
    """The reference; several, of which any is right; None where the data has none."""
    messages: tuple[Message, ...] = ()
    """The whole conversation, which ends with ``text``; empty where ``text`` is the only turn."""

    @property
    def answers(self) -> tuple[str, ...]:
        """Every reference, in order; empty where there is none."""
        if self.answer is None:
            return ()
        return (self.answer,) if isinstance(self.answer, str) else self.answer


@dataclass(frozen=True, slots=True)
class Rollout:
    """One student completion, as sampled: the ids are the data and are never decoded and tokenised again.

    Example: a prompt of 40 ids answered by 3 tokens and the end token has ``token_ids.shape == (4,)``.
    """

    rollout_id: int
    prompt_id: str
    sample: int
    prompt_ids: np.ndarray
    """int32 (P,): the prompt as the model saw it, template included."""
    token_ids: np.ndarray
    """int32 (T,): the sampled response, the end token included when it was sampled."""
    logprobs: np.ndarray
    """float32 (T,): the sampler's log-probability of each id at temperature 1, before any ban."""
    policy_step: int
    """The training step whose student wrote it (0: before training)."""
    finished: bool
    """True when it ended with an end token, False when it ran into the length limit."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Per-token quantities (docs/method.md, section 2), numpy or torch alike, all (T,) float32 over response tokens.

    The first six are always there; the others are None unless they were asked for.
    """

    kl: Any
    logp_student: Any
    logp_teacher: Any
    entropy_student: Any
    entropy_teacher: Any
    grad_norm: Any
    teacher_mass_top16: Any = None
    """The teacher's probability on the student's 16 likeliest tokens."""
    student_top1_in_teacher_top5: Any = None
    """1 where the student's likeliest token is among the teacher's 5 likeliest, else 0."""
    forward_kl: Any = None
    """Σ q (log q − log p), whatever ``kl`` holds."""
    kl_choice: Any = None
    """The part of ``kl`` that is a choice within classes of tokens (docs/method.md, section 10)."""

    def items(self) -> Iterator[tuple[str, Any]]:
        """Names and arrays of the six standard columns, in the order of the trace schema."""
        for name in STANDARD_COLUMNS:
            yield name, getattr(self, name)

    def present(self) -> Iterator[tuple[str, Any]]:
        """Names and arrays of all columns that are there, the standard ones first."""
        for name in (*STANDARD_COLUMNS, *EXTRA_COLUMNS, CHOICE):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)


STANDARD_COLUMNS = tuple(column.name for column in fields(TokenScores) if column.default is not None)
CHOICE = "kl_choice"
"""The column that comes with classes."""
EXTRA_COLUMNS = tuple(column.name for column in fields(TokenScores) if column.default is None and column.name != CHOICE)
"""The columns that are asked for by name."""


@dataclass(frozen=True, slots=True)
class LikelyTokens:
    """What student and teacher could have written at some response tokens of an update, P of them, in numpy.

    The second axis is the model, the student first. Of the last axis the first entry is the token that was written, the
    others are the model's likeliest, and may hold it once more.
    """

    rollout_ids: np.ndarray
    """int (P,)."""
    ids: np.ndarray
    """int32 (P, 2, 1 + K)."""
    logp: np.ndarray
    """float32 (P, 2, 1 + K): their log-probabilities."""


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """The weight of every response token of one update and the denominator of its loss."""

    weights: Any
    """float (T,): detached."""
    denominator: float
    """Response tokens of the whole update ("all"), or the sum of weights over the whole update ("kept")."""


KEPT = 0.75
"""A type that surely kept at least this share of its kl has not been moved; one that surely kept less has."""
SURE = 0.95
"""A rock that is one in this share of the resamples is a sure one."""


class Record:
    """A part of a result file whose fields are the keys of a JSON object; ``load_record`` reads it strictly.

    Subclasses are frozen dataclasses with slots.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"strict": True, "extra": "forbid", "allow_inf_nan": False}


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class RockToken(Record):
    """One ranked vocabulary type."""

    id: int
    text: str
    rank: int
    freq: int
    mean_kl: float
    score: float
    ccr: float | None
    score_ctx: float | None
    category: str
    score_interval: tuple[float, float] | None = None
    p_in_top_k: float | None = None
    verdict: Verdict = "untested"
    delta: float | None = None
    delta_interval: tuple[float, float] | None = None
    n_persistent: int | None = None
    """Occurrences whose kl was high before and after."""
    ccr_interval: tuple[float, float] | None = None
    """None where ``ccr`` is exact."""
    n_prompts: int | None = None
    """Prompts of the selection half it occurs in; groups of prompts where a half has more than 500."""
    held_out_mean_kl: float | None = None
    """Mean kl on the prompts the rocks were not selected by."""
    held_out_change: float | None = None
    """By which share that changed from the baseline checkpoint to the reference, over the same tokens."""
    bound: float | None = None
    """L(v): the lower bound of the score that ranks by default."""
    label: Label | None = None
    """Whether it moves, decided on the selection half; None in a file of an older schema."""
    held_out_label: Label | None = None
    """The same rule on the other half; None there too, and where the prompts were not split."""
    kept_first: float | None = None
    """The share of its kl at the baseline that is left on the selection half; None where there was none."""
    kept_first_interval: tuple[float, float] | None = None
    kept_middle: float | None = None
    """The same since the checkpoint halfway."""
    kept_middle_interval: tuple[float, float] | None = None

    @property
    def never_learned(self) -> bool:
        """Whether it is stuck on both halves of the prompts: of no other type may that be said."""
        return self.label == self.held_out_label == "stuck"


@dataclass(frozen=True, slots=True)
class RankedType(Record):
    """A type behind the rocks, or before them and passed over because it still moves; of the selection half."""

    id: int
    text: str
    category: str
    freq: int
    n_prompts: int
    mean_kl: float
    score: float
    bound: float
    label: Label
    kept_first: float | None
    kept_first_interval: tuple[float, float] | None
    kept_middle: float | None
    kept_middle_interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class RockSet(Record):
    """The rocks of a run in rank order, with everything needed to reproduce and to refuse to misuse them."""

    tokenizer_sha256: str
    """Over the sorted vocabulary; "" when the trace did not come with a tokenizer."""
    criterion: dict[str, Any]
    source: dict[str, Any]
    summary: dict[str, Any]
    tokens: list[RockToken] = field(default_factory=list)
    windows: dict[str, Any] | None = None
    """``max_each_side`` and ``min_kl``: the rule that makes windows (rocktokens.windows); None when there is none."""
    ranked: list[RankedType] = field(default_factory=list)
    """The best types that are no rocks, in the order of what ranks; empty in a file of an older schema."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __bool__(self) -> bool:
        """A search that found no rocks is a result too."""
        return True

    def __repr__(self) -> str:
        from rocktokens.display.text import visible

        first = ", ".join(visible(token.text) for token in self.tokens[:NAMED])
        more = ", …" if len(self) > NAMED else ""
        return f"RockSet({len(self)} rocks at {self._where()}{': ' if self.tokens else ''}{first}{more})"

    @property
    def ids(self) -> np.ndarray:
        """int64 (K,): rock ids in rank order."""
        return np.array([token.id for token in self.tokens], dtype=np.int64)

    @property
    def is_split(self) -> bool:
        """Whether prompts that did not select the rocks were kept to measure them on."""
        share = self.criterion.get("split")
        return share is not None and share < 1

    @property
    def too_few_prompts(self) -> str:
        """Say that there is too little data to find rocks, and how much would do; "" where there is enough."""
        measuring = self.summary.get("n_prompts", LEAST_OF_HALF)
        selecting = self.summary.get("n_prompts_selection", measuring)
        if min(measuring, selecting) >= LEAST_OF_HALF:
            return ""
        total = measuring + selecting if self.is_split else selecting
        prompts = "prompt is" if total == 1 else "prompts are"
        return f"{total} {prompts} too few to find rocks: trace at least {self.enough_prompts} (trace.num_prompts)"

    @property
    def enough_prompts(self) -> int:
        """How many prompts leave enough for either half."""
        share = self.criterion["split"] if self.is_split else 0.5
        return math.ceil(round(LEAST_OF_HALF / min(share, 1 - share), 6))

    @property
    def teacher(self) -> str:
        """How the teacher's values came where it named its likeliest tokens alone: top-20 + tail; else ""."""
        return self.source.get("teacher", "")

    def require_tokenizer(self, sha256: str) -> None:
        """Refuse to be used with another vocabulary than the one the rocks were found with."""
        if self.tokenizer_sha256 and self.tokenizer_sha256 != sha256:
            raise TokenizerMismatchError(
                f"the rocks were found with tokenizer {self.tokenizer_sha256[:12]}, this model's is {sha256[:12]}: "
                "token ids mean other things there; run `rocktokens find` on a trace of this model"
            )

    def save(self, path: str | Path) -> None:
        """Write rocks.json, byte for byte the same for the same content."""
        write_record(path, {"schema_version": ROCKS_SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read rocks.json; a newer schema or a damaged file is refused by name, an older one has no labels."""
        upgrades = {1: lambda record: record}
        name, maker = "rocks.json", "`rocktokens find`"
        record = read_record(path, name, maker, ROCKS_SCHEMA_VERSION, upgrades)
        if "tokens" not in record:  # which has a default, for sets that are not read from a file
            raise RocktokensError(f"{path} is no {name} (tokens: field required): write it again with {maker}")
        rocks = validate_record(cls, record, path, name, maker)
        # A token may be half of a surrogate pair, which no validator takes for text.
        tokens, ranked = (
            [replace(own, text=entry["text"]) for own, entry in zip(read, record.get(key, []), strict=True)]
            for key, read in (("tokens", rocks.tokens), ("ranked", rocks.ranked))
        )
        return replace(rocks, tokens=tokens, ranked=ranked)

    def to_frame(self) -> "pd.DataFrame":
        """The tokens as a pandas frame, one row each, in rank order."""
        import pandas as pd

        return pd.DataFrame([asdict(token) for token in self.tokens], columns=[f.name for f in fields(RockToken)])

    def _repr_html_(self) -> str:
        """Show the rocks as a table in a notebook."""
        from rocktokens.display.rocks import rock_table

        return rock_table(self).to_html()

    def plot_scores(self, show: int = 30) -> "Chart":
        """Draw the scores of the first ``show`` rocks with their intervals."""
        from rocktokens.report.charts.share_charts import score_records, scores_chart

        return scores_chart(score_records(self.tokens[:show]), self._where())

    def plot_shares(self) -> "Chart":
        """Draw which share of the tokens, the kl and the gradient norm the rocks hold."""
        from rocktokens.report.charts.share_charts import share_records, shares_chart

        return shares_chart(share_records(self.summary), f"{self._where()}, {self.summary['measured_on']}")

    def _where(self) -> str:
        return f"checkpoint {self.criterion.get('reference')}"


@dataclass(frozen=True, slots=True)
class ControlDraw(Record):
    """One set of control types: partners of the rocks, in the order of ``ControlSet.rock_ids``, or a whole."""

    ids: list[int]
    freq: list[int]
    total: int
    """Occurrences of all of them."""
    total_gap: float
    """By how much that differs from the rocks' total, as a share of it."""
    max_gap: float | None
    """The largest difference between a partner's frequency and its rock's, as a share of the rock's; None for a set
    that is matched as a whole."""
    kl_gap: float | None = None
    """By how much their summed kl differs from the rocks', as a share of it; None where it was not matched."""


@dataclass(frozen=True, slots=True)
class ControlSet(Record):
    """Types as frequent as the rocks that are no rocks, drawn several times."""

    tokenizer_sha256: str
    criterion: dict[str, Any]
    source: dict[str, Any]
    rock_ids: list[int]
    rock_freq: list[int]
    draws: list[ControlDraw]

    def __iter__(self) -> Iterator[ControlDraw]:
        return iter(self.draws)

    def __len__(self) -> int:
        return len(self.draws)

    def __repr__(self) -> str:
        worst = max((abs(draw.total_gap) for draw in self.draws), default=0.0)
        return (
            f"ControlSet({len(self)} draws for {len(self.rock_ids)} rocks, {self.n_distinct} distinct; "
            f"total occurrences within {100 * worst:.1f} % of the rocks')"
        )

    def _repr_html_(self) -> str:
        """Show the draws as a table in a notebook."""
        from rocktokens.display.numbers import signed_percent
        from rocktokens.display.table import Column, Table, number

        columns: list[Column[tuple[int, ControlDraw]]] = [
            Column("draw", lambda own: number(own[0])),
            Column("types", lambda own: number(len(own[1].ids))),
            Column("occurrences", lambda own: number(own[1].total)),
            Column("beyond the rocks'", lambda own: number(own[1].total_gap, signed_percent)),
            Column("largest gap of a pair", lambda own: number(own[1].max_gap, signed_percent)),
            Column("kl beyond the rocks'", lambda own: number(own[1].kl_gap, signed_percent)),
        ]
        return Table.of("controls", columns, enumerate(self.draws), f"{self!r}.").to_html()

    def ids(self, draw: int) -> np.ndarray:
        """int64: the control types of one draw; partners are in the order of ``rock_ids``."""
        return np.array(self.draws[draw].ids, dtype=np.int64)

    @property
    def n_distinct(self) -> int:
        """How many draws hold different types: fewer than ``len`` where the vocabulary leaves little choice."""
        return len({frozenset(draw.ids) for draw in self.draws})

    def save(self, path: str | Path) -> None:
        """Write controls.json, byte for byte the same for the same content."""
        write_record(path, {"schema_version": CONTROLS_SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read controls.json; a newer schema or a damaged file is refused by name."""
        upgrades = {1: lambda record: record}  # its draws have no kl_gap
        name, maker = "controls.json", "`match_controls`"
        record = read_record(path, name, maker, CONTROLS_SCHEMA_VERSION, upgrades)
        controls = validate_record(cls, record, path, name, maker)
        pairs = [(controls.rock_ids, controls.rock_freq), *((draw.ids, draw.freq) for draw in controls)]
        pairs += [(draw.ids, controls.rock_ids) for draw in controls if draw.max_gap is not None]
        if any(len(one) != len(other) for one, other in pairs):
            raise RocktokensError(f"{path} is no {name} (lists of different lengths): write it again with {maker}")
        return controls


@dataclass(frozen=True, slots=True)
class ReplayRecord(Record):
    """What the rows of a replay depend on, as ``rocktokens trace`` notes it in the manifest of the run."""

    checkpoints: dict[int, str]
    """By step, the content of the student that was replayed."""
    probe: str
    num_prompts: int
    num_generations: int
    rollouts_per_part: int
    teacher: str
    """Its content, or its name."""
    dtype: str
    seed: int
    task: dict[str, Any]
    """This section of the config, as are the next two."""
    rollouts: dict[str, Any]
    scoring: dict[str, Any]
    top_k: int = 0
    classes: str = ""
    """Hash of the classes that the replay began with, "" where it began without. Its rows have their ``kl_choice``;
    those of the last checkpoint may have got that of other classes since (``TraceStore.classes_sha256``)."""
    served: str = ""
    """How the teacher's values came from a server (``TeacherSection.label``), "" where the teacher was in memory."""

    @classmethod
    def of(cls, manifest: dict[str, Any], path: str | Path) -> Self | None:
        """Read it from the manifest at ``path``; None where the rows were written without ``rocktokens trace``."""
        if not (entry := manifest.get("replay")):
            return None
        return validate_record(cls, entry, path, "record of a replay", "`rocktokens trace --restart`")

    def to_manifest(self) -> dict[str, Any]:
        """Return what the manifest holds; what came later than the record, and is not set, is left out."""
        entry = {**asdict(self), "checkpoints": {str(step): own for step, own in self.checkpoints.items()}}
        return {name: value for name, value in entry.items() if name not in ("top_k", "classes", "served") or value}


def write_record(path: str | Path, record: dict[str, Any], indent: int | None = 1) -> None:
    """Write one JSON object, byte for byte the same for the same content."""
    text = json.dumps(record, indent=indent, ensure_ascii=False, sort_keys=True, allow_nan=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


_NOT_FINITE = re.compile("NaN|Infinity")
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
"""Turns the content of a file of an older schema into that of the current one."""


def load_record(
    cls: type[R],
    path: str | Path,
    name: str,
    maker: str,
    schema_version: int,
    upgrades: Mapping[int, Upgrade] | None = None,
) -> R:
    """Read a file as nested records, field by field; one sentence where a field is missing, unknown or mistyped.

    ``cls`` has a field ``schema_version``, ``maker`` is the command that writes such a file, ``upgrades`` has the older
    schemas that can be read.
    """
    record = {"schema_version": schema_version, **read_record(path, name, maker, schema_version, upgrades)}
    return validate_record(cls, record, path, name, maker)


def validate_record(cls: type[R], record: Any, path: str | Path, name: str, maker: str) -> R:
    """Read the content of a file as nested records; the arguments are those of ``load_record``."""
    try:
        return as_record(cls, record)
    except ValueError as error:
        raise RocktokensError(f"{path} is no {name} ({error}): write it again with {maker}") from None


def as_record(cls: type[R], content: Any) -> R:
    """Read plain values as nested records; a ValueError names the first field that is missing, unknown or mistyped."""
    from pydantic import ValidationError

    text = json.dumps(content, ensure_ascii=False)
    try:
        # Half of a surrogate pair is valid JSON, but not valid text.
        record = _reader(cls).validate_json(text.encode("utf-8", "replace"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from None
    if _NOT_FINITE.search(text) and not _is_finite(content):
        raise ValueError("it has a number that is not finite")  # where any value may stand
    return record


@cache
def _reader(cls: type[Any]) -> "TypeAdapter[Any]":
    """Build what reads a record once per class: for one with many fields that takes longer than the reading."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _is_finite(content: Any) -> bool:
    """Return whether all numbers in plain values are finite."""
    if isinstance(content, dict | list):
        return all(map(_is_finite, content.values() if isinstance(content, dict) else content))
    return not isinstance(content, float) or math.isfinite(content)


def read_record(
    path: str | Path,
    name: str,
    maker: str,
    schema_version: int,
    upgrades: Mapping[int, Upgrade] | None = None,
) -> dict[str, Any]:
    """Read the JSON object in a file, without its schema version; one sentence where it is not such a file.

    A file that a run lists must be as it was listed.
    """
    path = as_listed(path)
    try:
        record = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise RocktokensError(f"{path} does not exist: run {maker} first") from None
    except ValueError as error:
        raise RocktokensError(f"{path} is not valid JSON ({error}): write it again with {maker}") from None
    except OSError as error:
        raise RocktokensError(f"{path} cannot be read ({error.strerror}): give the {name} that {maker} wrote") from None
    if not isinstance(record, dict):
        raise RocktokensError(f"{path} is not a JSON object: write it again with {maker}")
    version = record.pop("schema_version", None)
    if upgrades and isinstance(version, int) and version in upgrades:
        return upgrades[version](record)
    if version != schema_version:
        raise RocktokensError(
            f"{path} has schema_version {version!r}, this rocktokens reads {schema_version}: "
            f"use the version that wrote it, or write it again with {maker}"
        )
    return record
