"""Say what a sample of prompts could have shown, so that "no effect found" means something, and what would show it.

1. The clearest change turns right answers wrong and does nothing else. With L of N prompts lost, all answers to a
   prompt together, it is found when L is large enough in two ways: L/N reaches the least loss of interest, and the
   score interval (``inference.paired``) of L losses and no gain lies below 0, which takes L > z², four at α = 0.05.
   Corrected for the number of tests it needs a third: the sign-flip p, 2^(1−L), is at most α over that number.
2. Let L* be the least such L. If every prompt is lost with chance δ, the loss is found with chance
   P(Binomial(N, δ) ≥ L*); the δ that makes it 0.8 is the 0.8 quantile of Beta(L*, N − L* + 1).
3. A change that also moves other answers, or moves them both ways, is harder to see: the interval lies below 0 where
   the mean of the differences is z_{1−α/2} times their root mean square over √N below it, and in four samples of five
   the mean is no more than z_{0.8} times their standard deviation over √N above the true one.
4. No change is shown by an interval within ± a margin. If a share ψ of the pairs is discordant, either way alike, then
   c − b stays within z_{0.9}·√(nψ) in four samples of five. The least n for which the score interval at that end is
   still within the margin is what a neutral verdict needs; where nothing differs it is z²(1 − margin)/margin.

Answers to one prompt are taken to be lost together, the worst case: more answers per prompt cannot replace prompts.

Shape legend: K comparisons, N prompts.
"""

import numpy as np
from scipy.stats import beta, norm

from rocktokens.inference.paired import score_interval, score_variance

POWER = 0.8
ROUNDING = 1e-12
"""A share that equals a bound in exact arithmetic reaches it."""
MOST_PAIRS = 1 << 50


def detectable_loss(
    n_prompts: int, alpha: float, least: float = 0.0, n_tests: int | None = None, noise: float = 0.0
) -> float:
    """Return the smallest true loss found with 80 % power when no other answer changes.

    Args:
        n_prompts: prompts answered.
        alpha: of the test and of the interval.
        least: the least loss of interest, as a share of the prompts.
        n_tests: tests that p is corrected for: Benjamini–Hochberg asks for α/n_tests at worst, when nothing else is
            found; default: the interval decides alone.
        noise: by how much the interval must clear 0.

    Returns:
        A share; 1.0 also where the sample is so small that not even the loss of every prompt would do.
    """
    lost_L = np.arange(1, n_prompts + 1)
    _, high_L = score_interval(lost_L, np.zeros_like(lost_L), float(n_prompts), alpha)
    enough_L = (lost_L / n_prompts >= least - ROUNDING) & (high_L < -max(0.0, noise) - ROUNDING)
    if n_tests is not None:
        enough_L &= 2.0 ** (1 - lost_L) <= alpha / n_tests + ROUNDING
    enough = lost_L[enough_L]
    return float(beta.ppf(POWER, enough[0], n_prompts - enough[0] + 1)) if len(enough) else 1.0


def detectable_scattered_loss(
    shares_KN: np.ndarray, alpha: float, least: float = 0.0, noise: float = 0.0
) -> np.ndarray:
    """Return float64 (K,): the smallest loss found with 80 % power where answers scatter as these did.

    At least ``detectable_loss``, at most 1; ``shares_KN`` are differences of the share of right answers per prompt.
    """
    n_prompts = shares_KN.shape[1]
    error_K, without_effect_K = shares_KN.std(axis=1), np.sqrt((shares_KN**2).mean(axis=1))
    apart_K = norm.isf(alpha / 2) * without_effect_K + norm.ppf(POWER) * error_K
    losses_K = apart_K / np.sqrt(n_prompts) + max(0.0, noise)
    return np.clip(losses_K, detectable_loss(n_prompts, alpha, least, noise=noise), 1.0)


def neutral_pairs(discordance_K: np.ndarray, alpha: float, margin: float) -> np.ndarray:
    """Return int64 (K,): pairs with which a change that is none is shown to be within ±margin with 80 % power.

    Args:
        discordance_K: shares of the pairs that differ, as many gained as lost.
        alpha: of the interval.
        margin: above 0, at most 1.
    """
    critical, off = norm.isf(alpha / 2), norm.ppf((1 + POWER) / 2)
    short_K = np.zeros(len(discordance_K), dtype=np.int64)
    enough_K = np.full(len(discordance_K), MOST_PAIRS)
    while (enough_K - short_K > 1).any():
        pairs_K = (short_K + enough_K) // 2
        discordant_K = pairs_K * discordance_K
        away_K = np.minimum(off * np.sqrt(discordant_K), discordant_K)
        lost_K, gained_K = (discordant_K - away_K) / 2, (discordant_K + away_K) / 2
        room_K = pairs_K * margin - away_K
        is_enough = room_K >= critical * np.sqrt(score_variance(lost_K, gained_K, pairs_K, margin)) - ROUNDING
        short_K, enough_K = np.where(is_enough, short_K, pairs_K), np.where(is_enough, pairs_K, enough_K)
    return enough_K
