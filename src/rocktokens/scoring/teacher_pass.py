"""The teacher's half of a replay, made once for all checkpoints of a probe set.

1. Rollouts are grouped by length, so that little of a batch is padding; where the teacher needs none (``packed.py``), a
   group has as many rollouts as fit in ``tokens_per_batch`` without. Neither the groups nor the teacher's hidden states
   depend on the student; one that must pad after a teacher that need not does so in pieces.
2. The first walk over a ``TeacherPass`` forces its groups through the teacher. The states are kept where they predict a
   response token, and nowhere else: on the models' GPU while they fit in ``DEVICE_SHARE`` of the memory that is free
   there once both models are loaded, then in ``HOST_SHARE`` of the free host memory (pinned, so that they come back
   without the host waiting). Models on the CPU have the latter alone. The batches, about 100 bytes per token, stay
   beside the states.
3. What fits in neither is computed again in every walk. The states are the same in all three cases.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from rocktokens.models.load import LoadedModel
from rocktokens.scoring.batch import RolloutBatch, collate, response_states, split_by_tokens
from rocktokens.scoring.packed import packs
from rocktokens.types import Rollout

DEVICE_SHARE = 0.4
HOST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class TeacherGroup:
    """Rollouts that go through a model together, after they went through the teacher."""

    indices: list[int]
    """Which rollouts of the pass these are."""
    batch: RolloutBatch
    h_t_TE: torch.Tensor
    """The teacher's states at their response tokens."""


class StatesRoom:
    """How many bytes of states may still be kept, on a GPU and in host memory; shared by the passes of a probe set.

    Without numbers the room is a share of the memory that is free when the first states ask for it.
    """

    def __init__(self, on_device: int | None = None, on_host: int | None = None) -> None:
        self._on_device, self._on_host = on_device, on_host

    def keep(self, h_TE: torch.Tensor) -> torch.Tensor | None:
        """Return the states where they can stay, None if there is no room for them."""
        if self._on_device is None:
            self._on_device = int(DEVICE_SHARE * free_on_gpu(h_TE.device)) if h_TE.is_cuda else 0
        if self._on_host is None:
            self._on_host = int(HOST_SHARE * psutil.virtual_memory().available)
        if h_TE.is_cuda and h_TE.nbytes <= self._on_device:
            self._on_device -= h_TE.nbytes
            return h_TE
        pinned = 1 << max(0, h_TE.nbytes - 1).bit_length()  # torch rounds up to a power of two
        taken = pinned if h_TE.is_cuda else h_TE.nbytes
        if taken <= self._on_host:
            self._on_host -= taken
            return to_host(h_TE)
        return None


class TeacherPass:
    """Rollouts forced through the teacher, group after group; walked over once for every student.

    The teacher is a ``LoadedModel`` or a transformers causal LM; ``tokens_per_batch`` counts padding, if there is any.
    ``room`` is where states are kept between walks; None for a single walk, which keeps nothing.
    """

    def __init__(
        self, teacher: Any, rollouts: Sequence[Rollout], tokens_per_batch: int = 16384, room: StatesRoom | None = None
    ) -> None:
        self.teacher = bare_model(teacher)
        self.rollouts = rollouts
        self._tokens_per_batch = tokens_per_batch
        self._groups = split_by_tokens(rollouts, tokens_per_batch, packed=packs(self.teacher))
        self._room = room
        self._kept: dict[int, TeacherGroup] = {}

    def __iter__(self) -> Iterator[TeacherGroup]:
        for number in range(len(self._groups)):
            group = self._kept.get(number) or self._force(number)
            yield replace(group, h_t_TE=group.h_t_TE.to(self.teacher.device, non_blocking=True))

    @torch.inference_mode()
    def _force(self, number: int) -> TeacherGroup:
        """One group through the teacher; kept if there is room."""
        indices = self._groups[number]
        rollouts = [self.rollouts[index] for index in indices]
        batch = collate(rollouts, pad_id=0, device=self.teacher.device, tokens_per_group=self._tokens_per_batch)
        group = TeacherGroup(indices, batch, response_states(self.teacher, batch))
        kept_TE = None if self._room is None else self._room.keep(group.h_t_TE)
        if kept_TE is not None:
            self._kept[number] = replace(group, h_t_TE=kept_TE)
        return group


def to_host(x: torch.Tensor) -> torch.Tensor:
    """A tensor in host memory: itself, or for a GPU's a pinned copy that is there when its stream has come so far."""
    if not x.is_cuda:
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def free_on_gpu(device: torch.device) -> int:
    """Bytes that tensors may still take: what the driver has, and what torch holds without using it."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def bare_model(model: Any) -> Any:
    """The transformers causal LM of a ``LoadedModel``, or the model itself."""
    return model.model if isinstance(model, LoadedModel) else model
