"""The LM head read from its file alone: that of the loaded model, whatever the family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rocktokens.errors import RocktokensError
from rocktokens.models.distant import DistantModel
from rocktokens.models.head import hidden_states, lm_head
from rocktokens.models.head_file import read_description, read_head

SMALL = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
SMALL |= {"initializer_range": 0.3}  # a residual stream that is not next to nothing, as in no trained model
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "phi": {},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.5},
}
WITHOUT_NORM = {"cohere"}
"""Its norm has a mean and no shift, and is its own class: nothing is compared."""


class Here(DistantModel):
    """A head without a model behind it."""

    packs = False  # pyright: ignore[reportAssignmentType]

    def states(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError

    def verify(self, input_ids: Any) -> None:
        raise NotImplementedError


def make_model(family: str, folder: Path) -> Any:
    """A model whose norms and biases are not those of a new one."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL, **FAMILIES[family]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.rand_like(parameter) + 0.1)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model(family: str, tmp_path: Path):
    model = make_model(family, tmp_path)
    file = read_head(str(tmp_path), torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        h_LE, own_LV = hidden_states(model, ids)[0], model(input_ids=ids).logits[0]
    head = lm_head(Here(file.config, file.generation_config, file.head))
    torch.testing.assert_close(head.logits(h_LE), own_LV, rtol=0, atol=1e-5)
    assert (file.norm is None) is (family in WITHOUT_NORM)
    if file.norm is not None:
        assert file.norm.gap(h_LE) < 1e-4
        assert file.norm.gap(1.01 * h_LE) > 4e-3 and file.norm.gap(h_LE.roll(1, dims=1)) > 4e-3


def test_what_is_missing_is_named(tmp_path: Path):
    model = make_model("llama", tmp_path)
    model.model.save_pretrained(tmp_path / "trunk")
    model.config.save_pretrained(tmp_path / "trunk")
    with pytest.raises(
        RocktokensError, match=r"models\.teacher = .*trunk' cannot be read \(there is no tensor 'lm_head"
    ):
        read_head(str(tmp_path / "trunk"), torch.float32)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(RocktokensError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        read_head(str(tmp_path), torch.float32)
    with pytest.raises(RocktokensError, match="'smollm2-135m-instruct' has no safetensors"):
        read_head("smollm2-135m-instruct", torch.float32)
    with pytest.raises(RocktokensError, match="cannot be read"):
        read_head(str(tmp_path / "nowhere"), torch.float32)


def test_a_generation_config_that_cannot_be_read_is_one_sentence(tmp_path: Path):
    make_model("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    for read in (lambda: read_head(str(tmp_path), torch.float32), lambda: read_description(str(tmp_path))):
        with pytest.raises(
            RocktokensError, match=r"models\.teacher = .* cannot be read \(.*generation_config\.json' is not"
        ):
            read()


def test_a_norm_in_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path):
    make_model("llama", tmp_path / "whole").save_pretrained(tmp_path, max_shard_size="4KB")
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    path = tmp_path / files["model.norm.weight"]
    assert path.name != files["lm_head.weight"]
    for damage in (lambda: path.write_bytes(b"no tensors"), path.unlink):
        damage()
        with pytest.raises(RocktokensError, match=r"cannot be read .*head and the final norm are enough"):
            read_head(str(tmp_path), torch.float32)
