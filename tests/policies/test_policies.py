"""Weights follow the predicted ids, in the arrays the caller brought."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rocktokens.errors import ConfigError, RocktokensError
from rocktokens.policies import make_policy
from rocktokens.types import RockSet, RockToken, TokenScores

IDS = np.array([5, 3, 9, 3, 7, 7, 1], dtype=np.int32)
POSITIONS, ROLLOUTS = np.arange(7), np.zeros(7, np.int64)


def weigh(policy, ids):
    return policy(None, ids, POSITIONS, ROLLOUTS, 0)


def rock_set(*ids: int) -> RockSet:
    tokens = [RockToken(token_id, "", rank, 2, 1.0, 2.0, None, None, "other") for rank, token_id in enumerate(ids, 1)]
    return RockSet("", {}, {}, {}, tokens)


def test_uniform_weighs_one():
    weights = weigh(make_policy("uniform"), IDS)
    assert weights.dtype == np.float32
    assert weights.tolist() == [1.0] * 7


def test_rocks_weigh_lambda_exactly_where_they_are_predicted():
    weights = weigh(make_policy("rocks", rocks=[3, 7], lam=0.25), IDS)
    assert weights.dtype == np.float32
    assert weights.tolist() == [1, 0.25, 1, 0.25, 0.25, 0.25, 1]


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shift_by_one_in_either_direction_shows(shift):
    policy = make_policy("rocks", rocks=[3, 7], lam=0.0)
    frozen = np.flatnonzero(weigh(policy, IDS) == 0)
    shifted = np.flatnonzero(weigh(policy, np.roll(IDS, shift)) == 0)
    assert frozen.tolist() == [1, 3, 4, 5]
    assert shifted.tolist() == sorted((frozen + shift).tolist()) != frozen.tolist()


def test_lambda_one_is_uniform_bit_for_bit():
    ones = weigh(make_policy("uniform"), IDS)
    assert weigh(make_policy("rocks", rocks=[3, 7], lam=1), IDS).tobytes() == ones.tobytes()
    assert weigh(make_policy("rocks", rocks=[], lam=0), IDS).tobytes() == ones.tobytes()


@pytest.mark.parametrize(("name", "params"), [("uniform", {}), ("rocks", {"rocks": [3, 7], "lam": 0.1})])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_torch_in_torch_out_with_the_same_numbers(name, params, dtype):
    policy = make_policy(name, **params)
    weights = weigh(policy, torch.from_numpy(IDS).to(dtype))
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    np.testing.assert_array_equal(weights.numpy(), weigh(policy, IDS))


def test_rocks_come_as_a_set_a_path_or_ids(tmp_path):
    rocks = rock_set(7, 3)
    rocks.save(tmp_path / "rocks.json")
    expected = weigh(make_policy("rocks", rocks=[3, 7]), IDS).tolist()
    for given in (rocks, str(tmp_path / "rocks.json"), tmp_path / "rocks.json", iter([7, 3]), np.array([3, 7])):
        assert weigh(make_policy("rocks", rocks=given), IDS).tolist() == expected


@pytest.mark.parametrize(
    ("name", "params", "sentence"),
    [
        ("rock", {}, "policy 'rock' is not known: did you mean 'rocks'?"),
        ("zzz", {}, "policy 'zzz' is not known: use one of uniform, rocks"),
        ("rocks", {"rocks": [1], "lamb": 0}, "policy rocks has no parameter 'lamb': did you mean 'lam'?"),
        ("uniform", {"lam": 0}, "policy uniform has no parameter 'lam': it takes none"),
        ("rocks", {"lam": 0}, "policy rocks needs parameter 'rocks'"),
        ("rocks", {"rocks": [1], "lam": -0.5}, "lam = -0.5 is not valid: give a weight of 0 or more"),
        ("rocks", {"rocks": [1], "lam": float("nan")}, "lam = nan is not valid"),
        ("rocks", {"rocks": [1], "lam": "0"}, "lam = '0' is not valid"),
        ("rocks", {"rocks": [1.5]}, "are not token ids"),
        ("rocks", {"rocks": [-1]}, "are not token ids"),
        ("rocks", {"rocks": [1], "window": 5}, "window = 5 is not valid: give True or False"),
        ("rocks", {"rocks": [1], "window": True}, "window = True needs rocks with a window rule and these have none"),
    ],
)
def test_mistakes_are_named(name, params, sentence):
    with pytest.raises(ConfigError) as caught:
        make_policy(name, **params)
    assert sentence in str(caught.value)


def test_a_missing_rocks_file_says_how_to_make_one(tmp_path):
    with pytest.raises(RocktokensError, match="run `rocktokens find` first"):
        make_policy("rocks", rocks=tmp_path / "rocks.json")


def test_neither_policy_needs_scores():
    assert not make_policy("uniform").needs_scores
    assert not make_policy("rocks", rocks=[1]).needs_scores


# Windows: rock 3 with high kl reaches two to its left, one to its right; rock 7 is low and stands alone.

WINDOW_IDS = np.array([5, 6, 2, 3, 9, 4, 7, 8, 1], dtype=np.int32)
KL = np.array([0.9, 0.9, 0.5, 0.7, 0.6, 0.1, 0.2, 0.9, 0.9], np.float32)
WEIGHTS = [1, 0.25, 0.25, 0.25, 0.25, 1, 0.25, 1, 1]
RULE = {"max_each_side": 2, "min_kl": 0.5}


def scores_of(kl) -> TokenScores:
    return TokenScores(kl, *[None] * 5)


def window_policy(lam: float = 0.25):
    return make_policy("rocks", rocks=replace(rock_set(3, 7), windows=RULE), lam=lam, window=True)


def weigh_windows(kl, ids) -> list[float]:
    return window_policy()(scores_of(kl), ids, np.arange(9), np.zeros(9, np.int64), 0).tolist()


def test_windows_weigh_lambda_too():
    assert weigh_windows(KL, WINDOW_IDS) == WEIGHTS


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shift_of_ids_or_kl_by_one_shows_in_the_windows(shift):
    assert weigh_windows(np.roll(KL, shift), WINDOW_IDS) != WEIGHTS
    assert weigh_windows(KL, np.roll(WINDOW_IDS, shift)) != WEIGHTS


def test_windows_do_not_reach_into_another_rollout():
    rollouts = np.array([0, 0, 1, 1, 2, 2, 2, 2, 2])
    weights = window_policy()(scores_of(KL), WINDOW_IDS, np.array([0, 1, 0, 1, 0, 1, 2, 3, 4]), rollouts, 0)
    assert weights.tolist() == [1, 1, 0.25, 0.25, 1, 1, 0.25, 1, 1]


def test_windows_of_torch_scores_are_detached():
    kl = torch.from_numpy(KL).requires_grad_()
    positions, rollouts = torch.arange(9), torch.zeros(9, dtype=torch.int64)
    weights = window_policy()(scores_of(kl), torch.from_numpy(WINDOW_IDS), positions, rollouts, 0)
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    assert weights.tolist() == WEIGHTS


def test_lambda_one_with_windows_is_uniform_bit_for_bit():
    weights = window_policy(lam=1.0)(scores_of(KL), WINDOW_IDS, np.arange(9), np.zeros(9, np.int64), 0)
    assert weights.tobytes() == np.ones(9, np.float32).tobytes()


def test_windows_need_scores_and_say_so():
    policy = window_policy()
    assert policy.needs_scores
    with pytest.raises(ConfigError, match="window = True needs the kl of every token and no scores were given"):
        weigh(policy, IDS)


def test_windows_come_with_the_rocks_file(tmp_path):
    replace(rock_set(3, 7), windows=RULE).save(tmp_path / "rocks.json")
    policy = make_policy("rocks", rocks=tmp_path / "rocks.json", lam=0.25, window=True)
    assert policy(scores_of(KL), WINDOW_IDS, np.arange(9), np.zeros(9, np.int64), 0).tolist() == WEIGHTS
    rock_set(3, 7).save(tmp_path / "rocks.json")
    with pytest.raises(ConfigError, match=r"these have none: give a rocks\.json of `rocktokens find`"):
        make_policy("rocks", rocks=tmp_path / "rocks.json", window=True)
