"""What the online policy weighs, probes and logs; what it finds is in test_online_planted.py."""

import inspect

import numpy as np
import pytest
import torch
from tracker_oracle import changing_steps

from rocktokens.config.policies import OnlineRocksSection
from rocktokens.policies.online_rocks import Freeze, OnlineRocksPolicy, freezes
from rocktokens.policies.tracker import RockTracker
from rocktokens.splitmix import occurrence_uniforms
from rocktokens.types import TokenScores

FROZEN, FALLING = 5, 6


def scores_of(kl_T: np.ndarray) -> TokenScores:
    return TokenScores(kl_T, *[np.full(len(kl_T), np.nan)] * 5)


def policy_with_rock(**parameters) -> OnlineRocksPolicy:
    """After three windows in which type 5 lay still and type 6 fell."""
    policy = OnlineRocksPolicy(window_steps=4, **parameters)
    ids = np.array([FROZEN] * 4 + [FALLING] * 4)
    for step in range(12):
        policy.observe(scores_of(np.where(ids == FROZEN, 1.0, 0.9**step)), ids, step)
    return policy


def update(size: int = 4000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, positions and rollouts of rollouts of 100 tokens."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 10, size), np.arange(size) % 100, 10**9 + np.arange(size) // 100


@pytest.mark.parametrize("lam", [0.0, 0.25])
def test_frozen_types_weigh_lambda(lam: float) -> None:
    ids, positions, rollouts = update()
    weights = policy_with_rock(lam=lam)(None, ids, positions, rollouts, 12)
    np.testing.assert_array_equal(weights, np.where(ids == FROZEN, np.float32(lam), np.float32(1)))


def test_lambda_one_is_uniform_to_the_bit() -> None:
    ids, positions, rollouts = update()
    policy = policy_with_rock(lam=1.0)
    assert policy.tracker.frozen.tolist() == [FROZEN]
    assert (policy(None, ids, positions, rollouts, 12) == 1.0).all()


def test_nothing_is_frozen_before_anything_is_known() -> None:
    ids, positions, rollouts = update()
    policy = OnlineRocksPolicy()
    weights = policy(None, ids, positions, rollouts, 0)
    assert (weights == 1.0).all()
    assert not policy.probe(weights, ids, positions, rollouts, 0).any()


def test_probe_is_a_share_of_the_frozen_rows_alone() -> None:
    ids, positions, rollouts = update(100_000)
    policy = policy_with_rock(probe=0.1)
    weights = policy(None, ids, positions, rollouts, 12)
    probed = policy.probe(weights, ids, positions, rollouts, 12)
    assert (ids[probed] == FROZEN).all()
    share = probed.sum() / (ids == FROZEN).sum()
    assert abs(share - 0.1) < 4 * np.sqrt(0.1 * 0.9 / (ids == FROZEN).sum())


def test_probe_takes_all_rows_at_share_one_and_none_that_are_scored_anyway() -> None:
    ids, positions, rollouts = update()
    policy = policy_with_rock(probe=1.0)
    weights = policy(None, ids, positions, rollouts, 12)
    np.testing.assert_array_equal(policy.probe(weights, ids, positions, rollouts, 12), ids == FROZEN)
    soft = policy_with_rock(probe=1.0, lam=0.5)
    weights = soft(None, ids, positions, rollouts, 12)
    assert not soft.probe(weights, ids, positions, rollouts, 12).any()


def test_probe_follows_the_rows_and_changes_with_step_and_seed() -> None:
    ids, positions, rollouts = update()
    policy = policy_with_rock(probe=0.5, seed=1)
    weights = policy(None, ids, positions, rollouts, 12)
    probed = policy.probe(weights, ids, positions, rollouts, 12)
    order = np.random.default_rng(1).permutation(len(ids))
    again = policy.probe(weights[order], ids[order], positions[order], rollouts[order], 12)
    np.testing.assert_array_equal(again, probed[order])
    other_seed = policy_with_rock(probe=0.5, seed=2)
    assert (policy.probe(weights, ids, positions, rollouts, 13) != probed).any()
    assert (other_seed.probe(weights, ids, positions, rollouts, 12) != probed).any()


def test_torch_gives_what_numpy_gives() -> None:
    ids, positions, rollouts = update()
    tensors = torch.as_tensor(ids), torch.as_tensor(positions), torch.as_tensor(rollouts)
    policy = policy_with_rock(probe=0.3)
    weights, as_tensor = policy(None, ids, positions, rollouts, 12), policy(None, *tensors, 12)
    assert as_tensor.dtype == torch.float32
    np.testing.assert_array_equal(as_tensor.numpy(), weights)
    probed = policy.probe(as_tensor, *tensors, 12)
    assert probed.dtype == torch.bool
    np.testing.assert_array_equal(probed.numpy(), policy.probe(weights, ids, positions, rollouts, 12))


def test_probe_numbers_are_uniform_and_uncorrelated_along_positions_and_rollouts() -> None:
    rollouts, positions = np.divmod(np.arange(200_000), 500)
    grid = occurrence_uniforms(17, rollouts, positions).reshape(400, 500)
    assert np.abs(np.histogram(grid, 20, (0, 1))[0] / grid.size - 0.05).max() < 0.003
    for left, right in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.01


def test_log_tells_what_changed_and_reads_back() -> None:
    policy = OnlineRocksPolicy(window_steps=4, patience=1, freeze_windows=1)
    log = []
    for step in range(24):
        kl = np.full(8, 1.0 if step < 12 else 0.8 ** (step - 11))
        log.append({"step": step, **policy.observe(scores_of(kl), np.full(8, FROZEN), step)})
    assert freezes(log) == [Freeze(FROZEN, 3, 7), Freeze(FROZEN, 11, 15)]
    assert [line["step"] for line in log if len(line) > 3] == [3, 7, 11, 15]
    assert log[3] == {"step": 3, "online_frozen": [FROZEN], "online_rocks": 1, "online_on_trial": 0}
    assert log[7] == {"step": 7, "online_tried": [FROZEN], "online_rocks": 1, "online_on_trial": 1}
    assert log[11] == {"step": 11, "online_refrozen": [FROZEN], "online_rocks": 1, "online_on_trial": 0}
    assert log[15] == {"step": 15, "online_released": [FROZEN], "online_rocks": 0, "online_on_trial": 0}


@pytest.mark.parametrize("stop", [None, 60])
def test_freezes_are_the_steps_at_which_a_type_weighs_nothing(stop: int | None) -> None:
    """Through trials, second freezes and releases: the log alone tells what was trained."""
    policy = OnlineRocksPolicy(window_steps=4, freeze_windows=1, tolerance=0.08, patience=1, stop=stop)
    log, weighed_nothing, written = [], set(), set()
    for kl, ids, step in changing_steps(0, 120):
        weights = policy(None, ids, np.arange(len(ids)), np.zeros(len(ids), dtype=int), step)
        weighed_nothing |= {(step, token_id) for token_id in ids[weights == 0].tolist()}
        written |= {(step, token_id) for token_id in ids.tolist()}
        log.append({"step": step, **policy.observe(scores_of(kl), ids, step)})
    found = freezes(log)
    frozen = {(step, one.token_id) for one in found for step in range(one.frozen + 1, (one.until or 119) + 1)}
    assert frozen & written == weighed_nothing
    assert len(found) > len({one.token_id for one in found}) > 3 and any(one.until is None for one in found)


def test_a_log_that_begins_late_tells_what_it_can() -> None:
    log = [
        {"step": 7, "online_released": [3], "online_tried": [4]},
        {"step": 9, "online_refrozen": [4]},
        {"step": 15, "online_released": [4]},
    ]
    assert freezes(log) == [Freeze(4, 9, 15)]


def test_freezes_of_a_type_that_is_called_twice() -> None:
    log = [
        {"step": 7, "online_frozen": [3, 4]},
        {"step": 15, "online_released": [3]},
        {"step": 23, "online_frozen": [3], "online_released": [4]},
        {"step": 24},
    ]
    assert freezes(log) == [Freeze(3, 7, 15), Freeze(4, 7, 23), Freeze(3, 23, None)]


def test_config_has_the_defaults_of_the_policy_and_its_tracker() -> None:
    section = OnlineRocksSection(name="online_rocks").model_dump()
    for of in (OnlineRocksPolicy, RockTracker):
        for name, parameter in inspect.signature(of).parameters.items():
            if name in section and name != "seed":
                assert section.pop(name) == parameter.default
    assert section.keys() - OnlineRocksSection.common == {"name", "seed"}


def test_state_carries_the_frozen_types() -> None:
    ids, positions, rollouts = update()
    policy, other = policy_with_rock(), OnlineRocksPolicy(window_steps=4)
    other.restore(policy.state())
    np.testing.assert_array_equal(other(None, ids, positions, rollouts, 12), policy(None, ids, positions, rollouts, 12))
    assert (other(None, ids, positions, rollouts, 12) == 0).any()
