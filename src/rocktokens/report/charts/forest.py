"""The forest plot of a knock-out: what each ban did to accuracy, beside what placebos did, from knockout.json.

1. Tested types in order of Δ, then placebos as frequent, each with its interval; then ids that no answer has, those
   with the same change in one row, since a ban of them should do nothing.
2. Colour and shape tell the verdict; the grey band is the margin within which a change counts as none.
3. Of many tested types those with a verdict and the largest changes are drawn, and the subtitle says how many.
"""

from collections.abc import Sequence
from typing import Any

import altair as alt

from rocktokens.display.numbers import counted, level
from rocktokens.knockout.records import Knockout, KnockoutSweep
from rocktokens.report.charts.theme import (
    BLUE,
    GREEN,
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
    scale_of,
    sentence_chart,
)
from rocktokens.report.tables import ROLES, ban_name

TESTED, MATCHED, NEVER = ROLES.values()
VERDICT_LOOKS = {
    "pillar": (VERMILLION, "triangle-down"),
    "stumbling": (GREEN, "triangle-up"),
    "neutral": (BLUE, "square"),
    "undecided": (GREY, "circle"),
}
MOST = {TESTED: 40, MATCHED: 20, NEVER: 1000}
"""How many of each are drawn."""
PREFIXES = {MATCHED: "placebo "}
ROW = 17
AXIS = "change of accuracy (points)"


def knockout_charts(sweep: KnockoutSweep, run: str) -> dict[str, Figure]:
    """Make the figure of ``rocktokens knockout``."""
    settings, records = sweep.settings, forest_records(sweep.knockouts)
    prompts = counted(sweep.baseline["n_prompts"], "prompt")
    where = f"{run}, {settings['model']} on {settings['task']}, {prompts}"
    chart = forest_chart(records, 100 * settings["margin"], where, level(settings["alpha"]))
    shows = f"Forest plot of {counted(len(records), 'ban')}: change of accuracy with its interval, and the verdict."
    return by_name(Figure("knockout", shows, chart, records))


def forest_records(knockouts: Sequence[Knockout]) -> list[dict[str, Any]]:
    """Make a record per ban, changes in points; in order of role, then of Δ."""
    order = list(ROLES)
    found = []
    for own in sorted(knockouts, key=lambda own: (order.index(own.ban.role), own.delta or 0.0)):
        low, high = own.interval or (None, None)
        delta_points, low, high = (None if end is None else 100 * end for end in (own.delta, low, high))
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


def forest_chart(records: Records, margin: float, subtitle: str = "", interval_level: str = "95 %") -> Chart:
    """Draw changes of accuracy with their intervals, a row per ban.

    Args:
        records: as ``forest_records`` makes them.
        margin: points within which a change counts as none.
        subtitle: the model, task and prompts the numbers are of.
        interval_level: of the intervals.
    """
    title = "What banning a token does to accuracy"
    known = finite(records, ("delta_points", "low", "high"))
    if not known:
        return sentence_chart("No ban has a known effect.", title, subtitle)
    shown = _shown(known)
    rows = _in_rows(shown)
    last = rows[-1]["row"]
    verdicts = [name for name in VERDICT_LOOKS if any(row["verdict"] == name for row in rows)]
    colors, shapes = zip(*(VERDICT_LOOKS[name] for name in verdicts), strict=True)
    legend = alt.Legend(title=None, orient="bottom", symbolOpacity=1)
    color = alt.Color("verdict:N", scale=scale_of(verdicts, colors), legend=legend)
    shape = alt.Shape("verdict:N", scale=scale_of(verdicts, shapes), legend=legend)
    # Two tokens may read alike, so rows are numbers and their names are marks of their own.
    every_row = alt.Scale(domain=list(range(last + 1)))
    own_row = alt.Y("row:O", title=None, scale=every_row, axis=alt.Axis(labels=False, ticks=False, grid=False))
    base = inline(rows).encode(y=own_row)
    layers = [
        inline([{"low": -margin, "high": margin}])
        .mark_rect(color=GREY, opacity=0.16)
        .encode(x=alt.X("low:Q", title=AXIS), x2="high:Q"),
        inline([{"at": 0}]).mark_rule(color=INK, strokeDash=[4, 3]).encode(x=alt.X("at:Q", title=AXIS)),
        base.mark_text(align="right", color=INK, fontSize=11).encode(x=alt.value(-8), text="label:N"),
        base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", title=AXIS), x2="high:Q", color=color),
        base.mark_point(filled=True, size=70, opacity=1).encode(
            x=alt.X("delta_points:Q", title=AXIS), color=color, shape=shape
        ),
    ]
    notes = [
        subtitle,
        f"Lines: {interval_level} intervals. Grey band: ±{margin:g} points, within which a change counts as none.",
        _left_out(records, known, shown),
    ]
    return finished(alt.layer(*layers).properties(width=WIDTH * 4 // 5, height=ROW * (last + 1)), title, notes)


def _shown(known: Records) -> list[dict[str, Any]]:
    """Choose what is drawn of each role, in the order given."""
    shown = []
    for role, limit in MOST.items():
        own = [row for row in known if row["role"] == role]
        kept = {id(row) for row in sorted(own, key=_interest)[:limit]}
        shown += [row for row in own if id(row) in kept]
    return shown


def _interest(row: dict[str, Any]) -> tuple[bool, float]:
    """Rank types with a verdict first, then the largest changes."""
    return row["verdict"] not in ("pillar", "stumbling"), -abs(row["delta_points"])


def _in_rows(shown: Records) -> list[dict[str, Any]]:
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
        rows.append({**own, "row": number, "label": PREFIXES.get(own["role"], "") + own["banned"]})
    counts = iter(alike.values())
    return [{**row, "label": f"{next(counts)} ids never written"} if row["role"] == NEVER else row for row in rows]


def _left_out(records: Records, known: Records, shown: Records) -> str:
    parts = []
    if unknown := len(records) - len(known):
        parts.append(f"{unknown} whose change is not known")
    if fewer := len(known) - len(shown):
        parts.append(f"{fewer} that change least")
    return f"Not drawn: {' and '.join(parts)}." if parts else ""
