"""What evaluates the expressions of a store: DuckDB inside this process, or Spark where one machine is not enough.

Spark is "spark", in this process, or the address of a Spark Connect server, "sc://HOST:PORT".

1. An engine reads an explicit list of Parquet files as one table: names are names, not patterns, and a column that
   some files lack is null there.
2. It is bounded: ``memory`` is what it holds before it spills into a folder of its own in the system's temporary one.
3. Rows come in no particular order: a query whose order matters says ``order_by``.
4. Where a query fails, the files are read once more, one by one: one that is damaged is named.

Integer sums make the results the same bits on any engine, at any number of threads and with any memory.
"""

import re
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import ibis.expr.types as ir
import pyarrow as pa
from ibis.backends.duckdb import Backend
from pydantic import ByteSize, TypeAdapter, ValidationError

from rocktokens.errors import RocktokensError, RunDirError

ENGINES = ("duckdb", "spark")
REMOTE = "sc://"
"""How the address of a Spark Connect server begins."""
DEFAULT_MEMORY = "768MiB"
LEAST_MEMORY = 16 << 20
OF_FILES = (duckdb.IOException, duckdb.InvalidInputException, duckdb.SerializationException)
"""What DuckDB raises over content that it cannot read; what it has no name for is ``duckdb.Error`` itself."""
ReadParquet = Callable[[Sequence[Path], bool], ir.Table]
"""Reads files as one table; whether they all have the same columns."""
NameUnreadable = Callable[[Sequence[Path]], None]
"""Refuses the first of some files that cannot be read."""


def open_engine(
    engine: str, threads: int | None, memory: str, name_unreadable: NameUnreadable = lambda _: None
) -> ReadParquet:
    """Start an engine (or join the Spark session there is); what comes back reads files as one of its tables."""
    if threads is not None and threads < 1:
        raise RocktokensError(f"threads = {threads} is not valid: give at least 1")
    try:
        limit = TypeAdapter(ByteSize).validate_python(memory)
    except ValidationError:
        raise RocktokensError(f"memory = {memory!r} is not a size: give a number and a unit, such as '1GiB'") from None
    if limit < LEAST_MEMORY:
        raise RocktokensError(f"memory = {memory!r} is too little for any query: give at least 16MiB")
    if engine == "duckdb":
        return _open_duckdb(threads, limit, name_unreadable)
    if engine == "spark" or engine.startswith(REMOTE):
        return _open_spark(engine, threads, limit)
    raise RocktokensError(
        f"engine = {engine!r} is not known: use one of {', '.join(ENGINES)}, or the address of a Spark Connect server "
        f"({REMOTE}HOST:PORT)"
    )


def _open_spark(engine: str, threads: int | None, memory: ByteSize) -> ReadParquet:
    with warnings.catch_warnings():
        # Tables go to and from Spark as Arrow, so what it supports of pandas does not matter.
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
        try:
            from rocktokens.traces.spark import open_remote_spark, open_spark
        except ModuleNotFoundError as error:
            raise RocktokensError(
                f"engine = 'spark' needs {error.name}, which is not installed: "
                "pip install 'rocktokens[spark]', with Java 17 or newer"
            ) from None
        return open_spark(threads, memory) if engine == "spark" else open_remote_spark(engine)


class _BoundedDuckDB(Backend):
    """DuckDB whose refusal to go beyond its memory is a sentence about ``memory``, and that names damaged files.

    A file that is replaced or removed after it was first read is refused: a result would be of two states of a run.
    """

    memory: ByteSize
    read: dict[Path, tuple[int, ...] | None]
    """Every file it was asked to read, as it was then."""
    name_unreadable: NameUnreadable

    def to_pyarrow(self, expr: ir.Expr, /, **options: Any) -> pa.Table | pa.ChunkedArray | pa.Scalar:
        with self.naming_files():
            found = super().to_pyarrow(expr, **options)
        self.require_unchanged()
        return found

    @contextmanager
    def naming_files(self) -> Iterator[None]:
        """Turn what DuckDB says of memory and of files into sentences."""
        try:
            yield
        except duckdb.OutOfMemoryException:
            raise RocktokensError(
                f"memory = {self.memory.human_readable()} is too little for this query: give more, or fewer threads"
            ) from None
        except duckdb.Error as error:
            self.require_unchanged()
            self.name_unreadable(list(self.read))
            if isinstance(error, OF_FILES) or type(error) is duckdb.Error:
                said = str(error).partition("\n")[0]
                folder = next(iter(self.read)).parent
                raise RunDirError(f"a part in {folder} cannot be read ({said}): restore it from a copy") from None
            raise

    def require_unchanged(self) -> None:
        """Refuse a file that is no longer the one that was read."""
        for path, before in self.read.items():
            if _identity(path) != before:
                raise RunDirError(
                    f"{path} was replaced or removed by another command after this one opened the run: start this one "
                    "again"
                )


def _identity(path: Path) -> tuple[int, ...] | None:
    """What tells a file from one that takes its place; None where there is none. A further link to it is no change."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _open_duckdb(threads: int | None, memory: ByteSize, name_unreadable: NameUnreadable) -> ReadParquet:
    spill = tempfile.mkdtemp(prefix="rocktokens-")
    connection = _BoundedDuckDB(
        memory_limit=f"{memory:d}B",
        temp_directory=spill,
        preserve_insertion_order=False,
        **({} if threads is None else {"threads": threads}),
    )
    weakref.finalize(connection, shutil.rmtree, spill, ignore_errors=True)
    connection.memory, connection.read, connection.name_unreadable = memory, {}, name_unreadable
    connection.reconnect()
    connection.raw_sql("SET parquet_metadata_cache = true")  # a thousand footers take longer than most queries

    def read_parquet(paths: Sequence[Path], are_alike: bool) -> ir.Table:
        # DuckDB reads every path as a pattern; a character class of one is that character.
        connection.read.update({path: _identity(path) for path in paths})
        names = [re.sub(r"[*?\[]", r"[\g<0>]", str(path)) for path in paths]
        with connection.naming_files():
            # The folder name "checkpoint=N" is ours to read.
            return connection.read_parquet(names, hive_partitioning=False, union_by_name=not are_alike)

    return read_parquet
