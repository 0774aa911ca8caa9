"""Placebos against every way to pair rocks with other types, and ids that no rollout holds."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rocktokens.knockout.placebos import MatchedPlacebos, matched_placebos, never_emitted, token_counts
from rocktokens.types import Rollout


def rollout_of(token_ids: list[int]) -> Rollout:
    own, nothing = np.array(token_ids, dtype=np.int32), np.zeros(len(token_ids), dtype=np.float32)
    return Rollout(0, "p", 0, np.array([0, 9], dtype=np.int32), own, nothing, policy_step=0, finished=True)


def test_counts_are_of_responses_and_reach_to_the_end_of_the_vocabulary():
    counts = token_counts([rollout_of([3, 1, 3]), rollout_of([1, 4])], vocab_size=7)
    assert counts.tolist() == [0, 2, 0, 2, 1, 0, 0]


# Matched placebos


def best_pairings(counts: list[int], candidates: list[int], rocks: list[int], tolerance: float) -> tuple[int, int]:
    """The most partners there can be, and the least sum of gaps with so many, by trying everything."""
    best = (0, 0)
    for chosen in product([None, *candidates], repeat=len(rocks)):
        partners = [(rock, candidate) for rock, candidate in zip(rocks, chosen, strict=True) if candidate is not None]
        if len({candidate for _, candidate in partners}) < len(partners):
            continue
        gaps = [abs(counts[candidate] - counts[rock]) for rock, candidate in partners]
        if all(gap <= tolerance * counts[rock] + 1e-9 for gap, (rock, _) in zip(gaps, partners, strict=True)):
            best = min(best, (-len(partners), sum(gaps)))
    return -best[0], best[1]


@given(
    st.lists(st.integers(0, 12), min_size=9, max_size=9),
    st.lists(st.integers(0, 8), max_size=4, unique=True),
    st.sets(st.integers(0, 8), max_size=5),
    st.sampled_from([0.0, 0.1, 0.25, 0.5]),
)
@settings(max_examples=150, deadline=None)
def test_as_many_partners_as_possible_and_none_closer(counts, rocks, candidates, tolerance):
    found = matched_placebos(np.array(counts), sorted(candidates), rocks, tolerance, count=99)
    able = [token for token in candidates if token not in rocks and counts[token]]
    assert len(set(found.ids)) == len(found.ids)
    assert set(found.ids) <= set(able)
    gaps = [abs(counts[one] - counts[two]) for one, two in zip(found.ids, found.rock_ids, strict=True)]
    assert all(gap <= tolerance * counts[rock] + 1e-9 for gap, rock in zip(gaps, found.rock_ids, strict=True))
    assert (len(found.ids), sum(gaps)) == best_pairings(counts, able, rocks, tolerance)
    assert found.rock_ids == [rock for rock in rocks if rock in found.rock_ids]
    assert found.unmatched == [rock for rock in rocks if rock not in found.rock_ids]


COUNTS = np.array([100, 50, 30, 98, 52, 20, 31, 0, 0, 7])


def test_partners_come_in_rank_order_and_the_first_are_kept():
    candidates = [6, 3, 4, 5, 9]
    whole = matched_placebos(COUNTS, candidates, [2, 9, 0, 1], tolerance=0.1, count=10)
    assert whole == MatchedPlacebos(ids=[6, 3, 4], rock_ids=[2, 0, 1], unmatched=[9])
    cut = matched_placebos(COUNTS, candidates[::-1], [2, 9, 0, 1], tolerance=0.1, count=2)
    assert cut == MatchedPlacebos(ids=[6, 3], rock_ids=[2, 0], unmatched=[9])


def test_a_rock_that_was_never_sampled_has_no_partner_among_others_like_it():
    found = matched_placebos(COUNTS, range(10), [7, 0], tolerance=0.1, count=10)
    assert found == MatchedPlacebos(ids=[3], rock_ids=[0], unmatched=[7])


def test_no_rocks_and_no_candidates_are_no_error():
    assert matched_placebos(COUNTS, range(10), [], tolerance=0.1, count=10) == MatchedPlacebos([], [], [])
    assert matched_placebos(COUNTS, [], [1, 0], tolerance=0.1, count=10) == MatchedPlacebos([], [], [1, 0])


# Ids that never occur


def test_never_emitted_ids_are_all_those_that_may_be_banned():
    counts = np.array([0, 3, 0, 0, 1, 0, 0])
    assert sorted(never_emitted(counts, {2, 4, 70}, count=99, seed=0)) == [0, 3, 5, 6]
    assert sorted(never_emitted(counts, [], count=99, seed=0)) == [0, 2, 3, 5, 6]
    assert never_emitted(np.array([2, 1]), [], count=3, seed=0) == []


def test_the_choice_follows_the_seed_and_a_longer_one_begins_like_a_shorter():
    counts = np.zeros(1000, dtype=np.int64)
    chosen = [never_emitted(counts, [], count=5, seed=seed) for seed in range(3)]
    assert chosen[0] == never_emitted(counts, [], count=5, seed=0) == never_emitted(counts, [], count=9, seed=0)[:5]
    assert len({tuple(ids) for ids in chosen}) == 3


def test_every_id_has_the_same_chance():
    counts = np.array([0, 1, 0, 0, 0, 1, 0])
    first = np.bincount([never_emitted(counts, [], count=1, seed=seed)[0] for seed in range(500)], minlength=7)
    assert first[[1, 5]].tolist() == [0, 0]
    assert first[[0, 2, 3, 4, 6]].min() > 60
