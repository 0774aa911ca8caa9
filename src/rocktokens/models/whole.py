"""Load weights that are all there: a model whose files lack a tensor would be completed with random numbers.

1. transformers and PEFT are asked what they found. Tensors that a model computes itself or shares (buffers, tied heads)
   and those that its class declares to be ignorable do not count.
2. Nor do those that no causal LM computes with: parts for images and sound, heads for values and scores, masks and
   frequencies that older versions saved, scales of a quantised cache.
3. What is missing, of another shape, or has no place in the model is refused in one sentence, the first few by name.
4. A generation_config.json that cannot be read is an error: transformers would take it for a missing one, and the model
   would end its answers elsewhere.
"""

import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from rocktokens.errors import RocktokensError

if TYPE_CHECKING:
    from peft import PeftModel

_UNUSED = re.compile(
    r"(^|\.)(vision\w*|visual\w*|audio\w*|image\w*|multi_modal\w*|mm_\w*|v_head|value_head|score|classifier|mtp)\."
    r"|\.(masked_bias|inv_freq|[kv]_scale)$|\.(attn|attention)\.bias$"
)
NAMED = 3
"""Tensors of a kind that a sentence names."""


def load_causal_lm(name: str | Path, what: str, **options: Any) -> PreTrainedModel:
    """Load a causal LM with transformers, all of it; ``what`` is what sentences call it."""
    generation_config(name)
    asked = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(name, **asked, **options)
    model, found = loaded
    # A tensor of another shape is reported as (name, shape in the file, shape in the model).
    mismatched = [f"{own[0]} {list(own[1])} for {list(own[2])}" for own in found["mismatched_keys"]]
    absent = set(found["missing_keys"]) - {own[0] for own in found["mismatched_keys"]}
    unexpected = [own for own in found["unexpected_keys"] if not _UNUSED.search(own)]
    _require_none(what, {"missing": absent, "unexpected": unexpected, "of another shape": mismatched})
    return model


def generation_config(name: str | Path) -> GenerationConfig | None:
    """Read the generation_config.json of a model, which names its end tokens; None where it has none.

    Raises:
        OSError: it cannot be read.
    """
    absent_is_fine = dict.fromkeys(
        ("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"), False
    )
    file = cached_file(name, "generation_config.json", **absent_is_fine)
    return None if file is None else GenerationConfig.from_pretrained(name)


def load_adapter(model: PreTrainedModel, directory: Path, what: str, **options: Any) -> "PeftModel":
    """Wrap a model in the adapter of a directory with PEFT, all of it; ``what`` is what sentences call it."""
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    given = load_peft_weights(str(directory), device="cpu")
    with warnings.catch_warnings():  # of what is refused below
        warnings.simplefilter("ignore")
        try:
            adapted = PeftModel.from_pretrained(model, str(directory), ignore_mismatched_sizes=True, **options)
        except KeyError as error:  # PEFT looks up whole modules that an adapter brings
            raise ValueError(f"it lacks the tensor {error}") from error
    own = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    mismatched = [
        f"{name} {list(given[name].shape)} for {list(tensor.shape)}"
        for name, tensor in own.items()
        if name in given and given[name].shape != tensor.shape
    ]
    unexpected = given.keys() - own.keys() - adapted.state_dict().keys()  # embeddings may come along
    _require_none(
        what, {"missing": own.keys() - given.keys(), "unexpected": unexpected, "of another shape": mismatched}
    )
    return adapted


def _require_none(what: str, wrong: dict[str, Collection[str]]) -> None:
    """Refuse tensors that are wrong in some way."""
    parts = [_described(kind, sorted(names)) for kind, names in wrong.items() if names]
    if parts:
        raise RocktokensError(
            f"{what} is incomplete or of another architecture than its config says ({'; '.join(parts)}): restore its "
            "files, or save it again with save_pretrained"
        )


def _described(kind: str, names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} {kind}: {', '.join(names[:NAMED])}{more}"
