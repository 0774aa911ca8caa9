"""Sequences laid end to end in one row, so that a model computes no padding.

1. The batch dimension is 1; positions restart with every sequence.
2. Torch's variable-length flash attention keeps the sequences apart: it is told where each begins, and no mask is made.
   transformers finds it under ``PACKED`` (https://huggingface.co/docs/transformers/attention_interface) and hands it
   the arguments that the model was called with. The model's own attention is back when the call ends.
3. Without gradient, norms, rotary embeddings and gates run by one kernel each (``models/layers.py``).
4. ``packs`` says for which models: plain attention everywhere, in bfloat16 or float16 on a GPU, of a head width that
   the kernel has. All others are padded.

A layer that is computed again in the backward pass (gradient checkpointing) must attend as it did the first time,
although the model's own attention has been restored by then: ``checkpointing_kwargs`` ensures that, and a model that is
checkpointed without them is padded.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from rocktokens.errors import RocktokensError
from rocktokens.models.distant import DistantModel
from rocktokens.models.head import causal_lm, hidden_states
from rocktokens.models.kernels import HALF
from rocktokens.models.layers import quick_layers
from rocktokens.rollouts.slots import attending, fits

try:
    from torch.nn.attention import varlen
except ImportError:  # torch 2.9 and older
    varlen = None

PACKED = "rocktokens_packed"
MAX_HEAD_WIDTH = 192
"""Above it some GPUs have no backward kernel."""
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop")
varlen_attn: Any = varlen and varlen.varlen_attn
VARLEN_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters) if varlen_attn else frozenset()
FEWER_KEY_HEADS = {"enable_gqa": True} if "enable_gqa" in VARLEN_PARAMETERS else {}
"""Torch 2.11 takes fewer key than query heads by itself, later versions need to be told."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """N tokens of R sequences, one sequence after the other.

    Example: sequences of 3 and 2 tokens have position_ids_N = [0, 1, 2, 0, 1], starts = [0, 3, 5], longest = 3.
    """

    input_ids_N: torch.Tensor
    position_ids_N: torch.Tensor
    starts: torch.Tensor
    """int32 (R + 1,): where each sequence begins, and where the last one ends."""
    longest: int
    """Tokens of the longest sequence."""


def packed_states(model: Any, row: PackedRow) -> torch.Tensor:
    """The last hidden states (N, D) of a row, final norm included: no sequence sees another."""
    with attending(causal_lm(model).config.get_text_config(), PACKED), quick_layers(model):
        h_1ND = hidden_states(
            model,
            row.input_ids_N.unsqueeze(0),
            position_ids=row.position_ids_N.unsqueeze(0),
            cu_seq_lens_q=row.starts,
            max_length_q=row.longest,
        )
    return h_1ND.squeeze(0)


def packs(model: Any) -> bool:
    """Whether the model can run on a packed row, where and as it is now."""
    if isinstance(model, DistantModel):
        return model.packs
    lm = causal_lm(model)
    if lm.device.type != "cuda":
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else lm.dtype
    return torch.cuda.get_device_capability(lm.device) >= (8, 0) and suits(lm, dtype)


def suits(lm: Any, dtype: torch.dtype) -> bool:
    """Whether the kernel computes the attention of a causal LM in this dtype, whatever the device."""
    config = lm.config.get_text_config()
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        "window_size" in VARLEN_PARAMETERS
        and dtype in HALF
        and lm.is_backend_compatible()
        and fits(lm)
        and head_width % 8 == 0
        and head_width <= MAX_HEAD_WIDTH
        and getattr(config, "kv_lora_rank", None) is None  # its values are not as wide as its keys
        and getattr(config, "attn_logit_softcapping", None) is None
        and not (lm.training and any(getattr(config, name, 0) for name in ATTENTION_DROPOUT))
        and not _forgets(lm)
    )


def checkpointing_kwargs(model: Any) -> dict[str, Any]:
    """For ``gradient_checkpointing_enable``, so that a checkpointed model can be packed."""
    return {"use_reentrant": False, "context_fn": _SameAttention(causal_lm(model).config.get_text_config())}


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence: (1, heads, N, width) in, (1, N, heads, width) out, as transformers has it.

    ``cu_seq_lens_q`` and ``max_length_q`` are those of ``PackedRow``. A mask, dropout, a window, a cap, a bias or a
    sink is refused; whatever else ``module`` passes is for other kernels.
    """
    unknown = {"attention_mask": attention_mask, "dropout": dropout or None}
    unknown |= {name: others.get(name) for name in ("sliding_window", "softcap", "s_aux", "position_bias")}
    for name, given in unknown.items():
        if given is not None:
            raise RocktokensError(
                f"{type(module).__name__} attends with {name}, which sequences laid end to end cannot have: set "
                "training.bf16 = false and models.dtype = 'float32', so that they are padded"
            )
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    heads = [x.squeeze(0).transpose(0, 1).to(dtype) for x in (query, key, value)]
    bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    attended_NHd = varlen_attn(*heads, *bounds, scale=scaling, window_size=(-1, 0), **FEWER_KEY_HEADS)
    return attended_NHd.unsqueeze(0), None


AttentionInterface.register(PACKED, packed_attention)


@dataclass(frozen=True, slots=True)
class _SameAttention:
    """``context_fn`` of ``torch.utils.checkpoint``: asked in the forward pass, it remembers the attention of then."""

    config: Any

    def __call__(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _Attending(self.config, self.config._attn_implementation)


class _Attending(AbstractContextManager[None]):
    """``attending``, as often as layers are computed again: once for every backward over one graph."""

    def __init__(self, config: Any, implementation: str) -> None:
        self._arguments = config, implementation
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(attending(*self._arguments))
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _forgets(lm: Any) -> bool:
    """Whether layers would be computed again with the model's own attention, after they were packed."""
    if not torch.is_grad_enabled():
        return False
    again = (module for module in lm.modules() if module.training and getattr(module, "gradient_checkpointing", False))
    functions = (getattr(module, "_gradient_checkpointing_func", None) for module in again)
    return not all(
        isinstance(getattr(function, "keywords", {}).get("context_fn"), _SameAttention)
        for function in functions
        if function is not None
    )
