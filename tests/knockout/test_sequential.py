"""The group-sequential design: its test by enumeration, its forecasts by an exact sum, its promises by whole sweeps."""

import itertools
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, betabinom

from rocktokens.inference.paired import sign_flip_test
from rocktokens.knockout.designs import Complete, Interim, Settled
from rocktokens.knockout.sequential import (
    FORECASTS,
    LOOKS,
    SPENDING_POWER,
    Forecasts,
    GroupSequential,
    forecast,
    walk_test,
)
from rocktokens.knockout.verdicts import EXACT, VerdictRule, paired_effects, verdict

RULE = VerdictRule()


class Found(NamedTuple):
    """What a design says of one ban; no number may be missing."""

    verdict: str
    delta: float
    interval: tuple[float, float]
    p: float
    stopped: str | None

    @classmethod
    def of(cls, settled: Settled | None) -> Self:
        assert settled is not None
        assert settled.delta is not None and settled.interval is not None and settled.p is not None
        return cls(settled.verdict, settled.delta, settled.interval, settled.p, settled.stopped)


@dataclass(frozen=True)
class Truth:
    """What a full sweep would find, answer by answer."""

    changes_KR: np.ndarray
    affected_KR: np.ndarray
    right_R: np.ndarray
    num_samples: int = 1

    @property
    def n_prompts(self) -> int:
        return len(self.right_R) // self.num_samples

    def after(self, looked: int) -> Interim:
        """What is known of it: nothing about affected answers to prompts from ``looked`` on."""
        hidden_KR = self.affected_KR & (np.arange(len(self.right_R)) >= looked * self.num_samples)
        is_right_R = self.right_R.astype(bool)
        lowest_KR = np.where(hidden_KR, -1 * is_right_R, self.changes_KR)
        highest_KR = np.where(hidden_KR, 1 * ~is_right_R, self.changes_KR)
        return Interim(lowest_KR, highest_KR, self.affected_KR, is_right_R, self.num_samples, looked)

    def exact(self) -> list[Found]:
        judged = Complete(self.n_prompts, RULE).judge(self.after(self.n_prompts), 0, EXACT)
        return [Found.of(settled) for settled in judged]


def plant(
    loss_K: np.ndarray,
    gain_K: np.ndarray,
    prompts: int,
    seed: int,
    num_samples: int = 1,
    accuracy: float = 0.7,
    affected: float = 0.8,
) -> Truth:
    """Bans that turn right answers wrong and wrong ones right at these rates."""
    rng = np.random.default_rng(seed)
    right_R = rng.random(prompts * num_samples) < accuracy
    affected_KR = np.repeat(rng.random((len(loss_K), prompts)) < affected, num_samples, axis=1)
    lost_KR, gained_KR = (rng.random(affected_KR.shape) < rate_K[:, None] for rate_K in (loss_K, gain_K))
    return Truth(np.where(right_R, -1 * lost_KR, gained_KR) * affected_KR, affected_KR, right_R, num_samples)


def sweep(truth: Truth, noise: tuple[float, float] = EXACT) -> tuple[list[Found], np.ndarray]:
    """Run the design as a sweep does; also how many prompts each ban was open for."""
    design = GroupSequential(truth.n_prompts, RULE)
    found: dict[int, Found] = {}
    looked_K = np.zeros(len(truth.affected_KR), dtype=int)
    for number, block in enumerate(design.blocks):
        still_open = [ban for ban in range(len(looked_K)) if ban not in found]
        looked_K[still_open] = block.stop
        judged = design.judge(truth.after(block.stop).of(still_open), number, noise)
        found |= {ban: Found.of(own) for ban, own in zip(still_open, judged, strict=True) if own is not None}
    return [found[ban] for ban in range(len(looked_K))], looked_K


# The test


@pytest.mark.parametrize("prompts", [1, 2, 7, 19, 200, 1000])
def test_the_blocks_are_the_prompts_in_order(prompts):
    blocks = GroupSequential(prompts, RULE).blocks
    assert [prompt for block in blocks for prompt in block] == list(range(prompts))
    assert all(len(block) for block in blocks)


@given(st.lists(st.integers(-4, 4), max_size=40))
def test_one_look_is_the_sign_flip_test(changes):
    changes_N = np.array(changes, dtype=np.int64)
    walk, test = walk_test([changes_N], [0.05]), sign_flip_test(changes_N)
    assert walk.p == pytest.approx(test.p, abs=1e-12)
    assert walk.left == (np.sign(changes_N.sum()) if test.p <= 0.05 else 0)


def enumerated(sums_CL: np.ndarray, levels: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """For every sequence of coins C, with its sums at all looks L: the side on which it first leaves, and its p."""
    left_C, p_C = np.zeros(len(sums_CL), dtype=int), np.ones(len(sums_CL))
    for sums_C, level in zip(sums_CL.T, levels, strict=True):
        inside_C = left_C == 0
        for size in np.unique(np.abs(sums_C)):
            as_far_out = np.count_nonzero(inside_C & (np.abs(sums_C) >= size))
            p_C[inside_C & (np.abs(sums_C) == size)] = (np.count_nonzero(left_C) + as_far_out) / len(sums_CL)
        leaving_C = inside_C & (p_C <= level + 1e-12)
        left_C[leaving_C] = np.sign(sums_C[leaving_C])
    return left_C, p_C


@settings(deadline=None, max_examples=40)
@given(
    stages=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=4).filter(
        lambda stages: 1 <= sum(map(len, stages)) <= 9
    ),
    steps=st.lists(st.sampled_from([0.0, 0.01, 0.06, 0.15]), min_size=4, max_size=4),
)
def test_bounds_and_p_are_those_of_an_enumeration_of_all_coins(stages, steps):
    levels = np.cumsum(steps[: len(stages)]).tolist()
    sizes_N, ends = np.concatenate(stages).astype(int), np.cumsum([len(stage) for stage in stages])
    changes_CN = np.array(list(itertools.product([-1, 1], repeat=len(sizes_N)))) * sizes_N
    sums_CL = np.stack([changes_CN[:, :end].sum(axis=1) for end in ends], axis=1)
    left_C, p_C = enumerated(sums_CL, levels)
    walks = [walk_test(np.split(changes_N, ends[:-1]), levels) for changes_N in changes_CN]
    assert [walk.left for walk in walks] == left_C.tolist()
    assert [walk.p for walk in walks] == pytest.approx(p_C.tolist(), abs=1e-12)
    assert np.mean(left_C != 0) <= levels[-1] + 1e-12
    for p in set(p_C[left_C != 0].tolist()):
        assert np.mean((left_C != 0) & (p_C <= p)) <= p + 1e-12


def null_changes(walks: int, prompts: int, num_samples: int, discordance: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, num_samples + 1, (walks, prompts)) * (rng.random((walks, prompts)) < discordance)
    return sizes * rng.choice([-1, 1], sizes.shape)


@pytest.mark.parametrize(
    ("prompts", "num_samples", "discordance"), [(60, 1, 0.1), (200, 1, 0.04), (200, 1, 0.5), (200, 3, 0.5)]
)
def test_alpha_is_kept_however_often_one_looks(prompts, num_samples, discordance):
    """And looking as often without spending is not harmless."""
    changes_KN = null_changes(800, prompts, num_samples, discordance, seed=prompts)
    ends = [block.stop for block in GroupSequential(prompts, RULE).blocks]
    levels = [RULE.alpha * (end / prompts) ** SPENDING_POWER for end in ends]
    left = np.mean([walk_test(np.split(changes_N, ends[:-1]), levels).left != 0 for changes_N in changes_KN])
    error = (RULE.alpha * (1 - RULE.alpha) / len(changes_KN)) ** 0.5
    assert left <= RULE.alpha + 3 * error
    if discordance == 0.5:
        careless = [any(sign_flip_test(own[:end]).p <= RULE.alpha for end in ends) for own in changes_KN[:300]]
        assert left > 0.03
        assert np.mean(careless) > 0.1


@pytest.mark.parametrize("rate", [0.03, 0.3])
def test_bans_without_an_effect_are_seldom_called(rate):
    rates_K = np.full(100, rate)
    settled, looked_K = sweep(plant(rates_K, rates_K, 100, seed=3, accuracy=0.5))
    called = np.mean([own.verdict in ("pillar", "stumbling") for own in settled])
    assert called <= RULE.alpha + 3 * (RULE.alpha * (1 - RULE.alpha) / len(rates_K)) ** 0.5
    assert (looked_K < 100).any()


# Forecasts


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 1), (6, 0)])
def test_forecasts_are_those_of_the_exact_posterior(lost, gained):
    """With one answer a prompt all that counts is how many are lost and gained: a sum over two beta-binomials."""
    prompts, looked, wrong = 120, 60, 20
    right_N = np.tile([1, 1, 1, 1, 1, 0], 20)
    affected_N = np.arange(prompts) % 12 != 1
    changes_N = np.zeros(prompts, dtype=np.int64)
    changes_N[np.flatnonzero(affected_N & (right_N == 1))[:lost]] = -1
    changes_N[np.flatnonzero(affected_N & (right_N == 0))[:gained]] = 1
    [own] = forecast(Truth(changes_N[None], affected_N[None], right_N).after(looked), [0], RULE, EXACT)
    n_right, n_wrong = (prompts - wrong) // 2 - 5, wrong // 2
    more_lost = betabinom.pmf(np.arange(n_right + 1), n_right, 0.5 + lost, 0.5 + n_right - lost)
    more_gained = betabinom.pmf(np.arange(n_wrong + 1), n_wrong, 0.5 + gained, 0.5 + n_wrong - gained)
    cells = list(itertools.product(range(n_right + 1), range(n_wrong + 1)))
    outcomes = [np.repeat([-1, 1, 0], [lost + m, gained + n, prompts - lost - m - gained - n]) for m, n in cells]
    effects = paired_effects(np.array(outcomes), 1, RULE)
    chances = np.outer(more_lost, more_gained).ravel()
    assert chances.sum() == pytest.approx(1)
    for kind in ("pillar", "stumbling", "neutral", "undecided"):
        is_kind = np.array([verdict(effect.delta, effect.interval, RULE) == kind for effect in effects])
        chance = float(chances[is_kind].sum())
        assert own.share(kind) == pytest.approx(chance, abs=3.5 * (chance * (1 - chance) / FORECASTS) ** 0.5 + 1e-9)
    mean, error = chances @ [effect.delta for effect in effects], own.delta_F.std() / FORECASTS**0.5
    assert own.delta_F.mean() == pytest.approx(mean, abs=3.5 * error)


def test_forecasts_with_several_answers_keep_within_what_can_change():
    truth = plant(np.array([0.1]), np.array([0.1]), 80, seed=6, num_samples=4)
    interim = truth.after(40)
    [own] = forecast(interim, [0], RULE, EXACT)
    assert interim.lowest_KR.sum() / 320 <= own.delta_F.min() < own.delta_F.max() <= interim.highest_KR.sum() / 320
    assert own.delta_F.min() < truth.changes_KR.sum() / 320 < own.delta_F.max()


def test_answers_to_one_prompt_say_as_much_as_one():
    """15 of 60 prompts lost with all their answers: the rate is as uncertain as after 60 answers, not after 240."""
    changes_R = np.repeat(np.where(np.arange(120) % 8 < 2, -1, 0), 4)
    truth = Truth(changes_R[None], np.ones((1, 480), dtype=bool), np.ones(480, dtype=bool), num_samples=4)
    [own] = forecast(truth.after(60), [0], RULE, EXACT)
    rate = beta(0.5 + 15, 0.5 + 45)
    answers = rate.mean() * (1 - rate.mean()) * 240 / 480**2
    assert own.delta_F.std() == pytest.approx((rate.var() * (60 / 120) ** 2 + answers) ** 0.5, rel=0.12)


# The design


def test_strong_effects_stop_early():
    loss_K, gain_K = np.array([0.9, 0.6, 0.0, 0.0]), np.array([0.0, 0.0, 0.9, 0.6])
    settled, looked_K = sweep(plant(loss_K, gain_K, 200, seed=0, accuracy=0.5))
    assert [own.verdict for own in settled] == ["pillar", "pillar", "stumbling", "stumbling"]
    assert {own.stopped for own in settled} == {"efficacy"}
    assert looked_K.max() <= 80


def test_a_ban_that_touches_nothing_is_settled_at_once():
    never = Truth(np.zeros((3, 150), dtype=int), np.zeros((3, 150), dtype=bool), np.ones(150, dtype=int))
    settled, looked_K = sweep(never)
    assert settled == never.exact()
    assert [own.verdict for own in settled] == ["neutral"] * 3
    assert looked_K.tolist() == [GroupSequential(150, RULE).blocks[0].stop] * 3


def test_a_ban_is_settled_when_its_last_affected_prompt_is_known():
    affected_KN = np.arange(100)[None] < 7
    truth = Truth(np.where(affected_KN, -1, 0), affected_KN, np.ones(100, dtype=int))
    settled, looked_K = sweep(truth)
    exact = truth.exact()
    assert looked_K.tolist() == [10]
    assert (settled[0].verdict, settled[0].delta, settled[0].interval) == ("pillar", -0.07, exact[0].interval)
    assert settled[0].stopped is None


def test_nothing_is_stopped_before_one_affected_prompt_has_been_seen():
    affected_KN = np.arange(200)[None] >= 199
    settled, looked_K = sweep(Truth(np.where(affected_KN, -1, 0), affected_KN, np.ones(200, dtype=int)))
    assert (settled[0].verdict, settled[0].delta, looked_K[0]) == ("neutral", -0.005, 200)


@pytest.mark.parametrize(("side", "expected"), [(-1, "pillar"), (1, "stumbling")])
def test_what_was_spent_early_is_missing_at_the_end(side, expected):
    """Thirteen coins one way and four the other: p = 0.049 in a single look, more in the last of many."""
    changes_N = np.zeros(170, dtype=np.int64)
    changes_N[5::10] = side * np.array([-1, 1, 1, -1, 1, 1, 1, -1, 1, 1, 1, -1, 1, 1, 1, 1, 1])
    truth = Truth(changes_N[None], np.ones((1, 170), dtype=bool), (changes_N < 1).astype(int))
    [settled], [exact] = sweep(truth)[0], truth.exact()
    near, far = (1, 0) if side < 0 else (0, 1)
    assert (exact.verdict, settled.verdict) == (expected, "undecided")
    assert exact.p < RULE.alpha < settled.p < RULE.alpha + 0.02
    assert exact.interval[near] * side > 0 == settled.interval[near]
    assert (settled.delta, settled.interval[far], settled.stopped) == (exact.delta, exact.interval[far], None)


def test_what_could_not_be_spent_early_is_there_at_the_end():
    """Six losses, the fewest that a single look calls, cannot leave any bounds before the last of them is in."""
    changes_N = np.zeros(180, dtype=np.int64)
    changes_N[25::30] = -1
    truth = Truth(changes_N[None], np.ones((1, 180), dtype=bool), np.ones(180, dtype=int))
    [settled], [exact] = sweep(truth)[0], truth.exact()
    assert settled.verdict == exact.verdict == "pillar"
    assert settled.p == pytest.approx(exact.p) == pytest.approx(2 / 64)


def judged_at(truth: Truth, share: float) -> tuple[Found, Forecasts]:
    design, interim = GroupSequential(truth.n_prompts, RULE), truth.after(round(share * truth.n_prompts))
    [settled], [forecasts] = design.judge(interim, LOOKS.index(share), EXACT), forecast(interim, [0], RULE, EXACT)
    return Found.of(settled), forecasts


def test_an_early_stop_is_reported_by_its_forecasts():
    found, forecasts = judged_at(plant(np.array([0.5]), np.zeros(1), 200, seed=0), 0.3)
    tail = RULE.alpha / 2
    assert found.stopped == "efficacy"
    assert np.mean(forecasts.delta_F < found.delta) <= 0.5 <= np.mean(forecasts.delta_F <= found.delta)
    assert np.mean(forecasts.low_F < found.interval[0]) <= tail <= np.mean(forecasts.low_F <= found.interval[0])
    assert np.mean(forecasts.high_F > found.interval[1]) <= tail <= np.mean(forecasts.high_F >= found.interval[1])


def test_a_ban_that_is_given_up_is_no_discovery():
    """Six losses have p = 0.03, but at this look the bounds are further out."""
    changes_N = np.zeros(2_000, dtype=np.int64)
    changes_N[100:1300:200] = -1
    found, _ = judged_at(Truth(changes_N[None], np.ones((1, 2_000), dtype=bool), np.ones(2_000, dtype=int)), 0.8)
    assert (found.stopped, found.p) == ("neutral", RULE.alpha)


@pytest.fixture(scope="module")
def mixed() -> tuple[Truth, list[Found], np.ndarray]:
    """Bans that lose answers, gain some, do neither, or, the last ten, lose as many as they gain."""
    rng = np.random.default_rng(1)
    loss_K, gain_K = (rng.choice([0, 0, 0.01, 0.03, 0.3, 0.8], 90) for _ in range(2))
    gain_K[loss_K > 0.1] = 0
    loss_K[-10:], gain_K[-10:] = 0.15, 0.35
    truth = plant(loss_K, gain_K, 200, seed=2)
    return truth, *sweep(truth)


def test_verdicts_are_those_of_the_exact_mode(mixed):
    truth, settled, looked_K = mixed
    pairs = [(own.verdict, exact.verdict) for own, exact in zip(settled, truth.exact(), strict=True)]
    assert np.mean([own == exact for own, exact in pairs if own != "undecided"]) >= 0.98
    assert np.mean([own == exact for own, exact in pairs if exact != "undecided"]) >= 0.95
    assert {own for own, _ in pairs} == {"pillar", "stumbling", "neutral", "undecided"}
    assert looked_K.mean() < 0.65 * 200


def test_every_reason_to_stop_occurs_with_its_verdict(mixed):
    _, settled, looked_K = mixed
    reasons = {(own.stopped, own.verdict) for own in settled if own.stopped}
    expected = {("efficacy", "pillar"), ("efficacy", "stumbling"), ("neutral", "neutral"), ("futility", "undecided")}
    assert reasons == expected
    assert all(looked == 200 for own, looked in zip(settled, looked_K, strict=True) if own.stopped is None)


def test_the_numbers_bear_the_verdict_out(mixed):
    for own in mixed[1]:
        assert verdict(own.delta, own.interval, RULE) == own.verdict
        assert own.interval[0] <= own.delta <= own.interval[1]
        assert own.verdict in ("neutral", "undecided") or own.p <= RULE.alpha
        assert own.stopped not in ("neutral", "futility") or own.p >= RULE.alpha
    assert max(own.p for own in mixed[1] if own.stopped == "neutral") == 1


def test_the_interval_of_an_early_stop_covers_the_exact_change(mixed):
    truth, settled, _ = mixed
    early = [(own, exact) for own, exact in zip(settled, truth.exact(), strict=True) if own.stopped]
    assert np.mean([own.interval[0] <= exact.delta <= own.interval[1] for own, exact in early]) >= 0.95


def test_several_answers_a_prompt():
    loss_K = np.repeat([0.0, 0.5], 4)
    truth = plant(loss_K, np.zeros(8), 200, seed=4, num_samples=2)
    settled, looked_K = sweep(truth)
    assert [own.verdict for own in settled] == [own.verdict for own in truth.exact()]
    assert [own.verdict for own in settled] == ["neutral"] * 4 + ["pillar"] * 4
    assert looked_K[:4].max() < 200
    assert looked_K[4:].max() < 60


def test_a_ban_is_judged_by_itself_and_always_alike():
    truth = plant(np.array([0.0, 0.02, 0.2, 0.7]), np.array([0.0, 0.1, 0.2, 0.0]), 60, seed=5)
    design = GroupSequential(60, RULE)
    for number, block in enumerate(design.blocks):
        interim = truth.after(block.stop)
        together = design.judge(interim, number, EXACT)
        assert design.judge(interim, number, EXACT) == together
        assert [design.judge(interim.of([ban]), number, EXACT)[0] for ban in range(4)] == together
    assert design.judge(truth.after(60).of([]), len(LOOKS) - 1, EXACT) == []


def test_noise_of_the_engine_is_in_every_interval():
    truth = plant(np.array([0.0, 0.05, 0.9]), np.zeros(3), 200, seed=7)
    quiet, noisy = sweep(truth)[0], sweep(truth, noise=(-0.04, 0.04))[0]
    assert [own.verdict for own in quiet][::2] == ["neutral", "pillar"]
    assert [own.verdict for own in noisy][::2] == ["undecided", "pillar"]
    assert all(own.interval[1] - own.interval[0] >= 0.08 for own in noisy)
