"""The gradient of each group's part of one normalised loss (docs/method.md, section 5), one backward per group.

1. The loss of a batch is Σ_i kl_i / D over its response positions, D their number. Group A's part is the sum over its
   own positions with the same D, so the groups' gradients add up to the whole gradient.
2. The batch is cut into micro-batches; their gradients are added in float32 (float64 for a float64 student).
3. The student's trunk runs forward once per micro-batch. ``weighted_kl`` leaves out the positions of other groups
   before both LM heads, so all groups together cost as much head work as one pass over the batch. The trunk's graph is
   kept for the next group's backward.
4. Where a graph cannot be used twice, the student runs forward once per group instead: if its parameters are sharded by
   FSDP2, which gathers and frees them around every backward, and with reentrant gradient checkpointing. Micro-batches
   are then dealt out to the processes that share the parameters.

Dropout is off, so that the gradient is that of the loss as it is scored.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from rocktokens.config import Divergence
from rocktokens.gradients.blocks import place_among
from rocktokens.gradients.partition import split_by_rollout
from rocktokens.models.head import lm_head
from rocktokens.scoring.batch import RolloutBatch, collate, response_states, split_by_tokens
from rocktokens.scoring.divergence import weighted_kl
from rocktokens.types import Rollout

NO_GROUP = -1
Gradients = list[torch.Tensor | None]
"""Of one group, by parameter; None: the group's loss does not depend on it."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss between a student and a teacher."""

    student: Any
    teacher: Any
    divergence: Divergence = "reverse"
    temperature: float = 1.0
    tokens_per_chunk: int = 1024
    autocast_dtype: torch.dtype | None = None
    """Both forwards run under autocast to this; None: in the dtype of the weights."""

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that get a gradient: with LoRA, those of the adapters."""
        return [parameter for parameter in self.student.parameters() if parameter.requires_grad]

    @property
    def shares_forward(self) -> bool:
        """Whether one graph serves every group."""
        reentrant = any(
            getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {}).get("use_reentrant")
            for module in self.student.modules()
        )
        return not (reentrant or isinstance(self.student, FSDPModule))

    def states(self, model: Any, batch: RolloutBatch) -> torch.Tensor:
        """Compute the states each response token is predicted from."""
        with self.autocast(batch):
            return response_states(model, batch)

    def autocast(self, batch: RolloutBatch) -> torch.autocast:
        """Return the context that both forwards and the loss run in."""
        enabled = self.autocast_dtype is not None
        return torch.autocast(batch.token_ids_T.device.type, dtype=self.autocast_dtype, enabled=enabled)


@torch.enable_grad()
def group_gradients(
    objective: Objective, rollouts: Sequence[Rollout], group_T: np.ndarray, n_groups: int, tokens_per_forward: int
) -> list[Gradients]:
    """Compute the gradients of ``objective.trainable``, float32 at least, of every group's part of one batch's loss.

    They are the only thing of the size of the parameters that is kept. A group without positions has none.

    Args:
        objective: the loss.
        rollouts: the batch.
        group_T: the group of every response token, keyed by the token itself.
        n_groups: how many there are.
        tokens_per_forward: padded tokens of a micro-batch; the result does not depend on it.
    """
    parameters = objective.trainable
    sums: list[Gradients] = [[None] * len(parameters) for _ in range(n_groups)]
    by_group = _over_one_forward if objective.shares_forward else _over_own_forwards
    rank, ranks = place_among(parameters[0])
    with _without_dropout(objective.student), _without_dropout(objective.teacher):
        for indices, own_T in _micro_batches(rollouts, group_T, tokens_per_forward, rank, ranks):
            batch = collate([rollouts[index] for index in indices], pad_id=0, device=parameters[0].device)
            with torch.no_grad():
                h_t_TE = objective.states(objective.teacher, batch)
            group_losses = _GroupLosses(objective, batch, h_t_TE, own_T, len(group_T))
            for group, gradients in by_group(group_losses, parameters, range(n_groups), ranks):
                _add(sums[group], gradients)
    return sums


@dataclass(frozen=True, slots=True)
class _GroupLosses:
    """The parts of the loss of one micro-batch."""

    objective: Objective
    batch: RolloutBatch
    h_t_TE: torch.Tensor
    group_T: np.ndarray
    denominator: int

    def states(self) -> torch.Tensor:
        return self.objective.states(self.objective.student, self.batch)

    def loss(self, group: int, h_s_TD: torch.Tensor) -> torch.Tensor:
        own, batch, counted_T = self.objective, self.batch, torch.from_numpy(self.group_T == group)
        states = h_s_TD, lm_head(own.student), self.h_t_TE, lm_head(own.teacher), batch.token_ids_T
        settings = own.divergence, own.temperature, own.tokens_per_chunk
        with own.autocast(batch):
            return weighted_kl(*states, counted_T, self.denominator, *settings)[0]


def _over_one_forward(
    losses: _GroupLosses, parameters: list[nn.Parameter], groups: Iterable[int], _ranks: int
) -> Iterator[tuple[int, Sequence[torch.Tensor | None]]]:
    """Yield the gradients of each group that occurs; the graph lasts until the last of them."""
    h_s_TD = losses.states()
    present = [group for group in groups if group in losses.group_T]
    for group in present:
        loss = losses.loss(group, h_s_TD)
        yield group, torch.autograd.grad(loss, parameters, retain_graph=group != present[-1], allow_unused=True)


def _over_own_forwards(
    losses: _GroupLosses, parameters: list[nn.Parameter], groups: Iterable[int], ranks: int
) -> Iterator[tuple[int, Sequence[torch.Tensor | None]]]:
    """Yield the gradients of all groups, since other processes may hold positions of a group that this one lacks.

    FSDP2 averages over the processes, each of which has a part of the sum: hence the factor.
    """
    with _gradients_put_aside(parameters):
        for group in groups:
            loss = _inside_forward(
                losses.objective.student, lambda group=group: losses.loss(group, losses.states()) * ranks
            )
            loss.backward()
            yield group, [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None


def _inside_forward(module: Any, function: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Call a function as FSDP2 calls a forward of ``module``: with its parameters gathered. Otherwise just call it."""
    module.rocktokens_loss = function
    register_fsdp_forward_method(module, "rocktokens_loss")
    try:
        return module.rocktokens_loss()
    finally:
        del module.rocktokens_loss


def _micro_batches(
    rollouts: Sequence[Rollout], group_T: np.ndarray, tokens_per_forward: int, rank: int, ranks: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield indices of rollouts with the groups of their tokens, equally many on every rank.

    A rank that has run out goes on with tokens of no group, since all of them must run forward equally often.
    """
    by_rollout = split_by_rollout(group_T, rollouts)
    cuts = split_by_tokens(rollouts, tokens_per_forward)
    for turn in range(math.ceil(len(cuts) / ranks)):
        number = turn * ranks + rank
        indices = cuts[min(number, len(cuts) - 1)]
        own_T = np.concatenate([by_rollout[index] for index in indices])
        yield indices, own_T if number < len(cuts) else np.full_like(own_T, NO_GROUP)


def _add(sums: Gradients, gradients: Sequence[torch.Tensor | None]) -> None:
    """Add in float32 at least, never in place: autograd may hand out one tensor as the gradient of two parameters."""
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            before = sums[index]
            sums[index] = wide if before is None else before + wide


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode, except layers that checkpoint their gradients, for which transformers asks for train mode.

    Only such a layer itself is in train mode; the dropout and attention inside it are not.
    """
    modes = {module: module.training for module in model.modules()}
    for module in modes:
        module.training = bool(getattr(module, "gradient_checkpointing", False))
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _gradients_put_aside(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Clear ``.grad`` inside, and restore it afterwards."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
