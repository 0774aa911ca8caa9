"""Attention over slots on a GPU, as far as it can be seen on a CPU."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_sampling import EOS_IDS, PAD, VOCAB, make_llama, make_requests, same_completion
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from rocktokens.rollouts import slots
from rocktokens.rollouts.probe import require_scored_as_sampled
from rocktokens.rollouts.sampler import TransformersSampler
from rocktokens.rollouts.slots import fits, grouped_attention, mask_copies


class Operators(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def on_a_gpu(query, key, value, *, attn_mask, scale):
    """The shapes and strides of torch's memory-efficient attention, which is what takes a mask there."""
    assert all(stride % 8 == 0 for stride in attn_mask.stride()[:-1])  # or it would be copied to a padded one
    mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, False, scale=scale)[0]


@pytest.mark.parametrize(("heads", "key_heads"), [(9, 3), (12, 2), (4, 4), (4, 1)])
def test_one_mask_per_key_head_saves_the_copy_of_what_was_attended_to(monkeypatch, heads, key_heads):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", on_a_gpu)
    rows, capacity, width, settings = 8, 384, 320, {"dtype": torch.bfloat16, "device": "meta"}
    query = torch.empty(rows, 1, heads, 64, **settings).transpose(1, 2)
    key, value = (torch.empty(16, key_heads, capacity, 64, **settings)[:rows, :, :width] for _ in range(2))

    def operators(copies):
        mask = torch.empty(16, copies, capacity, **settings)[:rows, :, None, :width]
        with Operators() as seen:
            attended, _ = grouped_attention(torch.nn.Identity(), query, key, value, mask)
        assert attended.shape == (rows, 1, heads, 64)
        return seen.names

    shares_keys = 1 < key_heads < heads
    assert ("clone" in operators(1)) == shares_keys
    assert operators(key_heads) <= {"view", "alias", "expand", "slice", "_scaled_dot_product_efficient_attention"}


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_grouped_attention_writes_what_that_of_transformers_writes(monkeypatch, key_heads):
    """In float32, where only sums are rounded otherwise."""
    model, requests = make_llama(num_key_value_heads=key_heads), make_requests(9)

    def sampled():
        sampler = TransformersSampler(model, EOS_IDS, PAD, batch_size=8)
        return sampler.sample(requests, temperature=1.0, max_new_tokens=30, seed=7)

    wanted, called = sampled(), []
    assert mask_copies(model) == 1
    monkeypatch.setattr(slots, "on_gpu", lambda _: True)
    monkeypatch.setattr(slots, "has_triton", lambda: False)
    monkeypatch.setitem(
        slots.AttentionInterface._global_mapping,
        slots.GROUPED_ATTENTION,
        lambda module, *states, **named: called.append(1) or grouped_attention(module, *states, **named),
    )
    assert mask_copies(model) == (2 if key_heads == 2 else 1)
    found = sampled()
    assert called and len({len(completion.token_ids) for completion in found}) > 2
    assert all(same_completion(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


def test_models_that_attend_by_themselves_take_one_mask(monkeypatch):
    monkeypatch.setattr(slots, "on_gpu", lambda _: True)
    monkeypatch.setattr(slots, "has_triton", lambda: False)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    settings: dict[str, Any] = {**sizes, "num_key_value_heads": 2, "pad_token_id": PAD}
    model = StableLmForCausalLM(StableLmConfig(vocab_size=VOCAB, **settings)).eval()
    assert fits(model) and mask_copies(model) == 1
    require_scored_as_sampled(TransformersSampler(model, EOS_IDS, PAD, batch_size=4))


def test_layers_with_other_key_heads_than_the_config_says_take_the_first_mask():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(4, heads, n, 8, generator=generator) for heads, n in ((6, 1), (3, 16), (3, 16)))
    hidden = torch.where(torch.rand(4, 1, 1, 16, generator=generator) < 0.5, 0.0, -torch.inf)
    hidden[..., 0] = 0
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, *(states.repeat_interleave(2, dim=1) for states in (key, value)), attn_mask=hidden
    )
    for copies in (1, 2, 3):
        found, _ = grouped_attention(torch.nn.Identity(), query, key, value, hidden.repeat(1, copies, 1, 1))
        assert np.allclose(found.transpose(1, 2), wanted, atol=1e-6)


def test_latent_attention_keeps_what_has_two_widths():
    """Latents in the place of keys, and a narrower part that is rotated in the place of values."""
    torch.manual_seed(0)
    widths = {"q_lora_rank": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1, "pad_token_id": PAD}
    settings: dict[str, Any] = {**widths, **experts, **sizes, **heads}
    config = DeepseekV3Config(vocab_size=VOCAB, initializer_range=0.3, **settings)
    model = DeepseekV3ForCausalLM(config).eval()
    assert fits(model)
    require_scored_as_sampled(TransformersSampler(model, EOS_IDS, PAD, batch_size=4))


def attend_to_every_slot_named(query, key, value, row_slots_2A, scale=None):
    """In place of the kernel, whatever the mask says."""
    slots_L = torch.arange(key.shape[2])
    newest_A1, before_A1 = row_slots_2A[:, :, None]
    seen_AL = (slots_L <= newest_A1) & (slots_L >= newest_A1 - before_A1)
    mask = torch.zeros(seen_AL.shape, dtype=query.dtype).masked_fill(~seen_AL, -torch.inf)[:, None, None]
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return attended.transpose(1, 2)


@pytest.mark.parametrize("kept", [2048, 6])
@pytest.mark.parametrize("architecture", ["llama", "doge"])
def test_a_layer_that_hides_more_than_its_rows_do_keeps_its_own_mask(monkeypatch, architecture, kept):
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    model: Any = make_llama(num_key_value_heads=2)
    if architecture == "doge":
        config = DogeConfig(
            **sizes, vocab_size=VOCAB, num_hidden_layers=2, keep_window_size=kept, initializer_range=0.3
        )
        model = DogeForCausalLM(config).eval()
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.A)  # as after training: the mask is another one for each head

    def sample():
        own = TransformersSampler(model, EOS_IDS, PAD, batch_size=4)
        return own.sample(make_requests(5, longest=14), temperature=1.0, max_new_tokens=12, seed=0)

    wanted, called = sample(), []
    monkeypatch.setattr(slots, "on_gpu", lambda _: True)
    monkeypatch.setattr(slots, "has_triton", lambda: True)
    monkeypatch.setattr(slots, "HALF", (torch.float32,))
    monkeypatch.setattr(slots, "_takes", lambda *_: False)
    monkeypatch.setattr(slots, "attend_to_slots", lambda *given: called.append(1) or attend_to_every_slot_named(*given))
    found = sample()
    assert all(map(same_completion, found, wanted)) and bool(called) == (architecture == "llama")
