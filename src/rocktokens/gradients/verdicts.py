r"""How a claim is decided: by the side of a bound that an interval lies on, or by an exact sign test. No torch.

1. ``holds``: the whole interval, or p ≤ 0.05, on the side of the claim. ``does not hold``: on the other side.
2. ``cannot be told here``: neither, or the numbers do not exist.
3. Rocks that can stand in for each other, such as ``\boxed`` and ``\mathbf``, have one gradient between them and are
   not independent. A sign test over rocks therefore counts directions: rocks whose mean gradients lie along one line
   (``directions``) have one vote, that of most of them. Where they are divided, it is not counted, as ties are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from scipy.sparse.csgraph import connected_components
from scipy.stats import binomtest

Verdict = Literal["holds", "does not hold", "cannot be told here"]
Interval = Sequence[float]
UNKNOWN: Verdict = "cannot be told here"
ALPHA = 0.05
ONE_LINE = 0.9
"""The least |cosine| of mean gradients that are taken for one direction."""


@dataclass(frozen=True, slots=True)
class Tally:
    """How many rocks something is true of, and how many directions.

    Example: of three rocks it is true of two, which are one direction: ``Tally(2, 3, 1, 1, 2)``.
    """

    yes: int
    known: int
    """Rocks of which it can be said."""
    directions_for: int
    directions_against: int
    directions: int
    """All of them, the divided ones included."""

    @classmethod
    def of(cls, answers: Sequence[bool | None], directions: Sequence[int]) -> Self:
        """Count answers, None where there is none, by rock and by direction."""
        votes: dict[int, list[bool]] = {}
        for answer, direction in zip(answers, directions, strict=True):
            if answer is not None:
                votes.setdefault(direction, []).append(answer)
        margins = [2 * sum(own) - len(own) for own in votes.values()]
        counts = sum(margin > 0 for margin in margins), sum(margin < 0 for margin in margins), len(margins)
        return cls(sum(map(sum, votes.values())), sum(map(len, votes.values())), *counts)

    @property
    def p(self) -> float:
        """Of the sign test over directions."""
        return sign_test(self.directions_for, self.directions_against)

    @property
    def verdict(self) -> Verdict:
        """Whether it is true of most."""
        if self.p > ALPHA:
            return UNKNOWN
        return "holds" if self.directions_for > self.directions_against else "does not hold"

    @property
    def text(self) -> str:
        """What the sign test rests on."""
        return (
            f"{self.known} rocks, {self.directions} directions: {self.directions_for} for it, "
            f"{self.directions_against} against, sign test p {p_text(self.p)}"
        )


def directions(vectors_nW: np.ndarray) -> np.ndarray:
    """Which direction each vector has, (n,): those with |cosine| > ``ONE_LINE`` share one, and so do chains of them."""
    lengths_n1 = np.linalg.norm(vectors_nW, axis=1, keepdims=True)
    units_nW = vectors_nW / np.where(lengths_n1 > 0, lengths_n1, 1)
    return connected_components(np.abs(units_nW @ units_nW.T) > ONE_LINE, directed=False)[1]


def sign_test(above: int, below: int) -> float:
    """Two-sided p of an exact sign test; 1 where nothing is counted."""
    return float(binomtest(above, above + below).pvalue) if above + below else 1.0


def above(interval: Interval | None, bound: float) -> Verdict:
    """Whether a claim that something lies above a bound holds."""
    if interval is None:
        return UNKNOWN
    return "holds" if interval[0] > bound else "does not hold" if interval[1] < bound else UNKNOWN


def below(interval: Interval | None, bound: float) -> Verdict:
    """Likewise, below it."""
    return above(None if interval is None else (-interval[1], -interval[0]), -bound)


def both(first: Verdict, second: Verdict) -> Verdict:
    """Whether a claim of two parts holds: both must, and it does not if one of them does not."""
    if "does not hold" in (first, second):
        return "does not hold"
    return "holds" if first == second == "holds" else UNKNOWN


def p_text(p: float) -> str:
    """A p, as far as it matters."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
