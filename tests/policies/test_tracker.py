"""The tracker against a naive one, its statistics on simulated kl, and that order and resumes change nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracker_oracle import NaiveTracker, changing_steps

from rocktokens.errors import RocktokensError
from rocktokens.policies.tracker import Changes, RockTracker, StepSums, trend

ROWS = st.lists(st.tuples(st.integers(0, 9), st.one_of(st.just(np.nan), st.floats(0, 50, width=32))), max_size=60)


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, column in left.items():
        assert column.dtype == right[name].dtype
        np.testing.assert_array_equal(column, right[name])


def columns(sums: StepSums) -> dict[str, np.ndarray]:
    return {name: getattr(sums, name) for name in ("ids", "count", "scored", "kl")}


@given(rows=ROWS)
def test_step_sums_are_those_of_a_loop(rows) -> None:
    ids, kl = np.array([row[0] for row in rows], dtype=np.int32), np.array([row[1] for row in rows])
    sums = StepSums.of(kl, ids)
    assert sums.ids.tolist() == sorted(set(ids.tolist()))
    for v, count, scored, total in zip(sums.ids, sums.count, sums.scored, sums.kl, strict=True):
        known = [value for value in kl[ids == v].tolist() if not np.isnan(value)]
        assert (count, scored) == (int((ids == v).sum()), len(known))
        assert total == sum(round(value * 2**24) for value in known)


@given(rows=ROWS, seed=st.integers(0, 99))
def test_row_order_does_not_matter(rows, seed) -> None:
    """So neither does the split over ranks, whose rows are gathered before they are summed."""
    ids, kl = np.array([row[0] for row in rows], dtype=np.int64), np.array([row[1] for row in rows], dtype=np.float32)
    whole, order = StepSums.of(kl, ids), np.random.default_rng(seed).permutation(len(rows))
    assert_same(columns(whole), columns(StepSums.of(kl[order], ids[order])))


def test_tracker_is_the_naive_one() -> None:
    """Same calls, same releases, same frozen types, step by step, through trials and second freezes."""
    parameters = {"decay": 0.7, "min_share": 0.02, "tolerance": 0.08, "patience": 2, "freeze_windows": 2}
    seen = dict.fromkeys(Changes._fields, 0)
    for seed in range(8):
        stop = 100 if seed % 2 else None
        ours = RockTracker(window_steps=4, start=12, stop=stop, protected={3}, **parameters)
        naive = NaiveTracker(window_steps=4, start=12, stop=stop, protected={3}, **parameters)
        for kl, ids, step in changing_steps(seed, 160):
            changes, expected = ours.observe(StepSums.of(kl, ids), step), naive.observe(kl, ids, step)
            assert {name: set(ids.tolist()) for name, ids in changes._asdict().items()} == expected
            assert set(ours.frozen.tolist()) == naive.frozen()
            for name, changed in expected.items():
                seen[name] += len(changed)
    assert all(number > 10 for number in seen.values()), seen


def test_interval_covers_the_slope() -> None:
    """Means of Poisson many skewed values about lines with a known slope: the interval holds it 19 times in 20."""
    rng, types, slope = np.random.default_rng(5), 4000, 0.02
    tracker = RockTracker(window_steps=8, decay=0.8, min_share=0.5, tolerance=0.9)
    for step in range(39):
        ids = np.repeat(np.arange(types), rng.poisson(6, types))
        tracker.observe(StepSums.of((1 + slope * step / 8) * rng.gamma(4, 0.25, len(ids)), ids), step)
    state = tracker.state()
    _, found, error = trend(*(state[name] for name in ("n", "t", "tt", "y", "ty", "yy", "steps")))
    covered = np.mean(np.abs(found - slope) <= error)
    assert covered >= 0.95
    assert np.std(found) > 0.2 * np.median(error)  # wide, but not so wide that it means nothing


def share_called(fall: float, noise: float, per_step: float, windows: int = 30, types: int = 400) -> float:
    """Of types whose kl falls by the share ``fall`` a window, those that are ever called."""
    rng, tracker, called = np.random.default_rng(11), RockTracker(min_share=1e-6), set()
    for step in range(windows * tracker.window_steps):
        ids = np.repeat(np.arange(types), rng.poisson(per_step, types))
        kl = (1 - fall) ** (step / tracker.window_steps) * rng.gamma(1 / noise**2, noise**2, len(ids))
        called.update(tracker.observe(StepSums.of(kl, ids), step).called.tolist())
    return len(called) / types


def test_falling_types_are_not_frozen() -> None:
    """Thirty windows are thirty chances to be wrong; a type that falls by the tolerance itself is the hardest."""
    assert share_called(fall=0.05, noise=0.3, per_step=10) <= 0.05
    assert share_called(fall=0.075, noise=0.3, per_step=10) == 0
    assert share_called(fall=0.075, noise=1.0, per_step=0.5) == 0
    assert share_called(fall=0.3, noise=1.0, per_step=10) == 0


def test_still_types_are_frozen_when_the_steps_can_tell() -> None:
    assert share_called(fall=0.0, noise=0.3, per_step=10) == 1
    assert share_called(fall=0.01, noise=0.3, per_step=10) == 1
    assert share_called(fall=0.0, noise=3.0, per_step=0.5, windows=12) == 0


@pytest.mark.parametrize("cut", [1, 13, 16, 77])
def test_restored_tracker_goes_on_bit_for_bit(cut: int) -> None:
    """In the middle of a window, at its end, and with types frozen or on trial."""
    whole, first, second = (RockTracker(window_steps=4, freeze_windows=2, tolerance=0.08) for _ in range(3))
    for kl, ids, step in changing_steps(0, 120):
        expected = whole.observe(StepSums.of(kl, ids), step)
        half = first if step < cut else second
        found = half.observe(StepSums.of(kl, ids), step)
        assert [part.tolist() for part in found] == [part.tolist() for part in expected]
        if step == cut - 1:
            second.restore(first.state())
    assert len(whole.rocks)
    assert_same(whole.state(), second.state())


def test_state_is_a_copy() -> None:
    tracker = RockTracker(window_steps=2)
    state = tracker.state()
    steps = list(changing_steps(1, 3))
    for kl, ids, step in steps:
        tracker.observe(StepSums.of(kl, ids), step)
    assert not len(state["ids"])
    before = tracker.state()
    other = RockTracker(window_steps=2)
    other.restore(before)
    other.observe(StepSums.of(*steps[0][:2]), 3)
    assert_same(before, tracker.state())


def test_memory_grows_with_types_and_not_with_steps() -> None:
    tracker, sizes = RockTracker(window_steps=4), []
    for kl, ids, step in changing_steps(2, 400):
        tracker.observe(StepSums.of(kl, ids), step)
        sizes.append(sum(column.nbytes for column in tracker.state().values()))
    assert sizes[-1] == sizes[len(sizes) // 4]
    assert sizes[-1] <= 8 + 12 * 15 * 8  # steps in the window, and 15 numbers for each of 12 types


def constant(tracker: RockTracker, windows: int, kl: dict[int, float], count: dict[int, int] | None = None):
    """Windows in which nothing changes: ids frozen after each."""
    ids = np.repeat(list(kl), [(count or {}).get(v, 5) for v in kl])
    values = np.array([kl[v] for v in ids.tolist()])
    after = []
    for _ in range(windows):
        for _ in range(tracker.window_steps):
            tracker.observe(StepSums.of(values, ids), 0)
        after.append(tracker.frozen.tolist())
    return after


def test_freezes_double_and_trials_last_as_long_as_patience() -> None:
    tracker = RockTracker(window_steps=4, patience=2, freeze_windows=3)
    frozen = [bool(ids) for ids in constant(tracker, 25, {7: 1.0})]
    trained, on_trial = [False], [False] * 2
    assert frozen == trained + [True] * 3 + on_trial + [True] * 6 + on_trial + [True] * 11


def test_a_type_that_fell_and_stopped_is_not_called_and_the_stuck_one_is() -> None:
    """Type 1 falls to 30 % in three windows and lies still from there on, still half of the kl; type 2 never moves."""
    rng, tracker, ids = np.random.default_rng(0), RockTracker(window_steps=4, min_share=0.05), np.repeat([1, 2], 8)
    called = []
    for step in range(80):
        kl = np.where(ids == 1, 4 * max(0.3, 1 - 0.7 * step / 12), 1.0) * rng.gamma(400, 1 / 400, 16)
        called += tracker.observe(StepSums.of(kl, ids), step).called.tolist()
    assert called == [2]


def test_a_rock_that_loses_its_kl_under_a_freeze_is_released() -> None:
    tracker = RockTracker(window_steps=4, patience=2, freeze_windows=100, min_share=0.1)
    constant(tracker, 3, {1: 1.0, 2: 1.0})
    assert tracker.rocks.tolist() == [1, 2]
    assert constant(tracker, 12, {1: 0.4, 2: 1.0})[-1] == [2] and tracker.rocks.tolist() == [2]


def test_a_state_without_the_early_kl_is_refused_in_one_sentence() -> None:
    state = RockTracker().state()
    del state["early"]
    with pytest.raises(
        RocktokensError, match="state of online_rocks lacks early, so an older version wrote it: resume"
    ):
        RockTracker().restore(state)


def test_protected_types_are_never_called() -> None:
    tracker = RockTracker(window_steps=4, protected=[7])
    assert constant(tracker, 4, {7: 1.0, 8: 1.0})[-1] == [8]


def test_half_the_loss_is_at_least_half_of_it() -> None:
    """Shares of two types alike are 1/2 each, exactly: both are heavy at that limit, neither a bit above it."""
    same = {1: 1.0, 2: 1.0}
    assert constant(RockTracker(window_steps=4, patience=1, min_share=0.5), 1, same) == [[1, 2]]
    assert constant(RockTracker(window_steps=4, patience=1, min_share=np.nextafter(0.5, 1)), 1, same) == [[]]


def test_three_quarters_of_the_first_loss_are_kept() -> None:
    """Without memory (decay 0) a window's mean is its level: 3/4 of the first one is a rock, a bit less is none."""
    for level, called in ((0.75, [7]), (0.75 - 2**-20, [])):
        tracker = RockTracker(window_steps=4, decay=0.0, patience=2)
        constant(tracker, 1, {7: 1.0})
        assert constant(tracker, 1, {7: level})[-1] == called


def test_a_change_as_large_as_the_tolerance_is_not_still() -> None:
    """Levels 6.5, 7.5, 8.5 and 9.5: mean 8, a rise of 4 per window and no scatter, so the interval is one point."""
    for tolerance, called in ((0.5, []), (0.51, [1])):
        tracker = RockTracker(window_steps=4, patience=1, tolerance=tolerance)
        changes = [tracker.observe(StepSums.of(np.full(2, 6.5 + step), np.full(2, 1)), step) for step in range(4)]
        assert changes[-1].called.tolist() == called


def test_no_call_before_start() -> None:
    tracker, sums = RockTracker(window_steps=4, patience=2, start=10), StepSums.of(np.ones(5), np.full(5, 3))
    called_at = [step for step in range(20) if len(tracker.observe(sums, step).called)]
    assert called_at == [15]
    exact = RockTracker(window_steps=4, patience=1, start=7)
    assert [step for step in range(12) if len(exact.observe(sums, step).called)] == [7]


def test_a_window_that_ends_at_stop_calls_nothing_more() -> None:
    sums = StepSums.of(np.ones(5), np.full(5, 3))
    for stop, called in ((7, []), (8, [7])):
        tracker = RockTracker(window_steps=4, patience=2, stop=stop)
        assert [step for step in range(16) if len(tracker.observe(sums, step).called)] == called


def test_no_call_from_stop_on_but_trials_go_on() -> None:
    """Type 3 is called in time, type 4 comes too late; both lie still."""
    tracker = RockTracker(window_steps=4, patience=2, freeze_windows=1, stop=15, min_share=0.1)
    log = {name: [] for name in Changes._fields}
    for step in range(40):
        ids = np.repeat([3, 4], 5) if step >= 8 else np.full(5, 3)
        for name, changed in tracker.observe(StepSums.of(np.ones(len(ids)), ids), step)._asdict().items():
            log[name] += [(step, token_id) for token_id in changed.tolist()]
    assert log == {"called": [(7, 3)], "released": [], "tried": [(11, 3), (27, 3)], "refrozen": [(19, 3), (35, 3)]}


def test_unscored_occurrences_count_at_the_mean_of_the_scored() -> None:
    """One of ten occurrences of type 1 is scored, all ten of type 2: each holds half of the kl."""
    kl, ids = np.concatenate([[1.0], np.full(9, np.nan), np.ones(10)]), np.repeat([1, 2], 10)
    tracker = RockTracker(window_steps=4, min_share=0.45, patience=1)
    for step in range(4):
        tracker.observe(StepSums.of(kl, ids), step)
    assert tracker.frozen.tolist() == [1, 2]


def test_a_frozen_type_that_is_never_scored_stays_frozen_until_its_trial() -> None:
    tracker = RockTracker(window_steps=4, patience=1, freeze_windows=4, min_share=0.1)
    constant(tracker, 1, {1: 1.0, 2: 1.0})
    frozen = constant(tracker, 4, {1: float("nan"), 2: 1.0})
    assert [1 in ids for ids in frozen] == [True, True, True, False]
    assert 1 in tracker.rocks


def test_a_type_that_is_no_longer_written_is_released() -> None:
    """Its share k windows later is 36·0.8^k / (36·0.8^k + 100 − 64·0.8^k): first below 0.2 at k = 4."""
    tracker = RockTracker(window_steps=4, decay=0.8, patience=2, freeze_windows=100, min_share=0.2)
    constant(tracker, 2, {1: 1.0, 2: 1.0})
    assert [1 in ids for ids in constant(tracker, 12, {2: 1.0})] == [True] * 4 + [False] * 8


@settings(max_examples=25)
@given(scale=st.sampled_from([2.0**-6, 2.0**-2, 2.0**5]), seed=st.integers(0, 50))
def test_calls_do_not_depend_on_the_unit_of_kl(scale: float, seed: int) -> None:
    """Shares and relative slopes: kl in other units (here powers of two, exact in fixed point) gives the same rocks."""
    plain, scaled = (RockTracker(window_steps=4, tolerance=0.08) for _ in range(2))
    for kl, ids, step in changing_steps(seed, 48):
        grid = np.rint(kl.astype(np.float64) * 2**12) / 2**12
        left, right = (
            tracker.observe(StepSums.of(grid * unit, ids), step) for tracker, unit in ((plain, 1.0), (scaled, scale))
        )
        assert [part.tolist() for part in left] == [part.tolist() for part in right]
