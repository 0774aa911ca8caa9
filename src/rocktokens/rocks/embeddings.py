"""The student's input embeddings, read from the weights of the checkpoint that a trace was made with (METHOD 4.3).

1. The student is the one that ``rocktokens trace`` replayed under this number: an entry of ``trace.checkpoints`` in the
   run's config, else ``checkpoints/step-N`` of the run.
2. A LoRA checkpoint holds an adapter only. It does not touch the embeddings, so those of its base model are read.
3. The matrix is found by the names that language models give it; of the weights, only this one is read.
"""

import json
from pathlib import Path

import numpy as np

from rocktokens.config import student_name
from rocktokens.errors import RocktokensError
from rocktokens.traces.store import TraceStore

NAMES = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "embeddings")
"""Llama and most others; GPT-2; GPT-NeoX; Bloom and Falcon; InternLM; Mamba."""
ADAPTER = "adapter_config.json"
INDEX = "model.safetensors.index.json"


def student_embeddings(store: TraceStore, checkpoint: int) -> np.ndarray:
    """float32 (V, D): the input-embedding matrix of the student whose traces are filed under ``checkpoint``."""
    from safetensors import SafetensorError

    unreadable = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)
    folder = Path(student_name(store.run, checkpoint))
    try:
        if (folder / ADAPTER).is_file():
            folder = _base_of(folder)
        return _embeddings_in(folder)
    except unreadable as error:
        raise RocktokensError(
            f"the input embeddings of the student cannot be read from {folder} ({error}): give embeddings=, an array "
            "(vocabulary, width), or stage='score' (on the command line --set find.stage=score)"
        ) from error


def _embeddings_in(folder: Path) -> np.ndarray:
    """The matrix from a directory that ``save_pretrained`` wrote; ValueError says what is wrong with it."""
    file_of = _tensor_files(folder)
    found = [name for name in file_of if name.endswith(".weight") and _is_embedding(name)]
    if not found:
        raise ValueError(f"none of its tensors is called {', '.join(f'{name}.weight' for name in NAMES)}")
    # Layers that predict further tokens bring a copy of their own; the model's is the least deeply nested.
    name = min(found, key=lambda name: (name.count("."), name))
    return _read_matrix(file_of[name], name)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Where each tensor of a model lies, whether in one file or in shards."""
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ValueError("it has no model*.safetensors" if folder.is_dir() else "it is not a directory")
    return {name: file for file in files for name in _tensor_names(file)}


def _base_of(adapter: Path) -> Path:
    """The base model of a LoRA adapter, which must have left the embeddings as they are."""
    changed = [name for file in adapter.glob("adapter_model*.safetensors") for name in _tensor_names(file)]
    if any(map(_is_embedding, changed)):
        raise ValueError("its adapter changes them")
    return Path(json.loads((adapter / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"])


def _is_embedding(name: str) -> bool:
    """Whether a tensor belongs to the embedding of tokens: by module, and not in the vision part of a model."""
    return "vision" not in name and any(module in NAMES for module in name.split("."))


def _tensor_names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _read_matrix(file: Path, name: str) -> np.ndarray:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        matrix_VD = tensors.get_tensor(name)
    if matrix_VD.ndim != 2 or not matrix_VD.is_floating_point():
        raise ValueError(f"{name} is {matrix_VD.dtype} of shape {tuple(matrix_VD.shape)}, not a matrix of floats")
    return matrix_VD.float().numpy()
