import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from rocktokens.errors import RocktokensError
from rocktokens.models.head import hidden_states, lm_head
from rocktokens.scoring import batch as batches
from rocktokens.scoring.batch import collate, response_states, split_by_tokens
from rocktokens.scoring.divergence import token_scores
from rocktokens.types import Rollout

V = 41
PAD = 7


def rollout(rollout_id, prompt_ids, token_ids):
    prompt_ids, token_ids = np.array(prompt_ids, dtype=np.int32), np.array(token_ids, dtype=np.int32)
    return Rollout(
        rollout_id, f"p{rollout_id}", 0, prompt_ids, token_ids, np.zeros(len(token_ids), np.float32), 0, finished=True
    )


def random_rollouts(n=5, seed=0):
    """Rollouts of unequal lengths whose responses hold the pad id, at the end too."""
    generator = np.random.default_rng(seed)
    return [
        rollout(
            100 + i,
            generator.integers(V, size=generator.integers(1, 9)),
            [*generator.integers(V, size=generator.integers(0, 12)), PAD],
        )
        for i in range(n)
    ]


def tiny_llama(seed=0, width=24):
    """A random model whose logits are far from flat."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).double().eval()


@torch.no_grad()
def naive_log_probs(model, rollouts):
    """The log-probability of each response token from the logits of an unpadded forward of what comes before it."""
    values = []
    for r in rollouts:
        ids = [*r.prompt_ids.tolist(), *r.token_ids.tolist()]
        for t in range(len(r.prompt_ids), len(ids)):
            logits_V = model(torch.tensor([ids[:t]])).logits[0, -1]
            values.append(torch.log_softmax(logits_V, -1)[ids[t]])
    return torch.stack(values)


@torch.no_grad()
def batched_log_probs(model, batch, shift=0):
    states = torch.cat([hidden_states(model, input_ids_RL).flatten(0, 1) for input_ids_RL in batch.groups])
    h_TD = states[batch.group_index_T + shift]
    if shift == 0:
        torch.testing.assert_close(h_TD, response_states(model, batch), atol=0, rtol=0)
    head = lm_head(model)
    return token_scores(h_TD, head, h_TD, head, batch.token_ids_T).logp_student


def test_each_token_is_predicted_by_the_state_before_it():
    model, rollouts = tiny_llama(), random_rollouts()
    batch = collate(rollouts, PAD, "cpu")
    naive = naive_log_probs(model, rollouts)
    torch.testing.assert_close(batched_log_probs(model, batch), naive, atol=1e-10, rtol=0)
    for shift in (-1, 1):
        shifted = batched_log_probs(model, batch, shift)
        assert ((shifted - naive).abs() > 1e-2).double().mean() > 0.9


@pytest.mark.parametrize("tokens", [1, 12, 30])
@pytest.mark.parametrize("asked_for", [True, False])
def test_small_groups_give_the_same_states_in_the_same_order(tokens, asked_for, monkeypatch):
    model, rollouts = tiny_llama(), random_rollouts()
    whole = collate(rollouts, PAD, "cpu")
    if asked_for:
        batch = collate(rollouts, PAD, "cpu", tokens_per_group=tokens)
    else:
        monkeypatch.setattr(batches, "CPU_GROUP_TOKENS", tokens)
        batch = collate(rollouts, PAD, "cpu", tokens_per_group=30)
    assert 1 == len(whole.groups) < len(batch.groups)
    assert all(ids_RL.numel() <= tokens or len(ids_RL) == 1 for ids_RL in batch.groups)
    torch.testing.assert_close(batched_log_probs(model, batch), naive_log_probs(model, rollouts), atol=1e-10, rtol=0)
    torch.testing.assert_close(response_states(model, batch), response_states(model, whole), atol=1e-10, rtol=0)


def test_padding_changes_nothing():
    model, rollouts = tiny_llama(), random_rollouts()
    longest = rollout(0, np.arange(30) % V, np.arange(20) % V)
    alone = torch.cat([batched_log_probs(model, collate([r], PAD, "cpu")) for r in rollouts])
    for pad_id in (PAD, 0):
        padded = batched_log_probs(model, collate([*rollouts, longest], pad_id, "cpu"))
        torch.testing.assert_close(padded[: len(alone)], alone, atol=1e-10, rtol=0)


def test_a_pad_id_inside_a_response_is_a_token_like_any_other():
    batch = collate([rollout(3, [PAD, 1], [PAD, 2, PAD]), rollout(4, [5], [PAD])], PAD, "cpu")
    assert batch.token_ids_T.tolist() == [PAD, 2, PAD, PAD]
    assert [ids_RL.tolist() for ids_RL in batch.groups] == [[[PAD, 1, PAD, 2, PAD], [5, PAD, PAD, PAD, PAD]]]
    assert batch.group_index_T.tolist() == [1, 2, 3, 5]


def test_the_example_of_the_docstring():
    batch = collate([rollout(8, [1, 2, 3], [4, 5]), rollout(9, [6, 7], [8])], 0, "cpu")
    assert [ids_RL.tolist() for ids_RL in batch.groups] == [[[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]]
    assert batch.group_index_T.tolist() == [2, 3, 6]
    assert batch.positions_T.tolist() == [0, 1, 0]
    assert batch.rollout_ids_T.tolist() == [8, 8, 9]
    assert batch.row.input_ids_N.tolist() == [1, 2, 3, 4, 5, 6, 7, 8] and batch.row_index_T.tolist() == [2, 3, 6]


@pytest.mark.parametrize(("prompt", "response", "field"), [([], [1], "prompt_ids"), ([1], [], "token_ids")])
def test_a_rollout_with_nothing_to_score_is_named(prompt, response, field):
    with pytest.raises(RocktokensError, match=f"rollout 5 of prompt 'p5' has no {field}"):
        collate([rollout(4, [1], [2]), rollout(5, prompt, response)], 0, "cpu")


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=30), st.integers(1, 200), st.booleans())
def test_groups_hold_every_rollout_once_and_fit(lengths, budget, packed):
    rollouts = [rollout(i, np.zeros(p), np.zeros(t)) for i, (p, t) in enumerate(lengths)]
    groups = split_by_tokens(rollouts, budget, packed=packed)
    assert sorted(index for group in groups for index in group) == list(range(len(rollouts)))
    totals = [[sum(lengths[i]) for i in group] for group in groups]

    def size(group):
        return sum(group) if packed else len(group) * max(group)

    assert all(len(group) == 1 or size(group) <= budget for group in totals)
    for group, following in itertools.pairwise(totals):
        assert size([*group, max(following)]) > budget, "the next rollout would have fitted"
        assert min(group) >= max(following)
