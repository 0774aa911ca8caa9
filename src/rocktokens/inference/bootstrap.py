"""Draw whole prompts, or clusters of them, again: the seeded bootstrap behind every interval that is not exact.

1. A replicate is a row of counts over the units: how often each is drawn, with replacement, as many as there are. The
   counts come from one stream of random numbers, so they do not depend on the size of blocks or on threads.
2. A statistic of sums over units is, in a replicate, the same statistic under other weights.
3. An interval is the percentile interval of the replicates. Replicates whose denominator is 0 are left out, and a
   statistic that no replicate defines has none.

Shape legend: N units, B replicates, R values.
"""

from collections.abc import Iterator

import numpy as np

from rocktokens.types import Interval

BLOCK_CELLS = 1 << 22
"""Cells of a block of replicates: 32 MiB as counts or in float64."""


def prompt_draws(n_prompts: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Draw how often each prompt is in each replicate, int64 (B, N), as blocks of rows of bounded size.

    The blocks come from one stream of random numbers, row after row, so their rows do not depend on their size.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    chances_N = np.full(n_prompts, 1 / n_prompts)
    rows = max(BLOCK_CELLS // n_prompts, 1)
    for start in range(0, resamples, rows):
        yield rng.multinomial(n_prompts, chances_N, size=min(rows, resamples - start))


def bootstrap_counts(n_units: int, draws: int = 1000, seed: int = 0) -> np.ndarray:
    """Draw int64 (B, N): how often each unit is in each replicate; every row sums to N."""
    return np.concatenate(list(prompt_draws(n_units, draws, seed)))


def row_blocks(weights_BN: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Cut the replicates into blocks, so that a block of that width stays within ``BLOCK_CELLS``."""
    size = max(BLOCK_CELLS // max(width, 1), 1)
    return (weights_BN[start : start + size] for start in range(0, len(weights_BN), size))


def interval_ends(level: float) -> list[float]:
    """Return the two quantiles that a percentile interval of that level runs between."""
    return [(1 - level) / 2, (1 + level) / 2]


def quantile_interval(values_B: np.ndarray, level: float) -> Interval | None:
    """Return the percentile interval of the replicates, interpolated as numpy does; None of no replicates."""
    if not len(values_B):
        return None
    low, high = np.quantile(values_B, interval_ends(level))
    return float(low), float(high)


def ratio_interval(numerator_B: np.ndarray, denominator_B: np.ndarray, level: float) -> Interval | None:
    """Return the percentile interval of a ratio over the replicates that define it."""
    defined = denominator_B > 0
    return quantile_interval(numerator_B[defined] / denominator_B[defined], level)


def median_interval(
    values_R: np.ndarray,
    units_R: np.ndarray,
    n_units: int,
    draws: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval | None:
    """Return the interval of a median over values when the units they belong to are drawn again.

    Args:
        values_R: one number per rollout, such as its share of rocks.
        units_R: the unit of each value, such as its cluster of prompts, below ``n_units``.
        n_units: how many units are drawn, those without a value included.
        draws: number of replicates.
        seed: of the replicates.
        level: nominal coverage.
    """
    order = np.argsort(values_R, kind="stable")
    sorted_R, units_R = np.asarray(values_R)[order], np.asarray(units_R)[order]
    medians = [
        (sorted_R[np.searchsorted(upto_R, [(upto_R[-1] - 1) // 2, upto_R[-1] // 2], side="right")]).mean()
        for block_BN in row_blocks(bootstrap_counts(n_units, draws, seed), len(order))
        for upto_R in np.cumsum(block_BN[:, units_R], axis=1)
        if len(upto_R) and upto_R[-1] > 0
    ]
    return quantile_interval(np.array(medians), level)
