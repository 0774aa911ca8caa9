"""What loss of accuracy a sweep could have shown, by the rule of its verdicts (rocktokens.inference.power)."""

import numpy as np

from rocktokens.inference import power
from rocktokens.knockout.records import Interval
from rocktokens.knockout.verdicts import EXACT, Rule


def detectable_loss(n_prompts: int, rule: Rule, n_tests: int = 1, noise: Interval = EXACT) -> float:
    """Return the smallest true loss called a pillar with 80 % power, for a ban that changes no other answer."""
    return power.detectable_loss(n_prompts, rule.alpha, rule.epsilon, n_tests, noise[1])


def detectable_by_ban(differences_KN: np.ndarray, num_samples: int, rule: Rule, noise: Interval = EXACT) -> np.ndarray:
    """Return float64 (K,): the smallest loss shown with 80 % power by bans whose answers scatter as these did."""
    return power.detectable_scattered_loss(differences_KN / num_samples, rule.alpha, rule.epsilon, noise[1])
