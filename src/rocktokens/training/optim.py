"""The optimizer and its learning-rate schedule: AdamW of torch or bitsandbytes and transformers' schedules."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from rocktokens.config import TrainingSection
from rocktokens.errors import ConfigError

BLOCK_8BIT = 256
"""Moments in 8 bits that share a float32 scale."""


def make_optimizer(
    student: nn.Module, section: TrainingSection, masters: Mapping[nn.Parameter, nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, fused on a GPU; norms, biases and embeddings are not decayed.

    In place of a parameter that has one, its master copy is trained.
    """
    embeddings = {id(module.weight) for module in student.modules() if isinstance(module, nn.Embedding)}
    trainable = [parameter for parameter in student.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.ndim > 1 and id(parameter) not in embeddings]
    kept = {id(parameter) for parameter in decayed}
    others = [parameter for parameter in trainable if id(parameter) not in kept]
    known = masters or {}
    groups = [
        {"params": [known.get(own, own) for own in part], "weight_decay": decay}
        for part, decay in ((decayed, section.weight_decay), (others, 0.0))
        if part
    ]
    settings: dict[str, Any] = {
        "lr": section.learning_rate,
        "betas": (section.adam_beta1, section.adam_beta2),
        "eps": section.adam_epsilon,
    }
    if section.optim == "adamw_8bit":
        return _adamw_8bit(groups, [known.get(own, own) for own in trainable if id(own) in embeddings], settings)
    return torch.optim.AdamW(groups, **settings, fused=all(parameter.is_cuda for parameter in trainable) or None)


def _adamw_8bit(
    groups: list[dict[str, Any]], embeddings: list[nn.Parameter], settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """Make AdamW with moments in 8 bits, embeddings excepted, as transformers' Trainer does.

    What is excepted is kept in a manager of this optimizer's own: that of the library is one for the process and knows
    parameters by addresses, which others take over.
    """
    try:
        from bitsandbytes.optim import (  # pyright: ignore[reportMissingImports]
            AdamW8bit,
            GlobalOptimManager,
        )
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"training.optim = 'adamw_8bit' needs {error.name}, which is not installed: pip install 'rocktokens[bnb]'"
        ) from None
    optimizer = AdamW8bit(groups, **settings)
    optimizer.mng = GlobalOptimManager.__new__(GlobalOptimManager)
    optimizer.mng.initialize()
    optimizer.mng.override_config(embeddings, "optim_bits", 32)
    return optimizer


def moment_bytes(section: TrainingSection, trained: int, embeddings: int) -> float:
    """Count the bytes of Adam's two moments, for this many trained weights of which some are embeddings."""
    if section.optim == "adamw_torch":
        return 8.0 * trained
    return 8.0 * embeddings + (2 + 8 / BLOCK_8BIT) * (trained - embeddings)


def make_scheduler(optimizer: torch.optim.Optimizer, section: TrainingSection) -> LambdaLR:
    """Warm-up to the full rate at update ``warmup_steps``, then the configured decay over the remaining updates.

    A schedule of transformers that warms up begins with a rate of 0, which would waste the rollouts of the first
    update: here it is one step longer and begins at its second rate.
    """
    name = "constant_with_warmup" if section.lr_scheduler_type == "constant" else section.lr_scheduler_type
    skipped = int(section.warmup_steps > 0)
    steps = section.max_steps + skipped
    scheduler: Any = get_scheduler(name, optimizer, num_warmup_steps=section.warmup_steps, num_training_steps=steps)
    if skipped:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            scheduler.step()
    return scheduler


def restore_scheduler(scheduler: LRScheduler, state: dict[str, Any]) -> None:
    """Continue a schedule, the optimizer's current learning rates included."""
    scheduler.load_state_dict(state)
    _set_rates(scheduler, scheduler.get_last_lr())


def follow_schedule(scheduler: LambdaLR) -> None:
    """Take the learning rates of this schedule at its step: those that were restored may be of another length."""
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    _set_rates(scheduler, [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)])


def learning_rates(section: TrainingSection, count: int) -> list[float]:
    """List the rates of the first ``count`` updates."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=section.learning_rate)
    scheduler = make_scheduler(optimizer, section)
    skipped = scheduler.last_epoch
    return [section.learning_rate * scheduler.lr_lambdas[0](skipped + step) for step in range(count)]


def _set_rates(scheduler: LRScheduler, rates: list[Any]) -> None:
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
