"""Norms, rotary embeddings and gates by kernel against those of transformers; run by test_layers.py.

On a GPU or, with TRITON_INTERPRET=1, on the CPU. The same bits are asked for; only a norm, which adds its squares in
another order, and a gate, whose exponential may differ in the last bit, are now and then rounded to the neighbour.
"""

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from kernel_device import DEVICE, INTERPRETED, round_to_bfloat16
from rocktokens.models import layer_kernels, layers
from rocktokens.models.layers import gated, normed, quick_layers, rotated

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
V = 41
TINY = {
    "vocab_size": V,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Run kernels on the CPU too."""
    if INTERPRETED:
        round_to_bfloat16(monkeypatch)
        monkeypatch.setattr(layers, "on_gpu", lambda _: True)


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def norm_of(weight, eps=1e-6, cls=modeling_llama.LlamaRMSNorm):
    norm = cls(len(weight), eps=eps)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm


def assert_normed(found, wanted):
    """The bits of half-width results but for one in a hundred, where two roundings may have gone to the neighbour."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=(4 if found.dtype == torch.float32 else 2) * eps, atol=0)
    assert found.dtype == torch.float32 or (found == wanted).float().mean() >= 0.99


# Norms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "cls"),
    [
        ((1, 7, 5, 64), modeling_qwen3.Qwen3RMSNorm),
        ((1, 33, 1, 128), modeling_qwen3.Qwen3RMSNorm),
        ((3, 80), modeling_llama.LlamaRMSNorm),
        ((1, 5, 576), modeling_llama.LlamaRMSNorm),
        ((5, 1024), modeling_llama.LlamaRMSNorm),
        ((1, 3, 2560), modeling_qwen3.Qwen3RMSNorm),
        ((2, 16_384), modeling_llama.LlamaRMSNorm),
    ],
)
def test_a_norm_is_that_of_transformers(shape, cls, dtype):
    x, weight = 3 * randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    assert_normed(normed(x, weight, 1e-6), norm_of(weight, cls=cls)(x))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
def test_a_norm_of_rows_that_are_next_to_nothing_or_huge(dtype, eps):
    x, weight = randn(8, 64, dtype=torch.float32), randn(64, dtype=dtype, seed=1)
    x = (x * torch.tensor([0.0, 1e-4, 1e-3, 1e-2, 1.0, 1e2, 1e3, 1e4], device=DEVICE).unsqueeze(1)).to(dtype)
    assert_normed(normed(x, weight, eps), norm_of(weight, eps)(x))


@pytest.mark.parametrize("width", [64, 2560])
def test_a_row_that_is_not_finite_stays_alone(width):
    x, weight = randn(9, width), randn(width, seed=1)
    clean = normed(x, weight, 1e-6)
    x[4, 3], x[6, 5] = torch.nan, torch.inf
    found = normed(x, weight, 1e-6)
    torch.testing.assert_close(found, norm_of(weight)(x), rtol=2**-7, atol=0, equal_nan=True)
    others = torch.tensor([0, 1, 2, 3, 5, 7, 8])
    assert torch.equal(found[others], clean[others]) and found[4].isnan().all()


@pytest.mark.parametrize("width", [80, 576])
def test_nothing_beside_a_row_is_read(width):
    """Rows that are part of longer ones, and rows whose order in memory is another."""
    weight = randn(width, seed=1)
    around = torch.full((2, 5, 3 * width), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    around[..., width : 2 * width] = x = randn(2, 5, width)
    for view in (around[..., width : 2 * width], x.transpose(0, 1), x.mT.contiguous().mT, x[:, ::2]):
        assert torch.equal(normed(view, weight, 1e-6), normed(view.clone().contiguous(), weight, 1e-6))


# Gates


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 7, 48), (3, 1, 4099)])
def test_a_gate_is_that_of_torch(shape, dtype):
    x, u = 5 * randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1)
    assert_normed(gated(x, u), torch.nn.functional.silu(x) * u)


def test_a_gate_at_the_ends():
    x = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0, torch.inf, torch.nan], device=DEVICE).to(torch.bfloat16)
    found, wanted = gated(x, torch.ones_like(x)), torch.nn.functional.silu(x)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-30, equal_nan=True)


# Rotary embeddings


def angles(n, width, dtype):
    """Cosines and sines (1, n, width) whose halves differ."""
    turn = 3 * randn(1, n, width, dtype=torch.float32, seed=5)
    return turn.cos().to(dtype), turn.sin().to(dtype)


def heads_of(n, heads, width, dtype, seed=0):
    """As the projection of a layer gives them: (1, heads, n, width), the heads of a token side by side."""
    return randn(1, n, heads, width, dtype=dtype, seed=seed).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "width"), [((9, 3), 64), ((32, 8), 128), ((40, 8), 128), ((4, 1), 80), ((3, 3), 256), ((2, 2), 2)]
)
def test_a_rotation_has_the_bits_of_that_of_transformers(heads, width, dtype):
    q, k = (heads_of(5, n_heads, width, dtype, seed=n_heads) for n_heads in heads)
    cos, sin = angles(5, width, dtype)
    found, wanted = rotated(q, k, cos, sin), modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    for x, ours, theirs in zip((q, k), found, wanted, strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == x.stride()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "length"), [(5, 1), (3, 4)])
@pytest.mark.parametrize(("heads", "width"), [((9, 3), 64), ((4, 1), 80)])
def test_a_rotation_of_several_rows_has_the_bits_of_that_of_transformers(heads, width, rows, length, dtype):
    """One new token of each, all projections side by side, or whole prompts."""
    q, k, _ = randn(rows, length, sum(heads) + 1, width, dtype=dtype).transpose(1, 2).split([*heads, 1], dim=1)
    cos, sin = (angle.view(rows, length, width) for angle in angles(rows * length, width, dtype))
    wanted = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    found = rotated(q, k, cos, sin)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    rotary = layers._QuickRotary(modeling_llama.apply_rotary_pos_emb)
    with torch.no_grad():
        assert layers._takes_rotary(q, k, cos, sin)
        contiguous = rotary(q.contiguous(), k.contiguous(), cos, sin)
        assert layers._takes_rotary(q.contiguous(), k.contiguous(), cos, sin) == (length == 1)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(contiguous, wanted, strict=True))


def test_a_function_that_differs_for_several_rows_only_is_not_replaced(monkeypatch):
    monkeypatch.setattr(layers, "_trials", {})

    def first_angles(q, k, cos, sin):
        return modeling_llama.apply_rotary_pos_emb(q, k, cos[:1], sin[:1])

    model = llama()
    assert layers._passes_as_rotary(modeling_llama.apply_rotary_pos_emb, model)
    assert not layers._passes_as_rotary(first_angles, model)


def test_a_rotation_of_heads_that_lie_elsewhere():
    """Contiguous, in the middle of a row of all projections, and angles that are part of longer ones."""
    q, k = heads_of(6, 4, 32, torch.bfloat16), heads_of(6, 2, 32, torch.bfloat16, seed=1)
    cos, sin = angles(6, 32, torch.bfloat16)
    wanted = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    together = torch.cat([x.transpose(1, 2).flatten(2) for x in (k, q, k)], dim=-1)
    middle_q, middle_k = (
        together[..., slice(*bounds)].unflatten(-1, (-1, 32)).transpose(1, 2) for bounds in ((64, 192), (192, 256))
    )
    longer = torch.full((1, 6, 96), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    longer[..., 32:64] = sin
    for arguments in (
        (q.contiguous(), k.contiguous(), cos, sin),
        (middle_q, middle_k, cos, sin),
        (q, k.contiguous(), cos, longer[..., 32:64]),
    ):
        for ours, theirs in zip(rotated(*arguments), wanted, strict=True):
            assert torch.equal(ours, theirs)


class Launches:
    """Stands in for a kernel and notes the options it is launched with."""

    def __init__(self):
        self.options = []

    def __getitem__(self, _grid):
        return lambda *_, **options: self.options.append(options)


@pytest.fixture
def launches(monkeypatch):
    noted = Launches()
    for name in ("rms_norm", "rotate"):
        monkeypatch.setattr(layer_kernels, name, noted)
    return noted


def test_without_rows_nothing_is_launched(launches):
    weight = randn(64, seed=1)
    assert normed(randn(1, 0, 64), weight, 1e-6).shape == (1, 0, 64)
    assert normed(randn(1, 3, 0, 64), weight, 1e-6).shape == (1, 3, 0, 64)
    cos, sin = angles(0, 64, torch.bfloat16)
    q, k = rotated(heads_of(0, 4, 64, torch.bfloat16), heads_of(0, 2, 64, torch.bfloat16), cos, sin)
    assert q.shape == (1, 4, 0, 64) and k.shape == (1, 2, 0, 64)
    assert gated(randn(1, 0, 48), randn(1, 0, 48)).shape == (1, 0, 48)
    assert launches.options == []


def test_no_launch_lets_the_compiler_fuse_a_product_with_a_sum(launches):
    """It would leave the product's rounding out; the interpreter never does, so that only a GPU would show it."""
    normed(randn(3, 64), randn(64), 1e-6)
    rotated(*(heads_of(3, 2, 16, torch.bfloat16) for _ in range(2)), *angles(3, 16, torch.bfloat16))
    assert [options["enable_fp_fusion"] for options in launches.options] == [False, False]


# Whole models


def made(config, cls, dtype=torch.bfloat16, **settings):
    """A tiny model whose norms do not all have the weight 1."""
    torch.manual_seed(0)
    model = cls(config(**(TINY | settings)))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model.to(DEVICE, dtype).eval()


def llama(dtype=torch.bfloat16, **settings):
    return made(LlamaConfig, LlamaForCausalLM, dtype, **settings)


def qwen3(dtype=torch.bfloat16, **settings):
    return made(Qwen3Config, Qwen3ForCausalLM, dtype, **settings)


MODELS = {"llama": (llama, modeling_llama, 5), "qwen3": (qwen3, modeling_qwen3, 9)}
"""By name: the model, its Python module, and how many norms it has."""
IDS = torch.arange(9, device=DEVICE).unsqueeze(0) % V


def states(model, ids=IDS):
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


@pytest.fixture
def calls(monkeypatch):
    """The shapes with which the kernels are called."""
    seen = {"normed": [], "rotated": [], "gated": []}

    def noting(name, function):
        def noted(x, *rest):
            seen[name].append(tuple(x.shape))
            return function(x, *rest)

        return noted

    for name in seen:
        monkeypatch.setattr(layers, name, noting(name, getattr(layers, name)))
    return seen


def is_untouched(model, *namespaces):
    rotary = [getattr(namespace, layers.ROTARY) for namespace in namespaces]
    return not any("forward" in vars(module) for module in model.modules()) and not any(
        isinstance(function, layers._QuickRotary) for function in rotary
    )


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_runs_by_the_kernels_and_agrees_with_itself(calls, name, dtype):
    make, namespace, n_norms = MODELS[name]
    model = make(dtype)
    wanted = states(model)
    with quick_layers(model):
        for seen in calls.values():
            seen.clear()
        found = states(model)
    assert (len(calls["normed"]), calls["rotated"]) == (n_norms, 2 * [(1, 4, 9, 16)])
    assert calls["gated"] == 2 * [(1, 9, 48)]
    assert is_untouched(model, namespace)
    # one number rounded to its neighbour lets many that follow be rounded to theirs
    torch.testing.assert_close(found, wanted, rtol=0, atol=4 * torch.finfo(dtype).eps * wanted.abs().max().item())
    assert torch.equal(states(model), wanted)


@torch.no_grad()
def test_a_model_with_a_wrong_kernel_would_not_agree(monkeypatch):
    model = llama()
    wanted = states(model)
    with quick_layers(model):
        monkeypatch.setattr(layers, "rotated", lambda q, k, cos, sin: rotated(q, k, cos, -sin))
        found = states(model)
    assert (found - wanted).abs().max() > 0.1 * wanted.abs().max()


def cohere():
    settings = {name: value for name, value in TINY.items() if name != "head_dim"}
    return CohereForCausalLM(CohereConfig(**settings)).to(DEVICE, torch.bfloat16).eval()


OTHER_NORMS = {
    "gemma": lambda: made(GemmaConfig, GemmaForCausalLM),
    "olmo2": lambda: made(Olmo2Config, Olmo2ForCausalLM),
}
OTHER_ROTARIES = {"cohere": (cohere, modeling_cohere), "glm": (lambda: made(GlmConfig, GlmForCausalLM), modeling_glm)}


@torch.no_grad()
@pytest.mark.parametrize("name", OTHER_NORMS)
def test_norms_of_another_kind_are_left_alone(name):
    """1 + weight, and a norm that is rounded but once."""
    model = OTHER_NORMS[name]()
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    wanted = states(model)
    with quick_layers(model):
        assert len(norms) > 2 and not any("forward" in vars(norm) for norm in norms)
        found = states(model)
    assert torch.equal(found, wanted)


@torch.no_grad()
@pytest.mark.parametrize("name", OTHER_ROTARIES)
def test_rotary_embeddings_of_another_kind_are_left_alone(name):
    """Pairs side by side, and only a part of each head."""
    make, namespace = OTHER_ROTARIES[name]
    model, own = make(), namespace.apply_rotary_pos_emb
    with quick_layers(model):
        assert namespace.apply_rotary_pos_emb is own
        states(model)


class UpsideDown(modeling_llama.LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Halved(modeling_llama.LlamaMLP):
    def forward(self, x):
        return super().forward(x * 0.5)


class Clamped(modeling_llama.LlamaMLP):
    limit = 100.0

    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x)).clamp(max=self.limit)
        return self.down_proj(gate * self.up_proj(x).clamp(-self.limit, self.limit))


OTHER_MLPS = {"another activation": modeling_llama.LlamaMLP, "another order": UpsideDown}
OTHER_MLPS |= {"another input": Halved, "a high clamp": Clamped}


@torch.no_grad()
@pytest.mark.parametrize("name", OTHER_MLPS)
def test_gates_of_another_kind_are_left_alone(name):
    model = llama(hidden_act="gelu") if name == "another activation" else llama()
    for layer in model.model.layers:
        layer.mlp.__class__ = OTHER_MLPS[name]
    wanted = states(model)
    with quick_layers(model):
        assert "forward" in vars(model.model.norm) and "forward" not in vars(model.model.layers[0].mlp)
        found = states(model)
    torch.testing.assert_close(found, wanted, rtol=0, atol=4 * 2**-8 * wanted.abs().max().item())


@torch.no_grad()
def test_mlps_of_one_class_with_other_settings_are_tried_each_for_itself():
    model = llama()
    for layer, limit in zip(model.model.layers, (torch.inf, 0.5), strict=True):
        layer.mlp.__class__, layer.mlp.limit = Clamped, limit
    with quick_layers(model):
        assert ["forward" in vars(layer.mlp) for layer in model.model.layers] == [True, False]


def by_hook(activation, note):
    activation.register_forward_hook(lambda *_: note())


def by_pre_hook(activation, note):
    activation.register_forward_pre_hook(lambda *_: note())


def by_forward(activation, note):
    own = activation.forward
    activation.forward = lambda x: note() or own(x)


@torch.no_grad()
@pytest.mark.parametrize("watch", [by_hook, by_pre_hook, by_forward])
def test_an_activation_that_somebody_watches_is_still_called(watch):
    model, seen = llama(), []
    watch(model.model.layers[1].mlp.act_fn, lambda: seen.append(1))
    with quick_layers(model):
        states(model)
        assert "forward" in vars(model.model.layers[0].mlp)
    assert seen == [1]


@torch.no_grad()
@pytest.mark.parametrize("part", ["gate_proj", "up_proj"])
def test_a_projection_whose_numbers_lie_in_another_order_is_left_to_torch(calls, part):
    model = llama()
    mlp, x = model.model.layers[0].mlp, randn(2, 5, 64)
    getattr(mlp, part).register_forward_hook(lambda _module, _arguments, output: output.mT.contiguous().mT)
    wanted = mlp(x)
    with quick_layers(model):
        calls["gated"].clear()
        assert torch.equal(mlp(x), wanted)
    assert not calls["gated"]


def test_one_number_that_is_far_off_is_enough_to_differ():
    ours = randn(1000)
    theirs = ours.clone()
    theirs[7] *= 1 + torch.finfo(ours.dtype).eps
    assert not torch.equal(ours, theirs) and layers._same([ours], [theirs])
    theirs[7] += 1
    assert not layers._same([ours], [theirs])


@torch.no_grad()
def test_norms_of_one_class_with_other_settings_are_tried_each_for_itself():
    """Such as those that have a switch."""

    class SwitchedRMSNorm(modeling_llama.LlamaRMSNorm):
        adds_one = False

        def forward(self, hidden_states):
            return super().forward(hidden_states) + self.adds_one

    model = llama()
    layer = model.model.layers[0]
    for name, adds_one in (("input_layernorm", False), ("post_attention_layernorm", True)):
        setattr(layer, name, norm_of(getattr(layer, name).weight.detach(), cls=SwitchedRMSNorm))
        getattr(layer, name).adds_one = adds_one
    with quick_layers(model):
        assert "forward" in vars(layer.input_layernorm) and "forward" not in vars(layer.post_attention_layernorm)


@torch.no_grad()
def test_norms_that_are_no_plain_rows_of_weights_are_left_alone():
    model = llama()
    replaced = {
        0: Gemma4RMSNorm(64, with_scale=False),
        1: norm_of(torch.ones(64, device=DEVICE, dtype=torch.float32)),
    }
    for index, norm in replaced.items():
        model.model.layers[index].input_layernorm = norm
    with quick_layers(model):
        assert not any("forward" in vars(norm) for norm in replaced.values())
        assert "forward" in vars(model.model.norm)


@torch.no_grad()
def test_a_class_is_tried_once_and_nothing_is_disturbed(monkeypatch):
    tried = []
    monkeypatch.setattr(layers, "_trials", {})
    for name in ("_try_norm", "_try_mlp", "_try_rotary"):
        function = getattr(layers, name)
        monkeypatch.setattr(layers, name, lambda *a, f=function, n=name: tried.append(n) or f(*a))
    model = qwen3()
    hooked = []
    for norm in (module for module in model.modules() if type(module).__name__.endswith("RMSNorm")):
        norm.register_forward_hook(lambda *_: hooked.append(1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    for _ in range(2):
        with quick_layers(model):
            pass
    assert tried == ["_try_norm", "_try_mlp", "_try_rotary"] and not hooked
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_hooks_still_run(calls):
    model, seen = llama(), []
    model.model.norm.register_forward_hook(lambda module, _, output: seen.append(output))
    with quick_layers(model):
        found = states(model)
    assert calls["normed"] and torch.equal(seen[0], found)


@torch.no_grad()
def test_everything_is_back_after_an_error_and_after_a_context_in_a_context():
    model = llama()
    with pytest.raises(ZeroDivisionError), quick_layers(model):
        assert not is_untouched(model, modeling_llama)
        _ = 1 / 0
    assert is_untouched(model, modeling_llama)
    with quick_layers(model):
        with quick_layers(model):
            states(model)
        assert not is_untouched(model, modeling_llama)
    assert is_untouched(model, modeling_llama)


@torch.no_grad()
def test_everything_is_back_when_contexts_end_in_the_order_they_began():
    """As those of two threads may."""
    model, other = llama(), llama()
    first, second = quick_layers(model), quick_layers(other)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert is_untouched(model, modeling_llama) and is_untouched(other)


@torch.no_grad()
def test_a_forward_that_somebody_else_put_there_stays(calls):
    model = llama()
    norm, n_calls = model.model.norm, []
    own = norm.forward
    norm.forward = theirs = lambda x: n_calls.append(1) or own(x)
    with quick_layers(model):
        assert norm.forward is theirs
        states(model)
    assert norm.forward is theirs and n_calls == [1]


def test_with_gradients_nothing_changes():
    model = llama()
    with quick_layers(model):
        assert is_untouched(model, modeling_llama)


@torch.no_grad()
def test_models_of_full_width_and_models_elsewhere_stay_as_they_are(monkeypatch):
    wide, narrow = llama(torch.float32), llama()
    with quick_layers(wide):
        assert is_untouched(wide, modeling_llama)
    monkeypatch.setattr(layers, "on_gpu", lambda _: False)
    with quick_layers(narrow):
        assert is_untouched(narrow, modeling_llama)


@torch.no_grad()
def test_calls_of_another_kind_go_to_what_was_replaced(calls):
    model = llama()
    q, k = heads_of(6, 4, 16, torch.bfloat16), heads_of(6, 2, 16, torch.bfloat16, seed=1)
    cos, sin = angles(6, 16, torch.bfloat16)
    tokens_first = [x.transpose(1, 2) for x in (q, k)]
    two = [torch.cat([x, x]) for x in (q, k, cos, sin)]
    rotations = (
        ((*tokens_first, cos, sin), {"unsqueeze_dim": 2}),
        ((*tokens_first, cos, sin, 2), {}),
        ((*two[:2], cos, sin), {}),
        ((two[0], k, cos, sin), {}),
        (tuple(two), {}),  # rows whose tokens do not follow on each other
        ((*two[:2], cos.expand(2, -1, -1), sin.expand(2, -1, -1)), {}),
        ((q, k, cos.float(), sin.float()), {}),
        ((q, k, cos[:, :1], sin[:, :1]), {}),
        ((q.mT.contiguous().mT, k, cos, sin), {}),
    )
    norm, mlp, x = model.model.norm, model.model.layers[0].mlp, randn(1, 5, 64)
    with quick_layers(model):
        for seen in calls.values():
            seen.clear()
        for arguments, named in rotations:
            found = modeling_llama.apply_rotary_pos_emb(*arguments, **named)
            own = modeling_llama.apply_rotary_pos_emb.own
            assert all(torch.equal(a, b) for a, b in zip(found, own(*arguments, **named), strict=True))
        with torch.enable_grad():
            modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
            assert norm(x.requires_grad_()).requires_grad and mlp(x).requires_grad
        assert norm(x.float()).dtype == torch.float32
        mlp(x=x.detach())
        norm(hidden_states=x.detach())
        assert calls == {"normed": [], "rotated": [], "gated": []}
        norm(x.detach())
        mlp(x.detach())
        modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    assert calls == {"normed": [(1, 5, 64)], "rotated": [(1, 4, 6, 16)], "gated": [(1, 5, 48)]}
