"""Where the gradient goes in parameter space, and where the optimizer's step goes (docs/method.md, section 5).

1. The rollouts are cut into batches of whole prompts, each with a loss of its own: Σ_i kl_i / D over its D tokens.
2. For every batch, the gradient of each group's part of that loss (``backward``).
3. Their inner products by block of the model (``blocks``); the gradients themselves are let go.
4. With the optimizer's settings and state, the same for its next step on that batch (``adam``).
5. Norms, cosines, shares, rates and their intervals over batches follow from the inner products (``shares``).

Memory: the student's graph, and one float32 gradient of the trainable parameters per group.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rocktokens.config import Divergence
from rocktokens.errors import NonFiniteLossError, RocktokensError
from rocktokens.gradients.adam import AdamSettings, clip_factor, moments_of, step_parts
from rocktokens.gradients.backward import Gradients, Objective, group_gradients
from rocktokens.gradients.blocks import BlockGrams, local, local_like, ordered, trainable_blocks
from rocktokens.gradients.partition import Partition, by_type, prompt_batches, split_by_rollout
from rocktokens.gradients.shares import OTHER_PARTS, GradientShares
from rocktokens.models.load import LoadedModel
from rocktokens.types import Rollout


def gradient_shares(
    student: Any,
    teacher: Any,
    rollouts: Sequence[Rollout],
    groups: Mapping[str, Collection[int]] | Partition,
    *,
    batches: int = 8,
    adam: AdamSettings | None = None,
    optimizer_state: Mapping[str, torch.Tensor] | None = None,
    divergence: Divergence = "reverse",
    temperature: float = 1.0,
    tokens_per_chunk: int = 1024,
    tokens_per_forward: int = 4096,
    autocast_dtype: torch.dtype | None = None,
    on_done: Callable[[int], None] | None = None,
) -> GradientShares:
    """Measure how much of the gradient, and of Adam's next step, comes from each group of positions.

    Example: ``gradient_shares(student, teacher, rollouts, {"rocks": rocks.ids}).gradient().groups["rocks"].share``.

    Args:
        student: A ``LoadedModel`` or a transformers causal LM, PEFT-wrapped or sharded by FSDP2 or not. Only its
            trainable parameters count. Neither its weights, its gradients nor its mode are changed.
        teacher: Likewise, whole on every device, over the same vocabulary and on the student's device.
        rollouts: What the student wrote; where it is sharded, every process gives the same.
        groups: Sets of token ids by name (the other tokens are the group ``rest``), or any partition of the positions.
        batches: How many the rollouts are cut into. Intervals are over batches, so they need 2 at least.
        adam: The optimizer's settings at its next step; None leaves its step out.
        optimizer_state: Its state in the form of a checkpoint's ``optimizer.safetensors``; None or empty: before the
            first step.
        divergence: What the loss is the mean of.
        temperature: Of both softmaxes.
        tokens_per_chunk: Positions whose logits are in memory at once.
        tokens_per_forward: Padded tokens of one forward with gradient.
        autocast_dtype: Run both models under autocast to this, as training on a GPU does with ``torch.bfloat16``.
        on_done: Called after each batch with its number of rollouts.
    """
    student, teacher = (each.model if isinstance(each, LoadedModel) else each for each in (student, teacher))
    objective = Objective(student, teacher, divergence, temperature, tokens_per_chunk, autocast_dtype)
    _require_measurable(objective)
    partition = groups if isinstance(groups, Partition) else by_type(rollouts, groups)
    partition.require_fit(rollouts)
    trainable = _Trainable.of(student)
    state = optimizer_state or {}
    if state and adam is None:
        raise RocktokensError("optimizer_state is given without adam: give the optimizer's AdamSettings too")
    group_of_rollout = split_by_rollout(partition.group_T, rollouts)
    tokens, gradient_grams, step_grams = [], [], []
    for indices in prompt_batches(rollouts, batches):
        own, group_T = [rollouts[i] for i in indices], np.concatenate([group_of_rollout[i] for i in indices])
        gradient_gram, step_gram = trainable.grams(
            group_gradients(objective, own, group_T, len(partition.names), tokens_per_forward), adam, state
        )
        tokens.append(np.bincount(group_T, minlength=len(partition.names)))
        gradient_grams.append(gradient_gram)
        step_grams.append(step_gram)
        if on_done is not None:
            on_done(len(indices))
    return GradientShares(
        groups=list(partition.names),
        blocks=trainable.blocks,
        tokens_NA=np.stack(tokens),
        gradient_gram_NBAA=np.stack(gradient_grams),
        step_gram_NBPP=None if adam is None else np.stack(step_grams),
    )


@dataclass(frozen=True, slots=True)
class _Trainable:
    """The parameters that are measured, by name, and the block of each."""

    parameters: dict[str, torch.Tensor]
    block_of: dict[str, str]

    @classmethod
    def of(cls, student: Any) -> Self:
        block_of = trainable_blocks(student)
        return cls({name: each for name, each in student.named_parameters() if name in block_of}, block_of)

    @property
    def blocks(self) -> list[str]:
        return ordered(set(self.block_of.values()))

    def grams(
        self, gradients: list[Gradients], adam: AdamSettings | None, state: Mapping[str, torch.Tensor]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return inner products of the groups' gradients (B, A, A), and of the parts of Adam's next step, if any."""
        grams = BlockGrams(self.blocks, len(gradients))
        for name, parameter, own in self._with_gradients(gradients):
            grams.add(self.block_of[name], parameter, lambda here, own=own: _rows(own, here))
        gradient_gram = grams.total()
        squared_norm = float(gradient_gram.sum())
        if not math.isfinite(squared_norm):
            raise NonFiniteLossError(
                f"the squared norm of the gradient is {squared_norm}: load the models in float32 (models.dtype)"
            )
        if adam is None:
            return gradient_gram, None
        clip = clip_factor(math.sqrt(max(squared_norm, 0.0)), adam.max_grad_norm)
        return gradient_gram, self._step_gram(gradients, adam, state, clip)

    def _step_gram(
        self, gradients: list[Gradients], adam: AdamSettings, state: Mapping[str, torch.Tensor], clip: float
    ) -> np.ndarray:
        """float64 (B, A + 2, A + 2)."""
        grams = BlockGrams(self.blocks, len(gradients) + len(OTHER_PARTS))
        for name, parameter, own in self._with_gradients(gradients):
            value, moments = local(parameter), moments_of(state, name, parameter)
            moments = moments and moments.map(lambda whole, parameter=parameter: local_like(whole, parameter))
            decay = adam.weight_decay.get(name, 0.0)

            def parts(here: slice, own=own, value=value, moments=moments, decay=decay) -> torch.Tensor:
                cut = moments and moments.map(lambda each: each[here].double())
                return step_parts(_rows(own, here), value[here].double(), cut, adam, decay, clip)

            grams.add(self.block_of[name], parameter, parts)
        return grams.total()

    def _with_gradients(
        self, gradients: list[Gradients]
    ) -> Iterator[tuple[str, torch.Tensor, list[torch.Tensor | None]]]:
        """Yield each parameter with its local gradients by group; skip those without, as optimizers do."""
        for (name, parameter), *own in zip(self.parameters.items(), *gradients, strict=True):
            if any(gradient is not None for gradient in own):
                yield name, parameter, [None if gradient is None else local(gradient) for gradient in own]


def _rows(gradients: list[torch.Tensor | None], here: slice) -> torch.Tensor:
    """float64 (A, n): a slice of every group's gradient, zeros for a group that has none."""
    some = next(gradient for gradient in gradients if gradient is not None)[here].double()
    return torch.stack([torch.zeros_like(some) if each is None else each[here].double() for each in gradients])


def _require_measurable(objective: Objective) -> None:
    """Refuse a pair whose gradients cannot be measured."""
    student, teacher = objective.student, objective.teacher
    if not objective.trainable:
        raise RocktokensError("no parameter of the student requires a gradient: call student.requires_grad_(True)")
    if student.device != teacher.device:
        raise RocktokensError(
            f"the student is on {student.device}, the teacher on {teacher.device}: load both on one device"
        )
    student_is_sharded, teacher_is_sharded = (
        any(isinstance(parameter, DTensor) for parameter in model.parameters()) for model in (student, teacher)
    )
    if student_is_sharded and not isinstance(student, FSDPModule):
        raise RocktokensError("parts of the student are sharded, but not the student: call fully_shard on it, last")
    if teacher_is_sharded:
        raise RocktokensError("the teacher's parameters are sharded: load it whole on every device")
