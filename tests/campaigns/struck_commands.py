"""Commands that are struck at a call to the disk, run again, and compared with one that was not.

1. Every command has a folder as it is before, and a reference: what the command leaves, undisturbed, with its calls to
   the disk counted. All work is done under one name, so that paths in configs are the same in all of them.
2. A case copies the folder before, runs the command with a strike (``disk_calls``), and looks at what is left: every
   run there must be sound (``rocktokens verify``).
3. The same command is run again, undisturbed. All that the manifests list must then have the bytes of the reference,
   but for what was timed, and every trace row and every step of the log must be there once.
"""

import fcntl
import json
import os
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from attacked_run import command_line, make, write_configs
from disk_calls import Strike, run_struck, told_counts
from frame import BrokenPromiseError
from small_study import without_seconds
from tiny_pair import write_pair

from rocktokens.integrity import verify_run
from rocktokens.run_dir import RunDir, file_sha256
from warm_process import SERVER

BEFORE = {
    "distill": (),
    "trace": ("distill",),
    "find": ("distill", "trace"),
    "gradients": ("distill", "trace", "find"),
    "evaluate": ("distill",),
    "knockout": ("distill", "trace", "find"),
    "study": ("distill", "trace", "find"),
}
"""The commands that take long, and which must have run by then."""
PATIENCE = 120.0
"""Seconds after which a process hangs."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended."""

    code: int
    said: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """One command: where it starts, what it leaves, and how often it calls the disk."""

    command: str
    place: Path
    calls: Counter[str]
    seconds: float
    """From its start to its end."""

    @property
    def work(self) -> Path:
        """Where it works."""
        return self.place / "work"

    def fresh(self) -> None:
        """Have everything as it is before the command."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.place / "before", self.work)

    def start(self, strike: Strike | None = None) -> BaseProcess:
        """Start the command; what it prints is in the log of its place."""
        arguments, log = command_line(self.command, self.work), self.place / "log"
        log.unlink(missing_ok=True)
        process = SERVER.Process(target=run_struck, args=(arguments, log, strike or Strike(self.work)))
        process.start()
        return process

    def ended(self, process: BaseProcess) -> Ending:
        """Wait for a process and for what it may have left running."""
        began = time.monotonic()
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            raise BrokenPromiseError(f"{self.command} hangs: {self._said()[-800:]}")
        wait_unlocked(self.work)
        assert process.exitcode is not None
        return Ending(process.exitcode, self._said(), time.monotonic() - began)

    def run(self, strike: Strike | None = None) -> Ending:
        """Run the command to its end."""
        return self.ended(self.start(strike))

    def require_sound(self) -> None:
        """Refuse runs with a problem that ``verify`` finds."""
        for run in (self.work / "run", self.work / "study"):
            if RunDir(run).exists() and (problems := verify_run(run).problems):
                raise BrokenPromiseError(f"after it was struck: {problems[0].sentence}")

    def require_finished(self) -> None:
        """Run the command again, undisturbed; refuse what is then not as in the reference."""
        ending = self.run()
        if ending.code:
            raise BrokenPromiseError(f"run again: code {ending.code}, {ending.said[-800:]}")
        require_same(self.place / "reference", self.work)

    def _said(self) -> str:
        log = self.place / "log"
        return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


class Commands(dict[str, Prepared]):
    """The commands by name, each made ready when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, command: str) -> Prepared:
        self[command] = prepare(command, self.folder)
        return self[command]


def prepare(command: str, folder: Path) -> Prepared:
    """Make the folder before a command and its reference."""
    if not (folder / "pair").exists():
        write_pair(folder / "pair")
    place = folder / command
    shutil.rmtree(place, ignore_errors=True)
    work, told = place / "work", place / "told"
    write_configs(work, folder / "pair")
    for stage in BEFORE[command]:
        make(stage, work)
    told.mkdir()
    shutil.copytree(work, place / "before")
    own = Prepared(command, place, Counter(), 0.0)
    ending = own.run(Strike(work, told=told))
    if ending.code:
        raise AssertionError(f"{command}: {ending}")
    work.rename(place / "reference")
    return Prepared(command, place, told_counts(told), ending.seconds)


def wait_unlocked(folder: Path) -> None:
    """Wait until no process holds the lock of a run: a study that was killed leaves workers that end by themselves."""
    deadline = time.monotonic() + PATIENCE
    for lock in folder.rglob(".lock"):
        with lock.open("rb") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise BrokenPromiseError(f"{lock} is still held") from None
                    time.sleep(0.01)


# Comparing


def require_same(reference: Path, found: Path) -> None:
    """Refuse a folder whose runs differ from the reference's in a file, a trace row or a step of the log."""
    expected, own = contents(reference), contents(found)
    if differing := sorted(path for path in expected.keys() | own.keys() if expected.get(path) != own.get(path)):
        raise BrokenPromiseError(f"differs from the reference in {differing[:5]}, {len(differing)} in all")
    rows = trace_rows(found)
    if doubled := [row for row, count in rows.items() if count > 1]:
        raise BrokenPromiseError(f"doubled trace rows: {doubled[:3]}, {len(doubled)} in all")
    if rows != trace_rows(reference):
        raise BrokenPromiseError(f"lost trace rows: {rows.total()} of {trace_rows(reference).total()}")


def contents(folder: Path) -> dict[str, Any]:
    """What every run in a folder lists, by SHA-256, or by content where some was timed; and the steps of its log."""
    found: dict[str, Any] = {}
    for manifest in sorted(folder.rglob("manifest.json")):
        run, name = RunDir(manifest.parent), manifest.parent.relative_to(folder).as_posix()
        for entry in run.files():
            path = run.verify(entry)
            found[f"{name}/{entry.path}"] = (
                without_seconds(path.parent) if path.name == "study.json" else file_sha256(path)
            )
        if run.logs.exists():
            found[f"{name}/{run.logs.name}"] = [json.loads(line)["step"] for line in run.logs.read_bytes().splitlines()]
    return found


def trace_rows(folder: Path) -> Counter[tuple[str, int, int]]:
    """How often each (folder, rollout, position) occurs."""
    rows: Counter[tuple[str, int, int]] = Counter()
    for path in sorted(folder.rglob("traces/*/*.parquet")):
        table = pq.read_table(path, columns=["rollout_id", "position"], partitioning=None)
        place = path.parent.relative_to(folder).as_posix()
        keys = zip(table["rollout_id"].to_pylist(), table["position"].to_pylist(), strict=True)
        rows.update((place, rollout, position) for rollout, position in keys)
    return rows


def as_reason(error: int) -> str:
    """What the system calls an error."""
    return os.strerror(error).lower()
