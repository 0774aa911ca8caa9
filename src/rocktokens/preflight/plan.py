"""How much memory a run would take on each GPU, whole and sharded, and on how many it fits (``check --plan``).

1. Both models are counted from their configs (``shapes``); nothing is loaded.
2. ``memory_items`` is arithmetic: what a GPU holds, item by item, when it holds most (``_peaks``), in one of two
   layouts. *Whole*: all of it on every GPU. *Sharded*: student, gradients, moments and teacher are cut into equal parts
   (torch's ``fully_shard``); two layers of each model and what is outside the layers are gathered at a time; gradients
   are cut after every micro-batch; and a replica of the student to sample from is whole. Of a served teacher every GPU
   has the LM head, or nothing where the server names its likeliest tokens. A teacher on a device of its own leaves its
   head here, and the run one process.
3. What is left of the usable memory holds the key-value cache of rollouts. A layout fits if that is one
   rollout or more; if anything is left, where a server writes them.
4. ``step_time`` says how long a step would take.

Compare a layout with another by it; on several GPUs it has not been compared with what a run takes.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from rocktokens.config import Config
from rocktokens.display.numbers import byte_size, counted, listed
from rocktokens.errors import RocktokensError
from rocktokens.models.load import DTYPES
from rocktokens.preflight.resources import FLOAT32, HALF, LOGIT_COPIES
from rocktokens.preflight.shapes import ModelShape, student_shape, teacher_shape
from rocktokens.preflight.step_time import ASSUMPTIONS, StepTime, step_time
from rocktokens.scoring.fused import SCRATCH_BYTES
from rocktokens.training.optim import moment_bytes

GIGABYTE = 10**9
ASSUMED_GIGABYTES = 80
"""Of a GPU, where none is there and none was named."""
USABLE = 0.93
"""Share of a GPU's memory; the rest is for CUDA, its libraries and fragmentation."""
SHARDED_OVER = (2, 3, 4, 8, 16)
MOST_GPUS = 1024
"""Where the search for a number that suffices ends."""
SCRATCH_PER_LOGIT = 10
"""Bytes of scratch per logit of a response, where a micro-batch is too small to fill the kernel's scratch."""
GATHERED_LAYERS = 2
"""The one at work, and the next, which is fetched meanwhile."""

Verdict = Literal["fits", "fits, fewer at once", "does not fit"]
"""Fewer at once: with a lower rollouts.batch_size."""


@dataclass(frozen=True, slots=True)
class MemoryItems:
    """Bytes on one GPU at one moment of a step, without the key-value cache."""

    student: float
    master_copy: float
    """In float32, of trained weights that are halved; shards are their own."""
    gradients: float
    """Of all trained weights, or 0 where none has one yet."""
    moments: float
    """Adam's two."""
    teacher: float
    sampling_copy: float
    """The student that is sampled from, where that is not the one that is trained."""
    working_weights: float
    """Whole: copies in half width that autocast makes; sharded: layers that are gathered."""
    reduction: float
    """Whole on several GPUs: what gradients are summed in."""
    activations: float
    """Of a micro-batch: the student's, or those of one layer of the teacher."""
    logits: float
    """Scratch of the kernel, or a chunk's logits where it is not used, and the LM head in half width; and its gradient,
    which stays for the backward pass."""

    @property
    def total(self) -> float:
        """All of them at once."""
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to place a run on GPUs, and what each of them then has."""

    gpus: int
    is_sharded: bool
    memory: MemoryItems
    total: float
    """Bytes of all items."""
    room: float
    """Bytes that are left for rollouts; negative where the items do not fit."""
    rollouts_at_once: int
    """Of the longest prompt and response, on each GPU."""
    verdict: Verdict
    step: StepTime | None
    """None where it does not fit."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would take, from configs alone."""

    conclusion: str
    student: ModelShape
    teacher: ModelShape
    gpu_memory: float
    """Bytes of one GPU."""
    cache_per_rollout: float
    """Bytes of keys and values at the longest prompt and response."""
    layouts: list[Layout]
    """Whole on one GPU, whole on each of several, then sharded over more and more; those that the run may have."""
    least_gpus: int | None
    """On how many it fits, sharded if that is more than one; None if on no number up to ``MOST_GPUS``."""
    assumptions: list[str]


def plan_run(config: Config, gpu_gigabytes: float | None = None) -> Plan:
    """Count what the run would take on GPUs of this size; default: of the one that is there, else 80 GB."""
    if gpu_gigabytes is not None and not 0 < gpu_gigabytes < float("inf"):
        raise RocktokensError(f"--gpu-memory is {gpu_gigabytes:g}: give the gigabytes of one GPU, for example 80")
    student, teacher = student_shape(config), teacher_shape(config)
    gpu_memory, named = _gpu_memory(config, gpu_gigabytes)
    length = config.rollouts.max_prompt_length + config.rollouts.max_completion_length
    width = HALF if config.training.bf16 or config.models.student_dtype == "bfloat16" else FLOAT32
    cache = width * student.size.cache_per_token * length
    wanted = min(config.rollouts.batch_size, config.training.rollouts_per_step)
    is_sampled_here = config.rollouts.engine != "vllm"

    def layout(gpus: int, is_sharded: bool) -> Layout:
        items = memory_items(config, student, teacher, gpus=gpus, is_sharded=is_sharded)
        room = USABLE * gpu_memory - items.total
        at_once = max(0, int(room // cache)) if is_sampled_here else wanted * (room > 0)
        step = None
        if at_once:
            used = min(at_once, wanted)
            step = step_time(config, student, teacher, gpus=gpus, is_sharded=is_sharded, at_once=used)
        few: Verdict = "fits, fewer at once" if at_once else "does not fit"
        verdict: Verdict = "fits" if at_once >= wanted else few
        return Layout(gpus, is_sharded, items, items.total, room, at_once, verdict, step)

    whole = layout(1, False)
    is_alone = config.models.teacher_device is not None  # such a run has one process
    can_shard = config.training.optim == "adamw_torch" and not is_alone
    least = 1 if whole.rollouts_at_once else None
    if least is None and can_shard:
        least = least_gpus(lambda gpus: bool(layout(gpus, True).rollouts_at_once))
    numbers = sorted({*SHARDED_OVER, least or 1} - {1}) if can_shard else []
    several = [layout(2, False)] if config.models.student_dtype == "float32" and not is_alone else []
    layouts = [whole, *several, *(layout(gpus, True) for gpus in numbers)]
    return Plan(
        conclusion=_conclusion(config, layouts, least, gpu_memory, wanted)
        + _teacher_elsewhere(config, teacher, gpu_memory),
        student=student,
        teacher=teacher,
        gpu_memory=gpu_memory,
        cache_per_rollout=cache,
        layouts=layouts,
        least_gpus=least,
        assumptions=[*_assumptions(config, named), *ASSUMPTIONS],
    )


def memory_items(
    config: Config, student: ModelShape, teacher: ModelShape, *, gpus: int, is_sharded: bool
) -> MemoryItems:
    """Count what one of ``gpus`` holds when it holds most; sharded over one, nothing is cut and nothing gathered."""
    training, size = config.training, student.size
    is_half = config.models.student_dtype == "bfloat16"
    width, teacher_width = HALF if training.bf16 or is_half else FLOAT32, DTYPES[config.models.dtype].itemsize
    is_sharded = is_sharded and gpus > 1
    parts = gpus if is_sharded else 1
    is_elsewhere = _is_elsewhere(config)
    teacher_head = teacher_width * _head(config, teacher)
    gathered = _gathered(student, width) + (0 if is_elsewhere else _gathered(teacher, teacher_width))
    held = MemoryItems(
        student=FLOAT32 * size.parameters / parts if is_sharded else size.weight_bytes(is_half=is_half),
        master_copy=0 if is_sharded else size.master_bytes(is_half=is_half),
        gradients=FLOAT32 * size.trainable / parts,
        moments=moment_bytes(training, size.trainable, size.embeddings) / parts,
        teacher=teacher_head if is_elsewhere else teacher_width * teacher.size.parameters / parts,
        sampling_copy=width * size.parameters if is_sharded or (training.bf16 and not is_half) else 0,
        working_weights=gathered if is_sharded else 0,
        reduction=FLOAT32 * size.trainable if gpus > 1 and not is_sharded else 0,
        activations=0,
        logits=0,
    )
    is_cast = not (is_sharded or is_half)
    return max(_peaks(config, student, teacher, held, is_cast=is_cast), key=lambda own: own.total)


def _peaks(
    config: Config, student: ModelShape, teacher: ModelShape, held: MemoryItems, *, is_cast: bool
) -> list[MemoryItems]:
    """List the moments of a step at which a GPU may hold most, where it has what is ``held`` besides.

    1. The teacher is inside a layer. What that takes is free again when the student starts. (Sampling takes less.)
    2. The loss: what the student keeps, the copies of trained weights that autocast holds up to here, and the logits.
    3. The backward pass begins: what the student keeps, and the inside of one layer where layers are computed again.
    4. It ends: all gradients, and the inside of one layer. An update frees gradients, so before that only a step of
       several micro-batches has some. From 3 to 4 they grow and activations shrink layer by layer: no moment between
       them has more than both.
    """
    every, kept, again, layers = student.activations, student.kept, student.again, student.size.layers
    tokens, weights = _tokens_at_once(config), held.working_weights
    cached = min(every.fixed - kept.fixed, HALF * student.size.trainable)
    teacher_layer = 0 if _is_elsewhere(config) else teacher.activations.per_token / teacher.size.layers
    head_gradient = FLOAT32 * student.size.head
    before = held if config.training.gradient_accumulation_steps > 1 else replace(held, gradients=0)

    def at(there: MemoryItems, copies: float, per_token: float, logits: float) -> MemoryItems:
        working = weights + (copies if is_cast else 0)
        return replace(there, working_weights=working, activations=per_token * tokens, logits=logits)

    return [
        at(before, 0, teacher_layer, 0),
        at(before, kept.fixed + cached, kept.per_token, _logits(config, student, teacher) + head_gradient),
        at(before, kept.fixed + again.fixed, kept.per_token + again.per_token, head_gradient),
        at(held, every.fixed / layers, every.per_token / layers, head_gradient),
    ]


def _logits(config: Config, student: ModelShape, teacher: ModelShape) -> float:
    """Count what only the loss needs: the scratch of a chunk, and the heads that are halved for it."""
    responses = config.training.per_device_train_batch_size * config.rollouts.max_completion_length
    if config.teacher.is_top_k:  # which the fused kernel does not take
        positions = min(config.scoring.tokens_per_chunk, responses)
        scratch = FLOAT32 * LOGIT_COPIES * positions * student.vocabulary
    else:
        scratch = min(SCRATCH_BYTES, SCRATCH_PER_LOGIT * responses * student.vocabulary)
    halved_heads = student.size.width * student.vocabulary
    if DTYPES[config.models.dtype].itemsize == FLOAT32:
        halved_heads += _head(config, teacher)
    return scratch + (HALF * halved_heads if config.training.bf16 else 0)


def _head(config: Config, teacher: ModelShape) -> int:
    """Count the numbers of the teacher's LM head, if it has to be here."""
    return 0 if config.teacher.is_top_k else teacher.size.width * teacher.vocabulary


def _is_elsewhere(config: Config) -> bool:
    return config.teacher.engine == "vllm" or config.models.teacher_device is not None


def least_gpus(fits: Callable[[int], bool]) -> int | None:
    """Return the smallest number of GPUs, from two on, that is enough."""
    return next((gpus for gpus in range(2, MOST_GPUS + 1) if fits(gpus)), None)


def _tokens_at_once(config: Config) -> int:
    rollouts = config.rollouts
    return config.training.per_device_train_batch_size * (rollouts.max_prompt_length + rollouts.max_completion_length)


def _gathered(shape: ModelShape, width: int) -> float:
    return width * (GATHERED_LAYERS * shape.largest_layer + shape.outside_layers)


def _gpu_memory(config: Config, given: float | None) -> tuple[float, str]:
    """Return the bytes of a GPU, and how they are known."""
    if given is not None:
        return given * GIGABYTE, f"a GPU has {given:g} GB, as given"
    if torch.cuda.is_available() and config.models.device != "cpu":
        found = torch.cuda.get_device_properties(0)
        return found.total_memory, f"a GPU has {byte_size(found.total_memory)}, as the {found.name} here"
    return ASSUMED_GIGABYTES * GIGABYTE, f"a GPU has {ASSUMED_GIGABYTES} GB (assumed: say --gpu-memory)"


def _assumptions(config: Config, gpu: str) -> list[str]:
    rollouts, training = config.rollouts, config.training
    length = rollouts.max_prompt_length + rollouts.max_completion_length
    engines = {"rollouts are written": rollouts.engine, "the teacher is computed": config.teacher.engine}
    return [
        f"{gpu}, of which {USABLE:.0%} are usable",
        f"a step is {counted(training.rollouts_per_step, 'rollout')} per GPU of {length:,} tokens, in micro-batches of "
        f"{training.per_device_train_batch_size}",
        "sharded: student, gradients, moments and teacher are cut into equal parts by fully_shard, two layers of each "
        "model are gathered at a time, gradients are cut after every micro-batch, and the replica that is sampled from "
        "is whole",
        *(
            f"{what} by a server on as many GPUs like these besides"
            for what, engine in engines.items()
            if engine == "vllm"
        ),
    ]


def _conclusion(config: Config, layouts: list[Layout], least: int | None, gpu_memory: float, wanted: int) -> str:
    """Say whether it fits, and where."""
    is_sampled_here = config.rollouts.engine != "vllm"
    whole, there = layouts[0], byte_size(gpu_memory)
    if least == 1:
        start, named = f"{byte_size(whole.total)} of {there}: fits on one GPU", [whole]
        leaves = f" and leaves {byte_size(whole.room)}"
        if is_sampled_here:
            leaves += f" for {counted(whole.rollouts_at_once, 'rollout')} at once"
    elif least is not None:
        start = f"Whole, {byte_size(whole.total)} per GPU of {there}: does not fit. Sharded: at least {least} GPUs; "
        named = [own for own in layouts if own.is_sharded and own.gpus in {least, max(least, 8)}]
        held = [f" for {own.rollouts_at_once:,}" if is_sampled_here else "" for own in named]
        each = [f"{own.gpus} leave {byte_size(own.room)}{rest}" for own, rest in zip(named, held, strict=True)]
        leaves = f"{listed(each)}{' rollouts at once' if is_sampled_here else ''}"
    else:
        last = layouts[-1]
        if last.is_sharded:
            sharded = f"neither does it sharded ({byte_size(last.total)} on each of {last.gpus})"
        elif config.models.teacher_device is not None:
            sharded = "a run with models.teacher_device cannot be sharded, as one without can"
        else:
            sharded = "training.optim = 'adamw_8bit' cannot be sharded, as 'adamw_torch' can"
        return (
            f"Whole, {byte_size(whole.total)} per GPU of {there}: does not fit, and {sharded}: lower "
            "training.per_device_train_batch_size or rollouts.max_completion_length, or set "
            "training.gradient_checkpointing or lora.enabled."
        )
    fewest = min(own.rollouts_at_once for own in named)
    asked = f" (rollouts.batch_size asks for {wanted})" if fewest < wanted else ""
    return f"{start}{leaves}{asked}."


def _teacher_elsewhere(config: Config, teacher: ModelShape, gpu_memory: float) -> str:
    """Say what a teacher on a device of its own takes there."""
    place = config.models.teacher_device
    if place is None:
        return ""
    weights = DTYPES[config.models.dtype].itemsize * teacher.size.parameters
    need = weights + teacher.activations.per_token / teacher.size.layers * _tokens_at_once(config)
    too_large = place.startswith("cuda") and need > USABLE * gpu_memory
    fits = f" of {byte_size(gpu_memory)}: does not fit" if too_large else ""
    return f" The teacher takes {byte_size(need)} on models.teacher_device = {place!r}{fits}."
