"""How often the verdicts are wrong, by simulation: seeded, so that a failure is a change of the method."""

import numpy as np
import pytest
from scipy.stats import false_discovery_control

from rocktokens.inference.bootstrap import prompt_draws
from rocktokens.inference.paired import percentile_interval, resampled_sums
from rocktokens.knockout.verdicts import VerdictRule, paired_effects, verdict

RULE = VerdictRule(resamples=1_000)
BANS = 3_000
LIMIT = RULE.alpha + 3 * (RULE.alpha * (1 - RULE.alpha) / BANS) ** 0.5


def null_differences(prompts: int, num_samples: int, discordance: float, seed: int) -> np.ndarray:
    """Bans that decode a share of the prompts again, with the chance of a right answer each prompt had."""
    rng = np.random.default_rng(seed)
    chance_N = rng.beta(1, 1, prompts)
    free_KN, again_KN = rng.binomial(num_samples, chance_N, (2, BANS, prompts))
    return np.where(rng.random((BANS, prompts)) < discordance, again_KN - free_KN, 0)


def few_coins(prompts: int, num_samples: int, discordant: int, seed: int) -> np.ndarray:
    """Bans under which exactly so many prompts change, all their answers together, either way alike."""
    signs = np.random.default_rng(seed).choice([-num_samples, num_samples], (BANS, discordant))
    return np.pad(signs, ((0, 0), (0, prompts - discordant)))


def share_called(differences_KN: np.ndarray, num_samples: int) -> float:
    effects = paired_effects(differences_KN, num_samples, RULE)
    return float(
        np.mean([verdict(effect.delta, effect.interval, RULE) in ("pillar", "stumbling") for effect in effects])
    )


def share_of_plain_percentile(differences_KN: np.ndarray) -> float:
    """Bans whose plain bootstrap interval excludes 0."""
    sums_KB = resampled_sums(differences_KN, prompt_draws(differences_KN.shape[1], RULE.resamples, seed=0))
    low_K, high_K = percentile_interval(sums_KB, RULE.alpha)
    return float(((low_K > 0) | (high_K < 0)).mean())


@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize(("prompts", "discordance"), [(60, 0.15), (60, 0.8), (200, 0.05), (500, 0.02), (500, 0.4)])
def test_without_an_effect_one_ban_of_twenty_is_called_at_most(prompts, discordance, num_samples):
    differences_KN = null_differences(prompts, num_samples, discordance, seed=prompts)
    assert share_called(differences_KN, num_samples) <= LIMIT


@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize(("prompts", "discordant"), [(60, 4), (200, 4), (200, 8), (400, 8)])
def test_the_plain_percentile_interval_is_too_bold_where_few_prompts_differ(prompts, discordant, num_samples):
    differences_KN = few_coins(prompts, num_samples, discordant, seed=discordant)
    assert share_of_plain_percentile(differences_KN) > LIMIT
    assert share_called(differences_KN, num_samples) <= LIMIT


def test_caution_is_not_silence():
    """With many discordant prompts the share called comes near the nominal one: the rule is not just deaf."""
    assert share_called(null_differences(200, 4, 1.0, seed=0), 4) > 0.03


def test_false_discoveries_are_one_in_twenty_and_planted_pillars_are_found():
    """60 bans a sweep, 45 of them without effect, 15 that turn 8 % more answers wrong than right."""
    sweeps, bans, planted, prompts = 60, 60, 15, 300
    rng = np.random.default_rng(4)
    null = rng.choice([-1, 1, 0], (sweeps, bans - planted, prompts), p=[0.05, 0.05, 0.9])
    pillars = rng.choice([-1, 1, 0], (sweeps, planted, prompts), p=[0.1, 0.02, 0.88])
    differences = np.concatenate([null, pillars], axis=1)
    false_shares, found, uncorrected = [], [], []
    for differences_KN in differences:
        effects = paired_effects(differences_KN, 1, RULE)
        kinds = np.array([verdict(effect.delta, effect.interval, RULE) for effect in effects])
        q_K = false_discovery_control([effect.p for effect in effects])
        called_K = np.isin(kinds, ["pillar", "stumbling"])
        kept_K = called_K & (q_K <= RULE.alpha)
        false_shares.append(kept_K[:-planted].sum() / max(kept_K.sum(), 1))
        uncorrected.append(called_K[:-planted].sum() / max(called_K.sum(), 1))
        found.append((kept_K & (kinds == "pillar"))[-planted:].mean())
    error = np.std(false_shares) / sweeps**0.5
    assert np.mean(false_shares) <= RULE.alpha + 3 * error
    assert np.mean(uncorrected) > RULE.alpha + 3 * error
    assert np.mean(found) > 0.8
