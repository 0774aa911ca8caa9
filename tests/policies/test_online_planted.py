"""Online rocks in runs whose rocks are known: the ones `find` finds afterwards, no slow types, released in time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from planted_run import LEARNING_RATE, SLOTS, PlantedRun, types_of

from rocktokens.policies.online_rocks import OnlineRocksPolicy, freezes
from rocktokens.rocks.find import find_rocks
from rocktokens.traces.store import TraceStore

STEPS = 160
SEEDS = range(5)


@pytest.fixture(scope="module")
def finished_runs() -> list[PlantedRun]:
    """One run a seed, online rocks with the default settings throughout."""
    runs = [PlantedRun(seed, OnlineRocksPolicy(seed=seed)) for seed in SEEDS]
    for run in runs:
        run.train(STEPS)
    return runs


def offline_rocks(run: PlantedRun, folder: Path) -> set[int]:
    """What `find` calls rocks when the run is over, as many as were planted."""
    run.write_replay(folder)
    embeddings = np.repeat(np.eye(SLOTS), 2, axis=0)
    return set(find_rocks(TraceStore(folder), k=len(types_of("blind", "noise")), embeddings=embeddings).ids.tolist())


def test_online_rocks_are_the_offline_rocks(finished_runs: list[PlantedRun], tmp_path: Path) -> None:
    for run in finished_runs:
        online, offline = set(run.policy.tracker.rocks.tolist()), offline_rocks(run, tmp_path / str(run.seed))
        assert offline == types_of("blind", "noise")
        assert len(online & offline) >= 0.9 * len(offline)
        assert len(online & offline) >= 0.9 * len(online)


def test_rocks_are_called_in_the_first_half_and_training_leaves_them_out(finished_runs: list[PlantedRun]) -> None:
    for run in finished_runs:
        calls = freezes(run.log)
        assert np.median([call.frozen for call in calls]) < STEPS / 2
        tokens = run.sample(STEPS)[2]
        frozen = set(run.policy.tracker.frozen.tolist())
        weights = run.policy(None, tokens, torch.zeros_like(tokens), torch.zeros_like(tokens), STEPS)
        assert set(tokens[weights == 0].tolist()) == frozen & set(tokens.tolist())


def test_types_that_fall_are_never_frozen_while_they_fall(finished_runs: list[PlantedRun]) -> None:
    """Learned and slow types both end near their floor; until then they carry a good part of the loss."""
    for run in finished_runs:
        assert not {call.token_id for call in freezes(run.log)} & types_of("learned", "slow")


def test_freezing_rocks_leaves_the_others_where_uniform_training_leaves_them(finished_runs: list[PlantedRun]) -> None:
    uniform = PlantedRun(0, OnlineRocksPolicy(lam=1.0))
    uniform.train(STEPS)
    others = sorted(types_of("learned", "slow"))
    difference = (finished_runs[0].head_VD - uniform.head_VD)[others].abs().max()
    assert difference < 1e-3 * uniform.head_VD[others].abs().max()


def under_cosine(seed: int, stop: int | None) -> tuple[int, int]:
    """How many types are called when the learning rate decays to 0, and how many of them are rocks."""
    run = PlantedRun(seed, OnlineRocksPolicy(seed=seed, stop=stop))
    for step in range(STEPS):
        run.optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 + np.cos(np.pi * step / STEPS)) / 2
        run.train(1)
    called = {call.token_id for call in freezes(run.log)}
    return len(called), len(called & types_of("blind", "noise"))


def test_a_decaying_learning_rate_makes_no_rocks() -> None:
    """In the last quarter slow types lie still because nothing is learned any more: they have lost most of their kl.

    That alone keeps them from being called, also without ``stop``, which had 2 to 9 of them called before it counted.
    """
    for seed, stop in ((0, STEPS * 3 // 4), (1, STEPS * 3 // 4), (1, None)):
        called, true = under_cosine(seed, stop=stop)
        assert true >= 0.9 * called and true >= 0.9 * len(types_of("blind", "noise"))


def revealed(freeze_windows: int) -> PlantedRun:
    """The student learns to see, at step 72, what the blind slots depend on."""
    run = PlantedRun(3, OnlineRocksPolicy(freeze_windows=freeze_windows))
    run.train(72)
    assert set(run.policy.tracker.rocks.tolist()) == types_of("blind", "noise")
    run.sight["blind"] = 1.0
    run.train(88)
    return run


def test_rocks_are_released_when_the_obstacle_goes_away() -> None:
    run = revealed(freeze_windows=4)
    assert set(run.policy.tracker.rocks.tolist()) == types_of("noise")
    blind = sorted(types_of("blind"))
    assert (run.head_VD - run.first_VD)[blind].abs().max() > 1


def test_without_a_trial_a_freeze_would_confirm_itself() -> None:
    run = revealed(freeze_windows=1000)
    assert set(run.policy.tracker.rocks.tolist()) == types_of("blind", "noise")


def test_resumed_run_is_the_whole_run_bit_for_bit(finished_runs: list[PlantedRun]) -> None:
    """Head and policy restored in the middle of a window, with types frozen."""
    first = PlantedRun(1, OnlineRocksPolicy(seed=1))
    first.train(77)
    assert first.log[-1]["online_rocks"] > 0
    second = first.resumed(OnlineRocksPolicy(seed=1))
    second.train(STEPS - 77)
    second.require_same(finished_runs[1])
