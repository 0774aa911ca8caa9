"""Checkpoints: ``checkpoints/step-N`` is the student after N updates, for ``from_pretrained``, with its optimizer.

1. Everything is written into a temporary directory and flushed to the disk: weights (safetensors; an adapter for LoRA),
   tokenizer, ``optimizer.safetensors`` (``<parameter>/<Adam state>``), ``policy.safetensors`` (what the weight policy
   remembers; absent where that is nothing) and ``trainer_state.json``.
2. The directory is renamed, and all its files enter the manifest in one replacement.
3. A checkpoint that the manifest does not list does not exist; what a killed process left of one is written over.

No state of a random generator is kept: every step seeds its own from the run's seed.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rocktokens.run_dir import TRAINER_STATE, RunDir

OPTIMIZER_FILE = "optimizer.safetensors"
POLICY_FILE = "policy.safetensors"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a resumed run needs besides weights, optimizer and policy."""

    step: int
    """Updates made so far; the next step has this number."""
    tokens_seen: int
    trace_parts: int
    """Training trace parts committed up to here; later ones belong to steps that will be made again."""
    truncated_streak: int
    scheduler: dict[str, Any]


def save_checkpoint(
    run: RunDir,
    state: TrainerState,
    student: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: Mapping[str, torch.Tensor],
    policy: Mapping[str, np.ndarray],
) -> None:
    """Commit the student, its tokenizer, its ``optimizer_state``, the policy's and the trainer's as a checkpoint."""
    target = run.checkpoint(state.step)
    temporary = target.with_name(f".{target.name}.tmp")
    for leftover in (temporary, target):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    _save_weights(student, temporary)
    tokenizer.save_pretrained(temporary)
    save_file(dict(optimizer), temporary / OPTIMIZER_FILE)
    if policy:
        safetensors.numpy.save_file(dict(policy), temporary / POLICY_FILE)
    (temporary / TRAINER_STATE).write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
    _flush_tree(temporary)
    temporary.replace(target)
    _flush(target.parent)
    run.adopt([path.relative_to(run.path).as_posix() for path in sorted(target.rglob("*")) if path.is_file()])


def load_trainer_state(directory: Path) -> TrainerState:
    """Read ``trainer_state.json``."""
    return TrainerState(**json.loads((directory / TRAINER_STATE).read_text(encoding="utf-8")))


def optimizer_state(student: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's tensors on the CPU, keyed ``<parameter>/<state>``; empty before the first update."""
    return {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, parameter in student.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(directory: Path, student: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the saved tensors back, each beside its parameter; the learning rate is the scheduler's to restore.

    The step counts stay on the CPU unless the optimizer is fused.
    """
    parameters = dict(student.named_parameters())
    for key, value in load_file(directory / OPTIMIZER_FILE).items():
        name, _, field = key.rpartition("/")
        parameter = parameters[name]
        is_counter = field == "step" and not optimizer.defaults["fused"]
        optimizer.state[parameter][field] = value if is_counter else value.to(parameter.device)


def load_policy_state(directory: Path) -> dict[str, np.ndarray]:
    """What the policy remembered; empty where there was nothing to remember."""
    path = directory / POLICY_FILE
    return safetensors.numpy.load_file(path) if path.exists() else {}


def _save_weights(student: PreTrainedModel | PeftModel, directory: Path) -> None:
    if isinstance(student, PeftModel):  # "auto" would ask the Hub whether the vocabulary has grown
        student.save_pretrained(str(directory), save_embedding_layers=False)
    else:
        student.save_pretrained(directory)


def _flush_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        _flush(path)
    _flush(directory)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
