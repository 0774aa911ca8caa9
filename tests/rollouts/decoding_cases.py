"""Decoding by the kernels of layers and slots against decoding without; run by test_quick_decoding.py.

On a GPU or, with TRITON_INTERPRET=1, on the CPU.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from tiny_sampling import PAD, VOCAB, make_requests
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama import modeling_llama

from kernel_device import DEVICE, INTERPRETED, round_to_bfloat16
from rocktokens.models import layers, projections
from rocktokens.models.projections import lay_side_by_side
from rocktokens.rollouts import rows, sampler, slots
from rocktokens.rollouts.rows import DecodingRows
from rocktokens.rollouts.sampler import SamplingCopy, TransformersSampler
from rocktokens.rollouts.slots import SlotLayer, write_tokens

NEW_TOKENS = 4
REQUESTS = make_requests(3, longest=14)
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
}
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
}
NORMS = {"llama": 5, "qwen2": 5, "qwen3": 9, "gemma": 0}
"""That run by the kernel."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    if INTERPRETED:
        round_to_bfloat16(monkeypatch)
        monkeypatch.setattr(layers, "on_gpu", lambda _: True)
        monkeypatch.setattr(projections, "on_gpu", lambda _: True)
        monkeypatch.setattr(slots, "on_gpu", lambda _: True)


@contextmanager
def without_kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "quick_layers", lambda _: nullcontext())
        patch.setattr(slots, "has_triton", lambda: False)
        yield


def made(name, dtype=torch.bfloat16):
    """A tiny model whose norms do not all have the weight 1."""
    config, cls = MODELS[name]
    torch.manual_seed(0)
    model = cls(config(**TINY))
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model.to(DEVICE, dtype).eval()


def sampler_of(model):
    return TransformersSampler(model, frozenset(), PAD, batch_size=4)


@pytest.fixture
def logits_of(monkeypatch):
    """The logits (A, V) of every step, which is fed the same tokens whatever they are."""

    def decode(model):
        seen = []

        def choose(logits_AV, _banned, _alternatives, _keys, steps_A, _temperature):
            seen.append(logits_AV)
            return (5 + 11 * steps_A) % VOCAB, torch.zeros(len(steps_A), device=DEVICE)

        monkeypatch.setattr(rows, "choose", choose)
        monkeypatch.setattr(DecodingRows, "_capture", lambda *_: None)  # a replayed step would not come by here
        sampler_of(model).sample(REQUESTS, temperature=0.0, max_new_tokens=NEW_TOKENS, seed=0)
        return torch.stack(seen)

    return decode


@pytest.fixture
def calls(monkeypatch):
    """The shapes with which the kernels are called."""
    seen = {"normed": [], "rotated": [], "gated": [], "write_tokens": [], "attend_to_slots": []}

    def noting(name, function):
        def noted(x, *rest):
            seen[name].append(tuple(x.shape))
            return function(x, *rest)

        return noted

    for name in seen:
        module = slots if name in ("write_tokens", "attend_to_slots") else layers
        monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    return seen


def is_untouched(model):
    rotary = modeling_llama.apply_rotary_pos_emb
    return not any("forward" in vars(module) for module in model.modules()) and not isinstance(
        rotary, layers._QuickRotary
    )


# What is decoded


@pytest.mark.parametrize("name", MODELS)
def test_decoding_by_the_kernels_agrees_with_decoding_without(name, logits_of):
    model = made(name)
    with without_kernels():
        wanted = logits_of(model)
    found = logits_of(model)
    assert found.shape == wanted.shape and len(found) >= NEW_TOKENS
    torch.testing.assert_close(found, wanted, rtol=0, atol=4 * 2**-7 * wanted.abs().max().item())
    assert not torch.equal(found[0], found[-1])


def test_rotations_and_slots_by_kernel_change_no_bit(monkeypatch, logits_of):
    model = made("gemma")
    with without_kernels():
        wanted = logits_of(model)
    monkeypatch.setattr(rows, "takes_row_slots", lambda _: False)
    assert torch.equal(logits_of(model), wanted)


@pytest.mark.parametrize("shift", [0, 1])
def test_attention_by_kernel_alone_agrees_with_that_of_torch(monkeypatch, logits_of, shift):
    """And would not if a row looked at one slot less."""
    model = made("gemma")
    with without_kernels():
        wanted = logits_of(model)
    attend = slots.attend_to_slots

    def attending(query, key, value, row_slots_2A, *rest):
        fewer_2A = torch.stack([row_slots_2A[0] - shift, (row_slots_2A[1] - shift).clamp(min=0)])
        return attend(query, key, value, fewer_2A, *rest)

    monkeypatch.setattr(slots, "attend_to_slots", attending)
    error = (logits_of(model) - wanted).abs().max() / wanted.abs().max()
    assert error < 4 * 2**-7 if shift == 0 else error > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_prompts_and_steps_run_by_the_kernels(name, calls, logits_of):
    layers._trials.clear()
    model = made(name)
    with torch.no_grad(), layers.quick_layers(model):
        for seen in calls.values():
            seen.clear()  # of trials
    n_steps = len(logits_of(model))
    n_forwards = 1 + n_steps
    assert len(calls["normed"]) == NORMS[name] * n_forwards
    assert len(calls["gated"]) == (0 if name == "gemma" else 2 * n_forwards)
    assert calls["rotated"] == 2 * [(4, 4, 16, 16)] + 2 * n_steps * [(4, 4, 1, 16)]
    assert calls["write_tokens"] == 2 * n_steps * [(4, 2, 1, 16)]
    assert calls["attend_to_slots"] == 2 * n_steps * [(4, 4, 1, 16)]


@pytest.mark.parametrize("name", ["qwen2", "gemma"])
def test_decoding_with_projections_side_by_side_agrees_with_decoding_without(monkeypatch, name, logits_of):
    model, products, linear = made(name), [], torch.nn.functional.linear
    with without_kernels():
        wanted = logits_of(model)
    lay_side_by_side(model)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *rest: products.append(1) or linear(x, *rest))
    found = logits_of(model)
    per_forward = 2 * (5 if name == "gemma" else 4) + 1  # the head is one too
    assert len(products) == per_forward * (1 + len(found))
    torch.testing.assert_close(found, wanted, rtol=0, atol=4 * 2**-7 * wanted.abs().max().item())
    assert is_untouched(model)


def test_decoding_with_a_wrong_rotation_would_not_agree(monkeypatch, logits_of):
    model = made("llama")
    with without_kernels():
        wanted = logits_of(model)
    rotate = layers.rotated
    with torch.no_grad(), layers.quick_layers(model):  # trials are over
        monkeypatch.setattr(layers, "rotated", lambda q, k, cos, sin: rotate(q, k, cos, -sin))
    assert (logits_of(model) - wanted).abs().max() > 0.1 * wanted.abs().max()


def test_float32_is_decoded_bit_for_bit_as_without_kernels(calls, logits_of):
    model = made("llama", torch.float32)
    with without_kernels():
        wanted = logits_of(model)
    assert not calls["write_tokens"]
    assert torch.equal(logits_of(model), wanted)
    assert calls.pop("write_tokens") and not any(calls.values())


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: graphs are captured there only")
def test_captured_steps_with_projections_side_by_side_see_new_weights():
    source = made("qwen2", torch.float32)
    copied = SamplingCopy(source, torch.bfloat16)
    captured = TransformersSampler(copied.model, frozenset(), PAD, batch_size=4, refresh=copied.refresh)

    def decoded(ours):
        return [
            (completion.token_ids.tolist(), completion.logprobs.tolist())
            for completion in ours.sample(make_requests(9), temperature=1.0, max_new_tokens=24, seed=0)
        ]

    before = decoded(captured)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.1)
    copied.refresh()
    found = decoded(captured)
    assert found == decoded(sampler_of(copied.model)) and found != before
    assert captured._rows is not None and captured._rows._graphs


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: graphs are captured there only")
@pytest.mark.parametrize("is_laid_out", [False, True])
def test_a_captured_step_is_that_of_kernels_launched_one_by_one(monkeypatch, is_laid_out):
    model = made("llama")
    if is_laid_out:
        lay_side_by_side(model)
    ours = sampler_of(model)

    def decoded():
        return [
            (completion.token_ids.tolist(), completion.logprobs.tolist())
            for completion in ours.sample(make_requests(9), temperature=1.0, max_new_tokens=24, seed=0)
        ]

    first, again = decoded(), decoded()
    assert ours._rows is not None and ours._rows._graphs and ours._rows._captures
    ours._rows = None
    monkeypatch.setattr(DecodingRows, "_capture", lambda *_: None)
    assert first == again == decoded()


# What is left behind


@pytest.mark.parametrize("ends", [False, True])
def test_layers_are_quick_while_a_caller_is_told_and_back_afterwards(ends):
    model = made("llama")

    def told(_count):
        assert not is_untouched(model)
        if ends:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if ends else nullcontext():
        sampler_of(model).sample(REQUESTS, temperature=0.0, max_new_tokens=2, seed=0, on_done=told)
    assert is_untouched(model)


def test_layers_are_back_after_a_model_that_fails():
    model = made("llama")
    model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sampler_of(model).sample(REQUESTS, temperature=0.0, max_new_tokens=2, seed=0)
    assert is_untouched(model)


def test_a_caller_may_sample_from_another_model_meanwhile():
    """And train it, or score with it."""
    model, other = made("llama"), made("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)

    def sampled(which, on_done=None):
        completions = sampler_of(which).sample(REQUESTS, temperature=1.0, max_new_tokens=2, seed=0, on_done=on_done)
        return [(completion.token_ids.tolist(), completion.logprobs.tolist()) for completion in completions]

    wanted, wanted_of_other, inner = sampled(model), sampled(other), []

    def told(_count):
        inner.append(sampled(other))
        assert not is_untouched(model)
        ids = torch.arange(1, 6, device=DEVICE)[None]
        with torch.enable_grad():
            other(input_ids=ids, labels=ids).loss.backward()

    assert sampled(model, told) == wanted
    assert inner and all(found == wanted_of_other for found in inner)
    assert is_untouched(model) and is_untouched(other)
    assert all(parameter.grad is not None for parameter in other.parameters())


# Slots


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "width"), [(1, 2), (2, 16), (3, 64), (9, 80), (32, 128)])
def test_tokens_are_written_where_an_assignment_puts_them(heads, width, dtype):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    rows_A, slots_A = torch.tensor([4, 0, 5, 1], device=DEVICE), torch.tensor([0, 11, 3, 3], device=DEVICE)
    together = randn(4, 1, heads + 2, width + 3)
    k = together[..., 1 : 1 + heads, 2 : 2 + width].transpose(1, 2)  # part of something larger
    v = randn(heads, 4, 1, width).transpose(0, 1)
    own = randn(6, heads, 12, width), randn(6, heads, 12, width)
    found, wanted = ([buffer.clone() for buffer in own] for _ in range(2))
    write_tokens(k, v, *found, rows_A, slots_A)
    for buffer, states in zip(wanted, (k, v), strict=True):
        buffer[rows_A, :, slots_A] = states[:, :, 0]
    for ours, theirs, before in zip(found, wanted, own, strict=True):
        assert torch.equal(ours, theirs) and not torch.equal(ours, before)


def test_tokens_that_the_kernel_is_not_for_are_assigned(calls):
    """Numbers that do not lie side by side, and keys and values of two widths."""
    states = torch.arange(48.0, device=DEVICE).view(4, 2, 1, 6)
    spread = torch.arange(96.0, device=DEVICE).view(4, 2, 1, 12)[..., ::2]
    for k, v in ((spread, states), (states, states[..., :4]), (spread.contiguous(), states)):
        layer = SlotLayer(4, 8)
        layer.rows_A, layer.slots_A, layer.width = torch.arange(4, device=DEVICE), torch.arange(4, device=DEVICE), 8
        keys, values = layer.update(k, v)
        assert torch.equal(keys[range(4), :, range(4)], k[:, :, 0])
        assert torch.equal(values[range(4), :, range(4)], v[:, :, 0])
    assert calls["write_tokens"] == [(4, 2, 1, 6)]
