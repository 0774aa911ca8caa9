"""Decide where to cut a ranking of types, and which ranking to trust (docs/method.md, section 4.5).

1. coverage(K): the share of all kl mass that the first K types of a ranking hold. It rises with K.
2. stability(K): the mean Jaccard index of the first K on random prompt subsets against the first K of all prompts. It
   falls once K reaches types whose place in the ranking is chance.
3. ``K = "auto"`` is where they cross: the smallest K whose coverage is at least its stability. When every type is
   ranked and every subset sees them all, both are 1 at the last K, so there is a crossing. When types left unranked
   hold more of the mass than subsets lose of the types, there may be none: then all types that can be ranked are taken
   and the record says so.
4. Selectors are compared by what a second sample would say: rankings of two disjoint halves of the prompts.

Both curves are exact at every K, at the cost of one ranking per subset: type v is in both of two top-K sets if and only
if the worse of its two ranks is within K.

Shape legend: C clusters, U types used, B subsets, N ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from scipy.stats import rankdata

from rocktokens.errors import RocktokensError
from rocktokens.rocks.ranking import Rules, rank_all
from rocktokens.rocks.records import Crossing, CutoffPoint, SampleSizePoint, SelectorAgreement
from rocktokens.rocks.selectors import SELECTORS, Sample, Selector

BAND = (0.05, 0.95)
"""Quantiles over the subsets that a band shows."""
EVERY_K_UP_TO = 50
GRID_RATIO = 1.1
"""Curves are recorded at every K up to the first, then in steps of about ten per cent."""
Ranking = tuple[np.ndarray, np.ndarray]
"""Scores (U,), and the columns of all types that may be ranked, best first."""


@dataclass(frozen=True, slots=True)
class CutoffCurve:
    """Coverage and stability at K = 1..N, N being the number of types with a positive score; NaN where undefined."""

    coverage: np.ndarray
    coverage_held_out: np.ndarray
    """Of the same ranking, on the measuring prompts."""
    stability: np.ndarray
    stability_low: np.ndarray
    stability_high: np.ndarray

    def points(self, k: int | None = None) -> list[CutoffPoint]:
        """Return the curve on a grid of K, with the given K among them."""
        last = len(self.coverage)
        ks = cutoff_grid(last) | ({k} if k is not None and 1 <= k <= last else set())
        curves = [getattr(self, field.name) for field in fields(self)]
        return [CutoffPoint(at, *(_number(curve[at - 1]) for curve in curves)) for at in sorted(ks)]


def coverage(order_N: np.ndarray, kl_totals_U: np.ndarray) -> np.ndarray:
    """Return float64 (N,): the share of the kl of all types, ranked or not, in the first K; NaN without any kl."""
    total = int(kl_totals_U.sum())
    return np.cumsum(kl_totals_U[order_N]) / (total if total else np.nan)


def cutoff_curve(
    selection: Sample,
    measuring: Sample | None,
    selector: Selector,
    rules: Rules,
    fraction: float = 0.5,
    draws: int = 50,
    seed: int = 0,
) -> CutoffCurve:
    """Compute coverage and stability of a ranking at every K.

    ``measuring`` are other prompts, with the same columns, for the held-out coverage; ``k`` of the rules is not used.
    Stability is over ``draws`` subsets of a ``fraction`` of the clusters.
    """
    if measuring is not None and not np.array_equal(measuring.token_ids, selection.token_ids):
        raise ValueError("the two halves must have the same columns")
    selection = selection.by_type()
    (score_U, order), *_ = rank_all(selection, selector, rules)
    order_N = order[score_U[order] > 0]
    undefined_N = np.full(len(order_N), np.nan)
    held_out = undefined_N if measuring is None else coverage(order_N, measuring.totals("kl"))
    stability = [undefined_N] * 3
    weights_BC = subset_weights(selection.n_clusters, fraction, draws, seed)
    if len(weights_BC) and len(order_N):
        drawn = rank_all(selection, selector, rules, weights_BC)
        jaccard_BN = np.array([_jaccard_by_k(order, other, len(order_N)) for _, other in drawn])
        stability = [jaccard_BN.mean(axis=0), *np.quantile(jaccard_BN, BAND, axis=0)]
    return CutoffCurve(coverage(order_N, selection.totals("kl")), held_out, *stability)


def auto_k(curve: CutoffCurve) -> Crossing:
    """Find the smallest K whose coverage is at least its stability."""
    if not len(curve.coverage):
        raise RocktokensError(
            "k = 'auto' finds nothing to rank, no type that may be ranked has a positive score: "
            "trace more prompts (trace.num_prompts)"
        )
    if np.isnan(curve.stability).any():
        raise RocktokensError(
            "k = 'auto' needs at least 2 prompts to measure how stable a ranking is: trace at least 40 "
            "(trace.num_prompts), or give a whole number, such as k=100"
        )
    reached = np.flatnonzero(curve.coverage >= curve.stability)
    at = int(reached[0]) if len(reached) else len(curve.coverage) - 1
    return Crossing(at + 1, float(curve.coverage[at]), float(curve.stability[at]), bool(len(reached)))


def sample_size_curve(
    sample: Sample,
    selector: Selector,
    rules: Rules,
    fractions: Sequence[float] = (0.1, 0.25, 0.5, 0.75, 0.9),
    draws: int = 30,
    seed: int = 0,
) -> list[SampleSizePoint]:
    """Measure how close the ranking of fewer prompts comes to that of all of them.

    A curve that still climbs steeply at 0.9 says that more prompts would change the rocks. Subsets are nested: the ones
    of a smaller fraction lie within those of a larger one, so the curve shows the effect of size with little noise.
    """
    sample = sample.by_type()
    ranking, *_ = rank_all(sample, selector, rules)
    points = []
    for fraction in fractions:
        weights_BC = subset_weights(sample.n_clusters, fraction, draws, seed)
        found = [_agreement(ranking, other, rules.k) for other in rank_all(sample, selector, rules, weights_BC)]
        overlap, correlation = (_mean(agreement[i] for agreement in found) for i in range(2))
        size = _subset_size(sample.n_clusters, fraction)
        points.append(SampleSizePoint(float(fraction), size, overlap, correlation))
    return points


def compare_selectors(
    sample: Sample, rules: Rules, draws: int = 30, seed: int = 0, fraction: float = 0.5
) -> list[SelectorAgreement]:
    """Say what each selector is worth on this sample."""
    sample = sample.by_type()
    needs = {"joint": sample.kl_before, "context": sample.kept}
    available = {name: selector for name, selector in SELECTORS.items() if needs.get(name, sample.kl) is not None}
    top = {}
    for name, selector in available.items():
        (_, order), *_ = rank_all(sample, selector, rules)
        top[name] = order[: rules.k]
    return [
        SelectorAgreement(
            selector=name,
            **split_half(sample, selector, rules, draws, seed, fraction),
            coverage=_number(coverage(top[name], sample.totals("kl"))[-1]) if len(top[name]) else None,
            jaccard_with={other: jaccard(top[name], top[other]) for other in available if other != name},
        )
        for name, selector in available.items()
    ]


def split_half(
    sample: Sample, selector: Selector, rules: Rules, draws: int = 30, seed: int = 0, fraction: float = 0.5
) -> dict[str, float | None]:
    """Measure how far rankings of random parts of the prompts agree with those of the rest, and with that of all."""
    sample = sample.by_type()
    (_, order), *_ = rank_all(sample, selector, rules)
    half_BC = subset_weights(sample.n_clusters, fraction, draws, seed)
    both = np.stack([half_BC, 1 - half_BC], axis=1).reshape(-1, sample.n_clusters)
    found = rank_all(sample, selector, rules, both)
    agreements = [
        (*_agreement(half, rest, rules.k), jaccard(half[1][: rules.k], order[: rules.k]))
        for half, rest in zip(found, found, strict=True)
    ]
    halves, correlation, full = (_mean(agreement[i] for agreement in agreements) for i in range(3))
    return {"jaccard_halves": halves, "jaccard_full": full, "spearman_halves": correlation}


def subset_weights(n_clusters: int, fraction: float, draws: int, seed: int) -> np.ndarray:
    """Draw int64 (B, C): 1 for the clusters of each random subset; no subsets where one cluster is all there is.

    A subset holds round(fraction · C) clusters, at least 1 and at most C − 1.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    weights_BC = np.zeros((draws if n_clusters > 1 else 0, n_clusters), dtype=np.int64)
    for weights_C in weights_BC:
        weights_C[rng.permutation(n_clusters)[: _subset_size(n_clusters, fraction)]] = 1
    return weights_BC


def jaccard(first: np.ndarray, second: np.ndarray) -> float | None:
    """Return the size of the intersection over that of the union of two sets of columns; None of two empty sets."""
    shared = len(np.intersect1d(first, second, assume_unique=True))
    union = len(first) + len(second) - shared
    return shared / union if union else None


def spearman(first: np.ndarray, second: np.ndarray) -> float | None:
    """Return the rank correlation, ties sharing their mean rank; None for fewer than 3 values or a constant side."""
    if len(first) < 3:
        return None
    # Twice the centred ranks are whole numbers: their sums do not depend on the order of addition.
    one, two = (np.rint(2 * rankdata(side)).astype(np.int64) - (len(side) + 1) for side in (first, second))
    spread = int((one * one).sum()) * int((two * two).sum())
    return int((one * two).sum()) / spread**0.5 if spread else None


def cutoff_grid(last: int) -> set[int]:
    """List every K up to 50, then about geometric steps, up to the last."""
    count = 2 + max(int(np.log(max(last, 1) / EVERY_K_UP_TO) / np.log(GRID_RATIO)), 0)
    steps = np.geomspace(EVERY_K_UP_TO, max(last, EVERY_K_UP_TO), count)
    return {*range(1, min(last, EVERY_K_UP_TO) + 1), *(int(step) for step in np.rint(steps) if step <= last)}


def _jaccard_by_k(first: np.ndarray, second: np.ndarray, last: int) -> np.ndarray:
    """float64 (N,): Jaccard index of the first K of two rankings at K = 1..last, NaN if both are empty."""
    place = np.full(max(first.max(initial=0), second.max(initial=0)) + 1, last)
    place[first] = np.arange(len(first))
    worse = np.maximum(place[second], np.arange(len(second)))
    shared = np.cumsum(np.bincount(worse[worse < last], minlength=last))
    ks = np.arange(1, last + 1)
    union = np.minimum(ks, len(first)) + np.minimum(ks, len(second)) - shared
    return np.divide(shared, union, out=np.full(last, np.nan), where=union > 0)


def _agreement(first: Ranking, second: Ranking, k: int) -> tuple[float | None, float | None]:
    """Compute the Jaccard index of the first k of two rankings, and Spearman over the types in both."""
    (score_one, order_one), (score_two, order_two) = first, second
    in_one, in_both = np.zeros((2, len(score_one)), dtype=bool)
    in_one[order_one] = True
    in_both[order_two] = in_one[order_two]
    return jaccard(order_one[:k], order_two[:k]), spearman(score_one[in_both], score_two[in_both])


def _subset_size(n_clusters: int, fraction: float) -> int:
    return min(max(int(fraction * n_clusters + 0.5), 1), max(n_clusters - 1, 1))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
