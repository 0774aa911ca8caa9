"""The figures of ``rocktokens study``.

1. ``study_curves``: accuracy over the steps, a panel for every arm beside the baseline, with bands over seeds and
   prompts and a thin line for every run.
2. ``study_comparisons``: the difference of every pair with its interval, a panel for each way to compare.
"""

from functools import partial
from typing import Any

import altair as alt

from rocktokens.display.numbers import count, counted, level, percent, signed
from rocktokens.display.text import printable
from rocktokens.report.charts import theme
from rocktokens.report.charts.plots import Axis, Layer, Panel, Plot, by_group, in_rows, layer, panels_of
from rocktokens.report.tables import COMPARED, UNRELIABLE_NOTE, pair_name
from rocktokens.studies.records import StudyResult

THIS_ARM, BASELINE = "this arm", "baseline"
VERDICT_LOOKS = {
    "better": (theme.GREEN, "triangle-up"),
    "worse": (theme.VERMILLION, "triangle-down"),
    "equivalent": (theme.BLUE, "square"),
    "undecided": (theme.GREY, "circle"),
}
LINE_LOOKS = {THIS_ARM: (theme.VERMILLION, theme.SOLID), BASELINE: (theme.INK, theme.DASHED)}
PANEL_WIDTH, PANEL_HEIGHT = 220, 190


def study_charts(study: StudyResult, name: str) -> dict[str, theme.Figure]:
    """Make the figures of ``rocktokens study``."""
    sizes = f"{counted(len(study.seeds), 'seed')}, {counted(study.n_prompts, 'prompt')}"
    where, interval_level = f"{name}, {sizes}, denominator {study.denominator}", level(study.alpha)
    (means, runs), comparisons = curve_records(study), comparison_records(study)
    return theme.by_name(
        theme.Figure(
            "study_curves",
            "Lines over training steps: accuracy of each arm beside the baseline, with bands.",
            curves_chart(means, runs, f"{where}; the baseline is {study.baseline}", interval_level),
            [*({**point, "run": None} for point in means), *runs],
            curves_plot(means, runs),
        ),
        theme.Figure(
            "study_comparisons",
            "Differences of all pairs of arms with their intervals, a panel for each way to compare.",
            comparisons_chart(comparisons, where, interval_level),
            comparisons,
            comparisons_plot(comparisons),
        ),
    )


def curve_records(study: StudyResult) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Make a record per panel, arm and evaluated step, and one per panel, run and evaluated step.

    A study of the baseline alone has one panel, its own.
    """
    others = [arm.name for arm in study.arms if arm.name != study.baseline]
    means, runs = [], []
    for panel in others or [study.baseline]:
        shown = printable(panel) + (" (unreliable)" if study.arm(panel).is_unreliable else "")
        for name in dict.fromkeys((study.baseline, panel)):
            line = BASELINE if name == study.baseline else THIS_ARM
            look = {"panel": shown, "line": line}
            arm = study.arm(name)
            for point in arm.points:
                low, high = point.interval
                means.append({**look, "step": point.step, "accuracy": point.accuracy, "low": low, "high": high})
            runs += [
                {**look, "run": f"{line} {run.seed} {run.draw}", "step": step, "accuracy": accuracy}
                for run in arm.runs
                for step, accuracy in zip(run.steps, run.accuracy, strict=True)
            ]
    return means, runs


def comparison_records(study: StudyResult) -> list[dict[str, Any]]:
    """Make a record per comparison: pair, panel, difference with its interval in the unit of the panel, verdict.

    ``low_end`` and ``high_end`` are the ends that are estimates, None for one that was cut. Where an arm never reached
    the accuracy there is nothing to draw.
    """
    found = []
    for own in study.comparisons:
        if own.interval is None or own.difference is None:
            continue
        scale, unit = (1, "steps") if own.kind == "steps_to_accuracy" else (100, "points")
        low, high = (scale * end for end in own.interval)
        found.append(
            {
                "pair": printable(pair_name(own) + (" (unreliable)" if own.unreliable else "")),
                "panel": f"{COMPARED[own.kind]} ({unit})",
                "difference": scale * own.difference,
                "low": low,
                "high": high,
                "low_end": None if own.cut[0] else low,
                "high_end": None if own.cut[1] else high,
                "verdict": own.verdict,
                "unreliable": own.unreliable,
            }
        )
    return found


def curves_chart(
    means: theme.Records, runs: theme.Records, subtitle: str = "", interval_level: str = "95 %"
) -> theme.Chart:
    """Draw accuracy over training, each arm beside the baseline; see ``curve_records``."""
    title = "Accuracy as the arms train, each beside the baseline"
    points = theme.finite(means, ("step", "accuracy"))
    if not points:
        return theme.sentence_chart("No run was evaluated.", title, subtitle)
    look = theme.by_dash(points, "line", LINE_LOOKS)
    base = alt.Chart().encode(x=alt.X("step:Q", title="training step"), color=look["color"])
    accuracy = alt.Y("accuracy:Q", title="accuracy", axis=alt.Axis(format="%"), scale=alt.Scale(zero=False))
    is_mean = alt.datum["run"] == None  # noqa: E711 (an expression of the chart)
    mean, run = base.transform_filter(is_mean), base.transform_filter(~is_mean)
    layers = alt.layer(
        run.mark_line(strokeWidth=0.7, opacity=0.45).encode(y=accuracy, detail="run:N"),
        mean.mark_area(opacity=0.18).encode(y=alt.Y("low:Q", title="accuracy"), y2="high:Q"),
        mean.mark_line(strokeWidth=2.5, point=alt.OverlayMarkDef(size=30)).encode(y=accuracy, **look),
        data=theme.inlined([*({**point, "run": None} for point in points), *theme.finite(runs, ("step", "accuracy"))]),
    ).properties(width=PANEL_WIDTH, height=PANEL_HEIGHT)
    panels = layers.facet(alt.Facet("panel:N", title=None, sort=theme.in_order(points, "panel")), columns=3)
    note = f"Bands: {interval_level} intervals over seeds and prompts. Thin lines: single runs."
    return theme.finished(panels, title, [subtitle, note])


def curves_plot(means: theme.Records, runs: theme.Records) -> Plot:
    """Make the plot of the same curves."""
    points, single = theme.finite(means, ("step", "accuracy")), theme.finite(runs, ("step", "accuracy"))
    if not points:
        return Plot()
    groups = theme.line_groups(points, "line", LINE_LOOKS)
    facts = {
        "step": ("step", count),
        "accuracy": ("accuracy", percent),
        "from": ("low", percent),
        "to": ("high", percent),
    }
    by_panel, step, accuracy = panels_of(single, "panel"), Axis("training step"), Axis("accuracy", percent=True)
    panels = []
    for title, panel in panels_of(points, "panel").items():
        drawn = [
            layer("line", group, own, "step", "accuracy", interval=("low", "high"), facts=facts)
            for group, own in by_group(groups, panel, "line")
        ]
        thin = [
            layer("line", group, run, "step", "accuracy", faint=True)
            for group, own in by_group(groups, by_panel.get(title, []), "line")
            for run in panels_of(own, "run").values()
        ]
        panels.append(Panel(step, accuracy, (*thin, *drawn), title))
    return Plot(groups, tuple(panels))


def comparisons_chart(records: theme.Records, subtitle: str = "", interval_level: str = "95 %") -> theme.Chart:
    """Draw the differences of all pairs with their intervals, a row per pair, a panel per kind."""
    title = "Who is better: first arm minus second"
    points = theme.finite(records, ("difference", "low", "high"))
    if not points:
        return theme.sentence_chart("No arms were compared.", title, subtitle)
    look, pairs = theme.by_shape(points, "verdict", VERDICT_LOOKS), theme.in_order(points, "pair")
    pair = alt.Y("pair:N", title=None, sort=pairs, axis=alt.Axis(labelLimit=0))
    base = alt.Chart().encode(y=pair, color=look["color"])
    layers = alt.layer(
        alt.Chart().mark_rule(color=theme.INK, strokeDash=[4, 3]).encode(x=alt.datum(0)),
        base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", title=None), x2="high:Q"),
        *(
            base.transform_filter(alt.datum[end] != None)  # noqa: E711 (an expression of the chart)
            .mark_tick(thickness=2, size=11, opacity=1)
            .encode(x=alt.X(f"{end}:Q", title=None))
            for end in ("low_end", "high_end")
        ),
        base.mark_point(filled=True, size=90, opacity=1).encode(
            x="difference:Q",
            shape=look["shape"],
            tooltip=["pair:N", "panel:N", "difference:Q", "low:Q", "high:Q", "verdict:N"],
        ),
        data=theme.inlined(points),
    ).properties(width=PANEL_WIDTH * 4 // 3, height=40 + 26 * len(pairs))
    panel = alt.Facet("panel:N", title=None, sort=theme.in_order(points, "panel"))
    panels = layers.facet(panel, columns=2).resolve_scale(x="independent")
    notes = [
        f"Lines: {interval_level} intervals for the pairs of a panel together, exploratory ones apart; without an end "
        "where they go beyond what is possible.",
        "Fewer steps to an accuracy are better; an arm whose runs never reach it is not shown there.",
        *([UNRELIABLE_NOTE] if any(point.get("unreliable") for point in points) else []),
    ]
    return theme.finished(panels, title, [subtitle, *notes])


def comparisons_plot(records: theme.Records) -> Plot:
    """Make the plot of the same rows."""
    points = theme.finite(records, ("difference", "low", "high"))
    if not points:
        return Plot()
    groups = theme.point_groups(points, "verdict", VERDICT_LOOKS)
    change = partial(signed, digits=1)
    facts = {
        "difference": ("difference", change),
        "from": ("low", change),
        "to": ("high", change),
    }
    panels = []
    for title, panel in panels_of(points, "panel").items():
        names, rows = in_rows(panel, "pair")
        drawn = [
            layer("points", group, own, "difference", "row", label="pair", interval=("low", "high"), facts=facts)
            for group, own in by_group(groups, rows, "verdict")
        ]
        panels.append(Panel(Axis(), Axis(scale="rows", names=names), (Layer("rule", x=(0.0,)), *drawn), title))
    return Plot(groups, tuple(panels))
