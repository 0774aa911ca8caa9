"""One table in three renderings: safe in each, the same numbers in all."""

import csv
import io
import math
from html.parser import HTMLParser

import pytest
from rich.console import Console

from hostile_texts import HOSTILE, SURROGATES
from rocktokens.display.numbers import fixed, percent, points
from rocktokens.display.table import WIDE, WIDEST, Column, Table, ends, flat, number, text, token, verdict
from rocktokens.display.text import for_csv, for_html, for_terminal, visible

TEXTS = [*HOSTILE, *SURROGATES, "[bold]", "[/]", "\\[", ":smile:", "=1+1", "a;=1+1"]
Row = tuple[str, float | None]
COLUMNS: list[Column[Row]] = [
    Column("token", lambda row: token(row[0])),
    Column("name", lambda row: text(row[0][:40])),
    Column("share", lambda row: number(row[1], percent)),
    Column("again", lambda row: number(row[1], fixed(2)), room=WIDE),
    Column("verdict", lambda row: verdict("supported"), room=WIDEST),
]


class Tags(HTMLParser):
    """The elements and the texts of some HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def table() -> Table:
    rows: list[Row] = [(shown, place / 8) for place, shown in enumerate(TEXTS)]
    return Table.of("hostile", COLUMNS, rows, title="[red]<b>title</b>", notes=["a note"])


def lines_of(table: Table, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=200, emoji=False, force_terminal=True, color_system=None).print(table.to_rich(width))
    return file.getvalue().splitlines()


def test_a_terminal_shows_every_text_and_takes_none_for_markup(table: Table):
    lines = lines_of(table, 200)
    assert lines[0].startswith("[red]<b>title</b>") and len(lines) == len(TEXTS) + 3
    for shown, line in zip(TEXTS, lines[3:], strict=True):
        assert line.startswith(visible(shown)) and "\x1b" not in line


def test_html_holds_every_text_as_text(table: Table):
    tags = Tags(table.to_html(most=1000))
    assert set(tags.names) == {"p", "table", "thead", "tbody", "tr", "th", "td"} and not tags.attributes
    assert "[red]<b>title</b> a note" in tags.texts
    assert all(visible(shown) in tags.texts for shown in TEXTS)
    assert table.to_html().isprintable() and f"… and {len(TEXTS) - 50:,} more" in table.to_html()


def test_csv_holds_values_not_texts(table: Table):
    rows = list(csv.DictReader(io.StringIO(table.to_csv(), newline="")))
    assert [float(row["share"]) for row in rows] == [place / 8 for place in range(len(TEXTS))]
    assert not [row for row in rows if row["token"].startswith(("=", "+", "-", "@"))]


def test_csv_holds_the_records_where_they_are_given():
    records = [flat({"name": "a", "interval": (0.25, 0.5)}), flat({"name": "=b", "interval": None})]
    written = Table.of("t", [Column("x", lambda _: text("x"))], [0, 1], records=records).to_csv()
    assert written == "name,interval_low,interval_high\r\na,0.25,0.5\r\n'=b,,\r\n"


@pytest.mark.parametrize(("width", "count"), [(80, 3), (WIDE, 4), (WIDEST, 5), (None, 5)])
def test_a_narrow_screen_leaves_columns_out(table: Table, width: int | None, count: int):
    assert [column.header for column in table.to_rich(width).columns] == list(table.titles[:count])


def test_numbers_are_flush_right_and_keep_their_value(table: Table):
    assert table.are_numeric == [False, False, True, True, False]
    cell = number(-0.0125, points, (-0.05, 0.0))
    assert (cell.text, cell.value) == ("−1.2 [−5.0, 0.0]", -0.0125)
    assert (number(None).text, number(None).value, ends(None, percent).text) == ("—", None, "—")
    assert ends((0.25, 0.5), percent).text == "[25.0, 50.0]"


def test_what_is_no_number_is_a_dash():
    assert {number(value, percent).text for value in (None, math.nan)} == {number(None).text}


def test_each_medium_has_its_own_escape():
    assert for_terminal("[b]\x1b").plain == "[b]\\u001b"
    assert for_html('<a href="x">\u202e') == "&lt;a href=&quot;x&quot;&gt;\\u202e"
    assert (for_csv("=1"), for_csv(-1.5)) == ("'=1", -1.5) and math.isnan(for_csv(math.nan))


def test_titles_of_columns_neither_act_nor_are_markup():
    titles = ["[bold]x[/bold]", "a\x1b[2Jb", "\u202eright"]
    table = Table.of("odd", [Column(title, text) for title in titles], ["cell"])
    buffer = io.StringIO()
    Console(file=buffer, width=120, color_system=None).print(table.to_rich(120))
    head = buffer.getvalue().splitlines()[0]
    assert head.isprintable() and "[bold]x[/bold]" in head and "a\\u001b[2Jb" in head and "\\u202eright" in head
