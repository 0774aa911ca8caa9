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
from rocktokens.report.charts.theme import (
    FAINT,
    GREY,
    INK,
    VERMILLION,
    WIDTH,
    Chart,
    Figure,
    Records,
    by_name,
    finished,
    finite,
    inline,
    inlined,
    scale_of,
    sentence_chart,
)
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
_CATEGORY_AXIS = alt.Axis(labelLimit=0, ticks=False, labelExpr="replace(datum.label, '_', ' ')")


def share_charts(rocks: RockSet, run: str) -> dict[str, Figure]:
    """Show how much of everything the rocks are."""
    records = share_records(rocks.summary)
    where = f"{run}, checkpoint {rocks.criterion['reference']}, {rocks.summary['measured_on']}"
    shown = ", ".join(f"{percent(own['share'])} of the {own['of']}" for own in records if own["share"] is not None)
    return by_name(Figure("shares", f"Bars of the rocks' shares: {shown}.", shares_chart(records, where), records))


def category_charts(found: FindRecord, run: str) -> dict[str, Figure]:
    """Show what kind of tokens the rocks are."""
    records = category_records(found.categories)
    shows = (
        "Bars by category of token: share of the tokens, of the kl and of the gradient norm, rocks and others stacked."
    )
    chart = categories_chart(records, f"{run}, checkpoint {found.criterion['reference']}")
    return by_name(Figure("categories", shows, chart, records))


def share_records(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Make a record per share with its interval, from the summary in rocks.json."""
    intervals = summary.get("intervals") or {}
    found = []
    for name, label in SHARES.items():
        low, high = intervals.get(name) or (None, None)
        found.append({"of": label, "share": summary.get(name), "low": low, "high": high})
    return found


def shares_chart(records: Records, subtitle: str = "") -> Chart:
    """Draw bars with intervals and their numbers.

    Args:
        records: of, share, low, high.
        subtitle: the run, checkpoint and prompts the numbers are of.
    """
    title = "How much of everything the rocks are"
    bars = [{**bar, "label": _label(bar)} for bar in finite(records, ("share",))]
    if not bars:
        return sentence_chart("There is no share to show.", title, subtitle)
    of = alt.Y("of:N", title=None, sort=[bar["of"] for bar in bars], axis=alt.Axis(labelLimit=0, ticks=False))
    ticks = alt.Axis(format="%", tickCount=5)
    share = alt.X("share:Q", title=None, axis=ticks, scale=alt.Scale(domain=[0, 1]))
    base = inline(bars).encode(y=of)
    layers = [
        base.mark_bar(color=VERMILLION, height=alt.RelativeBandSize(0.55)).encode(x=share),
        base.mark_rule(color=INK, strokeWidth=1.5).encode(x=alt.X("low:Q", title=None), x2="high:Q"),
        base.mark_text(align="left", color=INK, fontSize=12).encode(x=alt.value(WIDTH + 10), text="label:N"),
    ]
    drawn = alt.layer(*layers).properties(width=WIDTH, height=ROW * len(bars))
    has_intervals = any(bar["low"] is not None for bar in bars)
    return finished(drawn, title, [subtitle, "Black: 95 % intervals over prompts." if has_intervals else ""])


def score_records(tokens: Sequence[RockToken]) -> list[dict[str, Any]]:
    """Make a record per rock: its score with its interval, in rank order."""
    found = []
    for own in tokens:
        low, high = own.score_interval or (None, None)
        found.append({"token": f"{own.rank}  {visible(own.text)}", "score": own.score, "low": low, "high": high})
    return found


def scores_chart(records: Records, subtitle: str = "") -> Chart:
    """Draw bars of summed kl with intervals, one per rock.

    Args:
        records: token, score, low, high.
        subtitle: the run and checkpoint the numbers are of.
    """
    title = "How much loss each rock holds"
    bars = finite(records, ("score",))
    if not bars:
        return sentence_chart("There is no rock to show.", title, subtitle)
    token = alt.Y("token:N", title=None, sort=[bar["token"] for bar in bars], axis=alt.Axis(labelLimit=0, ticks=False))
    base = inline(bars).encode(y=token)
    layers = [
        base.mark_bar(color=VERMILLION, height=alt.RelativeBandSize(0.55)).encode(
            x=alt.X("score:Q", title="R: occurrences × mean kl (nats), on the prompts that selected the rocks")
        ),
        base.mark_rule(color=INK, strokeWidth=1.5).encode(x=alt.X("low:Q"), x2="high:Q"),
    ]
    drawn = alt.layer(*layers).properties(width=WIDTH, height=ROW * len(bars))
    has_intervals = any(bar["low"] is not None for bar in bars)
    return finished(drawn, title, [subtitle, "Black: 95 % intervals over prompts." if has_intervals else ""])


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


def categories_chart(records: Records, subtitle: str = "") -> Chart:
    """Draw stacked bars by category, a panel per share.

    Args:
        records: category, of, types ("rocks" or "other types"), share.
        subtitle: the run, checkpoint and prompts the numbers are of.
    """
    title = "What kind of tokens the rocks are"
    bars = finite(records, ("share",))
    if not bars:
        return sentence_chart("There is no category to show.", title, subtitle)
    categories, panels = (list(dict.fromkeys(bar[name] for bar in bars)) for name in ("category", "of"))
    chart = (
        alt.Chart()
        .mark_bar(height=alt.RelativeBandSize(0.65))
        .encode(
            x=alt.X("share:Q", title=None, axis=alt.Axis(format="%", tickCount=4), stack="zero"),
            y=alt.Y("category:N", title=None, sort=categories, axis=_CATEGORY_AXIS),
            color=alt.Color(
                "types:N",
                scale=scale_of((ROCKS, OTHERS), (VERMILLION, GREY)),
                legend=alt.Legend(title=None, orient="bottom", symbolOpacity=1),
            ),
            order=alt.Order("types:N", sort="descending"),
        )
        .properties(width=WIDTH // 3, height=24 * len(categories))
    )
    facet = alt.Facet("of:N", title=None, sort=panels, header=alt.Header(labelAnchor="start", labelColor=FAINT))
    return finished(alt.layer(chart, data=inlined(bars)).facet(facet, columns=3), title, [subtitle])


def _label(bar: dict[str, Any]) -> str:
    ends = None if bar["low"] is None or bar["high"] is None else (bar["low"], bar["high"])
    return with_interval(bar["share"], ends)
