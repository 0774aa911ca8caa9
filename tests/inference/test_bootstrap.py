"""Replicates draw units with replacement; the interval of a median equals a loop over the values drawn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocktokens.inference import bootstrap
from rocktokens.inference.bootstrap import bootstrap_counts, median_interval, quantile_interval, ratio_interval


@given(clusters=st.integers(1, 40), draws=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_a_replicate_draws_as_many_clusters_as_there_are(clusters, draws, seed):
    counts_BC = bootstrap_counts(clusters, draws, seed)
    assert counts_BC.shape == (draws, clusters)
    assert (counts_BC >= 0).all()
    assert (counts_BC.sum(axis=1) == clusters).all()
    assert np.array_equal(counts_BC, bootstrap_counts(clusters, draws, seed))


def test_every_cluster_is_drawn_alike():
    counts_BC = bootstrap_counts(20, 20_000, seed=1)
    assert counts_BC.mean(axis=0) == pytest.approx(1, abs=5 / 20_000**0.5)
    assert counts_BC.var(axis=0) == pytest.approx(1 - 1 / 20, abs=0.06)
    assert not np.array_equal(counts_BC[:9], bootstrap_counts(20, 9, seed=2))


# Intervals


@settings(deadline=None)
@given(
    rollouts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=20), seed=st.integers(0, 99)
)
def test_the_median_equals_that_of_the_rollouts_drawn(rollouts, seed):
    values, clusters = (np.array([pair[side] for pair in rollouts]) for side in (0, 1))
    known: list[float] = []
    for counts_C in bootstrap_counts(6, 15, seed):
        multiset = np.repeat(values / 7, counts_C[clusters])
        known += [float(np.median(multiset))] if len(multiset) else []
    expected = tuple(np.quantile(known, [(1 - 0.95) / 2, (1 + 0.95) / 2])) if known else None
    assert median_interval(values / 7, clusters, 6, 15, seed) == expected


def test_no_rollout_has_no_median():
    assert median_interval(np.array([]), np.array([], dtype=np.int64), 3, 10) is None


def test_blocks_do_not_change_a_median(monkeypatch):
    medians = median_interval(np.arange(9) ** 2, np.arange(9) % 4, 4, 40)
    for cells in (1, 100):
        monkeypatch.setattr(bootstrap, "BLOCK_CELLS", cells)
        assert median_interval(np.arange(9) ** 2, np.arange(9) % 4, 4, 40) == medians


def test_replicates_that_do_not_define_a_ratio_are_left_out():
    assert ratio_interval(np.array([1.0, 5.0, 3.0]), np.array([2.0, 0.0, 2.0]), 1.0) == (0.5, 1.5)
    assert ratio_interval(np.array([1.0]), np.array([0.0]), 0.95) is None
    assert quantile_interval(np.array([]), 0.95) is None
