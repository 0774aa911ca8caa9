"""Opening a run directory for training: a new run, the continuation of one, or a refusal in one sentence.

A run that resumes goes back to its latest checkpoint: trace parts and log lines of later steps are dropped, rollouts of
later steps are kept and trained on again, so that the result is the one of an uninterrupted run: byte for byte on a
CPU, up to rounding on a GPU, whose attention adds up in no fixed order.
"""

from pathlib import Path
from typing import Any

from rocktokens.config import Config, load_config
from rocktokens.config.policies import FILE_KEYS, files_of
from rocktokens.errors import ConfigError, RunDirError
from rocktokens.models.describe_run import describe_run
from rocktokens.run_dir import RunDir, file_sha256
from rocktokens.training.checkpoint import TrainerState
from rocktokens.training.record import cut_log
from rocktokens.training.session import Session

POLICY_FILES = "policy_files"
"""The manifest's entry with the SHA-256 of every file the policy reads, by key."""
FREE_SECTIONS = frozenset({"trace", "find", "evaluation", "knockout", "gradients"})
FREE_KEYS = frozenset({"run.directory", "training.report_to"})
"""What may change at a resume. Not ``training.trace``: a run traced in part would look whole to its readers."""


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


def open_run(run: RunDir, config: Config, num_processes: int, *, resume: bool) -> int | None:
    """The step of the checkpoint to start from, None for a run that has none yet."""
    global_batch(config, num_processes)
    if run.exists() and not resume:
        raise RunDirError(f"{run.path} already holds a run: continue it with --resume, or give another run.directory")
    if any(entry.path == run.config.name for entry in run.files()):
        _require_same_config(load_config(run.config), config, by_content=POLICY_FILES in run.manifest())
        _require_same_processes(run.manifest().get("num_processes", num_processes), num_processes)
    done = max(run.checkpoints(), default=None)
    if done != config.training.max_steps:
        _require_same_files(run.manifest().get(POLICY_FILES, {}), files_of(config.policy))
    return done


def begin_run(run: RunDir, session: Session) -> None:
    """Write what a reader needs before the first step: config, tokenizer, seeds, names and versions."""
    facts = {
        "num_processes": session.accelerator.num_processes,
        POLICY_FILES: {key: file_sha256(Path(path)) for key, path in files_of(session.config.policy).items()},
    }
    describe_run(run, session.config, session.tokenizer, command="distill", **facts)


def rewind(run: RunDir, state: TrainerState | None) -> None:
    """Drop the trace parts and log lines of steps that will be made again."""
    step, parts = (state.step, state.trace_parts) if state else (0, 0)
    run.drop([entry.path for entry in run.files("traces/training/")][parts:])
    cut_log(run, step)


def _require_same_config(started: Config, resumed: Config, *, by_content: bool) -> None:
    """Files of the policy may have moved where ``_require_same_files`` knows their content."""
    before, now = (_training_keys(config, by_content) for config in (started, resumed))
    for key in before | now:
        if before.get(key) != now.get(key):
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
    """Leave of the files that a policy reads, however deep, only that there are some."""
    policy |= {name: "a file" for name in FILE_KEYS if isinstance(policy.get(name), str)}
    for part in policy.get("policies", ()):
        _forget_paths(part)


def _require_same_files(started: dict[str, str], files: dict[str, str]) -> None:
    """Refuse to go on with other rocks or controls than those of the steps before."""
    for key, sha256 in started.items():
        path = Path(files[key])
        if not path.exists() or file_sha256(path) != sha256:
            raise ConfigError(
                f"{key} = {str(path)!r} is {'gone' if not path.exists() else 'another file now'}, and the run was "
                "started with it: put it back as it was, or give another run.directory"
            )


def _require_same_processes(started: int, resumed: int) -> None:
    if started != resumed:
        raise ConfigError(
            f"{resumed} processes were launched, but the run was started with {started}: its batches are laid out for "
            f"{started}, launch as many"
        )
