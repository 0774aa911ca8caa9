"""Read the LM head of a causal LM from its safetensors, and nothing else of its weights.

1. The model is built on the meta device from its config: that says which tensor is the head's, tied or not.
2. Only the file that has this tensor is opened; of a hub id that is not in the cache, only that file is downloaded.
3. The weight of the final norm, a single vector, comes along, from a second file where it lies in another. Every state
   h that leaves such a norm has rms((h − b) / w) = 1, but for the epsilon of the norm, so states can be told from those
   of another model, or of none (``FinalNorm``).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils.hub import cached_file

from rocktokens.errors import RocktokensError
from rocktokens.models import pebbles, smollm2
from rocktokens.models.distant import linear_head
from rocktokens.models.head import trunk
from rocktokens.models.load import CANNOT_LOAD, PEBBLES
from rocktokens.models.whole import generation_config

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
"""What the last module before the head is called in the trunks of transformers."""
Read = Callable[[str], torch.Tensor]
"""Returns a tensor of the model's files by name, or raises KeyError."""


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """The scale and shift that end every state."""

    weight_E: torch.Tensor
    bias_E: torch.Tensor

    def gap(self, h_LE: torch.Tensor) -> float:
        """Return how far states are from ones that this norm made: the median of abs(rms − 1) over them."""
        used_E = self.weight_E != 0
        normal_LE = ((h_LE.double() - self.bias_E) / self.weight_E)[:, used_E]
        return float((normal_LE.square().mean(dim=1).sqrt() - 1).abs().median())


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is read of a model without any of its weights."""

    config: Any
    generation_config: Any
    head: None = None


@dataclass(frozen=True, slots=True)
class HeadFile:
    """What is read of a model."""

    config: Any
    generation_config: Any
    head: nn.Linear
    """On the CPU."""
    norm: FinalNorm | None
    """None where the model ends in another way."""


def read_head(name: str, dtype: torch.dtype) -> HeadFile:
    """Read the head of a model by embedded id, directory or hub id."""
    source = _source(name)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        with torch.device("meta"):
            lm: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        lm.tie_weights()
        read = _reader(source)
        layer = lm.get_output_embeddings()
        names = {id(parameter): own for own, parameter in lm.named_parameters()}
        bias = getattr(layer, "bias", None)
        head = linear_head(*(read(names[id(own)]).to(dtype) for own in (layer.weight, bias) if own is not None))
        norm = _final_norm(lm, names, read)
        generation = generation_config(source) or lm.generation_config
    except (*CANNOT_LOAD, KeyError) as error:
        raise RocktokensError(
            f"the LM head of models.teacher = {name!r} cannot be read ({_said(error)}): give the folder or hub id of a "
            "model saved with save_pretrained, of which config.json, tokenizer and the files with the head and the "
            "final norm are enough"
        ) from error
    return HeadFile(config, generation, head, norm)


def read_description(name: str) -> ModelDescription:
    """Read the config of a model by embedded id, directory or hub id."""
    source = _source(name)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        generation = generation_config(source) or GenerationConfig.from_model_config(config)
    except CANNOT_LOAD as error:
        raise RocktokensError(
            f"the config of models.teacher = {name!r} cannot be read ({_said(error)}): give the folder or hub id of "
            "the model, of which config.json and tokenizer are enough"
        ) from error
    return ModelDescription(config, generation)


def _source(name: str) -> str:
    """Return the folder or hub id whose safetensors are those of the model."""
    if name in PEBBLES:
        return str(pebbles.directory(PEBBLES[name]))
    if name == smollm2.MODEL_ID or (Path(name) / "adapter_config.json").is_file():
        what = "has no safetensors" if name == smollm2.MODEL_ID else "is an adapter"
        raise RocktokensError(
            f"models.teacher = {name!r} {what}, which cannot be read as a served teacher's: save the whole model with "
            "save_pretrained, serve that and name its folder"
        )
    return name


def _reader(source: str) -> Read:
    """Find tensors where transformers does: in one file, else where the index says."""
    absent_is_fine = {"_raise_exceptions_for_missing_entries": False}
    file_of: dict[str, str] = {}
    if (whole := cached_file(source, WHOLE, **absent_is_fine)) is None:
        index = cached_file(source, INDEX, **absent_is_fine)
        if index is None:
            raise OSError(f"there is neither {WHOLE} nor {INDEX}")
        file_of = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]

    def read(tensor: str) -> torch.Tensor:
        path = whole or cached_file(source, file_of[tensor])
        with safe_open(str(path), framework="pt") as file:
            if tensor not in file.keys():  # noqa: SIM118
                raise KeyError(tensor)
            return file.get_tensor(tensor)

    return read


def _final_norm(lm: Any, names: dict[int, str], read: Read) -> FinalNorm | None:
    """Read the norm before the head; None where it has another name, or its tensors have."""
    body = trunk(lm)
    norm = next((getattr(body, own) for own in FINAL_NORMS if hasattr(body, own)), None)
    if norm is None:
        return None
    try:
        tensors = {own: read(names[id(parameter)]).float() for own, parameter in norm.named_parameters()}
    except KeyError:
        return None
    if isinstance(norm, nn.LayerNorm):
        weight_E = tensors["weight"].double()
        return FinalNorm(weight_E, tensors["bias"].double() if "bias" in tensors else torch.zeros_like(weight_E))
    norm = norm.to_empty(device="cpu")
    norm.load_state_dict(tensors)
    with torch.no_grad():  # whose own mean square is 1, so that they come out as the scale
        scale_E = norm(torch.ones(lm.get_output_embeddings().weight.shape[1])).double()
    return FinalNorm(scale_E, torch.zeros_like(scale_E)) if scale_E.any() else None


def _said(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"there is no tensor {error}"
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
