"""Everything a training run holds in memory, built for its first step or from its latest checkpoint.

The student is kept in float32 whatever ``models.dtype`` says (the teacher follows it), unless ``models.student_dtype``
halves it; on a GPU, autocast does the arithmetic in bfloat16. The engine is accelerate: one process, or several over
devices and machines by ``accelerate launch``, each with everything or with a shard of it (``layout.py``).
"""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, GradientAccumulationPlugin, InitProcessGroupKwargs
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rocktokens.config import Config
from rocktokens.errors import ConfigError
from rocktokens.models.distant import DistantModel
from rocktokens.models.fingerprints import same_tokenizer, vocabulary_sha256
from rocktokens.models.head import output_head, require_known_head, require_steady
from rocktokens.models.load import resolve_device
from rocktokens.policies import WeightPolicy, policy_from_section
from rocktokens.rollouts.encode import encode_prompts
from rocktokens.rollouts.sampler import Sampler, SampleRequest, make_sampler
from rocktokens.run_dir import derive_seed
from rocktokens.scoring.student import load_student
from rocktokens.scoring.teachers import load_teacher
from rocktokens.tasks.base import Task
from rocktokens.training.checkpoint import TrainerState, load_policy_state, restore_optimizer
from rocktokens.training.layout import Layout, loading_device, make_layout
from rocktokens.training.objective import DistillationObjective
from rocktokens.training.optim import follow_schedule, make_optimizer, make_scheduler, restore_scheduler

DATA_PARALLEL = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
ANSWERS = 10
"""Of a server, one after the other, while other processes wait: four rounds of requests, or what loads weights."""
LEAST_PATIENCE = timedelta(minutes=30)
"""For all else that processes wait for, however soon a server counts as lost; torch's own is no longer."""


@dataclass(frozen=True, slots=True)
class Session:
    """The parts of a run in progress."""

    config: Config
    accelerator: Accelerator
    student: Any
    """The bare model, or the PEFT model around it: what is sampled from and saved."""
    tokenizer: PreTrainedTokenizerBase
    pad_id: int
    teacher: PreTrainedModel | DistantModel
    teacher_stream: torch.cuda.Stream | None
    """Where the teacher runs, on a GPU."""
    layout: Layout
    objective: nn.Module
    """The wrapped module whose forward is the loss."""
    trainable: list[nn.Parameter]
    """What the optimizer trains: the student's parameters, or their master copies."""
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    sampler: Sampler
    task: Task
    policy: WeightPolicy


def make_accelerator(config: Config) -> Accelerator:
    """The engine: device and precision from the config, nothing from the launcher's accumulation settings."""
    missing = set(config.training.report_to) - {str(name) for name in get_available_trackers()}
    if missing:
        name = min(missing)
        raise ConfigError(f"training.report_to names {name!r}, which is not installed: pip install {name}")
    device = torch.device(resolve_device(config.models.device))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="bf16" if device.type == "cuda" and config.training.bf16 else "no",
        log_with=list(config.training.report_to) or None,
        project_dir=config.run.directory,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=patience(config))],
    )
    if accelerator.distributed_type not in DATA_PARALLEL:
        raise ConfigError(
            f"the launcher asks for {accelerator.distributed_type.value}, but the student is also sampled from: launch "
            "plain data parallelism (accelerate launch --multi_gpu), and set training.shard = true for shards"
        )
    if config.training.shard is True and accelerator.num_processes == 1:
        raise ConfigError(
            "training.shard = true, but a single process was launched: launch several (accelerate launch --multi_gpu "
            "--num_processes N -m …, on CPUs too), or set training.shard = 'auto'"
        )
    if config.models.teacher_device is not None and accelerator.num_processes > 1:
        raise ConfigError(
            f"models.teacher_device = {config.models.teacher_device!r}, but {accelerator.num_processes} processes were "
            "launched, each of which would load a teacher there: leave it out and set training.shard = true, or serve "
            "the teacher (teacher.engine = 'vllm')"
        )
    return accelerator


def patience(config: Config) -> timedelta | None:
    """Return how long processes wait for each other where one may wait for a server; None: as long as torch says."""
    waits = [section.timeout for section in (config.rollouts, config.teacher) if section.engine == "vllm"]
    return max(LEAST_PATIENCE, timedelta(seconds=ANSWERS * max(waits))) if waits else None


def _require_known(student: Any, teacher: Any, is_steady: bool) -> None:
    """Refuse models that compute in a way that is not known here; a student with dropout of this run is not steady."""
    require_known_head(teacher)
    if is_steady:
        require_steady(student)


def global_batch(config: Config, num_processes: int) -> int:
    """Rollouts of one update over all processes."""
    training = config.training
    size = training.per_device_train_batch_size * training.gradient_accumulation_steps * num_processes
    if size % config.rollouts.num_generations:
        raise ConfigError(
            f"rollouts.num_generations = {config.rollouts.num_generations} does not divide the {size} rollouts of an "
            "update (per_device_train_batch_size × gradient_accumulation_steps × processes): change one of them"
        )
    return size


def prompts_per_step(config: Config, num_processes: int) -> int:
    """Prompts of one update over all processes."""
    return global_batch(config, num_processes) // config.rollouts.num_generations


def make_session(
    config: Config, task: Task, accelerator: Accelerator, checkpoint: Path | None, state: TrainerState | None
) -> Session:
    """Load both models, the optimizer and the policy, as they were at ``checkpoint`` if there is one."""
    place = loading_device(config.training.shard, accelerator)
    student = load_student(config, checkpoint, place)
    size = global_batch(config, accelerator.num_processes) // config.rollouts.num_generations
    first = task.batch(0, size, derive_seed(config.run.seed, "prompts"))
    encoded = encode_prompts(student.tokenizer, first, config.rollouts)
    teacher = load_teacher(config, place)
    same_tokenizer(student.tokenizer, teacher.tokenizer)
    if torch.device(place).type == accelerator.device.type:  # else they may be too large to try where they are
        _require_known(student.model, teacher.model, is_steady=not config.lora.lora_dropout)
    teacher.model.requires_grad_(False)
    sha256 = vocabulary_sha256(student.tokenizer.get_vocab())
    seed = derive_seed(config.run.seed, "policy")
    policy = policy_from_section(config.policy, sha256, seed, student.tokenizer, student.eos_ids)
    layout = make_layout(config, accelerator, student.model, teacher.model)
    layout.place_teacher(teacher.model)
    sampler = make_sampler(config, student, teacher, copied=layout.sampling_copy(student.model))
    for prompt, ids_P in zip(first, encoded, strict=True):
        sampler.require_possible(SampleRequest(prompt.id, ids_P, sample=0), config.rollouts.max_completion_length)
    objective = layout.place(DistillationObjective(student.model, output_head(teacher.model), config.scoring))
    optimizer = make_optimizer(student.model, config.training, layout.masters)
    scheduler = make_scheduler(optimizer, config.training)
    if checkpoint is not None and state is not None:
        restore_optimizer(checkpoint, student.model, optimizer, layout.masters)
        restore_scheduler(scheduler, state.scheduler)
        follow_schedule(scheduler)
        if remembered := load_policy_state(checkpoint):
            policy.restore(remembered)
    return Session(
        config=config,
        accelerator=accelerator,
        student=student.model,
        tokenizer=student.tokenizer,
        pad_id=student.pad_id,
        teacher=teacher.model,
        teacher_stream=layout.teacher_stream(),
        layout=layout,
        objective=objective,
        trainable=[layout.masters.get(own, own) for own in student.model.parameters() if own.requires_grad],
        optimizer=layout.place_optimizer(optimizer),
        scheduler=scheduler,
        sampler=sampler,
        task=task,
        policy=policy,
    )
