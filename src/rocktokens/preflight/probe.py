"""The probe of ``rocktokens check``: a few rollouts, scored once, and what they foretell of the run.

1. The student answers training prompts, timed; both models score the answers (``scoring.preflight``).
2. ``findings`` judges what was measured.
3. Memory is estimated for the longest prompt and response, time as if all steps were like the probe.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rocktokens.cli.common import notes, progress_bar
from rocktokens.config import Config
from rocktokens.errors import RocktokensError
from rocktokens.preflight.findings import (
    Finding,
    check_divergence,
    check_memory,
    check_overlap,
    check_sampler,
    check_stop_mass,
    check_truncation,
)
from rocktokens.preflight.static_checks import rollouts_per_step
from rocktokens.run_dir import derive_seed
from rocktokens.types import Prompt, Rollout

if TYPE_CHECKING:
    from rocktokens.models.load import LoadedModel
    from rocktokens.preflight.pair_probe import MemoryNeed, PairProbe


def check_probe(
    config: Config, student: "LoadedModel", teacher: "LoadedModel", prompts: Sequence[Prompt], longest: int
) -> list[Finding]:
    """Let the student answer, the teacher score, and judge what comes out."""
    from rocktokens.preflight.pair_probe import probe_pair

    bf16 = config.training.bf16 and student.model.device.type == "cuda"
    try:
        rollouts, seconds = _sample(config, student, teacher, prompts)
        with notes.status("scoring the probe"):
            probe = probe_pair(student, teacher, rollouts, config.scoring, bf16=bf16)
            need = _memory_need(config, student, teacher, rollouts, longest)
    except RocktokensError as error:
        return [Finding("probe", "fail", "refused", str(error))]
    return [
        check_divergence(probe, config.scoring.divergence),
        check_overlap(probe.overlap, probe.overlap_mass),
        check_stop_mass(probe.stop_mass),
        check_truncation(rollouts, config.rollouts.max_completion_length),
        check_sampler(probe.sampler_gap),
        check_memory(need, available_memory(student, teacher)),
        estimate_time(config, probe, seconds, len(rollouts), student.model.device.type),
    ]


def _sample(
    config: Config, student: "LoadedModel", teacher: "LoadedModel", prompts: Sequence[Prompt]
) -> tuple[list[Rollout], float]:
    """The probe's rollouts, and the seconds they took.

    On a GPU they are sampled twice: the first time compiles kernels and captures graphs, which a run does once.
    """
    from rocktokens.rollouts.encode import Sampling, make_rollouts
    from rocktokens.rollouts.sampler import make_sampler

    sampler = make_sampler(config, student, teacher)
    sampling = Sampling.of(config.rollouts, derive_seed(config.run.seed, "check"))

    def sample() -> list[Rollout]:
        return make_rollouts(sampler, student.tokenizer, prompts, sampling, on_done=advance)

    on_gpu = student.model.device.type == "cuda"
    with progress_bar("sampling the probe", (1 + on_gpu) * len(prompts)) as advance:
        if on_gpu:
            sample()
        began = time.perf_counter()
        sampled = sample()
        return sampled, time.perf_counter() - began


def _memory_need(
    config: Config, student: "LoadedModel", teacher: "LoadedModel", rollouts: Sequence[Rollout], longest: int
) -> "MemoryNeed":
    """Bytes at the longest prompt and response, with activations measured on the longest rollout."""
    from rocktokens.models.head import lm_head
    from rocktokens.preflight.pair_probe import ModelSize, activation_need, measure_activations, memory_need

    training, sequence = config.training, longest + config.rollouts.max_completion_length
    size = ModelSize.of(student.model)
    bf16 = training.bf16 and student.model.device.type == "cuda"
    rollout = max(rollouts, key=lambda rollout: len(rollout.prompt_ids) + len(rollout.token_ids))
    responses = training.per_device_train_batch_size * config.rollouts.max_completion_length
    return memory_need(
        size,
        teacher_bytes=_weight_bytes(teacher),
        activation_bytes=activation_need(
            measure_activations(student.model, rollout, bf16=bf16),
            size,
            training.per_device_train_batch_size * sequence,
            checkpointing=training.gradient_checkpointing,
        ),
        chunk_positions=min(config.scoring.tokens_per_chunk, responses),
        vocab_size=max(lm_head(model.model).width for model in (student, teacher)),
        sampled_tokens=config.rollouts.batch_size * sequence,
        on_gpu=student.model.device.type == "cuda",
        bf16=bf16,
    )


def available_memory(student: "LoadedModel", teacher: "LoadedModel") -> int:
    """Bytes the run could have on the models' device: what is free, and what these two hold already."""
    import psutil
    import torch

    device = student.model.device
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return psutil.virtual_memory().available + _weight_bytes(student) + _weight_bytes(teacher)


def estimate_time(config: Config, probe: "PairProbe", sampled_in: float, rollouts: int, device: str) -> Finding:
    """Seconds of a step and of the run, were all steps like the probe."""
    from rocktokens.preflight.pair_probe import sampling_seconds, update_seconds

    per_step, steps = rollouts_per_step(config), config.training.max_steps
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
        f"about {_duration(total)} for {steps} steps: {sampling:.2g} s sampling and {update:.2g} s updating a step "
        f"(estimated from {rollouts} rollouts of {probe.tokens / rollouts:.0f} tokens on {device})"
    )
    measured = {"sampling": sampling, "update": update, "run": total, "tokens_per_step": tokens}
    return Finding("time", "ok", value, measured=measured)


def _weight_bytes(loaded: "LoadedModel") -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in loaded.model.parameters())


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
