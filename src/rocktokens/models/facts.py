"""What a model's config says, without its weights: parameters are counted on the meta device.

Only ``config.json`` and the files of the tokenizer are read, and nothing is downloaded: a model of the Hub that is not
in the cache is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rocktokens.errors import RocktokensError
from rocktokens.models import pebbles, smollm2
from rocktokens.models.load import CANNOT_LOAD, EMBEDDED, PEBBLES, base_of

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Size and limits of a causal LM."""

    name: str
    parameters: int
    vocabulary: int
    """Columns of the LM head."""
    context_length: int | None
    """Tokens the model can see, None where its config names no limit."""


def model_facts(name: str) -> ModelFacts:
    """Read the config of a model by embedded id, directory or hub id, and count its parameters."""
    return from_config(name, lambda config: facts_of_config(name, config))


def from_config(name: str, make: Callable[[Any], Value]) -> Value:
    """Read the config of a model by embedded id, directory or hub id, and return what ``make`` makes of it."""
    source, options = _config_files(name)
    try:
        return make(AutoConfig.from_pretrained(source, trust_remote_code=False, **options))
    except CANNOT_LOAD as error:
        if Path(name).is_dir() and name:
            raise RocktokensError(
                f"model {name!r} is a folder without a config.json that can be read: give that of a saved model"
            ) from error
        raise RocktokensError(
            f"model {name!r} has no config.json on this machine that can be read: give a directory, a hub id that was "
            f"downloaded (`hf download {name}`), or one of {', '.join(EMBEDDED)}"
        ) from error


def facts_of_config(name: str, config: Any) -> ModelFacts:
    """Count the parameters of the model that a transformers config describes; tied weights count once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.tie_weights()
    text = config.get_text_config()
    return ModelFacts(
        name=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary=text.vocab_size,
        context_length=getattr(text, "max_position_embeddings", None),
    )


def tokenizer_if_there(name: str) -> Any | None:
    """Load the tokenizer of a model; None where that is not possible."""
    source, options = _config_files(name)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    except CANNOT_LOAD:
        return None


def _config_files(name: str) -> tuple[str, dict[str, Any]]:
    """Return where the config of a model lies, and how transformers is told to read it."""
    if name in PEBBLES:
        return str(pebbles.directory(PEBBLES[name])), {}
    if name == smollm2.MODEL_ID:
        return str(smollm2.gguf_directory()), {"gguf_file": smollm2.GGUF_FILE}
    if (Path(name) / "adapter_config.json").is_file():
        return _config_files(base_of(Path(name)) or "")
    return name, {"local_files_only": True}
