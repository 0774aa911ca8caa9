"""Everything knockout.json says, on sweeps small enough to count by hand; no model decodes anything."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from knockout_records import SETTINGS
from rocktokens.inference.power import detectable_loss, detectable_scattered_loss, neutral_pairs
from rocktokens.knockout.designs import Interim, Settled
from rocktokens.knockout.outcomes import Continuation, SweepOutcomes, first_occurrences
from rocktokens.knockout.records import (
    Ban,
    DetectableLoss,
    EngineNoise,
    FreeAnswers,
    KnockoutSweep,
    NeutralPrompts,
    Role,
    SweepCost,
    VerdictCounts,
)
from rocktokens.knockout.summary import summarise
from rocktokens.knockout.verdicts import VerdictRule
from rocktokens.traces.token_text import Vocabulary
from rocktokens.types import Interval, Rollout, Verdict

RULE = VerdictRule(seed=4)
EXACT_NOISE = EngineNoise(rollouts=4, tokens=6, differing=0, flips=0, delta=0.0, interval=(0.0, 0.0))
BY_RULE = ("alpha", "epsilon", "margin", "interval")
GIVEN = {own.name: getattr(SETTINGS, own.name) for own in fields(SETTINGS) if own.name not in BY_RULE}
NEUTRAL = Settled("neutral", 0.0, (0.0, 0.0), 1.0)
STOPPED = Settled("pillar", None, None, None, "curtailed")


def rollout(place: int, tokens: Sequence[int], num_samples: int = 1, finished: bool = True) -> Rollout:
    ids = np.array(tokens, np.int32)
    prompt, sample = divmod(place, num_samples)
    return Rollout(place, f"p{prompt}", sample, ids[:1], ids, np.zeros(len(ids), np.float32), 0, finished)


def continuation(start: int, tokens: Sequence[int], right: bool, finished: bool = True) -> Continuation:
    return Continuation(start, np.array(tokens, np.int32), finished, right)


def small_sweep() -> SweepOutcomes:
    """Four bans over four prompts; the last prompt of the second has not been looked at."""
    free = [rollout(0, [5, 6, 7, 1]), rollout(1, [6, 6, 1]), rollout(2, [5, 8, 8, 8, 8], finished=False)]
    free.append(rollout(3, [7, 1]))
    bans = [Ban((5,), "five"), Ban((6, 7), "both"), Ban((8,), "eight", "matched"), Ban((9,), "nine", "never")]
    lowest_KR = np.array([[-1, 0, 0, 0], [0, 1, 0, -1], [0, 0, -1, 0], [0, 0, 0, 0]])
    first_KR = first_occurrences(free, bans)
    return SweepOutcomes(
        bans=bans,
        free=free,
        free_right_R=np.array([True, False, True, True]),
        first_KR=first_KR,
        looked=[
            {0: continuation(0, [2, 2, 1], right=False), 2: continuation(0, [3, 1], right=True)},
            {0: continuation(1, [4, 4, 4, 4], right=True, finished=False), 1: continuation(0, [1], right=True)},
            {2: continuation(1, [3, 3], right=False)},
            {},
        ],
        interim=Interim(
            lowest_KR=lowest_KR,
            highest_KR=lowest_KR + np.array([[0] * 4, [0, 0, 0, 1], [0] * 4, [0] * 4]),
            affected_KR=first_KR >= 0,
            free_right_R=np.array([True, False, True, True]),
            num_samples=1,
            looked=4,
        ),
        settled=[
            Settled("undecided", -0.25, (-0.75, 0.0), 1.0),
            Settled("undecided", None, None, None, "curtailed"),
            Settled("pillar", -0.25, (-0.5, -0.1), 0.03),
            NEUTRAL,
        ],
        noise=EXACT_NOISE,
        retraced_tokens=5,
    )


def judging(role: Role, *settled: Settled) -> list[tuple[Role, Settled]]:
    return [(role, own) for own in settled]


def sweep_of(
    judged: Sequence[tuple[Role, Settled]],
    differences_KN: np.ndarray | None = None,
    ids: Sequence[int] | None = None,
    free: list[Rollout] | None = None,
    **changes: Any,
) -> SweepOutcomes:
    """Bans of single types that were judged so, wholly known; by default they change nothing on two prompts."""
    free = free or [rollout(0, [5, 1]), rollout(1, [6, 1])]
    bans = [Ban((token,), f"<{token}>", role) for token, (role, _) in zip(ids or range(50, 999), judged, strict=False)]
    known_KN = np.zeros((len(bans), len(free)), int) if differences_KN is None else differences_KN
    right_R = np.arange(len(free)) % 2 == 0
    first_KR = first_occurrences(free, bans)
    interim = Interim(known_KN, known_KN, first_KR >= 0, right_R, 1, len(free))
    settled = [own for _, own in judged]
    outcomes = SweepOutcomes(bans, free, right_R, first_KR, [{} for _ in bans], interim, settled, EXACT_NOISE, 0)
    return replace(outcomes, **changes)


def summary(
    outcomes: SweepOutcomes, rule: VerdictRule = RULE, columns: dict | None = None, unmatched: Sequence[int] = ()
) -> KnockoutSweep:
    gold_of = {rollout.prompt_id: f"<9{rollout.prompt_id}> or <5>" for rollout in outcomes.free}
    return summarise(outcomes, rule, Vocabulary(None), "sha", GIVEN, columns or {}, unmatched, gold_of)


# What is said of one ban


def test_every_ban_keeps_what_was_settled_and_says_what_else_is_known():
    found = summary(small_sweep()).knockouts
    for own, ban, settled in zip(found, small_sweep().bans, small_sweep().settled, strict=True):
        assert (own.ban, own.verdict, own.delta) == (ban, settled.verdict, settled.delta)
        assert (own.interval, own.p, own.stopped) == (settled.interval, settled.p, settled.stopped)
    assert [own.paper_verdict for own in found] == ["neutral", "neutral", "pillar", "neutral"]
    assert [own.n_looked for own in found] == [4, 3, 4, 4]
    assert [own.changes.n_rollouts for own in found] == [2, 3, 1, 0]
    assert [own.changes.lost for own in found] == [[("p0", 0)], [], [("p2", 0)], []]
    assert [own.changes.gained for own in found] == [[], [("p1", 0)], [], []]
    assert found[1].changes.replacements == [(1, "<1>", 0.5), (4, "<4>", 0.5)]


def test_a_ban_can_lose_its_right_answers_and_gain_its_wrong_ones_and_no_others():
    found = summary(small_sweep()).knockouts
    assert [own.bounds for own in found] == [(-0.5, 0.0), (-0.5, 0.25), (-0.25, 0.0), (0.0, 0.0)]


def test_what_a_ban_could_have_shown_comes_from_the_prompts_that_are_known():
    rng = np.random.default_rng(0)
    lowest_KN, known_KN = rng.integers(-1, 2, (2, 200)), rng.random((2, 200)) < 0.7
    lowest_KN[~known_KN] = -1
    free = [rollout(place, [5, 1]) for place in range(200)]
    outcomes = sweep_of(judging("tested", NEUTRAL, NEUTRAL), lowest_KN, free=free)
    highest_KN = np.where(known_KN, lowest_KN, 1)
    noise = replace(EXACT_NOISE, differing=1, interval=(-0.01, 0.02))
    outcomes = replace(outcomes, interim=replace(outcomes.interim, highest_KR=highest_KN), noise=noise)
    for ban, own in enumerate(summary(outcomes).knockouts):
        known = lowest_KN[ban, known_KN[ban]][None]
        [expected] = detectable_scattered_loss(known, RULE.alpha, RULE.epsilon, 0.02)
        assert own.detectable == expected
        assert own.detectable not in detectable_scattered_loss(lowest_KN, RULE.alpha, RULE.epsilon, 0.02)
        assert own.detectable > detectable_scattered_loss(known, RULE.alpha, RULE.epsilon)[0]
        assert own.n_looked == known_KN[ban].sum()


@pytest.mark.parametrize("noise", [(0.0, 0.0), (-0.03, 0.02)])
def test_what_the_sample_could_have_shown_is_corrected_for_the_tested_bans_alone(noise: Interval):
    free = [rollout(place, [5, 1]) for place in range(120)]
    judged = [*judging("tested", *[NEUTRAL] * 20), *judging("matched", *[NEUTRAL] * 40)]
    found = summary(sweep_of(judged, free=free, noise=replace(EXACT_NOISE, interval=noise))).detectable
    single, corrected, all_bans = (detectable_loss(120, RULE.alpha, RULE.epsilon, n, noise[1]) for n in (None, 20, 60))
    assert found == DetectableLoss(single=single, corrected=corrected)
    assert single < corrected < all_bans


# Prompts that a neutral verdict needs


def test_undecided_bans_say_how_many_prompts_would_do():
    """8 of 100 answers differ under the first ban and none under the second; the third is not written at all."""
    free = [rollout(place, [5, 6, 1]) for place in range(100)]
    changes_KR = np.zeros((3, 100), int)
    changes_KR[0, :8] = [-1, 1] * 4
    found = summary(sweep_of(judging("tested", *[NEUTRAL] * 3), changes_KR, ids=[5, 6, 7], free=free))
    [some] = neutral_pairs(np.array([0.08]), RULE.alpha, RULE.margin).tolist()
    assert [own.neutral_prompts for own in found.knockouts] == [some, 125, 125]
    assert found.neutral == NeutralPrompts(unchanged=125, typical=125)


def test_several_answers_need_fewer_prompts_unless_they_change_together():
    free = [rollout(place, [5, 1], num_samples=4) for place in range(400)]
    scattered_R, together_R = np.zeros((2, 400), int)
    scattered_R[::13], together_R[:32] = 1, 1
    outcomes = sweep_of(judging("tested", NEUTRAL, NEUTRAL), np.stack([scattered_R, together_R]), ids=[5, 5], free=free)
    found = summary(replace(outcomes, interim=replace(outcomes.interim, num_samples=4, looked=100)))
    scattered, together = (own.neutral_prompts for own in found.knockouts)
    [alone] = neutral_pairs(np.array([0.08]), RULE.alpha, RULE.margin).tolist()
    assert scattered is not None and together is not None
    assert together == alone
    assert alone / 4 < scattered < alone / 3


def test_a_ban_stopped_early_is_taken_to_go_on_as_it_began():
    """Half of the answers hold the token, and half of those are known, a tenth of them changed: 5 % in all."""
    free = [rollout(place, [5, 1] if place % 2 else [6, 1]) for place in range(400)]
    lowest_KR = np.zeros((1, 400), int)
    lowest_KR[0, 1:200:20] = -1
    outcomes = sweep_of(judging("tested", NEUTRAL), lowest_KR, ids=[5], free=free)
    highest_KR = np.where(outcomes.interim.affected_KR & (np.arange(400) >= 200), 1, lowest_KR)
    half = replace(outcomes.interim, highest_KR=highest_KR, looked=200)
    [own] = summary(replace(outcomes, interim=half)).knockouts
    assert own.neutral_prompts == neutral_pairs(np.array([0.05]), RULE.alpha, RULE.margin)[0]
    unseen = replace(half, highest_KR=np.where(outcomes.interim.affected_KR, 1, 0), lowest_KR=np.zeros((1, 400), int))
    assert summary(replace(outcomes, interim=unseen)).knockouts[0].neutral_prompts is None


def test_lost_prompts_with_the_token_in_the_gold_answer_are_counted():
    """Gold answers hold <5> and <9p0>, <9p1>, …; a set counts if any of its tokens is there."""
    found = summary(small_sweep()).knockouts
    assert [own.lost_in_gold for own in found] == [1, 0, 0, 0]
    assert [own.changes.lost_prompts for own in found] == [1, 0, 1, 0]


# Correction


def test_p_is_corrected_by_benjamini_hochberg_within_each_role():
    """Tested: .01·4, .02·4/2 and .03·4/3 all come down to the .04 of the third or below; .5 stays the largest."""
    tested, matched = {0.5: 0.5, 0.01: 0.04, 0.03: 0.04, 0.02: 0.04}, {0.04: 0.06, 0.06: 0.06, 0.001: 0.003}
    judged = judging("tested", *(replace(NEUTRAL, p=p) for p in tested))
    judged += judging("matched", *(replace(NEUTRAL, p=p) for p in matched)) + judging("never", NEUTRAL)
    rng = np.random.default_rng(3)
    found = summary(sweep_of([judged[place] for place in rng.permutation(len(judged))]))
    for role, expected in (("tested", tested), ("matched", matched), ("never", {1.0: 1.0})):
        q_of = {own.p: own.q for own in found.knockouts if own.ban.role == role}
        assert q_of == pytest.approx(expected, abs=1e-12), role


def test_a_role_in_which_a_ban_has_no_p_is_not_corrected():
    judged = judging("tested", replace(NEUTRAL, p=0.01), STOPPED) + judging("matched", replace(NEUTRAL, p=0.2))
    found = summary(sweep_of(judged))
    assert [own.q for own in found.knockouts] == [None, None, 0.2]
    assert found.counts["tested"].corrected is None
    assert found.counts["tested"].method == counts(pillar=1, neutral=1)
    assert found.counts["matched"].corrected == counts(neutral=1)


def counts(**some: int) -> dict[str, int]:
    return {"pillar": 0, "stumbling": 0, "neutral": 0, "undecided": 0, **some}


@pytest.mark.parametrize("epsilon", [0.0, 0.005])
@pytest.mark.parametrize(
    ("verdict", "interval", "p", "corrected"),
    [
        ("pillar", (-0.02, -0.001), 0.04, "neutral"),
        ("pillar", (-0.09, -0.001), 0.04, "undecided"),
        ("pillar", (-0.09, -0.001), 0.025, "pillar"),
        ("stumbling", (0.001, 0.03), 0.04, "neutral"),
        ("stumbling", (0.001, 0.05), 0.04, "undecided"),
        ("stumbling", (0.001, 0.05), 0.001, "stumbling"),
        ("undecided", (-0.05, 0.04), 0.001, "undecided"),
        ("neutral", (-0.01, 0.01), 0.04, "neutral"),
    ],
)
def test_an_effect_that_does_not_survive_is_what_its_interval_makes_it(
    verdict: Verdict, interval: Interval, p: float, corrected: str, epsilon: float
):
    """Of two bans, so that q is twice p; the other one has p = 1."""
    own = Settled(verdict, sum(interval) / 2, interval, p)
    outcomes = sweep_of(judging("tested", own, NEUTRAL) + judging("never", NEUTRAL))
    found = summary(outcomes, replace(RULE, epsilon=epsilon)).counts
    one_more = {"neutral": 1}
    assert found["tested"].corrected == counts(**{**one_more, corrected: 1 + one_more.get(corrected, 0)})
    assert found["tested"].method == counts(**{**one_more, verdict: 1 + one_more.get(verdict, 0)})
    by_paper = found["tested"].paper
    assert by_paper is not None and by_paper["undecided"] == 0
    assert sum(by_paper.values()) == 2
    assert found["never"] == VerdictCounts(*[counts(neutral=1)] * 3)
    assert found["matched"].corrected == counts()


# Cost


def test_cost_is_counted_in_tokens():
    """Free 4 + 3 + 5 + 2, again 6, continuations 3 + 2, 4 + 1 and 2.

    The full sweep writes all 14 once without a ban, then 3 + 3 + 2 + 2, 5 + 1 + 5 + 2, 4 + 3 + 3 + 2 and the 14 again.
    """
    assert summary(small_sweep()).cost == SweepCost(
        jobs=5,
        free_tokens=14,
        decoded_tokens=14 + 6 + 5 + 5 + 2,
        retraced_tokens=5,
        full_sweep_tokens=14 + 10 + 13 + 12 + 14,
        share=(32 + 5) / 63,
    )


def test_nothing_banned_costs_the_free_answers_and_their_repetition():
    cost = summary(sweep_of([])).cost
    assert (cost.jobs, cost.decoded_tokens, cost.full_sweep_tokens) == (0, 4 + 6, 4)


# Baseline


def test_the_baseline_is_that_of_the_free_answers():
    found = summary(small_sweep()).baseline
    low, high = found.interval
    assert found == FreeAnswers(
        accuracy=0.75, interval=(low, high), n_prompts=4, num_samples=1, mean_length=3.5, truncated_share=0.25
    )
    z, n, share = 1.959964, 4, 0.75
    middle, half = share + z * z / (2 * n), z * np.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    assert (low, high) == pytest.approx(((middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)))


def test_several_answers_a_prompt_are_resampled_by_prompt():
    """One right of two and two of two: resamples of both prompts are right at 1/2, 3/4 or 1, each often."""
    free = [rollout(place, [5, 1], num_samples=2) for place in range(4)]
    outcomes = sweep_of([], free=free, free_right_R=np.array([True, False, True, True]))
    baseline = summary(replace(outcomes, interim=replace(outcomes.interim, num_samples=2, looked=2))).baseline
    assert (baseline.accuracy, baseline.n_prompts, baseline.num_samples) == (0.75, 2, 2)
    assert baseline.interval == (0.5, 1.0)


def test_what_the_numbers_depend_on_is_recorded():
    found = summary(small_sweep(), replace(RULE, alpha=0.1, epsilon=0.02, margin=0.2))
    assert found.settings == replace(SETTINGS, alpha=0.1, epsilon=0.02, margin=0.2)
    assert found.tokenizer_sha256 == "sha"
    assert found.noise == EXACT_NOISE


# Warnings


def warnings_of(n_prompts: int, right: int, unmatched: Sequence[int] = (), **noise: Any) -> list[str]:
    free = [rollout(place, [5, 1]) for place in range(n_prompts)]
    right_R = np.arange(n_prompts) < right
    outcomes = sweep_of([], free=free, free_right_R=right_R, noise=replace(EXACT_NOISE, **noise))
    return summary(outcomes, unmatched=unmatched).warnings


def test_a_sample_with_room_and_an_exact_engine_warns_of_nothing():
    assert warnings_of(125, 50) == []


@pytest.mark.parametrize("n_prompts", [1, 124])
def test_a_sample_that_cannot_show_anything_neutral_says_so(n_prompts: int):
    only = warnings_of(n_prompts, n_prompts // 2)[0]
    prompts = "1 prompt" if n_prompts == 1 else "124 prompts"
    assert only == (
        f"{prompts} cannot show a ban to be neutral within 3 points: at least 125 prompts would, even if no answer "
        "changes (knockout.num_prompts)"
    )


def test_noise_beyond_the_margin_leaves_no_room_for_neutral():
    few, of_the_engine = warnings_of(500, 50, differing=3, flips=2, interval=(-0.031, 0.01))
    assert "no number of prompts would, the engine's noise alone reaches the margin" in few
    assert "the engine is not exact" in of_the_engine
    [least] = warnings_of(200, 50, interval=(-0.02, 0.01))
    assert "at least 381 prompts would" in least


@pytest.mark.parametrize(("right", "message"), [(0, "wrong, so no ban can lose"), (150, "right, so no ban can gain")])
def test_a_baseline_at_its_end_has_no_power_in_that_direction(right: int, message: str):
    [only] = warnings_of(150, right)
    assert only.startswith(f"every free answer is {message} any")
    assert not warnings_of(150, abs(right - 1))


@pytest.mark.parametrize("flips", [0, 2])
def test_an_engine_that_is_not_exact_is_warned_of_even_if_no_answer_changes_sides(flips: int):
    [only] = warnings_of(150, 50, rollouts=99, differing=3, flips=flips)
    assert f"3 of 99 free rollouts differ and {flips} answers change sides" in only


def test_types_without_a_placebo_are_named_up_to_five():
    assert warnings_of(150, 50, [7, 8]) == ["no placebo is about as frequent as '<7>', '<8>'"]
    [only] = warnings_of(150, 50, range(7))
    assert only == "no placebo is about as frequent as '<0>', '<1>', '<2>', '<3>', '<4>' and 2 more"


# Correlations

DELTAS = {10: -0.05, 11: 0.02, 12: -0.01, 13: 0.01, 14: -0.03, 15: 0.04}
ENTROPY = {10: 0.3, 11: 0.1, 12: 0.5, 13: 0.2, 14: 0.6, 15: 0.15, 20: 9.0, 30: 8.0}


def correlated(**changes: Settled) -> KnockoutSweep:
    """Six tested types that are written and one that is not, a set of two, and a placebo."""
    free = [rollout(place, [token, 30, 1]) for place, token in enumerate(DELTAS)]
    judged = judging("tested", *(replace(NEUTRAL, delta=delta) for delta in DELTAS.values()))
    judged += judging("tested", NEUTRAL, changes.get("set", NEUTRAL))
    judged += judging("matched", changes.get("placebo", replace(NEUTRAL, delta=-1.0)))
    outcomes = sweep_of(judged, ids=[*DELTAS, 20, 30, 30], free=free)
    bans = [replace(ban, ids=(12, 30)) if place == 7 else ban for place, ban in enumerate(outcomes.bans)]
    if first := changes.get("first"):
        outcomes = replace(outcomes, settled=[first, *outcomes.settled[1:]])
    return summary(replace(outcomes, bans=bans), columns={"entropy": ENTROPY, "kl": {10: 0.5}})


def test_only_tested_types_that_are_written_are_correlated():
    entropy, kl = correlated().correlations
    assert (entropy.name, entropy.n) == ("entropy", 6)
    expected, _ = spearmanr(list(DELTAS.values()), [ENTROPY[token] for token in DELTAS])
    assert entropy.rho == pytest.approx(expected, abs=1e-12)
    assert expected not in (0, pytest.approx(1), pytest.approx(-1))
    assert (kl.name, kl.n) == ("kl", 1)


def test_an_unknown_change_of_a_written_type_leaves_nothing_to_correlate():
    assert correlated(first=STOPPED).correlations == []
    assert correlated(set=STOPPED, placebo=STOPPED).correlations == correlated().correlations
    assert summary(sweep_of([]), columns={"entropy": ENTROPY}).correlations == []
