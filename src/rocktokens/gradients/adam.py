"""The next step of AdamW, taken apart by the groups whose gradients it is made of (docs/method.md, section 5).

With m, v the moments after t − 1 steps, g = clip · Σ_A g_A the clipped gradient of the batch, and, element by element,

    v_t = β₂ v + (1 − β₂) g²,    s = −lr / (1 − β₁^t) / (√(v_t / (1 − β₂^t)) + ε),

the change of a parameter θ is exactly a sum of

    u_A        = s (1 − β₁) clip · g_A      for every group A
    momentum   = s β₁ m                     what earlier batches left
    decay      = −lr · weight_decay · θ

1. v_t includes the whole gradient of this batch, since that is what the optimizer divides by.
2. s (1 − β₁) clip is the same constant times 1 / (√v̂ + ε) for all elements of parameters that have taken equally many
   steps, which is all of them as a rule. So shares, cosines and relative rates of the u_A are also those of
   the method's g_A / (√v̂ + ε): one computation gives both.
3. Without moments (before the first step) t is 1 and m = v = 0.

See https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html for the algorithm.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import nn

from rocktokens.errors import RocktokensError

_CLIP_EPSILON = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm."""


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """What the next step depends on besides the moments."""

    learning_rate: float
    """At this step, as the schedule has it."""
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: Mapping[str, float] = field(default_factory=dict)
    """By name of the parameter; those that are not named are not decayed."""
    max_grad_norm: float | None = None
    """The whole gradient is scaled down to this norm; None: never."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, student: nn.Module, max_grad_norm: float | None) -> Self:
        """Read the settings of a torch AdamW that trains ``student``."""
        names = {id(parameter): name for name, parameter in student.named_parameters()}
        groups = optimizer.param_groups
        known = type(optimizer) is torch.optim.AdamW and not any(group["amsgrad"] for group in groups)
        settings = {(float(group["lr"]), *group["betas"], group["eps"]) for group in groups if known}
        if len(settings) != 1:
            raise RocktokensError(
                f"the step of this {type(optimizer).__name__} is not known here: use a torch.optim.AdamW without "
                "amsgrad whose parameter groups differ in nothing but weight_decay"
            )
        learning_rate, beta1, beta2, epsilon = settings.pop()
        decay = {names[id(p)]: float(group["weight_decay"]) for group in groups for p in group["params"]}
        return cls(learning_rate, beta1, beta2, epsilon, decay, max_grad_norm)


@dataclass(frozen=True, slots=True)
class Moments:
    """Adam's state of one parameter."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: float
    """Steps taken so far."""


def moments_of(optimizer_state: Mapping[str, torch.Tensor], name: str, parameter: torch.Tensor) -> Moments | None:
    """Read Adam's state of a parameter that has a gradient from the flat form ``<parameter>/<state>`` of a checkpoint.

    Returns:
        None where ``optimizer_state`` is empty: no step was taken yet.
    """
    if not optimizer_state:
        return None
    exp_avg, exp_avg_sq, step = (optimizer_state.get(f"{name}/{key}") for key in ("exp_avg", "exp_avg_sq", "step"))
    if exp_avg is None or exp_avg_sq is None or step is None:
        raise RocktokensError(
            f"optimizer_state has no exp_avg, exp_avg_sq and step of parameter {name!r}: give the state of the "
            "checkpoint the student was loaded from, with the same parameters trainable"
        )
    if exp_avg.shape != parameter.shape or exp_avg_sq.shape != parameter.shape:
        raise RocktokensError(
            f"optimizer_state has moments of shape {tuple(exp_avg.shape)} for parameter {name!r} of shape "
            f"{tuple(parameter.shape)}: give the state of the checkpoint the student was loaded from"
        )
    return Moments(exp_avg, exp_avg_sq, float(step))


def clip_factor(norm: float, max_grad_norm: float | None) -> float:
    """Return the factor torch.nn.utils.clip_grad_norm_ applies to a gradient of this norm."""
    return 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + _CLIP_EPSILON))


def step_parts(
    gradients_An: torch.Tensor,
    value_n: torch.Tensor,
    moments: Moments | None,
    settings: AdamSettings,
    weight_decay: float,
    clip: float,
) -> torch.Tensor:
    """Split the next step of n elements of a parameter by where it comes from.

    Args:
        gradients_An: of each group, before clipping.
        value_n: the elements.
        moments: their state, as (n,) tensors; None before the first step.
        settings: of the optimizer.
        weight_decay: of this parameter.
        clip: the factor of the whole gradient.

    Returns:
        (A + 2, n): a row for each group, then momentum, then weight decay; their sum is what AdamW adds to ``value_n``.
    """
    exp_avg_n, exp_avg_sq_n, step = torch.zeros_like(value_n), torch.zeros_like(value_n), 1.0
    if moments is not None:
        exp_avg_n, exp_avg_sq_n, step = moments.exp_avg, moments.exp_avg_sq, moments.step + 1
    clipped_An = gradients_An * clip
    second_n = settings.beta2 * exp_avg_sq_n + (1 - settings.beta2) * clipped_An.sum(dim=0) ** 2
    root_n = (second_n / (1 - settings.beta2**step)).sqrt() + settings.epsilon
    scale_n = -settings.learning_rate / (1 - settings.beta1**step) / root_n
    own_An = (1 - settings.beta1) * clipped_An * scale_n
    momentum_n = settings.beta1 * exp_avg_n * scale_n
    decay_n = -settings.learning_rate * weight_decay * value_n
    return torch.cat([own_An, momentum_n[None], decay_n[None]])
