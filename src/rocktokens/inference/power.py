"""Say what loss a sample of prompts could have shown, so that "no effect found" means something.

1. The clearest change turns right answers wrong and does nothing else. With L of N prompts lost, all answers to a
   prompt together, a paired test finds it when L is large enough in three ways: L/N reaches the least loss of interest;
   the sign-flip p, 2^(1−L), is at most α; and the bootstrap interval lies below 0. A replicate loses Binomial(N, L/N)
   prompts, so the interval's upper end is minus the α/2 quantile of that over N, exact in the limit of many resamples.
2. Let L* be the least such L. If every prompt is lost with chance δ, the loss is found with chance
   P(Binomial(N, δ) ≥ L*); the δ that makes it 0.8 is the 0.8 quantile of Beta(L*, N − L* + 1).
3. A change that also moves other answers, or moves them both ways, is harder to see: with the spread of its
   differences the loss must be z_{1−α/2} + z_{0.8} standard errors below 0.

Answers to one prompt are taken to be lost together, the worst case: more answers per prompt cannot replace prompts.

Shape legend: K comparisons, N prompts.
"""

import numpy as np
from scipy.stats import beta, binom, norm

POWER = 0.8
ROUNDING = 1e-12
"""A share that equals a bound in exact arithmetic reaches it."""


def detectable_loss(n_prompts: int, alpha: float, least: float = 0.0, n_tests: int = 1, noise: float = 0.0) -> float:
    """Return the smallest true loss found with 80 % power when no other answer changes.

    Args:
        n_prompts: prompts answered.
        alpha: of the test and of the interval.
        least: the least loss of interest, as a share of the prompts.
        n_tests: tests that p is corrected for: Benjamini–Hochberg asks for α/n_tests at worst, when nothing else is
            found.
        noise: by how much the interval must clear 0.

    Returns:
        A share; 1.0 also where the sample is so small that not even the loss of every prompt would do.
    """
    lost_L = np.arange(1, n_prompts + 1)
    share_L = lost_L / n_prompts
    significant = 2.0 ** (1 - lost_L) <= alpha / n_tests + ROUNDING
    relevant = share_L >= least - ROUNDING
    below_zero = binom.ppf(alpha / 2, n_prompts, share_L) / n_prompts > max(0.0, noise) + ROUNDING
    enough = lost_L[significant & relevant & below_zero]
    return float(beta.ppf(POWER, enough[0], n_prompts - enough[0] + 1)) if len(enough) else 1.0


def detectable_scattered_loss(
    shares_KN: np.ndarray, alpha: float, least: float = 0.0, noise: float = 0.0
) -> np.ndarray:
    """Return float64 (K,): the smallest loss found with 80 % power where answers scatter as these did.

    At least ``detectable_loss``, at most 1; ``shares_KN`` are differences of the share of right answers per prompt.
    """
    n_prompts = shares_KN.shape[1]
    errors_K = shares_KN.std(axis=1) / np.sqrt(n_prompts)
    losses_K = (norm.ppf(1 - alpha / 2) + norm.ppf(POWER)) * errors_K + max(0.0, noise)
    return np.clip(losses_K, detectable_loss(n_prompts, alpha, least, noise=noise), 1.0)
