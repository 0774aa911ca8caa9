"""The figures of ``rocktokens find`` as Vega-Lite specs: one spec for a page, a notebook, PNG, SVG and PDF.

1. A function takes plain records and returns an altair chart whose data are those records, inlined: nothing is fetched
   when it is drawn, and the same data give the same bytes.
2. Groups differ in shape or dash as well as in colour.
3. Without data the chart is one sentence.
"""

import math
from dataclasses import asdict
from typing import Any

import altair as alt
import pandas as pd

from rocktokens.display.numbers import count, counted, fixed
from rocktokens.display.text import visible
from rocktokens.report.charts import theme
from rocktokens.report.charts.funnel import funnel, funnel_plot
from rocktokens.report.charts.funnel_layout import HIGH_KL, ROCK
from rocktokens.report.charts.plots import Axis, Group, Layer, Panel, Plot, by_group, in_rows, layer, panels_of
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
    frame = pd.DataFrame(types, dtype=object)  # objects, since pandas' own strings cannot hold every text that JSON can
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
            funnel(frame, selected),
            named,
            funnel_plot(frame),
        ),
        theme.Figure(
            "cutoff",
            f"Lines over K: share of the kl in the top K, and how well the set repeats. K = {found.cutoff.k} is taken.",
            cutoff_chart(curve, found.cutoff.k, where),
            curve,
            cutoff_plot(curve, found.cutoff.k),
        ),
        theme.Figure(
            "loss",
            "Lines over the checkpoints: mean kl of rocks, high-mean-kl types and random types, with bands.",
            loss_chart(losses, f"{run}, same tokens at every checkpoint, 95 % intervals"),
            losses,
            loss_plot(losses),
        ),
        theme.Figure(
            "sensitivity",
            "Lines, a panel per setting: Jaccard of the rock set with the one found, as the setting moves.",
            sensitivity_chart(settings, selected),
            settings,
            sensitivity_plot(settings),
        ),
    )


def cutoff_chart(curve: theme.Records, chosen: int | None = None, subtitle: str = "") -> theme.Chart:
    """Draw coverage of the kl and stability of the set against K, from ``CutoffPoint`` records; mark the chosen K."""
    title = "How many rocks: what the top K cover, and how well the set repeats"
    lines = _cutoff_lines(curve)
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


def cutoff_plot(curve: theme.Records, chosen: int | None = None) -> Plot:
    """Make the plot of the same lines."""
    lines = _cutoff_lines(curve)
    if not lines:
        return Plot()
    groups = theme.line_groups(lines, "curve", dict(CURVES.values()))
    facts = {"K": ("k", count), "share or Jaccard": ("share", fixed(3))}
    drawn = [
        layer("line", group, own, "k", "share", interval=("low", "high"), facts=facts)
        for group, own in by_group(groups, lines, "curve")
    ]
    if chosen is not None:
        drawn.append(Layer("rule", x=(float(chosen),), label=(f"K = {chosen:,}",)))
    ends = (float(min(own["k"] for own in lines)), float(max(own["k"] for own in lines)))
    k = Axis("K: how many types are called rocks (log scale)", "log", ends if ends[0] < ends[1] else None)
    return Plot(groups, (Panel(k, Axis("share of the kl, Jaccard", domain=(0.0, 1.0)), tuple(drawn)),))


def _cutoff_lines(curve: theme.Records) -> list[dict[str, Any]]:
    """Make a record per K and line; stability has a band."""
    lines = []
    for at in curve:
        for key, (label, _) in CURVES.items():
            band = (at.get(f"{key}_low"), at.get(f"{key}_high"))
            lines.append({"k": at["k"], "curve": label, "share": at.get(key), "low": band[0], "high": band[1]})
    return theme.finite(lines, ("k", "share"))


def loss_chart(records: theme.Records, subtitle: str = "") -> theme.Chart:
    """Draw the mean kl of groups of types over the checkpoints, from ``GroupMean`` records, a panel per half."""
    title = "What training did to the loss: mean kl of rocks and of other types"
    points = theme.finite(records, ("checkpoint", "mean_kl"))
    if not points:
        return theme.sentence_chart("There is no checkpoint with a kl to show.", title, subtitle)
    look = theme.by_dash(points, "group", GROUP_LINES)
    checkpoint = alt.X("checkpoint:Q", title="checkpoint", scale=alt.Scale(zero=False))
    mean_kl = alt.Y("mean_kl:Q", title="mean kl (nats)", scale=alt.Scale(zero=True))
    base = alt.Chart().encode(x=checkpoint, color=look["color"])
    layers = alt.layer(
        base.mark_area(opacity=0.18).encode(y="low:Q", y2="high:Q"),
        base.mark_line(strokeWidth=2.5, point=alt.OverlayMarkDef(size=40)).encode(y=mean_kl, **look),
        data=theme.inlined(points),
    ).properties(width=300, height=260)
    panels = layers.facet(column=alt.Column("half:N", title=None, sort=theme.in_order(points, "half")))
    return theme.finished(panels, title, [subtitle])


def loss_plot(records: theme.Records) -> Plot:
    """Make the plot of the same lines."""
    points = theme.finite(records, ("checkpoint", "mean_kl"))
    if not points:
        return Plot()
    groups = theme.line_groups(points, "group", GROUP_LINES)
    facts = {
        "checkpoint": ("checkpoint", count),
        "mean kl (nats)": ("mean_kl", fixed(3)),
        "from": ("low", fixed(3)),
        "to": ("high", fixed(3)),
    }
    # Where prompts are few a band may reach far beyond all means: it then leaves the frame, and zooming out shows it.
    top = min(max(own["high"] or own["mean_kl"] for own in points), 2 * max(own["mean_kl"] for own in points)) or 1.0
    panels = (
        Panel(
            Axis("checkpoint"),
            Axis("mean kl (nats)", domain=(0.0, top)),
            tuple(
                layer("line", group, own, "checkpoint", "mean_kl", interval=("low", "high"), facts=facts)
                for group, own in by_group(groups, panel, "group")
            ),
            half,
        )
        for half, panel in panels_of(points, "half").items()
    )
    return Plot(groups, tuple(panels))


def sensitivity_chart(records: theme.Records, subtitle: str = "") -> theme.Chart:
    """Draw how much of the rock set stays as one parameter moves and the others keep their defaults.

    Records: parameter, value (a number or a word), default (whether it is), jaccard with the rock set.
    """
    title = "How far the rocks depend on the settings: Jaccard with the rocks found"
    points = _settings(records)
    if not points:
        return theme.sentence_chart("No parameter was moved.", title, subtitle)
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


def sensitivity_plot(records: theme.Records) -> Plot:
    """Make the plot of the same points."""
    groups = (Group("other values", "blue"), Group("the value used", "vermillion", "diamond"))
    panels = []
    for parameter, own in panels_of(_settings(records), "parameter").items():
        names, rows = in_rows(own, "value")
        facts = {"Jaccard": ("jaccard", fixed(2))}
        used = [row for row in rows if row["default"]]
        drawn = (
            layer("line", 0, rows, "row", "jaccard", label="value", facts=facts),
            layer("points", 1, used, "row", "jaccard", label="value", facts=facts),
        )
        panels.append(Panel(Axis(scale="rows", names=names), Axis("Jaccard", domain=(0.0, 1.0)), drawn, parameter))
    return Plot(groups, tuple(panels))


def _settings(records: theme.Records) -> list[dict[str, Any]]:
    """Keep the settings whose effect is known, their values as text."""
    points = theme.finite(records, ("jaccard",))
    for point in points:
        value = point["value"]
        point["value"] = f"{value:g}" if isinstance(value, float) else str(value)
    return points


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
