"""What ``rocktokens find`` prints: first what was found and how sure that is, then what it rests on."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rocktokens.cli.common import output, percent, percent_interval
from rocktokens.report.text import visible
from rocktokens.types import RockSet

SURE = 0.95
GROUP_NAMES = {"rock": "rocks", "rare high-kl": "rare, high mean kl", "random": "random types"}
Justified = tuple[str, Any]


def print_found(rocks: RockSet, analysis: dict[str, Any], show: int) -> None:
    """Everything, in the order a reader asks."""
    import pandas as pd

    from rocktokens.report.terminal import curve_text, funnel_text

    print_summary(rocks)
    if not rocks.summary["kl_share"]:
        return
    output.print(rock_table(rocks, show))
    _print_certainty(rocks)
    _heading("Where they stand", "each mark is a token type; rocks are frequent *and* far from the teacher")
    output.print(funnel_text(pd.DataFrame(analysis["funnel"])))
    _print_persistence(rocks, analysis["persistence"])
    _heading("How many", "coverage of the kl grows with K, stability says whether other prompts would name the same K")
    output.print(curve_text(analysis["cutoff"]["curve"], analysis["cutoff"]["k"]))
    _print_crossing(analysis["cutoff"])
    _heading("Would other prompts, or another rule, name the same ones?", "")
    output.print(_selector_table(analysis["selectors"]))
    output.print(_sample_size(analysis["sample_size"]))
    _heading("What hangs on the settings", "one moved at a time; 1.00 means the same rocks")
    output.print(_sensitivity_table(rocks, analysis))
    _heading("What they are and where they sit", f"shares of the {rocks.summary['measured_on']}")
    output.print(_category_table(analysis["categories"]))
    output.print(_positions(analysis["positions"]))
    _heading("Is there anything to compare them with?", "")
    output.print(_controls(analysis["controls"]), markup=False)


def print_summary(rocks: RockSet) -> None:
    """What a rock is, what these amount to, and which prompts that was measured on."""
    summary, criterion, interval = rocks.summary, rocks.criterion, rocks.summary["intervals"]
    if not summary["kl_share"]:
        return output.print("there is no kl to rank: on these tokens the student and the teacher are the same")
    output.print(
        f"[bold]{len(rocks.tokens)} rocks[/bold]: token types that hold the most loss (kl to the teacher, in nats) at "
        f"checkpoint {criterion['reference']}{_in_contexts(criterion)}. Selected on {percent(criterion['split'])} of "
        f"the prompts; what is said of them is measured on the {summary['measured_on']} ({summary['n_prompts']} "
        "prompts), with 95 % intervals over prompts.",
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
            f"{_signed_share(summary['kl_change_rest'], interval['kl_change_rest'])}",
            highlight=False,
        )


def _in_contexts(criterion: dict[str, Any]) -> str:
    if criterion["stage"] != "context":
        return ""
    return f", at places that were hard at checkpoint {criterion['baseline']} already, in contexts that recur"


def rock_table(rocks: RockSet, show: int) -> Table:
    """The first rocks with the numbers they were selected by, whitespace visible."""
    title = f"top {min(show, len(rocks.tokens))} rocks (held out, change: on prompts that did not select them)"
    columns = ["", "token", "category", "freq", "mean kl", "held out", "change", "R", "95 %"]
    is_context = rocks.criterion["stage"] == "context"
    table = _table([*columns, *(["CCR", "R·CCR"] if is_context else []), "P(K)"], ("token", "category"), title)
    for token in rocks.tokens[:show]:
        table.add_row(
            str(token.rank),
            Text(visible(token.text)),
            token.category,
            str(token.freq),
            f"{token.mean_kl:.3f}",
            _decimal(token.held_out_mean_kl, 3),
            "—" if token.held_out_change is None else f"{100 * token.held_out_change:+.0f} %",
            f"{token.score:.0f}",
            "—" if token.score_interval is None else "[{:.0f}, {:.0f}]".format(*token.score_interval),
            *([_decimal(token.ccr, 2), _decimal(token.score_ctx, 1)] if is_context else []),
            _decimal(token.p_in_top_k, 2),
        )
    return table


def _print_certainty(rocks: RockSet) -> None:
    contexts = (
        " · CCR: share of its occurrences that were hard at both checkpoints in a recurring context"
        if rocks.criterion["stage"] == "context"
        else ""
    )
    output.print(
        "held out: mean kl on the other prompts · change: of that, since the baseline checkpoint · R = freq × mean kl"
        f"{contexts} · P(K): how often it is among the first K when prompts are drawn again",
        highlight=False,
    )
    sure = sum((token.p_in_top_k or 0) >= SURE for token in rocks.tokens)
    empty = sum(token.score_ctx == 0 for token in rocks.tokens)
    output.print(
        f"{sure} of {len(rocks.tokens)} are rocks in at least {100 * SURE:.0f} % of such draws", highlight=False
    )
    if empty:
        output.print(
            f"{empty} have score 0, no recurring hard context at all: K is larger than the evidence reaches (--k auto)"
        )


def _print_persistence(rocks: RockSet, records: list[dict[str, Any]]) -> None:
    before, now = rocks.criterion["baseline"], rocks.criterion["reference"]
    _heading("Did training move them?", f"mean kl at checkpoint {before} and {now}, over the same tokens")
    if not records:
        return output.print("the checkpoints did not score the same tokens, so nothing can be said about change")
    columns = ["group", "prompts", "tokens", "before", "after", "change", "95 %", "Wilcoxon p", "stuck"]
    table = _table(columns, ("group", "prompts"))
    for record in records:
        table.add_row(
            GROUP_NAMES[record["group"]],
            record["half"],
            f"{record['n_occurrences']:,}",
            _decimal(record["kl_before"], 3),
            _decimal(record["kl_after"], 3),
            "—" if record["relative"] is None else f"{100 * record['relative']:+.1f} %",
            percent_interval(record["relative_interval"]),
            _p_value(record["wilcoxon_p"]),
            percent(record["persistent_share"]),
        )
    output.print(table)
    output.print(
        "the groups were chosen on the selection half: what falls from there to the held-out half is regression to the "
        "mean, not training; Wilcoxon tests one difference per prompt; stuck: occurrences hard at both checkpoints"
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
    table = _table(
        ["selector", "two halves", "rank corr.", "coverage", *(f"∩ {name}" for name in names)], ("selector",)
    )
    for record in records:
        table.add_row(
            record["selector"],
            _decimal(record["jaccard_halves"], 2),
            _decimal(record["spearman_halves"], 2),
            percent(record["coverage"]),
            *("·" if name == record["selector"] else _decimal(record["jaccard_with"][name], 2) for name in names),
        )
    return table


def _sample_size(records: list[dict[str, Any]]) -> str:
    points = ", ".join(f"{record['n_clusters']}: {_decimal(record['jaccard'], 2)}" for record in records)
    return (
        "two halves: Jaccard of the rocks of two disjoint halves of the prompts; ∩: Jaccard with another selector\n"
        f"Jaccard with the rocks found, by number of prompts: {points}"
    )


def _sensitivity_table(rocks: RockSet, analysis: dict[str, Any]) -> Table:
    texts = dict(zip(analysis["funnel"]["token_id"], analysis["funnel"]["text"], strict=True))
    table = _table(["setting", "value", "Jaccard", "enter", "leave"], ("setting", "value", "enter", "leave"))
    for record in analysis["sensitivity"]:
        sampled = "" if record["exact"] else " (sampled)"
        table.add_row(
            record["parameter"],
            f"{record['value']}{' ◄' if record['default'] else ''}",
            _decimal(record["jaccard"], 2) + sampled,
            *(Text(_names(record[side], texts)) for side in ("entered", "left")),
        )
    return table


def _category_table(records: list[dict[str, Any]]) -> Table:
    columns = ["category", "rocks", "types", "tokens", "kl", "gradient", "rocks' tokens", "kl", "gradient"]
    table = _table(columns, ("category",))
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
    within = " and ".join(_decimal(value, 2) for value in record["jaccard_within"])
    output.print(
        f"[bold]Jaccard of the rocks {_decimal(record['jaccard'], 2)}[/bold] ({record['n_rocks'][0]} and "
        f"{record['n_rocks'][1]} rocks; by chance {_decimal(record['jaccard_by_chance'], 2)}; two halves of the "
        f"prompts of each run alone: {within})",
        highlight=False,
    )
    output.print(
        f"rank correlation of the scores {_decimal(record['spearman'], 2)} over the {record['n_types_in_both']} "
        "types ranked in both",
        highlight=False,
    )
    table = _table(
        ["token", "category", "rank A", "rank B", "kl A", "kl B", "tokens A", "tokens B"], ("token", "category")
    )
    table.title = f"what moved most of {len(record['moved'])} types (A: {record['a']}, B: {record['b']})"
    table.title_justify = "left"
    for moved in record["moved"][:show]:
        shares = [percent(moved[f"{name}_{side}"]) for name in ("kl_share", "token_share") for side in "ab"]
        ranks = ["—" if moved[f"rank_{side}"] is None else str(moved[f"rank_{side}"]) for side in "ab"]
        table.add_row(Text(visible(moved["text"])), moved["category"], *ranks, *shares)
    output.print(table)


def _heading(title: str, explanation: str) -> None:
    output.print()
    output.print(f"[bold]{title}[/bold]{': ' + explanation if explanation else ''}", highlight=False)


def _table(columns: Sequence[str], left: Sequence[str], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def _names(token_ids: list[int], texts: dict[int, str], most: int = 6) -> str:
    shown = " ".join(visible(texts[token_id]) for token_id in token_ids[:most])
    return shown if len(token_ids) <= most else f"{shown} and {len(token_ids) - most} more"


def _decimal(value: float | None, digits: int) -> str:
    return "—" if value is None else f"{value:.{digits}f}"


def _p_value(value: float | None) -> str:
    if value is None:
        return "—"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _signed_share(change: float | None, interval: Sequence[float] | None) -> str:
    return "—" if change is None else f"{100 * change:+.1f} % {percent_interval(interval)}".strip()
