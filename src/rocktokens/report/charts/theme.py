"""What all charts share: colours, shapes and dashes, inlined data, and the frame of title and notes.

Colours are those of Okabe and Ito, told apart with any colour vision: https://jfly.uni-koeln.de/color/
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from rocktokens.display.text import printable
from rocktokens.report.charts.plots import Dash, Group, Hue, Plot

Records = Sequence[dict[str, Any]]
Chart = alt.Chart | alt.LayerChart | alt.FacetChart


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart and its data."""

    name: str
    """Of its files, without the ending."""
    shows: str
    """What there is to see, for those who do not see it."""
    chart: Chart
    records: Records
    plot: Plot
    """The same to be touched."""

    @property
    def title(self) -> str:
        """The title of the chart."""
        return self.chart.title.text

    @property
    def notes(self) -> list[str]:
        """The lines below the title."""
        return list(self.chart.title.subtitle)


VERMILLION, BLUE, GREEN, GREY = "#d55e00", "#0072b2", "#009e73", "#8c8c8c"
INK, FAINT = "#333333", "#6b6b6b"
SOLID, DASHED, DOTTED = [1, 0], [7, 3], [2, 2]
HUES: dict[str, Hue] = {VERMILLION: "vermillion", BLUE: "blue", GREEN: "green", GREY: "grey", INK: "ink"}
DASHES: dict[int, Dash] = {SOLID[0]: "solid", DASHED[0]: "dashed", DOTTED[0]: "dotted"}
WIDTH = 640
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
"""All but the last have the same widths: a browser then needs the room for a text that was left for it."""
LEGEND = alt.Legend(title=None, orient="bottom", symbolOpacity=1)
LINE_LEGEND = alt.Legend(
    title=None,
    orient="bottom",
    symbolType="stroke",
    symbolOpacity=1,
    symbolSize=700,
    symbolStrokeWidth=2.5,
    labelLimit=0,
)
Looks = Mapping[str, tuple[str, Any]]
"""Colour, and shape or dash, of each group, in the order of the legend."""


def by_name(*figures: Figure) -> dict[str, Figure]:
    """Return figures by their names."""
    return {figure.name: figure for figure in figures}


def inline(records: Records) -> alt.Chart:
    """Start a chart whose data are these records, in the spec itself."""
    return alt.Chart(inlined(records))


def inlined(records: Records) -> Any:
    """Turn records into the data of a chart. Not a table, which altair may cut, or write to a file of its own."""
    return {"values": list(records)}


def finite(records: Records, required: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Keep the records that have all required numbers; other numbers that are missing or infinite become None."""
    plain = [{name: _plain(value) for name, value in record.items()} for record in records]
    return [record for record in plain if all(record.get(name) is not None for name in required)]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def in_order(records: Records, field: str) -> list[Any]:
    """Return the values of a field, first seen first."""
    return list(dict.fromkeys(record[field] for record in records))


def scale_of(domain: Sequence[str], values: Sequence[Any]) -> alt.Scale:
    """Give each name a colour, dash, shape or size."""
    return alt.Scale(type="ordinal", domain=list(domain), range=list(values))


def by_shape(records: Records, field: str, looks: Looks) -> dict[str, Any]:
    """Encode the groups that occur in a field by colour and shape."""
    names, colors, shapes = _present(records, field, looks)
    return {
        "color": alt.Color(f"{field}:N", scale=scale_of(names, colors), legend=LEGEND),
        "shape": alt.Shape(f"{field}:N", scale=scale_of(names, shapes), legend=LEGEND),
    }


def by_dash(records: Records, field: str, looks: Looks) -> dict[str, Any]:
    """Encode the groups that occur in a field by colour and dash."""
    names, colors, dashes = _present(records, field, looks)
    return {
        "color": alt.Color(f"{field}:N", scale=scale_of(names, colors), legend=LINE_LEGEND),
        "strokeDash": alt.StrokeDash(f"{field}:N", scale=scale_of(names, dashes)),
    }


def point_groups(records: Records, field: str, looks: Looks) -> tuple[Group, ...]:
    """Return the groups of a plot that ``by_shape`` encodes in a chart."""
    return tuple(
        Group(name, HUES[color], look) for name, color, look in zip(*_present(records, field, looks), strict=True)
    )


def line_groups(records: Records, field: str, looks: Looks) -> tuple[Group, ...]:
    """Return the groups of a plot that ``by_dash`` encodes in a chart."""
    present = zip(*_present(records, field, looks), strict=True)
    return tuple(Group(name, HUES[color], dash=DASHES[dash[0]]) for name, color, dash in present)


def _present(records: Records, field: str, looks: Looks) -> list[tuple[Any, ...]]:
    """Return the names of the groups that occur, their colours, and their shapes or dashes."""
    present = set(in_order(records, field))
    return list(zip(*((name, *look) for name, look in looks.items() if name in present), strict=True))


def sentence_chart(sentence: str, title: str, subtitle: str) -> Chart:
    """Draw a sentence in place of a chart without data."""
    text = inline([{"text": sentence}]).mark_text(fontSize=14, color=INK).encode(text="text:N")
    return finished(text.properties(width=WIDTH, height=100), title, [subtitle])


def finished(chart: Any, title: str, notes: list[str]) -> Chart:
    """Give a chart its title and the theme that all figures share."""
    lines = [printable(note) for note in notes if note]
    heading = alt.TitleParams(text=title, subtitle=lines, anchor="start", offset=14)
    return chart.properties(title=heading, background="white", padding=12, config=_CONFIG)


_CONFIG = alt.Config(
    font=FONT,
    title=alt.TitleConfig(fontSize=16, subtitleFontSize=12, color=INK, subtitleColor=FAINT, subtitlePadding=5),
    axis=alt.AxisConfig(labelColor=INK, titleColor=INK, labelFontSize=11, titleFontSize=12, gridColor="#eeeeee"),
    legend=alt.LegendConfig(labelColor=INK, labelFontSize=12),
    header=alt.HeaderConfig(labelColor=INK, labelFontSize=12),
    view=alt.ViewConfig(stroke="#dddddd"),
)
