"""Intervals of proportions: Wilson's where answers are independent, a bootstrap over prompts where they are not.

Clopper and Pearson's is for a handful of runs: it holds at least its level however few they are.
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import betaincinv
from scipy.stats import binomtest

from rocktokens.inference.bootstrap import interval_ends
from rocktokens.run_dir import derive_seed

CONFIDENCE = 0.95
RESAMPLES = 10_000
Z_95 = 1.959963984540054
"""Standard errors to each side of a 95 % interval."""


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion."""
    interval = binomtest(right, total).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def clopper_pearson_interval(count: int, total: int, alpha: float) -> tuple[float, float]:
    """Return the exact interval of a proportion at 1 − α: the shares that neither tail of the binomial refuses."""
    low = float(betaincinv(count, total - count + 1, alpha / 2)) if count else 0.0
    high = float(betaincinv(count + 1, total - count, 1 - alpha / 2)) if count < total else 1.0
    return low, high


def wilson_bounds(shares: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both ends of the 95 % score intervals of many shares; sizes may be effective ones, in fractions."""
    z2 = Z_95**2 / sizes
    centre = (shares + z2 / 2) / (1 + z2)
    half = np.sqrt(z2 * (shares * (1 - shares) + z2 / 4)) / (1 + z2)
    return np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)


def bootstrap_interval(correct: Sequence[int], num_samples: int, seed: int) -> tuple[float, float]:
    """Return the percentile interval of accuracy when whole prompts are drawn with replacement.

    A resample needs only how many prompts had 0, 1, … right answers, and those counts are multinomial.

    Args:
        correct: right answers per prompt.
        num_samples: answers per prompt.
        seed: of the resamples.
    """
    prompts_by_count = np.bincount(correct, minlength=num_samples + 1)
    generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "bootstrap")))
    draws = generator.multinomial(len(correct), prompts_by_count / len(correct), size=RESAMPLES)
    accuracies = draws @ np.arange(num_samples + 1) / (len(correct) * num_samples)
    low, high = np.quantile(accuracies, interval_ends(CONFIDENCE))
    return float(low), float(high)
