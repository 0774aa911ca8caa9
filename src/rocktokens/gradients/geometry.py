"""What summed gradients say of each type: sizes, cancellation and directions (METHOD 5).

With g_i the gradient at occurrence i, O(v) the n occurrences of type v, S_v = Σ_{O(v)} g_i and ḡ_v = S_v / n:

1. Sizes: ‖ḡ_v‖, the mean of ‖g_i‖, and the type's share of Σ_i ‖g_i‖ over all positions.
2. Cancellation: the *alignment* ‖ḡ_v‖ / mean‖g_i‖ is 1 where every occurrence pushes the same way and about 1/√n where
   directions are random. The *coherence* (‖S_v‖² − Σ‖g_i‖²) / ((Σ‖g_i‖)² − Σ‖g_i‖²), the mean cosine of two occurrences
   weighted by the product of their lengths, is 1 and 0 there, whatever n and whatever the lengths: use it to compare
   types of different frequency.
3. Directions: cosines with G = Σ_i g_i and with G_bal = Σ_v ḡ_v, and contrib(v) = n ‖ḡ_v‖ cos(ḡ_v, G_bal).
4. Chance: the cosine of a type's mean over one random half of the prompts with that over the other (``split_half``).

Every number belongs to one space, ``hidden`` or ``vocabulary``. In a sketched space it has a standard error
(rocktokens.gradients.estimates), and may lie beyond the bounds of what it estimates. A number that is not defined, such
as the cosine of a zero gradient, is NaN.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rocktokens.gradients import estimates
from rocktokens.gradients.estimates import Estimate, ratio
from rocktokens.gradients.type_sums import Space, TypeGradients, blocks

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("norm", "mean_norm", "share", "alignment", "coherence", "cos_balanced", "cos_pooled", "contribution")


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
    """NaN for a type of which less than two occurrences have a gradient."""
    cos_balanced: Estimate
    cos_pooled: Estimate
    contribution: Estimate
    """contrib(v)."""

    def value(self, name: str) -> np.ndarray:
        """One of ``COLUMNS``, without its errors."""
        column = getattr(self, name)
        return column.value if isinstance(column, Estimate) else column

    def to_frame(self) -> "pd.DataFrame":
        """A pandas frame, one row a type; errors in columns of their own."""
        import pandas as pd

        columns: dict[str, np.ndarray] = {"token_id": self.token_ids, "freq": self.freq}
        for name in COLUMNS:
            columns[name] = self.value(name)
            if isinstance(column := getattr(self, name), Estimate):
                columns[f"{name}_error"] = column.error
        return pd.DataFrame(columns)


@dataclass(frozen=True, slots=True)
class WholeGradient:
    """Both sums over all types in one space, exact in either."""

    space: Space
    pooled_norm: float
    """‖G‖."""
    balanced_norm: float
    """‖G_bal‖."""
    cosine: float
    """Of the two."""
    alignment: float
    """‖G‖ / Σ‖g_i‖: 1 where all positions push one way."""


def describe_types(gradients: TypeGradients, space: Space) -> TypeTable:
    """Sizes, cancellation and directions of every type in one space."""
    sums, freq_U = gradients.sums(space), gradients.freq.astype(np.float64)
    width = sums.sketch_width
    balanced_W, pooled_W = gradients.balanced(space), gradients.pooled(space)
    square_U, with_balanced_U, with_pooled_U = products(gradients, space, balanced_W, pooled_W)
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
    """The pooled and the balanced gradient in one space."""
    exact = space == "vocabulary"
    pooled_W = gradients.pooled_V if exact else gradients.pooled(space)
    balanced_W = gradients.balanced_V if exact else gradients.balanced(space)
    lengths = np.linalg.norm(pooled_W), np.linalg.norm(balanced_W)
    return WholeGradient(
        space=space,
        pooled_norm=float(lengths[0]),
        balanced_norm=float(lengths[1]),
        cosine=float(ratio(pooled_W @ balanced_W, lengths[0] * lengths[1])),
        alignment=float(ratio(lengths[0], gradients.sums(space).norm_U.sum())),
    )


def split_half(gradients: TypeGradients, space: Space) -> Estimate:
    """The cosine of each type's mean gradients over the two halves of the prompts, (U,); NaN where it has no halves."""
    return half_cosine(gradients, gradients, space)


def half_cosine(first: TypeGradients, second: TypeGradients, space: Space) -> Estimate:
    """The cosine (U,) of a type's first half in one pass with its second half in another over the same rollouts."""
    split_S = np.flatnonzero(first.second_row >= 0)
    a, b = first.sums(space), second.sums(space)
    found = [
        _row_cosine(a.vectors_RW[types_n], b.vectors_RW[second.second_row[types_n]], a.sketch_width)
        for types_n in blocks(split_S)
    ]
    spread = np.full((2, len(first.freq)), np.nan)
    spread[:, split_S] = np.hstack([np.zeros((2, 0)), *found])
    return Estimate(*spread)


def total_cosine(first: TypeGradients, second: TypeGradients, space: Space) -> Estimate:
    """The cosine (U,) of a type's mean gradients in two passes over the same rollouts."""
    types_U, width = np.arange(len(first.freq)), first.sums(space).sketch_width
    found = [
        _row_cosine(first.totals(space, types_n), second.totals(space, types_n), width) for types_n in blocks(types_U)
    ]
    return Estimate(*np.hstack(found))


def products(gradients: TypeGradients, space: Space, *others_W: np.ndarray) -> list[np.ndarray]:
    """‖S_v‖² and the products of S_v with each of the others, (U,)."""
    found = []
    for types_n in blocks(np.arange(len(gradients.freq))):
        x_nW = gradients.totals(space, types_n)
        found.append([_dots(x_nW, x_nW), *(x_nW @ other_W for other_W in others_W)])
    return [np.concatenate(column) for column in zip(*found, strict=True)]


def _row_cosine(x_nW: np.ndarray, y_nW: np.ndarray, width: float) -> Estimate:
    x_nW, y_nW = x_nW.astype(np.float64), y_nW.astype(np.float64)
    return estimates.cosine(_dots(x_nW, y_nW), _dots(x_nW, x_nW), _dots(y_nW, y_nW), width)


def _dots(x_nW: np.ndarray, y_nW: np.ndarray) -> np.ndarray:
    return np.einsum("nw,nw->n", x_nW, y_nW)
