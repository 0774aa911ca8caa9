"""The figures of ``rocktokens find`` in characters: for a terminal, a log file or a pipe.

1. ``funnel_text``: a scatter of log10 occurrences × mean kl. A cell shows the topmost group in it (a rock is never
   hidden), and where only other types are, how many.
2. ``curve_text``: coverage and stability as bars, one line for each K, the chosen K marked.
3. Groups differ by character, not by colour alone; where the output cannot show these characters, ASCII stands in.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rocktokens.display.numbers import decimal, percent
from rocktokens.report.charts.funnel_layout import GROUPS, HIGH_KL, OTHER, ROCK, Frame, Points, drawable
from rocktokens.report.charts.theme import finite

MAX_WIDTH = 100
MARKS = {ROCK: "●", HIGH_KL: "○", OTHER: "·"}
CROWDS = ((2, ":"), (10, "▒"), (100, "▓"))
"""From how many other types in one place on a denser mark stands for them."""
STYLES = {ROCK: "bold dark_orange", HIGH_KL: "bold cyan", OTHER: "dim"}
CURVE_ROWS = 14
CURVE_NUMBERS = 48
"""Characters of a line of the curve that are not bars."""
HALF = 0.5 + 1e-9
"""Rounds to the nearest cell; what rounding errors put just below a half is one."""
BAR_WIDTH = 14
_ASCII = str.maketrans("●○·▒▓│┤└─┬█░—–►…", "@o.=%|++-+#.-->~")


@dataclass(frozen=True, slots=True)
class Fitted:
    """Fits what it builds to the output: no wider than there is room for, and ASCII where Unicode cannot be shown."""

    build: Callable[[int], RenderableType]
    width: int = MAX_WIDTH

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Build for the width there is, and replace characters one for one."""
        width = min(self.width, options.max_width, MAX_WIDTH)
        for segment in console.render(Constrain(self.build(width), width), options):
            if options.ascii_only:
                text = segment.text.translate(_ASCII).encode("ascii", "replace").decode()
                yield Segment(text, segment.style, segment.control)
            else:
                yield segment


def funnel_text(types: pd.DataFrame, width: int = 72, height: int = 18) -> RenderableType:
    """Show every type used, by occurrences (log scale, to the right) and mean kl (upwards).

    ``types`` are those of ``funnel``; ``width`` counts the axis and is less where the output is narrower, ``height``
    is without axis and legend.
    """
    placed = drawable(types)
    if not len(placed):
        return Text("There is no type with a kl to show.")
    frame = Frame.around(placed)
    return Fitted(lambda room: _funnel(placed, frame, room, max(height, 2)), width)


def curve_text(curve: Sequence[dict[str, Any]], chosen: int | None = None) -> RenderableType:
    """Show coverage of the kl and stability of the set for some of the K, from ``CutoffPoint`` records."""
    points = sorted(finite(curve, ("k",)), key=lambda point: point["k"])
    if not points:
        return Text("There is no K to compare.")
    how = "Coverage: share of all kl that the top K hold. Stability: mean Jaccard of the top K on random subsets of "
    how += "the prompts, and its spread." + ("" if chosen is None else f" ► K = {chosen:,} is taken.")
    return Fitted(lambda width: Group(_curve(_spread(points, chosen), chosen, width), Text(how)))


def _curve(points: list[dict[str, Any]], chosen: int | None, width: int) -> Table:
    bar = max(min(BAR_WIDTH, (width - CURVE_NUMBERS) // 2), 1)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("K", justify="right", no_wrap=True)
    for name in ("coverage", "held out", "stability", ""):
        table.add_column(name, justify="right" if name == "held out" else "left", no_wrap=True)
    for point in points:
        is_chosen = point["k"] == chosen
        band = [decimal(point.get(name), 2) for name in ("stability_low", "stability_high")]
        table.add_row(
            f"{'► ' if is_chosen else ''}{point['k']:,}",
            f"{_bar(point.get('coverage'), bar)} {percent(point.get('coverage')):>7}",
            percent(point.get("coverage_held_out")),
            f"{_bar(point.get('stability'), bar)} {decimal(point.get('stability'), 2):>4}",
            "" if "—" in band else "–".join(band),
            style="bold" if is_chosen else "",
        )
    return table


def _funnel(points: Points, frame: Frame, width: int, height: int) -> RenderableType:
    digits = min(max(1 - math.floor(math.log10(frame.top - frame.bottom)), 2), 6)
    numbers = {row: f"{frame.at(0, row / (height - 1))[1]:.{digits}f}" for row in (0, (height - 1) // 2, height - 1)}
    margin = max(map(len, numbers.values()))
    rows = _rows(points, frame, max(width - margin - 2, 2), height)
    lines = [
        Text(f"{numbers.get(row, ''):>{margin}} {'┤' if row in numbers else '│'}").append_text(cells)
        for row, cells in enumerate(rows)
    ]
    axis, labels = _axis(points.freq, frame, len(rows[0]))
    return Group(
        Text("mean kl (nats)"),
        *reversed(lines),
        Text(f"{'':{margin}} └{axis}"),
        Text(f"{'':{margin}}  {labels}"),
        Text(f"{'occurrences (log scale)':>{width}}"),
        _legend(points),
        Text("Right is frequent, up is far from the teacher: rocks hold the most loss, the product of the two."),
    )


def _rows(points: Points, frame: Frame, columns: int, height: int) -> list[Text]:
    """Draw the lines of the plot from the bottom up: in each cell the mark of the topmost group that is there."""
    x, y = frame.place(points.freq, points.mean_kl)
    column, row = (np.floor(at * (cells - 1) + HALF).astype(int) for at, cells in ((x, columns), (y, height)))
    count, layer = np.zeros((height, columns), int), np.full((height, columns), -1)
    np.add.at(count, (row, column), 1)
    np.maximum.at(layer, (row, column), points.layer)
    return [
        Text.assemble(*(_mark(int(top), int(many)) for top, many in zip(layer[at], count[at], strict=True)))
        for at in range(height)
    ]


def _mark(layer: int, count: int) -> tuple[str, str]:
    """Choose the character of a cell and its style."""
    if layer < 0:
        return " ", ""
    group = GROUPS[layer]
    denser = [mark for least, mark in CROWDS if group == OTHER and count >= least]
    return [MARKS[group], *denser][-1], STYLES[group]


def _axis(freqs: np.ndarray, frame: Frame, columns: int) -> tuple[str, str]:
    """Draw the axis of occurrences, and the numbers under its ticks: decades, and the ends where there is room."""
    decades = [10.0**power for power in range(20) if freqs.min() <= 10**power <= freqs.max()]
    line, labels = ["─"] * columns, [" "] * columns
    for freq in (*decades, float(freqs.min()), float(freqs.max())):
        text = _short(freq)
        column = math.floor(frame.place(np.array(freq), np.array(0))[0] * (columns - 1) + HALF)
        start = max(min(column - len(text) // 2, columns - len(text)), 0)
        if not "".join(labels[max(start - 1, 0) : start + len(text) + 1]).strip():
            line[column], labels[start : start + len(text)] = "┬", text
    return "".join(line), "".join(labels[:columns])


def _legend(points: Points) -> Text:
    legend = Text()
    for group in reversed(GROUPS):
        legend.append(MARKS[group], STYLES[group]).append(f" {group} ({len(points.of(group)):,})   ")
    return legend.append("\nseveral others in one place: " + ", ".join(f"{mark} {least}+" for least, mark in CROWDS))


def _spread(points: list[dict[str, Any]], chosen: int | None) -> list[dict[str, Any]]:
    """Choose some of the points in even steps of log K, the first, the last and the chosen one among them."""
    ks = np.array([point["k"] for point in points], float)
    wanted = np.geomspace(ks[0], ks[-1], CURVE_ROWS)
    nearest = {int(np.abs(np.log(ks / k)).argmin()) for k in wanted}
    return [point for index, point in enumerate(points) if index in nearest or point["k"] == chosen]


def _bar(share: float | None, width: int) -> str:
    filled = 0 if share is None else math.floor(min(max(share, 0), 1) * width + 0.5)
    return "█" * filled + "░" * (width - filled)


def _short(count: float) -> str:
    """Show a count in about four characters: 1, 250, 1.3k, 20M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * unit:
            return f"{count / unit:.3g}{name}"
    return f"{count:.3g}"
