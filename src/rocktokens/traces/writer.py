"""Write trace rows as immutable Parquet parts, so that a killed process loses at most the rows it had buffered.

1. Rows are validated and buffered; a full buffer, ``flush`` or the end of the ``with`` block makes a part.
2. A part is one commit of the run directory: temporary name, fsync, rename, then listed in the manifest.
3. Replays live in ``traces/checkpoint=N/``, paired by occurrence; the rows of a training run are on-policy and
   unpaired, so they live apart in ``traces/training/``.
4. The bytes of a part depend on its rows alone: not on the time, nor on how they were appended.
5. ``WriteBehind`` makes parts in a thread, in order, while their rows' successors are computed.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq

from rocktokens.errors import RunDirError
from rocktokens.run_dir import RunDir
from rocktokens.traces.schema import validate_table

Source = Literal["replay", "training"]
ROWS_PER_GROUP = 122_880
"""What DuckDB hands to one thread: smaller groups cost space, larger ones leave threads idle."""
OF_FEW_VALUES = ["rollout_id", "prompt_id", "token_id", "policy_step", "weight"]
"""Columns whose values are worth a dictionary. Scores rarely recur: theirs takes time and space for nothing."""
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
        rows_per_part: int = 1_000_000,
        source: Source = "replay",
    ) -> None:
        if rows_per_part < 1:
            raise RunDirError(f"rows_per_part = {rows_per_part} is not valid: give at least 1")
        self._run = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
        self._folder = parts_folder(source, checkpoint)
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
        self._buffer.append(valid)
        self._buffered += valid.num_rows
        while self._buffered >= self._rows_per_part:
            self._write_part(self._rows_per_part)

    def flush(self) -> None:
        """End the part here: all rows appended so far are committed when this returns."""
        self._require_open()
        if self._buffered:
            self._write_part(self._buffered)

    def _write_part(self, rows: int) -> None:
        waiting = pa.concat_tables(self._buffer, promote_options="default")
        part = waiting.slice(0, rows).combine_chunks()  # Parquet ends pages by chunk, so appends would show
        relative = f"{self._folder}part-{self.parts:05d}.parquet"
        self._run.commit(relative, lambda path: write_parquet(part, path), rows=rows)
        self._buffered -= rows
        self._buffer = [waiting.slice(rows)] if self._buffered else []

    def _require_open(self) -> None:
        if not self._is_open:
            raise RunDirError(f"the trace writer of {self._run.path} is not open: use it in a `with` block")


class WriteBehind:
    """Runs writes in a thread, one after the other in the order they came, at most two of them waiting.

    Example: ``with WriteBehind() as behind: behind.put(lambda: write_part(scores))``. The first write that fails is the
    last that runs: its error is raised by the next ``put``, or at the end of the ``with`` block. What was put is
    written before the block ends, even when that raises.
    """

    def __init__(self) -> None:
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
            self._let_go(down_to=0)

    def put(self, write: Callable[[], None]) -> None:
        """Have this written after what was put before; waits while too much is waiting."""
        self._let_go(down_to=WAITING_WRITES)
        self._unfinished.append(self._thread.submit(self._run, write))

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


def write_parquet(table: pa.Table, path: Path) -> None:
    """Write a table of the schema as one file."""
    few: Any = OF_FEW_VALUES  # a list, which pyarrow takes and its signature hides
    pq.write_table(table, path, compression="zstd", row_group_size=ROWS_PER_GROUP, use_dictionary=few)
