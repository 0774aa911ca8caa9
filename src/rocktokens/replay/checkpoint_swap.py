"""The students of a replay, one checkpoint after another in one model.

1. The first checkpoint is loaded as any model is. Its weight file is then compared with the model: where every tensor
   of the file is the parameter of its name, and the rest is tied to those, files can be copied into the model by name.
2. A further checkpoint is copied in when it is a directory of the same architecture and tokenizer (files that describe
   them have the same bytes) whose weights have the same names and shapes. Everything else, such as an adapter that has
   to be merged or a model of the Hub, is loaded as any
   model is.
3. While one checkpoint is scored, a thread reads the next one's weights into host memory, pinned for a GPU: one
   checkpoint ahead, never more.

A model that was copied into computes the bits of one that was loaded: the same values, rounded to the same dtypes.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

from rocktokens.models.load import CANNOT_LOAD, EMBEDDED, LoadedModel
from rocktokens.run_dir import require_as_listed

Weights = dict[str, torch.Tensor]
DESCRIPTIONS = ("*config.json", "*token*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.jinja")
"""What transformers builds a model and its tokenizer from, weights apart."""


@dataclass(slots=True)
class _Present:
    """The model there is now."""

    student: LoadedModel
    is_by_name: bool | None = None
    """Whether files can be copied into it; None until that is asked."""


class Students:
    """Gives one checkpoint after another; each call ends the life of the model before.

    ``load`` builds a model from the name of a checkpoint, and refuses what it should.
    """

    def __init__(self, load: Callable[[str], LoadedModel]) -> None:
        self._load = load
        self._present: _Present | None = None
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-reader")
        self._reading: tuple[str, Future[Weights | None]] | None = None
        """The checkpoint a thread is reading; its weights are None if they cannot be copied into the present model."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._reader.shutdown(cancel_futures=True)

    def get(self, name: str) -> LoadedModel:
        """The student of this name."""
        present = self._present
        if present is not None and present.student.name != name:
            present = self._swapped(present, name)
        if present is None:
            self._present = None  # its memory is free before the next one is built
            present = _Present(self._load(name))
        self._present = present
        return present.student

    def read_ahead(self, name: str) -> None:
        """Begin to read the weights of the checkpoint that will be asked for next."""
        if self._present is not None and (self._reading is None or self._reading[0] != name):
            self._reading = name, self._reader.submit(_weights_for, self._present, name)

    def _swapped(self, present: _Present, name: str) -> _Present | None:
        """The present model with other weights; None if the checkpoint has to be loaded."""
        self.read_ahead(name)
        reading, self._reading = self._reading, None
        weights = reading and reading[1].result()
        if weights is None:
            return None
        state = present.student.model.state_dict()
        with torch.no_grad():  # rounded to the parameters' dtype; from pinned memory the host does not wait
            for key, tensor in weights.items():
                state[key].copy_(tensor, non_blocking=True)
        present.student = replace(present.student, name=name)
        return present


def _weights_for(present: _Present, name: str) -> Weights | None:
    """What to copy into the present model to make it the other; None where loading is the way, or tells what is wrong.

    Runs beside the scoring, on a stream of its own; nothing writes to the model before it has ended.
    """
    model, own, other = present.student.model, Path(present.student.name), Path(name)
    if not (is_plain_directory(present.student.name) and is_plain_directory(name)):
        return None
    require_as_listed(name)
    on_gpu = model.device.type == "cuda"
    try:
        if descriptions(own) != descriptions(other) or shapes(own) != shapes(other):
            return None
        if present.is_by_name is None:
            with torch.cuda.stream(torch.cuda.Stream(model.device) if on_gpu else None):
                present.is_by_name = holds_by_name(model, own)
        if not present.is_by_name:
            return None
        return {name: tensor.pin_memory() if on_gpu else tensor.clone() for name, tensor in _mapped(other)}
    except (*CANNOT_LOAD, RuntimeError):  # of the latter: no memory to pin, or to compare on the GPU
        return None


def is_plain_directory(name: str) -> bool:
    """Whether a model of this name is read from weights in a directory, and from them alone."""
    return name not in EMBEDDED and Path(name).is_dir() and not (Path(name) / "adapter_config.json").exists()


def descriptions(directory: Path) -> dict[str, bytes]:
    """The files that say what the weights are of."""
    files = (path for path in directory.iterdir() if any(fnmatchcase(path.name, pattern) for pattern in DESCRIPTIONS))
    return {path.name: path.read_bytes() for path in files if path.is_file()}


def shapes(directory: Path) -> dict[str, list[int]]:
    """Of every tensor in the directory's weight files."""
    found = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return found


def weight_files(directory: Path) -> list[Path]:
    """The files that transformers reads the weights from."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        return [whole]
    names = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()
    return [directory / name for name in sorted(set(names))]


def holds_by_name(model: Any, directory: Path) -> bool:
    """Whether the files' weights, name by name, are all that the model's state consists of."""
    state = model.state_dict()
    named: list[int] = []
    for name, tensor in _mapped(directory):
        if name not in state or not torch.equal(state[name], tensor.to(state[name])):
            return False
        named.append(state[name].data_ptr())
    none_twice = len(set(named)) == len(named)
    return none_twice and {tensor.data_ptr() for tensor in state.values()} == set(named)


def _mapped(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors, one at a time; their bytes may still be on the disk."""
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
