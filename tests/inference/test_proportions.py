"""Intervals of proportions: against formulas and naive loops."""

import itertools
import math

import numpy as np
import pytest

from rocktokens.inference.proportions import (
    bootstrap_interval,
    clopper_pearson_interval,
    wilson_bounds,
    wilson_interval,
)


@pytest.mark.parametrize(("right", "total"), [(0, 10), (3, 10), (10, 10), (412, 500)])
def test_wilson_is_the_formula(right, total):
    z, share = 1.959963984540054, right / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    low, high = wilson_interval(right, total)
    assert low == pytest.approx(centre - half, abs=1e-9)
    assert high == pytest.approx(centre + half, abs=1e-9)
    bounds = wilson_bounds(np.array([share]), np.array([total]))
    assert [float(end[0]) for end in bounds] == pytest.approx([low, high], abs=1e-9)


@pytest.mark.parametrize(("count", "total", "alpha"), [(0, 5, 0.05), (4, 5, 0.05), (5, 5, 0.1), (3, 30, 0.01)])
def test_an_exact_interval_ends_where_a_tail_of_the_binomial_is_half_of_alpha(count: int, total: int, alpha: float):
    def chance(share: float, counts: range) -> float:
        return sum(math.comb(total, own) * share**own * (1 - share) ** (total - own) for own in counts)

    low, high = clopper_pearson_interval(count, total, alpha)
    assert low == 0 if count == 0 else chance(low, range(count, total + 1)) == pytest.approx(alpha / 2)
    assert high == 1 if count == total else chance(high, range(count + 1)) == pytest.approx(alpha / 2)


def test_bootstrap_is_that_of_a_naive_loop():
    rng = np.random.default_rng(0)
    correct = rng.binomial(4, rng.random(60)).tolist()
    resampled = sorted(np.mean(rng.choice(correct, size=60)) / 4 for _ in range(10_000))
    low, high = bootstrap_interval(correct, 4, seed=1)
    assert low == pytest.approx(np.quantile(resampled, 0.025), abs=0.006)
    assert high == pytest.approx(np.quantile(resampled, 0.975), abs=0.006)
    assert bootstrap_interval(correct, 4, seed=1) == (low, high)


def test_bootstrap_has_the_quantiles_of_all_resamples():
    """Four prompts have 4⁴ resamples, few enough to list."""
    correct = [0, 1, 2, 2]
    every = [sum(resample) / 8 for resample in itertools.product(correct, repeat=4)]
    low, high = bootstrap_interval(correct, 2, seed=0)
    assert (low, high) == (np.quantile(every, 0.025), np.quantile(every, 0.975))


def test_bootstrap_of_unanimous_prompts_is_a_point():
    assert bootstrap_interval([3, 3, 3], 3, seed=0) == (1.0, 1.0)
    assert bootstrap_interval([0, 0], 3, seed=0) == (0.0, 0.0)


def test_clustered_answers_widen_the_bootstrap_not_the_wilson_interval():
    clustered, spread = [4] * 50 + [0] * 50, [2] * 100
    assert np.diff(bootstrap_interval(clustered, 4, 0))[0] > 1.5 * np.diff(wilson_interval(200, 400))[0]
    assert np.diff(bootstrap_interval(spread, 4, 0))[0] == 0
