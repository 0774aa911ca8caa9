"""Windows against a walk from every occurrence, and random windows against all arrangements there are."""

from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from rocktokens.errors import RocktokensError
from rocktokens.windows import WindowRule, random_windows, rock_windows

RULE = WindowRule(max_each_side=2, min_kl=0.5)
row = st.tuples(st.integers(1, 2), st.sampled_from([0.0, 0.5, 0.9, float("nan")]), st.booleans())
rollouts = st.lists(st.lists(row, min_size=1, max_size=12), min_size=1, max_size=4)


def arrays(rows_by_rollout) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """is_rock, kl, rollout ids, positions of rollouts given as rows of (step in position, kl, is rock)."""
    steps, kl, is_rock = zip(*(row for rows in rows_by_rollout for row in rows), strict=True)
    lengths = [len(rows) for rows in rows_by_rollout]
    positions = np.concatenate([np.cumsum([row[0] for row in rows]) - 1 for rows in rows_by_rollout])
    assert len(steps) == len(positions)
    ids = np.repeat(7 * np.arange(len(lengths), dtype=np.int64), lengths)
    return np.array(is_rock), np.array(kl, np.float32), ids, positions.astype(np.int32)


def walked(is_rock, kl, ids, positions, rule) -> list[bool]:
    """From every rock whose kl is high, to both sides as long as kl stays high."""
    at = {(int(i), int(p)): float(k) for i, p, k in zip(ids, positions, kl, strict=True)}
    marked = set()
    for rock, i, p in zip(is_rock, ids.tolist(), positions.tolist(), strict=True):
        if not rock:
            continue
        marked.add((i, p))
        for direction in (-1, 1):
            for distance in range(rule.max_each_side + 1):
                if not at.get((i, p + direction * distance), 0.0) >= rule.min_kl:
                    break
                marked.add((i, p + direction * distance))
    return [(i, p) in marked for i, p in zip(ids.tolist(), positions.tolist(), strict=True)]


@given(rollouts, st.integers(0, 4), st.sampled_from([0.4, 0.5, 0.7]))
def test_windows_are_those_of_a_walk_from_every_occurrence(rows, side, least):
    columns, rule = arrays(rows), WindowRule(side, least)
    before = columns[0].copy()
    marked = rock_windows(*columns, rule)
    assert marked.dtype == bool
    assert marked.tolist() == walked(*columns, rule)
    assert (columns[0] == before).all()
    as_torch = rock_windows(*map(torch.from_numpy, columns), rule)
    assert as_torch.dtype == torch.bool
    assert as_torch.tolist() == marked.tolist()


def marks(text: str) -> np.ndarray:
    return np.array([mark == "x" for mark in text])


KL = np.array([0.9, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9, 0.1, 0.9], np.float32)
ROCKS = marks("..x.x...x.")
WINDOWS = marks("xxx.xxx.x.")
"""Two before and none across the low one; two after and no more; a low occurrence stands alone."""


def on_one_rollout(is_rock, kl) -> np.ndarray:
    return rock_windows(is_rock, kl, np.zeros(10, np.int64), np.arange(10), RULE)


def test_a_window_by_hand():
    assert on_one_rollout(ROCKS, KL).tolist() == WINDOWS.tolist()


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shift_of_the_rocks_or_of_kl_by_one_shows(shift):
    assert on_one_rollout(np.roll(ROCKS, shift), KL).tolist() != WINDOWS.tolist()
    assert on_one_rollout(ROCKS, np.roll(KL, shift)).tolist() != WINDOWS.tolist()


def test_windows_stop_at_the_ends_of_a_rollout_and_where_a_position_is_missing():
    kl = np.ones(6, np.float32)
    is_rock = marks("..x...")
    assert rock_windows(is_rock, kl, np.array([1, 1, 1, 2, 2, 2]), np.arange(6), RULE).tolist() == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    gap = np.array([0, 1, 2, 4, 5, 6])
    assert rock_windows(is_rock, kl, np.ones(6), gap, RULE).tolist() == [True, True, True, False, False, False]
    assert rock_windows(is_rock, kl, np.ones(6), np.arange(6), RULE).tolist() == [True] * 5 + [False]


def test_the_bound_is_compared_exactly_with_float32_kl():
    stored = np.float32(0.1)
    assert float(stored) > 0.1
    above = np.nextafter(stored, np.float32(1))
    kl = np.array([stored, above], np.float32)
    between = (float(stored) + float(above)) / 2 - 1e-12
    for least, expected in ((float(stored), True), (0.1, True), (between, False), (float(above), False)):
        rule = WindowRule(1, least)
        for convert in (np.asarray, torch.as_tensor):
            columns = map(convert, (np.array([False, True]), kl, np.zeros(2, np.int64), np.arange(2)))
            assert rock_windows(*columns, rule).tolist() == [expected, True], least


def test_no_rows_have_no_windows():
    nothing = np.zeros(0, np.int64)
    assert rock_windows(nothing.astype(bool), nothing.astype(np.float32), nothing, nothing, RULE).shape == (0,)
    assert random_windows(nothing.astype(bool), nothing, seed=0).shape == (0,)


# Random windows


def run_lengths(marked) -> list[int]:
    return sorted(len(run) for run in "".join("x" if mark else " " for mark in marked).split())


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=5), st.integers(0, 2**64))
def test_every_rollout_keeps_its_run_lengths_whatever_else_is_in_the_batch(marked, seed):
    lengths = [len(part) for part in marked]
    ids = np.repeat([2**40 - 5 * index for index in range(len(marked))], lengths)
    moved = random_windows(np.concatenate([np.array(part) for part in marked]), ids, seed)
    parts = np.split(moved, np.cumsum(lengths)[:-1])
    for index, (part, given_part) in enumerate(zip(parts, marked, strict=True)):
        assert run_lengths(part) == run_lengths(given_part)
        alone = random_windows(np.array(given_part), np.full(len(part), 2**40 - 5 * index), seed)
        assert alone.tolist() == part.tolist()


def arrangements(size: int, lengths: list[int]) -> set[tuple[bool, ...]]:
    """All ways to put runs of these lengths into ``size`` positions so that no two touch, by trying every start."""
    found = set()
    for order in permutations(lengths):
        for starts in combinations(range(size), len(order)):
            ends = [start + length for start, length in zip(starts, order, strict=True)]
            apart = all(end < start for end, start in zip(ends, starts[1:], strict=False))
            if apart and ends[-1] <= size:
                runs = list(zip(starts, ends, strict=True))
                found.add(tuple(any(start <= place < end for start, end in runs) for place in range(size)))
    return found


@pytest.mark.parametrize(("size", "lengths"), [(7, [1, 2]), (6, [1, 1]), (9, [1, 1, 3]), (5, [3])])
def test_every_arrangement_is_as_likely_as_any_other(size, lengths):
    possible = arrangements(size, lengths)
    given_one = np.array(sorted(possible)[0])
    per_arrangement = 120
    count = per_arrangement * len(possible)
    ids = np.repeat(np.arange(count), size)
    drawn = random_windows(np.tile(given_one, count), ids, seed=3).reshape(count, size)
    seen = Counter(map(tuple, drawn.tolist()))
    assert seen.keys() == possible
    assert chisquare(list(seen.values())).pvalue > 1e-3


def test_seeds_differ_and_repeat():
    marked, ids = np.tile(marks("xx..x......"), 20), np.repeat(np.arange(20), 11)
    drawn = [random_windows(marked, ids, seed).tolist() for seed in (0, 1, (0, 1), (0, 2), 0, (0, 1))]
    assert drawn[0] == drawn[4]
    assert drawn[2] == drawn[5]
    assert len({tuple(each) for each in drawn}) == 4


def test_random_windows_of_torch_are_torch():
    marked, ids = np.tile(marks("x..xx."), 5), np.repeat(np.arange(-2, 3), 6)
    moved = random_windows(torch.from_numpy(marked), torch.from_numpy(ids), seed=0)
    assert moved.dtype == torch.bool
    assert moved.tolist() == random_windows(marked, ids, seed=0).tolist()


def test_rows_of_a_rollout_must_lie_together():
    with pytest.raises(RocktokensError, match="the rows of rollout 4 are not together: order them by rollout"):
        random_windows(marks("x.x"), np.array([4, 5, 4]), seed=0)


# The rule


def test_a_rule_survives_json_and_nothing_else_is_a_rule():
    rule = WindowRule(np.int64(5), np.float64(0.25))
    assert rule.to_dict() == {"max_each_side": 5, "min_kl": 0.25}
    assert [type(value) for value in rule.to_dict().values()] == [int, float]
    assert WindowRule.from_dict(rule.to_dict()) == rule
    for record in (None, 3, {"min_kl": 1.0}, {**rule.to_dict(), "more": 1}):
        with pytest.raises(RocktokensError, match="is not a window rule: give max_each_side and min_kl"):
            WindowRule.from_dict(record)


@pytest.mark.parametrize(
    ("side", "least", "sentence"),
    [
        (-1, 0.5, "max_each_side = -1 is not valid"),
        (1.5, 0.5, r"max_each_side = 1\.5 is not valid"),
        (True, 0.5, "max_each_side = True is not valid"),
        (1, float("nan"), "min_kl = nan is not valid"),
        (1, "0.5", r"min_kl = '0\.5' is not valid"),
        (1, None, "min_kl = None is not valid"),
    ],
)
def test_bad_rules_are_named(side, least, sentence):
    with pytest.raises(RocktokensError, match=sentence):
        WindowRule(side, least)
