"""The figures of ``rocktokens find`` as Vega-Lite specs: one spec for a page, a notebook, PNG, SVG and PDF.

1. A function takes plain records and returns an altair chart whose data are those records, inlined: nothing is fetched
   when it is drawn, and the same data give the same bytes.
2. Groups differ in shape or dash as well as in colour.
3. Without data the chart is one sentence.
"""

import math
from dataclasses import asdict

import altair as alt
import pandas as pd

from rocktokens.display.numbers import counted
from rocktokens.display.text import visible
from rocktokens.report.charts import theme
from rocktokens.report.charts.funnel import funnel
from rocktokens.report.charts.funnel_layout import HIGH_KL, ROCK
from rocktokens.rocks.records import FindRecord

CURVES = {
    "coverage": ("coverage, selection half", (theme.VERMILLION, theme.SOLID)),
    "coverage_held_out": ("coverage, held-out half", (theme.BLUE, theme.DASHED)),
    "stability": ("stability (mean Jaccard)", (theme.GREEN, theme.DOTTED)),
}
CUTOFF_HEIGHT = 300
GROUP_LINES = {
    ROCK: (theme.VERMILLION, theme.SOLID),
    HIGH_KL: (theme.BLUE, theme.DASHED),
    "random": (theme.GREY, theme.DOTTED),
}


def find_charts(run: str, found: FindRecord) -> dict[str, theme.Figure]:
    """Make the figures of ``rocktokens find``."""
    where = f"{run}, checkpoint {found.criterion['reference']}"
    selected = f"{where}, prompts that selected the rocks"
    types = asdict(found.funnel)
    named = [
        {**own, "text": visible(own["text"])}
        for own in (dict(zip(types, row, strict=True)) for row in zip(*types.values(), strict=True))
    ]
    curve, losses = ([asdict(own) for own in records] for records in (found.cutoff.curve, found.trajectory))
    columns = ("parameter", "value", "default", "jaccard")
    settings = [{name: getattr(own, name) for name in columns} for own in found.sensitivity]
    return theme.by_name(
        theme.Figure(
            "funnel",
            f"Scatter of {counted(len(named), 'token type')} by occurrences and mean kl; rocks lie top right.",
            # Objects, since pandas' own strings cannot hold every text that JSON can.
            funnel(pd.DataFrame(types, dtype=object), selected),
            named,
        ),
        theme.Figure(
            "cutoff",
            f"Lines over K: share of the kl in the top K, and how well the set repeats. K = {found.cutoff.k} is taken.",
            cutoff_chart(curve, found.cutoff.k, where),
            curve,
        ),
        theme.Figure(
            "loss",
            "Lines over the checkpoints: mean kl of rocks, high-mean-kl types and random types, with bands.",
            loss_chart(losses, f"{run}, same tokens at every checkpoint, 95 % intervals"),
            losses,
        ),
        theme.Figure(
            "sensitivity",
            "Lines, a panel per setting: Jaccard of the rock set with the one found, as the setting moves.",
            sensitivity_chart(settings, selected),
            settings,
        ),
    )


def cutoff_chart(curve: theme.Records, chosen: int | None = None, subtitle: str = "") -> theme.Chart:
    """Draw coverage of the kl and stability of the set against K, from ``CutoffPoint`` records; mark the chosen K."""
    title = "How many rocks: what the top K cover, and how well the set repeats"
    lines = theme.finite(
        [{"k": at["k"], "curve": label, "share": at.get(key)} for at in curve for key, (label, _) in CURVES.items()],
        ("k", "share"),
    )
    if not lines:
        return theme.sentence_chart("There is no K to compare.", title, subtitle)
    k = alt.X("k:Q", title="K: how many types are called rocks (log scale)", scale=alt.Scale(type="log", nice=False))
    band = theme.inline(theme.finite(curve, ("k", "stability_low", "stability_high"))).mark_area(
        color=theme.GREEN, opacity=0.18
    )
    line = theme.inline(lines).mark_line(strokeWidth=2.5, point=len(curve) < 30)
    layers = [
        band.encode(x=k, y=_unit_share("stability_low"), y2="stability_high:Q"),
        line.encode(x=k, y=_unit_share("share"), **theme.by_dash(lines, "curve", dict(CURVES.values()))),
        *_chosen_k(chosen, lines),
    ]
    notes = [subtitle, "Band: spread of the stability over random subsets of the prompts."]
    return theme.finished(alt.layer(*layers).properties(width=theme.WIDTH, height=CUTOFF_HEIGHT), title, notes)


def loss_chart(records: theme.Records, subtitle: str = "") -> theme.Chart:
    """Draw the mean kl of groups of types over the checkpoints, from ``GroupMean`` records, a panel per half."""
    title = "What training did to the loss: mean kl of rocks and of other types"
    points = theme.finite(records, ("checkpoint", "mean_kl"))
    if not points:
        return theme.sentence_chart("There is no checkpoint with a kl to show.", title, subtitle)
    look = theme.by_dash(points, "group", GROUP_LINES)
    checkpoint = alt.X("checkpoint:Q", title="checkpoint (training step)", scale=alt.Scale(zero=False))
    mean_kl = alt.Y("mean_kl:Q", title="mean kl (nats)", scale=alt.Scale(zero=True))
    base = alt.Chart().encode(x=checkpoint, color=look["color"])
    layers = alt.layer(
        base.mark_area(opacity=0.18).encode(y="low:Q", y2="high:Q"),
        base.mark_line(strokeWidth=2.5, point=alt.OverlayMarkDef(size=40)).encode(y=mean_kl, **look),
        data=theme.inlined(points),
    ).properties(width=300, height=260)
    panels = layers.facet(column=alt.Column("half:N", title=None, sort=theme.in_order(points, "half")))
    return theme.finished(panels, title, [subtitle])


def sensitivity_chart(records: theme.Records, subtitle: str = "") -> theme.Chart:
    """Draw how much of the rock set stays as one parameter moves and the others keep their defaults.

    Records: parameter, value (a number or a word), default (whether it is), jaccard with the rock set.
    """
    title = "How far the rocks depend on the settings: Jaccard with the rocks found"
    points = theme.finite(records, ("jaccard",))
    if not points:
        return theme.sentence_chart("No parameter was moved.", title, subtitle)
    for point in points:
        value = point["value"]
        point["value"] = f"{value:g}" if isinstance(value, float) else str(value)
    base = alt.Chart().encode(
        x=alt.X("value:O", title=None, sort=None, axis=alt.Axis(labelAngle=0, labelOverlap="greedy")),
        y=_unit_share("jaccard", title="Jaccard"),
    )
    is_default = alt.datum["default"]
    layers = alt.layer(
        base.mark_line(color=theme.BLUE, strokeWidth=2),
        base.mark_point(color=theme.BLUE, fill="white", size=50, opacity=1),
        base.transform_filter(is_default).mark_point(
            color=theme.VERMILLION, fill=theme.VERMILLION, shape="diamond", size=110, opacity=1
        ),
        data=theme.inlined(points),
    ).properties(width=190, height=150)
    facet = alt.Facet("parameter:N", title=None, sort=theme.in_order(points, "parameter"))
    panels = layers.facet(facet, columns=3).resolve_scale(x="independent").resolve_axis(y="independent")
    return theme.finished(
        panels, title, [subtitle, "Diamond: the value that was used. 1 is the same set, 0 no rock in common."]
    )


def _chosen_k(chosen: int | None, curve: theme.Records) -> list[alt.Chart]:
    if chosen is None:
        return []
    ends = min(at["k"] for at in curve), max(at["k"] for at in curve)
    align, dx = ("left", 5) if chosen**2 <= math.prod(ends) else ("right", -5)
    at = theme.inline([{"k": chosen, "label": f"K = {chosen:,}"}])
    text = at.mark_text(color=theme.INK, fontWeight="bold", align=align, dx=dx, baseline="bottom", dy=-4)
    return [
        at.mark_rule(color=theme.INK, strokeDash=[4, 3]).encode(x="k:Q"),
        text.encode(x="k:Q", y=alt.value(CUTOFF_HEIGHT), text="label:N"),
    ]


def _unit_share(field: str, title: str = "share of the kl, Jaccard") -> alt.Y:
    return alt.Y(f"{field}:Q", title=title, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(tickCount=5))
