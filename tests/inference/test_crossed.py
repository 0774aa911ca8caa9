"""Crossed seeds and prompts: worked by hand, against plain loops, and as often right as they claim to be."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from scipy.stats import t as student

from rocktokens.inference.bootstrap import prompt_draws
from rocktokens.inference.crossed import CrossedMean, crossed_mean, detectable_errors, resampled_mean, table_spread

ALPHA = 0.05


def naive_spread(values: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The three mean squares over the number of cells, cell by cell."""
    n_seeds, n_prompts = len(values), len(values[0])
    mean = sum(map(sum, values)) / (n_seeds * n_prompts)
    rows = [sum(row) / n_prompts for row in values]
    columns = [sum(row[place] for row in values) / n_seeds for place in range(n_prompts)]
    of_seeds = n_prompts * sum((row - mean) ** 2 for row in rows) / (n_seeds - 1)
    of_prompts = n_seeds * sum((column - mean) ** 2 for column in columns) / (n_prompts - 1)
    of_rest = sum(
        (values[s][p] - rows[s] - columns[p] + mean) ** 2 for s in range(n_seeds) for p in range(n_prompts)
    ) / ((n_seeds - 1) * (n_prompts - 1))
    cells = n_seeds * n_prompts
    return of_seeds / cells, of_prompts / cells, of_rest / cells


def test_a_table_worked_by_hand():
    # Rows 1/3, 2/3 and columns 1, 1/2, 0: MS_s = 1/6, MS_p = 1/2, MS_sp = 1/6.
    # Variance (1/6 + 1/2 − 1/6)/6 = 1/12; freedom (1/2)² / ((1/6)²/1 + (1/2)²/2 + (1/6)²/2) = 3/2.
    estimate = crossed_mean(np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]))
    assert estimate.mean == 0.5
    assert estimate.standard_error == pytest.approx(math.sqrt(1 / 12))
    assert estimate.degrees_of_freedom == pytest.approx(1.5)


def test_seeds_that_agree_by_luck_are_not_taken_for_seeds_that_do_not_differ():
    # MS_s = MS_p = 0, MS_sp = 1: both count as 1, and the variance is (1 + 1 − 1)/4 instead of −1/4.
    estimate = crossed_mean(np.array([[1.0, 0.0], [0.0, 1.0]]))
    assert estimate == pytest.approx((0.5, 0.5, 1 / 3))


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 6), st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_spread_is_that_of_plain_loops_and_the_variance_has_its_floor(n_seeds: int, n_prompts: int, seed: int):
    values_SP = np.random.default_rng(seed).integers(-2, 3, (n_seeds, n_prompts)) / 2
    spread = table_spread(values_SP)
    assert spread == pytest.approx(naive_spread(values_SP.tolist()))
    estimate = crossed_mean(values_SP)
    unbiased = spread.seeds + spread.prompts - spread.rest
    floor = max(spread.seeds, spread.prompts, spread.rest)
    assert estimate.standard_error**2 == pytest.approx(max(unbiased, floor))
    assert estimate.mean == pytest.approx(values_SP.mean())
    assert crossed_mean(values_SP[::-1, ::-1]) == pytest.approx(estimate)


def test_one_seed_is_the_paired_t_interval_over_prompts():
    values_P = np.array([0.0, 1.0, -1.0, 1.0, 1.0, 0.0, 0.5])
    estimate = crossed_mean(values_P[None])
    half = student.ppf(0.975, 6) * values_P.std(ddof=1) / math.sqrt(7)
    assert estimate.interval(ALPHA) == pytest.approx((values_P.mean() - half, values_P.mean() + half))


def test_a_table_without_spread_is_certain_of_its_mean():
    nothing = crossed_mean(np.zeros((3, 4)))
    assert nothing.interval(ALPHA) == (0.0, 0.0) and nothing.p == 1.0 and nothing.detectable(ALPHA) == (0.0, 0.0)
    assert crossed_mean(np.ones((3, 4))).p == 0.0


def binary_differences(rng: np.random.Generator, n_seeds: int, seed_sd: float, prompt_sd: float, n: int) -> np.ndarray:
    """Right answers of two arms, subtracted: prompts are easy or hard, arms differ by seed and by prompt, not at all in
    the mean; noise is shared in part."""
    shape = (n, n_seeds, 200)
    common = rng.normal(0.5, 1.2, (n, 1, 200)) + rng.normal(0, 1.0, shape)

    def answers() -> np.ndarray:
        own = rng.normal(0, seed_sd, (n, n_seeds, 1)) + rng.normal(0, prompt_sd, (n, 1, 200))
        return (common + own + rng.normal(0, 0.7, shape) > 0).astype(float)

    return answers() - answers()


@pytest.mark.parametrize(
    ("n_seeds", "seed_sd", "prompt_sd"),
    [(5, 0.0, 0.0), (5, 0.0, 0.5), (5, 0.12, 0.5), (5, 0.25, 0.0), (2, 0.25, 0.5), (3, 0.25, 0.5)],
)
def test_intervals_hold_the_truth_as_often_as_they_claim(n_seeds: int, seed_sd: float, prompt_sd: float):
    n = 1500
    tables_NSP = binary_differences(np.random.default_rng(1), n_seeds, seed_sd, prompt_sd, n)
    estimates = [crossed_mean(table_SP) for table_SP in tables_NSP]
    missed = sum(estimate.p < ALPHA for estimate in estimates)
    # At most 5 %, up to three standard deviations of that count.
    assert missed / n <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / n)
    if n_seeds == 5:
        half = np.median([estimate.interval(ALPHA)[1] - estimate.mean for estimate in estimates])
        ideal = 1.96 * np.std([estimate.mean for estimate in estimates])
        assert half <= 1.6 * ideal


@pytest.mark.parametrize(("n_seeds", "least"), [(2, 0.1), (3, 0.065)])
def test_leaving_out_seeds_that_happen_to_agree_would_miss_too_often(n_seeds: int, least: float):
    # The rule this module does not use: a seed effect estimated below 0 is none, and costs no degrees of freedom.
    n = 1500
    missed = 0
    for table_SP in binary_differences(np.random.default_rng(1), n_seeds, 0.25, 0.5, n):
        seeds, prompts, rest = table_spread(table_SP)
        only_larger = [seeds, 0.0, 0.0] if seeds > prompts else [0.0, prompts, 0.0]
        terms = np.array([seeds, prompts, -rest] if min(seeds, prompts) > rest else only_larger)
        freedom = np.array([n_seeds - 1, 199, (n_seeds - 1) * 199])
        naive = CrossedMean(table_SP.mean(), math.sqrt(terms.sum()), terms.sum() ** 2 / (terms**2 / freedom).sum())
        missed += naive.p < ALPHA
    assert missed / n > least


def test_resampling_gives_for_means_what_the_table_gives():
    rng = np.random.default_rng(2)
    values_SP = rng.normal(0, 0.3, (4, 1)) + rng.normal(0, 1.0, (1, 60)) + rng.normal(0, 0.8, (4, 60))
    (counts_BP,) = prompt_draws(60, 40_000, seed=3)
    resampled = resampled_mean(values_SP.mean(axis=1), counts_BP @ values_SP.T / 60, 60)
    exact = crossed_mean(values_SP)
    assert resampled.mean == pytest.approx(exact.mean)
    assert resampled.standard_error == pytest.approx(exact.standard_error, rel=0.02)
    assert exact.degrees_of_freedom > resampled.degrees_of_freedom == 3  # those of the seeds, at most
    alone = resampled_mean(values_SP[:1].mean(axis=1), counts_BP @ values_SP[:1].T / 60, 60)
    assert alone == pytest.approx(crossed_mean(values_SP[:1]), rel=0.02)


@given(st.floats(-3, 3), st.floats(0.01, 3), st.floats(0.5, 500), st.floats(0.001, 0.5))
def test_p_is_below_alpha_where_the_interval_leaves_0_out(mean: float, error: float, freedom: float, alpha: float):
    estimate = CrossedMean(mean, error, freedom)
    low, high = estimate.interval(alpha)
    if abs(estimate.p - alpha) > 1e-9:
        assert (estimate.p < alpha) == (low > 0 or high < 0)


def naive_power(effect: float, freedom: float, alpha: float) -> float:
    """The chance that a normal number around the effect exceeds the critical value times its estimated error: a plain
    sum over quantiles of that estimate."""
    critical, n = student.ppf(1 - alpha / 2, freedom), 20_000
    estimated = np.sqrt(chi2.ppf((np.arange(n) + 0.5) / n, freedom) / freedom)
    return float(np.mean([0.5 * math.erfc((critical * error - effect) / math.sqrt(2)) for error in estimated]))


@pytest.mark.parametrize(
    ("freedom", "alpha"), [(1.0, ALPHA), (1.0, ALPHA / 3), (2.0, ALPHA), (4.6, ALPHA / 3), (200.0, ALPHA), (0.4, 0.01)]
)
def test_what_is_detectable_is_detected_four_times_in_five(freedom: float, alpha: float):
    # The sum of two quantiles of t, 14.1 standard errors with one degree of freedom, has 73 % power there.
    assert naive_power(detectable_errors(freedom, alpha), freedom, alpha) == pytest.approx(0.8, abs=2e-4)


@pytest.mark.parametrize("freedom", [1.0, 2.0, 7.5])
def test_the_range_of_what_is_detectable_is_that_of_the_standard_error(freedom: float):
    # An end is right if 1.5 % of the estimates of a true error of that size are as far from it as 2.0 was, or further.
    low, high = (end / detectable_errors(freedom, ALPHA) for end in CrossedMean(9.0, 2.0, freedom).detectable(ALPHA))
    squares = chi2.ppf((np.arange(100_000) + 0.5) / 100_000, freedom) / freedom
    assert np.mean(low * np.sqrt(squares) >= 2.0) == pytest.approx(0.015, abs=2e-5)
    assert np.mean(high * np.sqrt(squares) <= 2.0) == pytest.approx(0.015, abs=2e-5)
