"""CSV that a spreadsheet takes for data: what is a formula, a control character or a break-out stays text."""

import csv
import io

import pytest
from hostile_texts import HOSTILE, SURROGATES

from rocktokens.report.csv_cells import FORMULA_STARTS, csv_text


def read(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


@pytest.mark.parametrize("start", FORMULA_STARTS)
def test_a_text_that_begins_as_a_formula_gets_an_apostrophe(start: str):
    _, (cell,) = read(csv_text([{"text": f"{start}1+1"}]))
    assert cell.startswith("'")


def test_numbers_stay_numbers_and_what_is_missing_is_empty():
    text = csv_text([{"a": -1.5, "b": 3}, {"a": None, "c": float("nan")}])
    assert text == "a,b,c\r\n-1.5,3,\r\n,,\r\n"


def test_hostile_texts_are_one_cell_each_and_can_be_encoded():
    texts = [*HOSTILE, *SURROGATES]
    text = csv_text([{"text": own, "after": place} for place, own in enumerate(texts)])
    text.encode()
    rows = read(text)[1:]
    assert [row[1] for row in rows] == [str(place) for place in range(len(texts))]
    assert not any(row[0].startswith(FORMULA_STARTS) or not row[0].isprintable() for row in rows)


def test_a_header_is_a_cell_too():
    assert csv_text([{"=cmd": 1}]).startswith("'=cmd")
