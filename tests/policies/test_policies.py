"""Rocks and their windows weigh λ where they are predicted; which rocks can be chosen."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from policy_oracle import RULE, rock_set

from rocktokens.errors import ConfigError, RocktokensError
from rocktokens.policies import make_policy
from rocktokens.types import TokenScores

IDS = np.array([5, 3, 9, 3, 7, 7, 1], dtype=np.int32)
POSITIONS, ROLLOUTS = np.arange(7), np.zeros(7, np.int64)


def weigh(policy, ids):
    return policy(None, ids, POSITIONS, ROLLOUTS, 0)


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


def test_no_rocks_are_uniform_bit_for_bit():
    ones = weigh(make_policy("uniform"), IDS)
    assert weigh(make_policy("rocks", rocks=[], lam=0), IDS).tobytes() == ones.tobytes()


def test_rocks_come_as_a_set_a_path_or_ids(tmp_path):
    rocks = rock_set(7, 3)
    rocks.save(tmp_path / "rocks.json")
    expected = weigh(make_policy("rocks", rocks=[3, 7]), IDS).tolist()
    for given in (rocks, str(tmp_path / "rocks.json"), tmp_path / "rocks.json", iter([7, 3]), np.array([3, 7])):
        assert weigh(make_policy("rocks", rocks=given), IDS).tolist() == expected


def test_a_missing_rocks_file_says_how_to_make_one(tmp_path):
    with pytest.raises(RocktokensError, match="run `rocktokens find` first"):
        make_policy("rocks", rocks=tmp_path / "rocks.json")


# Some of the rocks

RANKED = rock_set(
    9,
    3,
    7,
    category=["digit", "latex_math", "punctuation"],
    verdict=["pillar", "neutral", "untested"],
    label=["stuck", "residual", "stuck"],
)


@pytest.mark.parametrize(
    ("chosen", "ids"),
    [
        ({}, {9, 3, 7}),
        ({"k": 2}, {9, 3}),
        ({"k": 99}, {9, 3, 7}),
        ({"categories": ["punctuation", "latex_math"]}, {3, 7}),
        ({"verdicts": ["neutral", "stumbling", "undecided", "untested"]}, {3, 7}),
        ({"k": 2, "verdicts": ["neutral", "untested"]}, {3}),
        ({"categories": ["digit", "latex_math", "other"], "verdicts": ["pillar"]}, {9}),
        ({"labels": ["stuck"]}, {9, 7}),
        ({"labels": ["stuck", "unclear"], "verdicts": ["untested"]}, {7}),
    ],
)
def test_rocks_are_chosen_by_rank_category_verdict_and_label(chosen, ids):
    frozen = IDS[weigh(make_policy("rocks", rocks=RANKED, **chosen), IDS) == 0]
    assert set(frozen.tolist()) == ids


def test_ids_are_chosen_by_rank_alone():
    assert weigh(make_policy("rocks", rocks=[7, 3], k=1), IDS).tolist() == [1, 1, 1, 1, 0, 0, 1]
    with pytest.raises(ConfigError, match=r"policy\.categories needs a rocks\.json and token ids were given: give its"):
        make_policy("rocks", rocks=[7, 3], categories=["digit"])
    with pytest.raises(ConfigError, match=r"policy\.labels needs a rocks\.json"):
        make_policy("rocks", rocks=[7, 3], labels=["stuck"])
    with pytest.raises(ConfigError, match=r"policy\.verdicts needs a rocks\.json"):
        make_policy("rocks", rocks=[7, 3], verdicts=["neutral"])


def test_labels_of_rocks_that_have_none_are_refused():
    unlabelled = replace(RANKED, tokens=[replace(token, label=None) for token in RANKED.tokens])
    for name in ("rocks", "occurrence_control", "loss_control", "weight_control"):
        with pytest.raises(
            ConfigError, match=r"^policy\.labels needs rocks with labels and these have none: write rocks"
        ):
            make_policy(name, rocks=unlabelled, labels=["stuck"])


def test_a_choice_that_leaves_no_rock_is_refused():
    with pytest.raises(
        ConfigError, match=r"categories = \['other'\] leaves no rock: give some of digit, latex_math, p"
    ):
        make_policy("rocks", rocks=RANKED, categories=["other"])
    with pytest.raises(ConfigError, match=r"policy\.verdicts = \['neutral'\] leaves no rock: give some of pillar$"):
        make_policy("rocks", rocks=RANKED, k=1, verdicts=["neutral"])


# Windows: rock 3 with high kl reaches two to its left, one to its right; rock 7 is low and stands alone.

WINDOW_IDS = np.array([5, 6, 2, 3, 9, 4, 7, 8, 1], dtype=np.int32)
KL = np.array([0.9, 0.9, 0.5, 0.7, 0.6, 0.1, 0.2, 0.9, 0.9], np.float32)
WEIGHTS = [1, 0.25, 0.25, 0.25, 0.25, 1, 0.25, 1, 1]


def scores_of(kl) -> TokenScores:
    return TokenScores(kl, *[None] * 5)


def window_policy(lam: float = 0.25):
    return make_policy("rocks", rocks=rock_set(3, 7, windows=RULE), lam=lam, window=True)


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


def test_scores_are_needed_for_windows_only():
    assert window_policy().needs == {"kl"}
    assert make_policy("rocks", rocks=[1]).needs == frozenset()


def test_windows_come_with_the_rocks_file(tmp_path):
    rocks = rock_set(3, 7, windows=RULE)
    rocks.save(tmp_path / "rocks.json")
    policy = make_policy("rocks", rocks=tmp_path / "rocks.json", lam=0.25, window=True)
    assert policy(scores_of(KL), WINDOW_IDS, np.arange(9), np.zeros(9, np.int64), 0).tolist() == WEIGHTS
    replace(rocks, windows=None).save(tmp_path / "rocks.json")
    with pytest.raises(ConfigError, match=r"these have none: give a rocks\.json of `rocktokens find`"):
        make_policy("rocks", rocks=tmp_path / "rocks.json", window=True)
