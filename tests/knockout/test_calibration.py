"""How often intervals cover and verdicts are wrong: exactly where that can be summed, else by seeded simulation."""

import numpy as np
import pytest
from scipy.stats import binom, false_discovery_control

from rocktokens.inference.paired import Discordance, score_interval
from rocktokens.knockout.verdicts import VerdictRule, paired_effects, verdict

RULE = VerdictRule()
BANS = 3_000
LIMIT = RULE.alpha + 3 * (RULE.alpha * (1 - RULE.alpha) / BANS) ** 0.5


class Tables:
    """All that one answer per prompt can show: how many are lost and gained, with interval and verdict."""

    def __init__(self, prompts: int, most: int) -> None:
        lost, gained = np.meshgrid(np.arange(most + 1), np.arange(most + 1), indexing="ij")
        self.prompts, self.lost, self.gained = prompts, lost.ravel(), gained.ravel()
        self.low, self.high = score_interval(self.lost, self.gained, float(prompts), RULE.alpha)
        deltas = (self.gained - self.lost) / prompts
        ends = zip(deltas.tolist(), self.low.tolist(), self.high.tolist(), strict=True)
        self.verdicts = np.array([verdict(delta, (low, high), RULE) for delta, low, high in ends])

    def chance(self, event: np.ndarray, loss: float, gain: float = 0.0) -> float:
        discordant = self.lost + self.gained
        split = binom.pmf(self.lost, discordant, loss / (loss + gain))
        return float((binom.pmf(discordant, self.prompts, loss + gain) * split) @ event)


@pytest.fixture(scope="module", params=[100, 200])
def tables(request) -> Tables:
    return Tables(request.param, most=60)


@pytest.mark.parametrize("loss", [0.002, 0.005, 0.01, 0.02, 0.03, 0.1])
@pytest.mark.parametrize("scatter", [0.0, 0.08])
def test_intervals_cover_the_true_loss(tables, loss, scatter):
    """Alone, and where another 8 % of the answers change, either way alike."""
    loss_rate, gain_rate = loss + scatter / 2, scatter / 2
    everything = np.ones(len(tables.lost))
    assert tables.chance(everything, loss_rate, gain_rate) == pytest.approx(1, abs=1e-6)
    assert tables.chance((tables.low <= -loss) & (tables.high >= -loss), loss_rate, gain_rate) >= 0.93


@pytest.mark.parametrize("scatter", [0.0, 0.08])
def test_a_loss_of_the_margin_is_called_neutral_in_one_sample_of_twenty_at_most(tables, scatter):
    is_neutral = tables.verdicts == "neutral"
    assert tables.chance(is_neutral, RULE.margin + scatter / 2, scatter / 2) <= 0.05
    assert is_neutral.any() == (tables.prompts >= 125)


def test_what_alpha_is_kept_for_is_the_sample_not_how_many_differ(tables):
    """A score interval is asymptotic: at the worst rate of changes 5.3 % are called, and of exactly four one of 8."""
    is_called = np.isin(tables.verdicts, ["pillar", "stumbling"])
    shares = [tables.chance(is_called, rate / 2, rate / 2) for rate in np.linspace(0.01, 0.3, 30)]
    assert 0.045 < max(shares) < 0.0535
    four = tables.lost + tables.gained == 4
    assert binom.pmf(tables.lost[four], 4, 0.5) @ is_called[four] == 1 / 8


def null_changes(prompts: int, num_samples: int, discordance: float, seed: int) -> np.ndarray:
    """Bans that decode a share of the prompts again, with the chance of a right answer each prompt had."""
    rng = np.random.default_rng(seed)
    chance_N = rng.beta(1, 1, prompts)
    free, again = rng.random((2, BANS, prompts, num_samples), dtype=np.float32) < chance_N[:, None]
    is_touched = rng.random((BANS, prompts, 1)) < discordance
    return np.where(is_touched, again.astype(int) - free, 0).reshape(BANS, -1)


def share_called(changes_KR: np.ndarray, num_samples: int) -> float:
    found = Discordance.of(changes_KR, num_samples)
    ends = zip(found.deltas, *found.interval(RULE.alpha), strict=True)
    return float(np.mean([verdict(delta, (low, high), RULE) in ("pillar", "stumbling") for delta, low, high in ends]))


@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize(("prompts", "discordance"), [(60, 0.15), (60, 0.8), (200, 0.05), (500, 0.02), (500, 0.4)])
def test_without_an_effect_one_ban_of_twenty_is_called_at_most(prompts, discordance, num_samples):
    changes_KR = null_changes(prompts, num_samples, discordance, seed=prompts)
    assert share_called(changes_KR, num_samples) <= LIMIT


def test_caution_is_not_silence():
    """With many discordant prompts the share called comes near the nominal one: the rule is not just deaf."""
    assert share_called(null_changes(200, 4, 1.0, seed=0), 4) > 0.03


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("prompts", "loss"), [(100, 0.01), (200, 0.005), (200, 0.01), (200, 0.03), (500, 0.005)])
def test_intervals_of_several_answers_cover_however_they_hold_together(prompts, loss, correlation):
    rng = np.random.default_rng(round(1e4 * loss))
    if correlation == 1:
        rate_KN = (rng.random((BANS, prompts)) < loss).astype(float)
    elif correlation:
        strength = 1 / correlation - 1
        rate_KN = rng.beta(loss * strength, (1 - loss) * strength, (BANS, prompts))
    else:
        rate_KN = np.full((BANS, prompts), loss)
    lost_KN = rng.binomial(4, rate_KN)
    found = Discordance(lost_KN.sum(axis=1), np.zeros(BANS), (lost_KN**2).sum(axis=1), prompts, 4)
    low_K, high_K = found.interval(RULE.alpha)
    error = (0.93 * 0.07 / BANS) ** 0.5
    assert np.mean((low_K <= -loss) & (high_K >= -loss)) >= 0.93 - 3 * error


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
