import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import dequantise
import numpy as np
import pytest
import torch
from make_teacher import MADE

from rocktokens.errors import RocktokensError
from rocktokens.models.load import load_model
from rocktokens.run_dir import file_sha256

pytestmark = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the package gguf")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
}
"""How llama.cpp calls the modules of a llama."""


def gguf_name(name: str) -> str:
    for own, other in NAMES.items():
        name = name.replace(own, other)
    return name


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a projection as llama.cpp orders them: each number of a rotated pair beside the other."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """The pebbles' student in 8 bits; return what its weights are after rounding, under the names of transformers."""
    from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize

    loaded = load_model("pebbles-student", device="cpu")
    config, tokenizer = loaded.model.config, json.loads(loaded.tokenizer.backend_tokenizer.to_str())
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = sorted(tokenizer["model"]["vocab"].items(), key=lambda entry: entry[1])
    writer.add_token_list([text for text, _ in tokens])
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_token_types([3 if index in special else 1 for _, index in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(tokenizer["model"]["vocab"]["<|end|>"])
    writer.add_chat_template("{% for turn in messages %}{{ turn.content }}<|user|>{% endfor %}")
    kept = {}
    for name, parameter in loaded.model.named_parameters():
        weight = parameter.detach().numpy()
        rotated = name.endswith(("q_proj.weight", "k_proj.weight"))
        quantised = weight.ndim == 2
        stored = paired(weight, config.num_attention_heads) if rotated else weight
        if quantised:
            blocks = quantize(stored, GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=GGMLQuantizationType.Q8_0)
            kept[name] = dequantize(quantize(weight, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), stored)
            kept[name] = weight
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


@pytest.fixture(scope="module")
def quantised(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("gguf") / "pebbles-q8_0.gguf"
    return path, write_gguf(path)


def run(monkeypatch, *arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["dequantise.py", *map(str, arguments)])
    dequantise.main()


def test_the_folder_has_the_files_weights_tokenizer_and_ends(quantised, tmp_path, monkeypatch):
    path, kept = quantised
    run(monkeypatch, path, tmp_path / "model", "--dtype", "float32")
    loaded = load_model(str(tmp_path / "model"), device="cpu")
    weights = dict(loaded.model.named_parameters())
    assert weights.keys() == kept.keys()
    for name, weight in kept.items():
        assert np.array_equal(weights[name].detach().numpy(), weight), name
    original = load_model("pebbles-student", device="cpu")
    assert loaded.tokenizer.get_vocab().items() >= original.tokenizer.get_vocab().items()
    text = "Tom has twelve apples.<|end|>"  # which the file's splitting rule and the original's split alike
    assert loaded.tokenizer(text).input_ids == original.tokenizer(text).input_ids
    ends = {original.tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|user|>")}
    assert loaded.eos_ids == ends  # the file's own, and the one that its template ends a turn with
    made = json.loads((tmp_path / "model" / MADE).read_text())
    assert made == {"gguf": file_sha256(path), "dtype": "float32"}


def test_the_header_is_parsed_once(quantised, tmp_path, monkeypatch):
    import gguf

    parsed = []

    class Counting(gguf.GGUFReader):
        def __init__(self, path, *rest):
            parsed.append(path)
            super().__init__(path, *rest)

    monkeypatch.setattr(gguf, "GGUFReader", Counting)
    run(monkeypatch, quantised[0], tmp_path / "model")
    assert len(parsed) == 1 and gguf.GGUFReader is Counting


def test_a_finished_model_is_left_alone(quantised, tmp_path, monkeypatch, capsys):
    out = tmp_path / "model"
    run(monkeypatch, quantised[0], out)
    before = {file.name: file_sha256(file) for file in out.iterdir()}
    assert load_model(str(out), dtype="bfloat16", device="cpu").model.dtype is torch.bfloat16
    run(monkeypatch, quantised[0], out, "--dtype", "float32")
    assert "is finished" in capsys.readouterr().out
    assert {file.name: file_sha256(file) for file in out.iterdir()} == before


@pytest.mark.parametrize("kept_bytes", [0, 100, 20_000, -1000])
def test_a_damaged_file_is_refused_in_one_sentence(quantised, tmp_path, monkeypatch, kept_bytes: int):
    cut = tmp_path / "cut.gguf"
    shutil.copy(quantised[0], cut)
    with cut.open("r+b") as file:
        file.truncate(kept_bytes if kept_bytes >= 0 else cut.stat().st_size + kept_bytes)
    with pytest.raises(RocktokensError, match=r"cut\.gguf.* give a whole GGUF file of a causal LM"):
        run(monkeypatch, cut, tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gguf"]


def test_a_missing_file_and_a_missing_package_are_named(quantised, tmp_path, monkeypatch):
    with pytest.raises(RocktokensError, match=r"there is no file .*none\.gguf'"):
        run(monkeypatch, tmp_path / "none.gguf", tmp_path / "model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RocktokensError, match="needs the package gguf: pip install"):
        run(monkeypatch, quantised[0], tmp_path / "model")
