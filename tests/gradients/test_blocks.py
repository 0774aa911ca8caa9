"""Blocks by the names that models of several families really have."""

import pytest
import torch
from gradient_oracle import tiny_gpt2
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from rocktokens.gradients.blocks import TIED, block_of, ordered, trainable_blocks

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gemma2": {},
    "phi3": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 16, "word_embed_proj_dim": 16},
    "falcon": {},
    "bloom": {"n_head": 2, "n_layer": 2},
    "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 2},
    "mixtral": {"num_local_experts": 2},
    "qwen3_moe": {"num_experts": 2, "moe_intermediate_size": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_a_family_has_its_block(family):
    config = AutoConfig.for_model(family, **SMALL | FAMILIES[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    blocks = trainable_blocks(model)
    layers = {f"layer {layer} {part}" for layer in (0, 1) for part in ("attention", "mlp")}
    assert set(blocks.values()) == {"embeddings", "lm head", "norms"} | layers
    for name, parameter in model.named_parameters():
        assert (blocks[name] == "norms") == (("norm" in name or "ln_" in name) and parameter.ndim == 1), name


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "layer 3 attention"),
        ("model.layers.13.mlp.down_proj.weight", "layer 13 mlp"),
        ("model.layers.3.post_attention_layernorm.weight", "norms"),
        ("model.layers.3.self_attn.q_norm.weight", "norms"),
        ("model.norm.weight", "norms"),
        ("model.embed_tokens.weight", "embeddings"),
        ("lm_head.weight", "lm head"),
        ("gpt_neox.embed_in.weight", "embeddings"),
        ("embed_out.weight", "lm head"),
        ("transformer.word_embeddings_layernorm.weight", "norms"),
        ("base_model.model.model.layers.2.mlp.up_proj.lora_B.default.weight", "layer 2 mlp"),
        ("model.layers.4.adapter.weight", "layer 4 other"),
        ("model.vision_tower.weight", "other"),
    ],
)
def test_block_of_a_name(name, block):
    assert block_of(name) == block


def test_tied_embeddings_say_so_and_only_they_do():
    tied, untied = (trainable_blocks(tiny_gpt2(8, 1, tied=tied)) for tied in (True, False))
    assert tied["transformer.wte.weight"] == TIED and TIED not in untied.values()
    assert "lm head" not in tied.values() and untied["lm_head.weight"] == "lm head"
    assert tied["transformer.wpe.weight"] == untied["transformer.wte.weight"] == "embeddings"


def test_frozen_parameters_have_no_block():
    student = get_peft_model(tiny_gpt2(8, 1), LoraConfig(r=1, target_modules=["c_proj"], fan_in_fan_out=True))
    blocks = trainable_blocks(student)
    assert all("lora_" in name for name in blocks)
    assert ordered(set(blocks.values())) == [
        "layer 0 attention",
        "layer 0 mlp",
        "layer 1 attention",
        "layer 1 mlp",
    ]


def test_blocks_come_in_the_order_of_a_forward_pass():
    blocks = ["embeddings", "layer 2 attention", "layer 2 mlp", "layer 10 attention", "lm head", "norms", "other"]
    assert ordered(set(blocks)) == blocks
