"""The tables of the report: cells as text, with the values they are sorted by; and the same as records for CSV."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rocktokens.display.numbers import (
    DASH,
    counted,
    decimal,
    hundredths,
    percent,
    points,
    signed_decimal,
    signed_hundredths,
    signed_percent,
    significant,
    with_interval,
)
from rocktokens.display.text import printable, visible
from rocktokens.evaluation.records import EvaluationRecord
from rocktokens.report.charts.theme import Records
from rocktokens.report.views.run_view import RunView
from rocktokens.types import KEPT, RockSet, RockToken

KINDS = ("pillar", "stumbling", "neutral", "undecided")
ROLES = {"tested": "tested", "matched": "placebo, as frequent", "never": "placebo, never written"}
VERDICT_RULES = {
    "method": "Verdicts by our rule.",
    "paper": "Verdicts by the paper's rule, which calls neutral whatever the prompts cannot tell.",
}
RULES = {"method": "ours", "corrected": "ours, corrected for the number of bans", "paper": "the paper's"}
COMPARED = {
    "equal_steps": "equal steps",
    "equal_tokens": "equal tokens",
    "equal_seconds": "equal time",
    "steps_to_accuracy": "steps to an accuracy",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell says, and its place when the column is sorted by number."""

    text: str
    value: float | None = None
    token: bool = False
    """Whether the text is a token's."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under titles."""

    name: str
    """Of its file, without the ending."""
    caption: str
    titles: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    records: Records
    searchable: bool = False

    def is_numeric(self, column: int) -> bool:
        """Whether a column is set flush right and sorted by number."""
        return any(row[column].value is not None for row in self.rows)


def rock_table(rocks: RockSet) -> Table:
    """Every rock with its scores, its kl and change on prompts that did not select it, and its verdict."""
    columns: dict[str, Callable[[RockToken], Cell]] = {
        "rank": lambda own: _number(own.rank, str(own.rank)),
        "token": lambda own: Cell(visible(own.text), token=True),
        "category": lambda own: Cell(own.category.replace("_", " ")),
        "occurrences": lambda own: _number(own.freq, f"{own.freq:,}"),
        "mean kl": lambda own: _number(own.mean_kl, decimal(own.mean_kl, 3)),
        "held out" if rocks.is_split else "again": lambda own: _number(
            own.held_out_mean_kl, decimal(own.held_out_mean_kl, 3)
        ),
        "change": lambda own: _number(own.held_out_change, signed_percent(own.held_out_change)),
        "R": lambda own: _number(own.score, with_interval(significant(own.score), _span(own.score_interval))),
        "CCR": lambda own: _number(own.ccr, decimal(own.ccr, 2)),
        "P(top K)": lambda own: _number(own.p_in_top_k, decimal(own.p_in_top_k, 2)),
        "ban, points": lambda own: _number(
            own.delta, with_interval(points(own.delta), signed_hundredths(own.delta_interval))
        ),
        "verdict": lambda own: Cell(own.verdict),
    }
    rows = tuple(tuple(cell(own) for cell in columns.values()) for own in rocks.tokens)
    caption = " ".join(
        (
            f"{counted(len(rocks.tokens), 'rock')}. R: occurrences × mean kl, in nats, with its 95 % interval. CCR: "
            "share of the occurrences that stay hard in contexts that recur. Ranked by R · CCR.",
            _whose_numbers(rocks),
            VERDICT_RULES.get(rocks.source.get("verdicts", {}).get("rule"), ""),
        )
    ).rstrip()
    records = [{**asdict(own), "text": visible(own.text)} for own in rocks.tokens]
    return Table("rocks", caption, tuple(columns), rows, [_flat(record) for record in records], searchable=True)


def _whose_numbers(rocks: RockSet) -> str:
    """Which prompts the columns were measured on."""
    if not rocks.is_split:
        return (
            "All prompts selected the rocks, so every number is of prompts that selected them, which flatters it. "
            "Change: of the kl over training."
        )
    return (
        "Occurrences, mean kl, R, CCR and P(top K) are of the prompts that selected the rocks; held out is the mean kl "
        "on the other prompts, change that of it over training."
    )


def accuracy_table(evaluations: Sequence[EvaluationRecord]) -> Table:
    """Accuracy of every model that was evaluated."""
    rows = tuple(
        (
            Cell(printable(own.name)),
            Cell(printable(own.task)),
            _number(own.accuracy, percent(own.accuracy)),
            Cell(hundredths(own.wilson_interval)),
            _number(own.n_prompts, f"{own.n_prompts:,}"),
            _number(own.mean_response_length, decimal(own.mean_response_length, 0)),
            _number(own.truncated_share, percent(own.truncated_share)),
        )
        for own in evaluations
    )
    names = ("name", "task", "accuracy", "wilson_interval", "n_prompts", "mean_response_length", "truncated_share")
    records = [_flat({name: getattr(own, name) for name in names}) for own in evaluations]
    titles = ("model", "task", "accuracy", "95 % interval", "prompts", "tokens an answer", "cut off")
    return Table("accuracy", "Accuracy of the models on the task, with Wilson intervals.", titles, rows, records)


def claim_table(claims: Sequence[dict[str, Any]]) -> Table:
    """The paper's claims about gradients, and whether they hold here."""
    rows = tuple((Cell(own["claim"]), Cell(own["verdict"]), Cell(printable(own["because"]))) for own in claims)
    records = [{name: own[name] for name in ("name", "claim", "verdict", "because")} for own in claims]
    return Table(
        "claims", "Claims about gradients, tested on this run.", ("claim", "verdict", "because"), rows, records
    )


def verdict_table(knockout: dict[str, Any]) -> Table:
    """How many bans are called what, by who was banned and by which rule."""
    counted_rows = [
        {"banned": who, "rule": rule, **{kind: knockout["counts"][role][name][kind] for kind in KINDS}}
        for role, who in ROLES.items()
        for name, rule in RULES.items()
        if knockout["counts"].get(role, {}).get(name) and any(knockout["counts"][role][name].values())
    ]
    rows = tuple(
        (Cell(own["banned"]), Cell(own["rule"]), *(_number(own[kind], str(own[kind])) for kind in KINDS))
        for own in counted_rows
    )
    return Table("verdicts", "Verdicts, beside those of placebos.", ("banned", "rule", *KINDS), rows, counted_rows)


def arm_table(study: dict[str, Any]) -> Table:
    """One row an arm: accuracy before and after, and what training took."""
    records = [
        {
            "arm": printable(arm["name"]),
            "runs": len(arm["runs"]),
            "start": arm["points"][0]["accuracy"],
            "end": arm["points"][-1]["accuracy"],
            "interval": arm["points"][-1]["interval"],
            "tokens": arm["points"][-1]["tokens"],
            "seconds": arm["points"][-1]["seconds"],
            "not_trained": arm["facts"].get("weight_dropped_share"),
            "head_saved": arm["facts"].get("head_compute_saved"),
        }
        for arm in study["arms"]
    ]
    rows = tuple(
        (
            Cell(own["arm"]),
            _number(own["runs"], str(own["runs"])),
            _number(own["start"], percent(own["start"])),
            _number(own["end"], with_interval(percent(own["end"]), hundredths(own["interval"]))),
            _number(own["tokens"], decimal(own["tokens"], 0)),
            _number(own["seconds"], decimal(own["seconds"], 0)),
            _number(own["not_trained"], percent(own["not_trained"])),
            _number(own["head_saved"], percent(own["head_saved"])),
        )
        for own in records
    )
    titles = ("arm", "runs", "start", "end", "tokens", "seconds", "weight not trained", "head work saved")
    prompts = counted(study["n_prompts"], "prompt")
    caption = f"The arms: accuracy on {prompts}, means over runs; denominator {study.get('denominator', 'all')}."
    return Table("arms", caption, titles, rows, [_flat(own) for own in records])


def comparison_table(study: dict[str, Any]) -> Table:
    """A verdict line for every pair and way to compare."""
    rows = tuple(
        (
            Cell(printable(f"{own['first']} vs {own['second']}")),
            Cell(COMPARED[own["kind"]]),
            _number(own["difference"], _difference(own)),
            Cell(own["verdict"]),
            Cell(_remark(own)),
        )
        for own in study["comparisons"]
    )
    names = ("first", "second", "kind", "at", "difference", "interval", "p", "p_holm", "detectable", "verdict")
    records = [_flat({name: own[name] for name in names}) for own in study["comparisons"]]
    level = percent(1 - study["alpha"], 0)
    caption = (
        f"First arm minus second, with {level} intervals for all pairs together, in points of accuracy or in steps."
    )
    return Table("comparisons", caption, ("pair", "compared at", "difference", "verdict", "remark"), rows, records)


def runs_table(runs: Sequence[RunView]) -> Table:
    """The runs side by side, a row a run."""
    records = [_run_record(run, runs[0]) for run in runs]
    rows = tuple(
        (
            Cell(own["run"]),
            _number(own["rocks"], DASH if own["rocks"] is None else f"{own['rocks']:,}"),
            _number(own["jaccard"], decimal(own["jaccard"], 2)),
            *(_number(own[name], percent(own[name])) for name in ("token_share", "kl_share", "grad_share")),
            _number(own["kl_change"], signed_percent(own["kl_change"])),
            _number(own["kept"], DASH if own["kept"] is None else str(own["kept"])),
            *(_number(own[kind], DASH if own[kind] is None else str(own[kind])) for kind in KINDS),
            _number(own["accuracy"], percent(own["accuracy"])),
        )
        for own in records
    )
    titles = (
        *("run", "rocks", "Jaccard with the first", "of the tokens", "of the kl", "of the gradient", "change of kl"),
        *(f"kept {percent(KEPT, 0)}", *KINDS, "last accuracy"),
    )
    caption = "The runs side by side. Pillar, stumbling, neutral, undecided: verdicts on their rocks."
    return Table("runs", caption, titles, rows, records)


def _run_record(run: RunView, first: RunView) -> dict[str, Any]:
    tokens, summary = run.rocks.tokens if run.rocks else None, run.summary or {}
    return {
        "run": printable(run.name),
        "rocks": None if tokens is None else len(tokens),
        "jaccard": _jaccard(run.rocks, first.rocks),
        "token_share": summary.get("token_share"),
        "kl_share": summary.get("kl_share"),
        "grad_share": summary.get("grad_share"),
        "kl_change": summary.get("kl_change_rocks"),
        "kept": None if tokens is None else sum(own.kept is True for own in tokens),
        **{kind: None if tokens is None else sum(own.verdict == kind for own in tokens) for kind in KINDS},
        "accuracy": run.evaluations[-1].accuracy if run.evaluations else None,
    }


def _jaccard(own: RockSet | None, other: RockSet | None) -> float | None:
    """None where token ids of the two mean different things."""
    if own is None or other is None or own.tokenizer_sha256 != other.tokenizer_sha256:
        return None
    a, b = ({token.id for token in rocks.tokens} for rocks in (own, other))
    return len(a & b) / len(a | b) if a | b else None


def _number(value: float | None, text: str) -> Cell:
    return Cell(text, None if value is None else float(value))


def _span(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"[{significant(interval[0])}, {significant(interval[1])}]"


def _difference(own: dict[str, Any]) -> str:
    if own["difference"] is None:
        return DASH
    if own["kind"] == "steps_to_accuracy":
        low, high = (signed_decimal(end, 0) for end in own["interval"])
        return f"{signed_decimal(own['difference'], 0)} [{low}, {high}]"
    return with_interval(points(own["difference"]), signed_hundredths(own["interval"]))


def _remark(own: dict[str, Any]) -> str:
    """What a verdict rests on, where it is not the interval alone."""
    if own["kind"] == "steps_to_accuracy" and any(own["never"]):
        missed = " and ".join(
            f"{count} of {printable(own[which])}"
            for which, count in zip(("first", "second"), own["never"], strict=True)
            if count
        )
        return f"{percent(own['at'])} not reached by {missed}"
    if own["verdict"] == "undecided" and own["detectable"] is not None:
        scale, digits = (1, 0) if own["kind"] == "steps_to_accuracy" else (100, 1)
        return f"±{scale * own['detectable']:,.{digits}f} could have been seen"
    return ""


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """A record whose intervals are two columns."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if name.endswith("interval"):
            low, high = value or (None, None)
            flat |= {f"{name}_low": low, f"{name}_high": high}
        else:
            flat[name] = value
    return flat
