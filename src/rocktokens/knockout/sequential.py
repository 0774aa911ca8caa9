"""A group-sequential design: look at the results as they come in, and stop a ban once more prompts would add little.

1. The prompts come in blocks, with a look after each. A prompt without a banned token is known from the start: its
   change is 0.
2. Efficacy. Without an effect a prompt's change is as likely as its negative: given the sizes of all changes, their
   signs are fair coins and their running sum is a random walk. It has bounds at every look, the tightest for which the
   chance of ever having left them is at most α·t^ρ, t being the share of the affected prompts looked at. The chance is
   exact: the distribution of the walk is carried from look to look without the part that has left. Only a ban whose
   walk has left its bounds is called pillar or stumbling, so without an effect the chance of a call is at most α,
   whatever else stops a ban. (Alpha spending: Lan & DeMets 1983, https://doi.org/10.1093/biomet/70.3.659.)
3. Forecasts. Right answers to affected prompts are lost, and wrong ones gained, at two rates with Jeffreys' prior. The
   prompts not looked at yet are filled in many times, at rates from the posterior; each time the rule of the exact mode
   judges all prompts together.
4. A ban stops when 1 − α/2 of its forecasts end in the same verdict: neutral ("neutral"), undecided ("futility"), or
   pillar or stumbling ("efficacy") if its walk has left its bounds on that side, too.
5. A ban that stops early is reported by its forecasts: Δ is their median, the interval spans their intervals, with α/2
   of them left out at either end. It estimates what the exact mode would report, and bears the verdict out.
6. A ban whose affected prompts have all been looked at is judged as in exact mode, except that its interval excludes 0
   only on the side on which the walk has left its bounds: four or five losses without a gain, a pillar in exact mode,
   are not called, since as many coins fall alike too often.

α is kept whatever the order of the prompts; forecasts take the prompts looked at to be like the others.

Shape legend: K bans, N prompts, S answers per prompt, R answers, F forecasts of a ban, X of several bans, D distinct
ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from rocktokens.inference.paired import Discordance, flip_chances, prompt_changes
from rocktokens.knockout.designs import Interim, Settled
from rocktokens.knockout.verdicts import ROUNDING, VerdictRule, paired_effects, verdict, widened
from rocktokens.run_dir import derive_seed
from rocktokens.types import Interval, Verdict

LOOKS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of the prompts: close together where strong effects show, wider apart where few bans are left."""
SPENDING_POWER = 3
"""ρ: the larger, the less α is spent early. With 3 the last bounds are nearly those of a single look, and what stops
early has a p that outlives the correction for many bans."""
FORECASTS = 400
JEFFREYS = 0.5
STOPPED: dict[Verdict, str] = {
    "pillar": "efficacy",
    "stumbling": "efficacy",
    "neutral": "neutral",
    "undecided": "futility",
}
SIDE: dict[Verdict, int] = {"pillar": -1, "stumbling": 1}


@dataclass(frozen=True, slots=True)
class GroupSequential:
    """Stops a ban when the test has its answer, or when the remaining prompts are unlikely to give one."""

    n_prompts: int
    rule: VerdictRule

    @property
    def blocks(self) -> list[range]:
        """Parts that end at the looks."""
        ends = np.unique([0, *(round(share * self.n_prompts) for share in LOOKS)]).tolist()
        return [range(start, end) for start, end in pairwise(ends)]

    def judge(self, interim: Interim, block: int, noise: Interval) -> list[Settled | None]:
        """Settle each ban by itself, and always in the same way when the same is known."""
        ends = [past.stop for past in self.blocks[: block + 1]]
        walks = [_walk(interim, ban, ends, self.rule) for ban in range(len(interim.affected_KR))]
        seen_KR, unseen_KR = np.split(interim.affected_KR, [interim.looked * interim.num_samples], axis=1)
        seen_K, unseen_K = seen_KR.any(axis=1), unseen_KR.any(axis=1)
        settled: list[Settled | None] = [None] * len(walks)
        known = np.flatnonzero(~unseen_K)
        effects = paired_effects(interim.lowest_KR[known], interim.num_samples, self.rule, noise)
        for ban, effect in zip(known.tolist(), effects, strict=True):
            (low, high), walk = effect.interval, walks[ban]
            interval = (low if walk.left > 0 else min(low, 0.0), high if walk.left < 0 else max(high, 0.0))
            settled[ban] = Settled(verdict(effect.delta, interval, self.rule), effect.delta, interval, walk.p)
        partly = np.flatnonzero(seen_K & unseen_K).tolist()
        for ban, forecasts in zip(partly, forecast(interim, partly, self.rule, noise), strict=True):
            settled[ban] = _on_the_way(forecasts, walks[ban], self.rule)
        return settled


class Walk(NamedTuple):
    """Where the running sum of changes has got to."""

    left: Literal[-1, 0, 1]
    """The side on which it first left its bounds, if it has."""
    p: float
    """Chance, without an effect, of leaving at an earlier look, or of standing as far out at the look at which it left;
    where it has not, at the last look."""


def walk_test(stages: Sequence[np.ndarray], levels: Sequence[float]) -> Walk:
    """Run the group-sequential sign-flip test, exact given the sizes of the changes.

    Args:
        stages: the integer changes that came in before each look.
        levels: the largest chance of having left the bounds by each look; must not fall.
    """
    chances, spent = np.ones(1), 0.0
    gained, lost, p = 0, 0, 1.0
    for changes, level in zip(stages, levels, strict=True):
        sizes = np.abs(changes)
        gained, lost = gained + int(changes.clip(min=0).sum()), lost - int(changes.clip(max=0).sum())
        chances = np.convolve(chances, flip_chances(np.bincount(sizes), int(sizes.sum())))
        # By a: the chance that at most a has been gained, or at most a lost, or that the walk had left before.
        outside = spent + np.minimum(2 * np.cumsum(chances), chances.sum())
        p = min(1.0, float(outside[min(gained, lost)]))
        if p <= level + ROUNDING:
            return Walk(1 if gained > lost else -1, p)
        beyond = int(np.searchsorted(outside, level + ROUNDING, side="right"))
        if beyond:
            spent = float(outside[beyond - 1])
            chances[:beyond] = chances[-beyond:] = 0
    return Walk(0, p)


def _walk(interim: Interim, ban: int, ends: Sequence[int], rule: VerdictRule) -> Walk:
    [changes_N], [answers_N] = (
        prompt_changes(of_KR[[ban]], interim.num_samples) for of_KR in (interim.lowest_KR, interim.affected_KR)
    )
    affected = np.flatnonzero(answers_N)
    looked_at = np.searchsorted(affected, ends)
    changes = changes_N[affected[: looked_at[-1]]]
    levels = rule.alpha * (looked_at / max(len(affected), 1)) ** SPENDING_POWER
    return walk_test(np.split(changes, looked_at[:-1]), levels.tolist())


@dataclass(frozen=True, slots=True)
class Forecasts:
    """What the exact mode may find for one ban."""

    delta_F: np.ndarray
    low_F: np.ndarray
    high_F: np.ndarray
    verdict_F: np.ndarray

    def share(self, kind: Verdict) -> float:
        """Return the share of those that end in this verdict."""
        return float((self.verdict_F == kind).mean())


def _on_the_way(forecasts: Forecasts, walk: Walk, rule: VerdictRule) -> Settled | None:
    kind: Verdict = max(STOPPED, key=forecasts.share)
    may_be_called = SIDE.get(kind, walk.left) == walk.left
    if forecasts.share(kind) < 1 - rule.alpha / 2 or not may_be_called:
        return None
    # Looks at which a ban may be given up are no chances to have a small p.
    p = walk.p if walk.left else max(walk.p, rule.alpha)
    # Rounded inwards, so that the interval is as sure as the verdict: where 1 − α/2 end below 0, so does this.
    low = float(np.quantile(forecasts.low_F, rule.alpha / 2, method="higher"))
    high = float(np.quantile(forecasts.high_F, 1 - rule.alpha / 2, method="lower"))
    delta = float(np.quantile(forecasts.delta_F, 0.5, method="lower"))
    return Settled(kind, delta, (low, high), p, STOPPED[kind])


def forecast(interim: Interim, bans: Sequence[int], rule: VerdictRule, noise: Interval) -> list[Forecasts]:
    """Forecast what the exact mode may find for each of these bans, with the same random numbers for all of them."""
    if not bans:
        return []
    outcomes_X3 = np.concatenate([_outcomes(interim, ban, rule.seed) for ban in bans])
    distinct_D3, which_X = np.unique(outcomes_X3, axis=0, return_inverse=True)
    n_prompts = len(interim.free_right_R) // interim.num_samples
    lost_D, gained_D, squares_D = distinct_D3.T
    discordance = Discordance(lost_D, gained_D, squares_D, n_prompts, interim.num_samples)
    low_D, high_D = widened(discordance.interval(rule.alpha), noise)
    numbers_D3 = np.stack([discordance.deltas, low_D, high_D], axis=1)
    verdict_D = np.array([verdict(delta, (low, high), rule) for delta, low, high in numbers_D3.tolist()])
    columns = [np.split(column_D[which_X], len(bans)) for column_D in (*numbers_D3.T, verdict_D)]
    return [Forecasts(*own) for own in zip(*columns, strict=True)]


def _outcomes(interim: Interim, ban: int, seed: int) -> np.ndarray:
    """Return ints (F, 3): in each forecast, the answers lost and gained, and the sum of squares over prompts."""
    num_samples, right_R = interim.num_samples, interim.free_right_R
    changes_R, affected_R = interim.lowest_KR[ban], interim.affected_KR[ban]
    seen_R = np.arange(len(right_R)) < interim.looked * num_samples
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "forecast")))

    def unseen_changes(can_R: np.ndarray, side: int) -> np.ndarray:
        """Return ints (F, N): how many answers change that are still to come."""
        seen = side * changes_R[can_R & seen_R] > 0
        # S answers to one prompt say as much as one.
        yes, no = (float(of.sum()) / num_samples for of in (seen, ~seen))
        rate_F = rng.beta(JEFFREYS + yes, JEFFREYS + no, FORECASTS)
        return rng.binomial((can_R & ~seen_R).reshape(-1, num_samples).sum(axis=1), rate_F[:, None])

    known = Discordance.of(np.where(seen_R, changes_R, 0)[None], num_samples)
    lost_FN, gained_FN = unseen_changes(affected_R & right_R, -1), unseen_changes(affected_R & ~right_R, 1)
    return np.stack(
        [
            known.lost_K + lost_FN.sum(axis=1),
            known.gained_K + gained_FN.sum(axis=1),
            known.squares_K + ((gained_FN - lost_FN) ** 2).sum(axis=1),
        ],
        axis=1,
    )
