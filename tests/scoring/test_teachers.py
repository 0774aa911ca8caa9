"""A teacher that runs elsewhere on this machine: the states and scores of one that runs beside the student.

Without a GPU there is no other device. Then a model is tested whose layers accelerate keeps on the disk and brings in
by hooks, as it does those on a CPU for a GPU, and a head that is a copy.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from rocktokens.config import Config, parse_config
from rocktokens.errors import ConfigError, RocktokensError
from rocktokens.models.head import lm_head, verify_head
from rocktokens.models.load import LoadedModel, load_model, load_spread
from rocktokens.models.plain_weights import plain_weights
from rocktokens.scoring.batch import RolloutBatch, collate, response_states
from rocktokens.scoring.score import score_rollouts
from rocktokens.scoring.teachers import PlacedModel, is_spread, load_teacher, placed
from rocktokens.training.session import make_accelerator
from rocktokens.types import Rollout

FILE, PT = "model.safetensors", {"format": "pt"}
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = [pytest.param("cuda", "cpu", marks=GPU), pytest.param("cpu", "cuda", marks=GPU), ("cpu", "cpu")]


def make_rollouts() -> list[Rollout]:
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 1300, (2, length), dtype=np.int32) for length in (4, 11, 1, 25)]
    return [
        Rollout(index, f"p{index}", 0, prompt, response, np.zeros(len(response), np.float32), 0, True)
        for index, (prompt, response) in enumerate(ids)
    ]


def placed_config(place: str | None, device: str = "cpu") -> Config:
    text = f"""
        [run]
        directory = "r"
        [models]
        student = "pebbles-student"
        teacher = "pebbles-teacher"
        device = "{device}"
    """
    return parse_config(text, [f"models.teacher_device={place}"] if place else [])


def over_two_places(teacher: LoadedModel, folder: Path, here: str | int, away: str, *, tied: bool) -> Any:
    """The embedded teacher with its second half in another place, the head included unless it is tied."""
    config = copy.deepcopy(teacher.model.config)
    config.tie_word_embeddings = tied
    config.save_pretrained(folder)
    weights = plain_weights(teacher.model)
    save_file({name: weights[name] for name in weights if not (tied and name == "lm_head.weight")}, folder / FILE, PT)
    layers = len(teacher.model.model.layers)
    places: dict[str, Any] = {"model.embed_tokens": here, "model.rotary_emb": here, "model.norm": away}
    places |= {f"model.layers.{number}": here if number < layers // 2 else away for number in range(layers)}
    places["lm_head"] = here if tied else away
    offloaded = {"device_map": places, "offload_folder": folder / "offloaded"}
    model = AutoModelForCausalLM.from_pretrained(folder, **offloaded, dtype=torch.float32)
    assert is_spread(model)
    return model.eval()


def same_scores(student: Any, teacher: Any, expected: LoadedModel, atol: float) -> None:
    found, wanted = (score_rollouts(student, own, make_rollouts()) for own in (teacher, expected))
    for (_, own), (_, other) in zip(found.items(), wanted.items(), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=atol)


@pytest.mark.parametrize(("device", "place"), DEVICES)
def test_states_arrive_where_the_student_is(teacher: LoadedModel, device: str, place: str):
    inner = load_model("pebbles-teacher", device=place).model
    model = PlacedModel(inner, torch.device(device))
    batch = collate(make_rollouts(), pad_id=0, device=device)
    with torch.no_grad():
        found = response_states(model, batch)
        expected = response_states(teacher.model, collate(make_rollouts(), pad_id=0, device="cpu"))
    assert found.device.type == device and lm_head(model).weight_VD.device.type == device
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0 if place == "cpu" else 1e-3)
    assert [name for name, _ in model.named_parameters()] == ["head.weight"]
    assert lm_head(model).weight_VD.data_ptr() != lm_head(inner).weight_VD.data_ptr()
    assert verify_head(model, [5, 6, 7]) < 1e-3


def test_a_batch_goes_to_another_device_whole():
    batch = collate(make_rollouts(), pad_id=0, device="cpu")
    moved = batch.to("meta")

    def tensors(own: RolloutBatch) -> list[torch.Tensor]:
        row = (own.row.input_ids_N, own.row.position_ids_N, own.row.starts)
        columns = (own.group_index_T, own.token_ids_T, own.positions_T, own.rollout_ids_T, own.row_index_T)
        return [*own.groups, *columns, *row]

    assert all(own.device.type == "meta" for own in tensors(moved)) and moved.row.longest == batch.row.longest
    assert [own.shape for own in tensors(moved)] == [own.shape for own in tensors(batch)]


class Copies(TorchFunctionMode):
    """Notes of every ``Tensor.to`` whether the host goes on before the copy is there."""

    def __init__(self) -> None:
        super().__init__()
        self.hurried: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            self.hurried.append(bool((kwargs or {}).get("non_blocking")))
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_what_it_reads(teacher: LoadedModel):
    """Torch pins what a GPU sends without blocking, and the host may read it before it has come."""
    batch, model = collate(make_rollouts(), pad_id=0, device="cpu"), PlacedModel(teacher.model, torch.device("cpu"))
    with Copies() as to_gpu:
        batch.to("meta")
    with Copies() as to_host:
        batch.to("cpu")
    assert all(to_gpu.hurried) and len(to_gpu.hurried) == len(to_host.hurried) and not any(to_host.hurried)
    with torch.no_grad(), Copies() as states:
        model.states(batch)
    assert states.hurried and not any(states.hurried)


@pytest.mark.parametrize("tied", [True, False])
def test_layers_on_the_disk_are_brought_in(student: LoadedModel, teacher: LoadedModel, tmp_path: Path, tied: bool):
    inner = over_two_places(teacher, tmp_path, "cpu", "disk", tied=tied)
    assert inner.model.norm.weight.device.type == "meta" and tied is (inner.lm_head.weight.device.type == "cpu")
    model = PlacedModel(inner, torch.device("cpu"))
    assert not model.packs and torch.equal(lm_head(model).weight_VD, lm_head(teacher.model).weight_VD)
    same_scores(student, model, teacher, atol=0)
    assert verify_head(model, [5, 6, 7]) < 1e-4


@GPU
@pytest.mark.parametrize("tied", [True, False])
def test_layers_on_the_cpu_run_on_the_gpu(teacher: LoadedModel, tmp_path: Path, tied: bool):
    model = PlacedModel(over_two_places(teacher, tmp_path, 0, "cpu", tied=tied), torch.device("cuda"))
    here = [load_model(name, device="cuda") for name in ("pebbles-student", "pebbles-teacher")]
    same_scores(here[0], model, here[1], atol=1e-4)


def test_where_there_is_one_device_the_model_itself_is_the_teacher(teacher: LoadedModel):
    assert placed(teacher, torch.device("cpu")) is teacher
    for place in (None, "cpu"):
        assert not isinstance(load_teacher(placed_config(place), "cpu").model, PlacedModel)
    if not torch.cuda.is_available():  # "spread" over the CPU alone
        assert not isinstance(load_teacher(placed_config("spread"), "cpu").model, PlacedModel)


def test_several_processes_cannot_place_a_teacher(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(ConfigError, match=r"'cpu', but 2 processes .*: leave it out and set training.shard = true, or"):
        make_accelerator(placed_config("cpu"))


def test_places_that_are_not_there_are_refused(tmp_path: Path):
    with pytest.raises(RocktokensError, match=r"models\.teacher_device is 'cuda:99', but torch sees \d+ CUDA devices"):
        load_teacher(placed_config("cuda:99"), "cpu")
    with pytest.raises(RocktokensError, match=r"models\.teacher_device is 'nowhere': use"):
        load_teacher(placed_config("nowhere"), "cpu")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(RocktokensError, match="cannot be spread over devices"):
        load_spread(str(tmp_path), "float32")
