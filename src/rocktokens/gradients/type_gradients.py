"""Summed gradients of types, and what they say of each type: sizes, cancellation and directions. No torch.

With g_i the gradient at occurrence i, O(v) the n occurrences of type v, S_v = Σ_{O(v)} g_i and ḡ_v = S_v / n
(docs/method.md, section 5):

1. Sizes: ‖ḡ_v‖, the mean of ‖g_i‖, and the type's share of Σ_i ‖g_i‖ over all positions.
2. Cancellation: the *alignment* ‖ḡ_v‖ / mean‖g_i‖ is 1 where every occurrence pushes the same way and about 1/√n where
   directions are random. The *coherence* (‖S_v‖² − Σ‖g_i‖²) / ((Σ‖g_i‖)² − Σ‖g_i‖²), the mean cosine of two occurrences
   weighted by the product of their lengths, is 1 and 0 there, whatever n and whatever the lengths: use it to compare
   types of different frequency.
3. Directions: cosines with G = Σ_i g_i and with G_bal = Σ_v ḡ_v, and contrib(v) = n ‖ḡ_v‖ cos(ḡ_v, G_bal).
4. Chance: the cosine of a type's mean over one random half of the prompts with that over the other (``half_cosine``).

Every number belongs to one space, ``hidden`` or ``vocabulary``. In a sketched space it has a standard error
(rocktokens.gradients.estimates), and may lie beyond the bounds of what it estimates. A number that is not defined, such
as the cosine of a zero gradient, is NaN.

Shape legend: U types, R rows of sums, W numbers of a vector, V vocabulary.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rocktokens.gradients import estimates
from rocktokens.gradients.estimates import Estimate, defined, ratio
from rocktokens.gradients.records import Space, WholeGradient

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("norm", "mean_norm", "share", "alignment", "coherence", "cos_balanced", "cos_pooled", "contribution")
BLOCK_ROWS = 128
"""Types whose sums are in memory in float64 at once."""


@dataclass(frozen=True, slots=True)
class SpaceSums:
    """The sums of one space."""

    vectors_RW: np.ndarray
    """Of the gradients; row u is type u, or the first half of it where it has a second row."""
    norm_U: np.ndarray
    """float64: Σ‖g_i‖, exact in a sketched space too."""
    square_U: np.ndarray
    """float64: Σ‖g_i‖², likewise."""
    sketch: tuple[int, int] | None = None
    """Width and seed; None where the sums are exact."""

    @property
    def sketch_width(self) -> float:
        """What errors shrink with; infinite where the sums are exact."""
        return math.inf if self.sketch is None else self.sketch[0]


@dataclass(frozen=True, slots=True)
class TypeGradients:
    """The summed gradients of every type that occurs, of one student on one set of rollouts.

    Example: 3 types, the second of them split, have rows 0 to 3 and ``second_row == [-1, 3, -1]``.
    """

    token_ids: np.ndarray
    """int64 (U,): ascending."""
    freq: np.ndarray
    """int64 (U,)."""
    second_row: np.ndarray
    """int64 (U,): the row of a type's second half of the prompts, −1 where one row holds all of it."""
    hidden: SpaceSums
    vocabulary: SpaceSums
    pooled_V: np.ndarray
    """float64: G over the vocabulary, exact."""
    balanced_V: np.ndarray
    """float64: G_bal, exact."""
    rollouts_sha256: str = ""
    """Of the rollouts they were taken over; "" where there is no name for them."""

    def sums(self, space: Space) -> SpaceSums:
        """Return the sums of one space."""
        return self.hidden if space == "hidden" else self.vocabulary

    def totals(self, space: Space, types_n: np.ndarray) -> np.ndarray:
        """Return float64 (n, W): the sums S_v of a few types, given by index."""
        vectors_RW, second_n = self.sums(space).vectors_RW, self.second_row[types_n]
        totals_nW = vectors_RW[types_n].astype(np.float64)
        totals_nW[second_n >= 0] += vectors_RW[second_n[second_n >= 0]]
        return totals_nW

    def weighted_sum(self, space: Space, weights_U: np.ndarray) -> np.ndarray:
        """Return float64 (W,): Σ_v weight_v · S_v."""
        total_W = np.zeros(self.sums(space).vectors_RW.shape[1])
        for types_n in _a_few_at_a_time(np.flatnonzero(weights_U)):
            total_W += weights_U[types_n] @ self.totals(space, types_n)
        return total_W

    def pooled(self, space: Space) -> np.ndarray:
        """Return float64 (W,): G, sketched where the space is."""
        return self.weighted_sum(space, np.ones(len(self.freq)))

    def balanced(self, space: Space) -> np.ndarray:
        """Return float64 (W,): G_bal, sketched where the space is."""
        return self.weighted_sum(space, 1 / self.freq)

    def products(self, space: Space, *others_W: np.ndarray) -> list[np.ndarray]:
        """Return ‖S_v‖² and the products of S_v with each of the others, (U,)."""
        found = []
        for types_n in _a_few_at_a_time(np.arange(len(self.freq))):
            x_nW = self.totals(space, types_n)
            found.append([_dots(x_nW, x_nW), *(x_nW @ other_W for other_W in others_W)])
        return [np.concatenate(column) for column in zip(*found, strict=True)]


@dataclass(frozen=True, slots=True)
class TypeTable:
    """What the gradients of each type are like in one space, all (U,)."""

    space: Space
    token_ids: np.ndarray
    freq: np.ndarray
    norm: Estimate
    """‖ḡ_v‖."""
    mean_norm: np.ndarray
    """Mean of ‖g_i‖; exact."""
    share: np.ndarray
    """Of Σ‖g_i‖ over all positions; exact."""
    alignment: Estimate
    coherence: Estimate
    """NaN for a type with fewer than two occurrences that have a gradient."""
    cos_balanced: Estimate
    cos_pooled: Estimate
    contribution: Estimate
    """contrib(v)."""

    def value(self, name: str) -> np.ndarray:
        """Return one of ``COLUMNS``, without its errors."""
        column = getattr(self, name)
        return column.value if isinstance(column, Estimate) else column

    def columns(self) -> dict[str, np.ndarray]:
        """Return every one of ``COLUMNS`` by name; errors in columns of their own."""
        found: dict[str, np.ndarray] = {}
        for name in COLUMNS:
            found[name] = self.value(name)
            if isinstance(column := getattr(self, name), Estimate):
                found[f"{name}_error"] = column.error
        return found

    def to_frame(self) -> "pd.DataFrame":
        """Return a pandas frame with one row per type."""
        import pandas as pd

        return pd.DataFrame({"token_id": self.token_ids, "freq": self.freq, **self.columns()})


def describe_types(gradients: TypeGradients, space: Space) -> TypeTable:
    """Describe sizes, cancellation and directions of every type in one space."""
    sums, freq_U = gradients.sums(space), gradients.freq.astype(np.float64)
    width = sums.sketch_width
    balanced_W, pooled_W = gradients.balanced(space), gradients.pooled(space)
    square_U, with_balanced_U, with_pooled_U = gradients.products(space, balanced_W, pooled_W)
    norm = estimates.norm(square_U, width)
    balanced = (with_balanced_U, square_U, balanced_W @ balanced_W, width)
    return TypeTable(
        space=space,
        token_ids=gradients.token_ids,
        freq=gradients.freq,
        norm=norm.scaled(1 / freq_U),
        mean_norm=sums.norm_U / freq_U,
        share=ratio(sums.norm_U, sums.norm_U.sum()),
        alignment=norm.scaled(ratio(1.0, sums.norm_U)),
        coherence=estimates.coherence(square_U, sums.square_U, sums.norm_U, width),
        cos_balanced=estimates.cosine(*balanced),
        cos_pooled=estimates.cosine(with_pooled_U, square_U, pooled_W @ pooled_W, width),
        contribution=estimates.projection(*balanced),
    )


def describe_whole(gradients: TypeGradients, space: Space) -> WholeGradient:
    """Describe the pooled and the balanced gradient in one space."""
    exact = space == "vocabulary"
    pooled_W = gradients.pooled_V if exact else gradients.pooled(space)
    balanced_W = gradients.balanced_V if exact else gradients.balanced(space)
    lengths = np.linalg.norm(pooled_W), np.linalg.norm(balanced_W)
    return WholeGradient(
        space=space,
        pooled_norm=defined(lengths[0]),
        balanced_norm=defined(lengths[1]),
        cosine=defined(ratio(pooled_W @ balanced_W, lengths[0] * lengths[1])),
        alignment=defined(ratio(lengths[0], gradients.sums(space).norm_U.sum())),
    )


def half_cosine(first: TypeGradients, second: TypeGradients, space: Space) -> np.ndarray:
    """Return the cosine (U,) of a type's first half in one pass with its second half in another; NaN without halves.

    With one pass given twice: what chance alone does to the direction of a mean.
    """
    a_RW, b_RW = first.sums(space).vectors_RW, second.sums(space).vectors_RW
    cosine_U = np.full(len(first.freq), np.nan)
    for types_n in _a_few_at_a_time(np.flatnonzero(first.second_row >= 0)):
        cosine_U[types_n] = _row_cosine(a_RW[types_n], b_RW[second.second_row[types_n]])
    return cosine_U


def total_cosine(first: TypeGradients, second: TypeGradients, space: Space) -> np.ndarray:
    """Return the cosine (U,) of a type's mean gradients in two passes over the same rollouts."""
    types_U = np.arange(len(first.freq))
    pairs = ([each.totals(space, types_n) for each in (first, second)] for types_n in _a_few_at_a_time(types_U))
    return np.concatenate([_row_cosine(*pair) for pair in pairs])


def members(token_ids_U: np.ndarray, ids: Collection[int] | np.ndarray) -> np.ndarray:
    """Return bool (U,): which types are among the ids; ids that do not occur are ignored."""
    return np.isin(token_ids_U, np.fromiter(ids, dtype=np.int64))


def _a_few_at_a_time(types: np.ndarray) -> Iterator[np.ndarray]:
    return (types[start : start + BLOCK_ROWS] for start in range(0, len(types), BLOCK_ROWS))


def _row_cosine(x_nW: np.ndarray, y_nW: np.ndarray) -> np.ndarray:
    x_nW, y_nW = x_nW.astype(np.float64), y_nW.astype(np.float64)
    return ratio(_dots(x_nW, y_nW), np.sqrt(_dots(x_nW, x_nW) * _dots(y_nW, y_nW)))


def _dots(x_nW: np.ndarray, y_nW: np.ndarray) -> np.ndarray:
    return np.einsum("nw,nw->n", x_nW, y_nW)
