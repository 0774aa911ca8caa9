"""The smallest loss of accuracy that a sample of prompts can show (docs/method.md, section 6).

Without it, "no effect found" says nothing.

1. The clearest ban turns right answers wrong and does nothing else. With L of N prompts lost, all answers of a prompt
   together, the rule of ``verdicts`` calls it a pillar when L is large enough in three ways:
   L/N ≥ ε; the sign-flip p, 2^(1−L), is at most α; and the bootstrap interval lies below 0. A replicate
   loses Binomial(N, L/N) prompts, so the interval's upper end is minus the α/2 quantile of that over N, as exact as the
   resamples are many.
2. Let L* be the least such L. If every prompt is lost with chance δ, a pillar is seen with chance
   P(Binomial(N, δ) ≥ L*); the δ that makes it 0.8 is the 0.8 quantile of Beta(L*, N − L* + 1).

Answers of one prompt are taken to be lost together, the worst case: more answers per prompt cannot replace prompts.
"""

import numpy as np
from scipy.stats import beta, binom

from rocktokens.knockout.records import Interval
from rocktokens.knockout.verdicts import EXACT, ROUNDING, VerdictRule

POWER = 0.8


def detectable_loss(n_prompts: int, rule: VerdictRule, n_tests: int = 1, noise: Interval = EXACT) -> float:
    """The smallest true loss of accuracy called a pillar with 80 % power, for a ban that changes no other answer.

    Args:
        n_prompts: prompts answered.
        rule: of the verdict.
        n_tests: bans p is corrected for: Benjamini–Hochberg asks for α/n_tests at worst, when nothing else is found.
        noise: as in ``verdicts.paired_effects``.

    Returns:
        A share; 1.0 also where the sample is so small that not even the loss of every prompt would do.
    """
    lost_L = np.arange(1, n_prompts + 1)
    share_L = lost_L / n_prompts
    significant = 2.0 ** (1 - lost_L) <= rule.alpha / n_tests + ROUNDING
    relevant = share_L >= rule.epsilon - ROUNDING
    below_zero = binom.ppf(rule.alpha / 2, n_prompts, share_L) / n_prompts > max(0.0, noise[1]) + ROUNDING
    enough = lost_L[significant & relevant & below_zero]
    return float(beta.ppf(POWER, enough[0], n_prompts - enough[0] + 1)) if len(enough) else 1.0
