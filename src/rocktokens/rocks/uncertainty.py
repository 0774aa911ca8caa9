"""How far the numbers about rocks would move with other prompts: a seeded cluster bootstrap (METHOD 4.6, 4.8).

1. The unit is the cluster of prompts. Occurrences of one prompt share its text and are not independent, so whole
   clusters are drawn with replacement, as many as there are: a replicate is a row of counts over the clusters.
2. Every statistic is a function of sums over clusters, so a replicate is that statistic under other weights; a ranking
   is made anew in every replicate, with ``min_freq`` and the rest; only the flags of the context stage stay as found.
3. An interval is the percentile interval of the replicates. Replicates whose denominator is 0 are left out, and a
   statistic no replicate defines has none.
4. Paired changes are also tested: Wilcoxon's signed-rank test with one difference per cluster.

Sums are whole numbers below 2^53 in float64: exact, so nothing here depends on threads or on the size of blocks.

Shape legend: C clusters, U types used, B replicates, R rollouts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata, wilcoxon

from rocktokens.errors import RocktokensError
from rocktokens.inference.paired import prompt_draws
from rocktokens.rocks.aggregate import ONE
from rocktokens.rocks.selectors import Rules, Sample, Selector, rank_types, summed_kl, weighted_totals

CANDIDATES = 1000
CANDIDATES_PER_ROCK = 10
"""Types a replicate looks at: this many, or this many for every rock if that is more (see ``candidates``)."""
BLOCK_CELLS = 1 << 22
"""Cells of a block of replicates: 32 MiB in float64, of which a selector holds a handful at a time."""
LEAST_NONZERO = 6
"""With 5 differences the smallest two-sided p of a signed-rank test is 2/2^5 > 0.05: it cannot reject anything."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ScoreUncertainty:
    """What the bootstrap says of each type; all float64 (U,)."""

    low: np.ndarray
    """Lower end of the interval of the score in nats; NaN for a type that is no candidate."""
    high: np.ndarray
    p_in_top_k: np.ndarray
    """Share of replicates that rank the type among the first k; 0 for a type that is no candidate."""

    def interval(self, column: int) -> Interval | None:
        """The interval of one type's score."""
        return None if np.isnan(self.low[column]) else (float(self.low[column]), float(self.high[column]))


@dataclass(frozen=True, slots=True)
class PairedChange:
    """The kl of a group of types at the baseline and at the reference, over the same occurrences; None: undefined."""

    n_occurrences: int
    n_clusters: int
    """Clusters in which the group occurs: the sample size of the test."""
    kl_before: float | None
    """Mean per occurrence, as are ``kl_after`` and ``delta``."""
    kl_after: float | None
    delta: float | None
    delta_interval: Interval | None
    relative: float | None
    """The change as a share of the kl before."""
    relative_interval: Interval | None
    wilcoxon_p: float | None
    rank_biserial: float | None
    """From −1 (the kl fell in every cluster) to 1 (it rose in every one)."""


def bootstrap_counts(n_clusters: int, draws: int = 1000, seed: int = 0) -> np.ndarray:
    """int64 (B, C): how often each cluster is drawn in each replicate; every row sums to C."""
    return np.concatenate(list(prompt_draws(n_clusters, draws, seed)))


def replicates(sample: Sample, selector: Selector, weights_BC: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Score (U,) and frequency (U,) of every type under each set of weights, computed in blocks of bounded size."""
    for block_BC in _blocks(weights_BC, len(sample.token_ids)):
        yield from zip(selector(sample, block_BC), weighted_totals(block_BC, sample.freq), strict=True)


def score_uncertainty(
    sample: Sample,
    selector: Selector,
    rules: Rules,
    draws: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    scored: Selector = summed_kl,
) -> ScoreUncertainty:
    """Interval of a score and probability of being in the top k, for every type that has a chance of it.

    A type whose score is 0 in a replicate is there by its token id alone and does not count as being in the top k.
    What the context stage kept is taken as found, so under that stage the probability is an upper estimate.

    A probability estimated from B replicates has a Monte-Carlo standard error of sqrt(p(1 − p)/B): with 1,000 of them
    at most 1.6 percentage points.

    Args:
        sample: the prompts the rocks were selected on.
        selector: the score that ranks.
        rules: applied anew in every replicate, so a type may fall below ``min_freq`` or out of the excluded ones.
        draws: number of replicates.
        seed: of the replicates.
        level: nominal coverage of the intervals.
        scored: the score that gets an interval, R by default, whatever ranks.
    """
    counts_BC = bootstrap_counts(sample.n_clusters, draws, seed)
    columns = candidates(sample, selector, rules)
    part = sample.columns(columns).by_type()
    low, high = np.full((2, len(sample.token_ids)), np.nan)
    low[columns], high[columns] = _score_intervals(part, scored, counts_BC, level)
    inside = np.zeros(len(sample.token_ids), dtype=np.int64)
    for score_U, freq_U in replicates(part, selector, counts_BC):
        first = rank_types(score_U, freq_U, rules)
        inside[columns[first[score_U[first] > 0]]] += 1
    return ScoreUncertainty(low, high, inside / draws)


def candidates(sample: Sample, selector: Selector, rules: Rules) -> np.ndarray:
    """Ascending columns of the types that may come into the top k of a replicate.

    The best max(1000, 10·k) by R and by the selector are taken: drawing the prompts again hardly ever lifts a type past
    that many others. It is an approximation: where types are rare, a probability may be off by about 0.01, which more
    replicates do not mend. Where the score does not grow with frequency (mean kl), types too rare to be ranked stand
    before the others, so the best are also taken among those that half reach ``min_freq`` and among those that do. The
    most frequent types are taken as far as they decide which ones are excluded.
    """
    freq_U = sample.totals("freq")
    once = np.ones((1, sample.n_clusters))
    reach = max(CANDIDATES, CANDIDATES_PER_ROCK * (rules.k + rules.exclude_top_freq))
    best = [
        rank_types(score(sample, once)[0], freq_U, Rules(reach, min_freq=least))
        for score in (summed_kl, selector)
        for least in (1, (rules.min_freq + 1) // 2, rules.min_freq)
    ]
    frequent = np.argsort(-freq_U, kind="stable")[: CANDIDATES_PER_ROCK * rules.exclude_top_freq]
    return np.unique(np.concatenate([*best, frequent]))


def share_intervals(
    sample: Sample, is_rock_U: np.ndarray, paired: bool, draws: int = 1000, seed: int = 0, level: float = 0.95
) -> dict[str, Interval | None]:
    """Intervals of what a set of rocks amounts to, by the names these statistics have in the summary.

    Args:
        sample: the prompts the rocks are measured on, not those they were selected on.
        is_rock_U: which types are rocks; the set is given, so its choice adds nothing to the intervals.
        paired: whether ``kl_before`` is of the same occurrences; without that there is no change to speak of.
        draws: number of replicates.
        seed: of the replicates.
        level: nominal coverage.
    """
    counts_BC = bootstrap_counts(sample.n_clusters, draws, seed)
    rocks, rest = (_drawn(sample, chosen_U, counts_BC) for chosen_U in (is_rock_U, ~is_rock_U))
    whole = {name: rocks[name] + rest[name] for name in rocks}
    ratios = {
        "token_share": (rocks["freq"], whole["freq"]),
        "kl_share": (rocks["kl"], whole["kl"]),
        "grad_share": (rocks["grad_norm"], whole["grad_norm"]),
        "mean_kl": (whole["kl"], ONE * whole["freq"]),
        "mean_kl_rocks": (rocks["kl"], ONE * rocks["freq"]),
        "mean_kl_rest": (rest["kl"], ONE * rest["freq"]),
    }
    intervals = {name: _ratio_interval(*ratio, level) for name, ratio in ratios.items()}
    for name, sums in (("kl_change_rocks", rocks), ("kl_change_rest", rest)):
        before = sums.get("kl_before") if paired else None
        intervals[name] = None if before is None else _ratio_interval(sums["kl"] - before, before, level)
    return intervals


def median_interval(
    values_R: np.ndarray,
    clusters_R: np.ndarray,
    n_clusters: int,
    draws: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval | None:
    """Interval of the median over rollouts when their clusters are drawn anew.

    Args:
        values_R: one number per rollout, such as its share of rocks.
        clusters_R: the cluster of each rollout, below ``n_clusters``.
        n_clusters: how many clusters are drawn, those without a rollout included.
        draws: number of replicates.
        seed: of the replicates.
        level: nominal coverage.
    """
    order = np.argsort(values_R, kind="stable")
    sorted_R, clusters_R = np.asarray(values_R)[order], np.asarray(clusters_R)[order]
    medians = [
        (sorted_R[np.searchsorted(upto_R, [(upto_R[-1] - 1) // 2, upto_R[-1] // 2], side="right")]).mean()
        for block_BC in _blocks(bootstrap_counts(n_clusters, draws, seed), len(order))
        for upto_R in np.cumsum(block_BC[:, clusters_R], axis=1)
        if len(upto_R) and upto_R[-1] > 0
    ]
    return _interval(np.array(medians), level)


def paired_tests(
    sample: Sample, in_group_U: np.ndarray, draws: int = 1000, seed: int = 0, level: float = 0.95
) -> PairedChange:
    """How the kl of a group of types changed from baseline to reference, and whether chance explains it.

    The unit of the test is the prompt (cluster), not the occurrence: occurrences of one prompt are not independent, and
    counting them as if they were makes any change significant. Each cluster enters with its mean Δkl per occurrence.

    Clusters without any change are ranked with the others and then take neither side (Pratt): they are evidence that
    nothing changed, which leaving them out would hide, and splitting them between both sides overstates the variance.
    With fewer than 6 clusters that changed there is no p: the test could not reject.

    Args:
        sample: with ``kl_before`` of the same occurrences.
        in_group_U: which types belong to the group.
        draws: number of replicates for the intervals.
        seed: of the replicates.
        level: nominal coverage.
    """
    if sample.kl_before is None:
        raise RocktokensError("a paired test needs two checkpoints, the sample has only one: trace another checkpoint")
    group = in_group_U.astype(np.int64)
    freq_C, after_C, before_C = (matrix @ group for matrix in (sample.freq, sample.kl, sample.kl_before))
    present = freq_C > 0
    drawn = _drawn(sample, in_group_U, bootstrap_counts(sample.n_clusters, draws, seed))
    change = drawn["kl"] - drawn["kl_before"]
    freq, after, before = (int(sums_C.sum()) for sums_C in (freq_C, after_C, before_C))
    wilcoxon_p, rank_biserial = _signed_rank((after_C - before_C)[present] / (freq_C[present] * ONE))
    return PairedChange(
        n_occurrences=freq,
        n_clusters=int(present.sum()),
        kl_before=before / (freq * ONE) if freq else None,
        kl_after=after / (freq * ONE) if freq else None,
        delta=(after - before) / (freq * ONE) if freq else None,
        delta_interval=_ratio_interval(change, ONE * drawn["freq"], level),
        relative=(after - before) / before if before else None,
        relative_interval=_ratio_interval(change, drawn["kl_before"], level),
        wilcoxon_p=wilcoxon_p,
        rank_biserial=rank_biserial,
    )


def _signed_rank(delta_C: np.ndarray) -> tuple[float | None, float | None]:
    """The p of Wilcoxon's test, and (W₊ − W₋)/(W₊ + W₋ + W₀), both with ranks over zeros too."""
    if not len(delta_C):
        return None, None
    ranks = rankdata(np.abs(delta_C))
    effect = float((ranks * np.sign(delta_C)).sum() / ranks.sum())
    if np.count_nonzero(delta_C) < LEAST_NONZERO:
        return None, effect
    test: Any = wilcoxon(delta_C, zero_method="pratt")
    return float(test.pvalue), effect


def _drawn(sample: Sample, chosen_U: np.ndarray, counts_BC: np.ndarray) -> dict[str, np.ndarray]:
    """Sums (B,) of the chosen types in every replicate, by name of the matrix; kl and gradient in fixed point."""
    names = ("freq", "kl", "grad_norm", "kl_before")
    matrices = {name: getattr(sample, name) for name in names if getattr(sample, name) is not None}
    weights_BC, chosen = counts_BC.astype(np.float64), chosen_U.astype(np.int64)
    return {name: weights_BC @ (matrix @ chosen).astype(np.float64) for name, matrix in matrices.items()}


def _score_intervals(sample: Sample, scored: Selector, counts_BC: np.ndarray, level: float) -> np.ndarray:
    """float64 (2, U): both ends of the interval of a score, column block by column block."""
    width = max(BLOCK_CELLS // len(counts_BC), 1)
    starts = range(0, len(sample.token_ids), width)
    parts = (sample.columns(np.arange(start, min(start + width, len(sample.token_ids)))) for start in starts)
    return np.hstack([np.quantile(scored(part, counts_BC), _ends(level), axis=0) for part in parts])


def _ratio_interval(numerator_B: np.ndarray, denominator_B: np.ndarray, level: float) -> Interval | None:
    defined = denominator_B > 0
    return _interval(numerator_B[defined] / denominator_B[defined], level)


def _interval(values: np.ndarray, level: float) -> Interval | None:
    if not len(values):
        return None
    low, high = np.quantile(values, _ends(level))
    return float(low), float(high)


def _ends(level: float) -> list[float]:
    return [(1 - level) / 2, (1 + level) / 2]


def _blocks(weights_BC: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Rows of the weights, so many at a time that a block of that width stays within ``BLOCK_CELLS``."""
    size = max(BLOCK_CELLS // max(width, 1), 1)
    return (weights_BC[start : start + size] for start in range(0, len(weights_BC), size))
