"""Compare two ways of answering the same prompts: a bootstrap that many comparisons share, and an exact test.

d_i, from −S to S with S answers per prompt, is how many answers to
prompt i are right one way minus the other. The prompt is the unit: its answers belong together.

1. A bootstrap replicate is a row of counts over the prompts (``inference.bootstrap``). All comparisons share the
   draws, so they differ by their data alone, and since counts are never negative every replicate's sum, and so every
   order statistic of the sums, can only rise when a difference rises.
2. Sums are whole numbers, and every partial sum of a product of draws and differences is at most N·S: exact in float32
   below 2^24 and in float64 beyond, so they depend neither on threads nor on the size of blocks.
3. The percentile interval runs between the outer of the two order statistics next to each end. Nothing is interpolated:
   its ends are sums that replicates have.
4. The sign-flip test: if the two ways do not differ, d_i and −d_i are equally likely for every prompt. With B_i fair
   coins, Σ ±|d_i| = 2 Σ |d_i| B_i − Σ |d_i|, so the tails are those of A = Σ |d_i| B_i, a sum of scaled
   binomials, one for each size |d| that occurs; their convolution is its exact distribution. With S = 1 this is
   McNemar's exact test.

Shape legend: K comparisons, N prompts, B replicates.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy.stats import binom

EXACT_IN_FLOAT32 = 1 << 24


class SignFlipTest(NamedTuple):
    """Both tails of a paired sign-flip test, the sum that was seen included in each."""

    at_most: float
    """Chance, under random signs, of a sum at most as high as the one seen."""
    at_least: float
    """Chance of one at least as high."""

    @property
    def p(self) -> float:
        """Two-sided: twice the smaller tail, at most 1; 1 where nothing differs."""
        return min(1.0, 2 * min(self))


def resampled_sums(differences_KN: np.ndarray, draws: Iterable[np.ndarray]) -> np.ndarray:
    """Return int64 (K, B): the sum of the differences in every replicate, exactly.

    Args:
        differences_KN: integers.
        draws: (b, N) blocks of counts, as ``bootstrap.prompt_draws`` makes them; a list of blocks can be used again.
    """
    largest_sum = differences_KN.shape[1] * int(np.abs(differences_KN).max(initial=0))
    dtype = np.float32 if largest_sum < EXACT_IN_FLOAT32 else np.float64
    weights_KN = differences_KN.astype(dtype)
    return np.hstack([(weights_KN @ block_BN.astype(dtype).T).astype(np.int64) for block_BN in draws])


def percentile_interval(sums_KB: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Return both ends (K,) of the 1 − α percentile interval of the replicates; negated sums negate the interval."""
    last = sums_KB.shape[1] - 1
    outside = int(alpha / 2 * last)
    sorted_there_KB = np.partition(sums_KB, [outside, last - outside], axis=1)
    return sorted_there_KB[:, outside], sorted_there_KB[:, last - outside]


def sign_flip_test(differences_N: np.ndarray) -> SignFlipTest:
    """Make the exact paired sign-flip test of integer differences.

    The tails are P(A ≤ G) and P(A ≥ G), G being the sum of the gains. With the coins of the gains turned over,
    G − A = Σ d_i B_i, so they are P(Σ d_i B_i ≥ 0) and P(Σ d_i B_i ≤ 0): the first can only rise with a difference, the
    second only fall.
    """
    gained = int(differences_N[differences_N > 0].sum())
    lost = -int(differences_N[differences_N < 0].sum())
    chances = flip_chances(np.bincount(np.abs(differences_N)), min(gained, lost))
    smaller, larger = float(chances.sum()), 1 - float(chances[:-1].sum())
    return SignFlipTest(smaller, larger) if gained <= lost else SignFlipTest(larger, smaller)


def flip_chances(prompts_by_size: np.ndarray, upto: int) -> np.ndarray:
    """Return P(A = a) for a = 0 … ``upto``, given how many prompts have differences of size 0, 1, ….

    A is symmetric about half of Σ |d|, so both tails follow from its values up to the smaller of gains and losses.
    """
    chances = np.zeros(upto + 1)
    chances[0] = 1
    for size, count in enumerate(prompts_by_size):
        if size and count:
            flips = np.arange(min(count, upto // size) + 1)
            chances = _add_scaled(chances, size, binom.pmf(flips, count, 0.5))
    return chances


def _add_scaled(chances: np.ndarray, size: int, flip_chances: np.ndarray) -> np.ndarray:
    """The distribution after adding ``size`` times an independent count: one convolution per remainder of ``size``."""
    total = np.empty_like(chances)
    for first in range(min(size, len(chances))):
        own = chances[first::size]
        total[first::size] = np.convolve(own, flip_chances)[: len(own)]
    return total
