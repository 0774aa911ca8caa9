"""What a run will need: memory, time and disk (docs/method.md, section 9).

1. ``measure_activations`` counts the bytes that a forward keeps for its backward pass, for one row and for two: the
   difference is what a row costs, the rest (weights cast by autocast, say) does not grow with the batch.
2. ``memory_need`` is arithmetic on this and on the models' sizes, at the longest prompt and response.
3. ``update_seconds`` and ``sampling_seconds`` scale the timings of a probe to a step, as if all steps were like it.
4. ``disk_need`` counts all checkpoints that are kept, the states of the optimizer, and traces with rollouts, as if
   every response were as long as it may be; ``disk_use`` counts what a run that is there has of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from rocktokens.config import Config, TrainingSection
from rocktokens.display.numbers import byte_size, duration
from rocktokens.models.head import hidden_states, lm_head, output_head
from rocktokens.models.load import LoadedModel
from rocktokens.preflight.findings import Finding, Level
from rocktokens.preflight.pair_probe import PairProbe
from rocktokens.run_dir import OPTIMIZER_FILE, RunDir
from rocktokens.training.optim import moment_bytes
from rocktokens.training.retention import beyond
from rocktokens.types import Rollout

FLOAT32, HALF = 4, 2
LOGIT_COPIES = 9
"""Float32 arrays of a chunk's logits alive at once: 8 in ``weighted_kl``, 9 with ``jsd`` or the asymmetric term."""
BACKWARD_COST = 2
"""A backward pass does two matrix products for each one of the forward pass."""
MEMORY_HEADROOM = 0.8
"""The estimate leaves out fragmentation and the libraries' own buffers."""
STATES_AT_ONCE = 2
"""Of the latest checkpoint, and of the one that is being written."""
TRACE_BYTES = 40
"""A token on disk: its trace row and its share of the stored rollouts, before compression."""
TOP_BYTES = 8
"""One of the likeliest tokens beside it, of one model."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes that a forward of the student keeps for its backward pass."""

    fixed: float
    per_token: float


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The numbers of a student that its memory depends on."""

    parameters: int
    trainable: int
    layers: int
    width: int
    head: int
    """Entries of the LM head's weight that get a gradient."""
    cache_per_token: int
    """Numbers in the key-value cache of all layers."""
    embeddings: int = 0
    """Entries of embeddings that are trained."""

    @property
    def is_adapted(self) -> bool:
        """Whether adapters are trained."""
        return self.trainable < self.parameters

    def weight_bytes(self, *, is_half: bool) -> float:
        """Count the weights that are computed with; adapters are never halved."""
        if not is_half:
            return FLOAT32 * self.parameters
        return HALF * (self.parameters - self.trainable) + (FLOAT32 if self.is_adapted else HALF) * self.trainable

    def master_bytes(self, *, is_half: bool) -> float:
        """Count the float32 master copies."""
        return FLOAT32 * self.trainable if is_half and not self.is_adapted else 0

    @classmethod
    def of(cls, model: Any) -> "ModelSize":
        """Read off a transformers causal LM, PEFT-wrapped or not."""
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0)  # recurrent models have none, and states of a fixed size
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = heads and (getattr(config, "head_dim", None) or config.hidden_size // heads)
        weight_VD = lm_head(model).weight_VD
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            head=weight_VD.numel() if weight_VD.requires_grad else 0,
            cache_per_token=2 * config.num_hidden_layers * key_heads * head_dim,
            embeddings=_trained_embeddings(model),
        )


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on one device."""

    student: float
    """Its weights and their master copies, gradients in float32 and Adam's two moments."""
    teacher: float
    update: float
    """Activations of a micro-batch and the logits of a chunk."""
    sampling: float
    """The key-value cache, and on a GPU in half width the copy of the student that is sampled from."""
    is_kept: bool = False
    """Whether what is sampled with stays in memory during the update, as on a GPU; else the two take turns."""
    checkpoint: float = 0
    """On a CPU, the copy of trained weights and moments that is written while training goes on."""

    @property
    def peak(self) -> float:
        """Most at once; the models stay."""
        at_work = self.update + self.sampling if self.is_kept else max(self.update, self.sampling)
        return self.student + self.teacher + self.checkpoint + at_work


def run_memory(
    config: Config, student: LoadedModel, teacher: LoadedModel, rollouts: Sequence[Rollout], longest: int
) -> MemoryNeed:
    """Estimate bytes at the longest prompt and response, with activations measured on the longest rollout."""
    training, sequence = config.training, longest + config.rollouts.max_completion_length
    size = ModelSize.of(student.model)
    bf16 = training.bf16 and student.model.device.type == "cuda"
    rollout = max(rollouts, key=lambda rollout: len(rollout.prompt_ids) + len(rollout.token_ids))
    responses = training.per_device_train_batch_size * config.rollouts.max_completion_length
    activations = measure_activations(student.model, rollout, bf16=bf16)
    is_half = config.models.student_dtype == "bfloat16"
    if is_half:  # nothing is left to cast
        activations = replace(activations, fixed=0)
    return memory_need(
        size,
        is_half=is_half,
        training=training,
        teacher_bytes=_weight_bytes(teacher),
        activation_bytes=activation_need(
            activations,
            size,
            training.per_device_train_batch_size * sequence,
            checkpointing=training.gradient_checkpointing,
        ),
        chunk_positions=min(config.scoring.tokens_per_chunk, responses),
        vocab_size=max(output_head(model.model).width for model in (student, teacher)),
        sampled_tokens=config.rollouts.batch_size * sequence,
        on_gpu=student.model.device.type == "cuda",
        bf16=bf16,
    )


def measure_activations(model: Any, rollout: Rollout, *, bf16: bool = False) -> Activations:
    """Measure what a forward over one rollout keeps for the backward pass, on one row and on two."""
    ids = torch.tensor(np.concatenate([rollout.prompt_ids, rollout.token_ids]), dtype=torch.long, device=model.device)
    return activations_of(model, ids, bf16=bf16)


def activations_of(model: Any, ids_L: torch.Tensor, *, bf16: bool) -> Activations:
    """Count what a forward over these ids keeps, on one row and on two; the model may be of fake tensors."""
    one, two = (_kept_bytes(model, ids_L.repeat(rows, 1), bf16) for rows in (1, 2))
    return Activations(fixed=max(0, 2 * one - two), per_token=(two - one) / len(ids_L))


def activation_need(activations: Activations, size: ModelSize, tokens: int, *, checkpointing: bool) -> float:
    """Count activation bytes of a micro-batch; with checkpointing, the inputs of all layers and the inside of one."""
    if not checkpointing:
        return activations.fixed + activations.per_token * tokens
    inputs = FLOAT32 * size.layers * size.width
    return activations.fixed + (activations.per_token / size.layers + inputs) * tokens


def memory_need(
    size: ModelSize,
    *,
    teacher_bytes: int,
    activation_bytes: float,
    chunk_positions: int,
    vocab_size: int,
    sampled_tokens: int,
    on_gpu: bool = False,
    bf16: bool = False,
    is_half: bool = False,
    training: TrainingSection | None = None,
) -> MemoryNeed:
    """Count the bytes a training run needs on one device.

    Args:
        size: of the student.
        teacher_bytes: its weights as they are loaded.
        activation_bytes: of one micro-batch.
        chunk_positions: whose logits are in memory at once.
        vocab_size: width of the wider head.
        sampled_tokens: prompts and responses of the sequences decoded together, at their longest.
        on_gpu: the sampler's memory stays from step to step.
        bf16: it samples in half width, from a copy of the student unless that is halved itself.
        is_half: the student's weights are halved, beside master copies.
        training: whose optimizer says what the moments take; default: 8 bytes per trained weight.
    """
    width = HALF if bf16 or is_half else FLOAT32
    is_copied = bf16 and not is_half
    moments = moment_bytes(training or TrainingSection(), size.trainable, size.embeddings)
    weights = size.weight_bytes(is_half=is_half) + size.master_bytes(is_half=is_half)
    logits = FLOAT32 * (LOGIT_COPIES * chunk_positions * vocab_size + size.head)
    return MemoryNeed(
        student=weights + FLOAT32 * size.trainable + moments,
        teacher=teacher_bytes,
        update=activation_bytes + logits,
        sampling=width * size.cache_per_token * sampled_tokens + (width * size.parameters if is_copied else 0),
        is_kept=on_gpu,
        checkpoint=0 if on_gpu else FLOAT32 * size.trainable + moments,
    )


def available_memory(student: LoadedModel, teacher: LoadedModel) -> int:
    """Count the bytes the run could have on the models' device: what is free, and what these two hold already."""
    device = student.model.device
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return psutil.virtual_memory().available + _weight_bytes(student) + _weight_bytes(teacher)


def update_seconds(probe: PairProbe, tokens: float) -> float:
    """Estimate an update on this many response tokens: both forwards, the student's backward, both heads.

    Of the two heads only the student's has a backward pass, so together they cost twice their forward.
    """
    student = (1 + BACKWARD_COST) * probe.seconds_student
    return (probe.seconds_teacher + student + BACKWARD_COST * probe.seconds_heads) * tokens / probe.tokens


def sampling_seconds(
    probe_seconds: float, probe_tokens: int, *, rollouts: int, tokens: float, batch_size: int, fixed_batches: bool
) -> float:
    """Estimate the time to write the rollouts of a step, ``tokens`` in all, from the time the probe took.

    With ``fixed_batches``, as on a GPU, a batch takes as long whatever the number of its rows.
    """
    if fixed_batches:
        return probe_seconds * math.ceil(rollouts / batch_size)
    return probe_seconds * tokens / probe_tokens


def disk_need(config: Config, trainable: int, embeddings: int = 0) -> dict[str, int]:
    """Count bytes of checkpoints and of the traces of training and replay, every response as long as it may be.

    Where checkpoints are dropped, that is done after the next is written.
    """
    training, trace = config.training, config.trace
    steps = saved_steps(config)
    gone = beyond(steps, training.save_total_limit)
    trained = training.max_steps * config.training.rollouts_per_step
    replayed = trace.num_prompts * trace.num_generations * (len(trace.checkpoints) or len(steps) - len(gone))
    per_position = TRACE_BYTES * (trained + replayed) + 2 * TOP_BYTES * trace.top_k * replayed
    return {
        "checkpoints": FLOAT32 * trainable * (len(steps) - len(gone) + bool(gone)),
        "optimizer": int(moment_bytes(training, trainable, embeddings)) * min(STATES_AT_ONCE, len(steps) - 1),
        "traces": per_position * config.rollouts.max_completion_length,
    }


def saved_steps(config: Config) -> list[int]:
    """List the steps at which a run writes checkpoints."""
    training = config.training
    return [*range(0, training.max_steps, training.save_steps), training.max_steps]


def disk_use(run: RunDir) -> dict[str, int]:
    """Count bytes that the run has already, under the names of ``disk_need``; nothing where there is no run."""
    if not run.exists():
        return {}
    saved = [run.path / entry.path for entry in run.files("checkpoints/")]
    paths = {
        "checkpoints": [path for path in saved if path.name != OPTIMIZER_FILE],
        "optimizer": [path for path in saved if path.name == OPTIMIZER_FILE],
        "traces": [run.path / entry.path for own in ("traces/", "rollouts/") for entry in run.files(own)],
    }
    return {name: sum(path.stat().st_size for path in own if path.exists()) for name, own in paths.items()}


def check_memory(need: MemoryNeed, available: int) -> Finding:
    """Check whether the run fits."""
    sizes = {name: part for name, part in asdict(need).items() if name != "is_kept" and (part or name != "checkpoint")}
    parts = ", ".join(f"{name} {byte_size(part)}" for name, part in sizes.items())
    together = "what is sampled with stays during the update" if need.is_kept else "sampling and update take turns"
    value = f"about {byte_size(need.peak)} of {byte_size(available)} ({parts}; {together})"
    remedy = (
        "lower training.per_device_train_batch_size or rollouts.batch_size, or set lora.enabled or "
        "training.gradient_checkpointing"
    )
    level: Level = "ok" if need.peak <= MEMORY_HEADROOM * available else "warn" if need.peak <= available else "fail"
    measured = {**sizes, "peak": need.peak, "available": available}
    return Finding("memory", level, value, "" if level == "ok" else remedy, measured)


def check_disk(need: Mapping[str, int], free: int, written: Mapping[str, int]) -> Finding:
    """Check that there is room for what the run will write beside what is ``written``.

    Without room for the checkpoints, whose size is known, the run would stop. Traces may be smaller than counted.
    """
    left = {name: max(0, size - written.get(name, 0)) for name, size in need.items()}
    total = sum(left.values())
    parts = ", ".join(f"{name} {byte_size(part)}" for name, part in left.items())
    value = f"at most {byte_size(total)}{' more' if any(written.values()) else ''} ({parts}), {byte_size(free)} free"
    measured = {**left, "free": free, "in_all": dict(need)}
    if total <= free:
        return Finding("disk", "ok", value, measured=measured)
    level: Level = "warn" if left["checkpoints"] + left["optimizer"] <= free else "fail"
    remedy = (
        f"free {byte_size(total - free)}, raise training.save_steps, set training.save_total_limit, or give a "
        "run.directory on another disk"
    )
    return Finding("disk", level, value, remedy, measured)


def estimate_time(config: Config, probe: PairProbe, sampled_in: float, rollouts: int, device: str) -> Finding:
    """Estimate the seconds of a step and of the run, were all steps like the probe."""
    per_step, steps = config.training.rollouts_per_step, config.training.max_steps
    tokens = per_step * probe.tokens / rollouts
    sampling = sampling_seconds(
        sampled_in,
        probe.tokens,
        rollouts=per_step,
        tokens=tokens,
        batch_size=config.rollouts.batch_size,
        fixed_batches=device == "cuda",
    )
    update = update_seconds(probe, tokens)
    total = steps * (sampling + update)
    value = (
        f"about {duration(total)} for {steps} steps: {sampling:.2g} s sampling and {update:.2g} s updating per step "
        f"(estimated from {rollouts} rollouts of {probe.tokens / rollouts:.0f} tokens on {device})"
    )
    measured = {"sampling": sampling, "update": update, "run": total, "tokens_per_step": tokens}
    return Finding("time", "ok", value, measured=measured)


def _kept_bytes(model: Any, ids_RL: torch.Tensor, bf16: bool) -> int:
    """Count the bytes of all tensors that autograd saves in a forward, each storage once, without the parameters."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with torch.enable_grad(), hooks, torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bf16):
        states = hidden_states(model, ids_RL)
    del states  # kept alive until here, so that no storage could be freed and counted again under its address
    return sum(kept.values())


def _trained_embeddings(model: nn.Module) -> int:
    weights = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(weight.numel() for weight in weights if weight.requires_grad)


def _weight_bytes(loaded: LoadedModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in loaded.model.parameters())
