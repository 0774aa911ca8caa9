"""The funnel: every type used, by how often it occurs and by how far the student still is from the teacher at it.

1. Every type is a point (occurrences on a log scale, mean kl), its group told by colour, shape and size; where there
   are thousands, the other types are thinned and the subtitle says so.
2. Grey lines join places of equal score, occurrences × mean kl: what ranks a type is how far it lies beyond them.
3. The first rocks are named, with a line to the point where a name had to move away from it.
"""

import math
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from rich.cells import cell_len

from rocktokens.display.numbers import count, fixed, significant
from rocktokens.display.text import visible
from rocktokens.report.charts import theme
from rocktokens.report.charts.funnel_layout import (
    GROUPS,
    HIGH_KL,
    OTHER,
    ROCK,
    Box,
    Frame,
    Point,
    Points,
    drawable,
    equal_scores,
    place_labels,
    thin,
)
from rocktokens.report.charts.plots import Axis, Layer, Panel, Plot, by_group, layer, rounded

EQUAL_SCORE = "Grey lines: equal score (occurrences × mean kl), in nats."
LABELS = 12
"""How many rocks are named."""
CROWD = 500
"""With more points than this, the other types are drawn smaller and fainter."""
HEIGHT = 400
GROUP_LOOKS = {
    ROCK: (theme.VERMILLION, "diamond"),
    HIGH_KL: (theme.BLUE, "triangle-up"),
    OTHER: (theme.GREY, "circle"),
}
FACTS = {
    "id": ("token_id", str),
    "category": ("category", str),
    "occurrences": ("freq", count),
    "mean kl (nats)": ("mean_kl", fixed(3)),
    "R (nats)": ("score", significant),
    "rank": ("rank", count),
}
LABEL_GAP, LABEL_HEIGHT, LABEL_CELL = 7.0, 13.0, 6.0
"""Pixels: kept free around a point, height of a label, width of one of its characters."""


def funnel(types: pd.DataFrame, subtitle: str = "") -> theme.Chart:
    """Draw every type used, by occurrences and mean kl; rocks and high-mean-kl types stand out.

    Columns: token_id, text, category, freq, mean_kl, group (one of ``GROUPS``), rank (missing where it is no rock).
    """
    title = "Where the loss is left: rocks are frequent types with a high mean kl"
    placed = drawable(types)
    if not len(placed):
        return theme.sentence_chart("There is no type with a kl to show.", title, subtitle)
    shown = thin(placed)
    frame = Frame.around(placed, margin=0.08)
    lines = equal_scores(placed, frame)
    layers = [*_score_lines(lines, frame), *_labels(placed.of(ROCK), frame), _points(shown, frame)]
    notes = [subtitle, _counts(len(types), placed, shown), EQUAL_SCORE if lines else ""]
    return theme.finished(alt.layer(*layers).properties(width=theme.WIDTH, height=HEIGHT), title, notes)


def funnel_plot(types: pd.DataFrame) -> Plot:
    """Make the plot of the same points and lines."""
    placed = drawable(types)
    if not len(placed):
        return Plot()
    frame = Frame.around(placed, margin=0.08)
    records = _type_records(thin(placed))[::-1]  # first ranks first
    groups = theme.point_groups(records, "group", GROUP_LOOKS)
    lines = tuple(
        Layer("line", None, rounded(x for x, _ in line), rounded(y for _, y in line), label=(_score_name(score),))
        for score, line in equal_scores(placed, frame).items()
    )
    named = {ROCK: LABELS}
    points = [
        layer(
            *("points", group, own, "freq", "mean_kl"),
            label="text",
            token="token_id",
            facts=FACTS,
            named=named.get(groups[group].name, 0),
        )
        for group, own in by_group(groups, records, "group")
    ]
    occurrences = Axis("occurrences (log scale)", "log", (10**frame.left, 10**frame.right))
    panel = Panel(occurrences, Axis("mean kl (nats)", domain=(frame.bottom, frame.top)), (*lines, *points[::-1]))
    return Plot(groups, (panel,))


def _points(points: Points, frame: Frame) -> alt.Chart:
    is_crowded = len(points) > CROWD
    groups = list(GROUP_LOOKS)
    colors, shapes = (list(looks) for looks in zip(*GROUP_LOOKS.values(), strict=True))
    legend = alt.Legend(title=None, orient="bottom", symbolOpacity=1, symbolSize=70)
    sizes, opacities = [75, 45, 16 if is_crowded else 32], [0.95, 0.75, 0.45 if is_crowded else 0.75]
    return (
        theme.inline(_type_records(points))
        .mark_point(filled=True)
        .encode(
            **_position(frame),
            color=alt.Color("group:N", scale=theme.scale_of(groups, colors), legend=legend),
            shape=alt.Shape("group:N", scale=theme.scale_of(groups, shapes), legend=legend),
            size=alt.Size("group:N", scale=theme.scale_of(groups, sizes), legend=None),
            opacity=alt.Opacity("group:N", scale=theme.scale_of(groups, opacities), legend=None),
            tooltip=[
                alt.Tooltip("text:N", title="token"),
                alt.Tooltip("token_id:Q", title="id"),
                alt.Tooltip("category:N"),
                alt.Tooltip("freq:Q", title="occurrences", format=","),
                alt.Tooltip("mean_kl:Q", title="mean kl (nats)", format=".4f"),
                alt.Tooltip("score:Q", title="score (nats)", format=",.2f"),
                alt.Tooltip("group:N"),
                alt.Tooltip("rank:Q"),
            ],
        )
    )


def _type_records(points: Points) -> list[dict[str, Any]]:
    columns = {
        "token_id": points.token_id.tolist(),
        "text": _texts(points),
        "category": points.category.tolist(),
        "freq": points.freq.astype(np.int64).tolist(),
        "mean_kl": points.mean_kl.tolist(),
        "score": (points.freq * points.mean_kl).tolist(),
        "group": [GROUPS[layer] for layer in points.layer],
        "rank": points.rank.tolist(),
    }
    return theme.finite([dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)])


def _texts(points: Points) -> list[str]:
    return [visible(text) if isinstance(text, str) else "?" for text in points.text]


def _labels(rocks: Points, frame: Frame) -> list[alt.Chart]:
    """Name the first rocks, with a line to the point where a name had to move away from it."""
    ranked = rocks.take(np.arange(len(rocks))[::-1])
    x, y = frame.place(ranked.freq, ranked.mean_kl)
    pixels = list(zip((x * theme.WIDTH).tolist(), (y * HEIGHT).tolist(), strict=True))
    texts = _texts(ranked)[:LABELS]
    sizes = [(LABEL_CELL * cell_len(text), LABEL_HEIGHT) for text in texts]
    boxes = place_labels(pixels, sizes, Box(0, theme.WIDTH, 0, HEIGHT), LABEL_GAP)
    placed = [(text, pixel, box) for text, pixel, box in zip(texts, pixels, boxes, strict=False) if box]
    names = [{"label": text, **_at(frame, box.centre)} for text, _, box in placed]
    leaders = [
        {**_at(frame, pixel), **_at(frame, box.nearest(pixel), "_end")}
        for _, pixel, box in placed
        if math.dist(pixel, box.nearest(pixel)) > 1.5 * LABEL_GAP
    ]
    rule = theme.inline(leaders).mark_rule(color=theme.FAINT, strokeWidth=0.7)
    name = theme.inline(names).mark_text(fontSize=11, color=theme.INK)
    return [
        rule.encode(**_position(frame), x2="freq_end:Q", y2="mean_kl_end:Q"),
        name.encode(**_position(frame), text="label:N"),
    ]


def _at(frame: Frame, pixel: Point, ending: str = "") -> dict[str, float]:
    freq, mean_kl = frame.at(pixel[0] / theme.WIDTH, pixel[1] / HEIGHT)
    return {f"freq{ending}": freq, f"mean_kl{ending}": mean_kl}


def _score_lines(lines: dict[float, list[Point]], frame: Frame) -> list[alt.Chart]:
    path = [
        {"score": score, "freq": freq, "mean_kl": mean_kl} for score, line in lines.items() for freq, mean_kl in line
    ]
    starts = [{"label": _score_name(score), "freq": line[0][0], "mean_kl": line[0][1]} for score, line in lines.items()]
    line = theme.inline(path).mark_line(color="#c8c8c8", strokeWidth=1)
    text = theme.inline(starts).mark_text(color=theme.FAINT, fontSize=10, align="left", baseline="top", dx=5, dy=2)
    return [line.encode(**_position(frame), detail="score:N"), text.encode(**_position(frame), text="label:N")]


def _score_name(score: float) -> str:
    return f"{score:,.0f}" if score >= 1 else f"{score:g}"


def _position(frame: Frame) -> dict[str, Any]:
    """Make the axes of the funnel."""
    freq = alt.Scale(type="log", domain=[10**frame.left, 10**frame.right], nice=False)
    mean_kl = alt.Scale(domain=[frame.bottom, frame.top], nice=False)
    # The counts the axis names: 1, 2, 5, 10, …, only powers of ten where the window is wide.
    steps = (1, 2, 5) if frame.right - frame.left <= 4 else (1,)
    counts = (step * 10**power for power in range(20) for step in steps)
    named = [count for count in counts if frame.left <= math.log10(count) <= frame.right]
    counted = alt.Axis(grid=False, format="~s", values=named or alt.Undefined)
    return {
        "x": alt.X("freq:Q", title="occurrences (log scale)", scale=freq, axis=counted),
        "y": alt.Y("mean_kl:Q", title="mean kl (nats)", scale=mean_kl),
    }


def _counts(n_types: int, placed: Points, shown: Points) -> str:
    """Say how many types are drawn, and how many are not."""
    groups = ", ".join(f"{group} {len(placed.of(group)):,}" for group in reversed(GROUPS))
    text = f"Types: {len(placed):,} ({groups}"
    if len(shown) < len(placed):
        text += f", thinned evenly to {len(shown.of(OTHER)):,} points"
    if len(placed) < n_types:
        text += f"; {n_types - len(placed):,} without a kl left out"
    return text + ")."
