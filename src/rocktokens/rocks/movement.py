"""Say whether training still moves a type, on the same occurrences: what is kept of its loss, and a label for that.

See docs/method.md, section 4.2.

1. kept(v, b) = Σ kl at the reference / Σ kl at checkpoint b, over the same occurrences; b is the first checkpoint, and
   the middle one.
2. Its interval is Student's on the log scale. With a_p and b_p the sums of prompt p, A and B their totals,
   u_p = a_p/A − b_p/B is by how much the prompt moves log(A/B), so se² = P/(P − 1) · Σ u_p² over the P prompts, and
   the interval is kept · exp(± t · se). Few prompts may carry it all: t has ¾ (m − 1) degrees of freedom, at least one,
   with m = (Σ u²)²/Σ u⁴, as in ``inference.bootstrap``. A closed form: subsets and resamples of the prompts decide the
   label again.
3. Labels, in this order: *moving* if even the upper end of kept(middle) is below 0.75; *stuck* if the lower end of
   kept(first) reaches 0.75; *residual* if it fell since the first checkpoint and not since the middle one; else
   *unclear*. Without a middle checkpoint: *stuck*, *moved* (it fell since the first) or *unclear*.

A cluster stands for a prompt where prompts are pooled. Shape legend: C clusters, U types used, B sets of weights.
"""

from math import comb
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from rocktokens.inference.bootstrap import CARRIERS_COUNTED
from rocktokens.rocks.selectors import Sample, weighted_totals
from rocktokens.types import KEPT, Interval, Label

LEVEL = 0.95


class Kept(NamedTuple):
    """What is left of the loss, with both ends of its interval, float64 (B, U).

    Where there was no loss before, all three are NaN; where one prompt has it all, the ends are 0 and infinity.
    """

    share: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def of(self, column: int) -> tuple[float | None, Interval | None]:
        """Return the share of one type under the first set of weights, and its interval where there is one."""
        share, low, high = (float(values[0, column]) for values in self)
        if np.isnan(share):
            return None, None
        return share, (low, high) if np.isfinite(high) else None


def kept_share(after_CU: Any, before_CU: Any, present_CU: Any, weights_BC: np.ndarray) -> Kept:
    """Estimate Σ after / Σ before for each type, with its interval over clusters.

    Args:
        after_CU: sums of kl by cluster and type, a sparse array of whole numbers.
        before_CU: the same at an earlier checkpoint, over the same occurrences.
        present_CU: what is not 0 where the cluster has the type.
        weights_BC: how often each cluster counts.
    """
    after_BU, before_BU = (weighted_totals(weights_BC, matrix) for matrix in (after_CU, before_CU))
    present_BU = weighted_totals(weights_BC > 0, present_CU.astype(bool))
    count_B1 = weights_BC.sum(axis=1, keepdims=True).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = after_BU / before_BU
        squares, fourths = (_moves(after_CU, before_CU, weights_BC, power) for power in (2, 4))
        carriers = np.clip(np.where(fourths > 0, squares**2 / fourths, present_BU), 1, np.maximum(present_BU, 1))
        quantile = stdtrit(np.maximum(CARRIERS_COUNTED * (carriers - 1), 1), (1 + LEVEL) / 2)
        factor = np.exp(quantile * np.sqrt(squares * count_B1 / (count_B1 - 1)))
        factor = np.where((present_BU < 2) | (count_B1 < 2), np.inf, factor)
        low, high = (np.where(after_BU == 0, 0.0, end) for end in (share / factor, share * factor))
    return Kept(*(np.where(before_BU == 0, np.nan, values) for values in (share, low, high)))


def _moves(after_CU: Any, before_CU: Any, weights_BC: np.ndarray, power: int) -> np.ndarray:
    """Σ_c (a_c/A − b_c/B)^power, never below 0; of a type without a loss it is not a number."""
    after_CU, before_CU = after_CU.astype(np.float64), before_CU.astype(np.float64)
    after_BU, before_BU = (weighted_totals(weights_BC, matrix) for matrix in (after_CU, before_CU))
    total_BU = np.zeros_like(after_BU)
    for taken in range(power + 1):
        factors = [after_CU.power(power - taken)] if taken < power else []
        factors += [before_CU.power(taken)] if taken else []
        product_CU = factors[0] if len(factors) == 1 else factors[0].multiply(factors[1])
        scale_BU = after_BU ** (power - taken) * before_BU**taken
        total_BU += (-1) ** taken * comb(power, taken) * weighted_totals(weights_BC, product_CU) / scale_BU
    return np.maximum(total_BU, 0)


class Movement(NamedTuple):
    """What each type of a sample kept since the first and since the middle checkpoint; None where there is none."""

    first: Kept | None
    middle: Kept | None

    def labels(self) -> np.ndarray:
        """Label every type under every set of weights, str (B, U); comparisons with NaN are False: unclear."""
        if self.first is None:
            raise ValueError("labels need a first checkpoint that scored the same occurrences")
        stuck, fell = self.first.low >= KEPT, self.first.high < KEPT
        if self.middle is None:
            return np.select([stuck, fell], ["stuck", "moved"], "unclear")
        moving, stopped = self.middle.high < KEPT, self.middle.low >= KEPT
        return np.select([moving, stuck, fell & stopped], ["moving", "stuck", "residual"], "unclear")


def movement(sample: Sample, weights_BC: np.ndarray | None = None) -> Movement:
    """Measure what each type kept, on the whole sample or under each set of weights.

    There is nothing to measure against a checkpoint that scored other occurrences.
    """
    weights_BC = np.ones((1, sample.n_clusters)) if weights_BC is None else weights_BC
    earlier = (sample.kl_before if sample.paired else None, sample.kl_middle)
    return Movement(*(_since(sample, matrix, weights_BC) for matrix in earlier))


def label_types(sample: Sample, weights_BC: np.ndarray | None = None) -> np.ndarray:
    """Label every type, str (B, U); unclear throughout without a checkpoint to compare with."""
    moved = movement(sample, weights_BC)
    if moved.first is None:
        rows = 1 if weights_BC is None else len(weights_BC)
        return np.full((rows, len(sample.token_ids)), "unclear")
    return moved.labels()


def still_moving(sample: Sample, weights_BC: np.ndarray) -> np.ndarray:
    """Say which types are labelled moving, bool (B, U), or (1, 1) where no type can be."""
    since = _since(sample, sample.kl_middle, weights_BC)
    return np.zeros((1, 1), dtype=bool) if since is None else since.high < KEPT


def label_at(labels_BU: np.ndarray, column: int) -> Label:
    """Return the label of one type as a plain string."""
    return str(labels_BU[0, column])  # pyright: ignore[reportReturnType]


def _since(sample: Sample, earlier: Any | None, weights_BC: np.ndarray) -> Kept | None:
    return None if earlier is None else kept_share(sample.kl, earlier, sample.freq, weights_BC)
