"""What memory and time of a run depend on, counted from a model's config: no weight is read, downloaded or allocated.

1. The model is built on the meta device, where tensors have a shape and a dtype and no storage.
2. ``ModelShape.of`` counts its parameters, tied ones once: all, those that are trained, those of the largest layer,
   those outside the layers, and of experts those that a token passes.
3. A forward over torch's fake tensors counts what autograd would keep, as ``resources`` does with a real model; with
   gradient checkpointing a second one counts what is left of that. Where transformers computes attention by itself
   (``eager``), which keeps a number for every two tokens, the row is as long as it may be. Else it has few tokens: fake
   tensors get a mask, which a GPU does without.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from rocktokens.config import Config
from rocktokens.errors import RocktokensError
from rocktokens.models.facts import from_config
from rocktokens.models.head import lm_head
from rocktokens.models.load import DTYPES
from rocktokens.preflight.resources import Activations, ModelSize, activations_of
from rocktokens.scoring.packed import checkpointing_kwargs
from rocktokens.scoring.student import with_adapters

FAKE_TOKENS = 8
"""Of the forward that counts activations, where they grow with the tokens alone."""
EXPERT_DIMENSIONS = 3
"""transformers keeps the experts of a layer in one tensor: expert, output, input."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of parameters, and what a forward keeps."""

    name: str
    size: ModelSize
    vocabulary: int
    """Rows of the LM head."""
    attention_width: int
    """Heads times their width: what a query has in one layer."""
    in_layers: int
    """Parameters of all layers; the others are embeddings, LM head and the last norm."""
    largest_layer: int
    experts: int
    """Of those in layers, the ones that only some tokens pass."""
    expert_share: float
    """Share of the experts that a token passes; 1 where there are none."""
    activations: Activations
    """Bytes that a forward keeps for its backward pass if no layer is computed again there."""
    kept: Activations
    """What it keeps as the run has it: less with gradient checkpointing."""

    @property
    def again(self) -> Activations:
        """What the backward pass adds to ``kept`` while it computes a layer again, on average over the layers."""
        every, kept, layers = self.activations, self.kept, self.size.layers
        return Activations((every.fixed - kept.fixed) / layers, (every.per_token - kept.per_token) / layers)

    @property
    def outside_layers(self) -> int:
        """Parameters of embeddings, LM head and the last norm."""
        return self.size.parameters - self.in_layers

    @property
    def active_in_layers(self) -> float:
        """Parameters of the layers that one token is multiplied with."""
        return self.in_layers - self.experts * (1 - self.expert_share)

    @classmethod
    def of(cls, name: str, model: Any, activations: Activations, kept: Activations) -> "ModelShape":
        """Read off a transformers causal LM, PEFT-wrapped or not."""
        config = model.config.get_text_config()
        per_layer = [_numbers(layer) for layer in _layers(name, model, config.num_hidden_layers)]
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        count = next((own for name in names if (own := getattr(config, name, None))), 1)
        stacked = [parameter for parameter in model.parameters() if parameter.ndim == EXPERT_DIMENSIONS]
        experts = [parameter for parameter in stacked if parameter.shape[0] == count > 1]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            name=name,
            size=ModelSize.of(model),
            vocabulary=lm_head(model).width,
            attention_width=config.num_attention_heads * head_dim,
            in_layers=sum(per_layer),
            largest_layer=max(per_layer),
            experts=sum(parameter.numel() for parameter in experts),
            expert_share=(getattr(config, "num_experts_per_tok", None) or count) / count,
            activations=activations,
            kept=kept,
        )


def student_shape(config: Config) -> ModelShape:
    """Count the student as it is trained: float32 weights, adapters where the config asks for them."""
    name, is_adapted, checkpointing = config.models.student, config.lora.enabled, config.training.gradient_checkpointing

    def shape(own: Any) -> ModelShape:
        return _shape(name, own, torch.float32, config, adapted=is_adapted, checkpointing=checkpointing)

    return from_config(name, shape)


def teacher_shape(config: Config) -> ModelShape:
    """Count the teacher in the dtype of the config; what it keeps is what a backward pass would need, if it had one."""
    name, dtype = config.models.teacher, DTYPES[config.models.dtype]
    return from_config(name, lambda own: _shape(name, own, dtype, config, adapted=False))


def _shape(
    name: str, model_config: Any, dtype: torch.dtype, config: Config, *, adapted: bool, checkpointing: bool = False
) -> ModelShape:
    if getattr(model_config.get_text_config(), "num_attention_heads", None) is None:
        raise RocktokensError(
            f"model {name!r} is a {model_config.model_type}, which has no attention heads, so --plan cannot count "
            "its cache: give a transformer"
        )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(model_config, dtype=dtype, trust_remote_code=False)
        model.tie_weights()
        if adapted:
            model = with_adapters(model.requires_grad_(False), config, None)
    if checkpointing and not model.supports_gradient_checkpointing:
        raise RocktokensError(
            f"model {name!r}: transformers cannot compute the layers of a {model_config.model_type} again: set "
            "training.gradient_checkpointing = false"
        )
    try:
        activations, kept = _forward_keeps(model, config, checkpointing=checkpointing)
    except RuntimeError as error:
        raise RocktokensError(
            f"model {name!r}: what a {model_config.model_type} keeps in memory cannot be counted from its config "
            "alone: run `rocktokens check` without --plan, where its weights are"
        ) from error
    return ModelShape.of(name, model, activations, kept)


def _forward_keeps(model: Any, config: Config, *, checkpointing: bool) -> tuple[Activations, Activations]:
    """Count what a forward keeps if no layer is computed again, and as the run has it."""
    with FakeTensorMode():
        _make_fake(model)
        is_eager = model.config.get_text_config()._attn_implementation == "eager"
        longest = config.rollouts.max_prompt_length + config.rollouts.max_completion_length
        ids = torch.zeros(longest if is_eager else FAKE_TOKENS, dtype=torch.long)
        every = activations_of(model, ids, bf16=config.training.bf16)
        if not checkpointing:
            return every, every
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing_kwargs(model))
        return every, activations_of(model, ids, bf16=config.training.bf16)


def _make_fake(model: nn.Module) -> None:
    """Put fake tensors of the CPU, where autocast works, in the place of those of the meta device; tied ones stay so.

    Experts get half width: their product takes no other on fake tensors, and autocast does not cast it.
    """
    fakes: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None:
                dtype = torch.bfloat16 if own.ndim == EXPERT_DIMENSIONS else own.dtype
                fake = torch.empty(own.shape, dtype=dtype, device="cpu")
                module._parameters[name] = fakes.setdefault(id(own), nn.Parameter(fake, own.requires_grad))
        for name, own in module._buffers.items():
            if own is not None:
                module._buffers[name] = torch.empty(own.shape, dtype=own.dtype, device="cpu")


def _layers(name: str, model: nn.Module, count: int) -> nn.ModuleList:
    """Return the list of the model's layers."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise RocktokensError(
        f"model {name!r} has no list of its {count} layers, so --plan cannot say how it would be sharded: run "
        "`rocktokens check` without --plan"
    )


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
