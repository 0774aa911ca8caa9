"""Charts that a reader can touch, as plain data: what ``assets/plot.js`` draws, in the terms of its first lines.

1. A ``Plot`` is made from the records that the altair chart of the same figure is made from, by the same module.
2. Data lie column by column, numbers rounded to what a screen can show; what a datum says when touched is text that is
   made here, so that numbers read as they do in tables.
3. A plot without panels has nothing to draw: the page then shows the image, which says why.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Hue = Literal["vermillion", "blue", "green", "grey", "ink"]
Symbol = Literal["circle", "diamond", "square", "triangle-up", "triangle-down", "tick"]
Dash = Literal["solid", "dashed", "dotted"]
Mark = Literal["points", "line", "bars", "rule", "shade"]
Scale = Literal["linear", "log", "sqrt", "rows"]
Column = tuple[float | None, ...]
Facts = Mapping[str, tuple[str, Callable[[Any], str]]]
"""By title: the field of a record that a datum shows, and how."""
DIGITS = 6
"""Significant digits of a place."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a panel."""

    title: str = ""
    scale: Scale = "linear"
    domain: tuple[float, float] | None = None
    """None fits it to the data."""
    percent: bool = False
    names: tuple[str, ...] = ()
    """Of the rows."""


@dataclass(frozen=True, slots=True)
class Group:
    """What a reader can tell apart and switch off: by colour, and by symbol or dash."""

    name: str
    hue: Hue
    symbol: Symbol = "circle"
    dash: Dash | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """Marks of one kind and group."""

    mark: Mark
    group: int | None = None
    """None: for orientation only."""
    x: Column = ()
    y: Column = ()
    low: Column = ()
    high: Column = ()
    start: Column = ()
    """Of bars that do not begin at 0."""
    token: tuple[int | None, ...] = ()
    label: tuple[str | None, ...] = ()
    facts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    named: int = 0
    """How many data, from the first, have their label written beside them."""
    faint: bool = False
    thickness: float = 0.6
    """Of bars, as a share of a row."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A pair of axes and what is drawn in it."""

    x: Axis
    y: Axis
    layers: tuple[Layer, ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure to be touched."""

    groups: tuple[Group, ...] = ()
    panels: tuple[Panel, ...] = ()


def layer(
    mark: Mark,
    group: int | None,
    records: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    *,
    facts: Facts | None = None,
    label: str | None = None,
    token: str | None = None,
    interval: tuple[str, str] | None = None,
    **more: Any,
) -> Layer:
    """Make a layer from records, by the names of their fields."""
    low, high = interval or (None, None)
    return Layer(
        mark,
        group,
        column(records, x),
        column(records, y),
        low=column(records, low) if low else (),
        high=column(records, high) if high else (),
        token=tuple(record[token] for record in records) if token else (),
        label=tuple(record[label] for record in records) if label else (),
        facts={
            title: tuple("" if record[name] is None else show(record[name]) for record in records)
            for title, (name, show) in (facts or {}).items()
        },
        **more,
    )


def overlaid(plots: Sequence[Plot], names: Sequence[str]) -> Plot:
    """Lay plots of lines over each other, by the titles of their panels; dashes tell whose a line is."""
    dashes: tuple[Dash, ...] = ("solid", "dashed", "dotted")
    groups = [
        replace(group, name=f"{group.name}, {name}", dash=dash)
        for plot, name, dash in zip(plots, names, dashes, strict=False)
        for group in plot.groups
    ]
    panels: dict[str, Panel] = {}
    first = 0
    for plot in plots:
        for panel in plot.panels:
            own = [replace(each, group=None if each.group is None else each.group + first) for each in panel.layers]
            known = panels.get(panel.title, replace(panel, layers=()))
            axis = replace(known.y, domain=_around(known.y.domain, panel.y.domain))
            panels[panel.title] = replace(known, y=axis, layers=(*known.layers, *own))
        first += len(plot.groups)
    return Plot(tuple(groups), tuple(panels.values()))


def _around(*domains: tuple[float, float] | None) -> tuple[float, float] | None:
    known = [domain for domain in domains if domain]
    return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(domains) else None


def by_group(
    groups: Sequence[Group], records: Sequence[Mapping[str, Any]], name: str
) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
    """Return each group's place and its records, by the field that names the group."""
    for place, group in enumerate(groups):
        yield place, [record for record in records if record[name] == group.name]


def in_rows(records: Sequence[Mapping[str, Any]], name: str) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Give each value of a field a row, first seen first; return the names of the rows, and records with theirs."""
    rows = {value: row for row, value in enumerate(dict.fromkeys(record[name] for record in records))}
    return tuple(map(str, rows)), [{**record, "row": rows[record[name]]} for record in records]


def panels_of(records: Sequence[Mapping[str, Any]], name: str) -> dict[str, list[Mapping[str, Any]]]:
    """Return records by the panel that a field names, first seen first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        found.setdefault(record[name], []).append(record)
    return found


def column(records: Sequence[Mapping[str, Any]], name: str) -> Column:
    """Return a field of all records as it is drawn."""
    return rounded(record[name] for record in records)


def rounded(values: Iterable[float | None]) -> Column:
    """Leave of numbers what can be seen."""
    return tuple(None if value is None else float(f"{value:.{DIGITS}g}") for value in values)
