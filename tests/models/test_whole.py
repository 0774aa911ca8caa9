"""A model whose files do not hold exactly its tensors is refused by name: nothing is filled in with random numbers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_load import IDS_RL, byte_tokenizer, save_adapter
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rocktokens.errors import RocktokensError
from rocktokens.models.load import load_model
from rocktokens.models.whole import load_adapter

SMALL = {
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
NORM = "model.layers.1.input_layernorm.weight"
Weights = dict[str, torch.Tensor]


def save_llama(directory: Path, *, tied: bool = False, **options: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied)).eval()
    model.save_pretrained(directory, **options)
    byte_tokenizer().save_pretrained(directory)
    return model


def change(path: Path, edit: Callable[[Weights], object]) -> None:
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})


def drop_layer(weights: Weights) -> None:
    for name in [name for name in weights if ".layers.1." in name]:
        del weights[name]


def refuse(directory: Path, *parts: str) -> None:
    with pytest.raises(RocktokensError) as refused:
        load_model(str(directory), device="cpu")
    sentence = str(refused.value)
    assert "\n" not in sentence and str(directory) in sentence
    assert [part for part in parts if part not in sentence] == [], sentence


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (drop_layer, ("9 tensors missing: model.layers.1.input_layernorm.weight, ", " and 6 more")),
        (lambda own: own.pop("lm_head.weight"), ("1 tensor missing: lm_head.weight)",)),
        (lambda own: own.update(stray=torch.zeros(3)), ("1 tensor unexpected: stray)",)),
        (lambda own: own.update({NORM: torch.zeros(3)}), (f"1 tensor of another shape: {NORM} [3] for [16])",)),
        (
            lambda own: own.update(stray=own.pop(NORM)),
            (f"1 tensor missing: {NORM}; 1 tensor unexpected: stray", "save_pretrained"),
        ),
    ],
    ids=["a layer missing", "no head", "one too many", "another shape", "renamed"],
)
def test_weights_that_do_not_fit_the_model(tmp_path: Path, edit: Callable[[Weights], object], parts: tuple[str, ...]):
    save_llama(tmp_path)
    change(tmp_path / "model.safetensors", edit)
    refuse(tmp_path, *parts)


def test_what_a_model_shares_computes_or_ignores_need_not_be_there(tmp_path: Path):
    model = save_llama(tmp_path / "tied", tied=True)
    rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(tmp_path / "tied/model.safetensors", lambda own: own.update({rotary: torch.zeros(4)}))
    assert "lm_head.weight" not in load_file(tmp_path / "tied/model.safetensors")
    loaded = load_model(str(tmp_path / "tied"), device="cpu")
    torch.testing.assert_close(loaded.model(IDS_RL).logits, model(IDS_RL).logits, atol=0, rtol=0)
    GPT2LMHeadModel(GPT2Config(vocab_size=260, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    byte_tokenizer().save_pretrained(tmp_path / "gpt2")
    unused = (
        "transformer.h.0.attn.bias",
        "transformer.h.0.attn.masked_bias",
        "v_head.summary.weight",
        "vision_model.x",
    )
    change(tmp_path / "gpt2/model.safetensors", lambda own: own.update({name: torch.ones(3) for name in unused}))
    load_model(str(tmp_path / "gpt2"), device="cpu")


# Shards


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_llama(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    load_model(str(tmp_path), device="cpu")
    return tmp_path


def shard_of(directory: Path, name: str) -> Path:
    index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return directory / index["weight_map"][name]


def test_a_shard_that_is_gone(sharded: Path):
    shard_of(sharded, NORM).unlink()
    refuse(sharded, "cannot be loaded")


def test_a_shard_without_what_the_index_says_is_in_it(sharded: Path):
    change(shard_of(sharded, NORM), lambda own: own.pop(NORM))
    refuse(sharded, f"1 tensor missing: {NORM})")


def test_a_shard_that_the_index_does_not_name(sharded: Path):
    shard, path = shard_of(sharded, NORM), sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: file for name, file in index["weight_map"].items() if file != shard.name}
    path.write_text(json.dumps({**index, "weight_map": kept}), encoding="utf-8")
    refuse(sharded, "missing: ", "model.layers.")


# Adapters


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    save_adapter(save_llama(tmp_path / "base"), tmp_path / "adapter", str(tmp_path / "base"))
    return tmp_path / "adapter"


LORA_A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (drop_layer, ("14 tensors missing: base_model.model.model.layers.1.", "and 11 more")),
        (lambda own: own.update({LORA_A: torch.zeros(3, 16)}), (f"another shape: {LORA_A} [3, 16] for [4, 16])",)),
        (
            lambda own: own.update({LORA_A.replace("q_proj", "z_proj"): own.pop(LORA_A)}),
            (f"1 tensor missing: {LORA_A}; 1 tensor unexpected: ", "z_proj.lora_A"),
        ),
    ],
    ids=["a layer missing", "another shape", "renamed"],
)
def test_adapters_that_do_not_fit(adapter: Path, edit: Callable[[Weights], object], parts: tuple[str, ...]):
    change(adapter / "adapter_model.safetensors", edit)
    refuse(adapter, "the adapter", *parts)


def test_a_base_without_a_layer_is_named_by_its_adapter(adapter: Path):
    change(adapter.with_name("base") / "model.safetensors", drop_layer)
    refuse(adapter, "9 tensors missing", "base")


def test_an_adapter_may_bring_embeddings_along(tmp_path: Path):
    """PEFT stores them where the vocabulary was extended; they are loaded into the base."""
    model = save_llama(tmp_path / "base")
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    expected = wrapped(IDS_RL).logits
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    adapted = load_adapter(base, tmp_path / "adapter", "the adapter").eval()
    torch.testing.assert_close(adapted(IDS_RL).logits, expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_without_a_module_that_it_should_bring(tmp_path: Path):
    model = save_llama(tmp_path / "base")
    settings = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["v_proj"], init_lora_weights=False)
    wrapped = get_peft_model(model, settings)
    wrapped.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    load_model(str(tmp_path / "adapter"), device="cpu")
    name = "base_model.model.model.layers.0.self_attn.v_proj.weight"
    change(tmp_path / "adapter/adapter_model.safetensors", lambda own: own.pop(name))
    refuse(tmp_path / "adapter", f"it lacks the tensor '{name}'")
