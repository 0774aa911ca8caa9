"""Figures in characters: a known point in a known cell, no rock hidden, never too wide, and ASCII where needed."""

import io
import itertools
import math
import re
from typing import Any

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from type_tables import COLUMNS, table, zipf_types

from rocktokens.report.charts.terminal import curve_text, funnel_text

CURVE = [
    {
        "k": k,
        "coverage": 1 - math.exp(-k / 80),
        "coverage_held_out": 0.9 * (1 - math.exp(-k / 80)),
        "stability": 0.75,
        "stability_low": 0.5,
        "stability_high": 0.875,
    }
    for k in [*range(1, 51), 60, 75, 100, 150, 250, 400, 700, 1000]
]


def shown(content: RenderableType, width: int = 120, encoding: str = "utf-8") -> list[str]:
    """The lines that a pipe of this width and encoding gets."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict", newline="")
    Console(file=file, width=width).print(content)
    file.flush()
    return raw.getvalue().decode(encoding).splitlines()


def cells(lines: list[str]) -> list[str]:
    """The plot alone, from the bottom up, without its axes."""
    rows = [re.split("[│┤]", line, maxsplit=1)[1] for line in lines if re.match(r"^ *-?[0-9.]* *[│┤]", line)]
    return rows[::-1]


def test_a_known_point_lands_in_the_known_cell():
    # 66 columns for 10^0 … 10^6.5: ten a decade; 21 rows for 0 … 2 nats: ten a nat.
    types = table(
        [
            (1, "a", "other", 1, 0.0, "other", None),
            (2, "b", "other", 10**6.5, 2.0, "other", None),
            (3, "c", "other", 100, 1.5, "rock", 1),
            (4, "d", "other", 10**4.3, 0.3, "high mean kl", None),
        ]
    )
    lines = shown(funnel_text(types, width=72, height=21))
    rows = cells(lines)
    assert len(rows) == 21 and {len(row) for row in rows} == {66}
    assert {(x, y): mark for y, row in enumerate(rows) for x, mark in enumerate(row) if mark != " "} == {
        (0, 0): "·", (65, 20): "·", (20, 15): "●", (43, 3): "○",
    }  # fmt: skip
    assert lines[1].startswith("2.00 ┤") and lines[11].startswith("1.00 ┤") and lines[21].startswith("0.00 ┤")
    axis, numbers = lines[22], lines[23]
    assert axis.startswith("     └")
    assert [axis.index("└") + 1 + 10 * decade for decade in range(7)] == [m.start() for m in re.finditer("┬", axis)][:7]
    assert numbers.split() == ["1", "10", "100", "1k", "10k", "100k", "1M"]
    assert numbers[5 + 1 + 30 - 1 : 5 + 1 + 30 + 1] == "1k"


TYPES = st.lists(
    st.tuples(
        st.integers(1, 10**6), st.floats(0, 9), st.sampled_from(["rock", "high mean kl", "other", "other", "other"])
    ),
    min_size=1,
    max_size=60,
)


@given(TYPES, st.integers(20, 130), st.integers(2, 30), st.integers(30, 140))
@example([(5275, 0.0, "rock")], 20, 2, 30)
@settings(deadline=None, max_examples=60)
def test_no_rock_is_hidden_and_no_line_too_long(rows: list, width: int, height: int, console: int):
    types = table([(v, "t", "other", freq, kl, group, v) for v, (freq, kl, group) in enumerate(rows)])
    lines = shown(funnel_text(types, width, height), console)
    assert max(map(len, lines)) <= min(width, console, 100)
    plot = cells(lines)
    columns = len(plot[0])

    low, high = (math.log10(pick(freq for freq, _, _ in rows)) for pick in (min, max))
    top = max(kl for _, kl, _ in rows) or 1
    expected: dict[str, set] = {"rock": set(), "high mean kl": set(), "other": set()}
    for freq, kl, group in rows:
        x = 0.5 if low == high else (math.log10(freq) - low) / (high - low)
        places = (x * (columns - 1), kl / top * (height - 1))
        expected[group].add(tuple(math.floor(place + 0.5 + 1e-9) for place in places))
    marks = {(x, y): mark for y, row in enumerate(plot) for x, mark in enumerate(row) if mark != " "}
    assert {at for at, mark in marks.items() if mark == "●"} == expected["rock"]
    assert {at for at, mark in marks.items() if mark == "○"} == expected["high mean kl"] - expected["rock"]
    assert set(marks) == set().union(*expected.values())


@pytest.mark.parametrize(("count", "mark"), [(1, "·"), (2, ":"), (9, ":"), (10, "▒"), (99, "▒"), (100, "▓")])
def test_many_others_in_one_place_are_shaded(count: int, mark: str):
    corner = (0, "z", "other", 1000, 2.0, "rock", 1)
    plot = cells(shown(funnel_text(table([corner, *[(v, "t", "other", 1, 0.0, "other", None) for v in range(count)]]))))
    assert plot[0][0] == mark and plot[-1][-1] == "●"


def test_the_legend_counts_and_the_sentence_explains():
    text = "\n".join(shown(funnel_text(zipf_types(3_000, k=30))))
    assert "● rock (30)   ○ high mean kl (30)   · other (2,940)" in text
    assert "Right is frequent, up is far from the teacher" in text
    assert "mean kl (nats)" in text and "occurrences (log scale)" in text


@pytest.mark.parametrize(
    "content", [funnel_text(zipf_types(3_000)), curve_text(CURVE, chosen=20)], ids=["funnel", "curve"]
)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_pipes_that_are_not_unicode_get_ascii_of_the_same_shape(content: RenderableType, encoding: str):
    lines, plain = shown(content), shown(content, encoding=encoding)
    assert all(line.isascii() and "?" not in line for line in plain)
    assert [len(line) for line in plain] == [len(line) for line in lines]


def test_a_pipe_gets_no_colour_codes_and_a_terminal_does():
    content = funnel_text(zipf_types(200, k=5))
    assert not any("\x1b" in line for line in shown(content))
    file = io.StringIO()
    Console(file=file, width=80, force_terminal=True, color_system="truecolor", no_color=False).print(content)
    assert "\x1b[" in file.getvalue()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (funnel_text(pd.DataFrame(columns=pd.Index(COLUMNS))), "There is no type with a kl to show."),
        (funnel_text(pd.DataFrame()), "There is no type with a kl to show."),
        (funnel_text(table([(1, "a", "other", 3, math.nan, "rock", 1)])), "There is no type with a kl to show."),
        (curve_text([]), "There is no K to compare."),
        (curve_text([{"k": None}]), "There is no K to compare."),
    ],
)
def test_without_data_there_is_a_sentence(content: RenderableType, sentence: str):
    assert shown(content) == [sentence]


@pytest.mark.parametrize(
    "rows",
    [
        [(1, "a", "other", 5, 0.7, "rock", 1)],
        [(v, "a", "other", 10**v, 0.0, "rock", v + 1) for v in range(4)],
        [(v, "a", "other", 7, v / 9, "rock", v + 1) for v in range(9)],
        [(v, "a", "other", 6 + v, 1e-5, "rock", v + 1) for v in range(2)],
    ],
    ids=["one type", "no kl", "one frequency", "tiny"],
)
def test_odd_tables_are_drawn(rows: list):
    lines = shown(funnel_text(table(rows)))
    assert sum(row.count("●") for row in cells(lines)) == len(rows)
    numbers = next(after for line, after in itertools.pairwise(lines) if "└" in line)
    assert numbers.split()[0] == str(rows[0][3])


def row_of(lines: list[str], k: int) -> str:
    return next(line for line in lines if re.match(rf"^ *(► )?{k:,}  ", line))


def test_the_curve_has_a_bar_for_each_k_and_marks_the_chosen():
    lines = shown(curve_text(CURVE, chosen=37))
    for point in (CURVE[0], CURVE[36], CURVE[-1]):
        row = row_of(lines, point["k"])
        coverage, stability = re.findall("[█░]+", row)
        assert coverage.count("█") == math.floor(14 * point["coverage"] + 0.5) and len(coverage) == 14
        assert stability == "█" * 11 + "░" * 3
        assert f"{100 * point['coverage']:.1f} %" in row and f"{100 * point['coverage_held_out']:.1f} %" in row
        assert row.rstrip().endswith("0.75  0.50–0.88")
    assert [line.split()[1] for line in lines if line.lstrip().startswith("►")] == ["37"]
    assert "► K = 37 is taken." in " ".join(lines)
    bars = [line for line in lines if "%" in line]
    assert 10 <= len(bars) <= 15
    assert not any("►" in line for line in shown(curve_text(CURVE)))


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_curve_keeps_to_the_width(width: int):
    lines = shown(curve_text(CURVE, chosen=1000), width)
    assert max(map(len, lines)) <= min(width, 100)
    assert "…" not in "".join(lines)


def test_missing_numbers_are_dashes():
    points: list[dict[str, Any]] = [
        {"k": 1, "coverage": None, "coverage_held_out": math.nan, "stability": None, "stability_low": 0.1},
        {"k": 2, "coverage": 1.0},
    ]
    lines = shown(curve_text(points, chosen=1))
    assert row_of(lines, 1).split() == ["►", "1", "░" * 14, "—", "—", "░" * 14, "—"]
    assert row_of(lines, 2).split()[1:4] == ["█" * 14, "100.0", "%"]
