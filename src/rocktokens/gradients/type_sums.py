"""Summed gradients of types: the record that a pass writes and every figure of logit space is read from. No torch.

Shape legend: U types, R rows of sums, W numbers of a vector.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

Space = Literal["hidden", "vocabulary"]
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
        """Those of one space."""
        return self.hidden if space == "hidden" else self.vocabulary

    def members(self, token_ids: Collection[int] | np.ndarray) -> np.ndarray:
        """Bool (U,): which types are among the ids; ids that do not occur are passed over."""
        return np.isin(self.token_ids, np.fromiter(token_ids, dtype=np.int64))

    def totals(self, space: Space, types_n: np.ndarray) -> np.ndarray:
        """float64 (n, W): the sums S_v of a few types, given by index."""
        vectors_RW, second_n = self.sums(space).vectors_RW, self.second_row[types_n]
        totals_nW = vectors_RW[types_n].astype(np.float64)
        totals_nW[second_n >= 0] += vectors_RW[second_n[second_n >= 0]]
        return totals_nW

    def weighted_sum(self, space: Space, weights_U: np.ndarray) -> np.ndarray:
        """float64 (W,): Σ_v weight_v · S_v."""
        total_W = np.zeros(self.sums(space).vectors_RW.shape[1])
        for types_n in blocks(np.flatnonzero(weights_U)):
            total_W += weights_U[types_n] @ self.totals(space, types_n)
        return total_W

    def pooled(self, space: Space) -> np.ndarray:
        """float64 (W,): G, sketched where the space is."""
        return self.weighted_sum(space, np.ones(len(self.freq)))

    def balanced(self, space: Space) -> np.ndarray:
        """float64 (W,): G_bal, sketched where the space is."""
        return self.weighted_sum(space, 1 / self.freq)


def blocks(types: np.ndarray) -> Iterator[np.ndarray]:
    """The indices, a few at a time."""
    return (types[start : start + BLOCK_ROWS] for start in range(0, len(types), BLOCK_ROWS))
