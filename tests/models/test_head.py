import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rocktokens.errors import RocktokensError
from rocktokens.models import head
from rocktokens.models.head import (
    LMHead,
    hidden_states,
    lm_head,
    require_known_head,
    require_steady,
    verify_head,
)

V = 53
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "llama_tied": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "gemma2_softcap": (Gemma2ForCausalLM, Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=1.5)),
    "cohere_scale": (CohereForCausalLM, CohereConfig(**SIZES, logit_scale=0.25)),
    "granite_divides": (GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=5.0)),
    "phi_bias": (PhiForCausalLM, PhiConfig(**SIZES)),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2),
    ),
}


def build(name):
    torch.manual_seed(0)
    cls, config = ARCHITECTURES[name]
    model = cls(config).eval()
    head = model.get_output_embeddings()
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    return model


def two_rows():
    ids_RL = torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(1))
    mask_RL = torch.ones_like(ids_RL)
    mask_RL[1, 6:] = 0
    return ids_RL, mask_RL


def assert_reproduces(model):
    """The model's own logits are made with a mask over the padding, ours without: no token may see it."""
    ids_RL, mask_RL = two_rows()
    with torch.no_grad():
        own = model(input_ids=ids_RL, attention_mask=mask_RL).logits
        ours = lm_head(model).logits(hidden_states(model, ids_RL).flatten(0, 1)).view_as(own)
    real = mask_RL.bool()
    assert own[real].std() > 0.05
    torch.testing.assert_close(ours[real], own[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_head_of_states_is_what_the_model_computes(name):
    model = build(name)
    assert_reproduces(model)
    assert verify_head(model, range(3, 12)) <= 1e-5


def test_a_lora_model_is_reproduced_with_its_adapter():
    model = build("llama")
    ids_RL, _ = two_rows()
    before = hidden_states(model, ids_RL)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    assert_reproduces(wrapped)
    assert (hidden_states(wrapped, ids_RL) - before).abs().max() > 1e-2


def test_an_adapter_on_the_head_is_refused():
    wrapped = get_peft_model(build("llama"), LoraConfig(r=4, target_modules=["lm_head"]))
    with pytest.raises(RocktokensError, match="adapter on its LM head"):
        lm_head(wrapped)


def test_a_model_with_unknown_logits_is_refused():
    class Doubled(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits * 2
            return outputs

    torch.manual_seed(0)
    with pytest.raises(RocktokensError, match="Doubled computes logits in a way that is not known"):
        verify_head(Doubled(LlamaConfig(**SIZES)).eval(), range(3, 12))


def test_a_bfloat16_model_is_verified_within_its_rounding():
    model = build("llama").to(torch.bfloat16)
    assert 0 < verify_head(model, range(3, 12)) < 0.1


def test_logits_of_half_width_models_are_not_rounded_to_half_width():
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(size, generator=generator).to(torch.bfloat16) for size in ((6, 64), (V, 64)))
    logits = LMHead(w).logits(h)
    torch.testing.assert_close(logits.double(), h.double() @ w.double().T, atol=1e-4, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("autocast", [False, True])
def test_half_width_products_on_a_gpu_are_summed_in_float32(autocast):
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(size, generator=generator).to(torch.bfloat16) for size in ((32, 512), (256, 512)))
    operands = [x.to("cuda", torch.float32 if autocast else torch.bfloat16) for x in (h, w)]
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        logits = LMHead(operands[1]).logits(operands[0])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double().cpu(), h.double() @ w.double().T, atol=1e-3, rtol=1e-5)


def test_cutting_a_head_keeps_its_first_logits():
    head = LMHead(torch.randn(9, 4), torch.randn(9), scale=2.0, softcap=3.0)
    h = torch.randn(5, 4)
    torch.testing.assert_close(head.cut(6).logits(h), head.logits(h)[:, :6])
    assert head.cut(9) is head


# Models that are tried before they are used


def test_a_model_that_raises_is_refused_in_one_sentence(monkeypatch):
    model = build("llama")
    monkeypatch.setattr(head, "_known", set())
    monkeypatch.setattr(model.model, "forward", lambda **_: [0][len(SIZES)])
    with pytest.raises(
        RocktokensError, match=r"^LlamaForCausalLM cannot be used here \(IndexError: list index out"
    ) as no:
        require_known_head(model)
    assert len(str(no.value).splitlines()) == 1


def test_an_architecture_is_tried_once_whatever_its_weights(monkeypatch):
    monkeypatch.setattr(head, "_known", set())
    forwards = []
    for name in ("llama", "llama", "llama_tied"):
        model = build(name)
        model.register_forward_hook(lambda *_, name=name: forwards.append(name))
        require_known_head(model)
    assert forwards == ["llama"] * 2 + ["llama_tied"] * 2


def test_a_head_that_is_not_known_is_refused_and_nan_is_left_to_who_meets_it(monkeypatch):
    monkeypatch.setattr(head, "_known", set())
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    require_known_head(model)
    odd = build("llama")
    odd.register_forward_hook(lambda _module, _inputs, outputs: outputs.__setitem__("logits", 2 * outputs.logits))
    with pytest.raises(RocktokensError, match="computes logits in a way that is not known"):
        require_known_head(odd)


@pytest.mark.parametrize("training", [False, True])
def test_a_model_that_trains_as_it_writes_is_steady_and_stays_as_it_was(training):
    model = build("llama").train(training)
    before = torch.get_rng_state()
    require_steady(model)
    assert all(module.training == training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_draws_while_it_trains_is_refused():
    model = build("llama")
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, torch.nn.Dropout(0.5))
    with pytest.raises(RocktokensError, match="LlamaForCausalLM computes other states while it trains than when it"):
        require_steady(model)
