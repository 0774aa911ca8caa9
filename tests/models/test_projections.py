"""Several projections of one input as one product: where their weights lie, and who gets which part."""

import copy
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from rocktokens.models import projections
from rocktokens.models.projections import ATTENTION_INPUTS, MLP_INPUTS, SharedProduct, lay_side_by_side
from rocktokens.rollouts.sampler import SamplingCopy

WIDTH, WIDTHS = 32, (48, 16, 24)
X = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(projections, "on_gpu", lambda _: True)


class Attention(nn.Module):
    """As much of one as is looked at."""

    def __init__(self, bias=True, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        for name, width in zip(ATTENTION_INPUTS, WIDTHS, strict=True):
            setattr(self, name, nn.Linear(WIDTH, width, bias=bias, dtype=dtype))

    @property
    def layers(self):
        return [getattr(self, name) for name in ATTENTION_INPUTS]


def qwen2(dtype=torch.bfloat16):
    """Biases in its attention, none in its MLP, and its head is its embedding."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=41, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    return Qwen2ForCausalLM(config).to(dtype).eval()


def shared(attention):
    product = SharedProduct.of(attention, ATTENTION_INPUTS)
    assert product is not None
    for layer, forward in product.forwards():
        layer.forward = forward
    return product


# Where the weights lie


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_laid_out_has_its_values_and_one_storage_per_group(dtype):
    model = qwen2(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lay_side_by_side(model)
    layer = model.model.layers[1]
    for module, names, count in ((layer.self_attn, ATTENTION_INPUTS, 2), (layer.mlp, MLP_INPUTS, 1)):
        parameters = [parameter for name in names for parameter in getattr(module, name).parameters()]
        assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == count
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_second_layout_moves_nothing():
    attention = Attention()
    lay_side_by_side(attention)
    before = [parameter.data_ptr() for parameter in attention.parameters()]
    lay_side_by_side(attention)
    assert [parameter.data_ptr() for parameter in attention.parameters()] == before


def with_hook(attention):
    attention.k_proj.register_forward_hook(lambda *_: None)


def with_pre_hook(attention):
    attention.q_proj.register_forward_pre_hook(lambda *_: None)


def with_another_forward(attention):
    attention.v_proj.forward = attention.v_proj.forward


def with_one_bias_less(attention):
    attention.v_proj.bias = None


def with_another_width(attention):
    attention.k_proj = nn.Linear(WIDTH + 8, WIDTHS[1], dtype=torch.bfloat16)


def with_another_dtype(attention):
    attention.k_proj.to(torch.float16)


def with_biases_of_another_dtype(attention):
    for layer in attention.layers:
        layer.bias.data = layer.bias.data.to(torch.float16)


def with_tied_weights(attention):
    attention.v_proj = nn.Linear(WIDTH, WIDTHS[1], dtype=torch.bfloat16)
    attention.v_proj.weight = attention.k_proj.weight


def with_tied_storage(attention):
    attention.twin = nn.Linear(WIDTH, WIDTHS[1], dtype=torch.bfloat16)
    attention.twin.weight.data = attention.k_proj.weight.data


def with_another_class(attention):
    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    attention.k_proj.__class__ = Scaled


def with_weights_of_another_kind(attention):
    class Blocks(torch.Tensor):
        pass

    attention.k_proj.weight = nn.Parameter(attention.k_proj.weight.detach().as_subclass(Blocks))


def with_a_parametrization(attention):
    nn.utils.parametrizations.weight_norm(attention.k_proj)


def with_float32(attention):
    attention.to(torch.float32)


SPOILS = (with_hook, with_pre_hook, with_another_forward, with_one_bias_less, with_another_width, with_another_dtype)
SPOILS += (
    with_biases_of_another_dtype,
    with_another_class,
    with_weights_of_another_kind,
    with_a_parametrization,
    with_float32,
)
TIES = (with_tied_weights, with_tied_storage)


@pytest.mark.parametrize("spoil", SPOILS + TIES)
def test_other_layers_stay_where_they_are(spoil):
    attention = Attention()
    spoil(attention)
    before = [parameter.data_ptr() for parameter in attention.parameters()]
    lay_side_by_side(attention)
    assert [parameter.data_ptr() for parameter in attention.parameters()] == before
    assert SharedProduct.of(attention, ATTENTION_INPUTS) is None


@pytest.mark.parametrize("spoil", SPOILS)
def test_layers_that_became_others_after_they_were_laid_out_are_left_alone(spoil):
    attention = Attention()
    lay_side_by_side(attention)
    assert SharedProduct.of(attention, ATTENTION_INPUTS) is not None
    spoil(attention)
    assert SharedProduct.of(attention, ATTENTION_INPUTS) is None


def with_new_data(attention):
    attention.k_proj.weight.data = attention.k_proj.weight.data.clone()


def with_new_bias(attention):
    attention.q_proj.bias = nn.Parameter(torch.zeros(WIDTHS[0], dtype=torch.bfloat16))


def with_parts_in_another_order(attention):
    attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj


@pytest.mark.parametrize("spoil", [with_new_data, with_new_bias, with_parts_in_another_order])
def test_weights_that_do_not_lie_side_by_side_are_not_one_matrix(spoil):
    attention = Attention()
    lay_side_by_side(attention)
    spoil(attention)
    assert SharedProduct.of(attention, ATTENTION_INPUTS) is None


def test_copies_and_conversions_of_a_model_laid_out_are_plain_models():
    attention = Attention()
    lay_side_by_side(attention)
    others = copy.deepcopy(attention), copy.deepcopy(attention).to(torch.float16)
    assert all(SharedProduct.of(other, ATTENTION_INPUTS) is None for other in others)
    assert SharedProduct.of(attention, ATTENTION_INPUTS) is not None


def test_layers_under_an_adapter_are_left_alone():
    lora = LoraConfig(target_modules=["k_proj"], r=2, init_lora_weights=False)
    model = get_peft_model(qwen2(), lora)
    lay_side_by_side(model)
    layer = model.base_model.model.model.layers[0]
    assert SharedProduct.of(layer.self_attn, ATTENTION_INPUTS) is None
    assert SharedProduct.of(layer.mlp, MLP_INPUTS) is not None


def test_saving_a_model_laid_out_gives_the_same_bytes(tmp_path):
    model = qwen2()
    model.save_pretrained(tmp_path / "before")
    lay_side_by_side(model)
    model.save_pretrained(tmp_path / "after")
    before, after = (tmp_path / name / "model.safetensors" for name in ("before", "after"))
    assert before.read_bytes() == after.read_bytes()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, tmp_path / "plain.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_file(tmp_path / "plain.safetensors").items())


@torch.no_grad()
def test_a_sampling_copy_is_laid_out_and_its_source_is_not():
    source = qwen2(torch.float32)
    own = SamplingCopy(source, torch.bfloat16)
    attention = source.model.layers[0].self_attn
    product = SharedProduct.of(own.model.model.layers[0].self_attn, ATTENTION_INPUTS)
    assert product is not None and SharedProduct.of(attention, ATTENTION_INPUTS) is None
    for parameter in source.parameters():
        parameter.normal_()
    own.refresh()
    given = [(layer.weight, layer.bias) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
    weights, biases = (torch.cat(parts).to(torch.bfloat16) for parts in zip(*given, strict=True))
    assert torch.equal(product.weight_ND, weights) and torch.equal(product.bias_N, biases)


# Who gets which part


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_layers_get_their_part_of_one_product(products, bias, dtype):
    attention, x = Attention(bias, dtype), X.to(dtype)
    lay_side_by_side(attention)
    with shared(attention):
        found = [layer(x) for layer in attention.layers]
    assert products == [sum(WIDTHS)]
    for layer, output in zip(attention.layers, found, strict=True):
        exact = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
        torch.testing.assert_close(output.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@torch.no_grad()
def test_layers_may_be_asked_in_another_order(products):
    attention = Attention()
    lay_side_by_side(attention)
    wanted = attention.v_proj(X), attention.q_proj(X)
    products.clear()
    with shared(attention):
        found = attention.v_proj(X), attention.q_proj(X)
    assert products == [sum(WIDTHS)]
    torch.testing.assert_close(found, wanted)


@torch.no_grad()
def test_weights_that_are_copied_into_the_layers_are_those_of_the_product():
    attention = Attention()
    lay_side_by_side(attention)
    product = shared(attention)
    with product:
        before = attention.k_proj(X)
    for parameter in attention.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    with product:
        found = attention.k_proj(X)
    wanted = nn.functional.linear(X, attention.k_proj.weight, attention.k_proj.bias)
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(before, found)


def changed(x):
    x += 1
    return x


OTHERS = {"an equal tensor": torch.clone, "the tensor, changed": changed, "a view": lambda x: x[:]}


@torch.no_grad()
@pytest.mark.parametrize("name", OTHERS)
def test_another_input_gets_a_product_of_its_own(products, name):
    attention, x = Attention(), X.clone()
    lay_side_by_side(attention)
    with shared(attention):
        attention.q_proj(x)
        other = OTHERS[name](x)
        found = attention.k_proj(other)
    assert products == [sum(WIDTHS), WIDTHS[1]]
    wanted = nn.functional.linear(other, attention.k_proj.weight, attention.k_proj.bias)
    assert torch.equal(found, wanted)


@torch.no_grad()
def test_a_part_is_given_once(products):
    attention = Attention()
    lay_side_by_side(attention)
    with shared(attention):
        first, second = attention.q_proj(X), attention.q_proj(X)
    assert products == [sum(WIDTHS), WIDTHS[0]] and first.data_ptr() != second.data_ptr()


@torch.no_grad()
def test_nothing_is_kept_after_use_or_after_the_end(products):
    attention, x = Attention(), X.clone()
    lay_side_by_side(attention)
    product = shared(attention)
    with product:
        parts = [attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)]
        memory = weakref.ref(parts[0]._base)
        del parts
        assert memory() is None
    with product:
        attention.q_proj(x)
        input_ = weakref.ref(x)
    del x
    assert input_() is None
    products.clear()
    for layer in attention.layers:  # closed
        layer(X)
    assert products == list(WIDTHS)


@torch.no_grad()
def test_nothing_is_kept_after_an_error():
    attention = Attention()
    lay_side_by_side(attention)
    product = shared(attention)
    with pytest.raises(ZeroDivisionError), product:
        attention.q_proj(X)
        _ = 1 / 0
    assert product._kept is None


@pytest.mark.parametrize("mode", ["gradient", "inference", "keyword", "float64"])
def test_calls_of_another_kind_run_layer_by_layer(products, mode):
    attention, x = Attention(), X
    lay_side_by_side(attention)
    product = shared(attention)
    with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "gradient"), product:
        if mode == "inference":
            x = x + 0
        if mode == "float64":
            with pytest.raises(RuntimeError):
                attention.q_proj(x.double())
        found = [layer(input=x) if mode == "keyword" else layer(x) for layer in attention.layers if mode != "float64"]
    assert products == ([WIDTHS[0]] if mode == "float64" else list(WIDTHS))
    assert all(output.requires_grad == (mode == "gradient") for output in found)
