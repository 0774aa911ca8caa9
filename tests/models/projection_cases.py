"""Whole models whose projections are single products against the same models as they are; run by test_layers.py.

On a GPU or, with TRITON_INTERPRET=1, on the CPU.
"""

import pytest
import torch
from layer_cases import DEVICE, IDS, INTERPRETED, Launches, is_untouched, llama, made, qwen3, randn, round_to_bfloat16
from transformers import GemmaConfig, GemmaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama import modeling_llama

from rocktokens.models import layer_kernels, layers, projections
from rocktokens.models.layers import gated, normed, quick_layers
from rocktokens.models.projections import lay_side_by_side


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Run kernels on the CPU too."""
    if INTERPRETED:
        round_to_bfloat16(monkeypatch)
        monkeypatch.setattr(layers, "on_gpu", lambda _: True)
        monkeypatch.setattr(projections, "on_gpu", lambda _: True)


def qwen2(dtype=torch.bfloat16):
    return made(Qwen2Config, Qwen2ForCausalLM, dtype)


def gemma(dtype=torch.bfloat16):
    return made(GemmaConfig, GemmaForCausalLM, dtype)


MODELS = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "gemma": gemma}
QKV, OWN_QKV, GATES, OWN_GATES, OUT = [128], [64, 32, 32], [96], [48, 48], [64]
"""How many rows the matrices of a layer have, together and each for itself."""


def states(model):
    return model.base_model(input_ids=IDS, use_cache=False).last_hidden_state


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_laid_out_takes_fewer_products_and_agrees_with_itself(products, name, dtype):
    model = MODELS[name](dtype)
    wanted = states(model)
    lay_side_by_side(model)
    assert torch.equal(states(model), wanted)
    products.clear()
    with quick_layers(model):
        found = states(model)
    gates = OWN_GATES if name == "gemma" else GATES  # whose gate is not SiLU
    assert products == 2 * [*QKV, *OUT, *gates, *OUT]
    assert is_untouched(model, modeling_llama) and torch.equal(states(model), wanted)
    # one number rounded to its neighbour lets many that follow be rounded to theirs
    torch.testing.assert_close(found, wanted, rtol=0, atol=4 * torch.finfo(dtype).eps * wanted.abs().max().item())


@torch.no_grad()
def test_new_weights_are_seen(products):
    model, other = qwen2(), qwen2()
    lay_side_by_side(model)
    with quick_layers(model):
        states(model)
    for own, given in zip(model.parameters(), other.parameters(), strict=True):
        own.copy_(given.mul_(1.25))
    wanted = states(other)
    products.clear()
    with quick_layers(model):
        found = states(model)
    assert products[0] == QKV[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=4 * 2**-8 * wanted.abs().max().item())


@torch.no_grad()
def test_a_model_that_was_not_laid_out_runs_its_own_products(products):
    model = llama()
    with quick_layers(model):
        states(model)
    assert products == 2 * [*OWN_QKV, *OUT, *OWN_GATES, *OUT]


@torch.no_grad()
def test_hooks_on_one_layer_leave_the_others_together(products):
    model, seen = llama(), []
    lay_side_by_side(model)
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: seen.append(1))
    model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda *_: seen.append(2))
    with quick_layers(model):
        states(model)
    assert products == [*OWN_QKV, *OUT, *GATES, *OUT, *QKV, *OUT, *OWN_GATES, *OUT]
    assert seen == [1, 2]


@torch.no_grad()
def test_an_attention_with_a_forward_that_somebody_else_put_there_keeps_it():
    model = llama()
    lay_side_by_side(model)
    with quick_layers(model):  # trials are over
        pass
    attention, seen = model.model.layers[0].self_attn, []
    own = attention.forward
    attention.forward = theirs = lambda *given, **named: seen.append(1) or own(*given, **named)
    with quick_layers(model):
        assert attention.forward is theirs and "forward" not in vars(attention.q_proj)
        states(model)
    assert attention.forward is theirs and seen == [1]


class Shifted(modeling_llama.LlamaAttention):
    """Asks for its keys with another tensor than its input."""

    def forward(self, hidden_states, **named):
        own = self.k_proj
        vars(self)["_modules"]["k_proj"] = lambda x: own(x + 1)
        try:
            return super().forward(hidden_states, **named)
        finally:
            vars(self)["_modules"]["k_proj"] = own


class Flat(modeling_llama.LlamaAttention):
    """Looks at its queries in a way that rows with gaps do not allow."""

    def forward(self, hidden_states, **named):
        self.q_proj(hidden_states).view(-1)
        return super().forward(hidden_states, **named)


class Same(modeling_llama.LlamaAttention):
    def forward(self, hidden_states, **named):
        return super().forward(hidden_states, **named)


class Early(modeling_llama.LlamaAttention):
    """Has arguments that no other attention has."""

    def forward(self, hidden_states, *, window, **named):
        return super().forward(hidden_states, **named)


@torch.no_grad()
@pytest.mark.parametrize(("cls", "is_replaced"), [(Same, True), (Shifted, False), (Flat, False), (Early, False)])
def test_attentions_of_another_kind_are_left_alone(cls, is_replaced):
    model = llama()
    lay_side_by_side(model)
    model.model.layers[1].self_attn.__class__ = cls
    with quick_layers(model):
        first, second = (layer.self_attn for layer in model.model.layers)
        assert "forward" in vars(first) and "forward" in vars(first.q_proj)
        assert ["forward" in vars(module) for module in (second, second.q_proj)] == [is_replaced, is_replaced]


@torch.no_grad()
def test_an_attention_is_tried_once_and_nothing_is_disturbed(monkeypatch):
    tried, hooked, trial = [], [], layers._try_attention
    monkeypatch.setattr(layers, "_trials", {})
    monkeypatch.setattr(layers, "_try_attention", lambda *given: tried.append(1) or trial(*given))
    model = qwen3()
    lay_side_by_side(model)
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.self_attn.o_proj, layer.self_attn.q_norm):
            module.register_forward_hook(lambda *_: hooked.append(1))
    before, own = {name: tensor.clone() for name, tensor in model.state_dict().items()}, model.config.to_dict()
    random_state = torch.get_rng_state()
    for _ in range(2):
        with quick_layers(model):
            assert "forward" in vars(model.model.layers[1].self_attn)
    assert tried == [1] and not hooked
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.config.to_dict() == own and model.config._attn_implementation == "sdpa"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# Kernels on rows with gaps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 5, 48), (1, 3, 1033), (7, 40)])
def test_a_gate_of_two_parts_of_longer_rows(shape, dtype):
    width = shape[-1]
    around = torch.full((*shape[:-1], 3 * width + 5), torch.nan, dtype=dtype, device=DEVICE)
    around[..., 3 : 3 + width] = x = 5 * randn(*shape, dtype=dtype)
    around[..., 5 + width : 5 + 2 * width] = u = randn(*shape, dtype=dtype, seed=1)
    wanted = gated(x, u)
    assert torch.equal(gated(around[..., 3 : 3 + width], u), wanted)
    found = gated(around[..., 3 : 3 + width], around[..., 5 + width : 5 + 2 * width])
    assert torch.equal(found, wanted) and found.is_contiguous()
    spread = torch.stack([x, x], dim=-1)[..., 0]
    assert torch.equal(gated(spread, u), wanted)


@pytest.mark.parametrize("heads", [1, 3])
def test_a_norm_of_heads_among_those_of_other_projections(monkeypatch, heads):
    together, weight = randn(2, 5, heads + 2, 48), randn(48, seed=1)
    x = together[:, :, 1 : 1 + heads]
    assert torch.equal(normed(x, weight, 1e-6), normed(x.contiguous(), weight, 1e-6))
    launched = []
    noted = type("Noted", (Launches,), {"__getitem__": lambda *_: lambda x, *_, **__: launched.append(x.data_ptr())})
    monkeypatch.setattr(layer_kernels, "rms_norm", noted())
    normed(x, weight, 1e-6)
    assert launched == [x.data_ptr()]  # not a copy
