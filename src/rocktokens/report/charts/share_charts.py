"""How much of a run the rocks are: its figures.

1. ``shares_chart``: the rocks' share of the vocabulary used, of the tokens, of the kl and of the gradient norm.
2. ``scores_chart``: the summed kl of each rock with its interval.
3. ``categories_chart``: what each category of tokens holds of the same, rocks and others stacked.
"""

from collections.abc import Sequence
from typing import Any

import altair as alt

from rocktokens.display.numbers import percent, with_interval
from rocktokens.display.text import visible
from rocktokens.report.charts import theme
from rocktokens.report.charts.plots import Axis, Group, Panel, Plot, by_group, column, in_rows, layer, panels_of
from rocktokens.rocks.records import CategoryShares, FindRecord
from rocktokens.types import RockSet, RockToken

SHARES = {
    "vocab_share": "token types used",
    "token_share": "tokens",
    "token_share_median": "tokens, median output",
    "kl_share": "kl that is left",
    "grad_share": "logit-gradient norm",
}
CATEGORY_SHARES = {"token_share": "of the tokens", "kl_share": "of the kl", "grad_share": "of the logit-gradient norm"}
ROCKS, OTHERS = "rocks", "other types"
ROW = 30


def share_charts(rocks: RockSet, run: str) -> dict[str, theme.Figure]:
    """Show how much of everything the rocks are."""
    records = share_records(rocks.summary)
    where = f"{run}, checkpoint {rocks.criterion['reference']}, {rocks.summary['measured_on']}"
    shown = ", ".join(f"{percent(own['share'])} of the {own['of']}" for own in records if own["share"] is not None)
    return theme.by_name(
        theme.Figure(
            "shares",
            f"Bars of the rocks' shares: {shown}.",
            shares_chart(records, where),
            records,
            shares_plot(records),
        )
    )


def category_charts(found: FindRecord, run: str) -> dict[str, theme.Figure]:
    """Show what kind of tokens the rocks are."""
    records = category_records(found.categories)
    shows = (
        "Bars by category of token: share of the tokens, of the kl and of the gradient norm, rocks and others stacked."
    )
    chart = categories_chart(records, f"{run}, checkpoint {found.criterion['reference']}")
    return theme.by_name(theme.Figure("categories", shows, chart, records, categories_plot(records)))


def share_records(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Make a record per share with its interval, from the summary in rocks.json."""
    intervals = summary.get("intervals") or {}
    found = []
    for name, label in SHARES.items():
        low, high = intervals.get(name) or (None, None)
        found.append({"of": label, "share": summary.get(name), "low": low, "high": high})
    return found


def shares_chart(records: theme.Records, subtitle: str = "") -> theme.Chart:
    """Draw shares as bars with intervals and their numbers; records: of, share, low, high."""
    bars = _labelled(records)
    share = alt.X("share:Q", title=None, axis=alt.Axis(format="%", tickCount=5), scale=alt.Scale(domain=[0, 1]))
    return _bars_chart("How much of everything the rocks are", subtitle, bars, "of", share)


def shares_plot(records: theme.Records) -> Plot:
    """Make the plot of the same bars."""
    bars = _labelled(records)
    if not bars:
        return Plot()
    names, rows = in_rows(bars, "of")
    drawn = layer(
        "bars", 0, rows, "share", "row", label="of", interval=("low", "high"), facts={"share [95 %]": ("label", str)}
    )
    whole = Axis(domain=(0.0, 1.0), percent=True)
    return Plot((Group(ROCKS, "vermillion"),), (Panel(whole, Axis(scale="rows", names=names), (drawn,)),))


def _labelled(records: theme.Records) -> list[dict[str, Any]]:
    """Keep the shares that are known, each with its number and interval as text."""
    bars = theme.finite(records, ("share",))
    for bar in bars:
        ends = bar["low"], bar["high"]
        bar["label"] = with_interval(bar["share"], None if None in ends else ends)
    return bars


def score_records(tokens: Sequence[RockToken]) -> list[dict[str, Any]]:
    """Make a record per rock: its score with its interval, in rank order."""
    found = []
    for own in tokens:
        low, high = own.score_interval or (None, None)
        found.append({"token": f"{own.rank}  {visible(own.text)}", "score": own.score, "low": low, "high": high})
    return found


def scores_chart(records: theme.Records, subtitle: str = "") -> theme.Chart:
    """Draw the summed kl of each rock as bars with intervals; records: token, score, low, high."""
    score = alt.X("score:Q", title="R: occurrences × mean kl (nats), on the prompts that selected the rocks")
    bars = theme.finite(records, ("score",))
    return _bars_chart("How much loss each rock holds", subtitle, bars, "token", score)


def _bars_chart(title: str, subtitle: str, bars: theme.Records, name: str, value: alt.X) -> theme.Chart:
    """Draw a bar per record with its interval, and beside it the label where records have one."""
    if not bars:
        what = {"of": "share", "token": "rock"}[name]
        return theme.sentence_chart(f"There is no {what} to show.", title, subtitle)
    own = alt.Y(f"{name}:N", title=None, sort=theme.in_order(bars, name), axis=alt.Axis(labelLimit=0, ticks=False))
    base = theme.inline(bars).encode(y=own)
    layers = [
        base.mark_bar(color=theme.VERMILLION, height=alt.RelativeBandSize(0.55)).encode(x=value),
        base.mark_rule(color=theme.INK, strokeWidth=1.5).encode(x=alt.X("low:Q"), x2="high:Q"),
    ]
    if "label" in bars[0]:
        text = base.mark_text(align="left", color=theme.INK, fontSize=12)
        layers.append(text.encode(x=alt.value(theme.WIDTH + 10), text="label:N"))
    drawn = alt.layer(*layers).properties(width=theme.WIDTH, height=ROW * len(bars))
    has_intervals = any(bar["low"] is not None for bar in bars)
    return theme.finished(drawn, title, [subtitle, "Black: 95 % intervals over prompts." if has_intervals else ""])


def category_records(categories: Sequence[CategoryShares]) -> list[dict[str, Any]]:
    """Make a record per category, share and kind of type."""
    found = []
    for own in categories:
        for name, label in CATEGORY_SHARES.items():
            whole, rocks = getattr(own, name), getattr(own, f"rock_{name}")
            rest = None if whole is None or rocks is None else whole - rocks
            for types, share in ((ROCKS, rocks), (OTHERS, rest)):
                found.append({"category": own.category, "of": label, "types": types, "share": share})
    return found


def categories_chart(records: theme.Records, subtitle: str = "") -> theme.Chart:
    """Draw stacked bars by category, a panel per share; see ``category_records``."""
    title = "What kind of tokens the rocks are"
    bars = theme.finite(records, ("share",))
    if not bars:
        return theme.sentence_chart("There is no category to show.", title, subtitle)
    categories, scale = (
        theme.in_order(bars, "category"),
        theme.scale_of((ROCKS, OTHERS), (theme.VERMILLION, theme.GREY)),
    )
    axis = alt.Axis(labelLimit=0, ticks=False, labelExpr="replace(datum.label, '_', ' ')")
    drawn = (
        alt.Chart()
        .mark_bar(height=alt.RelativeBandSize(0.65))
        .properties(width=theme.WIDTH // 3, height=24 * len(categories))
    )
    chart = drawn.encode(
        x=alt.X("share:Q", title=None, axis=alt.Axis(format="%", tickCount=4), stack="zero"),
        y=alt.Y("category:N", title=None, sort=categories, axis=axis),
        color=alt.Color("types:N", scale=scale, legend=theme.LEGEND),
        order=alt.Order("types:N", sort="descending"),
    )
    header = alt.Header(labelAnchor="start", labelColor=theme.FAINT)
    facet = alt.Facet("of:N", title=None, sort=theme.in_order(bars, "of"), header=header)
    return theme.finished(alt.layer(chart, data=theme.inlined(bars)).facet(facet, columns=3), title, [subtitle])


def categories_plot(records: theme.Records) -> Plot:
    """Make the plot of the same bars."""
    groups = (Group(ROCKS, "vermillion"), Group(OTHERS, "grey"))
    bars = theme.finite(records, ("share",))
    names, rows = in_rows([{**bar, "category": bar["category"].replace("_", " ")} for bar in bars], "category")
    rocks = {(bar["category"], bar["of"]): bar["share"] for bar in rows if bar["types"] == ROCKS}
    for bar in rows:
        bar["start"] = 0.0 if bar["types"] == ROCKS else rocks.get((bar["category"], bar["of"]), 0.0)
        bar["end"] = bar["start"] + bar["share"]
    shares = {"share": ("share", percent)}
    return Plot(
        groups,
        tuple(
            Panel(
                Axis(percent=True),
                Axis(scale="rows", names=names),
                tuple(
                    layer("bars", group, own, "end", "row", label="category", facts=shares, start=column(own, "start"))
                    for group, own in by_group(groups, panel, "types")
                ),
                title,
            )
            for title, panel in panels_of(rows, "of").items()
        ),
    )
