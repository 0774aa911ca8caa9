"""The input embeddings of a checkpoint equal those of the model that was saved there, however it was saved."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from trace_oracle import random_trace, write_trace
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from rocktokens.config import checkpoint_steps, dump_config, parse_config, student_name
from rocktokens.errors import RocktokensError
from rocktokens.rocks.encoders import traced_embeddings
from rocktokens.rocks.find import find_rocks
from rocktokens.run_dir import RunDir
from rocktokens.traces.store import TraceStore

SMALL = {"vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=8)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=8, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=23, n_embd=8, n_layer=1, n_head=2, n_positions=23)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, intermediate_size=8)),
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=23, hidden_size=8, n_layer=1, n_head=2)),
    "mamba": lambda: MambaForCausalLM(MambaConfig(vocab_size=23, hidden_size=8, num_hidden_layers=1, state_size=2)),
}


@pytest.fixture
def run(tmp_path) -> Path:
    return write_trace(tmp_path / "run", {4: random_trace(0)})


def llama():
    torch.manual_seed(1)
    return MODELS["llama"]()


def embeddings_of(model) -> np.ndarray:
    return model.get_input_embeddings().weight.detach().float().numpy()


def read(run: Path, checkpoint: int = 4) -> np.ndarray:
    return traced_embeddings(TraceStore(run), checkpoint)


@pytest.mark.parametrize("name", MODELS)
def test_every_family_keeps_them_where_they_are_looked_for(run, name):
    model = MODELS[name]()
    model.save_pretrained(run / "checkpoints" / "step-4")
    found = read(run)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, embeddings_of(model))


def test_half_width_and_shards_are_read(run):
    model = llama().to(torch.bfloat16)
    folder = run / "checkpoints" / "step-4"
    model.save_pretrained(folder, max_shard_size="1KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    np.testing.assert_array_equal(read(run), embeddings_of(model))
    (folder / "model.safetensors.index.json").unlink()
    np.testing.assert_array_equal(read(run), embeddings_of(model))


def test_vision_towers_and_copies_of_extra_layers_are_passed_over(run):
    folder = run / "checkpoints" / "step-4"
    folder.mkdir(parents=True)
    names = [
        "model.layers.61.embed_tokens.weight",
        "text.model.embed_tokens.weight",
        "a.vision_tower.embeddings.weight",
        "vision.embed_tokens.weight",
        "model.position_embeddings.weight",
        "model.embed_tokens.scale",
    ]
    save_file({name: torch.full((3, 2), float(i)) for i, name in enumerate(names)}, folder / "model.safetensors")
    assert read(run).tolist() == [[1, 1]] * 3


def test_an_adapter_leads_to_its_base(run, tmp_path):
    base = llama()
    base.save_pretrained(tmp_path / "base")
    expected = embeddings_of(base)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear"))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(run / "checkpoints" / "step-4", save_embedding_layers=False)
    np.testing.assert_array_equal(read(run), expected)


@pytest.mark.parametrize("changed", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}])
def test_an_adapter_that_changes_them_is_refused(run, tmp_path, changed):
    llama().save_pretrained(tmp_path / "base")
    adapted = get_peft_model(llama(), LoraConfig(r=2, **{"target_modules": ["q_proj"], **changed}))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(run / "checkpoints" / "step-4", save_embedding_layers=False)
    with pytest.raises(RocktokensError, match="its adapter changes them"):
        read(run)


def test_listed_students_come_before_those_of_the_run(run, tmp_path):
    own, listed = llama(), MODELS["gpt2"]()
    own.save_pretrained(run / "checkpoints" / "step-4")
    listed.save_pretrained(tmp_path / "mine" / "step_4")
    names = [str(tmp_path / "mine" / "step_0"), f"{tmp_path / 'mine' / 'step_4'}/"]
    with_students(run, names)
    assert student_name(RunDir(run), 4) == names[1]
    np.testing.assert_array_equal(read(run), embeddings_of(listed))
    with pytest.raises(RocktokensError, match=r"checkpoint 2 is none of those that trace\.checkpoints .* 0, 4"):
        read(run, 2)
    with pytest.raises(RocktokensError) as missing:
        student_name(RunDir(run), 2)
    assert "embeddings" not in str(missing.value)


def test_find_names_its_own_remedy_where_no_student_is_listed(run, tmp_path):
    with_students(run, [str(tmp_path / "step_0"), str(tmp_path / "step_4")])
    store = TraceStore(write_trace(run, {0: random_trace(0), 2: random_trace(0)}))
    with pytest.raises(RocktokensError, match=r"checkpoint 2 is none of .*give embeddings=, or stage='score'"):
        find_rocks(store, reference=2, stage="context")
    assert find_rocks(store, reference=2, stage="score").criterion["reference"] == 2


def with_students(run: Path, names: list[str]) -> None:
    text = f"[run]\ndirectory = {json.dumps(str(run))}\n[trace]\ncheckpoints = {json.dumps(names)}\n"
    config = parse_config(text, ["models.teacher=pebbles-teacher"])
    RunDir(run).commit_text("config.toml", dump_config(config))


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["a/step-0", "a/checkpoint_25/", "global_step-100"], [0, 25, 100]),
        (["a/step-7", "best"], [0, 1]),
        (["step-7-old", "org/name"], [0, 1]),
        ([], []),
    ],
)
def test_students_are_filed_under_the_steps_of_their_names(names, steps):
    assert checkpoint_steps(names) == steps


def damaged_cases(folder: Path) -> dict[str, tuple[str, object]]:
    """What is wrong, the words that say so, and how to make it so."""
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    nameless = {"transformer.token_table.weight": torch.ones(3, 2)}
    return {
        "no folder": ("it is not a directory", lambda: None),
        "no weights": ("it has no model\\*.safetensors", lambda: folder.mkdir(parents=True)),
        "no name": ("none of its tensors is called embed_tokens.weight, wte.weight", lambda: save(weights, nameless)),
        "a vector": ("float32 of shape \\(3,\\)", lambda: save(weights, {"model.wte.weight": torch.ones(3)})),
        "integers": ("int32 of shape", lambda: save(weights, {"wte.weight": torch.ones(3, 2, dtype=torch.int32)})),
        "garbage": ("Error while deserializing header", lambda: write(weights, "not weights")),
        "bad index": ("Expecting value", lambda: write(index, "nothing")),
        "odd index": ("list indices", lambda: write(index, "[]")),
        "lost shard": (
            "[Nn]o such file",
            lambda: write(index, json.dumps({"weight_map": {"wte.weight": "model-1.safetensors"}})),
        ),
        "no base": ("NoneType", lambda: write(folder / "adapter_config.json", '{"base_model_name_or_path": null}')),
    }


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("case", list(damaged_cases(Path())))
def test_what_cannot_be_read_is_refused_with_folder_reason_and_remedy(run, case):
    words, make = damaged_cases(run / "checkpoints" / "step-4")[case]
    make()
    with pytest.raises(RocktokensError, match=words) as refusal:
        read(run)
    assert f"{run / 'checkpoints' / 'step-4'}" in str(refusal.value)
    assert "give embeddings=" in str(refusal.value)
    assert "stage='score'" in str(refusal.value)


def test_a_base_that_is_no_folder_is_refused_by_its_name(run):
    adapter = run / "checkpoints" / "step-4" / "adapter_config.json"
    write(adapter, json.dumps({"base_model_name_or_path": "pebbles-student"}))
    with pytest.raises(RocktokensError, match="from pebbles-student \\(it is not a directory\\)"):
        read(run)


def test_the_optimizer_is_not_taken_for_a_model(run):
    model = llama()
    folder = run / "checkpoints" / "step-4"
    model.save_pretrained(folder)
    moments = {name: torch.zeros_like(value) for name, value in load_file(folder / "model.safetensors").items()}
    save_file(moments, folder / "optimizer.safetensors")
    np.testing.assert_array_equal(read(run), embeddings_of(model))
