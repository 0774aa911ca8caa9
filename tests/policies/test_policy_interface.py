"""What holds for every policy: the oracle's numbers, whatever the kind, order and company of the rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_oracle import CASES, EXAMPLE, LOCAL, ORACLES, Rows, make, oracle, updates, weigh

from rocktokens.errors import RocktokensError
from rocktokens.policies import POLICIES, make_policy
from rocktokens.types import TokenScores


def test_every_policy_is_tried():
    assert list(CASES) == list(POLICIES)
    assert set(POLICIES) - set(ORACLES) == {"online_rocks", "random_positions", "occurrence_control"}


@given(rows=updates())
def test_weights_are_those_of_the_plain_loops(rows: Rows):
    for name in ORACLES:
        np.testing.assert_allclose(weigh(make(name), rows), oracle(name, rows), rtol=1e-6, atol=0, err_msg=name)


@given(rows=updates(), data=st.data())
def test_weights_follow_their_rows(rows: Rows, data: st.DataObject):
    order = np.array(data.draw(st.permutations(range(len(rows)))))
    for name in CASES:
        shuffled, expected = weigh(make(name), rows.take(order)), weigh(make(name), rows)[order]
        np.testing.assert_array_equal(shuffled, expected, err_msg=name)


@given(rows=updates(), data=st.data())
def test_a_response_weighs_the_same_alone(rows: Rows, data: st.DataObject):
    one = rows.rollout_ids == data.draw(st.sampled_from(rows.rollout_ids.tolist()))
    for name in LOCAL:
        alone, among_others = weigh(make(name), rows.take(one)), weigh(make(name), rows)[one]
        np.testing.assert_array_equal(alone, among_others, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_torch_weighs_like_numpy_and_without_gradient(name: str):
    policy, rows = make(name), EXAMPLE.torch(requires_grad=True)
    weights = weigh(policy, rows)
    assert isinstance(weights, torch.Tensor) and weights.dtype == torch.float32
    assert not weights.requires_grad and weights.device == rows.token_ids.device
    expected = weigh(policy, EXAMPLE)
    assert isinstance(expected, np.ndarray) and expected.dtype == np.float32
    np.testing.assert_array_equal(weights.numpy(), expected)
    probed = policy.probe(weights, rows.token_ids, rows.positions, rows.rollout_ids, 7)
    assert isinstance(probed, torch.Tensor) and probed.dtype == torch.bool and not probed.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scores_of_any_precision(dtype: torch.dtype):
    scores = TokenScores(*(torch.from_numpy(column).to(dtype) for _, column in EXAMPLE.scores.items()))
    rows = EXAMPLE.torch()
    weights = make("tip")(scores, rows.token_ids, rows.positions, rows.rollout_ids, 0)
    np.testing.assert_array_equal(weights.numpy(), weigh(make("tip"), EXAMPLE, 0))  # the scores fit bfloat16


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("name", ["rocks", "type_control", "top_frequency", "top_mean_loss", "top_grad_norm"])
def test_keying_by_a_neighbouring_token_shows(name: str, shift: int):
    shifted = Rows(EXAMPLE.scores, np.roll(EXAMPLE.token_ids, shift), EXAMPLE.positions, EXAMPLE.rollout_ids)
    assert weigh(make(name), EXAMPLE).tolist() == pytest.approx(oracle(name, EXAMPLE))
    assert weigh(make(name), EXAMPLE).tolist() != pytest.approx(oracle(name, shifted))


NEUTRAL = {
    "rocks": {"lam": 1},
    "online_rocks": {"lam": 1.0},
    "random_positions": {"rho": 1.0},
    "type_control": {"lam": 1.0},
    "occurrence_control": {"lam": 1.0},
    "loss_control": {"lam": 1.0},
    "weight_control": {"lam": 1.0},
    "top_frequency": {"lam": 1.0},
    "top_mean_loss": {"lam": 1.0},
    "top_grad_norm": {"lam": 1.0},
    "high_entropy": {"rho": 1.0},
    "tip": {"rho": 1.0},
    "teachable": {"rho": 1.0},
    "selectkd": {"beta": 1.0},
    "prefix": {"fraction": 1.0},
    "first_n": {"n": 99},
    "prefix_importance": {"w_max": 1.0},
    "entropy_mix": {"alpha": 0.0, "beta": 0.0},
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_the_neutral_parameter_is_uniform_bit_for_bit(name: str):
    uniform = weigh(make_policy("uniform"), EXAMPLE)
    assert weigh(make(name, **NEUTRAL[name]), EXAMPLE).tobytes() == uniform.tobytes()


@pytest.mark.parametrize("name", CASES)
def test_what_a_policy_needs_is_all_it_looks_at(name: str):
    """Columns it does not name may be missing; each one it names is asked for, in a sentence."""
    policy = make(name)
    known = {column: getattr(EXAMPLE.scores, column) for column in policy.needs}
    blank = dict.fromkeys(["kl", "logp_student", "logp_teacher", "entropy_student", "entropy_teacher", "grad_norm"])
    arrays = (EXAMPLE.token_ids, EXAMPLE.positions, EXAMPLE.rollout_ids, 7)
    scores = TokenScores(**{**blank, **known}) if known else None
    np.testing.assert_array_equal(policy(scores, *arrays), weigh(policy, EXAMPLE))
    for column in policy.needs:
        sentence = f"policy {name} needs the {column} of every token"
        with pytest.raises(RocktokensError, match=f"{sentence}: score before weighing"):
            policy(TokenScores(**{**blank, **known, column: None}), *arrays)
        with pytest.raises(RocktokensError, match=f"{sentence} and some are not finite"):
            policy(TokenScores(**{**blank, **known, column: known[column] * np.float32("nan")}), *arrays)


def test_a_policy_without_memory_has_no_state_and_takes_none():
    policy = make("tip")
    assert policy.state() == {} and policy.observe(EXAMPLE.scores, EXAMPLE.token_ids, 0) == {}
    policy.restore({})
    with pytest.raises(RocktokensError, match="policy tip keeps no state and the checkpoint holds sums: resume with"):
        policy.restore({"sums": np.zeros(1)})
