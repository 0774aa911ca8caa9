"""Compare two ways of answering the same prompts: a score interval of the difference, and an exact test.

Every prompt is answered S times both ways. An answer that is right one way only is discordant: lost or gained.
d_i, from −S to S, is how many answers to prompt i were gained minus how many were lost.

1. Of n pairs, b lost and c gained, Δ = (c − b)/n. Tango's score interval (1998) holds every δ for which

       (c − b − nδ)² ≤ z² · n(2p + |δ|(1 − |δ|)),       z the 1 − α/2 quantile of the normal distribution,

   p being the most likely chance of the rarer change if the difference is δ: the positive root of
   2n p² + (2n|δ| − (b + c) − (c − b)δ)p − h|δ|(1 − |δ|), h = b for δ ≥ 0, else c. The variance is that under δ, so that
   nothing lost and nothing gained still leaves ±z²/(n + z²). Each end is the only root on its side of Δ, and bisection
   finds it; counts need not be whole numbers.
2. Both ends fall when a pair that agreed is lost and rise when one is gained, whatever else is known; dividing b, c and
   n by the same number ≥ 1 moves both outwards. (Checked over all counts of small samples and at random by tests.)
3. Answers to one prompt are not independent. The design effect is the variance of Δ between prompts over that of as
   many independent answers, Σ d_i² − D²/N over b + c − D²/(NS) with D = Σ d_i, at least 1 and never above S. Both are
   counted with one more prompt that changed in all its answers: where little has changed there is little to estimate it
   from, and answers to one prompt are then taken to change together. b, c and n = NS are divided by it. With one answer
   per prompt it is 1; without any discordance it is S, and n the number of prompts.
4. The sign-flip test: if the two ways do not differ, d_i and −d_i are equally likely for every prompt. With B_i fair
   coins, Σ ±|d_i| = 2 Σ |d_i| B_i − Σ |d_i|, so the tails are those of A = Σ |d_i| B_i, a sum of scaled
   binomials, one for each size |d| that occurs; their convolution is its exact distribution. With S = 1 this is
   McNemar's exact test.

Tango: https://doi.org/10.1002/(SICI)1097-0258(19980430)17:8<891::AID-SIM780>3.0.CO;2-B

Shape legend: K comparisons, N prompts, R = NS answers, those to one prompt one after another.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import binom, norm

HALVINGS = 60
"""Of a bracket no wider than 2: what is left is below the rounding of an end."""


@dataclass(frozen=True, slots=True)
class Discordance:
    """What differs between two ways of answering, as far as Δ and its interval depend on it; K comparisons."""

    lost_K: np.ndarray
    """Answers that are right the first way only."""
    gained_K: np.ndarray
    squares_K: np.ndarray
    """Σ d_i² over the prompts."""
    n_prompts: int
    num_samples: int

    @classmethod
    def of(cls, changes_KR: np.ndarray, num_samples: int) -> "Discordance":
        """Count changes of single answers: −1 lost, 1 gained, 0 neither."""
        by_prompt_KN = prompt_changes(changes_KR, num_samples)
        return cls(
            (changes_KR < 0).sum(axis=1),
            (changes_KR > 0).sum(axis=1),
            (by_prompt_KN**2).sum(axis=1),
            by_prompt_KN.shape[1],
            num_samples,
        )

    @property
    def answers(self) -> int:
        """Of one comparison."""
        return self.n_prompts * self.num_samples

    @property
    def deltas(self) -> np.ndarray:
        """Share of right answers the second way minus the first."""
        return (self.gained_K - self.lost_K) / self.answers

    @property
    def design_effects(self) -> np.ndarray:
        """How many answers count as one: from 1 to S."""
        discordant_K = self.lost_K + self.gained_K
        squared_sum_K = (self.gained_K - self.lost_K) ** 2
        between_K = self.squares_K + self.num_samples**2 - squared_sum_K / self.n_prompts
        independent_K = discordant_K + self.num_samples - squared_sum_K / self.answers
        return np.maximum(between_K / independent_K, 1.0)

    def interval(self, alpha: float) -> tuple[np.ndarray, np.ndarray]:
        """Return both ends (K,) of the 1 − α score interval of Δ."""
        effect_K = self.design_effects
        return score_interval(self.lost_K / effect_K, self.gained_K / effect_K, self.answers / effect_K, alpha)


def prompt_changes(changes_KR: np.ndarray, num_samples: int) -> np.ndarray:
    """Add up the changes of the answers to each prompt: (K, N)."""
    n_comparisons, n_answers = changes_KR.shape
    return changes_KR.reshape(n_comparisons, n_answers // num_samples, num_samples).sum(axis=2)


def score_interval(
    lost: np.ndarray, gained: np.ndarray, pairs: np.ndarray | float, alpha: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return both ends of Tango's 1 − α interval of (gained − lost)/pairs; swapping the counts negates it exactly."""
    critical = norm.isf(alpha / 2) ** 2
    # The lower end is minus the upper end with losses for gains, so both are found at once.
    against, towards = np.stack([gained, lost]), np.stack([lost, gained])
    inside = (towards - against) / pairs
    outside = np.ones_like(inside)
    for _ in range(HALVINGS):
        middle = (inside + outside) / 2
        apart = pairs * middle - (towards - against)
        is_outside = apart**2 > critical * score_variance(against, towards, pairs, middle)
        inside, outside = np.where(is_outside, inside, middle), np.where(is_outside, middle, outside)
    return -outside[0], outside[1]


def score_variance(
    lost: np.ndarray, gained: np.ndarray, pairs: np.ndarray | float, difference: np.ndarray | float
) -> np.ndarray:
    """Return the variance of gained − lost if this is the true difference, at its most likely chances."""
    size = np.abs(difference)
    linear = 2 * pairs * size - (lost + gained) - (gained - lost) * difference
    constant = np.where(np.greater_equal(difference, 0), lost, gained) * size * (1 - size)
    root = np.sqrt(linear**2 + 8 * pairs * constant)
    # The same root twice, each without a difference of two positive numbers.
    rarer = np.where(linear > 0, 2 * constant / np.where(linear > 0, linear + root, 1.0), (root - linear) / (4 * pairs))
    return pairs * (2 * rarer + size * (1 - size))


class SignFlipTest(NamedTuple):
    """Both tails of a paired sign-flip test, the sum that was seen included in each."""

    at_most: float
    """Chance, under random signs, of a sum at most as high as the one seen."""
    at_least: float
    """Chance of one at least as high."""

    @property
    def p(self) -> float:
        """Two-sided: twice the smaller tail, at most 1; 1 where nothing differs."""
        return min(1.0, 2 * min(self))


def sign_flip_test(differences_N: np.ndarray) -> SignFlipTest:
    """Make the exact paired sign-flip test of integer differences.

    The tails are P(A ≤ G) and P(A ≥ G), G being the sum of the gains. With the coins of the gains turned over,
    G − A = Σ d_i B_i, so they are P(Σ d_i B_i ≥ 0) and P(Σ d_i B_i ≤ 0): the first can only rise with a difference, the
    second only fall.
    """
    gained = int(differences_N[differences_N > 0].sum())
    lost = -int(differences_N[differences_N < 0].sum())
    chances = flip_chances(np.bincount(np.abs(differences_N)), min(gained, lost))
    smaller, larger = float(chances.sum()), 1 - float(chances[:-1].sum())
    return SignFlipTest(smaller, larger) if gained <= lost else SignFlipTest(larger, smaller)


def flip_chances(prompts_by_size: np.ndarray, upto: int) -> np.ndarray:
    """Return P(A = a) for a = 0 … ``upto``, given how many prompts have differences of size 0, 1, ….

    A is symmetric about half of Σ |d|, so both tails follow from its values up to the smaller of gains and losses.
    """
    chances = np.zeros(upto + 1)
    chances[0] = 1
    for size, count in enumerate(prompts_by_size):
        if size and count:
            flips = np.arange(min(count, upto // size) + 1)
            chances = _add_scaled(chances, size, binom.pmf(flips, count, 0.5))
    return chances


def _add_scaled(chances: np.ndarray, size: int, flip_chances: np.ndarray) -> np.ndarray:
    """The distribution after adding ``size`` times an independent count: one convolution per remainder of ``size``."""
    total = np.empty_like(chances)
    for first in range(min(size, len(chances))):
        own = chances[first::size]
        total[first::size] = np.convolve(own, flip_chances)[: len(own)]
    return total
