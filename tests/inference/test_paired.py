"""The score interval equals a naive one, and the sign-flip test a walk through all signs."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import binomtest, norm

from rocktokens.inference.paired import Discordance, score_interval, sign_flip_test


def random_differences(bans: int, prompts: int, size: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-size, size + 1, (bans, prompts))


# Score interval


def interval(lost: float, gained: float, pairs: float, alpha: float = 0.05) -> tuple[float, float]:
    low, high = score_interval(np.array([lost]), np.array([gained]), pairs, alpha)
    return float(low[0]), float(high[0])


def naive_score(lost: float, gained: float, pairs: float, difference: float) -> float:
    """The score statistic, its chances found by maximising the likelihood along the line of this difference."""

    def term(count: float, chance: float) -> float:
        return 0.0 if count == 0 else count * math.log(chance) if chance > 0 else -math.inf

    def against(rarer: float) -> float:
        loss, gain = rarer + max(0.0, -difference), rarer + max(0.0, difference)
        return -(term(lost, loss) + term(gained, gain) + term(pairs - lost - gained, 1 - loss - gain))

    most = (1 - abs(difference)) / 2
    found = minimize_scalar(against, bounds=(0.0, most), method="bounded", options={"xatol": 1e-13})
    rarer = min((found.x, 0.0, most), key=against)
    variance = pairs * (2 * rarer + abs(difference) - difference**2)
    return (gained - lost - pairs * difference) / math.sqrt(variance)


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.3])
@pytest.mark.parametrize(
    ("lost", "gained", "pairs"),
    [
        (0, 0, 20),
        (1, 0, 20),
        (4, 0, 200),
        (9, 2, 60),
        (2, 9, 60),
        (5, 5, 40),
        (12, 8, 20),
        (3.7, 0.4, 55.5),
        (0, 19, 20),
    ],
)
def test_the_interval_is_that_of_a_naive_search(lost, gained, pairs, alpha):
    critical, delta = norm.ppf(1 - alpha / 2), (gained - lost) / pairs
    low, high = (
        brentq(lambda d, side=side: naive_score(lost, gained, pairs, d) - side * critical, *bracket, xtol=1e-13)
        for side, bracket in ((1, (-1 + 1e-9, delta - 1e-9)), (-1, (delta + 1e-9, 1 - 1e-9)))
    )
    assert interval(lost, gained, pairs, alpha) == pytest.approx((low, high), abs=1e-6)


def test_nothing_lost_and_nothing_gained_has_a_closed_form():
    for pairs, alpha in ((1, 0.05), (125, 0.05), (1000, 0.2), (33.3, 0.01)):
        z2 = norm.ppf(1 - alpha / 2) ** 2
        end = z2 / (pairs + z2)
        assert interval(0, 0, pairs, alpha) == pytest.approx((-end, end), abs=1e-14)


def test_all_lost_has_a_closed_form():
    """At difference −t the most likely chances are (1 + t)/2 and (1 − t)/2, so n(1 − t) = z²(1 + t)."""
    z2 = norm.ppf(0.975) ** 2
    assert interval(40, 0, 40) == pytest.approx((-1.0, -(40 - z2) / (40 + z2)), abs=1e-12)


@st.composite
def tables(draw) -> tuple[float, float, float]:
    pairs = draw(st.floats(1, 3_000))
    lost = draw(st.floats(0, 1)) * pairs
    return lost, draw(st.floats(0, 1)) * (pairs - lost), pairs


@given(table=tables(), alpha=st.floats(1e-6, 0.99))
def test_swapping_negates_and_the_estimate_is_inside(table, alpha):
    lost, gained, pairs = table
    low, high = interval(lost, gained, pairs, alpha)
    assert interval(gained, lost, pairs, alpha) == (-high, -low)
    assert -1 <= low <= (gained - lost) / pairs <= high <= 1


@given(table=tables(), alpha=st.floats(1e-6, 0.9), change=st.floats(0, 1), divisor=st.floats(1, 20))
def test_a_loss_lowers_both_ends_a_gain_raises_them_and_fewer_pairs_widen(table, alpha, change, divisor):
    lost, gained, pairs = table
    more = change * (pairs - lost - gained)
    low, high = interval(lost, gained, pairs, alpha)
    lower, upper = interval(lost + more, gained, pairs, alpha), interval(lost, gained + more, pairs, alpha)
    fewer = interval(lost / divisor, gained / divisor, pairs / divisor, alpha)
    assert lower[0] <= low + 1e-12 and lower[1] <= high + 1e-12
    assert upper[0] >= low - 1e-12 and upper[1] >= high - 1e-12
    assert fewer[0] <= low + 1e-12 and fewer[1] >= high - 1e-12


@pytest.mark.parametrize("alpha", [0.001, 0.05, 0.3, 0.9])
def test_ends_are_monotone_over_all_counts_of_small_samples(alpha):
    """What curtailment relies on."""
    for pairs in (*range(1, 26), 60):
        lost, gained = np.meshgrid(np.arange(pairs + 1), np.arange(pairs + 1), indexing="ij")
        possible = lost + gained <= pairs
        ends = np.full((2, *lost.shape), np.nan)
        ends[:, possible] = score_interval(lost[possible], gained[possible], float(pairs), alpha)
        assert np.nanmax(np.diff(ends, axis=1), initial=-1) <= 0
        assert np.nanmin(np.diff(ends, axis=2), initial=1) >= 0


@given(table=tables(), alpha=st.floats(1e-4, 0.9), place=st.floats(0, 1))
def test_everything_between_the_ends_is_accepted_and_nothing_beyond(table, alpha, place):
    lost, gained, pairs = table
    assume(lost + gained > 1e-6)
    low, high = interval(lost, gained, pairs, alpha)
    difference = -1 + 2 * place
    assume(min(abs(difference - low), abs(difference - high)) > 1e-4 and abs(difference) < 1 - 1e-6)
    accepted = abs(naive_score(lost, gained, pairs, difference)) <= norm.ppf(1 - alpha / 2)
    assert accepted == (low < difference < high)


def test_it_excludes_zero_where_mcnemars_statistic_does():
    for lost, gained in itertools.product(range(12), repeat=2):
        statistic = (lost - gained) ** 2 / max(lost + gained, 1)
        low, high = interval(lost, gained, 50)
        assert (not low <= 0 <= high) == (statistic > norm.ppf(0.975) ** 2)


# Design effect


def test_one_answer_per_prompt_counts_as_one():
    counted = Discordance.of(random_differences(50, 30), 1)
    assert counted.design_effects.tolist() == [1.0] * 50


@given(st.data())
def test_the_design_effect_is_from_one_to_the_answers_of_a_prompt(data):
    num_samples = data.draw(st.integers(1, 6))
    changes = data.draw(st.lists(st.sampled_from([-1, 0, 0, 1]), min_size=num_samples, max_size=10 * num_samples))
    changes_R = np.array(changes[: len(changes) // num_samples * num_samples])
    [own] = Discordance.of(changes_R[None], num_samples).design_effects
    assert 1 <= own <= num_samples + 1e-12


@pytest.mark.parametrize("lost", [0, 1, 7, 25])
def test_answers_that_change_together_are_one(lost):
    whole = np.repeat(np.arange(25) < lost, 4).astype(int)
    assert Discordance.of(-whole[None], 4).design_effects == pytest.approx([4.0])


def test_the_design_effect_estimates_the_variance_between_prompts():
    """With many changes the one prompt that is added is forgotten: the effective variance is the clustered one."""
    rng = np.random.default_rng(2)
    chance_N = rng.beta(0.5, 2, 4_000)
    changes_NS = -(rng.random((4_000, 4)) < chance_N[:, None]).astype(int)
    counted = Discordance.of(changes_NS.reshape(1, -1), 4)
    by_prompt = changes_NS.sum(axis=1)
    ratio = by_prompt.var() / (4 * changes_NS.var())
    assert ratio > 1.5
    assert counted.design_effects == pytest.approx([ratio], rel=5e-3)
    low, high = counted.interval(0.05)
    assert float(high[0] - low[0]) == pytest.approx(2 * 1.96 * by_prompt.std() / 4 / 4_000**0.5, rel=1e-2)


# Sign-flip test


def flipped_tails(differences: list[int]) -> tuple[Fraction, Fraction]:
    """Shares of all 2^n choices of signs whose sum is at most, and at least, the one seen."""
    sums = [
        sum(sign * abs(d) for sign, d in zip(signs, differences, strict=True))
        for signs in itertools.product((-1, 1), repeat=len(differences))
    ]
    seen = sum(differences)
    return Fraction(sum(s <= seen for s in sums), len(sums)), Fraction(sum(s >= seen for s in sums), len(sums))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-6, 6), max_size=10))
def test_tails_are_those_of_all_flips(differences):
    at_most, at_least = flipped_tails(differences)
    test = sign_flip_test(np.array(differences, dtype=np.int64))
    assert test.at_most == pytest.approx(float(at_most), abs=1e-13)
    assert test.at_least == pytest.approx(float(at_least), abs=1e-13)
    assert test.p == pytest.approx(min(1.0, 2 * float(min(at_most, at_least))), abs=1e-13)


def test_tails_are_those_of_all_flips_of_twelve():
    differences = [5, -3, 1, 1, -1, 4, 2, -5, 3, 3, 0, -2]
    tails = tuple(map(float, flipped_tails(differences)))
    assert tuple(sign_flip_test(np.array(differences))) == pytest.approx(tails, abs=1e-13)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (4, 0), (6, 0), (0, 7), (5, 5), (12, 3), (3, 12), (300, 250)])
def test_single_answers_give_mcnemar(lost, gained):
    differences_N = np.repeat([-1, 1, 0], [lost, gained, 50])
    expected = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    assert sign_flip_test(differences_N).p == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("factor", [2, 16])
def test_the_unit_of_the_differences_does_not_matter(factor):
    differences_N = random_differences(1, 40, size=3, seed=4)[0]
    assert sign_flip_test(factor * differences_N) == pytest.approx(sign_flip_test(differences_N), rel=1e-10)


def test_negating_swaps_the_tails():
    differences_N = random_differences(1, 300, size=4, seed=6)[0] - (np.arange(300) < 100)
    test, mirrored = sign_flip_test(differences_N), sign_flip_test(-differences_N)
    assert test.at_most < 0.4
    assert (mirrored.at_least, mirrored.at_most) == tuple(test)


def test_many_prompts_of_many_answers_agree_with_thrown_coins():
    differences_N = random_differences(1, 10_000, size=16, seed=1)[0]
    differences_N[:60] = -16
    at_most = sign_flip_test(differences_N).at_most
    coins = np.random.default_rng(0).choice([-1.0, 1.0], (2_000, 10_000))
    share = float((coins @ np.abs(differences_N) <= differences_N.sum()).mean())
    assert 0.02 < share < 0.4
    assert at_most == pytest.approx(share, abs=4 * (share * (1 - share) / 2_000) ** 0.5)


def test_a_tiny_tail_keeps_its_digits():
    assert sign_flip_test(np.full(400, -3)).p == pytest.approx(2.0**-399, rel=1e-9)


@given(st.data())
def test_tails_are_monotone_in_every_difference(data):
    prompts = data.draw(st.integers(1, 10))
    lower_N = np.array(data.draw(st.lists(st.integers(-4, 4), min_size=prompts, max_size=prompts)))
    higher_N = lower_N + np.array(data.draw(st.lists(st.integers(0, 3), min_size=prompts, max_size=prompts)))
    lower, higher = sign_flip_test(lower_N), sign_flip_test(higher_N)
    assert lower.at_most <= higher.at_most + 1e-13
    assert lower.at_least >= higher.at_least - 1e-13
