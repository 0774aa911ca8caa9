"""What a ban does to accuracy, how sure that is, and what to call it (docs/method.md, section 6).

1. Every ban gives one change per answer: −1 lost, 1 gained, 0 neither. Each of N prompts has S answers.
2. Δ is their sum over all N·S answers. Its interval is the score interval of a difference of paired proportions, with
   the design effect of several answers per prompt; its p comes from the exact sign-flip test over prompts
   (``rocktokens.inference.paired``).
3. The verdict follows from Δ and the interval: pillar, stumbling, neutral, or undecided.
4. Curtailment: while some answers under a ban are not known, each change still lies between a lowest and a highest
   value. The verdict is settled once no way of filling these in can change it.

Counts are whole numbers; only where they have become shares does a comparison allow for float rounding.

Shape legend: K bans, N prompts, S answers per prompt, R = NS answers, those to one prompt one after another.
"""

from dataclasses import dataclass

import numpy as np

from rocktokens.errors import RocktokensError
from rocktokens.inference.paired import Discordance, prompt_changes, score_interval, sign_flip_test
from rocktokens.types import Interval, Verdict

ROUNDING = 1e-12
"""Far above the rounding of a share and far below the change that one answer makes."""
EXACT: Interval = (0.0, 0.0)
"""The noise of an engine that gives the same answer to the same question whatever else is in the batch."""


@dataclass(frozen=True, slots=True)
class VerdictRule:
    """When a change of accuracy counts."""

    alpha: float = 0.05
    """One minus the coverage of the interval."""
    epsilon: float = 0.01
    """The smallest change that is called pillar or stumbling."""
    margin: float = 0.03
    """An interval within ± this is neutral."""
    seed: int = 0
    """Of forecasts, and of what is resampled beside the verdicts; no exact verdict depends on it."""

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise RocktokensError(f"alpha = {self.alpha} is not between 0 and 1: give a share such as 0.05")
        for name, value in (("epsilon", self.epsilon), ("margin", self.margin)):
            if not 0 <= value <= 1:
                raise RocktokensError(f"{name} = {value} is not from 0 to 1: give a share such as 0.01")


@dataclass(frozen=True, slots=True)
class Effect:
    """The change of accuracy under one ban."""

    delta: float
    interval: Interval
    p: float
    """Exact paired sign-flip test, two-sided."""


def paired_effects(
    changes_KR: np.ndarray, num_samples: int, rule: VerdictRule, noise: Interval = EXACT
) -> list[Effect]:
    """Estimate the effect of every ban.

    An engine that rounds differently from batch to batch changes answers without any ban. The interval of Δ between two
    free runs of it moves the ends outwards, so that its noise cannot pass as an effect.

    Args:
        changes_KR: integers, by answer: right under the ban minus right without.
        num_samples: answers per prompt.
        rule: gives α.
        noise: the interval of Δ between two free runs, added to every ban's.
    """
    discordance = Discordance.of(changes_KR, num_samples)
    low_K, high_K = widened(discordance.interval(rule.alpha), noise)
    tests = map(sign_flip_test, prompt_changes(changes_KR, num_samples))
    numbers = zip(discordance.deltas.tolist(), low_K.tolist(), high_K.tolist(), tests, strict=True)
    return [Effect(delta, (low, high), test.p) for delta, low, high, test in numbers]


def widened(ends: tuple[np.ndarray, np.ndarray], noise: Interval) -> tuple[np.ndarray, np.ndarray]:
    """Move both ends outwards by the engine's own noise."""
    return ends[0] + min(0.0, noise[0]), ends[1] + max(0.0, noise[1])


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
    lowest_KR: np.ndarray, highest_KR: np.ndarray, num_samples: int, rule: VerdictRule, noise: Interval = EXACT
) -> list[Verdict | None]:
    """Return the verdict of every ban that no outcome of the remaining answers can change; None where one could.

    Completions lie between the one with all possible losses and no further gain and the one with all possible gains and
    no further loss: Δ and, at a given design effect, both ends of the score interval fall with each loss and rise with
    each gain. A larger design effect moves both ends outwards, and it is from 1 to S. So an end can be no lower and no
    higher than at one of these two completions with one of these two design effects, and a verdict is returned only if
    everything in between has it.

    With one answer per prompt the design effect is 1 and these values are reached: a verdict of pillar, stumbling or
    neutral is settled if and only if it is returned. Undecided is returned when all completions leave ±margin on the
    same side; where some do on one side and some on the other, None is returned. With several answers a verdict may be
    settled a while before it is returned.

    Args:
        lowest_KR: the least each change can be: itself where it is known, else −1 where the answer is right without the
            ban and 0 where it is wrong.
        highest_KR: the most each can be: itself where it is known, else 0 where it is right and 1 where it is wrong.
        num_samples: answers per prompt.
        rule: the one the final verdict follows.
        noise: as in ``paired_effects``.
    """
    n_answers = lowest_KR.shape[1]

    def ends(changes_KR: np.ndarray, design_effect: int) -> tuple[np.ndarray, np.ndarray]:
        lost_K, gained_K = ((side * changes_KR > 0).sum(axis=1) / design_effect for side in (-1, 1))
        return widened(score_interval(lost_K, gained_K, n_answers / design_effect, rule.alpha), noise)

    lowest = (lowest_KR.sum(axis=1) / n_answers, ends(lowest_KR, num_samples)[0], ends(lowest_KR, 1)[1])
    highest = (highest_KR.sum(axis=1) / n_answers, ends(highest_KR, 1)[0], ends(highest_KR, num_samples)[1])
    return [
        _settled(at_lowest, at_highest, rule)
        for at_lowest, at_highest in zip(np.transpose(lowest).tolist(), np.transpose(highest).tolist(), strict=True)
    ]


def _settled(lowest: list[float], highest: list[float], rule: VerdictRule) -> Verdict | None:
    """Judge by the least and by the greatest value that Δ and both ends of its interval can have."""
    at_lowest, at_highest = (verdict(delta, (low, high), rule) for delta, low, high in (lowest, highest))
    if at_highest == "pillar":
        return "pillar"
    if at_lowest == "stumbling":
        return "stumbling"
    if at_lowest == "pillar" or at_highest == "stumbling":
        return None
    if _within_margin(lowest[1], highest[2], rule):
        return "neutral"
    return None if _within_margin(highest[1], lowest[2], rule) else "undecided"


def _within_margin(low: float, high: float, rule: VerdictRule) -> bool:
    return low >= -rule.margin - ROUNDING and high <= rule.margin + ROUNDING
