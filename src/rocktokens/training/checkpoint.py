"""Checkpoints and resuming: ``checkpoints/step-N`` is the student after N updates, with its optimizer.

1. Everything is written into a temporary directory and flushed to the disk: weights for ``from_pretrained``
   (safetensors; an adapter for LoRA), tokenizer, ``optimizer.safetensors`` (``<parameter>/<Adam state>``),
   ``policy.safetensors`` (what the weight policy remembers; absent where that is nothing) and ``trainer_state.json``.
2. The directory is renamed, and all its files enter the manifest in one replacement.
3. ``begin_checkpoint`` writes what is small. ``finish_checkpoint`` does the rest from copies of the tensors, so that a
   thread can do it while the student is trained on; a kill before its end leaves the checkpoints that were there.
4. A checkpoint that the manifest does not list does not exist; what a killed process left of one is written over.
   Which ones stay: ``retention.py``.
5. A run resumes from its latest checkpoint, with the same config and policy files, or is refused in one sentence. Its
   length (``length``), its layout (``layout``) and the number of its processes may have changed: tensors are written
   whole. An update must have as many rollouts as before, over all processes.

No state of a random generator is kept: every step seeds its own from the run's seed.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rocktokens.config import Config, load_config
from rocktokens.config.policies import FILE_KEYS, files_of
from rocktokens.errors import ConfigError, RunDirError
from rocktokens.models.describe_run import describe_run
from rocktokens.models.shards import laid_like
from rocktokens.run_dir import OPTIMIZER_FILE, TRAINER_STATE, RunDir, file_sha256, fsync
from rocktokens.training.length import LENGTH_KEYS, MAX_STEPS, require_not_passed

Masters = Mapping[torch.nn.Parameter, torch.nn.Parameter]
"""What the optimizer trains in the place of a parameter in half width: its float32 master copy."""
NO_MASTERS: Masters = {}
POLICY_FILE = "policy.safetensors"
POLICY_FILES = "policy_files"
"""The manifest's entry with the SHA-256 of every file the policy reads, by key."""
FREE_SECTIONS = frozenset({"trace", "find", "evaluation", "knockout", "gradients"})
FREE_KEYS = frozenset(
    {"run.directory", *(f"training.{key}" for key in ("report_to", "shard", "save_total_limit", *LENGTH_KEYS))}
    | {"rollouts.url", "rollouts.sync_directory", "rollouts.timeout", "rollouts.max_prompt_length"}
    | {"teacher.url", "teacher.model", "teacher.timeout", "teacher.connections", "teacher.max_gap"}
)
"""What may change at a resume: ``max_prompt_length`` too, since it refuses prompts and never cuts them.

Not ``training.trace``: a run traced in part would look whole to its readers.
"""

SPLIT_KEYS = frozenset({"training.per_device_train_batch_size", "training.gradient_accumulation_steps"})
"""What may change where another number of processes shares the same updates."""


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


class FullState(NamedTuple):
    """The tensors of a checkpoint, whole and in the memory of the host."""

    weights: dict[str, torch.Tensor]
    """The student's under the names of its ``state_dict``; of one with adapters, theirs are enough."""
    optimizer: dict[str, torch.Tensor]
    """As ``optimizer_tensors`` names them; empty before the first update."""


def begin_checkpoint(
    run: RunDir, state: TrainerState, tokenizer: PreTrainedTokenizerBase, policy: Mapping[str, np.ndarray]
) -> None:
    """Write the tokenizer and what the policy and the trainer remember, where ``finish_checkpoint`` adds the rest."""
    run.require_held()
    temporary = _unfinished(run, state.step)
    for leftover in (temporary, run.checkpoint(state.step)):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    tokenizer.save_pretrained(temporary)
    if policy:
        safetensors.numpy.save_file(dict(policy), temporary / POLICY_FILE)
    (temporary / TRAINER_STATE).write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")


def finish_checkpoint(run: RunDir, step: int, student: PreTrainedModel | PeftModel, full: FullState) -> None:
    """Add the tensors, whose student says how they are saved and may have other ones by now, and commit it all."""
    run.require_held()
    target, temporary = run.checkpoint(step), _unfinished(run, step)
    if isinstance(student, PeftModel):
        adapters: list[Any] = [*student.peft_config.values()]
        for adapter in adapters:
            if isinstance(adapter.target_modules, set):  # which would be written in an order that depends on its past
                adapter.target_modules = sorted(adapter.target_modules)
        # "auto" would ask the Hub whether the vocabulary has grown
        student.save_pretrained(str(temporary), save_embedding_layers=False, state_dict=full.weights)
    else:
        student.save_pretrained(temporary, state_dict=dict(full.weights))
    save_file(full.optimizer, temporary / OPTIMIZER_FILE)
    for path in (*temporary.rglob("*"), temporary):
        fsync(path)
    temporary.replace(target)
    fsync(target.parent)
    run.adopt([path.relative_to(run.path).as_posix() for path in sorted(target.rglob("*")) if path.is_file()])


def _unfinished(run: RunDir, step: int) -> Path:
    """Return where a checkpoint is until it is whole."""
    target = run.checkpoint(step)
    return target.with_name(f".{target.name}.tmp")


def load_trainer_state(directory: Path) -> TrainerState:
    """Read ``trainer_state.json``."""
    return TrainerState(**json.loads((directory / TRAINER_STATE).read_text(encoding="utf-8")))


def optimizer_tensors(
    student: torch.nn.Module, optimizer: torch.optim.Optimizer, masters: Masters = NO_MASTERS
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the optimizer's tensors as they lie, keyed ``<parameter>/<state>``; none before the first update."""
    for name, parameter in student.named_parameters():
        for key, value in optimizer.state.get(masters.get(parameter, parameter), {}).items():
            yield f"{name}/{key}", torch.as_tensor(value)


def restore_optimizer(
    directory: Path, student: torch.nn.Module, optimizer: torch.optim.Optimizer, masters: Masters = NO_MASTERS
) -> None:
    """Put the saved tensors back, each as its parameter lies; the learning rate is the scheduler's to restore.

    The step counts are whole, and stay on the CPU unless the optimizer is fused; those of bitsandbytes are Python's.
    """
    parameters = {name: masters.get(own, own) for name, own in student.named_parameters()}
    for key, value in load_file(directory / OPTIMIZER_FILE).items():
        name, _, field = key.rpartition("/")
        parameter = parameters[name]
        if field == "step" and not value.is_floating_point():
            laid = int(value)
        elif field == "step":
            laid = value.to(parameter.device) if optimizer.defaults["fused"] else value
        else:
            laid = laid_like(value, parameter)
        optimizer.state[parameter][field] = laid


def load_policy_state(directory: Path) -> dict[str, np.ndarray]:
    """What the policy remembered; empty where there was nothing to remember."""
    path = directory / POLICY_FILE
    return safetensors.numpy.load_file(path) if path.exists() else {}


# Resuming


def open_run(run: RunDir, config: Config, num_processes: int, *, resume: bool) -> int | None:
    """Return the step of the checkpoint to start from, None for a run that has none yet."""
    if run.exists() and not resume:
        raise RunDirError(f"{run.path} already holds a run: continue it with --resume, or give another run.directory")
    run.require_new()
    if run.lists(run.config.name):
        before, started = load_config(run.verified(run.config.name)), run.manifest().get("num_processes", num_processes)
        is_split_anew = started != num_processes and _batch(before, started) == _batch(config, num_processes)
        if started != num_processes and not is_split_anew:
            size = _batch(before, started)
            raise ConfigError(
                f"{num_processes} processes were launched, but the run was started with {started}, which its batches "
                f"are laid out for: launch {started}, or set training.gradient_accumulation_steps and "
                f"training.per_device_train_batch_size so that all processes together have {size} rollouts per update"
            )
        by_content = POLICY_FILES in run.manifest()
        _require_same_config(before, config, by_content=by_content, but=SPLIT_KEYS if is_split_anew else frozenset())
    done = max(run.checkpoints(), default=None)
    if done is not None:
        require_not_passed(run, config, done)
    if done != config.training.max_steps:
        _require_same_files(run.manifest().get(POLICY_FILES, {}), files_of(config.policy))
    return done


def begin_run(run: RunDir, config: Config, tokenizer: PreTrainedTokenizerBase, num_processes: int) -> None:
    """Write what a reader needs before the first step: config, tokenizer, seeds, names and versions."""
    hashes = {key: file_sha256(Path(path)) for key, path in files_of(config.policy).items()}
    facts = {POLICY_FILES: hashes, MAX_STEPS: config.training.max_steps}
    describe_run(run, config, tokenizer, command="distill", num_processes=num_processes, **facts)


def _batch(config: Config, num_processes: int) -> int:
    """Count the rollouts of an update."""
    return config.training.rollouts_per_step * num_processes


def _require_same_config(started: Config, resumed: Config, *, by_content: bool, but: frozenset[str]) -> None:
    """Refuse another config; the policy's files may have moved where ``_require_same_files`` knows their content."""
    before, now = (_training_keys(config, by_content) for config in (started, resumed))
    for key in before | now:
        if key not in but and before.get(key) != now.get(key):
            raise ConfigError(
                f"{key} = {now.get(key)!r}, but the run was started with {before.get(key)!r}: resume with the same "
                "config, or give another run.directory"
            )


def _training_keys(config: Config, by_content: bool) -> dict[str, Any]:
    """What the result of training depends on, as ``section.key``."""
    record = config.model_dump(mode="json")
    if by_content:
        _forget_paths(record["policy"])
    return {
        f"{section}.{key}": value
        for section, table in record.items()
        for key, value in table.items()
        if section not in FREE_SECTIONS and f"{section}.{key}" not in FREE_KEYS
    }


def _forget_paths(policy: dict[str, Any]) -> None:
    """Replace the paths that a policy reads, however deep, by the mere fact that there is a file."""
    policy |= {name: "a file" for name in FILE_KEYS if isinstance(policy.get(name), str)}
    for part in policy.get("policies", ()):
        _forget_paths(part)


def _require_same_files(started: dict[str, str], files: dict[str, str]) -> None:
    """Refuse to continue with rocks or controls other than those of the steps before."""
    for key, sha256 in started.items():
        path = Path(files[key])
        if not path.exists() or file_sha256(path) != sha256:
            raise ConfigError(
                f"{key} = {str(path)!r} is {'gone' if not path.exists() else 'another file now'}, and the run was "
                "started with it: put it back as it was, or give another run.directory"
            )
