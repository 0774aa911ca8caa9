"""The forest plot of a knock-out: what each ban did to accuracy, beside what placebos did, from knockout.json.

1. Tested types in order of Δ, then placebos as frequent, each with its interval; then ids that no answer has, those
   with the same change in one row, since a ban of them should do nothing.
2. Colour and shape tell the verdict; the grey band is the margin within which a change counts as none.
3. Of many tested types those with a verdict and the largest changes are drawn, and the subtitle says how many.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import altair as alt

from rocktokens.display.numbers import counted, level, p_value, signed
from rocktokens.knockout.records import Knockout, KnockoutSweep
from rocktokens.report.charts import theme
from rocktokens.report.charts.plots import Axis, Layer, Panel, Plot, by_group, layer
from rocktokens.report.tables import ROLES, ban_name

TESTED, MATCHED, NEVER = ROLES.values()
VERDICT_LOOKS = {
    "pillar": (theme.VERMILLION, "triangle-down"),
    "stumbling": (theme.GREEN, "triangle-up"),
    "neutral": (theme.BLUE, "square"),
    "undecided": (theme.GREY, "circle"),
}
MOST = {TESTED: 40, MATCHED: 20, NEVER: 1000}
"""How many of each are drawn."""
ROW = 17
AXIS = "change of accuracy (points)"


def knockout_charts(sweep: KnockoutSweep, run: str) -> dict[str, theme.Figure]:
    """Make the figure of ``rocktokens knockout``."""
    settings, records = sweep.settings, forest_records(sweep.knockouts)
    prompts = counted(sweep.baseline.n_prompts, "prompt")
    where = f"{run}, {settings.model} on {settings.task}, {prompts}"
    chart = forest_chart(records, 100 * settings.margin, where, level(settings.alpha))
    shows = f"Forest plot of {counted(len(records), 'ban')}: change of accuracy with its interval, and the verdict."
    plot = forest_plot(records, 100 * settings.margin)
    return theme.by_name(theme.Figure("knockout", shows, chart, records, plot))


def forest_records(knockouts: Sequence[Knockout]) -> list[dict[str, Any]]:
    """Make a record per ban, changes in points; in order of role, then of Δ."""
    order = list(ROLES)
    found = []
    for own in sorted(knockouts, key=lambda own: (order.index(own.ban.role), own.delta or 0.0)):
        numbers = (own.delta, *(own.interval or (None, None)))
        delta_points, low, high = (None if number is None else 100 * number for number in numbers)
        found.append(
            {
                "role": ROLES[own.ban.role],
                "banned": ban_name(own.ban),
                "ids": " ".join(map(str, own.ban.ids)),
                "category": own.ban.category,
                "delta_points": delta_points,
                "low": low,
                "high": high,
                "p": own.p,
                "q": own.q,
                "verdict": own.verdict,
                "paper_verdict": own.paper_verdict,
            }
        )
    return found


def forest_chart(
    records: theme.Records, margin: float, subtitle: str = "", interval_level: str = "95 %"
) -> theme.Chart:
    """Draw changes of accuracy with their intervals, a row per ban; ``margin`` is in points."""
    title = "What banning a token does to accuracy"
    known = theme.finite(records, ("delta_points", "low", "high"))
    if not known:
        return theme.sentence_chart("No ban has a known effect.", title, subtitle)
    shown = _shown(known)
    rows = _in_rows(shown)
    last = rows[-1]["row"]
    look = theme.by_shape(rows, "verdict", VERDICT_LOOKS)
    # Two tokens may read alike, so rows are numbers and their names are marks of their own.
    every_row = alt.Scale(domain=list(range(last + 1)))
    own_row = alt.Y("row:O", title=None, scale=every_row, axis=alt.Axis(labels=False, ticks=False, grid=False))
    base = theme.inline(rows).encode(y=own_row)
    layers = [
        theme.inline([{"low": -margin, "high": margin}])
        .mark_rect(color=theme.GREY, opacity=0.16)
        .encode(x=alt.X("low:Q", title=AXIS), x2="high:Q"),
        theme.inline([{"at": 0}]).mark_rule(color=theme.INK, strokeDash=[4, 3]).encode(x=alt.X("at:Q", title=AXIS)),
        base.mark_text(align="right", color=theme.INK, fontSize=11).encode(x=alt.value(-8), text="label:N"),
        base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", title=AXIS), x2="high:Q", color=look["color"]),
        base.mark_point(filled=True, size=70, opacity=1).encode(x=alt.X("delta_points:Q", title=AXIS), **look),
    ]
    left_out = {"whose change is not known": len(records) - len(known), "that change least": len(known) - len(shown)}
    named = " and ".join(f"{count} {which}" for which, count in left_out.items() if count)
    notes = [
        subtitle,
        f"Lines: {interval_level} intervals. Grey band: ±{margin:g} points, within which a change counts as none.",
        f"Not drawn: {named}." if named else "",
    ]
    return theme.finished(
        alt.layer(*layers).properties(width=theme.WIDTH * 4 // 5, height=ROW * (last + 1)), title, notes
    )


def forest_plot(records: theme.Records, margin: float) -> Plot:
    """Make the plot of the same rows."""
    rows = _in_rows(_shown(theme.finite(records, ("delta_points", "low", "high"))))
    if not rows:
        return Plot()
    for row in rows:
        row["token"] = int(row["ids"]) if row["ids"].isdecimal() and row["role"] != NEVER else None
    names = {row["row"]: row["label"] for row in rows}
    groups = theme.point_groups(rows, "verdict", VERDICT_LOOKS)
    change = partial(signed, digits=1)
    facts = {
        "change (points)": ("delta_points", change),
        "from": ("low", change),
        "to": ("high", change),
        "p": ("p", p_value),
        "q (corrected)": ("q", p_value),
    }
    drawn = [
        layer(
            "points",
            group,
            own,
            "delta_points",
            "row",
            label="label",
            token="token",
            interval=("low", "high"),
            facts=facts,
        )
        for group, own in by_group(groups, rows, "verdict")
    ]
    orientation = Layer("shade", x=(-margin, margin)), Layer("rule", x=(0.0,))
    ranks = Axis(scale="rows", names=tuple(names.get(row, "") for row in range(rows[-1]["row"] + 1)))
    return Plot(groups, (Panel(Axis(AXIS), ranks, (*orientation, *drawn)),))


def _shown(known: theme.Records) -> list[dict[str, Any]]:
    """Choose what is drawn of each role, in the order given: what has a verdict, then the largest changes."""
    shown = []
    for role, limit in MOST.items():
        own = [row for row in known if row["role"] == role]
        ranked = sorted(own, key=lambda row: (row["verdict"] not in ("pillar", "stumbling"), -abs(row["delta_points"])))
        kept = {id(row) for row in ranked[:limit]}
        shown += [row for row in own if id(row) in kept]
    return shown


def _in_rows(shown: theme.Records) -> list[dict[str, Any]]:
    """Give each ban a numbered row and a label, one row free between roles; what never occurs shares rows."""
    rows: list[dict[str, Any]] = []
    alike: dict[tuple[Any, ...], int] = {}
    for own in shown:
        if own["role"] == NEVER:
            key = own["delta_points"], own["low"], own["high"], own["verdict"]
            alike[key] = alike.get(key, 0) + 1
            if alike[key] > 1:
                continue
        number = rows[-1]["row"] + 1 + (rows[-1]["role"] != own["role"]) if rows else 0
        rows.append({**own, "row": number, "label": ("placebo " if own["role"] == MATCHED else "") + own["banned"]})
    counts = iter(alike.values())
    return [{**row, "label": f"{next(counts)} ids never written"} if row["role"] == NEVER else row for row in rows]
