"""The optimizer and its learning-rate schedule: AdamW and transformers' schedules, nothing of our own."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from rocktokens.config import TrainingSection


def make_optimizer(student: nn.Module, section: TrainingSection) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, fused on a GPU; norms, biases and embeddings are not decayed."""
    embeddings = {id(module.weight) for module in student.modules() if isinstance(module, nn.Embedding)}
    trainable = [parameter for parameter in student.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.ndim > 1 and id(parameter) not in embeddings]
    kept = {id(parameter) for parameter in decayed}
    groups = [
        {"params": decayed, "weight_decay": section.weight_decay},
        {"params": [parameter for parameter in trainable if id(parameter) not in kept], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=section.learning_rate,
        betas=(section.adam_beta1, section.adam_beta2),
        eps=section.adam_epsilon,
        fused=all(parameter.is_cuda for parameter in trainable) or None,
    )


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
