"""Strike a process at one of its calls to the disk: kill it there, or have the call fail.

1. Counted are the calls that change what is below a folder: opening a file to write, writing, flushing, renaming,
   linking, removing and making folders. Python tells of most (``sys.addaudithook``); writes, flushes and the writers of
   pyarrow and safetensors are wrapped.
2. The call of a number and a kind is struck, before it has happened; of a write, when half of it has. With ``lasts``,
   all later calls of that kind fail too, as on a disk that stays full.
3. A study works in processes of its own, each of which counts for itself.

Nothing of the kernel or the file system is needed, and the same number is the same moment every time.
"""

import builtins
import io
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

KINDS = ("open", "write", "fsync", "rename", "link", "remove", "mkdir")
"""Calls that change a disk."""
EVENTS = {"os.rename": "rename", "os.link": "link", "os.remove": "remove", "os.mkdir": "mkdir"}
"""What Python calls them in its audit events."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, slots=True)
class Strike:
    """Which call is struck, and how."""

    root: Path
    """Calls below it count."""
    kind: str = ""
    number: int = 0
    """From one; 0 strikes nothing."""
    error: int = 0
    """What the call fails with; 0 kills the process."""
    lasts: bool = False
    told: Path | None = None
    """Where the counts go when a process ends by itself."""


class DiskCalls:
    """The calls of this process, counted and struck."""

    def __init__(self, strike: Strike) -> None:
        self.strike = strike
        self.root = os.path.realpath(strike.root)
        self.counts: Counter[str] = Counter()

    def concerns(self, path: Any) -> bool:
        """Whether a path is below the folder."""
        if isinstance(path, int):
            return True
        return os.path.realpath(os.fsdecode(path)).startswith(self.root)

    def is_due(self, kind: str) -> bool:
        """Count a call; whether it is to be struck."""
        self.counts[kind] += 1
        own, number = self.strike, self.counts[kind]
        return bool(own.number) and kind == own.kind and (number == own.number or (own.lasts and number > own.number))

    def hit(self) -> None:
        """Do what the strike says."""
        if not self.strike.error:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self.strike.error, os.strerror(self.strike.error))

    def count(self, kind: str) -> None:
        """Count a call that has not happened yet, and strike it if it is due."""
        if self.is_due(kind):
            self.hit()


class _CountedFile(io.FileIO):
    """A file whose writes are counted; the one that is struck is half written."""

    calls: DiskCalls

    def write(self, content: Any, /) -> int:
        if self.calls.is_due("write"):
            super().write(bytes(content)[: len(content) // 2])
            self.calls.hit()
        return super().write(content)


def install(strike: Strike) -> DiskCalls:
    """Count and strike the calls of this process from now on; there is no way back."""
    calls = DiskCalls(strike)
    sys.addaudithook(partial(_audit, calls))
    flush = os.fsync
    os.fsync = lambda descriptor: (calls.count("fsync"), flush(descriptor))[1]
    builtins.open = io.open = _counting_open(calls, io.open)
    _wrap_native(calls)
    return calls


def _audit(calls: DiskCalls, event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path, _mode, flags = arguments
        # Names of temporary files of other libraries, sockets and devices are none of ours.
        if isinstance(path, str | bytes | os.PathLike) and flags & WRITING and calls.concerns(path):
            calls.count("open")
    elif event in EVENTS and calls.concerns(arguments[0]):
        calls.count(EVENTS[event])


def _counting_open(calls: DiskCalls, original: Callable[..., Any]) -> Callable[..., Any]:
    """``open`` whose files to write, below the folder, are counted."""

    def counting(file: Any, mode: str = "r", buffering: int = -1, *more: Any, **options: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+") or not calls.concerns(file):
            return original(file, mode, buffering, *more, **options)
        raw = _CountedFile(file, mode.replace("b", "").replace("t", ""))
        raw.calls = calls
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, *more, **options)
        text.mode = mode
        return text

    return counting


def _wrap_native(calls: DiskCalls) -> None:
    """Count the writers that are not Python's; one that is struck leaves half a file and its library's error."""
    import pyarrow.parquet
    import safetensors
    import safetensors.numpy
    import safetensors.torch

    def torn(write: Callable[..., Any], place: int, raises: type[Exception] | None = None) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            path = arguments[place]
            if not isinstance(path, str | os.PathLike) or not calls.concerns(path) or not calls.is_due("write"):
                return write(*arguments, **options)
            write(*arguments, **options)
            os.truncate(path, Path(path).stat().st_size // 2)
            try:
                return calls.hit()
            except OSError as error:
                if raises is None:
                    raise
                raise raises(f"I/O error: {error.strerror} (os error {error.errno})") from None

        return wrapped

    pyarrow.parquet.write_table = torn(pyarrow.parquet.write_table, 1)
    for module in (safetensors.torch, safetensors.numpy):
        module.serialize_file = torn(module.serialize_file, 1, safetensors.SafetensorError)


# Commands


def run_struck(arguments: list[str], log: Path, strike: Strike) -> None:
    """Be a process that runs a command and is struck; what it prints is appended to ``log``."""
    from rocktokens.cli.main import main
    from rocktokens.studies import pool
    from warm_process import _settle

    _settle(log)
    calls = install(strike)
    pool.serve = partial(_serve_struck, strike)
    sys.argv = ["rocktokens", *arguments]
    try:
        main()
    finally:
        _tell(calls)


def _serve_struck(strike: Strike, connection: Connection, gpu: str | None) -> None:
    """Be a worker of a study that is struck."""
    from rocktokens.studies.worker import serve

    calls = install(strike)
    try:
        serve(connection, gpu)
    finally:
        _tell(calls)


def _tell(calls: DiskCalls) -> None:
    if calls.strike.told is not None:
        lines = "".join(f"{kind} {count}\n" for kind, count in calls.counts.items())
        (calls.strike.told / f"{os.getpid()}").write_text(lines, encoding="utf-8")


def told_counts(folder: Path) -> Counter[str]:
    """The most calls of every kind that one process has made."""
    counts: Counter[str] = Counter()
    for path in folder.iterdir():
        for line in path.read_text(encoding="utf-8").splitlines():
            kind, count = line.split()
            counts[kind] = max(counts[kind], int(count))
    return counts
