"""The runs that an explorer shows: found, numbered, opened when they are asked for, and read again when they change.

1. A given folder that is a run is shown as given. Any other folder is searched for runs and studies, breadth first and
   within bounds; a link is followed, and no run is listed twice.
2. A run keeps its number for as long as the explorer runs. The search is repeated whenever the list is asked for, and
   what is new gets the next numbers.
3. A view belongs to one version of a run (``run_version``). A request that finds another version lets go of the view
   and opens a new one. Only the views that were used last stay open. A row of the list is kept until the manifest or
   the log changes.
"""

import hashlib
import os
import queue
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rocktokens.display.numbers import count, counted
from rocktokens.display.text import legible
from rocktokens.errors import RocktokensError
from rocktokens.report.views.run_row import RunRow, log_state, run_row, run_version
from rocktokens.report.views.run_view import RunView
from rocktokens.run_dir import RunDir, run_at

MAX_DEPTH = 6
"""Folders below a given one, as in ``runs/demo/study/arms/uniform/seed-1``."""
MAX_RUNS, MAX_FOLDERS = 500, 20_000
MAX_OPEN = 16
"""Views at once: as many as curves that lie over each other, and one more."""
NO_RUNS_INSIDE = frozenset({"traces", "rollouts", "checkpoints", "knockout", "tokenizer", "figures"})
"""Folders of a run that hold its own files."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The runs there are now."""

    rows: tuple[tuple[int, RunRow], ...]
    """By number."""
    left_out: str
    """What the search did not list, in one sentence; empty where it listed everything."""


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    name: str


class Shelf:
    """Runs by number; several threads may ask.

    Args:
        given: folders of runs, or folders to search for runs.
        open_run: opens the view of a run.
    """

    def __init__(self, given: Sequence[Path], open_run: Callable[[Path], RunView] = RunView.open) -> None:
        self._viewing, self._searching = threading.Lock(), threading.Lock()
        self._open_run = open_run
        self._folders = [path for path in given if not RunDir(path).exists()]
        self._entries = [_Entry(path, legible(path.resolve().name)) for path in given if RunDir(path).exists()]
        self._open: OrderedDict[int, tuple[str, RunView]] = OrderedDict()
        self._opened: queue.SimpleQueue[Callable[[], RunView | None]] = queue.SimpleQueue()
        self._versions: dict[int, tuple[bytes, str]] = {}
        self._rows: dict[int, tuple[object, RunRow]] = {}
        self.n_given = len(self._entries)
        for folder in self._folders:
            _require_runs(folder)
        self._search()

    def listing(self, now: float | None) -> Listing:
        """Look for runs again, and list all there are; ``now`` as for ``run_row``."""
        with self._searching:
            left_out = self._search()
            there = [(number, own) for number, own in enumerate(self._entries) if RunDir(own.path).exists()]
            return Listing(tuple((number, self._row(number, own, now)) for number, own in there), left_out)

    def _row(self, number: int, own: _Entry, now: float | None) -> RunRow:
        try:
            state = (now is None, _digest(RunDir(own.path)), *log_state(RunDir(own.path), now))
        except OSError:
            return run_row(own.path, own.name, now)
        known, row = self._rows.get(number, (None, None))
        if row is None or known != state:
            row = run_row(own.path, own.name, now)
            self._rows[number] = (state, row)
        return row

    def view(self, number: int) -> RunView:
        """Return the run as it is now."""
        version = self.version(number)
        with self._viewing:
            held, view = self._open.get(number, ("", None))
            if view is None or held != version:
                self._open.pop(number, None)
                view = None  # its memory is needed for the next
                view = self._open_run(self._entry(number).path)
                self._open[number] = (version, view)
                self._opened.put(weakref.ref(view))
            self._open.move_to_end(number)
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
            return view

    def version(self, number: int) -> str:
        """Name the present content of a run; the manifest is parsed only where its bytes have changed."""
        run = RunDir(self._entry(number).path).require()
        digest = _digest(run)
        known, version = self._versions.get(number, (b"", ""))
        if known != digest:
            version = run_version(run)
            self._versions[number] = (digest, version)
        return version

    def put_away(self, number: int) -> None:
        """Let go of a view, so that the next request opens the run again."""
        with self._viewing:
            self._open.pop(number, None)

    def next_opened(self) -> RunView | None:
        """Wait for a view to be opened; None where it is gone again, or no one is to wait any longer."""
        return self._opened.get()()

    def stop_waiting(self) -> None:
        """Let whoever waits for a view go on."""
        self._opened.put(lambda: None)

    def is_open(self, view: RunView) -> bool:
        """Whether a view is still shown: neither replaced nor put away."""
        with self._viewing:
            return any(own is view for _, own in self._open.values())

    def _entry(self, number: int) -> _Entry:
        if number >= len(self._entries):
            last = len(self._entries) - 1
            raise RocktokensError(f"run {number} is not there: the runs are numbered from 0 to {last}")
        return self._entries[number]

    def _search(self) -> str:
        """Append the runs that are new, and say what was left out."""
        known = {os.path.realpath(own.path) for own in self._entries}
        said = []
        for folder in self._folders:
            walk = _Walk(folder)
            for path in walk.runs():
                if os.path.realpath(path) in known:
                    continue
                if len(self._entries) >= MAX_RUNS:
                    said.append(f"Only the first {MAX_RUNS} runs are listed.")
                    break
                known.add(os.path.realpath(path))
                inside = path.relative_to(folder).as_posix()
                name = inside if len(self._folders) == 1 else f"{folder.resolve().name}/{inside}"
                self._entries.append(_Entry(path, legible(name)))
            said += walk.left_out()
        return " ".join([*said, "Give a folder further down."]) if said else ""


def _digest(run: RunDir) -> bytes:
    return hashlib.sha256((run.path / "manifest.json").read_bytes()).digest()


def _require_runs(folder: Path) -> None:
    """Refuse a folder that is no run and holds none."""
    if not folder.is_dir():
        raise RocktokensError(f"{folder} is not a folder: give the folder of a run, or one that holds runs")
    if next(_Walk(folder).runs(), None) is None:
        raise RocktokensError(
            f"{folder} is not a run directory and holds none (no manifest.json within {MAX_DEPTH} folders): give the "
            "folder of a run, or one that holds runs"
        )


class _Walk:
    """One search of a folder, breadth first, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._n_seen = self._n_deeper = 0
        self._is_cut = False

    def runs(self) -> Iterator[Path]:
        """Find the folders below that are runs; runs inside of runs, as a study's are, come after them."""
        pending, seen = deque([(self._folder, 0)]), {os.path.realpath(self._folder)}
        while pending:
            folder, depth = pending.popleft()
            with suppress(OSError):  # a manifest that may not be read
                if depth and run_at(folder):
                    yield folder
            for below in self._below(folder):
                if (real := os.path.realpath(below)) in seen:
                    continue
                seen.add(real)
                if depth == MAX_DEPTH:
                    self._n_deeper += 1
                elif self._n_seen == MAX_FOLDERS:
                    self._is_cut = True
                else:
                    self._n_seen += 1
                    pending.append((below, depth + 1))

    def left_out(self) -> list[str]:
        """Say what was not looked at."""
        said = []
        if self._n_deeper:
            deeper = counted(self._n_deeper, "folder")
            said.append(f"Not searched: {deeper} more than {MAX_DEPTH} levels below {self._folder.name}.")
        if self._is_cut:
            said.append(f"Only the first {count(MAX_FOLDERS)} folders below {self._folder.name} were searched.")
        return said

    def _below(self, folder: Path) -> list[Path]:
        with suppress(OSError), os.scandir(folder) as inside:
            names = sorted(own.name for own in inside if own.is_dir())
            return [folder / name for name in names if not name.startswith(".") and name not in NO_RUNS_INSIDE]
        return []
