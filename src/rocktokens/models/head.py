"""The LM head of a causal LM, taken apart from its trunk so that logits can be made a few positions at a time.

1. ``hidden_states`` runs the trunk: h, what the head receives.
2. ``lm_head`` reads the head: z = cap · tanh(scale · (W h + b) / cap), the last two steps only where a model has them
   (Gemma caps, Cohere multiplies, Granite divides).
3. ``verify_head`` checks on a few tokens that 1 and 2 reproduce the model's own logits, ``require_steady`` that they do
   so while the model trains. What a model raises instead is a sentence (``refusing_strangers``).

Logits are float32 at least. On a GPU, operands of half width stay so and only the sum is float32; elsewhere they are
widened first. Either way no logit is ever rounded to half width, unlike the ones ``model(...)`` returns.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from transformers import PreTrainedModel

from rocktokens.errors import RocktokensError
from rocktokens.models.distant import DistantModel
from rocktokens.models.shards import gathered

if TYPE_CHECKING:  # it needs this module
    from rocktokens.models.likely_head import OutputHead

PROBE_TOKENS, STEADY_TOKENS = 8, 24
"""Of the texts that models are tried on."""
_known: set[tuple[type, str]] = set()
"""Classes and configs whose heads were verified in this process."""


@dataclass(frozen=True, slots=True)
class LMHead:
    """Everything between the last hidden state and the logits."""

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def width(self) -> int:
        """Number of logits, padding included."""
        return self.weight_VD.shape[0]

    def cut(self, width: int) -> Self:
        """The head of the first ``width`` logits; itself when it is no wider."""
        if width >= self.width:
            return self
        bias_V = None if self.bias_V is None else self.bias_V[:width]
        return replace(self, weight_VD=self.weight_VD[:width], bias_V=bias_V)

    def whole(self) -> Self:
        """The head gathered from the shards of FSDP2, on every process that holds one; itself where it is whole."""
        weight_VD, bias_V = gathered(self.weight_VD), None if self.bias_V is None else gathered(self.bias_V)
        is_whole = weight_VD is self.weight_VD and bias_V is self.bias_V
        return self if is_whole else replace(self, weight_VD=weight_VD, bias_V=bias_V)

    def cast_for(self, h_TD: torch.Tensor) -> Self:
        """The head with its weight in the dtype in which it will be multiplied with ``h_TD``."""
        dtype = _operand_dtype(h_TD, self.weight_VD)
        return self if self.weight_VD.dtype == dtype else replace(self, weight_VD=self.weight_VD.to(dtype))

    def logits(self, h_TD: torch.Tensor) -> torch.Tensor:
        """Float32 (or float64) logits (T, V)."""
        head = self.cast_for(h_TD)
        with torch.autocast(h_TD.device.type, enabled=False):
            logits_TV = wide_matmul(h_TD.to(head.weight_VD.dtype), head.weight_VD.T)
            if head.bias_V is not None:
                logits_TV = logits_TV + head.bias_V
            if head.scale != 1.0:
                logits_TV = logits_TV * head.scale
            if head.softcap is not None:
                logits_TV = torch.tanh(logits_TV / head.softcap) * head.softcap
        return logits_TV

    def product_gradient(self, gradient_TV: torch.Tensor, logits_TV: torch.Tensor) -> torch.Tensor:
        """Carry a gradient with respect to the logits back to one with respect to W h + b."""
        if self.softcap is not None:
            gradient_TV = gradient_TV * (1.0 - (logits_TV / self.softcap) ** 2)
        return gradient_TV if self.scale == 1.0 else gradient_TV * self.scale


def wide_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The matrix product of two equal dtypes, summed and returned in float32 at least."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == wide:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def _operand_dtype(h_TD: torch.Tensor, weight_VD: torch.Tensor) -> torch.dtype:
    """Half width only on CUDA, where the tensor cores sum it in float32, and only if the caller's tensors say so."""
    dtype = torch.promote_types(h_TD.dtype, weight_VD.dtype)
    if not h_TD.is_cuda:
        return torch.promote_types(dtype, torch.float32)
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else dtype


def lm_head(model: Any) -> LMHead:
    """The head of a transformers causal LM, PEFT-wrapped or not; its weight and bias are the model's own parameters."""
    lm = causal_lm(model)
    layer = lm.get_output_embeddings()
    if layer is None or hasattr(layer, "base_layer"):
        raise RocktokensError(
            f"{type(lm).__name__} has {'no' if layer is None else 'an adapter on its'} LM head: "
            "give a causal LM, and leave lm_head out of lora.target_modules"
        )
    config = lm.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    softcap = getattr(config, "final_logit_softcapping", None)
    return LMHead(layer.weight, getattr(layer, "bias", None), float(scale), softcap)


def output_head(model: Any) -> "OutputHead":
    """The LM head of a model, or what reads the rows of a teacher that has none."""
    if isinstance(model, DistantModel) and model.likely_head is not None:
        return model.likely_head
    return lm_head(model)


def hidden_states(model: Any, input_ids_RL: torch.Tensor, **layout: Any) -> torch.Tensor:
    """The last hidden states (R, L, D), final norm included: what the LM head receives.

    There is no mask: padding is on the right, and a causal LM never sees what comes after a token. ``layout`` is what
    else the model must know of where tokens lie: their positions, and arguments of its attention.
    """
    return trunk(causal_lm(model))(input_ids=input_ids_RL, use_cache=False, **layout).last_hidden_state


def trunk(lm: PreTrainedModel) -> Any:
    """The model below the head, also where it has another name than its class says, as that of Llama 4."""
    if lm.base_model is not lm:
        return lm.base_model
    within = [child for child in lm.children() if isinstance(child, PreTrainedModel)]
    if len(within) != 1:
        raise RocktokensError(
            f"{type(lm).__name__} has no trunk that can be told from its LM head: use a model of another architecture"
        )
    return within[0]


def causal_lm(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper (adapters stay active in its layers), or the model itself."""
    return cast(PreTrainedModel, model.get_base_model() if hasattr(model, "get_base_model") else model)


@contextmanager
def refusing_strangers(model: Any) -> Iterator[None]:
    """Refuse a model that raises where others compute: of an architecture that is not known, or of sizes that clash."""
    try:
        yield
    except (RocktokensError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever its author raises
        said = next(iter(str(error).strip().splitlines()), "")
        raise RocktokensError(
            f"{type(causal_lm(model)).__name__} cannot be used here ({type(error).__name__}: {said}): use a model of "
            "another architecture"
        ) from error


def require_known_head(model: Any) -> None:
    """Refuse a model whose logits are not those of its head, or that computes none; NaN is refused where it matters.

    A process tries every architecture once, whatever its weights. A model whose layers run elsewhere is tried there.
    """
    if isinstance(model, DistantModel):
        return
    lm = causal_lm(model)
    architecture = (type(lm), lm.config.to_json_string())
    if architecture in _known:
        return
    ids = [token % lm_head(model).width for token in range(1, 1 + PROBE_TOKENS)]
    with refusing_strangers(model), torch.inference_mode():
        if model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits.isfinite().all():
            verify_head(model, ids)
            _known.add(architecture)


@torch.inference_mode()
def require_steady(model: Any) -> None:
    """Refuse a model that computes other states while it trains than when it writes, as some routers of experts do."""
    ids_RL = torch.arange(1, 1 + STEADY_TOKENS, device=model.device)[None] % lm_head(model).width
    modes = {module: module.training for module in model.modules()}
    devices = [model.device] if model.device.type == "cuda" else []
    # Layers that checkpoint their gradients warn that there are none.
    with refusing_strangers(model), torch.random.fork_rng(devices), warnings.catch_warnings(action="ignore"):
        try:
            model.eval()
            written_LD = hidden_states(model, ids_RL)[0]
            model.train()
            trained = [hidden_states(model, ids_RL)[0] for _ in range(2)]
        finally:
            for module, training in modes.items():
                module.training = training
    difference = max((own_LD - written_LD).abs().max().item() for own_LD in trained)
    if difference > 1e-3 * max(1.0, written_LD.abs().max().item()):
        raise RocktokensError(
            f"{type(causal_lm(model)).__name__} computes other states while it trains than when it writes (they differ "
            f"by {difference:.3g}), so that its loss is of another student: use a student of another architecture"
        )


@torch.inference_mode()
def verify_head(model: Any, input_ids: Sequence[int]) -> float | None:
    """Refuse a model whose own logits, on a few ids of any text, are not ``lm_head`` of ``hidden_states``.

    Returns the largest absolute difference of a logit, or what a ``DistantModel`` can say.
    """
    if isinstance(model, DistantModel):
        return model.verify(input_ids)
    ids_RL = torch.tensor([list(input_ids)], device=model.device)
    own_TV = model(input_ids=ids_RL, use_cache=False).logits[0]
    return require_same_logits(model, own_TV, lm_head(model).logits(hidden_states(model, ids_RL)[0]))


def require_same_logits(model: Any, own_TV: torch.Tensor, ours_TV: torch.Tensor) -> float:
    """Refuse logits of ours that are not the model's own; return the largest absolute difference."""
    difference = (own_TV.to(ours_TV.dtype) - ours_TV).abs().max().item()
    tolerance = max(1e-4, 4 * torch.finfo(own_TV.dtype).eps) * max(1.0, own_TV.abs().max().item())
    if not difference <= tolerance:
        raise RocktokensError(
            f"{type(causal_lm(model)).__name__} computes logits in a way that is not known here (they differ by "
            f"{difference:.3g} from W h + b): use a model of another architecture"
        )
    return difference
