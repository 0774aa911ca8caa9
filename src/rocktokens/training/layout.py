"""How a session lies over its processes: whole on each, or in shards (``training.shard``, docs/howto/gpus.md).

1. Whole: every device holds student, gradient, Adam's moments and teacher; several processes are data parallel by
   accelerate's DDP.
2. Sharded: every device holds one part in N of each, by torch's ``fully_shard``. A layer of either model is gathered
   when it runs. What is in no layer (embeddings, final norm, LM head) is gathered with the root of its model: the
   objective for the student, whose head the loss reads directly; the trunk for the teacher. An untied head of the
   teacher lies in shards of its own, which the objective gathers.
3. Both average gradients over the ranks: whole ones in the backward pass of the last micro-batch, shards in every
   one, so that no device holds more than its part of them.
4. Ranks gather together, so how often a model runs may not depend on their data: a micro-batch is one group of rows.
5. A sharded student is sampled from by a whole copy, brought up to date once per step.
6. With ``models.student_dtype = "bfloat16"`` the student computes with halved weights, and float32 master copies are
   trained: held beside the weights by one process, or as the shards of several.
7. A checkpoint holds whole tensors either way, master copies where there are some, and either layout goes on from it.

``auto`` shards where several processes run and what each would hold does not fit its device (``fits``).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import PeftModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from rocktokens.config import Config, TrainingSection
from rocktokens.errors import ConfigError
from rocktokens.models.distant import DistantModel
from rocktokens.models.head import causal_lm, trunk
from rocktokens.models.shards import gathered
from rocktokens.rollouts.sampler import SamplingCopy
from rocktokens.training.checkpoint import NO_MASTERS, FullState, Masters, optimizer_tensors
from rocktokens.training.objective import DistillationObjective
from rocktokens.training.optim import moment_bytes

Shard = bool | Literal["auto"]
"""What ``training.shard`` may be."""
MOST_HELD = 0.8
"""Of a device's memory, by what stays there from step to step: activations and the sampler's cache need the rest."""


class HostCopies:
    """Copies of tensors in the host's memory, where each stays in its place: pinned, what comes from a GPU."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory of the copy of this name; to pin that takes half a second per gigabyte, once."""
        if name not in self._copies:
            self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        return self._copies[name]

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of this name, made again; from a GPU it is there once the GPU has been waited for."""
        return self.place(name, tensor).copy_(tensor, non_blocking=True)


class Layout:
    """Everything whole on every device. Every process calls the same methods in the same order."""

    one_group = False
    """Whether all rows of a micro-batch pass through a model at once, however long (``scoring.batch.collate``)."""
    summary: str | None = None
    """What is out of the ordinary, in a sentence."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.masters: Masters = NO_MASTERS
        """By parameter of the student that has one: the master copy that is trained and saved in its place."""
        self._host_copies = HostCopies()

    def place_teacher(self, teacher: Any) -> None:
        """Lay out a causal LM that is never trained; its head is read afterwards."""
        teacher.to(self.accelerator.device)

    def teacher_stream(self) -> torch.cuda.Stream | None:
        """Make the stream on which the teacher runs beside the student; None where it does not."""
        device = self.accelerator.device
        return torch.cuda.Stream(device) if device.type == "cuda" else None

    def sampling_copy(self, student: nn.Module) -> SamplingCopy | None:
        """Copy a student that is not laid out yet, to sample from; None where it is sampled from itself."""
        if self.accelerator.mixed_precision != "bf16":
            return None
        return SamplingCopy(student, torch.bfloat16, self.accelerator.device)

    def place(self, objective: DistillationObjective) -> nn.Module:
        """Lay out an objective and its student; return the module whose forward is the loss."""
        return self.accelerator.prepare(objective)

    def place_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Lay out the optimizer of a student that is laid out, with its state."""
        return self.accelerator.prepare(optimizer)

    def follow_masters(self) -> None:
        """Bring a student whose master copies were trained up to date."""

    def accumulating(self, objective: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch's forward and backward; ranks average gradients in the last one."""
        return nullcontext() if is_last else self.accelerator.no_sync(objective)

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scale a gradient that is longer than ``max_norm`` down to it; return the norm that the whole of it had."""
        return cast(torch.Tensor, self.accelerator.clip_grad_norm_(parameters, max_norm))

    def full_state(self, student: nn.Module, optimizer: torch.optim.Optimizer) -> FullState | None:
        """Copy what a checkpoint holds into the memory of the main process, which writes it; None on the others.

        One tensor after the other is gathered. The copies are the same memory every time: what was made of them must
        be written before the next are made.
        """
        moments = optimizer_tensors(student, optimizer, self.masters)
        state = FullState(self._on_main(self._weights(student)), self._on_main(moments))
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize(self.accelerator.device)
        return state if self.accelerator.is_main_process else None

    def room_for_full_state(self, student: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Return a function that allocates what ``full_state`` copies into; a thread can run it during training.

        Before the first update the optimizer has no state to make room for.
        """
        named = [*self._weights(student), *optimizer_tensors(student, optimizer, self.masters)]
        first = {id(tensor): (name, tensor) for name, tensor in reversed(named)}

        def make_room() -> None:
            for name, tensor in first.values() if self.accelerator.is_main_process else ():
                self._host_copies.place(name, tensor)

        return make_room

    def _weights(self, student: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what a checkpoint holds of the student, as it lies; tied parameters under each of their names."""
        is_adapted = isinstance(student, PeftModel)
        for name, tensor in student.state_dict(keep_vars=True).items():
            if tensor.requires_grad or not is_adapted:
                yield name, self.masters.get(tensor, tensor)

    def _on_main(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Gather tensors to the CPU of the main process, where tied parameters stay tied; other processes keep none."""
        found: dict[str, torch.Tensor] = {}
        first_name: dict[int, str] = {}
        for name, tensor in named:
            first = first_name.setdefault(id(tensor), name) if isinstance(tensor, nn.Parameter) else name
            whole = gathered(tensor.detach()) if first == name else None
            if self.accelerator.is_main_process:
                found[name] = found[first] if whole is None else self._host_copies.copy(name, whole)
        return found


class HalfWidthLayout(Layout):
    """One process whose student has its weights in bfloat16, and float32 master copies of those that are trained.

    A gradient moves to the master copy as soon as it is there, where those of micro-batches are added up in float32.
    Adapters are small and stay in float32, without copies.
    """

    summary = "the student's weights are in bfloat16, with a float32 master copy of what is trained"

    def sampling_copy(self, student: nn.Module) -> None:
        """Make none: the student is in the width that is sampled in."""

    def place(self, objective: DistillationObjective) -> nn.Module:
        """Halve the student's weights; what they were become the master copies."""
        is_adapted = isinstance(objective.student, PeftModel)
        trained = [own for own in objective.student.parameters() if own.requires_grad]
        self.masters = {} if is_adapted else {own: nn.Parameter(own.data) for own in trained}
        for parameter, master in self.masters.items():
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))
        for parameter in objective.student.parameters():
            if parameter in self.masters or not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
        return super().place(objective)

    @torch.no_grad()
    def follow_masters(self) -> None:
        """Round what was trained."""
        for parameter, master in self.masters.items():
            parameter.copy_(master)


def _move_gradient(master: nn.Parameter, parameter: torch.Tensor) -> None:
    """Add the gradient of a parameter to that of its master copy."""
    if parameter.grad is not None:
        own = parameter.grad.float()
        master.grad = own if master.grad is None else master.grad.add_(own)
        parameter.grad = None


class ShardedLayout(Layout):
    """Everything in shards, by torch's FSDP2.

    With ``is_half`` the shards, in float32, are the master copy, and what is gathered of them is in bfloat16.
    """

    one_group = True

    def __init__(self, accelerator: Accelerator, *, is_half: bool = False) -> None:
        super().__init__(accelerator)
        self._mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        self._width = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_half else MixedPrecisionPolicy()
        self._is_half = is_half or accelerator.mixed_precision == "bf16"
        self.summary = f"student, optimizer and teacher are sharded over {accelerator.num_processes} processes"

    def place_teacher(self, teacher: Any) -> None:
        """Shard the layers, the trunk around them and the head, which is outside it even where it shares its weight.

        Of a teacher whose layers are elsewhere, only the head is here, and stays whole.
        """
        if isinstance(teacher, DistantModel):
            return super().place_teacher(teacher)
        embeddings, head = teacher.get_input_embeddings(), teacher.get_output_embeddings()
        is_tied = head.weight is embeddings.weight
        self._shard_layers(teacher, MixedPrecisionPolicy())
        fully_shard(trunk(teacher), mesh=self._mesh, reshard_after_forward=True)
        if is_tied:
            head.weight = embeddings.weight
        else:
            fully_shard(head, mesh=self._mesh)

    def teacher_stream(self) -> None:
        """Leave the teacher on the student's stream: both gather their layers over the same connection."""

    def sampling_copy(self, student: nn.Module) -> SamplingCopy:
        """Copy the student whole: to gather its shards for every token would take far longer."""
        dtype = torch.bfloat16 if self._is_half else torch.float32
        return SamplingCopy(student, dtype, self.accelerator.device)

    def place(self, objective: DistillationObjective) -> nn.Module:
        """Shard the student's layers, then the objective as the root; ``score`` is a forward too.

        The root takes the teacher's states as they are: rounded, they would have other digits, and the ids in a row of
        a ``LikelyHead`` would be other tokens.
        """
        self._shard_layers(objective.student, self._width)
        fully_shard(objective, mesh=self._mesh, mp_policy=replace(self._width, cast_forward_inputs=False))
        register_fsdp_forward_method(objective, "score")
        return objective

    def place_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Leave it: made of parameters in shards, it has its state in shards."""
        return optimizer

    def accumulating(self, objective: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Reduce gradients to their shards in every backward pass: added up whole, they may not fit."""
        return nullcontext()

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip by the norm over all shards."""
        return gathered(nn.utils.clip_grad_norm_(parameters, max_norm))

    def _shard_layers(self, model: Any, width: MixedPrecisionPolicy) -> None:
        """Shard what transformers calls the indivisible modules of a causal LM, each as one group."""
        lm = causal_lm(model)
        indivisible = set(lm._no_split_modules or ())
        for layer in [module for module in lm.modules() if type(module).__name__ in indivisible]:
            fully_shard(layer, mesh=self._mesh, mp_policy=width)


def loading_device(shard: Shard, accelerator: Accelerator) -> str:
    """Return where models are loaded before they are laid out: on the CPU where they may not fit the device."""
    return "cpu" if shard and accelerator.num_processes > 1 else str(accelerator.device)


def make_layout(config: Config, accelerator: Accelerator, student: nn.Module, teacher: nn.Module) -> Layout:
    """Choose the layout of two models that are loaded; every process gets the same."""
    training, shard = config.training, config.training.shard
    is_half, ranks = config.models.student_dtype == "bfloat16", accelerator.num_processes
    if is_half and ranks > 1 and shard is False:
        raise ConfigError(
            "models.student_dtype = 'bfloat16' and training.shard = false: several processes hold master copies in "
            "shards; set training.shard = true, or models.student_dtype = 'float32'"
        )
    if shard == "auto" and ranks > 1:
        memory = device_memory(accelerator.device, ranks)
        shard = is_half or not all(gather_object([fits(held_bytes(student, teacher, training), memory)]))
    if shard is True and training.optim == "adamw_8bit":
        raise ConfigError(
            "training.optim = 'adamw_8bit' and a sharded run: moments in 8 bits cannot be cut; set training.optim = "
            "'adamw_torch', or, where all fits one device, training.shard = false and models.student_dtype = 'float32'"
        )
    if shard is True:
        return ShardedLayout(accelerator, is_half=is_half)
    return HalfWidthLayout(accelerator) if is_half else Layout(accelerator)


def held_bytes(student: nn.Module, teacher: nn.Module, section: TrainingSection) -> float:
    """Count what a device with everything whole holds from step to step: both models, gradient and Adam's moments."""
    weights = [parameter for model in (student, teacher) for parameter in model.parameters()]
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    embeddings = {module.weight for module in student.modules() if isinstance(module, nn.Embedding)}
    count = sum(parameter.numel() for parameter in trained)
    moments = moment_bytes(section, count, sum(own.numel() for own in trained if own in embeddings))
    return sum(parameter.numel() * parameter.element_size() for parameter in weights) + 4 * count + moments


def fits(held: float, memory: int) -> bool:
    """Tell whether a device with this memory has room for that, and for the work besides."""
    return held <= MOST_HELD * memory


def device_memory(device: torch.device, num_processes: int) -> int:
    """Count the bytes of a GPU, or a process's share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total // num_processes
