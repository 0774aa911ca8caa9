"""Score types over weighted prompts: the one place where a selector is a formula.

See docs/method.md, sections 4.1, 4.3 and 4.4.

1. A ``Sample`` holds sums per (cluster of prompts, type) as sparse matrices. All entries are whole numbers (counts, or
   fixed-point sums), so a product with whole weights is exact in float64 below 2^53 (half a billion nats), whatever the
   order of addition.
2. A selector maps weights of the clusters to a score per type: weights of 1 give the score of the sample, bootstrap
   counts a replicate, 0/1 weights a subset of the prompts.
3. The default ranks by a lower bound of R, L(v) = R · exp(−1.645 · se/R): what is expensive in one prompt and absent
   elsewhere has a large error and falls behind what other prompts confirm. se² = P/(P − 1) · Σ_p (r_p − r̄)² over the
   P clusters, those without the type included; on the log scale the bound of a positive sum stays positive.

Shape legend: C clusters, U types used, B sets of weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from scipy.sparse import csr_array

from rocktokens.types import ONE

POOLED_CLUSTERS = 500
"""Clusters that many prompts are pooled into: a bootstrap over 500 gives standard errors to about 3 %."""
LOWER_BOUND_Z = 1.6448536269514722
"""One-sided 95 %: how far below its estimate the lower confidence bound of a score lies, in standard errors."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Sums over one set of prompts; every matrix is a scipy sparse array (C, U) of int64, CSR unless ``by_type``."""

    token_ids: np.ndarray
    """int64 (U,): ascending, so that the order of columns breaks ties."""
    freq: Any
    kl: Any
    """Fixed point, at the reference checkpoint."""
    grad_norm: Any
    """Fixed point."""
    kl_before: Any | None = None
    """Fixed point, at the baseline checkpoint; None where there is no other checkpoint."""
    kl_middle: Any | None = None
    """Fixed point, halfway between the two; None where no checkpoint there scored the same occurrences."""
    kl_choice: Any | None = None
    """Fixed point, the part of ``kl`` that is a choice within classes of tokens; None where the trace does not say."""
    paired: bool = True
    """Whether ``kl_before`` is of the same occurrences."""
    kept: Any | None = None
    """Occurrences with consistent contexts; float64 where it was estimated from a sample; None before that stage."""
    prompts: Any | None = None
    """How many of the clusters that were pooled into each hold a type; None where none were: then one or none."""

    @property
    def n_clusters(self) -> int:
        """Rows of the matrices."""
        return self.freq.shape[0]

    @property
    def holds(self) -> Any:
        """In how many prompts of each cluster a type occurs, int64 (C, U)."""
        return self.freq.astype(bool).astype(np.int64) if self.prompts is None else self.prompts

    def rows(self, chosen: np.ndarray) -> Self:
        """The clusters chosen by mask or index."""
        return self._each(lambda matrix: matrix[chosen])

    def columns(self, chosen: np.ndarray) -> Self:
        """The types chosen by mask or ascending index."""
        return replace(self._each(lambda matrix: matrix[:, chosen]), token_ids=self.token_ids[chosen])

    def by_type(self) -> Self:
        """The same sums stored type after type (CSC): several times quicker under many sets of weights."""
        return self._each(lambda matrix: matrix.tocsc())

    def pooled(self, size: int, seed: int) -> Self:
        """The same sums over ``size`` random groups of the clusters."""
        groups_C = pooled_groups(self.n_clusters, size, seed)
        shape = size, self.n_clusters
        gather_GC = csr_array((np.ones_like(groups_C), (groups_C, np.arange(self.n_clusters))), shape=shape)
        return replace(self._each(lambda matrix: gather_GC @ matrix), prompts=gather_GC @ self.holds)

    def totals(self, name: str) -> np.ndarray:
        """Column sums (U,) of one matrix, exact."""
        return np.asarray(getattr(self, name).sum(axis=0)).ravel()

    def share(self, name: str, chosen_U: np.ndarray) -> float | None:
        """The share of one matrix that the chosen types hold; None of nothing."""
        totals_U = self.totals(name)
        whole = int(totals_U.sum())
        return int(totals_U[chosen_U].sum()) / whole if whole else None

    def mean_kl(self, chosen_U: np.ndarray) -> float | None:
        """The mean kl per occurrence of the chosen types, in nats; None where they do not occur."""
        freq, kl = (int(self.totals(name)[chosen_U].sum()) for name in ("freq", "kl"))
        return kl / (freq * ONE) if freq else None

    def kl_change(self, chosen_U: np.ndarray) -> float | None:
        """The relative change of the summed kl of the chosen types from baseline to reference."""
        kl, before = (int(self.totals(name)[chosen_U].sum()) for name in ("kl", "kl_before"))
        return (kl - before) / before if before > 0 else None

    def _each(self, change: Callable[[Any], Any]) -> Self:
        names = ("freq", "kl", "grad_norm", "kl_before", "kl_middle", "kl_choice", "kept", "prompts")
        matrices = {name: getattr(self, name) for name in names}
        return replace(self, **{name: change(matrix) for name, matrix in matrices.items() if matrix is not None})


def pooled_groups(count: int, size: int, seed: int) -> np.ndarray:
    """Draw a group below ``size`` for each unit, int64; group sizes differ by one unit at most."""
    return np.random.Generator(np.random.PCG64([seed, count])).permutation(count) % size


def weighted_totals(weights_BC: np.ndarray, matrix_CU: Any) -> np.ndarray:
    """Return float64 (B, U): the column sums of a matrix under each set of weights."""
    return (matrix_CU.T.astype(np.float64) @ weights_BC.T.astype(np.float64)).T


def summed_kl(sample: Sample, weights_BC: np.ndarray) -> np.ndarray:
    """R(v) = Freq(v) · mean kl(v), in nats."""
    return weighted_totals(weights_BC, sample.kl) / ONE


def mean_kl(sample: Sample, weights_BC: np.ndarray) -> np.ndarray:
    """Return the mean kl of a type, however rare it is."""
    return _ratio(summed_kl(sample, weights_BC), weighted_totals(weights_BC, sample.freq))


def joint_kl(sample: Sample, weights_BC: np.ndarray) -> np.ndarray:
    """Return the smaller R of the two checkpoints."""
    return np.minimum(summed_kl(sample, weights_BC), weighted_totals(weights_BC, sample.kl_before) / ONE)


def lower_bound(sample: Sample, weights_BC: np.ndarray) -> np.ndarray:
    """L(v) = R · exp(−1.645 · se/R): a lower bound of R, one-sided at 95 %."""
    return _bound(sample.kl, weights_BC)


def joint_bound(sample: Sample, weights_BC: np.ndarray) -> np.ndarray:
    """Return the smaller lower bound of the two checkpoints."""
    return np.minimum(_bound(sample.kl, weights_BC), _bound(sample.kl_before, weights_BC))


def context_kl(sample: Sample, weights_BC: np.ndarray) -> np.ndarray:
    """R_ctx(v) = R(v) · CCR(v); which occurrences are kept does not change with the weights."""
    return _in_contexts(summed_kl(sample, weights_BC), sample, weights_BC)


Selector = Callable[[Sample, np.ndarray], np.ndarray]
"""A score per set of weights and type, float64 (B, U)."""
SELECTORS: dict[str, Selector] = {
    "lower bound": lower_bound,
    "freq x mean": summed_kl,
    "mean": mean_kl,
    "joint": joint_kl,
    "context": context_kl,
}


def selector_of(stage: str, joint: bool) -> Selector:
    """Return the score that ranks at a stage; ``joint`` replaces R by the smaller R of the two checkpoints."""
    if stage == "bound":
        return joint_bound if joint else lower_bound
    base = joint_kl if joint else summed_kl
    if stage == "score":
        return base
    return lambda sample, weights_BC: _in_contexts(base(sample, weights_BC), sample, weights_BC)


def _bound(kl_CU: Any, weights_BC: np.ndarray) -> np.ndarray:
    total = weighted_totals(weights_BC, kl_CU) / ONE
    count = weights_BC.sum(axis=1, keepdims=True).astype(np.float64)
    squares = weighted_totals(weights_BC, kl_CU.astype(np.float64).power(2)) / ONE**2
    variance = np.maximum(squares - total**2 / count, 0) * count / np.maximum(count - 1, 1)
    return total * np.exp(-LOWER_BOUND_Z * _ratio(np.sqrt(variance), total))


def _in_contexts(score_BU: np.ndarray, sample: Sample, weights_BC: np.ndarray) -> np.ndarray:
    """A score times CCR, rounded only once, by the division: equal scores stay equal, so that they tie."""
    kept_BU, freq_BU = (weighted_totals(weights_BC, matrix) for matrix in (sample.kept, sample.freq))
    return _ratio(score_BU * kept_BU, freq_BU)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)
