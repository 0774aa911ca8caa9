"""The bootstrap equals a loop over the same draws, and the sign-flip test a walk through all signs."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, bootstrap

from rocktokens.inference import bootstrap as resampling
from rocktokens.inference.bootstrap import bootstrap_counts, prompt_draws
from rocktokens.inference.paired import percentile_interval, resampled_sums, sign_flip_test


def drawn(n_prompts: int, resamples: int, seed: int) -> np.ndarray:
    return np.concatenate(list(prompt_draws(n_prompts, resamples, seed)))


def random_differences(bans: int, prompts: int, size: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-size, size + 1, (bans, prompts))


# Draws and sums


def test_sums_are_those_of_prompts_drawn_one_by_one():
    differences_KN = random_differences(3, 17, size=4)
    draws_BN = drawn(17, 50, seed=2)
    for ban, sums_B in enumerate(resampled_sums(differences_KN, [draws_BN])):
        for replicate, total in enumerate(sums_B.tolist()):
            prompts = [n for n, times in enumerate(draws_BN[replicate]) for _ in range(times)]
            assert len(prompts) == 17
            assert total == sum(int(differences_KN[ban, n]) for n in prompts)


@pytest.mark.parametrize("cells", [1, 17, 100, 10_000])
def test_draws_and_sums_do_not_depend_on_the_size_of_blocks(cells, monkeypatch):
    differences_KN = random_differences(5, 17)
    draws_BN, sums_KB = drawn(17, 60, seed=3), resampled_sums(differences_KN, prompt_draws(17, 60, seed=3))
    monkeypatch.setattr(resampling, "BLOCK_CELLS", cells)
    blocks = list(prompt_draws(17, 60, seed=3))
    assert max(block_BN.size for block_BN in blocks) <= max(cells, 17)
    assert np.array_equal(np.concatenate(blocks), draws_BN)
    assert np.array_equal(resampled_sums(differences_KN, blocks), sums_KB)


def test_the_seed_decides_the_draws_and_there_is_one_way_to_draw():
    assert np.array_equal(drawn(30, 200, seed=7), bootstrap_counts(30, 200, seed=7))
    rng = np.random.Generator(np.random.PCG64(7))
    assert np.array_equal(drawn(30, 200, seed=7), rng.multinomial(30, np.full(30, 1 / 30), size=200))
    assert not np.array_equal(drawn(30, 200, seed=7), drawn(30, 200, seed=8))


def test_sums_too_large_for_float32_are_exact():
    differences_KN = np.array([[2**24, 1, 0], [0, 2**24 + 1, -1]])
    draws_BN = np.array([[1, 1, 1], [0, 3, 0], [2, 1, 0]])
    assert resampled_sums(differences_KN, [draws_BN]).tolist() == (differences_KN @ draws_BN.T).tolist()


def test_sums_just_within_float32_are_exact():
    differences_KN = np.full((1, 3), (2**24 - 1) // 3)
    assert resampled_sums(differences_KN, [np.array([[1, 1, 1]])]).tolist() == [[2**24 - 1]]


# Percentile interval


@given(resamples=st.integers(1, 300), alpha=st.floats(0.001, 0.999), seed=st.integers(0, 999))
def test_ends_are_the_outer_order_statistics(resamples, alpha, seed):
    sums_KB = np.random.default_rng(seed).integers(-50, 50, (2, resamples))
    low_K, high_K = percentile_interval(sums_KB, alpha)
    for sums_B, low, high in zip(sums_KB, low_K, high_K, strict=True):
        assert low == np.quantile(sums_B, alpha / 2, method="lower")
        outside = int(alpha / 2 * (resamples - 1))
        assert high == sorted(sums_B)[::-1][outside]
    negated_low_K, negated_high_K = percentile_interval(-sums_KB, alpha)
    assert (negated_low_K.tolist(), negated_high_K.tolist()) == ((-high_K).tolist(), (-low_K).tolist())


@pytest.mark.parametrize(("prompts", "size", "alpha"), [(60, 1, 0.05), (200, 4, 0.05), (200, 1, 0.2)])
def test_the_interval_is_that_of_another_bootstrap(prompts, size, alpha):
    differences_KN = random_differences(1, prompts, size, seed=5)
    sums_KB = resampled_sums(differences_KN, prompt_draws(prompts, 20_000, seed=0))
    own = [ends_K[0] / prompts for ends_K in percentile_interval(sums_KB, alpha)]
    answers = (differences_KN[0],)
    other = bootstrap(
        answers,
        np.mean,
        confidence_level=1 - alpha,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(1),
    )
    # A quantile of 20,000 replicates has an error of about 1.3 % (α/2 = 0.1) to 2 % (0.025) of a standard error.
    assert own == pytest.approx(list(other.confidence_interval), abs=0.1 * other.standard_error + 1 / prompts)


@given(st.data())
def test_raising_a_difference_never_lowers_a_sum_or_an_end(data):
    prompts = data.draw(st.integers(1, 12))
    lower_N = np.array(data.draw(st.lists(st.integers(-3, 3), min_size=prompts, max_size=prompts)))
    higher_N = lower_N + np.array(data.draw(st.lists(st.integers(0, 2), min_size=prompts, max_size=prompts)))
    sums_KB = resampled_sums(np.stack([lower_N, higher_N]), prompt_draws(prompts, 30, data.draw(st.integers(0, 99))))
    assert (sums_KB[0] <= sums_KB[1]).all()
    assert all(ends_K[0] <= ends_K[1] for ends_K in percentile_interval(sums_KB, 0.2))


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
