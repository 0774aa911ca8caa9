"""What a ban does to accuracy, how sure that is, and what to call it (docs/method.md, section 6).

1. Every ban gives one difference per prompt: right answers under the ban minus right answers without, of S answers.
2. Δ is their sum over all N·S answers, its interval comes from the paired bootstrap over prompts, and its p from the
   exact sign-flip test (``rocktokens.inference.paired``). All bans share the bootstrap's draws.
3. The verdict follows from Δ and the interval: pillar, stumbling, neutral, or undecided.
4. Curtailment: while some prompts have not been answered under a ban, each difference still lies between a lowest and a
   highest value. The verdict is settled once no way of filling these in can change it.

Sums are whole numbers; only where they have become shares does a comparison allow for float rounding.

Shape legend: K bans, N prompts, S answers per prompt.
"""

import math
from dataclasses import dataclass

import numpy as np

from rocktokens.errors import RocktokensError
from rocktokens.inference.bootstrap import prompt_draws
from rocktokens.inference.paired import percentile_interval, resampled_sums, sign_flip_test
from rocktokens.run_dir import derive_seed
from rocktokens.types import Interval, Verdict

ROUNDING = 1e-12
"""Far above the rounding of a share and far below the change that one answer makes."""
EXACT: Interval = (0.0, 0.0)
"""The noise of an engine that gives the same answer to the same question whatever else is in the batch."""


@dataclass(frozen=True, slots=True)
class VerdictRule:
    """When a change of accuracy counts, and how its interval is made."""

    alpha: float = 0.05
    """One minus the coverage of the interval."""
    epsilon: float = 0.01
    """The smallest change that is called pillar or stumbling."""
    margin: float = 0.03
    """An interval within ± this is neutral."""
    resamples: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise RocktokensError(f"alpha = {self.alpha} is not between 0 and 1: give a share such as 0.05")
        for name, value in (("epsilon", self.epsilon), ("margin", self.margin)):
            if not 0 <= value <= 1:
                raise RocktokensError(f"{name} = {value} is not from 0 to 1: give a share such as 0.01")
        if self.resamples < 2 / self.alpha:
            raise RocktokensError(
                f"resamples = {self.resamples} is too few for an interval with alpha = {self.alpha}: "
                f"give at least {math.ceil(2 / self.alpha)}"
            )


@dataclass(frozen=True, slots=True)
class Effect:
    """The change of accuracy under one ban."""

    delta: float
    interval: Interval
    p: float
    """Exact paired sign-flip test, two-sided."""


def paired_effects(
    differences_KN: np.ndarray, num_samples: int, rule: VerdictRule, noise: Interval = EXACT
) -> list[Effect]:
    """Estimate the effect of every ban, with the interval of a paired bootstrap over prompts, corrected in two ways.

    The percentile bootstrap is too narrow where few prompts differ: four losses and no gain, of however many prompts,
    exclude 0, although four coins fall alike in one of eight cases. So an interval that excludes 0 on a side where the
    exact sign-flip test does not reject at α/2 has its end moved to 0.

    An engine that rounds differently from batch to batch changes answers without any ban. The interval of Δ between two
    free runs of it moves the ends outwards, so that its noise cannot pass as an effect.

    Args:
        differences_KN: integers, right answers under the ban minus right answers without.
        num_samples: answers per prompt.
        rule: gives α, resamples and seed; the same rule draws the same prompts in every call.
        noise: the interval of Δ between two free runs, added to every ban's.
    """
    n_prompts = differences_KN.shape[1]
    draws = prompt_draws(n_prompts, rule.resamples, derive_seed(rule.seed, "paired bootstrap"))
    low_K, high_K = percentile_interval(resampled_sums(differences_KN, draws), rule.alpha)
    answers = n_prompts * num_samples
    return [
        _effect(differences_N, int(low), int(high), answers, rule, noise)
        for differences_N, low, high in zip(differences_KN, low_K, high_K, strict=True)
    ]


def _effect(differences_N: np.ndarray, low: int, high: int, answers: int, rule: VerdictRule, noise: Interval) -> Effect:
    test = sign_flip_test(differences_N)
    largest_tail = rule.alpha / 2 + ROUNDING
    if test.at_most > largest_tail:
        high = max(high, 0)
    if test.at_least > largest_tail:
        low = min(low, 0)
    interval = (low / answers + min(0.0, noise[0]), high / answers + max(0.0, noise[1]))
    return Effect(int(differences_N.sum()) / answers, interval, test.p)


def verdict(delta: float, interval: Interval, rule: VerdictRule) -> Verdict:
    """Name a change; a pillar or a stumbling block within ±margin is called that and not neutral."""
    low, high = interval
    if delta <= -rule.epsilon + ROUNDING and high < -ROUNDING:
        return "pillar"
    if delta >= rule.epsilon - ROUNDING and low > ROUNDING:
        return "stumbling"
    return without_effect(interval, rule)


def without_effect(interval: Interval, rule: VerdictRule) -> Verdict:
    """Name a change that is no evidence of an effect."""
    return "neutral" if _within_margin(*interval, rule) else "undecided"


def paper_verdict(verdict: Verdict) -> Verdict:
    """Apply the paper's rule: what the sample cannot decide is neutral."""
    return "neutral" if verdict == "undecided" else verdict


def settled_verdicts(
    lowest_KN: np.ndarray, highest_KN: np.ndarray, num_samples: int, rule: VerdictRule, noise: Interval = EXACT
) -> list[Verdict | None]:
    """Return the verdict of every ban that no outcome of the remaining prompts can change; None where one could.

    Δ, both ends of the bootstrap interval (shared draws) and both tails of the sign-flip test are monotone in every
    difference. So are the ends after they are moved: as differences rise, so does the tail that holds the upper end at
    0, and the tail that holds the lower end there falls. Hence every completion lies between the lowest and the highest
    one in all that a verdict looks at: lowering differences keeps a pillar a pillar, raising them keeps a stumbling
    block one.

    A verdict of pillar, stumbling or neutral is settled if and only if it is returned. Undecided is returned when all
    completions leave ±margin on the same side; where some do on one side and some on the other, None is returned.

    Args:
        lowest_KN: the least each difference can be: itself where it is known, else minus the answers right without the
            ban.
        highest_KN: the most each can be: itself where it is known, else the answers wrong without the ban.
        num_samples: answers per prompt.
        rule: the one the final verdict follows.
        noise: as in ``paired_effects``.
    """
    effects = paired_effects(np.concatenate([lowest_KN, highest_KN]), num_samples, rule, noise)
    n_bans = len(lowest_KN)
    return [_settled(*ends, rule) for ends in zip(effects[:n_bans], effects[n_bans:], strict=True)]


def _settled(lowest: Effect, highest: Effect, rule: VerdictRule) -> Verdict | None:
    at_lowest = verdict(lowest.delta, lowest.interval, rule)
    at_highest = verdict(highest.delta, highest.interval, rule)
    if at_highest == "pillar":
        return "pillar"
    if at_lowest == "stumbling":
        return "stumbling"
    if at_lowest == "pillar" or at_highest == "stumbling":
        return None
    if _within_margin(lowest.interval[0], highest.interval[1], rule):
        return "neutral"
    return None if _within_margin(highest.interval[0], lowest.interval[1], rule) else "undecided"


def _within_margin(low: float, high: float, rule: VerdictRule) -> bool:
    return low >= -rule.margin - ROUNDING and high <= rule.margin + ROUNDING
