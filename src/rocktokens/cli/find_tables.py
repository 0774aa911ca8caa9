"""What ``rocktokens find`` prints.

1. One screen: the conclusion, the first rocks, and what to do next.
2. With ``--verbose`` all tables: what was found, how sure that is, and what it rests on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rocktokens.classes import TokenClasses
from rocktokens.cli.common import output
from rocktokens.cli.tables import heading, print_lines, print_table
from rocktokens.display.numbers import counted, decimal, fixed, p_value, percent, signed_percent, with_interval
from rocktokens.display.rocks import (
    brief_rock_table,
    label_sentence,
    movement_sentence,
    rock_table,
    share_sentence,
    with_teacher,
)
from rocktokens.display.table import Cell, Column, Table, ends, number, text, token
from rocktokens.display.text import printable, visible
from rocktokens.report.knockout_notes import states_sentence
from rocktokens.report.next_steps import Step
from rocktokens.rocks.classes import ClassSummary, too_few_prompts, was_tested
from rocktokens.rocks.compare import MovedType, RunComparison
from rocktokens.rocks.records import (
    CategoryShares,
    ChoiceShares,
    ControlMatch,
    Cutoff,
    FindRecord,
    GroupChange,
    PositionProfile,
    SelectorAgreement,
    SensitivityRow,
)
from rocktokens.types import KEPT, SURE, RockSet

SCREEN = 100
"""Columns of the short output, on a wider screen too."""
COMMAND = 60
"""Longest command, in characters, whose purpose is aligned with the others."""
MORE_SHARES = ("token_share_median", "grad_share")
GROUP_NAMES = {"rock": "rocks", "high mean kl": "high mean kl", "random": "random types"}
NAMED = 6
"""How many types that enter or leave the set are named."""
SHORT_CLASSES, SHORT_MEMBERS = 3, 40
"""Of the short output: classes that are shown, and characters of their members."""


def print_screen(rocks: RockSet, choice: ChoiceShares | None, show: int) -> None:
    """Print the conclusion and the first rocks, on one screen."""
    print_lines(*_conclusion(rocks, choice), width=SCREEN)
    if rocks.tokens:
        output.print()
        print_table(brief_rock_table(rocks, show), width=SCREEN)


def print_next(steps: Sequence[Step], why_ungraded: str = "") -> None:
    """Print what to do next, each a command as a shell takes it and what it is for, and why stages are left out."""
    heading("What to do next")
    room = max((len(step.command) for step in steps if len(step.command) <= COMMAND), default=0)
    for step in steps:
        line = printable(f"{step.command:<{room}}  # {step.purpose}")
        output.print(line, soft_wrap=True, markup=False, highlight=False)
    if why_ungraded:
        left_out = f"left out: evaluate and knockout; {why_ungraded}"
        output.print(left_out, soft_wrap=True, markup=False, highlight=False)


def _conclusion(rocks: RockSet, choice: ChoiceShares | None = None) -> Iterator[str]:
    """Say what the rocks hold, whether training moved each of them, and how much of the loss is a choice."""
    yield from filter(None, [share_sentence(rocks), label_sentence(rocks), choice and choice.sentence])


def print_found(rocks: RockSet, found: FindRecord, show: int) -> None:
    """Print everything, in the order a reader asks."""
    import pandas as pd

    from rocktokens.report.charts.terminal import curve_text, funnel_text

    print_summary(rocks)
    if found.choice is not None:
        print_lines(found.choice.sentence)
    if not rocks.tokens:
        return
    print_table(rock_table(rocks, show))
    print_lines(*_doubts(rocks))
    heading("Where they are", "each mark is a token type; rocks are frequent *and* far from the teacher")
    output.print(funnel_text(pd.DataFrame(asdict(found.funnel))))
    _print_persistence(rocks, found.persistence)
    heading("How many", "coverage of the kl grows with K; stability says whether other prompts give the same K types")
    output.print(curve_text([asdict(point) for point in found.cutoff.curve], found.cutoff.k))
    print_lines(*_crossing(found.cutoff))
    heading("Would other prompts, or another rule, give the same rocks?")
    print_table(with_teacher(selector_table(found.selectors), rocks.teacher))
    sizes = ", ".join(f"{percent(own.fraction, 0)}: {decimal(own.jaccard, 2)}" for own in found.sample_size)
    print_lines(f"Jaccard with the rocks found on part of the prompts: {sizes}")
    heading("Which settings matter", "one changed at a time; 1.00 means the same rocks")
    print_table(with_teacher(sensitivity_table(found), rocks.teacher))
    heading("What they are and where they occur", f"shares of the {rocks.summary['measured_on']}")
    print_table(with_teacher(category_table(found.categories), rocks.teacher))
    print_lines(_positions(found.positions))
    heading("Is there anything to compare them with?")
    print_lines(_controls(found.controls))


def print_summary(rocks: RockSet) -> None:
    """Print the conclusion, further shares of the rocks, and which prompts all that was measured on."""
    summary, criterion, intervals = rocks.summary, rocks.criterion, rocks.summary["intervals"]
    print_lines(*_conclusion(rocks))
    if not rocks.tokens:
        return
    median, gradient = (with_interval(summary[name], intervals.get(name)) for name in MORE_SHARES)
    lines = [
        f"Rocks are {percent(summary['vocab_share'])} of the types used, {median} of the tokens of the median output, "
        f"and {gradient} of the logit-gradient norm."
    ]
    if summary["kl_change_rocks"] is not None:
        names = ("kl_change_rocks", "kl_change_rest")
        own, rest = (with_interval(summary[name], intervals[name], signed_percent) for name in names)
        change = f"kl from checkpoint {criterion['baseline']} to {criterion['reference']}: rocks {own}, the rest {rest}"
        lines.append(" ".join(filter(None, (movement_sentence(rocks), f"On the same tokens, {change}."))))
    print_lines(
        *lines,
        f"Rocks are the token types that hold the most loss (kl to the teacher, in nats) at checkpoint "
        f"{criterion['reference']}{_ranked_by(criterion)}{_required(criterion)}. They were selected on "
        f"{percent(criterion['split'])} of the prompts and measured on the {summary['measured_on']} "
        f"({summary['n_prompts']} prompts), with 95 % intervals over prompts.",
    )


def _ranked_by(criterion: dict[str, Any]) -> str:
    if criterion["stage"] == "bound":
        return " (by a lower bound over prompts)"
    if criterion["stage"] == "score":
        return ""
    if criterion["baseline"] == criterion["reference"]:
        return ", at hard places in contexts that recur"
    return f", at places that were already hard at checkpoint {criterion['baseline']}, in contexts that recur"


def _required(criterion: dict[str, Any]) -> str:
    """Which labels the rocks were taken from; nothing for a search that did not look at them."""
    if criterion.get("baseline") == criterion.get("reference"):
        return ""
    said = {
        "stopped": ", without those whose loss is surely still falling",
        "stuck": f", of those that surely kept {percent(KEPT, 0)} of it on the prompts that selected them",
    }
    return said.get(criterion.get("require", "any"), "")


def _doubts(rocks: RockSet) -> Iterator[str]:
    found, asked = len(rocks.tokens), rocks.summary["k"]
    sure = sum((own.p_in_top_k or 0) >= SURE for own in rocks.tokens)
    yield f"{sure} of {counted(found, 'rock')} are in at least {percent(SURE, 0)} of such resamples."
    if found < asked:
        yield f"{asked} were asked for; no other type passes."
    if alone := sum(own.n_prompts == 1 for own in rocks.tokens):
        yield f"{alone} occur in one prompt only: what recurs there is that prompt."
    if zero := rocks.summary["n_score_zero"]:
        yield f"{zero} have score 0 and fill up K in order of token id."


def _print_persistence(rocks: RockSet, records: Sequence[GroupChange]) -> None:
    before, now = rocks.criterion["baseline"], rocks.criterion["reference"]
    heading("Did training move them?", f"mean kl at checkpoint {before} and {now}, over the same tokens")
    if not records:
        reason = "only one checkpoint was traced" if before == now else "the checkpoints did not score the same tokens"
        return print_lines(f"Not known: {reason}.")
    columns: list[Column[GroupChange]] = [
        Column("group", lambda own: text(GROUP_NAMES[own.group])),
        Column("prompts", lambda own: text(own.half)),
        Column("tokens", lambda own: number(own.n_occurrences)),
        Column("before", lambda own: number(own.kl_before, fixed(3))),
        Column("after", lambda own: number(own.kl_after, fixed(3))),
        Column("change", lambda own: number(own.relative, signed_percent)),
        Column("95 %", lambda own: ends(own.relative_interval, signed_percent)),
        Column("Wilcoxon p", lambda own: number(own.wilcoxon_p, p_value)),
        Column("hard at both", lambda own: number(own.persistent_share, percent)),
    ]
    chosen = (
        "The groups were chosen on the selection half: a difference between halves includes regression to the mean."
        if rocks.is_split
        else "The groups were chosen on these very prompts, which flatters them."
    )
    unit = "prompt" if rocks.summary["n_clusters"] == rocks.summary["n_prompts"] else "group of prompts"
    note = (
        f"{chosen} Wilcoxon: one difference per {unit}. Hard at both: share of the occurrences. Random types may "
        "be among those of high mean kl."
    )
    return print_table(with_teacher(Table.of("persistence", columns, records, notes=[note]), rocks.teacher))


def _crossing(cutoff: Cutoff) -> Iterator[str]:
    crossing = cutoff.auto
    if crossing is not None:
        coverage, stability = percent(crossing.coverage), decimal(crossing.stability, 2)
        why = (
            f"where coverage ({coverage}) meets stability ({stability})"
            if crossing.crossed
            else f"all types with a score: coverage ({coverage}) stays below stability ({stability})"
        )
        yield f"--k auto takes {crossing.k}, {why}."


def selector_table(records: Sequence[SelectorAgreement]) -> Table:
    """Make the table of selectors: how well each repeats, what it covers, and how much it shares with the others."""

    def shared(own: SelectorAgreement, name: str) -> Cell:
        return Cell("·", "number") if name == own.selector else number(own.jaccard_with[name], fixed(2))

    columns: list[Column[SelectorAgreement]] = [
        Column("selector", lambda own: text(own.selector)),
        Column("two halves", lambda own: number(own.jaccard_halves, fixed(2))),
        Column("rank corr.", lambda own: number(own.spearman_halves, fixed(2))),
        Column("coverage", lambda own: number(own.coverage, percent)),
        *(Column(f"∩ {own.selector}", lambda row, name=own.selector: shared(row, name)) for own in records),
    ]
    note = (
        "Two halves: Jaccard of the rocks of two disjoint halves of the prompts. ∩: Jaccard with another selector. For "
        "context, what recurs is taken as found on all prompts, which flatters it."
    )
    return Table.of("selectors", columns, records, notes=[note])


def sensitivity_table(found: FindRecord) -> Table:
    """Make the table of settings: how much of the set stays as each moves, and which types enter and leave."""
    texts = dict(zip(found.funnel.token_id, found.funnel.text, strict=True))

    def named(token_ids: Sequence[int]) -> Cell:
        shown = " ".join(visible(texts[token_id]) for token_id in token_ids[:NAMED])
        return text(shown if len(token_ids) <= NAMED else f"{shown} and {len(token_ids) - NAMED} more")

    columns: list[Column[SensitivityRow]] = [
        Column("setting", lambda own: text(own.parameter)),
        Column("value", lambda own: text(f"{own.value}{' ◄' if own.default else ''}")),
        Column(
            "Jaccard",
            lambda own: Cell(decimal(own.jaccard, 2) + ("" if own.exact else " (estimate)"), "number", own.jaccard),
        ),
        Column("enter", lambda own: named(own.entered)),
        Column("leave", lambda own: named(own.left)),
    ]
    return Table.of("sensitivity", columns, found.sensitivity)


def category_table(records: Sequence[CategoryShares]) -> Table:
    """Make the table of categories: what each holds of the tokens, the kl and the gradient, in all and in rocks."""
    shares = {"token_share": "tokens", "kl_share": "kl", "grad_share": "gradient"}
    columns: list[Column[CategoryShares]] = [
        Column("category", lambda own: text(own.category)),
        Column("rocks", lambda own: number(own.n_rock_types)),
        Column("types", lambda own: number(own.n_types)),
        *(Column(title, lambda own, name=name: number(getattr(own, name), percent)) for name, title in shares.items()),
        *(
            Column(f"rocks' {title}", lambda own, name=f"rock_{name}": number(getattr(own, name), percent))
            for name, title in shares.items()
        ),
    ]
    return Table.of("categories", columns, records)


def _positions(profile: PositionProfile) -> str:
    starts, deciles = profile.line_start[0], profile.relative_position
    shares = " ".join(percent(own.rock_share, 0).removesuffix(" %") for own in deciles)
    return (
        f"{percent(starts.share_of_rocks)} of the rock tokens start a line ({percent(starts.share_of_tokens)} of "
        f"all tokens do). Share of rocks from the first to the last tenth of the response: {shares} %."
    )


def _controls(record: ControlMatch) -> str:
    if not record.matched:
        return f"No: there are no frequency-matched control types ({record.reason})."
    worst = max(map(abs, record.total_gaps or [0.0]))
    return (
        f"Yes: {record.draws} draws of frequency-matched control types ({record.distinct} different), total "
        f"occurrences within {percent(worst)} of the rocks'."
    )


def print_classes(classes: TokenClasses, summaries: Sequence[ClassSummary], show: int) -> None:
    """Print which tokens may stand for each other, classes with the most loss first."""
    heading("Which tokens may stand for each other?")
    print_lines(class_sentence(classes, summaries))
    if summaries:
        note = (
            "Strength: the probability that both models give one member where the other is written, relative to that "
            f"one's own, in the weaker direction (at least {_least_share(classes)}). Shares at checkpoint "
            f"{classes.criterion['reference']}, over all prompts."
        )
        state_of = {each.ids: each.state for each in classes}
        members, *shares = _class_columns()
        state: Column[ClassSummary] = Column("members are", lambda own: text(state_of[own.ids]))
        strength: Column[ClassSummary] = Column("strength", lambda own: text(_strengths(own)))
        columns = [members, *([state] if was_tested(classes) else []), strength, *shares]
        table = Table.of("classes", columns, summaries[:show], notes=[note])
        print_table(with_teacher(table, classes.criterion.get("teacher", "")))


def print_short_classes(classes: TokenClasses, summaries: Sequence[ClassSummary]) -> None:
    """Print how many classes there are and what they hold, and those with the most loss."""
    output.print()
    print_lines(class_sentence(classes, summaries), width=SCREEN)
    if summaries:
        table = Table.of("classes", _class_columns(SHORT_MEMBERS), summaries[:SHORT_CLASSES])
        print_table(with_teacher(table, classes.criterion.get("teacher", "")), width=SCREEN)


def class_sentence(classes: TokenClasses, summaries: Sequence[ClassSummary]) -> str:
    """Say how many classes there are and what they hold, or why there are none."""
    doubt = f"{too_few}. What follows may be chance. " if (too_few := too_few_prompts(classes)) else ""
    if not summaries:
        untested = f"no two types have {_least_share(classes)} of each other's mass where they are written"
        return f"{doubt}No classes: {'bans refuted every link' if was_tested(classes) else untested}."
    tokens, loss = (percent(sum(getattr(own, name) for own in summaries)) for name in ("token_share", "kl_share"))
    number_of = f"{len(classes)} class holds" if len(classes) == 1 else f"{len(classes)} classes hold"
    shown = "These are candidates: `rocktokens knockout RUN --classes` tests them."
    if was_tested(classes):
        shown = states_sentence(each.state for each in classes)
    return f"{doubt}{number_of} {loss} of the loss that is left, with {tokens} of the tokens. {shown}"


def _class_columns(longest: int | None = None) -> list[Column[ClassSummary]]:
    def members(own: ClassSummary) -> Cell:
        whole = "  ".join(map(visible, own.texts))
        return text(whole if longest is None or len(whole) <= longest else f"{whole[: longest - 1]}…")

    return [
        Column("members", members),
        Column("tokens", lambda own: number(own.token_share, percent)),
        Column("kl", lambda own: number(own.kl_share, percent)),
        Column("rocks", lambda own: text(f"{own.n_rocks} of {len(own.ids)}")),
    ]


def _least_share(classes: TokenClasses) -> str:
    return percent(classes.criterion["share"], 0)


def _strengths(own: ClassSummary) -> str:
    return " to ".join(dict.fromkeys(decimal(value, 2) for value in (own.weakest, own.strongest)))


def print_comparison(compared: RunComparison, show: int) -> None:
    """Print two searches side by side."""
    found = compared.agreement
    within = " and ".join(decimal(value, 2) for value in found.jaccard_within)
    output.print(
        f"[bold]Jaccard of the rocks {decimal(found.jaccard, 2)}[/bold] ({found.n_rocks[0]} and {found.n_rocks[1]} "
        f"rocks; by chance {decimal(found.jaccard_by_chance, 2)}; two halves of the prompts of each run alone: "
        f"{within}).",
        highlight=False,
    )
    print_lines(
        f"Rank correlation of the scores {decimal(found.spearman, 2)} over the {found.n_types_in_both} types "
        "ranked in both. Both were searched with the settings of A."
    )
    columns: list[Column[MovedType]] = [
        Column("token", lambda own: token(own.text)),
        Column("category", lambda own: text(own.category)),
        Column("rank A", lambda own: number(own.rank_a)),
        Column("rank B", lambda own: number(own.rank_b)),
        Column("kl A", lambda own: number(own.kl_share_a, percent)),
        Column("kl B", lambda own: number(own.kl_share_b, percent)),
        Column("tokens A", lambda own: number(own.token_share_a, percent)),
        Column("tokens B", lambda own: number(own.token_share_b, percent)),
    ]
    title = f"what moved most of {len(found.moved)} types (A: {compared.a}, B: {compared.b})"
    print_table(with_teacher(Table.of("moved", columns, found.moved[:show], title), found.teacher))
