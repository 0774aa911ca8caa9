"""The hidden state of an occurrence is the one its token was predicted from: what the LM head received."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rocktokens.errors import RocktokensError
from rocktokens.models.load import LoadedModel
from rocktokens.rocks.contexts import context_consistency
from rocktokens.scoring import hidden
from rocktokens.scoring.hidden import hidden_encoder
from rocktokens.types import Rollout

V, D = 37, 16


@pytest.fixture(scope="module")
def student():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def rollout(rollout_id: int, prompt: list[int], response: list[int]) -> Rollout:
    arrays = (np.array(ids, np.int32) for ids in (prompt, response))
    return Rollout(rollout_id, f"p{rollout_id}", 0, *arrays, np.zeros(len(response), np.float32), 0, finished=True)


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 12, (9, 2))
    return [
        rollout(10 * i + 3, *(rng.integers(V, size=size).tolist() for size in pair)) for i, pair in enumerate(sizes)
    ]


@pytest.fixture(scope="module")
def occurrences(rollouts) -> tuple[np.ndarray, np.ndarray]:
    """All of them, in no order."""
    pairs = np.array([(r.rollout_id, t) for r in rollouts for t in range(len(r.token_ids))])
    shuffled = np.random.default_rng(2).permutation(pairs)
    return shuffled[:, 0], shuffled[:, 1].astype(np.int32)


@torch.no_grad()
def oracle(student, rollouts, occurrences, shift: int = 0) -> np.ndarray:
    """What enters the LM head after the prompt and x_<t alone: no later token is even given."""
    by_id, entered = {r.rollout_id: r for r in rollouts}, []
    hook = student.lm_head.register_forward_pre_hook(lambda _, args: entered.append(args[0][0, -1].numpy()))
    for rollout_id, position in zip(*occurrences, strict=True):
        prompt, response = (by_id[rollout_id].prompt_ids.tolist(), by_id[rollout_id].token_ids.tolist())
        student(torch.tensor([[*prompt, *response][: len(prompt) + position + shift]]))
    hook.remove()
    return np.array(entered)


@pytest.fixture(scope="module")
def expected(student, rollouts, occurrences) -> np.ndarray:
    return oracle(student, rollouts, occurrences)


@pytest.mark.parametrize("tokens_per_batch", [1, 25, 16384])
def test_states_are_those_the_head_predicts_from(student, rollouts, occurrences, expected, tokens_per_batch):
    encoder = hidden_encoder(student, rollouts, tokens_per_batch)
    states = encoder.look_up(*occurrences)
    assert states.dtype == np.float32
    np.testing.assert_allclose(states, expected, atol=2e-5)
    vectors = encoder.encode(states)
    assert vectors.dtype == np.float64
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-14)
    np.testing.assert_allclose(vectors * np.linalg.norm(states, axis=1, keepdims=True), states, atol=1e-5)


def test_a_shift_by_one_would_show(student, rollouts, occurrences):
    inner = np.flatnonzero(occurrences[1] > 0)[:6]
    some = occurrences[0][inner], occurrences[1][inner]
    states = hidden_encoder(student, rollouts).look_up(*some)
    for shift in (-1, 1):
        assert (np.abs(states - oracle(student, rollouts, some, shift)).max(axis=1) > 1e-2).all()


def test_only_rollouts_asked_for_pass_through_the_student(student, rollouts):
    seen = []
    hook = student.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.extend(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    wanted = [rollouts[i].rollout_id for i in (4, 2, 4, 4)]
    states = hidden_encoder(student, rollouts).look_up(np.array(wanted), np.zeros(4, np.int32))
    hook.remove()
    assert len(seen) == 2
    np.testing.assert_array_equal(states[0], states[2])


def test_a_loaded_model_will_do_and_nothing_asked_is_nothing(student, rollouts, occurrences):
    loaded = hidden_encoder(LoadedModel(student, None, "tiny", frozenset()), rollouts)
    np.testing.assert_array_equal(loaded.look_up(*occurrences), hidden_encoder(student, rollouts).look_up(*occurrences))
    assert loaded.look_up(np.array([], np.int64), np.array([], np.int32)).shape == (0, D)


def test_half_width_states_are_normalised_in_float64(rollouts, student, occurrences):
    narrow = LlamaForCausalLM(student.config).eval().to(torch.bfloat16)
    encoder = hidden_encoder(narrow, rollouts)
    vectors = encoder.encode(encoder.look_up(*occurrences))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-14)


def test_a_state_of_zero_stays_zero(student, rollouts):
    assert hidden_encoder(student, rollouts).encode(np.zeros((2, D), np.float32)).tolist() == np.zeros((2, D)).tolist()


@pytest.mark.parametrize("occurrence", [(999, 0), (3, 40)])
def test_occurrences_of_other_rollouts_are_refused(student, rollouts, occurrence):
    ids, positions = np.array([13, occurrence[0]]), np.array([0, occurrence[1]])
    with pytest.raises(RocktokensError, match=f"position {occurrence[1]} of rollout {occurrence[0]} is in the trace"):
        hidden_encoder(student, rollouts).look_up(ids, positions)


def test_states_looked_up_at_once_are_bounded(student, rollouts, monkeypatch):
    monkeypatch.setattr(hidden, "STATES_BYTES", 7 * 4 * D)
    assert hidden_encoder(student, rollouts).at_once == 7


def test_consistency_takes_it_as_an_encoder(student):
    """Three rollouts begin alike and one does not: at position 1 those three have one state."""
    rollouts = [rollout(i, [4, 5], [6, 7, i]) for i in range(3)] + [rollout(3, [9, 1], [2, 7, 1])]
    ids, positions = np.arange(4), np.ones(4, np.int32)
    encoder = hidden_encoder(student, rollouts)
    result = context_consistency(np.zeros(4, np.int64), ids, positions, np.array([7]), encoder, [0.999])
    assert result.neighbours.tolist() == [[2, 2, 2, 0]]
