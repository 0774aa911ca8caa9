"""Norms, rotary embeddings and gates of a model by one kernel each, and fewer products, for forwards without gradient.

transformers computes an RMS norm in seven kernels, a rotary embedding in eight and the gate of an MLP in two, which is
most of the time a packed replay spends outside its matrix products, and most of the kernels of a decoding step.
``quick_layers`` puts the kernels of ``layer_kernels.py`` in their place:

1. A class of norms or of MLPs with its settings, or the ``apply_rotary_pos_emb`` of a model's Python module, is tried
   once on random numbers: only what the kernel reproduces, roundings included, is replaced. Gemma's 1 + weight, norms
   that round once, interleaved rotations and gates that are not SiLU are found different and stay.
2. Where weights lie side by side (``projections.py``), an attention's first three products are one, and an MLP's first
   two. The attention's class is tried first: it must ask all three with its own input, and take rows with gaps.
3. What is replaced is ``forward`` on each norm, MLP, attention and projection, and the name in the Python module. All
   are back when the context ends.
4. A call that is not what the kernels are for (a gradient, another dtype or device, other arguments) goes to the
   replaced function.

The result is that of the model as it is, but for the last bit of an exponential and the order in which a norm adds its
squares and a product its terms.
https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py
"""

import copy
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from rocktokens.models.head import causal_lm
from rocktokens.models.kernels import HALF, has_triton, on_gpu, power_of_2
from rocktokens.models.projections import ATTENTION_INPUTS, MLP_INPUTS, SharedProduct

ROTARY = "apply_rotary_pos_emb"
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
MAX_WIDTH = 16_384
"""Of a norm: a program holds a whole row."""
AT_ONCE = 2048
"""Numbers of short rows, or of half heads, that a program holds at once."""
NUMBERS_PER_WARP, FEWEST_WARPS, MOST_WARPS = 512, 4, 16
SAME_SHARE = 0.99
"""Of the numbers in a trial that must have the same bits. Adding squares in another order changes less than one in ten
thousand; a rounding more or less changes one in four."""

_trials: dict[Hashable, bool] = {}


@contextmanager
def quick_layers(model: Any) -> Iterator[None]:
    """While open, what the kernels reproduce runs by them; not where gradients are made."""
    lm = causal_lm(model)
    with ExitStack() as replaced:
        if not torch.is_grad_enabled() and on_gpu(lm) and lm.dtype in HALF and has_triton():
            for layer, forward in list(_replacements(lm)):
                layer.forward = forward
                replaced.callback(vars(layer).pop, "forward", None)
            for name in sorted({type(module).__module__ for module in lm.modules()}):
                own = getattr(sys.modules.get(name), ROTARY, None)
                if own is not None and _passes_as_rotary(own, lm):
                    setattr(sys.modules[name], ROTARY, _QuickRotary(own))
                    replaced.callback(setattr, sys.modules[name], ROTARY, own)
        yield


def normed(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """The RMS norm over the last dimension of (…, D), as LlamaRMSNorm has it.

    D is ``MAX_WIDTH`` at most; the weight has the dtype of x, which is copied first unless its tokens are evenly spaced
    and so are the heads of each.
    """
    from rocktokens.models import layer_kernels

    x_THD = x[None] if x.ndim == 2 else x.flatten(0, -3)
    x_THD = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    distance = _distance(x_THD)
    spacing = (x_THD.shape[1], *x_THD.stride()[:2]) if distance is None else (1, distance, 0)
    n_rows, width = x_THD.shape[0] * x_THD.shape[1], x_THD.shape[2]
    out_RD = torch.empty((n_rows, width), dtype=x.dtype, device=x.device)
    block = power_of_2(width)
    rows = max(1, AT_ONCE // block)
    sizes = {"WIDTH": width, "ROWS": rows, "BLOCK": block, "num_warps": _warps(rows * block)}
    if n_rows:
        rms_norm: Any = layer_kernels.rms_norm
        with torch.cuda.device_of(x):
            rms_norm[(math.ceil(n_rows / rows),)](
                x_THD, *spacing, weight_D, out_RD, n_rows, eps, **sizes, enable_fp_fusion=False
            )
    return out_RD.view(x.shape)


def rotated(
    q_BHLd: torch.Tensor, k_BGLd: torch.Tensor, cos_BLd: torch.Tensor, sin_BLd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotary embedding of Llama, in which the first half of a head turns with the second.

    The B · L tokens lie at even distances (``_distance``), the numbers of a head side by side; all have one dtype. The
    results lie in memory as a projection's do, heads of a token side by side.
    """
    from rocktokens.models import layer_kernels

    q_out_BHLd, k_out_BGLd = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q_BHLd, k_BGLd))
    rows, _, length, width = q_BHLd.shape
    block = power_of_2(width // 2)
    at_once = [min(power_of_2(x.shape[1]), max(1, AT_ONCE // block)) for x in (q_BHLd, k_BGLd)]
    if rows * length:
        rotate: Any = layer_kernels.rotate
        with torch.cuda.device_of(q_BHLd):
            rotate[(rows * length,)](
                *_strided(q_BHLd),
                *_strided(q_out_BHLd),
                *_strided(k_BGLd),
                *_strided(k_out_BGLd),
                *(cos_BLd, _distance(cos_BLd)),
                *(sin_BLd, _distance(sin_BLd)),
                Q_HEADS=q_BHLd.shape[1],
                Q_AT_ONCE=at_once[0],
                K_HEADS=k_BGLd.shape[1],
                K_AT_ONCE=at_once[1],
                HALF=width // 2,
                BLOCK=block,
                num_warps=_warps(max(at_once) * block),
                enable_fp_fusion=False,
            )
    return q_out_BHLd, k_out_BGLd


def gated(x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The product u silu(x) of two tensors of one shape and one half-width dtype, copied first unless ``_in_rows``."""
    from rocktokens.models import layer_kernels

    out = x.new_empty(x.shape)
    if x.numel():
        width = x.shape[-1]
        x_RW, u_RW = ((own if _in_rows(own) else own.contiguous()).reshape(-1, width) for own in (x, u))
        gate: Any = layer_kernels.gate
        with torch.cuda.device_of(x):
            gate[(math.ceil(x.numel() / AT_ONCE),)](
                *(x_RW, x_RW.stride(0)),
                *(u_RW, u_RW.stride(0)),
                *(out, x.numel()),
                WIDTH=width,
                BLOCK=AT_ONCE,
                num_warps=_warps(AT_ONCE),
            )
    return out


def _in_rows(x: torch.Tensor) -> bool:
    """Whether the numbers of each row lie side by side, and the rows at even distances."""
    steps = zip(x.stride(), x.stride()[1:-1], x.shape[1:-1], strict=False)
    is_even = all(outer == inner * length for outer, inner, length in steps)
    return x.is_contiguous() or (x.stride(-1) == 1 and is_even)


def _strided(x_BHLd: torch.Tensor) -> tuple[torch.Tensor, int, int | None]:
    """The heads, and how far apart heads and tokens are."""
    return x_BHLd, x_BHLd.stride(1), _distance(x_BHLd)


def _distance(x: torch.Tensor) -> int | None:
    """How far apart the tokens of (B, …, L, d) are, row after row; None where that differs from token to token."""
    rows, length = x.shape[0], x.shape[-2]
    if length == 1:
        return x.stride(0)
    return x.stride(-2) if rows == 1 or x.stride(0) == length * x.stride(-2) else None


def _warps(numbers: int) -> int:
    return min(MOST_WARPS, max(FEWEST_WARPS, numbers // NUMBERS_PER_WARP))


# What is replaced


def _replacements(lm: Any) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Each module that is to run in another way, and its forward meanwhile."""
    for module in lm.modules():
        if _is_norm(module) and _passes_as_norm(module):
            yield module, _quick_norm(module)
        elif _is_mlp(module) and _passes_as_mlp(module, lm):
            product = SharedProduct.of(module, MLP_INPUTS)
            yield module, _quick_mlp(module, product or nullcontext())
            yield from product.forwards() if product else ()
        elif (product := SharedProduct.of(module, ATTENTION_INPUTS)) and _passes_as_attention(module, product, lm):
            yield module, _quick_attention(module, product)
            yield from product.forwards()


def _is_norm(module: Any) -> bool:
    """Whether it has the parts of one, and a forward that has not been replaced."""
    weight = module._parameters.get("weight")
    has_only_a_weight = len(module._parameters) == 1 and not module._buffers and not module._modules
    return (
        type(module).__name__.endswith("RMSNorm")
        and "forward" not in vars(module)
        and has_only_a_weight
        and weight is not None
        and weight.ndim == 1
        and 0 < len(weight) <= MAX_WIDTH
        and weight.dtype in HALF
        and on_gpu(weight)
        and _eps(module) is not None
    )


def _eps(norm: Any) -> Any:
    """What the norm adds to the mean square; None if it does not say."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _quick_norm(norm: Any) -> Callable[..., torch.Tensor]:
    """A forward for one norm."""
    own, eps = norm.forward, _eps(norm)

    def forward(*arguments: Any, **named: Any) -> torch.Tensor:
        if named or len(arguments) != 1:
            return own(*arguments, **named)
        x, weight_D = arguments[0], norm.weight  # sharded weights may be whole only by now, or not at all
        is_plain = _take(x, weight_D) and x.ndim > 1 and x.shape[-1:] == weight_D.shape
        return normed(x, weight_D, eps) if is_plain else own(x)

    return forward


def _is_mlp(module: Any) -> bool:
    """Whether it has the parts of one, a forward that has not been replaced, and an activation without hooks."""
    if module._modules.keys() != MLP_PARTS or module._parameters or module._buffers or "forward" in vars(module):
        return False
    activation = module.act_fn
    is_watched = activation._forward_hooks or activation._forward_pre_hooks or "forward" in vars(activation)
    return not is_watched


def _quick_mlp(mlp: Any, product: AbstractContextManager[None]) -> Callable[..., torch.Tensor]:
    """A forward for one MLP; ``product`` computes its first two products as one, or does nothing."""
    own = mlp.forward

    def forward(*arguments: Any, **named: Any) -> torch.Tensor:
        if named or len(arguments) != 1 or not _take(arguments[0]):
            return own(*arguments, **named)
        with product:
            x, u = mlp.gate_proj(arguments[0]), mlp.up_proj(arguments[0])
        is_plain = _take(x, u) and x.shape == u.shape and _in_rows(x) and _in_rows(u)
        return mlp.down_proj(gated(x, u) if is_plain else mlp.act_fn(x) * u)

    return forward


def _quick_attention(attention: Any, product: SharedProduct) -> Callable[..., Any]:
    """A forward for one attention, which is its own with one product in place of three."""
    own = attention.forward

    @wraps(own)
    def forward(*arguments: Any, **named: Any) -> Any:
        with product:
            return own(*arguments, **named)

    return forward


@dataclass(frozen=True, slots=True)
class _QuickRotary:
    """Stands in for the function ``own``; a type, so that a second context knows the stand-in of the first."""

    own: Callable[..., Any]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if named or len(arguments) != 4 or not _takes_rotary(*arguments):
            return self.own(*arguments, **named)
        return rotated(*arguments)


def _takes_rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the kernel is for this call: tokens at even distances, and angles for the whole width of each's heads."""
    return (
        _take(q, k, cos, sin)
        and (q.ndim, k.ndim, cos.ndim) == (4, 4, 3)
        and cos.shape == sin.shape == (len(q), *q.shape[2:])
        and k.shape == (len(q), k.shape[1], *q.shape[2:])
        and q.shape[-1] % 2 == 0
        and all(x.stride(-1) == 1 and _distance(x) is not None for x in (q, k, cos, sin))
    )


def _take(*tensors: torch.Tensor) -> bool:
    """Whether these are plain tensors of one half-width dtype on a GPU, and no gradient is wanted."""
    dtype = tensors[0].dtype
    return (
        not torch.is_grad_enabled()
        and dtype in HALF
        and all(type(x) in (torch.Tensor, torch.nn.Parameter) and x.dtype == dtype and on_gpu(x) for x in tensors)
    )


# Trials


def _passes_as_norm(norm: Any) -> bool:
    """Whether norms of this class and with these settings compute what the kernel does."""
    cls = type(norm)
    return _tried((cls, cls.forward, norm.weight.dtype, _settings(norm)), lambda: _try_norm(norm))


def _settings(module: torch.nn.Module) -> Hashable:
    """The plain values among a module's attributes, whether it is trained among them, but not which layer it is of."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}
    return tuple((name, value) for name, value in plain.items() if name != "layer_idx")


def _try_norm(norm: Any) -> bool:
    """Compare on rows of all sizes, some so small that eps decides, and a random weight."""
    draw = _draws(norm.weight.device, norm.weight.dtype)
    width = len(norm.weight)
    weight_D, x_RD = draw(width), draw(8, width, scale=torch.logspace(-4, 1, 8).unsqueeze(1))
    twin = copy.copy(norm)
    vars(twin)["_parameters"] = {"weight": weight_D}
    theirs = _or_none(lambda: type(norm).forward(twin, x_RD))
    return _same([normed(x_RD, weight_D, _eps(norm))], [theirs])


def _passes_as_mlp(mlp: Any, lm: Any) -> bool:
    """Whether MLPs of this class, with these settings and this activation, compute what the kernel does."""
    parts = [(type(part), type(part).forward, _settings(part)) for part in (mlp, mlp.act_fn)]
    return _tried((*parts, lm.dtype), lambda: _try_mlp(mlp, lm))


def _try_mlp(mlp: Any, lm: Any) -> bool:
    """Compare on random numbers, small and huge, in place of what the first two matrices give, and without the last."""
    draw = _draws(lm.device, lm.dtype)
    scale = torch.logspace(-1, 3, 8).unsqueeze(1)
    asked, x, u = draw(8, 64), draw(8, 64, scale=scale), draw(8, 64, scale=scale.flip(0))
    twin, nothing = copy.copy(mlp), torch.nn.Identity()
    gates, ups = _Gives(x, asked), _Gives(u, asked)
    vars(twin)["_modules"] = {"gate_proj": gates, "up_proj": ups, "down_proj": nothing, "act_fn": mlp.act_fn}
    return _same([gated(x, u)], [_or_none(lambda: type(mlp).forward(twin, asked))])


def _passes_as_attention(attention: Any, product: SharedProduct, lm: Any) -> bool:
    """Whether attentions of this class and with these settings take the parts of one product for three products."""
    cls, widths = type(attention), tuple(layer.out_features for layer in product.layers)
    is_own = "forward" not in vars(attention)
    key = (cls, cls.forward, lm.dtype, widths, _settings(attention))
    return is_own and _tried(key, lambda: _or_none(lambda: _try_attention(attention, widths, lm)) or False)


def _try_attention(attention: Any, widths: Sequence[int], lm: Any) -> bool:
    """Compare, on random numbers for what its matrices give, rows of all of them with rows of each."""
    draw = _draws(lm.device, lm.dtype)
    asked, outputs = draw(2, 3, 64), draw(2, 3, sum(widths))
    twin, config = copy.copy(attention), copy.deepcopy(attention.config)
    config._attn_implementation = "eager"  # others may need what only a whole model gives
    vars(twin).update(config=config, training=False)
    angles = draw(2, 3, attention.head_dim), draw(2, 3, attention.head_dim)

    def attended(parts: Iterable[torch.Tensor]) -> torch.Tensor:
        given = {name: _Gives(part, asked) for name, part in zip(ATTENTION_INPUTS, parts, strict=True)}
        vars(twin)["_modules"] = {name: torch.nn.Identity() for name in attention._modules} | given
        return type(attention).forward(twin, hidden_states=asked, position_embeddings=angles, attention_mask=None)[0]

    together, apart = outputs.clone().split(list(widths), dim=-1), outputs.split(list(widths), dim=-1)
    ours, theirs = attended(together), attended([part.contiguous() for part in apart])
    return (ours - theirs).abs().max().item() <= 4 * torch.finfo(lm.dtype).eps * theirs.abs().max().item()


class _Gives(torch.nn.Module):
    """Gives one thing when it is asked with another as it is, and nothing that could be mistaken for it otherwise."""

    def __init__(self, given: torch.Tensor, asked: torch.Tensor) -> None:
        super().__init__()
        self.given, self.asked = given, asked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.given if x is self.asked else torch.full_like(self.given, torch.nan)


def _passes_as_rotary(function: Any, lm: Any) -> bool:
    """Whether a function computes what the kernel does, and has not been replaced already."""
    is_own = not isinstance(function, _QuickRotary)
    return is_own and _tried((function, lm.dtype), lambda: _try_rotary(function, lm))


def _try_rotary(function: Callable[..., Any], lm: Any) -> bool:
    """Compare on random heads and angles, whose two halves differ as those of no model do, in one row and in more."""
    draw = _draws(lm.device, lm.dtype)

    def agree(rows: int, length: int) -> bool:
        q, k = (draw(rows, length, heads, 64).transpose(1, 2) for heads in (4, 2))
        cos, sin = draw(rows, length, 64), draw(rows, length, 64)
        theirs = _or_none(lambda: function(q, k, cos, sin))
        return isinstance(theirs, tuple) and len(theirs) == 2 and _same(rotated(q, k, cos, sin), theirs)

    return agree(1, 8) and agree(8, 1) and agree(2, 4)


def _tried(key: Hashable, trial: Callable[[], bool]) -> bool:
    """What the trial says, or said the first time."""
    if key not in _trials:
        _trials[key] = trial()
    return _trials[key]


def _draws(device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Random numbers that are not centred, without touching the generators that others draw from."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        return ((torch.randn(shape, generator=generator) + 0.5) * scale).to(device, dtype)

    return draw


def _or_none(call: Callable[[], Any]) -> Any:
    """What a model's function returns, None if it refuses such arguments in whatever way."""
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return None


def _same(ours: Iterable[torch.Tensor], theirs: Iterable[Any]) -> bool:
    """Whether all have the same bits, but for a few that were rounded to the neighbour, however small."""
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(b, torch.Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        info = torch.finfo(a.dtype)
        is_close = torch.allclose(a, b, rtol=2 * info.eps, atol=info.eps * info.smallest_normal)
        if not is_close or (a == b).float().mean().item() < SAME_SHARE:
            return False
    return True
