"""The tables that both commands and pages show, each made once from typed records; rocks are in ``display.rocks``."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from rocktokens.display.numbers import (
    DASH,
    Show,
    counted,
    extent,
    fixed,
    level,
    percent,
    points,
    signed,
    signed_percent,
    with_interval,
)
from rocktokens.display.rocks import with_teacher
from rocktokens.display.table import WIDE, Cell, Column, Table, ends, flat, number, text, verdict
from rocktokens.display.text import printable, visible
from rocktokens.knockout.records import Ban, KnockoutSweep, Role
from rocktokens.rocks.cutoff import jaccard
from rocktokens.studies.records import Arm, CollapsedRuns, Comparison, Kind, StudyResult
from rocktokens.types import RockSet, Verdict

if TYPE_CHECKING:
    from rocktokens.report.views.classes import ClassView
    from rocktokens.report.views.run_view import RunView

KINDS: tuple[Verdict, ...] = ("pillar", "stumbling", "neutral", "undecided")
ROLES: dict[Role, str] = {"tested": "tested", "matched": "placebo, as frequent", "never": "placebo, never written"}
COMPARED: dict[Kind, str] = {
    "equal_steps": "equal steps",
    "equal_tokens": "equal tokens",
    "equal_seconds": "equal time",
    "steps_to_accuracy": "steps to an accuracy",
}
UNRELIABLE_NOTE = "Unreliable: where a run collapsed, means and their intervals say little about other seeds."


def ban_name(ban: Ban) -> str:
    """Name what a knock-out banned: a token with its spaces visible, a set by its name."""
    return visible(ban.name) if ban.is_one_type else printable(ban.name)


def verdict_table(sweep: KnockoutSweep) -> Table:
    """Count the verdicts by what was banned and by rule; a dash where a rule could not be applied."""
    rows = []
    for role, who in ROLES.items():
        if not sweep.of_role(role):
            continue
        own = sweep.counts[role]
        by_rule = {"ours": own.method, "ours, corrected": own.corrected, "the paper's": own.paper}
        for rule, counts in by_rule.items():
            rows.append({"banned": who, "rule": rule, **{kind: (counts or {}).get(kind) for kind in KINDS}})
    columns: list[Column[dict[str, Any]]] = [
        Column("banned", lambda own: text(own["banned"])),
        Column("rule", lambda own: text(own["rule"])),
        *(Column(kind, lambda own, kind=kind: number(own[kind])) for kind in KINDS),
    ]
    title = "Verdicts on the tested bans, beside those on placebos."
    return Table.of("verdicts", columns, rows, title, ["Corrected: for the number of bans of the same kind."], rows)


def class_table(views: Sequence["ClassView"]) -> Table:
    """Make the table of classes: their members, what bans have shown of them, and what they hold of the loss."""
    columns: list[Column[ClassView]] = [
        Column("class", lambda own: number(own.number)),
        Column("members", lambda own: text(member_texts(own))),
        Column("members are", lambda own: verdict(own.state)),
        Column("banned alone", lambda own: text(_by_member(own, own.banned))),
        Column("forced", lambda own: text(_by_member(own, own.forced))),
        Column("whole class banned", lambda own: verdict(own.verdict)),
        Column("of the tokens", lambda own: number(own.token_share, percent)),
        Column("of the kl", lambda own: number(own.kl_share, percent)),
        Column("of its kl, choice", lambda own: number(own.choice_share, percent)),
    ]
    records = [
        {
            "class": own.number,
            "ids": " ".join(map(str, own.ids)),
            "members": member_texts(own),
            "state": own.state,
            "banned": " ".join(own.banned),
            "forced": " ".join(own.forced),
            "whole": own.verdict,
            "token_share": own.token_share,
            "kl_share": own.kl_share,
            "choice_share": own.choice_share,
        }
        for own in views
    ]
    notes = (
        "Banned alone: each member, where another one is likely. Forced: each member, all others banned there. If all "
        "of these are neutral, the members are interchangeable. Whole class banned, everywhere: a pillar's decision "
        "matters.",
    )
    return Table.of("classes", columns, views, "Classes of tokens that may stand for each other.", notes, records)


def member_texts(own: "ClassView") -> str:
    """Show the members of a class in one line, their spaces visible."""
    return " ".join(map(visible, own.texts))


def _by_member(own: "ClassView", verdicts: Sequence[Verdict]) -> str:
    """Show the one verdict of all members, or the verdict of each."""
    if len(set(verdicts)) < 2:
        return next(iter(verdicts), "untested")
    return ", ".join(f"{visible(shown)} {found}" for shown, found in zip(own.texts, verdicts, strict=True))


def arm_table(study: StudyResult) -> Table:
    """Make the table of a study's arms: accuracy before and after, and what training took.

    Where runs collapsed, ``collapse_table`` comes first and counts the runs; the mark of their means takes that room.
    """
    is_marked = bool(study.collapsed_arms)
    runs: Column[Arm] = Column("runs", lambda own: number(len(own.runs)), room=WIDE)
    columns: list[Column[Arm]] = [
        Column("arm", lambda own: text(own.name)),
        *([] if is_marked else [runs]),
        Column("start", lambda own: number(own.start.accuracy, percent)),
        Column("end", lambda own: number(own.end.accuracy, marked(percent, own.is_unreliable))),
        Column(level(study.alpha), lambda own: ends(own.end.interval, percent)),
        Column("tokens", lambda own: number(own.end.tokens), room=WIDE if is_marked else 0),
        Column("seconds", lambda own: number(own.end.seconds)),
        Column("length", lambda own: number(own.facts.get("mean_response_length")), room=WIDE),
        Column("not trained", lambda own: number(own.facts.get("weight_dropped_share"), percent), room=WIDE),
        Column("head saved", lambda own: number(own.facts.get("head_compute_saved"), percent)),
    ]
    records = [
        flat(
            {
                "arm": printable(arm.name),
                "runs": len(arm.runs),
                "unreliable": arm.is_unreliable,
                "start": arm.start.accuracy,
                "end": arm.end.accuracy,
                "interval": arm.end.interval,
                "tokens": arm.end.tokens,
                "seconds": arm.end.seconds,
                "length": arm.facts.get("mean_response_length"),
                "not_trained": arm.facts.get("weight_dropped_share"),
                "head_saved": arm.facts.get("head_compute_saved"),
            }
        )
        for arm in study.arms
    ]
    last = max(arm.end.step for arm in study.arms)
    title = f"Accuracy after {counted(last, 'step')} on {counted(study.n_prompts, 'prompt')}, means over "
    title += f"{counted(len(study.seeds), 'seed')} with {level(study.alpha)} intervals."
    notes = (
        *([UNRELIABLE_NOTE] if is_marked else []),
        f"Tokens and seconds of training per run. Not trained: share of the loss weight that was dropped. Head saved: "
        f"share of the LM head's work. Denominator: {study.denominator}.",
    )
    return Table.of("arms", columns, study.arms, title, notes, records)


def control_table(study: StudyResult) -> Table | None:
    """Make the table of how well the controls match the rocks; None for a study without controls."""
    arms = [arm for arm in study.arms if "control_token_share" in arm.facts]
    shown = {"tokens": "token_share", "of them rocks": "rock_overlap", "kl": "kl_ratio", "‖g‖": "grad_norm_ratio"}
    columns: list[Column[Arm]] = [
        Column("control", lambda own: text(own.name)),
        *(
            Column(name, lambda own, fact=f"control_{fact}": number(own.facts.get(fact), percent))
            for name, fact in shown.items()
        ),
    ]
    records = [
        {"control": printable(arm.name)} | {fact: arm.facts.get(f"control_{fact}") for fact in shown.values()}
        for arm in arms
    ]
    title = "How well the controls match the rocks: means over steps and runs."
    notes = (
        "Tokens: share of all tokens that the control marks. kl, ‖g‖: what it takes from the summed loss and gradient "
        "norm, in percent of what the rocks would take; a dash where the control does not look at them.",
    )
    return with_teacher(Table.of("controls", columns, arms, title, notes, records), study.teacher) if arms else None


def collapse_table(study: StudyResult) -> Table:
    """Make the table of the runs of each arm that ended below their own start."""
    counted_arms = [(arm.name, arm.collapsed) for arm in study.arms if arm.collapsed is not None]
    columns: list[Column[tuple[str, CollapsedRuns]]] = [
        Column("arm", lambda own: text(own[0])),
        Column("runs", lambda own: number(own[1].n_runs)),
        Column("collapsed", lambda own: number(own[1].count)),
        Column("share", lambda own: number(own[1].share, percent)),
        Column(level(study.alpha), lambda own: ends(own[1].interval, percent)),
    ]
    title = f"Collapsed runs: they ended below their own start. Exact {level(study.alpha)} intervals of their share."
    records = [flat({"arm": printable(name), **asdict(own), "share": own.share}) for name, own in counted_arms]
    return Table.of("collapsed", columns, counted_arms, title, (), records)


def comparison_table(study: StudyResult) -> Table:
    """Make the table of comparisons: a verdict for every pair of arms and way to compare."""
    columns: list[Column[Comparison]] = [
        Column("pair", lambda own: text(pair_name(own))),
        Column("compared at", lambda own: text(COMPARED[own.kind])),
        Column("difference", _difference),
        Column("verdict", lambda own: verdict(own.verdict)),
        Column("remark", lambda own: text(_remark(own))),
    ]
    names = ("first", "second", "role", "kind", "at", "difference", "interval", "p", "p_holm", "unreliable", "verdict")
    records = [
        flat({name: own[name] for name in names} | {"detectable_interval": own["detectable"]})
        for own in map(asdict, study.comparisons)
    ]
    title = f"First arm minus second, in points of accuracy or in steps, with {level(study.alpha)} intervals for "
    title += f"{together(study)}."
    notes = (UNRELIABLE_NOTE,) if study.collapsed_arms else ()
    return Table.of("comparisons", columns, study.comparisons, title, notes, records)


def together(study: StudyResult) -> str:
    """Say which pairs the intervals of a study hold for together."""
    primary, exploratory = study.n_together("primary"), study.n_together("exploratory")
    if study.n_primary is None or not exploratory:
        return "one pair" if study.n_pairs == 1 else f"the {study.n_pairs} pairs together"
    own = "the primary pair" if primary == 1 else f"the {primary} primary pairs together"
    other = "exploratory pair" if exploratory == 1 else f"{exploratory} exploratory pairs together"
    return f"{own}, and for the {other}"


def pair_name(own: Comparison) -> str:
    """Name a pair, and say if it is exploratory."""
    return f"{own.first} vs {own.second}" + (" (exploratory)" if own.role == "exploratory" else "")


def marked(show: Show, is_unreliable: bool) -> Show:
    """Return the format of a mean, marked where it is unreliable."""
    return (lambda value: f"{show(value)} (unreliable)") if is_unreliable else show


def _difference(own: Comparison) -> Cell:
    show = partial(signed, digits=0) if own.kind == "steps_to_accuracy" else points
    if not own.unreliable or own.difference is None:
        return number(own.difference, show, own.interval)
    return Cell(f"{with_interval(own.difference, own.interval, show)} (unreliable)", "number", own.difference)


def _remark(own: Comparison) -> str:
    """Say what a verdict rests on, where it is not the interval alone."""
    if own.kind == "steps_to_accuracy" and any(own.never):
        runs = zip((own.first, own.second), own.never, strict=True)
        return f"{percent(own.at)} not reached by {' and '.join(f'{never} of {name}' for name, never in runs if never)}"
    if own.verdict == "undecided" and own.could_be_called:
        return f"smallest detectable effect: {detectable(own)}"
    return ""


def detectable(own: Comparison) -> str:
    """Show the range of the smallest effect that a comparison could detect, with its unit; a dash if not known."""
    if own.detectable is None:
        return DASH
    low, high = own.detectable
    if own.kind == "steps_to_accuracy":
        return extent(low, high, own.largest, 0, "steps")
    return extent(100 * low, 100 * high, 100 * own.largest, 1, "points")


def runs_table(runs: Sequence["RunView"]) -> Table:
    """Make the table that compares runs, a row each."""
    columns: list[Column[dict[str, Any]]] = [
        Column("run", lambda own: text(own["run"])),
        Column("rocks", lambda own: number(own["rocks"])),
        Column("Jaccard with the first", lambda own: number(own["jaccard"], fixed(2))),
        Column("of the tokens", lambda own: number(own["token_share"], percent)),
        Column("of the kl", lambda own: number(own["kl_share"], percent)),
        Column("of the gradient", lambda own: number(own["grad_share"], percent)),
        Column("change of kl", lambda own: number(own["kl_change"], signed_percent)),
        Column("stuck", lambda own: number(own["stuck"])),
        *(Column(kind, lambda own, kind=kind: number(own[kind])) for kind in KINDS),
        Column("last accuracy", lambda own: number(own["accuracy"], percent)),
    ]
    records = [_run_record(run, runs[0]) for run in runs]
    title = (
        "The runs side by side. Stuck: rocks that training never moved, on both halves of the prompts. Pillar, "
        "stumbling, neutral, undecided: verdicts on their rocks."
    )
    notes = [f"{printable(run.name)}: teacher {run.teacher_label}." for run in runs if run.teacher_label]
    if len({run.teacher_label for run in runs}) > 1:
        notes.append("The kl of runs with different labels cannot be compared.")
    return Table.of("runs", columns, records, title, notes, records)


def _run_record(run: "RunView", first: "RunView") -> dict[str, Any]:
    tokens, summary = (run.rocks.tokens, run.rocks.summary) if run.rocks else (None, {})
    return {
        "run": printable(run.name),
        "rocks": None if tokens is None else len(tokens),
        "jaccard": _jaccard(run.rocks, first.rocks),
        "token_share": summary.get("token_share"),
        "kl_share": summary.get("kl_share"),
        "grad_share": summary.get("grad_share"),
        "kl_change": summary.get("kl_change_rocks"),
        "stuck": None if tokens is None else sum(own.never_learned for own in tokens),
        **{kind: None if tokens is None else sum(own.verdict == kind for own in tokens) for kind in KINDS},
        "accuracy": run.evaluations[-1].accuracy if run.evaluations else None,
    }


def _jaccard(own: RockSet | None, other: RockSet | None) -> float | None:
    """Compare two sets of rocks; None where their token ids mean different things."""
    if own is None or other is None or own.tokenizer_sha256 != other.tokenizer_sha256:
        return None
    return jaccard(own.ids, other.ids)
