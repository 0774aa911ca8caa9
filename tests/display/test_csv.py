"""CSV that a spreadsheet takes for data: what is a formula, a control character or a break-out stays text."""

import csv
import io

import pytest

from hostile_texts import HOSTILE, SURROGATES
from rocktokens.display.table import csv_text

STARTS = "=+-@＝＋－＠"
"""What a spreadsheet takes for a formula, full width included."""


def read(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


def cells(text: str, separator: str) -> list[str]:
    """What a spreadsheet that separates so would see."""
    return [cell for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) for cell in row]


@pytest.mark.parametrize("before", ["", " ", "   ", "\t", "\r", "\n "])
@pytest.mark.parametrize("start", STARTS)
def test_a_text_that_begins_as_a_formula_gets_an_apostrophe(before: str, start: str):
    _, (cell,) = read(csv_text([{"text": f"{before}{start}1+1"}]))
    assert cell.startswith("'")


@pytest.mark.parametrize("text", ["\t", "\r", "\tx"])
def test_a_text_that_begins_with_a_tab_or_a_return_gets_an_apostrophe(text: str):
    _, (cell,) = read(csv_text([{"text": text}]))
    assert cell.startswith("'")


@pytest.mark.parametrize("text", [";=1+1", "x;=1+1", "x; +1", 'x";@SUM(A1)', "x\t=1+1", "a;b;－1", 'x,";=1+1'])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_no_cell_is_a_formula_whatever_the_spreadsheet_separates_by(text: str, separator: str):
    shown = cells(csv_text([{"before": 1, "text": text, "after": 2}]), separator)
    assert not [cell for cell in shown if cell.lstrip().startswith(tuple(STARTS))]


@pytest.mark.parametrize("text", ["a=b", "1-2", "x@y", "a;b", "\\(", " Step", ";", ""])
def test_other_texts_stay_as_they_are(text: str):
    assert read(csv_text([{"text": text, "n": 1}]))[1] == [text, "1"]


def test_numbers_stay_numbers_and_what_is_missing_is_empty():
    text = csv_text([{"a": -1.5, "b": 3}, {"a": None, "c": float("nan")}])
    assert text == "a,b,c\r\n-1.5,3,\r\n,,\r\n"


def test_hostile_texts_are_one_cell_each_and_can_be_encoded():
    texts = [*HOSTILE, *SURROGATES]
    text = csv_text([{"text": own, "after": place} for place, own in enumerate(texts)])
    text.encode()
    rows = read(text)[1:]
    assert [row[1] for row in rows] == [str(place) for place in range(len(texts))]
    assert not any(row[0].lstrip().startswith(tuple(STARTS)) or not row[0].isprintable() for row in rows)


def test_a_header_is_a_cell_too():
    assert csv_text([{"=cmd": 1}]).startswith("'=cmd")
