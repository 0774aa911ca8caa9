"""Votes by direction and sign tests, against counting by hand."""

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocktokens.gradients.verdicts import Tally, directions, sign_test


def at(*degrees: float) -> np.ndarray:
    angles = np.deg2rad(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.arange(1, len(degrees) + 1)[:, None]


@pytest.mark.parametrize(
    ("vectors", "expected"),
    [
        (at(0, 25, 90), [0, 0, 1]),  # cos 25° = 0.906
        (at(0, 26, 90), [0, 1, 2]),  # cos 26° = 0.899
        (at(0, 20, 40, 90), [0, 0, 0, 1]),  # a chain
        (at(0, 180, 90), [0, 0, 1]),  # one line, pulled both ways
        (np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]), [0, 1, 2]),  # nothing points nowhere
        (np.zeros((0, 2)), []),
    ],
)
def test_what_lies_along_one_line_is_one_direction(vectors, expected):
    assert directions(vectors).tolist() == expected


def test_a_direction_votes_as_most_of_its_rocks_and_a_divided_one_does_not():
    answers = [True, True, False, True, False, None, False, None]
    tally = Tally.of(answers, [0, 0, 0, 1, 1, 1, 2, 3])
    assert tally == Tally(yes=3, known=6, directions_for=1, directions_against=1, directions=3)


@given(st.integers(0, 30), st.integers(0, 30))
def test_the_sign_test_is_both_tails_of_fair_coins(above, below):
    count, fewer = above + below, min(above, below)
    tail = sum(comb(count, wins) for wins in range(fewer + 1)) / 2**count
    assert sign_test(above, below) == pytest.approx(min(1.0, 2 * tail))


@pytest.mark.parametrize(
    ("yes", "no", "verdict"),
    [(6, 0, "holds"), (5, 0, "cannot be told here"), (0, 6, "does not hold"), (8, 2, "cannot be told here")],
)
def test_most_must_be_more_than_chance(yes, no, verdict):
    tally = Tally.of([True] * yes + [False] * no, range(yes + no))
    assert tally.verdict == verdict
    assert f"{yes + no} directions: {yes} for it, {no} against" in tally.text
