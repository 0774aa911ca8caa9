"""The detectable loss is the one at which the verdicts themselves say pillar four times of five."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, gamma, norm

from rocktokens.inference import power
from rocktokens.inference.paired import score_interval
from rocktokens.knockout.verdicts import VerdictRule, paired_effects, verdict


def detectable_loss(prompts: int, rule: VerdictRule, n_tests: int | None = None, noise=(0.0, 0.0)) -> float:
    return power.detectable_loss(prompts, rule.alpha, rule.epsilon, n_tests, noise[1])


def detectable_by_ban(differences_KN: np.ndarray, num_samples: int, rule: VerdictRule, noise=(0.0, 0.0)) -> np.ndarray:
    return power.detectable_scattered_loss(differences_KN / num_samples, rule.alpha, rule.epsilon, noise[1])


def pillar_chance(
    loss: float, prompts: int, rule: VerdictRule, n_tests: int | None = None, num_samples: int = 1, noise=(0.0, 0.0)
) -> float:
    """By asking for the verdict of every possible number of lost prompts."""
    lost_L = np.arange(prompts + 1)
    changes_LR = -np.repeat(np.arange(prompts) < lost_L[:, None], num_samples, axis=1).astype(np.int64)
    effects = paired_effects(changes_LR, num_samples, rule, noise)
    pillar_L = [
        verdict(effect.delta, effect.interval, rule) == "pillar"
        and (n_tests is None or effect.p <= rule.alpha / n_tests)
        for effect in effects
    ]
    return float(binom.pmf(lost_L, prompts, loss) @ np.array(pillar_L))


@pytest.mark.parametrize(
    ("prompts", "rule", "n_tests", "noise"),
    [
        (40, VerdictRule(), None, (0.0, 0.0)),
        (40, VerdictRule(), 1, (0.0, 0.0)),
        (40, VerdictRule(), 100, (0.0, 0.0)),
        (40, VerdictRule(epsilon=0.3), None, (0.0, 0.0)),
        (100, VerdictRule(alpha=0.2), 7, (0.0, 0.0)),
        (100, VerdictRule(), None, (-0.02, 0.05)),
        (7, VerdictRule(), None, (0.0, 0.0)),
    ],
)
@pytest.mark.parametrize("num_samples", [1, 4])
def test_power_is_eighty_percent_at_the_detectable_loss(prompts, rule, n_tests, noise, num_samples):
    loss = detectable_loss(prompts, rule, n_tests, noise)
    assert 0 < loss < 1
    assert pillar_chance(loss, prompts, rule, n_tests, num_samples, noise) == pytest.approx(0.8, abs=1e-6)
    assert pillar_chance(loss - 0.01, prompts, rule, n_tests, num_samples, noise) < 0.8


def test_a_sample_too_small_to_show_anything_says_so():
    assert detectable_loss(3, VerdictRule()) == 1.0
    assert pillar_chance(1.0, 3, VerdictRule()) == 0
    assert detectable_loss(4, VerdictRule()) < 1
    assert detectable_loss(5, VerdictRule(), n_tests=1) == 1.0
    assert detectable_loss(6, VerdictRule(), n_tests=1) < 1
    assert detectable_loss(6, VerdictRule(), n_tests=2) == 1.0


def test_losses_among_many_prompts_are_poisson():
    """Four at least (> z²) and at least ε, six with one test (2 · 2^−6 ≤ 0.05), twelve with a hundred."""
    assert detectable_loss(400, VerdictRule()) * 400 == pytest.approx(gamma.ppf(0.8, 4), rel=0.01)
    assert detectable_loss(500, VerdictRule(), n_tests=1) * 500 == pytest.approx(gamma.ppf(0.8, 6), rel=0.01)
    assert detectable_loss(500, VerdictRule(), n_tests=100) * 500 == pytest.approx(gamma.ppf(0.8, 12), rel=0.01)


def test_more_prompts_show_smaller_losses_until_epsilon():
    losses = [detectable_loss(prompts, VerdictRule()) for prompts in (50, 200, 1_000, 10_000)]
    assert losses == sorted(losses, reverse=True)
    assert 0.01 < losses[-1] < 0.0112


def test_scatter_raises_what_can_be_shown():
    quiet_N, loud_N = np.zeros(400, dtype=np.int64), np.tile([2, -2, 0, 0], 100)
    quiet, loud, whole = detectable_by_ban(np.stack([quiet_N, loud_N, np.tile([-4, 4], 200)]), 4, VerdictRule())
    assert quiet == detectable_loss(400, VerdictRule())
    standard_error = (0.5 * 0.5**2) ** 0.5 / 20  # the mean is 0, so with and without an effect
    assert loud == pytest.approx((norm.ppf(0.975) + norm.ppf(0.8)) * standard_error)
    assert whole == pytest.approx(2.8016 / 20, rel=1e-3)
    assert detectable_by_ban(loud_N[None], 4, VerdictRule(), noise=(0.0, 0.01)) == pytest.approx(loud + 0.01)
    assert detectable_by_ban(np.tile([-1, 1], 3)[None], 1, VerdictRule()) == 1.0


def test_a_ban_that_scatters_is_seen_four_times_of_five():
    rng = np.random.default_rng(0)
    chances = np.array([0.13, 0.06, 0.81])
    prompts, rule = 400, VerdictRule()
    spread = float(np.sqrt(chances[:2].sum() - (chances[1] - chances[0]) ** 2))
    loss = float((norm.ppf(0.975) + norm.ppf(0.8)) * spread / np.sqrt(prompts))
    chances[:2] = (0.19 + loss) / 2, (0.19 - loss) / 2
    differences_KN = rng.choice([-1, 1, 0], (1_500, prompts), p=chances)
    assert np.median(detectable_by_ban(differences_KN, 1, rule)) == pytest.approx(loss, rel=0.03)
    effects = paired_effects(differences_KN, 1, rule)
    seen = np.mean([verdict(effect.delta, effect.interval, rule) == "pillar" for effect in effects])
    assert seen == pytest.approx(0.8, abs=0.05)


def neutral_chance(pairs: int, discordance: float, rule: VerdictRule) -> float:
    """By asking for the verdict of every table that can come up if as many are lost as gained."""
    discordant = np.arange(pairs + 1)
    chances = binom.pmf(discordant, pairs, discordance)
    total = 0.0
    for count in discordant[chances > 1e-9].tolist():
        lost = np.arange(count + 1)
        low, high = score_interval(lost, count - lost, float(pairs), rule.alpha)
        is_neutral = (low >= -rule.margin) & (high <= rule.margin)
        total += float(chances[count] * (binom.pmf(lost, count, 0.5) @ is_neutral))
    return total


def test_the_least_sample_for_a_neutral_verdict():
    """Nothing changes: z²(1 − 0.03)/0.03 = 124.2 prompts; 8 % of the answers: about a thousand."""
    unchanged, some = power.neutral_pairs(np.array([0.0, 0.08]), 0.05, 0.03).tolist()
    assert unchanged == 125
    effects = [paired_effects(np.zeros((1, prompts), dtype=int), 1, VerdictRule())[0] for prompts in (124, 125)]
    assert [verdict(0.0, effect.interval, VerdictRule()) for effect in effects] == ["undecided", "neutral"]
    assert 900 < some < 1_050


@pytest.mark.parametrize(("discordance", "rule"), [(0.08, VerdictRule()), (0.3, VerdictRule(alpha=0.1, margin=0.1))])
def test_a_neutral_verdict_comes_four_times_of_five_with_the_pairs_it_needs(discordance, rule):
    [pairs] = power.neutral_pairs(np.array([discordance]), rule.alpha, rule.margin).tolist()
    assert neutral_chance(pairs, discordance, rule) == pytest.approx(0.8, abs=0.02)
    assert neutral_chance(round(0.8 * pairs), discordance, rule) < 0.75


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.floats(0.005, 0.5), st.floats(0.01, 0.4))
def test_more_discordance_needs_more_pairs_and_each_number_is_the_least(discordance, margin, alpha):
    pairs = power.neutral_pairs(np.sort(discordance), alpha, margin)
    assert (np.diff(pairs) >= 0).all()
    for share, needed in zip(np.sort(discordance).tolist(), pairs.tolist(), strict=True):
        for tried in (needed, needed - 1) if needed > 1 else (needed,):
            away = min(norm.ppf(0.9) * (tried * share) ** 0.5, tried * share)
            counts = [np.array([(tried * share + side * away) / 2]) for side in (-1, 1)]
            high = float(score_interval(*counts, float(tried), alpha)[1][0])
            assert high <= margin + 1e-9 if tried == needed else high >= margin - 1e-9
