"""Effects against their definition, verdicts at their thresholds, and curtailment against every completion."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rocktokens.errors import RocktokensError
from rocktokens.inference.paired import score_interval, sign_flip_test
from rocktokens.knockout.verdicts import Effect, VerdictRule, paired_effects, paper_verdict, settled_verdicts, verdict

RULE = VerdictRule()
Z2 = 3.841458820694124


def differing(prompts: int, lost: int, gained: int = 0) -> np.ndarray:
    """(1, N): these numbers of prompts lost and gained, the others unchanged."""
    return np.repeat([-1, 1, 0], [lost, gained, prompts - lost - gained])[None]


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
    ],
)
def test_a_rule_that_cannot_be_is_refused(field, value, remedy):
    with pytest.raises(RocktokensError, match=remedy) as refused:
        VerdictRule(**{field: value})
    assert str(refused.value).startswith(f"{field} = {value}")


def test_the_defaults_are_the_methods():
    assert dataclasses.astuple(VerdictRule()) == (0.05, 0.01, 0.03, 0)


# Effects


def tango(lost: float, gained: float, pairs: float, alpha: float) -> tuple[float, float]:
    low, high = score_interval(np.array([lost]), np.array([gained]), pairs, alpha)
    return float(low[0]), float(high[0])


def test_effects_are_delta_score_interval_and_sign_flip():
    changes_KR = np.random.default_rng(0).integers(-1, 2, (4, 240))
    for changes_R, effect in zip(changes_KR, paired_effects(changes_KR, 3, RULE), strict=True):
        by_prompt_N = changes_R.reshape(80, 3).sum(axis=1)
        lost, gained = int((changes_R < 0).sum()), int((changes_R > 0).sum())
        between = (by_prompt_N**2).sum() + 9 - by_prompt_N.sum() ** 2 / 80
        counting_as_one = max(1.0, between / (lost + gained + 3 - by_prompt_N.sum() ** 2 / 240))
        expected = tango(lost / counting_as_one, gained / counting_as_one, 240 / counting_as_one, 0.05)
        assert effect.delta == pytest.approx(changes_R.mean(), abs=1e-15)
        assert effect.interval == pytest.approx(expected, abs=1e-12)
        assert effect.p == sign_flip_test(by_prompt_N).p


def test_bans_do_not_influence_each_other():
    differences_KN = np.random.default_rng(1).integers(-1, 2, (5, 60))
    together = paired_effects(differences_KN, 1, RULE)
    assert together == [paired_effects(differences_KN[k : k + 1], 1, RULE)[0] for k in range(5)]
    assert paired_effects(differences_KN[:0], 1, RULE) == []


@pytest.mark.parametrize("num_samples", [1, 4])
def test_a_ban_that_changes_nothing_is_known_as_well_as_its_prompts_allow(num_samples):
    """However many answers each of them has."""
    end = Z2 / (50 + Z2)
    [effect] = paired_effects(np.zeros((1, 50 * num_samples), dtype=int), num_samples, RULE)
    assert (effect.delta, effect.p) == (0.0, 1.0)
    assert effect.interval == pytest.approx((-end, end), abs=1e-12)


def test_answers_that_change_together_count_as_one():
    [single] = paired_effects(differing(200, 30, 5), 1, RULE)
    [whole] = paired_effects(np.repeat(differing(200, 30, 5), 4, axis=1), 4, RULE)
    assert (whole.delta, whole.p) == (single.delta, pytest.approx(single.p))
    assert whole.interval == pytest.approx(single.interval, abs=1e-12)


def test_scattered_answers_say_more_than_as_many_of_the_same_prompts():
    together_R, scattered_R = np.zeros((2, 800), dtype=int)
    together_R[:120], scattered_R[: 4 * 120 : 4] = -1, -1
    together, scattered = paired_effects(np.stack([together_R, scattered_R]), 4, RULE)
    [independent] = paired_effects(scattered_R[None], 1, RULE)
    assert together.delta == scattered.delta
    assert together.interval[0] < scattered.interval[0] < scattered.interval[1] < together.interval[1]
    assert scattered.interval == pytest.approx(independent.interval, abs=1e-12)


@pytest.mark.parametrize("prompts", [10, 60, 1000])
def test_four_losses_and_no_gain_exclude_zero(prompts):
    """(b − c)²/(b + c) > z² = 3.84: McNemar's statistic, whatever the number of prompts."""
    three, four, mixed = (
        paired_effects(differing(prompts, *counts), 1, RULE)[0] for counts in ((3, 0), (4, 0), (6, 1))
    )
    assert three.interval[1] > 0 > four.interval[1]
    assert mixed.interval[1] > 0


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
    found = [
        verdict_of(paired_effects(np.repeat(differing(prompts, n), 3, axis=1), 3, RULE)[0]) for n in (lost, lost - 1)
    ]
    assert found == ["pillar", "neutral"]


def test_the_paper_calls_undecided_neutral():
    kinds = ("pillar", "stumbling", "neutral", "undecided", "untested")
    assert [paper_verdict(kind) for kind in kinds] == ["pillar", "stumbling", "neutral", "neutral", "untested"]


# Curtailment


@st.composite
def boxes(draw) -> tuple[np.ndarray, np.ndarray, int]:
    """Lowest and highest changes of few answers, up to five of them unknown; most known ones agree in sign."""
    num_samples = draw(st.integers(1, 3))
    side = draw(st.sampled_from([-1, 1]))
    known = draw(st.lists(st.sampled_from([side, side, 0, -side]), min_size=1, max_size=12))
    right = draw(st.lists(st.booleans(), max_size=5))
    lowest = known + [-1 if was_right else 0 for was_right in right]
    highest = known + [0 if was_right else 1 for was_right in right]
    unchanged = [0] * (-len(lowest) % num_samples)
    order = draw(st.permutations(range(len(lowest) + len(unchanged))))
    return np.array(lowest + unchanged)[order], np.array(highest + unchanged)[order], num_samples


def completions(lowest_R: np.ndarray, highest_R: np.ndarray) -> np.ndarray:
    ranges = [range(low, high + 1) for low, high in zip(lowest_R.tolist(), highest_R.tolist(), strict=True)]
    return np.array(list(itertools.product(*ranges)))


@settings(deadline=None, max_examples=300)
@given(
    box=boxes(),
    alpha=st.sampled_from([0.05, 0.3, 0.6]),
    epsilon=st.sampled_from([0.0, 0.01, 0.3]),
    margin=st.sampled_from([0.0, 0.2, 0.5, 0.8]),
    noise=st.sampled_from([(0.0, 0.0), (-0.05, 0.1)]),
)
def test_a_verdict_is_settled_when_no_completion_changes_it(box, alpha, epsilon, margin, noise):
    lowest_R, highest_R, num_samples = box
    rule = VerdictRule(alpha, epsilon, margin)
    effects = paired_effects(completions(lowest_R, highest_R), num_samples, rule, noise)
    possible = {verdict_of(effect, rule) for effect in effects}
    (settled,) = settled_verdicts(lowest_R[None], highest_R[None], num_samples, rule, noise)
    if settled is not None:
        assert possible == {settled}
    elif num_samples == 1 and possible == {"undecided"}:
        assert any(effect.interval[0] >= -margin for effect in effects)
        assert any(effect.interval[1] <= margin for effect in effects)
    elif num_samples == 1:
        assert len(possible) > 1


@pytest.mark.parametrize(
    ("lost", "gained", "unknown", "expected"),
    [(120, 0, 80, "pillar"), (0, 120, 80, "stumbling"), (0, 0, 3, "neutral"), (60, 60, 3, "undecided")],
)
def test_every_verdict_can_be_settled_early(lost, gained, unknown, expected):
    lowest_N, highest_N = np.repeat(differing(400, lost, gained), 2, axis=0)
    lowest_N[-unknown:], highest_N[-unknown:] = -1, 1
    open_N = np.ones(400, dtype=np.int64)
    lowest_KN, highest_KN = np.stack([lowest_N, -open_N]), np.stack([highest_N, open_N])
    assert settled_verdicts(lowest_KN, highest_KN, 1, RULE) == [expected, None]
    with_twins = [np.repeat(changes_KN, 2, axis=1) for changes_KN in (lowest_KN, highest_KN)]
    assert settled_verdicts(*with_twins, 2, RULE) == [expected, None]


def test_nothing_unknown_settles_every_verdict():
    differences_KN = np.random.default_rng(3).choice([-1, 0, 1], (40, 300), p=[0.06, 0.9, 0.04])
    differences_KN[:10, 20:] = 0
    finished = [verdict_of(effect) for effect in paired_effects(differences_KN, 1, RULE)]
    assert settled_verdicts(differences_KN, differences_KN, 1, RULE) == finished
    assert set(finished) == {"pillar", "neutral", "undecided"}
    assert settled_verdicts(differences_KN[:0], differences_KN[:0], 1, RULE) == []
