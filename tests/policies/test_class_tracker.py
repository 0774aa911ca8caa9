"""Classes found while training: against plain loops, in any order of rows, over an interruption, within bounds."""

from dataclasses import replace

import numpy as np
import pytest
from class_tracker_oracle import NaiveClassTracker, changing_updates, likely_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rocktokens.errors import RocktokensError
from rocktokens.policies import class_tracker
from rocktokens.policies.class_tracker import MIN_ROLLOUTS, ClassTracker, StepMasses
from rocktokens.types import LikelyTokens

SETTINGS = {"share": 0.1, "window_steps": 3, "decay": 0.6, "patience": 2, "min_freq": 6}


def tracked(updates, **parameters) -> ClassTracker:
    tracker = ClassTracker(**{**SETTINGS, **parameters})
    for likely in updates:
        tracker.observe(StepMasses.of(likely))
    return tracker


def assert_same_state(one: ClassTracker, two: ClassTracker) -> None:
    for name, array in one.state().items():
        assert two.state()[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_classes_and_sums_are_those_of_plain_loops(patience: int) -> None:
    seen = set()
    for seed in range(4):
        ours = ClassTracker(**{**SETTINGS, "patience": patience}, protected=[7])
        naive = NaiveClassTracker(**{**SETTINGS, "patience": patience}, min_rollouts=MIN_ROLLOUTS, protected=[7])
        for likely in changing_updates(seed, 50):
            ours.observe(StepMasses.of(likely))
            naive.observe(likely)
            assert ours.classes == naive.classes
            seen.add(tuple(ours.classes))
        mass, count, answers = naive.sums()
        found = dict(zip(ours.state()["pairs"].tolist(), ours.state()["pair_mass"][0].tolist(), strict=True))
        assert found == pytest.approx({a << 32 | b: s for (a, b), s in mass.items() if a != b}, abs=1e-4)
        expected = [[table[a] for a in ours.state()["types"].tolist()] for table in (count, answers)]
        np.testing.assert_allclose(ours.state()["type_sums"][:2], expected)
    assert len(seen) > 5 and max(map(len, seen)) > 1, "classes came and went"


@settings(max_examples=10)
@given(seed=st.integers(0, 99))
def test_the_order_of_the_rows_makes_no_difference(seed: int) -> None:
    """And so no split over ranks does, whose rows come one rank after the other."""
    rng = np.random.default_rng(seed)

    def shuffled(likely: LikelyTokens) -> LikelyTokens:
        order = rng.permutation(len(likely.ids))
        return LikelyTokens(likely.rollout_ids[order], likely.ids[order], likely.logp[order])

    updates = list(changing_updates(seed, 12))
    assert_same_state(tracked(updates), tracked(map(shuffled, updates)))


@pytest.mark.parametrize("cut", [1, 9, 17])
def test_a_restored_tracker_continues_bit_for_bit(cut: int) -> None:
    updates = list(changing_updates(3, 40))
    whole, first, second = tracked(updates), tracked(updates[:cut]), tracked([])
    before = first.state()
    second.restore(before)
    for likely in updates[cut:]:
        second.observe(StepMasses.of(likely))
    assert whole.classes == second.classes and whole.classes
    assert_same_state(whole, second)
    assert {name: array.tobytes() for name, array in before.items()} == {
        name: array.tobytes() for name, array in first.state().items()
    }


def test_a_state_of_another_policy_is_refused_in_one_sentence() -> None:
    with pytest.raises(RocktokensError, match="state of online_coarse lacks steps_in_window, types, type_sums, pairs"):
        ClassTracker().restore({"ids": np.zeros(1), "links": np.zeros((0, 4)), "classes": np.zeros((0, 2))})


def twins(rollouts: int = 8, repeats: int = 2, other: float = 0.4) -> LikelyTokens:
    """Types 0 and 1 compete, the one not written with this probability; so do 2 and 3, always as 0.4."""
    rows = []
    for place in range(rollouts * repeats * 4):
        written = place % 4
        shares = np.full(5, 1e-6)
        shares[written] = 0.6
        shares[written ^ 1] = other if written < 2 else 0.4
        rows.append((place // 4 % rollouts, written, shares, shares))
    return likely_of(rows)


def test_a_link_must_hold_both_ways() -> None:
    likely = twins()
    is_one_way = (likely.ids[:, :, :1] == 0) & (likely.ids == 1)  # what type 1 has where type 0 is written
    logp = np.where(is_one_way, np.float32(np.log(0.05)), likely.logp)
    assert tracked([likely] * 6).classes == [(0, 1), (2, 3)]
    assert tracked([replace(likely, logp=logp)] * 6).classes == [(2, 3)]


@pytest.mark.parametrize(("other", "linked"), [(0.0599, False), (0.0601, True)])
def test_the_share_is_of_the_written_token_s_own_mass(other: float, linked: bool) -> None:
    assert ((0, 1) in tracked([twins(other=other)] * 6).classes) == linked


@pytest.mark.parametrize(("rollouts", "repeats", "linked"), [(4, 30, False), (5, 30, True), (8, 1, True)])
def test_one_prompt_makes_no_class(rollouts: int, repeats: int, linked: bool) -> None:
    """The same rollouts' ids in one step only: however often the tokens occur there."""
    tracker = tracked([twins(rollouts, repeats)], window_steps=1, patience=1)
    assert tracker.classes == ([(0, 1), (2, 3)] if linked else [])


def test_rare_types_are_in_no_class() -> None:
    assert tracked([twins(8, 1)], window_steps=1, patience=1, min_freq=9).classes == []


def test_protected_types_are_in_no_class() -> None:
    assert tracked([twins()] * 6, protected=[3]).classes == [(0, 1)]


def test_links_are_used_and_dropped_after_as_many_windows_as_patience() -> None:
    """Evidence that lasts one window only: decay of nearly nothing."""
    tracker, sizes = ClassTracker(**{**SETTINGS, "window_steps": 1, "patience": 3, "decay": 1e-9}), []
    for other in [0.4, 0.4, 1e-3, 0.4, 0.4, 0.4, 1e-3, 1e-3, 0.4, 1e-3, 1e-3, 1e-3]:
        changes = tracker.observe(StepMasses.of(twins(other=other)))
        sizes.append(((0, 1) in tracker.classes, changes.formed, changes.dissolved))
    assert [used for used, *_ in sizes] == [False] * 5 + [True] * 6 + [False]
    assert sizes[2][1:] == ([(2, 3)], []) and sizes[5][1:] == ([(0, 1)], []) and sizes[11][1:] == ([], [(0, 1)])


@pytest.mark.parametrize(("falling", "used"), [((0.4, 0.29, 0.29), False), ((0.4, 0.31, 0.31), True)])
def test_a_link_that_weakens_is_a_decision_being_learned(falling: tuple[float, ...], used: bool) -> None:
    """Strengths of 0.4 / 0.6 and less, all far above the share; 75 % of the first is at 0.3 / 0.6."""
    tracker = tracked([twins(other=other) for other in falling], window_steps=1, patience=2, decay=1e-9)
    assert ((0, 1) in tracker.classes) == used and (2, 3) in tracker.classes


def test_only_the_heaviest_pairs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_tracker, "MAX_PAIRS", 4)
    state = tracked([twins(other=0.1)] * 5).state()
    assert state["pairs"].tolist() == [0 << 32 | 1, 1 << 32 | 0, 2 << 32 | 3, 3 << 32 | 2]
    monkeypatch.setattr(class_tracker, "MAX_PAIRS", 3)
    assert tracked([twins(other=0.1)] * 5).state()["pairs"].tolist() == [0 << 32 | 1, 2 << 32 | 3, 3 << 32 | 2]


def test_memory_grows_with_types_and_pairs_and_not_with_steps() -> None:
    sizes = [sum(array.nbytes for array in tracked(changing_updates(1, steps)).state().values()) for steps in (60, 240)]
    assert max(sizes) <= 8 + 9 * 4 * 8 + 72 * 2 * 8 + 36 * 4 * 8 + 9 * 2 * 8 and sizes[1] <= 1.2 * sizes[0]
