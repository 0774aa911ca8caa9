"""The detectable loss is the one at which the verdicts themselves say pillar four times of five."""

import numpy as np
import pytest
from scipy.stats import binom, gamma, norm

from rocktokens.inference import power
from rocktokens.knockout.verdicts import VerdictRule, paired_effects, verdict


def detectable_loss(prompts: int, rule: VerdictRule, n_tests: int = 1, noise=(0.0, 0.0)) -> float:
    return power.detectable_loss(prompts, rule.alpha, rule.epsilon, n_tests, noise[1])


def detectable_by_ban(differences_KN: np.ndarray, num_samples: int, rule: VerdictRule, noise=(0.0, 0.0)) -> np.ndarray:
    return power.detectable_scattered_loss(differences_KN / num_samples, rule.alpha, rule.epsilon, noise[1])


def pillar_chance(
    loss: float, prompts: int, rule: VerdictRule, n_tests: int = 1, num_samples: int = 1, noise=(0.0, 0.0)
) -> float:
    """By asking for the verdict of every possible number of lost prompts."""
    lost_L = np.arange(prompts + 1)
    differences_LN = -num_samples * (np.arange(prompts) < lost_L[:, None]).astype(np.int64)
    effects = paired_effects(differences_LN, num_samples, rule, noise)
    pillar_L = [
        verdict(effect.delta, effect.interval, rule) == "pillar" and effect.p <= rule.alpha / n_tests
        for effect in effects
    ]
    return float(binom.pmf(lost_L, prompts, loss) @ np.array(pillar_L))


@pytest.mark.parametrize(
    ("prompts", "rule", "n_tests", "noise"),
    [
        (40, VerdictRule(), 1, (0.0, 0.0)),
        (40, VerdictRule(), 100, (0.0, 0.0)),
        (40, VerdictRule(epsilon=0.3), 1, (0.0, 0.0)),
        (100, VerdictRule(alpha=0.2), 7, (0.0, 0.0)),
        (100, VerdictRule(), 1, (-0.02, 0.05)),
        (7, VerdictRule(), 1, (0.0, 0.0)),
    ],
)
@pytest.mark.parametrize("num_samples", [1, 4])
def test_power_is_eighty_percent_at_the_detectable_loss(prompts, rule, n_tests, noise, num_samples):
    loss = detectable_loss(prompts, rule, n_tests, noise)
    assert 0 < loss < 1
    assert pillar_chance(loss, prompts, rule, n_tests, num_samples, noise) == pytest.approx(0.8, abs=1e-6)
    assert pillar_chance(loss - 0.01, prompts, rule, n_tests, num_samples, noise) < 0.8


def test_a_sample_too_small_to_show_anything_says_so():
    assert detectable_loss(5, VerdictRule()) == 1.0
    assert pillar_chance(1.0, 5, VerdictRule()) == 0
    assert detectable_loss(6, VerdictRule()) < 1
    assert detectable_loss(6, VerdictRule(), n_tests=2) == 1.0


def test_losses_among_many_prompts_are_poisson():
    """Six losses at least (2 · 2^−6 ≤ 0.05), twelve where a hundred bans are tested (2 · 2^−12 ≤ 0.0005)."""
    assert detectable_loss(500, VerdictRule()) * 500 == pytest.approx(gamma.ppf(0.8, 6), rel=0.01)
    assert detectable_loss(500, VerdictRule(), n_tests=100) * 500 == pytest.approx(gamma.ppf(0.8, 12), rel=0.01)


def test_more_prompts_show_smaller_losses_until_epsilon():
    losses = [detectable_loss(prompts, VerdictRule()) for prompts in (50, 200, 1_000, 10_000)]
    assert losses == sorted(losses, reverse=True)
    assert 0.01 < losses[-1] < 0.0112


def test_scatter_raises_what_can_be_shown():
    quiet_N, loud_N = np.zeros(400, dtype=np.int64), np.tile([2, -2, 0, 0], 100)
    quiet, loud, whole = detectable_by_ban(np.stack([quiet_N, loud_N, np.tile([-4, 4], 200)]), 4, VerdictRule())
    assert quiet == detectable_loss(400, VerdictRule())
    standard_error = (0.5 * 0.5**2) ** 0.5 / 20
    assert loud == pytest.approx((norm.ppf(0.975) + norm.ppf(0.8)) * standard_error)
    assert whole == pytest.approx(2.8016 / 20, rel=1e-3)
    assert detectable_by_ban(loud_N[None], 4, VerdictRule(), noise=(0.0, 0.01)) == pytest.approx(loud + 0.01)
    assert detectable_by_ban(np.tile([-1, 1], 3)[None], 1, VerdictRule()) == 1.0


def test_a_ban_that_scatters_is_seen_four_times_of_five():
    rng = np.random.default_rng(0)
    chances = np.array([0.13, 0.06, 0.81])
    prompts, rule = 400, VerdictRule(resamples=1_000)
    spread = float(np.sqrt(chances[:2].sum() - (chances[1] - chances[0]) ** 2))
    loss = float((norm.ppf(0.975) + norm.ppf(0.8)) * spread / np.sqrt(prompts))
    chances[:2] = (0.19 + loss) / 2, (0.19 - loss) / 2
    differences_KN = rng.choice([-1, 1, 0], (1_500, prompts), p=chances)
    assert np.median(detectable_by_ban(differences_KN, 1, rule)) == pytest.approx(loss, rel=0.03)
    effects = paired_effects(differences_KN, 1, rule)
    seen = np.mean([verdict(effect.delta, effect.interval, rule) == "pillar" for effect in effects])
    assert seen == pytest.approx(0.8, abs=0.05)
