"""A checkpoint that is copied into the model of another is the model that loading it would give."""

import gc
import shutil
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rocktokens.errors import RocktokensError
from rocktokens.models import pebbles, projections
from rocktokens.models.load import LoadedModel, load_model
from rocktokens.replay.checkpoint_swap import Students

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


class Loads:
    """``load_model`` on the CPU, with a note of every call."""

    def __init__(self, dtype: str = "float32", then: Callable[[LoadedModel], None] = lambda _loaded: None) -> None:
        self.names: list[str] = []
        self._dtype, self._then = dtype, then

    def __call__(self, name: str) -> LoadedModel:
        self.names.append(Path(name).name)
        loaded = load_model(name, self._dtype, "cpu")
        self._then(loaded)
        return loaded


def perturb(directory: Path, seed: int) -> None:
    weights = load_file(directory / WEIGHTS)
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}
    changed = {name: (tensor.float() + 0.1 * noise[name]).contiguous() for name, tensor in weights.items()}
    save_file(changed, directory / WEIGHTS, metadata={"format": "pt"})


@pytest.fixture
def tied(tmp_path: Path) -> list[str]:
    """Three checkpoints of the embedded student, in float32; its head is its embedding."""
    names = [tmp_path / f"step-{index}" for index in range(3)]
    for seed, name in enumerate(names):
        shutil.copytree(pebbles.directory("student"), name)
        perturb(name, seed)
    return [str(name) for name in names]


@pytest.fixture
def sharded(tmp_path: Path) -> list[str]:
    """Three checkpoints of a model with a head of its own, each in several files."""
    config = LlamaConfig(
        vocab_size=1301, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    names = [tmp_path / f"step-{index}" for index in range(3)]
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(name, max_shard_size="50KB")
        assert len(list(name.glob("model-*.safetensors"))) > 1
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(pebbles.directory("student") / file, name)
    return [str(name) for name in names]


def same_state(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    state, others = model.state_dict(), other.state_dict()
    return state.keys() == others.keys() and all(
        state[name].dtype == others[name].dtype and torch.equal(state[name], others[name]) for name in state
    )


@pytest.mark.parametrize("kind", ["tied", "sharded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_are_copied_into_one_model(kind: str, dtype: str, request: pytest.FixtureRequest):
    names = request.getfixturevalue(kind)
    load = Loads(dtype)
    with Students(load) as students:
        first = students.get(names[0]).model
        for name in (names[1], names[2], names[0]):
            student = students.get(name)
            assert student.model is first and student.name == name
            assert same_state(student.model, load_model(name, dtype, "cpu").model)
    assert load.names == ["step-0"]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["tied", "sharded"])
def test_a_checkpoint_is_copied_into_weights_that_lie_side_by_side(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(projections, "on_gpu", lambda _: True)
    names = request.getfixturevalue(kind)
    load = Loads("bfloat16", lambda loaded: projections.lay_side_by_side(loaded.model))
    with Students(load) as students:
        attention = students.get(names[0]).model.model.layers[0].self_attn
        product = projections.SharedProduct.of(attention, projections.ATTENTION_INPUTS)
        swapped = students.get(names[1]).model
        fresh = load_model(names[1], "bfloat16", "cpu").model
        given = fresh.model.layers[0].self_attn
        assert product is not None and load.names == ["step-0"] and same_state(swapped, fresh)
        weights = [getattr(given, name).weight for name in projections.ATTENTION_INPUTS]
        assert torch.equal(product.weight_ND, torch.cat(weights))


def test_what_was_read_ahead_is_what_comes_next(tied: list[str]):
    load = Loads()
    with Students(load) as students:
        students.get(tied[0])
        students.read_ahead(tied[1])
        students.read_ahead(tied[1])
        assert same_state(students.get(tied[1]).model, load_model(tied[1], device="cpu").model)
        students.read_ahead(tied[2])
        assert same_state(students.get(tied[0]).model, load_model(tied[0], device="cpu").model)
        assert same_state(students.get(tied[2]).model, load_model(tied[2], device="cpu").model)
    assert load.names == ["step-0"]


def test_the_present_student_is_not_read_again(tied: list[str]):
    with Students(Loads()) as students:
        students.get(tied[0])
        (Path(tied[0]) / WEIGHTS).unlink()
        assert students.get(tied[0]).name == tied[0]


def other_architecture(directory: Path) -> None:
    """Half the heads of twice the width: the shapes are the same."""
    text = (directory / "config.json").read_text()
    text = text.replace('"head_dim": 32', '"head_dim": 64').replace('_heads": 4', '_heads": 2')
    (directory / "config.json").write_text(text)


def other_tokenizer(directory: Path) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(path.read_text() + "\n")


def another_layer(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, num_hidden_layers=3)
    model.save_pretrained(directory)


def own_head(directory: Path) -> None:
    """Saved twice over, though the config says that head and embedding are one."""
    weights = load_file(directory / WEIGHTS)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("change", [other_architecture, other_tokenizer, another_layer, own_head])
def test_what_differs_in_more_than_weights_is_loaded(tied: list[str], change: Callable[[Path], None]):
    change(Path(tied[1]))
    load = Loads()
    with Students(load) as students:
        for name in tied:
            assert same_state(students.get(name).model, load_model(name, device="cpu").model)
    assert load.names == ["step-0", "step-1", "step-2"]


def test_a_model_that_is_not_its_file_name_by_name_is_never_copied_into(tied: list[str]):
    """As where loading rearranges a tensor: a copy by name would undo that."""

    def rearrange(loaded: LoadedModel) -> None:
        weight = loaded.model.model.layers[0].self_attn.q_proj.weight
        weight.data = weight.data.flip(0)

    load = Loads(then=rearrange)
    with Students(load) as students:
        for name in tied[:2]:
            expected = load_model(name, device="cpu")
            rearrange(expected)
            assert same_state(students.get(name).model, expected.model)
    assert load.names == ["step-0", "step-1"]


def test_adapters_are_merged_as_ever(tied: list[str], tmp_path: Path):
    adapters = [tmp_path / f"adapter-{index}" for index in range(2)]
    for seed, adapter in enumerate(adapters):
        torch.manual_seed(seed)
        wrapped = get_peft_model(
            load_model(tied[0], device="cpu").model,
            LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
        )
        wrapped.peft_config["default"].base_model_name_or_path = tied[0]
        wrapped.save_pretrained(adapter, save_embedding_layers=False)
    load = Loads()
    with Students(load) as students:
        for name in map(str, (tied[1], *adapters, tied[2])):
            students.read_ahead(name)
            assert same_state(students.get(name).model, load_model(name, device="cpu").model)
    assert load.names == ["step-1", "adapter-0", "adapter-1", "step-2"]


def test_embedded_models_and_directories_take_turns(tied: list[str]):
    load = Loads()
    with Students(load) as students:
        for name in (tied[0], "pebbles-student", tied[1]):
            assert same_state(students.get(name).model, load_model(name, device="cpu").model)
    assert load.names == ["step-0", "pebbles-student", "step-1"]


def test_a_model_is_gone_before_the_next_is_built(tied: list[str]):
    other_tokenizer(Path(tied[1]))
    alive: list[weakref.ref[torch.nn.Module]] = []

    def load(name: str) -> LoadedModel:
        gc.collect()
        assert all(model() is None for model in alive)
        loaded = load_model(name, device="cpu")
        alive.append(weakref.ref(loaded.model))
        return loaded

    with Students(load) as students:
        for name, following in pairwise([*tied, tied[0]]):
            students.get(name)
            students.read_ahead(following)
    assert len(alive) == 3


def test_a_damaged_checkpoint_is_refused_by_name(tied: list[str]):
    weights = Path(tied[1]) / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1000])
    with Students(Loads()) as students:
        students.get(tied[0])
        students.read_ahead(tied[1])
        with pytest.raises(RocktokensError, match="step-1' cannot be loaded"):
            students.get(tied[1])
        assert same_state(students.get(tied[2]).model, load_model(tied[2], device="cpu").model)


def test_a_checkpoint_that_goes_away_is_refused_by_name(tied: list[str]):
    with Students(Loads()) as students:
        students.get(tied[0])
        shutil.rmtree(tied[1])
        with pytest.raises(RocktokensError, match="step-1"):
            students.get(tied[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpu_checkpoints_are_copied_into_one_model(tied: list[str], dtype: str):
    with Students(lambda name: load_model(name, dtype, "cuda")) as students:
        first = students.get(tied[0]).model
        for name, following in ((tied[1], tied[2]), (tied[2], tied[0])):
            student = students.get(name).model
            students.read_ahead(following)
            assert student is first and same_state(student, load_model(name, dtype, "cuda").model)
