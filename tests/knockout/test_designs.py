"""Designs on outcomes revealed block by block: stopping early changes no verdict, and forgets only what it must."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocktokens.knockout.designs import Complete, Curtailed, Design, Interim, Settled, complete
from rocktokens.knockout.verdicts import EXACT, VerdictRule, paired_effects, verdict
from rocktokens.types import Interval

RULE = VerdictRule()
LAX = VerdictRule(epsilon=0.05, margin=0.15)


@dataclass(frozen=True, slots=True)
class World:
    """What every ban would do to every answer; N prompts of S answers, K bans."""

    free_right_R: np.ndarray
    affected_KR: np.ndarray
    change_KR: np.ndarray
    num_samples: int = 1

    @classmethod
    def drawn(cls, seed: int, n_prompts: int, num_samples: int, n_bans: int = 12) -> "World":
        """Bans from harmless to disastrous, from rare to ubiquitous."""
        rng = np.random.default_rng(seed)
        right_R = rng.random(n_prompts * num_samples) < 0.5
        shape = (n_bans, n_prompts * num_samples)
        affected_KR = rng.random(shape) < rng.choice([0.02, 0.3, 1.0], (n_bans, 1))
        lost_KR, gained_KR = (rng.random(shape) < rng.choice([0, 0.1, 0.9], (n_bans, 1)) for _ in range(2))
        return cls(right_R, affected_KR, np.where(right_R, -1 * lost_KR, gained_KR) * affected_KR, num_samples)

    def after(self, looked: int) -> Interim:
        """What is known when the prompts before this one have been looked at."""
        open_KR = self.affected_KR & (np.arange(len(self.free_right_R)) >= looked * self.num_samples)
        return Interim(
            lowest_KR=np.where(open_KR, -self.free_right_R.astype(int), self.change_KR),
            highest_KR=np.where(open_KR, 1 - self.free_right_R.astype(int), self.change_KR),
            affected_KR=self.affected_KR,
            free_right_R=self.free_right_R,
            num_samples=self.num_samples,
            looked=looked,
        )

    def known_from(self) -> list[int]:
        """By ban, how many prompts must be looked at until everything is known."""
        last_K = [int(np.flatnonzero(own).max(initial=-self.num_samples)) for own in self.affected_KR]
        return [last // self.num_samples + 1 for last in last_K]


def settle(design: Design, world: World, noise: Interval = EXACT) -> dict[int, tuple[int, Settled]]:
    """By ban, after how many prompts it was settled, and how."""
    settled: dict[int, tuple[int, Settled]] = {}
    for number, block in enumerate(design.blocks):
        still_open = [ban for ban in range(len(world.change_KR)) if ban not in settled]
        found = design.judge(world.after(block.stop).of(still_open), number, noise)
        settled |= {ban: (block.stop, own) for ban, own in zip(still_open, found, strict=True) if own is not None}
    return settled


def numbers(own: Settled) -> tuple[float | None, Interval | None, float | None]:
    return own.delta, own.interval, own.p


@pytest.mark.parametrize("n_prompts", range(1, 51))
def test_blocks_are_all_prompts_in_order_and_none_is_empty(n_prompts: int):
    curtailed = Curtailed(n_prompts, RULE).blocks
    for blocks in (Complete(n_prompts, RULE).blocks, curtailed):
        assert [prompt for block in blocks for prompt in block] == list(range(n_prompts))
        assert all(len(block) > 0 for block in blocks)
    sizes = [len(block) for block in curtailed]
    assert len(sizes) == min(20, n_prompts)
    assert max(sizes) - min(sizes) <= 1


def test_complete_gives_every_ban_its_effect_and_verdict():
    world, noise = World.drawn(0, 60, 2), (-0.01, 0.02)
    settled = settle(Complete(60, RULE), world, noise)
    effects = paired_effects(world.change_KR, 2, RULE, noise)
    assert len(settled) == len(effects)
    for ban, effect in enumerate(effects):
        called = verdict(effect.delta, effect.interval, RULE)
        assert settled[ban] == (60, Settled(called, effect.delta, effect.interval, effect.p, None))
    assert len({own.verdict for _, own in settled.values()}) >= 3


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 70),
    st.integers(1, 3),
    st.sampled_from([RULE, LAX]),
    st.sampled_from([EXACT, (-0.02, 0.0), (-0.05, 0.05)]),
)
@settings(max_examples=40, deadline=None)
def test_curtailed_verdicts_are_the_complete_ones_whenever_they_are_given(seed, n_prompts, num_samples, rule, noise):
    world = World.drawn(seed, n_prompts, num_samples)
    expected = settle(Complete(n_prompts, rule), world, noise)
    found = settle(Curtailed(n_prompts, rule), world, noise)
    assert found.keys() == expected.keys()
    for ban, known_from in enumerate(world.known_from()):
        looked, own = found[ban]
        assert own.verdict == expected[ban][1].verdict
        if own.stopped is None:
            assert own == expected[ban][1]
            assert looked >= known_from
        else:
            assert (own.stopped, numbers(own)) == ("curtailed", (None, None, None))
            assert looked < known_from


def test_noise_of_the_engine_is_not_forgotten_when_stopping():
    """All of the first five answers are lost: a pillar for certain, unless the engine alone moves five points."""
    world = World(np.ones(100, bool), np.ones((1, 100), bool), -(np.arange(100)[None] < 8).astype(int))
    assert settle(Curtailed(100, RULE), world)[0] == (5, Settled("pillar", None, None, None, "curtailed"))
    noise = (-0.05, 0.05)
    _, noisy = settle(Curtailed(100, RULE), world, noise)[0]
    assert noisy.verdict == settle(Complete(100, RULE), world, noise)[0][1].verdict == "undecided"


def test_some_stop_early_and_some_go_on_to_the_end():
    """Disastrous bans of everything are settled at half the prompts or so, those near a threshold late."""
    world = World.drawn(5, 200, 1, n_bans=40)
    found = settle(Curtailed(200, RULE), world)
    stopped = {ban: looked for ban, (looked, own) in found.items() if own.stopped}
    assert min(stopped.values()) <= 120
    assert len(stopped) >= 10
    assert any(looked == 200 for looked, _ in found.values())
    assert {found[ban][1].verdict for ban in stopped} >= {"pillar", "stumbling"}


def test_a_ban_of_which_everything_is_known_has_its_numbers_before_the_last_block():
    """Its last affected prompt, which would make a pillar of three losses, is the 31st of 200: in the fourth block."""
    affected_KR = np.zeros((3, 200), bool)
    affected_KR[0, [1, 3, 5, 30]] = True
    affected_KR[2] = True
    change_KR = np.zeros((3, 200), int)
    change_KR[0, [1, 3, 5]] = -1
    world = World(np.ones(200, bool), affected_KR, change_KR)
    found = settle(Curtailed(200, RULE), world)
    whole = complete(world.after(200), RULE, EXACT)
    assert found[0] == (40, whole[0])
    assert whole[0].verdict == "undecided"
    assert found[1] == (10, whole[1])
    assert (whole[1].delta, whole[1].p) == (0.0, 1.0)
    assert found[2][0] > 40
    assert found[2][1].verdict == "neutral"


def test_an_interim_of_some_bans_is_theirs_alone():
    whole = World.drawn(1, 9, 2).after(4)
    some = whole.of([5, 2])
    for name in ("lowest_KR", "highest_KR", "affected_KR"):
        assert np.array_equal(getattr(some, name), getattr(whole, name)[[5, 2]])
    assert np.array_equal(some.free_right_R, whole.free_right_R)
    assert (some.num_samples, some.looked) == (2, 4)
