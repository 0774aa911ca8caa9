"""Draw whole prompts, or clusters of them, again: the seeded bootstrap behind every interval that is not exact.

1. A replicate is a row of counts over the units: how often each is drawn, with replacement, as many as there are. The
   counts come from one stream of random numbers, so they do not depend on the size of blocks or on threads.
2. A statistic of sums over units is, in a replicate, the same statistic under other weights.
3. A ratio of two sums r = N/D (a share, a mean per occurrence, what is kept of a loss) gets a bootstrap-t interval.
   With u_c = N_c/N − D_c/D its standard error on the log scale is se² = C/(C−1) · Σ_c u_c², units without either
   included. Replicate b gives t_b = (log r_b − log r)/se_b with its own se_b, and the interval runs from
   exp(log r − t_high · se) to exp(log r − t_low · se), t_low and t_high quantiles of the t_b. A sum alone is the ratio
   with D_c = 1, a share the ratio of a part to the rest, and what may be negative (a mean difference) stays on its own
   scale.
4. kl is heavy-tailed: when few units carry the statistic, all replicates repeat these few and are too much alike. Their
   number is estimated as m = (Σ u²)²/Σ u⁴, and neither t quantile is taken closer to 0 than that of Student's t with
   ¾ (m − 1) degrees of freedom, at least one (two for a share), nor further from it than with that least number, which
   keeps every end finite. In samples of 50, 100 and 192 of the demo's prompts plain bootstrap-t covered the kl share in
   95, 88 and 90 % and the R of the worst rock in 83, 90 and 91 %, BCa in 85, 83 and 88 % and in 61, 73 and 85 %. With
   the limit both reach 92 % at each size (``benchmarks/coverage_find.py``). The factor ¾ was chosen among five on the
   same prompts: with 1 the R of one rock covered 92.0 %, at the edge. With one degree of freedom a share covered 97 to
   99 %, and its interval could run from 7 to 99.9 %. With two it covers 97 to 99 % there, and 91.8 to 98.7 % on the
   prompts of another run.
5. Replicates that leave N or D empty or have no spread are left out. A ratio to 0, or one that a single unit decides,
   has no interval; a sum of 0 has the interval from 0 to 0.
6. Other statistics (medians) get the percentile interval of the replicates that define them.

Shape legend: N units, C clusters that are such units, U columns (types), B replicates, R values.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.sparse import csc_array
from scipy.stats import t as student_t

from rocktokens.types import Interval

BLOCK_CELLS = 1 << 22
"""Cells of a block of replicates: 32 MiB as counts or in float64."""
BLOCKS_AT_ONCE = 16
"""Arrays of replicates that the interval of a ratio holds at the same time."""
CARRIERS_COUNTED = 0.75
"""Of the units that seem to carry a statistic, less one: the degrees of freedom of its standard error."""
LEAST_FREEDOM, LEAST_FREEDOM_OF_SHARES = 1.0, 2.0
"""Degrees of freedom however few units carry a statistic."""
NO_SPREAD = 1e-12
"""A variance below this share of the squares that it is the difference of is rounding."""


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


def ratio_intervals(
    numerator_CU: Any,
    denominator_CU: Any | None,
    counts_BC: np.ndarray,
    level: float = 0.95,
    least_freedom: float = LEAST_FREEDOM,
) -> np.ndarray:
    """Return float64 (2, U): the ends of the interval of each column's ratio of sums; NaN where it has none.

    Args:
        numerator_CU: what is summed over the clusters drawn, not negative; a scipy sparse array or a dense one.
        denominator_CU: the same of the denominator; None for the sum of the numerator itself over as many clusters.
        counts_BC: how often each cluster is in each replicate (``bootstrap_counts``).
        level: nominal coverage.
        least_freedom: degrees of freedom where hardly any cluster carries a ratio.
    """
    above_CU: Any = csc_array(numerator_CU, dtype=np.float64)
    below_CU: Any = None if denominator_CU is None else csc_array(denominator_CU, dtype=np.float64)
    above_U = _column_sums(above_CU)
    below_U = np.ones_like(above_U) if below_CU is None else _column_sums(below_CU)
    ends = np.full((2, len(above_U)), np.nan)
    ends[:, (above_U == 0) & (below_U > 0)] = 0
    for some in _column_blocks(np.flatnonzero((above_U > 0) & (below_U > 0)), len(counts_BC)):
        shares_CU = _scaled(above_CU[:, some], above_U[some])
        weights_CU = None if below_CU is None else _scaled(below_CU[:, some], below_U[some])
        error_U, low_U, high_U = _log_spread(shares_CU, weights_CU, counts_BC, level, least_freedom)
        ends[:, some] = above_U[some] / below_U[some] * np.exp([-high_U * error_U, -low_U * error_U])
    return ends


def ratio_interval(
    numerator_C: np.ndarray,
    denominator_C: np.ndarray,
    counts_BC: np.ndarray,
    level: float = 0.95,
    least_freedom: float = LEAST_FREEDOM,
) -> Interval | None:
    """Return the interval of one ratio of sums over clusters."""
    sums = numerator_C[:, None], denominator_C[:, None]
    return _interval(ratio_intervals(*sums, counts_BC, level, least_freedom)[:, 0])


def share_interval(
    part_C: np.ndarray, rest_C: np.ndarray, counts_BC: np.ndarray, level: float = 0.95
) -> Interval | None:
    """Return the interval of the share of a part in the whole, on the logit scale: that of part/rest, turned back."""
    if not rest_C.any() and part_C.any():
        return 1.0, 1.0
    odds = ratio_interval(part_C, rest_C, counts_BC, level, LEAST_FREEDOM_OF_SHARES)
    return None if odds is None else (odds[0] / (1 + odds[0]), odds[1] / (1 + odds[1]))


def mean_interval(
    sums_C: np.ndarray, weights_C: np.ndarray, counts_BC: np.ndarray, level: float = 0.95
) -> Interval | None:
    """Return the interval of a mean Σ sums/Σ weights that may be negative: the same bootstrap-t on its own scale."""
    weight = float(weights_C.sum())
    if weight <= 0:
        return None
    mean, weights_CU = float(sums_C.sum()) / weight, csc_array(weights_C[:, None] / weight)
    off_CU = csc_array((sums_C - mean * weights_C)[:, None] / weight)
    step_UB, error_UB = _replicate_spread(_drawn_sums(off_CU, weights_CU, counts_BC), len(counts_BC[0]))
    error_U, low_U, high_U = _studentised(off_CU.toarray(), step_UB / error_UB, level, LEAST_FREEDOM)
    if np.count_nonzero(weights_C) < 2:
        return None
    return float(mean - high_U[0] * error_U[0]), float(mean - low_U[0] * error_U[0])


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


def _interval(ends: np.ndarray) -> Interval | None:
    return None if np.isnan(ends).any() else (float(ends[0]), float(ends[1]))


def _column_sums(matrix_CU: Any) -> np.ndarray:
    return np.asarray(matrix_CU.sum(axis=0)).ravel()


def _column_blocks(columns: np.ndarray, draws: int) -> Iterator[np.ndarray]:
    width = max(BLOCK_CELLS // (BLOCKS_AT_ONCE * draws), 1)
    return (columns[start : start + width] for start in range(0, len(columns), width))


def _scaled(matrix_CU: Any, totals_U: np.ndarray) -> Any:
    """Every column of a sparse array (CSC) as shares of its sum."""
    per_entry = np.repeat(totals_U, np.diff(matrix_CU.indptr))
    return csc_array((matrix_CU.data / per_entry, matrix_CU.indices, matrix_CU.indptr), shape=matrix_CU.shape)


def _log_spread(
    shares_CU: Any, weights_CU: Any | None, counts_BC: np.ndarray, level: float, least_freedom: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return standard errors of log ratios, and the low and the high quantile of t, all (U,)."""
    n_clusters = shares_CU.shape[0]
    if weights_CU is None:
        off_CU, alone_U = shares_CU.toarray() - 1 / n_clusters, n_clusters < 2
        sums = _drawn_totals(shares_CU, counts_BC)
    else:
        off_CU, alone_U = (shares_CU - weights_CU).toarray(), np.diff((shares_CU + weights_CU).indptr) < 2
        sums = _drawn_sums(shares_CU - weights_CU, weights_CU, counts_BC)
    step_UB, error_UB = _replicate_spread(sums, n_clusters)
    times_UB = np.where(1 + step_UB > NO_SPREAD, 1 + step_UB, np.nan)  # the replicate's ratio over the estimate
    error_U, low_U, high_U = _studentised(off_CU, np.log(times_UB) * times_UB / error_UB, level, least_freedom)
    return np.where(alone_U, np.nan, error_U), low_U, high_U


def _drawn_sums(off_CU: Any, weights_CU: Any, counts_BC: np.ndarray) -> list[np.ndarray]:
    """Σu, Σb, Σu², Σub, Σb² (U, B) of every replicate; sparse products add up in one order, whatever the block."""
    counts_CB = np.ascontiguousarray(counts_BC.T, dtype=np.float64)
    products = (off_CU, weights_CU, off_CU * off_CU, off_CU * weights_CU, weights_CU * weights_CU)
    return [product.T.tocsr() @ counts_CB for product in products]


def _drawn_totals(shares_CU: Any, counts_BC: np.ndarray) -> list[np.ndarray]:
    """The same sums where every cluster has the weight b = 1/C, without a dense u = a − 1/C."""
    counts_CB = np.ascontiguousarray(counts_BC.T, dtype=np.float64)
    a_UB, squares_UB = (part.T.tocsr() @ counts_CB for part in (shares_CU, shares_CU * shares_CU))
    b, one_UB = 1 / len(counts_CB), np.ones_like(a_UB)
    return [a_UB - 1, one_UB, squares_UB - 2 * b * a_UB + b, b * (a_UB - 1), b * one_UB]


def _replicate_spread(sums: list[np.ndarray], n_clusters: int) -> tuple[np.ndarray, np.ndarray]:
    """Each replicate's distance from the estimate, and its own standard error; NaN where it has no such."""
    off_UB, weight_UB, squares_UB, products_UB, weight_squares_UB = sums
    with np.errstate(divide="ignore", invalid="ignore"):
        step_UB = off_UB / weight_UB
        spread_UB = squares_UB - 2 * step_UB * products_UB + step_UB**2 * weight_squares_UB
        least_UB = NO_SPREAD * (squares_UB + step_UB**2 * weight_squares_UB)
        variance_UB = np.where(spread_UB > least_UB, spread_UB, np.nan) / weight_UB**2
    return step_UB, np.sqrt(variance_UB * n_clusters / max(n_clusters - 1, 1))


def _studentised(
    off_CU: np.ndarray, t_UB: np.ndarray, level: float, least_freedom: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the standard error of the estimate and the two quantiles of t, held within those of Student's t."""
    off_UC = np.ascontiguousarray(off_CU.T)
    squares_U, fourths_U = (off_UC**2).sum(axis=1), (off_UC**4).sum(axis=1)
    n_clusters, ends = off_UC.shape[1], interval_ends(level)
    carriers_U = np.divide(squares_U**2, fourths_U, out=np.full_like(squares_U, n_clusters), where=fourths_U > 0)
    freedom_U = np.maximum(CARRIERS_COUNTED * (carriers_U - 1), least_freedom)
    least_U, most = student_t.ppf(ends[1], freedom_U), student_t.ppf(ends[1], least_freedom)
    low_U, high_U = _defined_quantiles(t_UB, ends)
    error_U = np.sqrt(squares_U * n_clusters / max(n_clusters - 1, 1))
    return error_U, np.fmax(np.fmin(low_U, -least_U), -most), np.fmin(np.fmax(high_U, least_U), most)


def _defined_quantiles(values_UB: np.ndarray, shares: list[float]) -> list[np.ndarray]:
    """Quantiles (U,) of the values that are not NaN, interpolated as numpy does; NaN where there is none."""
    ordered_UB = np.sort(values_UB, axis=1)
    last_U = np.count_nonzero(~np.isnan(values_UB), axis=1) - 1
    rows = np.arange(len(values_UB))
    quantiles = []
    for share in shares:
        place_U = np.maximum(share * last_U, 0)
        below_U = place_U.astype(np.int64)
        low_U, high_U = (ordered_UB[rows, np.minimum(at, np.maximum(last_U, 0))] for at in (below_U, below_U + 1))
        quantiles.append(low_U + (high_U - low_U) * (place_U - below_U))
    return quantiles
