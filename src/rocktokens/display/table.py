"""One table, three renderers: Rich for a terminal, HTML for a notebook, CSV for a spreadsheet.

1. A table is made from records by columns; a column turns a record into a ``Cell``: the text to show, and the number it
   is sorted by. ``number``, ``text``, ``token`` and ``verdict`` make cells; text becomes safe here, once.
2. ``to_rich`` leaves out columns that only a wide screen has room for; ``to_html`` shows all of them. The report's page
   renders the same record with its own template, which adds sorting and search.
3. ``to_csv`` holds the values, not their texts: those of ``records`` where they are given, else those of the cells.
"""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from rocktokens.display.numbers import DASH, Show, count, interval
from rocktokens.display.text import for_csv, for_html, for_terminal, printable, visible

if TYPE_CHECKING:
    from rich.table import Table as RichTable

WIDE, WIDEST = 96, 144
"""Characters of a screen that has room for columns of interest, and for all of them."""
STYLES = {
    **dict.fromkeys(("supported", "ok"), "bold green"),
    **dict.fromkeys(("contradicted", "fail"), "bold red"),
    **dict.fromkeys(("inconclusive", "warn"), "bold yellow"),
}
"""Verdicts that have a colour on a terminal; their word says the same."""
Kind = Literal["number", "text", "token", "verdict"]
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell shows, and the number its column is sorted by."""

    text: str
    kind: Kind = "text"
    value: float | None = None
    token_id: int | None = None
    """Which type it is, where it shows one."""


def number(value: float | None, show: Show = count, ends: Sequence[float] | None = None) -> Cell:
    """Make a cell of a number, with its interval where ``ends`` are given; a dash where there is none, or NaN."""
    if value is None or math.isnan(value):
        return Cell(DASH, "number")
    return Cell(f"{show(value)} {interval(ends, show)}".rstrip(), "number", float(value))


def ends(of: Sequence[float] | None, show: Show) -> Cell:
    """Make a cell of an interval."""
    return Cell(interval(of, show) or DASH, "number")


def text(shown: str) -> Cell:
    """Make a cell of words or a name."""
    return Cell(printable(shown))


def token(shown: str, token_id: int | None = None) -> Cell:
    """Make a cell of a token's text, its spaces visible."""
    return Cell(visible(shown), "token", token_id=token_id)


def verdict(word: str) -> Cell:
    """Make a cell of a verdict."""
    return Cell(printable(word), "verdict")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A title, and what each record shows below it."""

    title: str
    cell: Callable[[Row], Cell]
    room: int = 0
    """Characters of the narrowest screen that shows it: 0, ``WIDE`` or ``WIDEST``."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under titles; make one with ``Table.of``."""

    name: str
    """Of its file, without the ending."""
    titles: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    """One line above it, or the caption of a page."""
    notes: tuple[str, ...] = ()
    """What its columns mean."""
    rooms: tuple[int, ...] = ()
    """For each column, the characters of the narrowest screen that shows it."""
    records: Sequence[Mapping[str, Any]] = ()
    """What the CSV holds; default: the values of the cells."""

    @classmethod
    def of(
        cls,
        name: str,
        columns: Sequence[Column[Row]],
        rows: Iterable[Row],
        title: str = "",
        notes: Sequence[str] = (),
        records: Sequence[Mapping[str, Any]] = (),
    ) -> "Table":
        """Make a table with a row for each record."""
        cells = tuple(tuple(column.cell(record) for column in columns) for record in rows)
        titles = tuple(column.title for column in columns)
        return cls(name, titles, cells, title, tuple(notes), tuple(column.room for column in columns), records)

    @property
    def caption(self) -> str:
        """The title and the notes as one paragraph."""
        return " ".join(filter(None, (self.title, *self.notes)))

    @property
    def are_numeric(self) -> list[bool]:
        """Whether each column is set flush right and sorted by number."""
        return [any(row[at].kind == "number" for row in self.rows) for at in range(len(self.titles))]

    def to_rich(self, width: int | None = None) -> "RichTable":
        """Render for a terminal of this width, without a frame; the notes are the caller's to print."""
        from rich.box import SIMPLE_HEAD
        from rich.markup import escape
        from rich.table import Table as RichTable

        title = for_terminal(self.title, "italic") if self.title else None
        table = RichTable(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        shown = [at for at, room in enumerate(self.rooms) if width is None or room <= width]
        are_numeric = self.are_numeric
        for at in shown:
            is_number = are_numeric[at]
            justify = "right" if is_number else "left"
            table.add_column(escape(printable(self.titles[at])), justify=justify, no_wrap=is_number)
        for row in self.rows:
            table.add_row(*(for_terminal(row[at].text, STYLES.get(row[at].text, "")) for at in shown))
        return table

    def to_html(self, most: int = 50) -> str:
        """Render for a notebook: the first rows, no style and no script."""
        head = "".join(f"<th>{for_html(title)}</th>" for title in self.titles)
        body = "".join(
            f"<tr>{''.join(f'<td>{for_html(cell.text)}</td>' for cell in row)}</tr>" for row in self.rows[:most]
        )
        more = f"<p>… and {len(self.rows) - most:,} more</p>" if len(self.rows) > most else ""
        caption = f"<p>{for_html(self.caption)}</p>" if self.caption else ""
        return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"

    def to_csv(self) -> str:
        """Render the values for a spreadsheet."""
        if self.records:
            return csv_text(self.records)
        values = [[cell.text if cell.value is None else cell.value for cell in row] for row in self.rows]
        return csv_text([dict(zip(self.titles, row, strict=True)) for row in values])


def csv_text(records: Iterable[Mapping[str, Any]]) -> str:
    """Write records as one CSV with a header, lines ended as RFC 4180 has them.

    Its columns are those of all records, first seen first; what is missing, NaN or infinite is an empty cell.
    """
    rows = list(records)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(map(for_csv, columns))
    for row in rows:
        values = (row.get(name) for name in columns)
        writer.writerow(None if isinstance(v, float) and not math.isfinite(v) else for_csv(v) for v in values)
    return buffer.getvalue()


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record whose intervals are two columns."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if name.endswith("interval"):
            found[f"{name}_low"], found[f"{name}_high"] = value or (None, None)
        else:
            found[name] = value
    return found
