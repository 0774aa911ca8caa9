"""Effects against their definition, verdicts at their thresholds, and curtailment against every completion."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rocktokens.errors import RocktokensError
from rocktokens.inference.bootstrap import prompt_draws
from rocktokens.knockout.verdicts import Effect, VerdictRule, paired_effects, paper_verdict, settled_verdicts, verdict
from rocktokens.run_dir import derive_seed

RULE = VerdictRule(resamples=2_000)


def differing(prompts: int, lost: int, gained: int = 0, size: int = 1) -> np.ndarray:
    """(1, N): so many prompts with ``size`` answers lost, so many with ``size`` gained, the others unchanged."""
    return np.repeat([-size, size, 0], [lost, gained, prompts - lost - gained])[None]


def verdict_of(effect: Effect, rule: VerdictRule = RULE) -> str:
    return verdict(effect.delta, effect.interval, rule)


# VerdictRule


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("alpha", 0.0, "between 0 and 1"),
        ("alpha", 1.0, "between 0 and 1"),
        ("alpha", float("nan"), "between 0 and 1"),
        ("epsilon", -0.01, "from 0 to 1"),
        ("epsilon", 1.5, "from 0 to 1"),
        ("margin", float("nan"), "from 0 to 1"),
        ("resamples", 39, "at least 40"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(field, value, remedy):
    with pytest.raises(RocktokensError, match=remedy) as refused:
        VerdictRule(**{field: value})
    assert str(refused.value).startswith(f"{field} = {value}")


def test_the_defaults_are_the_methods():
    assert dataclasses.astuple(VerdictRule()) == (0.05, 0.01, 0.03, 10_000, 0)


# Effects


def test_effects_are_delta_bootstrap_and_sign_flip():
    differences_KN = np.random.default_rng(0).integers(-3, 3, (4, 80))
    draws_BN = np.concatenate(list(prompt_draws(80, 2_000, derive_seed(0, "paired bootstrap"))))
    for differences_N, effect in zip(differences_KN, paired_effects(differences_KN, 3, RULE), strict=True):
        means = sorted(float(counts_N @ differences_N) / 240 for counts_N in draws_BN)
        assert effect.delta == pytest.approx(differences_N.mean() / 3, abs=1e-15)
        assert effect.interval == pytest.approx((means[49], means[-50]), abs=1e-15)
        assert effect.interval[0] < effect.delta < effect.interval[1]


def test_bans_do_not_influence_each_other():
    differences_KN = np.random.default_rng(1).integers(-1, 2, (5, 60))
    together = paired_effects(differences_KN, 1, RULE)
    assert together == [paired_effects(differences_KN[k : k + 1], 1, RULE)[0] for k in range(5)]
    assert paired_effects(differences_KN[:0], 1, RULE) == []


def test_the_seed_moves_the_interval_and_nothing_else():
    differences_KN = np.random.default_rng(1).integers(-4, 5, (1, 90))
    (first,), (again,), (other,) = (
        paired_effects(differences_KN, 4, dataclasses.replace(RULE, seed=seed)) for seed in (0, 0, 1)
    )
    assert first == again
    assert (first.delta, first.p) == (other.delta, other.p)
    assert first.interval != other.interval


def test_a_ban_that_changes_nothing_has_no_effect():
    assert paired_effects(differing(50, 0), 4, RULE) == [Effect(0.0, (0.0, 0.0), 1.0)]


@pytest.mark.parametrize("prompts", [10, 60, 1000])
def test_few_losses_do_not_exclude_zero(prompts):
    """2 · 2^−5 > 0.05 ≥ 2 · 2^−6: with five losses the end is held at 0, with six it is not."""
    (five,), (six,) = (paired_effects(differing(prompts, lost), 1, RULE) for lost in (5, 6))
    assert five.interval[0] < 0 == five.interval[1]
    assert (five.p, six.p) == pytest.approx((1 / 16, 1 / 32))
    assert six.interval[1] < 0
    (five,), (six,) = (paired_effects(differing(prompts, 0, gained), 1, RULE) for gained in (5, 6))
    assert five.interval[0] == 0 < five.interval[1]
    assert six.interval[0] > 0


def test_an_exact_p_equal_to_alpha_rejects():
    rule = VerdictRule(alpha=2.0**-6, resamples=2_000)
    held, rejected = (paired_effects(differing(300, lost), 1, rule)[0].interval[1] for lost in (6, 7))
    assert held == 0 > rejected


@pytest.mark.parametrize(("noise", "moved"), [((-0.01, 0.02), (-0.01, 0.02)), ((0.005, -0.005), (0.0, 0.0))])
def test_noise_moves_the_ends_outwards_only(noise, moved):
    (exact,) = paired_effects(differing(200, 30, 5), 1, RULE)
    (noisy,) = paired_effects(differing(200, 30, 5), 1, RULE, noise)
    assert noisy.interval == pytest.approx((exact.interval[0] + moved[0], exact.interval[1] + moved[1]))
    assert (noisy.delta, noisy.p) == (exact.delta, exact.p)


def test_noise_as_large_as_the_effect_hides_it():
    differences_KN = differing(200, 30)
    (exact,) = paired_effects(differences_KN, 1, RULE)
    (noisy,) = paired_effects(differences_KN, 1, RULE, noise=(0.0, -exact.interval[1]))
    assert (verdict_of(exact), verdict_of(noisy)) == ("pillar", "undecided")


# Verdicts


@pytest.mark.parametrize(
    ("delta", "interval", "expected"),
    [
        (-0.02, (-0.05, -0.001), "pillar"),
        (-0.02, (-0.05, 0.0), "undecided"),
        (-0.02, (-0.03, 0.0), "neutral"),
        (-0.009, (-0.02, -0.001), "neutral"),
        (-0.009, (-0.05, -0.001), "undecided"),
        (-0.01, (-0.02, -0.001), "pillar"),
        (0.02, (0.001, 0.05), "stumbling"),
        (0.02, (0.0, 0.05), "undecided"),
        (0.01, (0.001, 0.02), "stumbling"),
        (0.0, (-0.03, 0.03), "neutral"),
        (0.0, (-0.0301, 0.03), "undecided"),
        (0.0, (-0.03, 0.0301), "undecided"),
        (0.0, (0.0, 0.0), "neutral"),
    ],
)
def test_verdicts_at_their_thresholds(delta, interval, expected):
    assert verdict(delta, interval, VerdictRule()) == expected


@given(hundreds=st.integers(1, 50), percent=st.integers(1, 20), free_right=st.integers(0, 4_000))
@example(hundreds=2, percent=1, free_right=16)
def test_a_change_of_exactly_epsilon_counts(hundreds, percent, free_right):
    """0.08 − 0.07 is less than 0.01 in floats; a change of accuracy by ε must count as ε all the same."""
    answers, changed, rule = 100 * hundreds, percent * hundreds, VerdictRule(epsilon=percent / 100)
    one = 1 / answers
    for sign, interval, expected in ((-1, (-0.9, -one), "pillar"), (1, (one, 0.9), "stumbling")):
        by_epsilon, by_less = (
            (free_right + sign * change) / answers - free_right / answers for change in (changed, changed - 1)
        )
        assert verdict(by_epsilon, interval, rule) == expected
        assert verdict(by_less, interval, rule) == "undecided"


@given(hundreds=st.integers(1, 50), percent=st.integers(0, 20), noise=st.integers(0, 200))
@example(hundreds=1, percent=6, noise=1)
def test_an_interval_that_ends_exactly_at_the_margin_is_within(hundreds, percent, noise):
    """As it does when an engine's noise was added to it: 0.05 + 0.01 is more than 0.06 in floats."""
    answers, edge, rule = 100 * hundreds, percent * hundreds, VerdictRule(margin=percent / 100)
    at_edge, beyond = ((inner - noise) / answers + noise / answers for inner in (edge, edge + 1))
    assert verdict(0.0, (-at_edge, at_edge), rule) == "neutral"
    assert verdict(0.0, (-beyond, 0.0), rule) == "undecided"
    assert verdict(0.0, (0.0, beyond), rule) == "undecided"


def test_rounding_does_not_make_a_pillar_of_an_end_at_zero():
    end = 0.3 - (0.1 + 0.2)
    assert end < 0
    assert verdict(-0.3, (-0.4, end), VerdictRule()) == "undecided"
    assert verdict(0.3, (-end, 0.4), VerdictRule()) == "undecided"


@pytest.mark.parametrize(("prompts", "lost"), [(700, 7), (1_100, 11), (2_900, 29)])
def test_losing_one_answer_less_than_epsilon_makes_no_pillar(prompts, lost):
    found = [verdict_of(paired_effects(differing(prompts, n, size=3), 3, RULE)[0]) for n in (lost, lost - 1)]
    assert found == ["pillar", "neutral"]


def test_the_paper_calls_undecided_neutral():
    kinds = ("pillar", "stumbling", "neutral", "undecided", "untested")
    assert [paper_verdict(kind) for kind in kinds] == ["pillar", "stumbling", "neutral", "neutral", "untested"]


# Curtailment


@st.composite
def boxes(draw) -> tuple[np.ndarray, np.ndarray, int]:
    """Lowest and highest differences of few prompts, up to four of them unknown; most known ones agree in sign."""
    num_samples = draw(st.integers(1, 2))
    side = draw(st.sampled_from([-1, 1]))
    known = draw(st.lists(st.sampled_from([side * num_samples, side, side, 0, -side]), min_size=1, max_size=9))
    right = draw(st.lists(st.integers(0, num_samples), max_size=4))
    lowest_N = np.array(known + [-n for n in right])
    highest_N = np.array(known + [num_samples - n for n in right])
    return lowest_N, highest_N, num_samples


def completions(lowest_N: np.ndarray, highest_N: np.ndarray) -> np.ndarray:
    ranges = [range(low, high + 1) for low, high in zip(lowest_N.tolist(), highest_N.tolist(), strict=True)]
    return np.array(list(itertools.product(*ranges)))


@settings(deadline=None, max_examples=300)
@given(
    box=boxes(),
    alpha=st.sampled_from([0.1, 0.3, 0.6]),
    epsilon=st.sampled_from([0.0, 0.01, 0.3]),
    margin=st.sampled_from([0.0, 0.2, 0.5, 0.8]),
    noise=st.sampled_from([(0.0, 0.0), (-0.05, 0.1)]),
    seed=st.integers(0, 3),
)
def test_a_verdict_is_settled_when_no_completion_changes_it(box, alpha, epsilon, margin, noise, seed):
    lowest_N, highest_N, num_samples = box
    rule = VerdictRule(alpha, epsilon, margin, resamples=25, seed=seed)
    effects = paired_effects(completions(lowest_N, highest_N), num_samples, rule, noise)
    possible = {verdict_of(effect, rule) for effect in effects}
    (settled,) = settled_verdicts(lowest_N[None], highest_N[None], num_samples, rule, noise)
    if settled is not None:
        assert possible == {settled}
    elif possible == {"undecided"}:
        assert any(effect.interval[0] >= -margin for effect in effects)
        assert any(effect.interval[1] <= margin for effect in effects)
    else:
        assert len(possible) > 1


@pytest.mark.parametrize(
    ("lost", "gained", "unknown", "expected"),
    [(120, 0, 80, "pillar"), (0, 120, 80, "stumbling"), (0, 0, 3, "neutral"), (40, 40, 3, "undecided")],
)
def test_every_verdict_can_be_settled_early(lost, gained, unknown, expected):
    lowest_N, highest_N = np.repeat(differing(400, lost, gained), 2, axis=0)
    lowest_N[-unknown:], highest_N[-unknown:] = -1, 1
    open_N = np.ones(400, dtype=np.int64)
    settled = settled_verdicts(np.stack([lowest_N, -open_N]), np.stack([highest_N, open_N]), 1, RULE)
    assert settled == [expected, None]


def test_nothing_unknown_settles_every_verdict():
    differences_KN = np.random.default_rng(3).choice([-1, 0, 1], (40, 300), p=[0.06, 0.9, 0.04])
    differences_KN[:10, 20:] = 0
    finished = [verdict_of(effect) for effect in paired_effects(differences_KN, 1, RULE)]
    assert settled_verdicts(differences_KN, differences_KN, 1, RULE) == finished
    assert set(finished) == {"pillar", "neutral", "undecided"}
    assert settled_verdicts(differences_KN[:0], differences_KN[:0], 1, RULE) == []
