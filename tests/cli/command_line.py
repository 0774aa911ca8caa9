"""The command line in this process, on a config small enough for a second, and what it leaves on the disk."""

import io
import json
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rocktokens.cli.main import main
from rocktokens.integrity import verify_run
from rocktokens.models import pebbles
from rocktokens.run_dir import RunDir, file_sha256

UNLISTED = {".lock", "manifest.json", "logs.jsonl"}
"""The lock and the manifest itself; the log grows line by line and is cut, not verified, on resume."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def record(self) -> dict[str, Any]:
        """What ``--json`` printed."""
        return json.loads(self.stdout)


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that was distilled, traced, searched and evaluated, with what each command printed."""

    path: Path
    config: Path
    outcomes: dict[str, Outcome]


def rocktokens(*arguments: str | Path) -> Outcome:
    """Run ``rocktokens ARGUMENTS…`` as a shell would, in this process."""
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    argv = patch.object(sys, "argv", ["rocktokens", *map(str, arguments)])
    with argv, redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return Outcome(code, stdout.getvalue(), stderr.getvalue())


def changed(*settings: str) -> list[str]:
    """Command-line options that override values of the config."""
    return [part for setting in settings for part in ("--set", setting)]


def succeed(*arguments: str | Path) -> Outcome:
    """The outcome of a command that must work."""
    outcome = rocktokens(*arguments)
    assert outcome.code == 0, outcome.stderr
    return outcome


def refuse(*arguments: str | Path, naming: tuple[str, ...]) -> None:
    """Check that a command ends with code 2 and one sentence that names what is wrong, and nothing else."""
    outcome = rocktokens(*arguments)
    assert (outcome.code, outcome.stdout) == (2, ""), outcome
    assert outcome.stderr.startswith("rocktokens: ") and outcome.stderr.endswith("\n")
    assert len(outcome.stderr.splitlines()) == 1, outcome.stderr
    assert [name for name in naming if name not in outcome.stderr] == [], outcome.stderr


def write_config(path: Path, run: Path) -> Path:
    """Four steps of four rollouts, two checkpoints, eight probe prompts, and what counts as a rock in so few."""
    text = f"""
[run]
directory = "{run}"
seed = 1
[models]
student = "pebbles-student"
teacher = "pebbles-teacher"
device = "cpu"
[rollouts]
max_completion_length = 60
[training]
max_steps = 4
save_steps = 2
per_device_train_batch_size = 4
max_truncated_share = 1.0
[trace]
num_prompts = 8
rollouts_per_part = 4
top_k = 0
[find]
k = 10
min_prompts = 1
tau = 0.3
gamma = 0.3
eta = 0.05
[evaluation]
num_prompts = 6
"""
    path.write_text(text, encoding="utf-8")
    return path


def other_tokenizer(directory: Path) -> Path:
    """The embedded student with two entries of its vocabulary exchanged: as many tokens, other meanings."""
    shutil.copytree(pebbles.directory("student"), directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return directory


def snapshot(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory, but for locks."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(directory).as_posix(): file_sha256(path) for path in files}


def require_sound(run: Path) -> None:
    """Check that the manifest lists every file of a run, each with the SHA-256 it has; so do those of runs within.

    ``rocktokens verify`` says so too, having read the files.
    """
    assert verify_run(run).problems == ()
    entries = RunDir(run).require().files()
    for entry in entries:
        RunDir(run).verify(entry)
    within = [path.parent for path in run.glob("*/**/manifest.json")]
    for other in within:
        require_sound(other)
    elsewhere = tuple(f"{other.relative_to(run).as_posix()}/" for other in within)
    own = {path for path in snapshot(run) if not path.startswith(elsewhere)}
    assert {entry.path for entry in entries} == own - UNLISTED
