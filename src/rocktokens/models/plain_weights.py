"""The weights of a causal LM as another engine reads them: whole, by their plain names, adapters merged."""

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from rocktokens.models.head import causal_lm


@torch.no_grad()
def plain_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every weight of a model, or of one that PEFT wraps, by the name it has in a checkpoint.

    A tied head is written beside the embedding: an engine that loads weights over old ones may tie only once, at its
    start, and would keep the head it had.
    """
    bare = causal_lm(model)
    weights = {
        name.replace(".base_layer.", "."): parameter.detach()
        for name, parameter in bare.named_parameters()
        if ".lora_" not in name
    }
    for name, module in bare.named_modules():
        if isinstance(module, BaseTunerLayer):
            layer: Any = module
            for adapter in layer.active_adapters:
                weights[f"{name}.weight"] = weights[f"{name}.weight"] + layer.get_delta_weight(adapter)
        elif module is bare.get_output_embeddings():
            weights.setdefault(f"{name}.weight", module.weight.detach().clone())  # pyright: ignore[reportCallIssue]
    return {name: weight.contiguous() for name, weight in weights.items()}
