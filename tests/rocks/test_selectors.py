"""Every selector equals a loop over occurrences, under any weights; ranking equals a sort of Python tuples."""

from dataclasses import replace
from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_oracle import ONE, Z, naive_rank, naive_score, random_occurrences
from scipy.sparse import csr_array

from rocktokens.rocks.ranking import Rules, frequent_enough, rank_types
from rocktokens.rocks.selectors import SELECTORS, Sample, selector_of, summed_kl, weighted_totals

COUNTS = {
    "all once": np.ones(12, dtype=np.int64),
    "a bootstrap draw": np.array([0, 3, 1, 0, 2, 1, 1, 0, 0, 4, 1, 2]),
    "a subset": np.array([1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0]),
}


@pytest.fixture(scope="module")
def occurrences():
    return random_occurrences(0)


@pytest.fixture(scope="module")
def sample(occurrences):
    return occurrences.sample()


@pytest.mark.parametrize("name", SELECTORS)
def test_a_selector_equals_a_loop_over_the_drawn_occurrences(occurrences, sample, name):
    scores = SELECTORS[name](sample, np.stack(list(COUNTS.values())))
    for score_U, counts_C in zip(scores, COUNTS.values(), strict=True):
        assert score_U == pytest.approx(naive_score(occurrences.drawn(counts_C), name), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", SELECTORS)
def test_weights_of_a_subset_are_the_rows_of_it(sample, name):
    chosen = COUNTS["a subset"] == 1
    part = SELECTORS[name](sample.rows(chosen), np.ones((1, chosen.sum())))
    assert np.array_equal(SELECTORS[name](sample, chosen[None]), part)
    assert np.array_equal(sample.rows(np.flatnonzero(chosen)).totals("kl"), sample.rows(chosen).totals("kl"))


@pytest.mark.parametrize("name", SELECTORS)
def test_columns_and_storage_do_not_change_a_score(sample, name):
    weights_BC = np.stack(list(COUNTS.values()))
    scores = SELECTORS[name](sample, weights_BC)
    chosen = np.array([1, 2, 5, 11])
    mask = np.isin(np.arange(15), chosen)
    for part in (sample.columns(chosen), sample.columns(mask), sample.by_type().columns(chosen)):
        assert part.token_ids.tolist() == [4, 7, 16, 34]
        assert np.array_equal(SELECTORS[name](part, weights_BC), scores[:, chosen])
    assert np.array_equal(SELECTORS[name](sample.by_type(), weights_BC), scores)


def test_totals_are_whole_numbers(occurrences, sample):
    for name in ("kl", "kl_before", "grad_norm", "kept"):
        totals = sample.totals(name)
        assert totals.dtype == np.int64
        assert totals.tolist() == [sum(occurrences.of(column, name)) for column in range(15)]
    assert sample.totals("freq").tolist() == occurrences.freq
    assert sample.n_clusters == 12


def test_optional_matrices_stay_away(occurrences):
    part = occurrences.sample(without=("kl_before", "kept")).rows(np.arange(3)).columns(np.arange(2)).by_type()
    assert part.kl_before is None
    assert part.kept is None


def test_sums_up_to_2_to_the_53_are_exact():
    kl = np.array([[2**51 + 1], [2**50 + 3], [7]])
    matrix = csr_array(kl)
    sample = Sample(np.array([0]), freq=csr_array(kl > 0), kl=matrix, grad_norm=matrix)
    counts = np.array([3, 1, 2])
    exact = sum(int(count) * int(value) for count, value in zip(counts, kl[:, 0], strict=True))
    assert weighted_totals(counts[None], matrix)[0, 0] == exact
    assert summed_kl(sample, counts[None])[0, 0] == exact / ONE


def test_the_lower_bound_of_two_clusters_by_hand():
    matrix = csr_array(np.array([[3 * ONE], [5 * ONE]]))
    sample = Sample(np.array([0]), freq=csr_array(np.array([[1], [1]])), kl=matrix, grad_norm=matrix)
    both, first = SELECTORS["lower bound"](sample, np.array([[1, 1], [1, 0]]))[:, 0]
    assert both == pytest.approx(8 * exp(-Z * 2 / 8), rel=1e-12)
    assert first == 3


def test_the_joint_bound_is_the_smaller_of_both_checkpoints(sample):
    weights_BC = np.stack(list(COUNTS.values()))
    now, before = (SELECTORS["lower bound"](replace(sample, kl=kl), weights_BC) for kl in (sample.kl, sample.kl_before))
    assert np.array_equal(selector_of("bound", joint=True)(sample, weights_BC), np.where(now < before, now, before))
    assert (now < before).any() and (before < now).any()


def test_a_type_that_is_not_drawn_scores_zero(sample):
    nothing = np.zeros((1, 12), dtype=np.int64)
    nothing[0, 11] = 1
    for name in SELECTORS:
        assert not SELECTORS[name](sample, nothing).any()


# Ranking


@given(
    types=st.lists(st.tuples(st.integers(-2, 4), st.integers(0, 5)), min_size=1, max_size=12),
    k=st.integers(1, 13),
    min_freq=st.integers(1, 4),
    exclude=st.integers(0, 13),
)
def test_ranking_equals_a_sort_with_many_ties(types, k, min_freq, exclude):
    score, freq = ([float(pair[side]) for pair in types] for side in (0, 1))
    rules = Rules(k, min_freq, exclude)
    may = frequent_enough(np.array(freq), rules)
    assert rank_types(np.array(score), may, rules).tolist() == naive_rank(score, freq, rules)


def test_ranking_leaves_its_arguments_alone():
    score, freq = np.array([1.0, 2, 3]), np.array([5.0, 4, 9])
    rules = Rules(3, exclude_top_freq=1)
    assert rank_types(score, frequent_enough(freq, rules), rules).tolist() == [1, 0]
    assert score.tolist() == [1, 2, 3]
    assert freq.tolist() == [5, 4, 9]
