"""What ``rocktokens find`` prints: first what was found and how sure that is, then what it rests on."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from rocktokens.cli.common import output, percent, percent_interval
from rocktokens.cli.tables import WIDE, decimal, heading, p_value, plain_table
from rocktokens.display.numbers import as_a_set
from rocktokens.display.text import visible
from rocktokens.types import SURE, RockSet, RockToken

GROUP_NAMES = {"rock": "rocks", "rare high-kl": "high mean kl", "random": "random types"}
NOT_NARROW = ("category", "in", "mean kl", "95 %")
"""Columns of the rocks that only a screen at least so wide has room for."""
Justified = tuple[str, Any]


def print_found(rocks: RockSet, analysis: dict[str, Any], show: int) -> None:
    """Everything, in the order a reader asks."""
    import pandas as pd

    from rocktokens.report.charts.terminal import curve_text, funnel_text

    print_summary(rocks)
    if not rocks.tokens:
        return
    output.print(rock_table(rocks, show))
    _print_certainty(rocks)
    heading("Where they stand", "each mark is a token type; rocks are frequent *and* far from the teacher")
    output.print(funnel_text(pd.DataFrame(analysis["funnel"])))
    _print_persistence(rocks, analysis["persistence"])
    heading("How many", "coverage of the kl grows with K, stability says whether other prompts would name the same K")
    output.print(curve_text(analysis["cutoff"]["curve"], analysis["cutoff"]["k"]))
    _print_crossing(analysis["cutoff"])
    heading("Would other prompts, or another rule, name the same ones?", "")
    output.print(_selector_table(analysis["selectors"]))
    output.print(_sample_size(analysis["sample_size"]))
    heading("What hangs on the settings", "one moved at a time; 1.00 means the same rocks")
    output.print(_sensitivity_table(rocks, analysis))
    heading("What they are and where they sit", f"shares of the {rocks.summary['measured_on']}")
    output.print(_category_table(analysis["categories"]))
    output.print(_positions(analysis["positions"]))
    heading("Is there anything to compare them with?", "")
    output.print(_controls(analysis["controls"]), markup=False)


def print_summary(rocks: RockSet) -> None:
    """What a rock is, what these amount to, and which prompts that was measured on."""
    summary, criterion, interval = rocks.summary, rocks.criterion, rocks.summary["intervals"]
    if summary["kl_share"] is None:
        return output.print("there is no kl to rank: on these tokens the student and the teacher are the same")
    if not rocks.tokens:
        return output.print("no type has a score to rank by: lower find.min_score, tau, gamma or eta, or min_freq")
    count = "1 rock" if len(rocks.tokens) == 1 else f"{len(rocks.tokens)} rocks"
    output.print(
        f"[bold]{count}[/bold]: token types that hold the most loss (kl to the teacher, in nats) at checkpoint "
        f"{criterion['reference']}{_in_contexts(criterion)}. Selected on {percent(criterion['split'])} of the prompts; "
        f"what is said of them is measured on the {summary['measured_on']} ({summary['n_prompts']} prompts), with 95 % "
        "intervals over prompts.",
        highlight=False,
    )

    def share(name: str) -> str:
        return f"{percent(summary[name])} {percent_interval(interval.get(name))}".strip()

    output.print(
        f"they are {percent(summary['vocab_share'])} of the types used and {share('token_share')} of the tokens "
        f"(median over outputs {share('token_share_median')}), and hold {share('kl_share')} of the kl and "
        f"{share('grad_share')} of the logit-gradient norm",
        highlight=False,
    )
    if summary["kl_change_rocks"] is not None:
        output.print(
            f"kl from checkpoint {criterion['baseline']} to {criterion['reference']} on the same tokens: rocks "
            f"{_signed_share(summary['kl_change_rocks'], interval['kl_change_rocks'])}, the rest "
            f"{_signed_share(summary['kl_change_rest'], interval['kl_change_rest'])}{_together(summary)}",
            highlight=False,
        )


def _together(summary: dict[str, Any]) -> str:
    verdict = as_a_set(summary["intervals"])
    return f": {verdict}" if verdict else ""


def _in_contexts(criterion: dict[str, Any]) -> str:
    if criterion["stage"] != "context":
        return ""
    if criterion["baseline"] == criterion["reference"]:
        return ", at hard places in contexts that recur"
    return f", at places that were hard at checkpoint {criterion['baseline']} already, in contexts that recur"


def rock_table(rocks: RockSet, show: int, width: int | None = None) -> Table:
    """The first rocks with the numbers they were selected by, whitespace visible; fewer columns where it is narrow."""
    is_split, is_context = rocks.is_split, rocks.criterion["stage"] == "context"
    where = "held out, change: on prompts that did not select them" if is_split else "no split: all on the same prompts"
    score = "min R" if rocks.criterion["joint"] else "R"
    cells: dict[str, Callable[[RockToken], str | Text]] = {
        "": lambda token: str(token.rank),
        "token": lambda token: Text(visible(token.text)),
        "category": lambda token: token.category,
        "freq": lambda token: str(token.freq),
        "in": lambda token: _number(token.n_prompts),
        "mean kl": lambda token: decimal(token.mean_kl, 3),
        "held out" if is_split else "again": lambda token: decimal(token.held_out_mean_kl, 3),
        "change": lambda token: "—" if token.held_out_change is None else f"{100 * token.held_out_change:+.0f} %",
        score: lambda token: _number(token.score),
        "95 %": lambda token: "—" if token.score_interval is None else "[{:.3g}, {:.3g}]".format(*token.score_interval),
        "CCR": lambda token: decimal(token.ccr, 2),
        f"{score}·CCR": lambda token: _number(token.score_ctx),
        "P(K)": lambda token: decimal(token.p_in_top_k, 2),
    }
    hidden = {*(() if is_context else ("CCR", f"{score}·CCR")), *(NOT_NARROW if (width or output.width) < WIDE else ())}
    shown = {name: cell for name, cell in cells.items() if name not in hidden}
    table = plain_table(list(shown), ("token", "category"), f"top {min(show, len(rocks.tokens))} rocks ({where})")
    for token in rocks.tokens[:show]:
        table.add_row(*(cell(token) for cell in shown.values()))
    return table


def _print_certainty(rocks: RockSet) -> None:
    is_context = rocks.criterion["stage"] == "context"
    parts = ["in: prompts it occurs in", "R = freq × mean kl"]
    if rocks.is_split:
        parts += ["held out: mean kl on the other prompts", "change: of that, since the baseline checkpoint"]
    if is_context:
        parts += ["CCR: share of its occurrences that were hard at both checkpoints in a recurring context"]
    taken = ", contexts taken as found" if is_context else ""
    parts += [f"P(K): how often it is among the first K when prompts are drawn again{taken}"]
    output.print(" · ".join(parts), highlight=False)
    for line in _doubts(rocks):
        output.print(line, highlight=False)


def _doubts(rocks: RockSet) -> Iterator[str]:
    found, asked = len(rocks.tokens), rocks.summary["k"]
    sure = sum((token.p_in_top_k or 0) >= SURE for token in rocks.tokens)
    yield f"{sure} of {found} are in at least {100 * SURE:.0f} % of such draws"
    if found < asked:
        yield f"{asked} were asked for; no other type has a score to be ranked by"
    if alone := sum(token.n_prompts == 1 for token in rocks.tokens):
        yield f"{alone} occur in one prompt only: what recurs there is that prompt"
    if zero := rocks.summary["n_score_zero"]:
        yield f"{zero} have score 0 and fill up K in order of token id"


def _print_persistence(rocks: RockSet, records: list[dict[str, Any]]) -> None:
    before, now = rocks.criterion["baseline"], rocks.criterion["reference"]
    heading("Did training move them?", f"mean kl at checkpoint {before} and {now}, over the same tokens")
    if not records:
        reason = "only one checkpoint was traced" if before == now else "the checkpoints did not score the same tokens"
        return output.print(f"{reason}, so nothing can be said about change")
    columns = ["group", "prompts", "tokens", "before", "after", "change", "95 %", "Wilcoxon p", "stuck"]
    table = plain_table(columns, ("group", "prompts"))
    for record in records:
        table.add_row(
            GROUP_NAMES[record["group"]],
            record["half"],
            f"{record['n_occurrences']:,}",
            decimal(record["kl_before"], 3),
            decimal(record["kl_after"], 3),
            "—" if record["relative"] is None else f"{100 * record['relative']:+.1f} %",
            percent_interval(record["relative_interval"]),
            p_value(record["wilcoxon_p"]),
            percent(record["persistent_share"]),
        )
    output.print(table)
    chosen = (
        "the groups were chosen on the selection half: a difference between halves includes regression to the mean; "
        if rocks.is_split
        else "the groups were chosen on these very prompts, which flatters them; "
    )
    unit = "prompt" if rocks.summary["n_clusters"] == rocks.summary["n_prompts"] else "group of prompts"
    output.print(
        f"{chosen}Wilcoxon tests one difference per {unit}; stuck: occurrences hard at both checkpoints; random types "
        "may be among those of high mean kl"
    )


def _print_crossing(cutoff: dict[str, Any]) -> None:
    crossing = cutoff["auto"]
    if crossing is None:
        return
    where = (
        "where coverage ({}) meets stability ({:.2f})"
        if crossing["crossed"]
        else ("all that have a score: coverage ({}) stays below stability ({:.2f})")
    )
    output.print(
        f"--k auto would take {crossing['k']}, " + where.format(percent(crossing["coverage"]), crossing["stability"]),
        highlight=False,
    )


def _selector_table(records: list[dict[str, Any]]) -> Table:
    names = [record["selector"] for record in records]
    table = plain_table(
        ["selector", "two halves", "rank corr.", "coverage", *(f"∩ {name}" for name in names)], ("selector",)
    )
    for record in records:
        table.add_row(
            record["selector"],
            decimal(record["jaccard_halves"], 2),
            decimal(record["spearman_halves"], 2),
            percent(record["coverage"]),
            *("·" if name == record["selector"] else decimal(record["jaccard_with"][name], 2) for name in names),
        )
    return table


def _sample_size(records: list[dict[str, Any]]) -> str:
    points = ", ".join(f"{100 * record['fraction']:.0f} %: {decimal(record['jaccard'], 2)}" for record in records)
    return (
        "two halves: Jaccard of the rocks of two disjoint halves of the prompts; ∩: Jaccard with another selector; for "
        "context, what recurs is taken as found on all prompts, which flatters it\n"
        f"Jaccard with the rocks found when only some of the prompts are used: {points}"
    )


def _sensitivity_table(rocks: RockSet, analysis: dict[str, Any]) -> Table:
    texts = dict(zip(analysis["funnel"]["token_id"], analysis["funnel"]["text"], strict=True))
    table = plain_table(["setting", "value", "Jaccard", "enter", "leave"], ("setting", "value", "enter", "leave"))
    for record in analysis["sensitivity"]:
        sampled = "" if record["exact"] else " (estimate)"
        table.add_row(
            record["parameter"],
            f"{record['value']}{' ◄' if record['default'] else ''}",
            decimal(record["jaccard"], 2) + sampled,
            *(Text(_names(record[side], texts)) for side in ("entered", "left")),
        )
    return table


def _category_table(records: list[dict[str, Any]]) -> Table:
    columns = ["category", "rocks", "types", "tokens", "kl", "gradient", "rocks' tokens", "kl", "gradient"]
    table = plain_table(columns, ("category",))
    for record in records:
        shares = [
            record[prefix + name] for prefix in ("", "rock_") for name in ("token_share", "kl_share", "grad_share")
        ]
        table.add_row(
            record["category"],
            str(record["n_rock_types"]),
            str(record["n_types"]),
            *(percent(share) for share in shares),
        )
    return table


def _positions(profile: dict[str, Any]) -> str:
    starts = profile["line_start"][0]
    deciles = profile["relative_position"]
    return (
        f"{percent(starts['share_of_rocks'])} of the rock tokens start a line ({percent(starts['share_of_tokens'])} of "
        "all tokens do); share of rocks from the first to the last tenth of the response: "
        + " ".join("—" if bin_["rock_share"] is None else f"{100 * bin_['rock_share']:.0f}" for bin_ in deciles)
        + " %"
    )


def _controls(record: dict[str, Any]) -> str:
    if not record["matched"]:
        return f"no frequency-matched control types: {record['reason']}"
    worst = max(map(abs, record["total_gaps"]))
    return (
        f"yes: {record['draws']} draws of frequency-matched control types ({record['distinct']} different), total "
        f"occurrences within {100 * worst:.1f} % of the rocks'"
    )


def print_comparison(record: dict[str, Any], show: int) -> None:
    """Two searches side by side."""
    within = " and ".join(decimal(value, 2) for value in record["jaccard_within"])
    output.print(
        f"[bold]Jaccard of the rocks {decimal(record['jaccard'], 2)}[/bold] ({record['n_rocks'][0]} and "
        f"{record['n_rocks'][1]} rocks; by chance {decimal(record['jaccard_by_chance'], 2)}; two halves of the "
        f"prompts of each run alone: {within})",
        highlight=False,
    )
    output.print(
        f"rank correlation of the scores {decimal(record['spearman'], 2)} over the {record['n_types_in_both']} "
        "types ranked in both; both were searched with the settings of A",
        highlight=False,
    )
    table = plain_table(
        ["token", "category", "rank A", "rank B", "kl A", "kl B", "tokens A", "tokens B"], ("token", "category")
    )
    table.title = f"what moved most of {len(record['moved'])} types (A: {record['a']}, B: {record['b']})"
    table.title_justify = "left"
    for moved in record["moved"][:show]:
        shares = [percent(moved[f"{name}_{side}"]) for name in ("kl_share", "token_share") for side in "ab"]
        ranks = ["—" if moved[f"rank_{side}"] is None else str(moved[f"rank_{side}"]) for side in "ab"]
        table.add_row(Text(visible(moved["text"])), moved["category"], *ranks, *shares)
    output.print(table)


def _names(token_ids: list[int], texts: dict[int, str], most: int = 6) -> str:
    shown = " ".join(visible(texts[token_id]) for token_id in token_ids[:most])
    return shown if len(token_ids) <= most else f"{shown} and {len(token_ids) - most} more"


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _signed_share(change: float | None, interval: Sequence[float] | None) -> str:
    return "—" if change is None else f"{100 * change:+.1f} % {percent_interval(interval)}".strip()
