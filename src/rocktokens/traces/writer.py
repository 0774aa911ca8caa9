"""Write trace rows as immutable Parquet parts, so that a killed process loses at most the rows it had buffered.

1. Rows are validated and buffered; a full buffer, ``flush`` or the end of the ``with`` block makes a part.
2. A part is one commit of the run directory: temporary name, fsync, rename, then listed in the manifest.
3. Replays live in ``traces/checkpoint=N/``, paired by occurrence; the rows of a training run are on-policy and
   unpaired, so they live apart in ``traces/training/``.
4. The bytes of a part depend on its rows alone: not on the time, nor on how they were appended.
5. The choice within classes of tokens (``kl_choice``) is of one set of classes in a part, and in all parts of a
   checkpoint. Where the classes of a training run change, a part ends.
6. ``add_choice`` puts that column into a part that is there, and changes nothing else of it. Of every part of a replay
   that has the column, whenever it came, the manifest keeps the hash that the part has without it, so that what was
   made from its other columns is known to be made from it.
7. Several processes may write parts: each its own under temporary names (``write_loose``), which the writer then
   names and lists, all in one replacement of the manifest (``TraceWriter.adopt``). Until then they do not exist.
8. ``WriteBehind`` makes parts in a thread, in order, while their rows' successors are computed.
"""

import hashlib
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rocktokens.classes import TokenClasses
from rocktokens.errors import RunDirError
from rocktokens.parts import read_parquet
from rocktokens.run_dir import FileEntry, RunDir, file_sha256, fsync, write_atomically
from rocktokens.traces.schema import classes_of, served_of, validate_table, with_choice, without_choice

Source = Literal["replay", "training"]
ROWS_PER_PART = 1_000_000
"""At most."""
ROWS_PER_GROUP = 122_880
"""What DuckDB hands to one thread: smaller groups cost space, larger ones leave threads idle."""
OF_FEW_VALUES = ["rollout_id", "prompt_id", "token_id", "policy_step", "weight"]
"""Columns whose values are worth a dictionary. Scores rarely recur: theirs takes time and space for nothing."""
CHOICE_ADDED = "choice_added"
"""Entry of the manifest: by SHA-256 of a part of a replay with ``kl_choice``, that of the part without the column."""
LOOSE = ".loose"
"""How the name of a part ends that is not adopted yet."""
WAITING_WRITES = 2
"""Enough to outlast a slow flush to the disk; what waits holds its scores in memory."""


class TraceWriter:
    """The one writer of a folder of trace parts; holds the run's lock from ``with`` to its end.

    Example: ``with TraceWriter("runs/a", checkpoint=200) as writer: writer.append(table)``. Opening a checkpoint that
    already has parts adds to them. When the ``with`` block raises, the rows still buffered are dropped.
    """

    def __init__(
        self,
        run_dir: str | Path | RunDir,
        checkpoint: int | None = None,
        rows_per_part: int = ROWS_PER_PART,
        source: Source = "replay",
    ) -> None:
        if rows_per_part < 1:
            raise RunDirError(f"rows_per_part = {rows_per_part} is not valid: give at least 1")
        self._run = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
        self._folder = parts_folder(source, checkpoint)
        self._is_replay = source == "replay"
        self._rows_per_part = rows_per_part
        self._buffer: list[pa.Table] = []
        self._buffered = 0
        self._open = ExitStack()
        self._is_open = False

    def __enter__(self) -> Self:
        self._open.enter_context(self._run.lock())
        self._is_open = True
        if not self._run.exists():
            self._run.update_manifest()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            try:
                if kind is None:
                    self.flush()
            finally:
                self._is_open = False

    @property
    def parts(self) -> int:
        """Committed parts of this folder: where an interrupted writer goes on."""
        return len(self._run.files(self._folder))

    def append(self, table: pa.Table) -> None:
        """Add rows; whenever ``rows_per_part`` of them are waiting they become a part."""
        self._require_open()
        valid = validate_table(table)
        self._require_classes(classes_of(valid.schema))
        self._require_teacher(served_of(valid.schema))
        self._buffer.append(valid)
        self._buffered += valid.num_rows
        while self._buffered >= self._rows_per_part:
            self._write_part(self._rows_per_part)

    def flush(self) -> None:
        """End the part here: all rows appended so far are committed when this returns."""
        self._require_open()
        if self._buffered:
            self._write_part(self._buffered)

    def adopt(self, loose: Sequence[FileEntry]) -> None:
        """Make parts that other processes wrote the next ones, in this order, after the rows appended so far."""
        self.flush()
        first, folder = self.parts, self._run.path / self._folder
        names = [f"{self._folder}part-{first + number:05d}.parquet" for number in range(len(loose))]
        for part, name in zip(loose, names, strict=True):
            try:
                (self._run.path / part.path).replace(self._run.path / name)
            except FileNotFoundError:
                raise RunDirError(
                    f"{self._run.path / part.path} is not there, though a process has written it: give a run.directory "
                    "on a file system that all machines share"
                ) from None
        fsync(folder)
        self._run.list_files([replace(part, path=name) for part, name in zip(loose, names, strict=True)])

    def drop_loose(self) -> None:
        """Delete what processes wrote that were killed before it was adopted."""
        for path in (self._run.path / self._folder).glob(f"*{LOOSE}*"):
            path.unlink()

    def _write_part(self, rows: int) -> None:
        waiting = pa.concat_tables(self._buffer, promote_options="default")
        part = waiting.slice(0, rows).combine_chunks()  # Parquet ends pages by chunk, so appends would show
        relative = f"{self._folder}part-{self.parts:05d}.parquet"
        if self._is_replay and classes_of(part.schema) is not None:
            content = parquet_bytes(part)
            _note_choice(self._run, content, _sha256(parquet_bytes(without_choice(part))))
            self._run.commit(relative, lambda path: path.write_bytes(content), rows=rows)
        else:
            self._run.commit(relative, lambda path: write_parquet(part, path), rows=rows)
        self._buffered -= rows
        self._buffer = [waiting.slice(rows)] if self._buffered else []

    def _require_classes(self, wanted: str | None) -> None:
        """Refuse rows whose choice is of other classes than that of the rows before; while training, end the part."""
        if not self._is_replay:
            if self._buffer and classes_of(self._buffer[-1].schema) != wanted:
                self.flush()
            return
        for before in map(classes_of, self._schemas_before()):
            if before != wanted:
                raise RunDirError(
                    f"these rows have {_by_classes(wanted)}, those before them in {self._run.path / self._folder} have "
                    f"{_by_classes(before)}: give all rows of a checkpoint the choice within the same classes, or none"
                )

    def _require_teacher(self, wanted: str) -> None:
        """Refuse rows whose teacher gave other values than that of the rows before."""
        for before in map(served_of, self._schemas_before()):
            if before != wanted:
                raise RunDirError(
                    f"these rows have a teacher that {_by_teacher(wanted)}, those before them in "
                    f"{self._run.path / self._folder} one that {_by_teacher(before)}: keep them apart, in two runs"
                )

    def _schemas_before(self) -> Iterator[pa.Schema]:
        """Of the row that the next one comes after; none where there is no such row, or its part is missing."""
        if self._buffer:
            yield self._buffer[-1].schema
        elif parts := self._run.files(self._folder):
            with suppress(FileNotFoundError):
                last = parts[-1].path
                yield read_parquet(self._run, last, self._run.path / last, pq.read_schema)

    def _require_open(self) -> None:
        if not self._is_open:
            raise RunDirError(f"the trace writer of {self._run.path} is not open: use it in a `with` block")


def write_loose(run: RunDir, table: pa.Table, rows_per_part: int = ROWS_PER_PART) -> list[FileEntry]:
    """Write rows of a training run as parts that are no part of it yet: any process may, for its writer to adopt.

    Their names are of this process: one that outlives its run overwrites nothing.
    """
    folder, valid, entries = parts_folder("training", None), validate_table(table), []
    for number, first in enumerate(range(0, valid.num_rows, rows_per_part)):
        part = valid.slice(first, rows_per_part).combine_chunks()
        relative = f"{folder}{uuid.uuid4().hex}-{number}{LOOSE}"
        write_atomically(run.path / relative, lambda path, part=part: write_parquet(part, path))
        entries.append(FileEntry(relative, part.num_rows, file_sha256(run.path / relative)))
    return entries


class WriteBehind:
    """Runs writes in a thread, one after the other in the order they came, at most ``waiting`` of them not begun.

    Example: ``with WriteBehind() as behind: behind.put(lambda: write_part(scores))``. The first write that fails is the
    last that runs: its error is raised by the next call, or at the end of the ``with`` block. What was put is written
    before the block ends, even when that raises.
    """

    def __init__(self, waiting: int = WAITING_WRITES) -> None:
        self._waiting = waiting
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="write-behind")
        self._unfinished: deque[Future[None]] = deque()
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if kind is None:
            self.wait()

    def put(self, write: Callable[[], None]) -> None:
        """Have this written after what was put before; waits while too much is waiting."""
        self._let_go(down_to=self._waiting)
        self._unfinished.append(self._thread.submit(self._run, write))

    def wait(self) -> None:
        """Return once everything that was put is written."""
        self._let_go(down_to=0)

    def require_sound(self) -> None:
        """Raise what a write raised by now; waits for none."""
        self._let_go(down_to=len(self._unfinished))

    def _let_go(self, down_to: int) -> None:
        """Forget the writes that are done, wait until no more than ``down_to`` are not, and raise what one raised."""
        while self._unfinished and (len(self._unfinished) > down_to or self._unfinished[0].done()):
            self._unfinished.popleft().result()

    def _run(self, write: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            write()
        except BaseException:
            self._failed = True
            raise


def parts_folder(source: Source, checkpoint: int | None) -> str:
    """Return where parts live, relative to the run, with the closing slash."""
    if source == "training":
        if checkpoint is not None:
            raise RunDirError(f"checkpoint = {checkpoint} is not valid for training traces: leave it out")
        return "traces/training/"
    if source != "replay":
        raise RunDirError(f"source = {source!r} is not valid: use 'replay' or 'training'")
    if checkpoint is None or checkpoint < 0:
        raise RunDirError(
            f"checkpoint = {checkpoint} is not valid: give the step of the replayed checkpoint, 0 or more"
        )
    return f"traces/checkpoint={checkpoint}/"


def add_choice(run: RunDir, relative: str, kl_choice_T: np.ndarray, classes: TokenClasses) -> None:
    """Write a committed part again with the choice (T,) of its rows within classes, and nothing else changed.

    That the rows are those of before is noted first, so a process killed in between leaves the part as it was.
    """
    with run.lock():
        part = read_parquet(run, relative, run.verified(relative), lambda path: pq.ParquetFile(path).read())
        table = with_choice(part, kl_choice_T, classes)
        content, manifest = parquet_bytes(table), run.manifest()
        before = manifest["files"][relative]["sha256"]
        _note_choice(run, content, manifest.get(CHOICE_ADDED, {}).get(before, before))
        run.commit(relative, lambda path: path.write_bytes(content), rows=len(table))


def _note_choice(run: RunDir, content: bytes, without: str) -> None:
    """Note in the manifest which part one with the choice is without that column."""
    known = run.manifest().get(CHOICE_ADDED, {})
    run.update_manifest(**{CHOICE_ADDED: {**known, _sha256(content): without}})


def part_classes(run: RunDir, relative: str, path: Path) -> str | None:
    """Hash of the classes that a part, now at ``path``, has the choice within; None where it has no such column."""
    return classes_of(read_parquet(run, relative, path, pq.read_schema))


def _by_classes(sha256: str | None) -> str:
    return "no kl_choice" if sha256 is None else f"kl_choice by classes {sha256[:12]}"


def _by_teacher(served: str) -> str:
    return f"was served ({served})" if served else "was in memory"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def parquet_bytes(table: pa.Table) -> bytes:
    """What ``write_parquet`` writes."""
    with pa.BufferOutputStream() as stream:
        write_parquet(table, stream)
    return stream.getvalue().to_pybytes()


def write_parquet(table: pa.Table, path: Path | pa.NativeFile) -> None:
    """Write a table of the schema as one file."""
    few: Any = OF_FEW_VALUES  # a list, which pyarrow takes and its signature hides
    pq.write_table(table, path, compression="zstd", row_group_size=ROWS_PER_GROUP, use_dictionary=few)
