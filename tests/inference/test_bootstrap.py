"""Replicates draw units with replacement; every interval equals a loop over the units drawn."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.stats import t as student_t

from rocktokens.inference import bootstrap
from rocktokens.inference.bootstrap import (
    bootstrap_counts,
    mean_interval,
    median_interval,
    prompt_draws,
    quantile_interval,
    ratio_interval,
    ratio_intervals,
    share_interval,
)


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


@pytest.mark.parametrize("cells", [1, 17, 100, 10_000])
def test_draws_do_not_depend_on_the_size_of_blocks(cells, monkeypatch):
    rng = np.random.Generator(np.random.PCG64(3))
    expected = rng.multinomial(17, np.full(17, 1 / 17), size=60)
    monkeypatch.setattr(bootstrap, "BLOCK_CELLS", cells)
    blocks = list(prompt_draws(17, 60, seed=3))
    assert max(block_BN.size for block_BN in blocks) <= max(cells, 17)
    assert np.array_equal(np.concatenate(blocks), expected)


def test_no_rollout_has_no_median():
    assert median_interval(np.array([]), np.array([], dtype=np.int64), 3, 10) is None


def test_blocks_do_not_change_a_median(monkeypatch):
    medians = median_interval(np.arange(9) ** 2, np.arange(9) % 4, 4, 40)
    for cells in (1, 100):
        monkeypatch.setattr(bootstrap, "BLOCK_CELLS", cells)
        assert median_interval(np.arange(9) ** 2, np.arange(9) % 4, 4, 40) == medians


def test_no_replicate_has_no_quantile():
    assert quantile_interval(np.array([]), 0.95) is None


# Ratios


def log_and_error(above: list[float], below: list[float]) -> tuple[float, float]:
    """log(N/D) and its linearised standard error, term by term; NaN where the one or the other is not defined."""
    if not sum(above) or not sum(below):
        return math.nan, math.nan
    terms = [n / sum(above) - d / sum(below) for n, d in zip(above, below, strict=True)]
    mean, clusters = math.fsum(terms) / len(terms), len(terms)
    error = math.sqrt(clusters / (clusters - 1) * math.fsum((u - mean) ** 2 for u in terms))
    return math.log(sum(above) / sum(below)), error if error > 1e-9 else math.nan


def naive_interval(
    above: list[float], below: list[float], counts_BC: np.ndarray, level: float, least_freedom: float = 1
) -> tuple[float, float]:
    """Bootstrap-t on the log scale, no t closer to 0 than Student's with ¾ of the units that carry it, less one."""
    centre, error = log_and_error(above, below)
    terms = [n / sum(above) - d / sum(below) for n, d in zip(above, below, strict=True)]
    t_values = []
    for counts_C in counts_BC:
        drawn = np.repeat(np.arange(len(above)), counts_C)
        log_ratio, its_error = log_and_error([above[c] for c in drawn], [below[c] for c in drawn])
        t_values.append((log_ratio - centre) / its_error)
    low, high = np.nanquantile(t_values, [(1 - level) / 2, (1 + level) / 2])
    carriers = sum(u**2 for u in terms) ** 2 / sum(u**4 for u in terms)
    least, most = (student_t.ppf((1 + level) / 2, max(df, least_freedom)) for df in (0.75 * (carriers - 1), 0))
    low, high = max(min(low, -least), -most), min(max(high, least), most)
    return math.exp(centre - high * error), math.exp(centre - low * error)


def heavy_tailed(seed: int, clusters: int = 14, types: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Sums by cluster and type, log-normal; the later the type, the fewer clusters it is in."""
    rng = np.random.default_rng(seed)
    present = rng.random((clusters, types)) < np.linspace(1, 0.3, types)
    below = rng.poisson(4, (clusters, types)) * present + present
    return below * rng.lognormal(0, 2, (clusters, types)), below.astype(float)


@pytest.mark.parametrize("level", [0.95, 0.8])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ratios_and_sums_equal_a_loop(seed, level):
    above, below = heavy_tailed(seed)
    counts_BC = bootstrap_counts(14, 60, seed)
    ratios = ratio_intervals(csr_array(above), csr_array(below), counts_BC, level)
    sums = ratio_intervals(above, None, counts_BC, level)
    for column in range(above.shape[1]):
        expected = naive_interval(above[:, column].tolist(), below[:, column].tolist(), counts_BC, level)
        assert tuple(ratios[:, column]) == pytest.approx(expected, rel=1e-9)
        assert ratio_interval(above[:, column], below[:, column], counts_BC, level) == tuple(ratios[:, column])
        expected = naive_interval(above[:, column].tolist(), [1 / 14] * 14, counts_BC, level)
        assert tuple(sums[:, column]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", [4, 5])
def test_a_share_equals_a_loop_over_the_odds(seed):
    above, below = heavy_tailed(seed)
    counts_BC = bootstrap_counts(14, 60, seed)
    low, high = naive_interval(above[:, 1].tolist(), below[:, 0].tolist(), counts_BC, 0.95, least_freedom=2)
    expected = low / (1 + low), high / (1 + high)
    assert share_interval(above[:, 1], below[:, 0], counts_BC) == pytest.approx(expected, rel=1e-9)
    other = share_interval(below[:, 0], above[:, 1], counts_BC)
    assert other == pytest.approx((1 - expected[1], 1 - expected[0]), rel=1e-9)


def test_a_mean_that_may_be_negative_equals_a_loop():
    rng = np.random.default_rng(6)
    weights_C = rng.poisson(2, 20)
    sums_C = rng.normal(-0.1, 1, 20) * weights_C
    counts_BC = bootstrap_counts(20, 80, seed=6)

    def mean_and_error(units: np.ndarray) -> tuple[float, float]:
        mean = sums_C[units].sum() / weights_C[units].sum()
        off = (sums_C[units] - mean * weights_C[units]) / weights_C[units].sum()
        return mean, math.sqrt(20 / 19 * (off**2).sum())

    mean, error = mean_and_error(np.arange(20))
    drawn = [mean_and_error(np.repeat(np.arange(20), counts_C)) for counts_C in counts_BC]
    low, high = np.quantile([(value - mean) / its_error for value, its_error in drawn], [0.025, 0.975])
    off = sums_C - mean * weights_C
    least = student_t.ppf(0.975, 0.75 * ((off**2).sum() ** 2 / (off**4).sum() - 1))
    expected = mean - max(high, least) * error, mean - min(low, -least) * error
    assert mean_interval(sums_C, weights_C, counts_BC) == pytest.approx(expected, rel=1e-9)
    assert expected[0] < 0 < expected[1]


def test_neither_blocks_nor_the_other_columns_change_a_ratio(monkeypatch):
    above, below = heavy_tailed(7, types=9)
    counts_BC = bootstrap_counts(14, 50)
    for denominator in (None, csr_array(below)):
        whole = ratio_intervals(csr_array(above), denominator, counts_BC)
        for cells in (1, 2000):
            monkeypatch.setattr(bootstrap, "BLOCK_CELLS", cells)
            assert np.array_equal(whole, ratio_intervals(csr_array(above), denominator, counts_BC))


@pytest.mark.parametrize("present", [1, 2, 5])
def test_a_type_in_few_prompts_is_not_said_to_be_certain(present):
    """Replicates only repeat the few; an exact interval of a Poisson count is the least that can be said."""
    sums_C = np.zeros((192, 1))
    sums_C[:present] = 1.0
    low, high = ratio_intervals(sums_C, None, bootstrap_counts(192, 400))[:, 0]
    exact = {1: (0.03, 5.6), 2: (0.24, 7.2), 5: (1.6, 11.7)}[present]
    assert low <= exact[0]
    assert exact[1] <= high < np.inf


def test_what_no_replicate_defines_has_no_interval_and_nothing_is_infinite():
    counts_BC = bootstrap_counts(6, 100)
    nothing, once, thrice = np.zeros(6), np.eye(6)[0], np.array([1.0, 2.0, 3.0, 0, 0, 0])
    assert ratio_interval(once, nothing, counts_BC) is None
    assert ratio_interval(nothing, nothing, counts_BC) is None
    assert ratio_interval(nothing, thrice, counts_BC) == (0, 0)
    assert ratio_interval(once, once, counts_BC) is None  # one prompt says nothing of others
    assert ratio_interval(2 * thrice, thrice, counts_BC) == pytest.approx((2, 2), rel=1e-12)
    assert share_interval(nothing, nothing, counts_BC) is None
    assert share_interval(thrice, nothing, counts_BC) == (1, 1)
    assert share_interval(nothing, thrice, counts_BC) == (0, 0)
    assert mean_interval(once, once, counts_BC) is None
    assert mean_interval(once, nothing, counts_BC) is None
    low, high = ratio_interval(once + 1e-300, thrice[::-1] * 1e300, counts_BC)
    assert 0 < low < high < np.inf
