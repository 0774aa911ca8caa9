"""Spark as the engine of a store: the cluster of the session there is, or this machine.

1. A session of the caller, the one of ``spark-submit``, or a Spark Connect server lends its cluster; ours beside it
   leaves its settings and views alone. The run's folder must be mounted at the same path on every machine of the
   cluster. Without such a session a local one is started, silent, closed to other machines, and kept for the process,
   in which Ctrl-C does what it did before.
2. Tables travel as Arrow both ways. Ibis takes them through pandas, where an int64 beside a null becomes a float.
3. Arithmetic that overflows is an error (ANSI mode), as it is in DuckDB.
"""

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ibis
import ibis.expr.operations as ops
import ibis.expr.types as ir
import pyarrow as pa
from ibis.backends.pyspark import Backend
from ibis.util import gen_name
from pydantic import ByteSize
from pyspark import SparkConf, SparkContext  # pyright: ignore[reportMissingImports]
from pyspark.errors import PySparkImportError, PySparkRuntimeError  # pyright: ignore[reportMissingImports]
from pyspark.java_gateway import launch_gateway  # pyright: ignore[reportMissingImports]
from pyspark.sql import SparkSession  # pyright: ignore[reportMissingImports]
from pyspark.sql.pandas.types import from_arrow_schema  # pyright: ignore[reportMissingImports]

from rocktokens.errors import RocktokensError
from rocktokens.traces.engines import ReadParquet

_ = ibis.pyspark  # asked for by this name, ibis registers the options that its compiler reads

LEAST_MEMORY = 512 << 20
"""With less a Spark driver does not start."""
CONNECT_PORT = 15002
"""Of a Spark Connect server, where its address names none."""
PATIENCE = 10
"""Seconds that a server may take to answer a call."""
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""In the environment of a process that ``spark-submit`` runs."""
_SESSION_SETTINGS = {
    "spark.sql.ansi.enabled": "true",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
}
_READ_OPTIONS = {
    "mergeSchema": "true",
    "recursiveFileLookup": "true",  # or the folder name "checkpoint=N" would become a column
    "__globPaths__": "false",
}
_NO_ROWS = pa.table({"nothing": pa.array([], pa.int32())})
_LOCAL_SETTINGS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.log.level": "ERROR",
    # A result that reaches a small heap in small pieces fits into it; where there is little data these become one.
    "spark.sql.shuffle.partitions": "64",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes": "16m",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def open_spark(threads: int | None, memory: ByteSize) -> ReadParquet:
    """Join the cluster of this process's session, or start a local Spark with these threads and bytes of memory."""
    return _read_by(_session(threads, memory).newSession())


def open_remote_spark(url: str) -> ReadParquet:
    """Join the cluster behind a Spark Connect server, whose settings say what a query may take.

    The server is called once by hand: the client would go on trying for minutes.
    """
    try:
        place = urlsplit(url)
        socket.create_connection((place.hostname or "", place.port or CONNECT_PORT), timeout=PATIENCE).close()
        session = SparkSession.builder.remote(url).create()
    except (OSError, ValueError) as error:
        raise RocktokensError(
            f"engine = {url!r} cannot be reached ({str(error).lower()}): start a Spark Connect server there, or give "
            "another address"
        ) from None
    except (PySparkImportError, SystemExit) as error:  # without its client, pyspark ends a program without a file
        why = "" if isinstance(error, SystemExit) else f" ({error})"
        raise RocktokensError(
            f"engine = {url!r} needs the client of Spark Connect{why}: pip install 'rocktokens[spark]'"
        ) from None
    return _read_by(session, is_remote=True)


def _read_by(session: SparkSession, *, is_remote: bool = False) -> ReadParquet:
    for name, value in _SESSION_SETTINGS.items():
        session.conf.set(name, value)
    connection = _ArrowSpark(session)
    connection.is_remote = is_remote
    connection.reconnect()

    def read_parquet(paths: Sequence[Path], _are_alike: bool) -> ir.Table:
        view = gen_name("trace")
        files = [f"file://{path.absolute()}" for path in paths]  # whatever the cluster's default file system is
        session.read.options(**_READ_OPTIONS).parquet(*files).createOrReplaceTempView(view)
        return connection.table(view)

    return read_parquet


class _ArrowSpark(Backend):
    """Spark through ibis, without pandas in between."""

    _session: Any
    is_remote = False

    def to_pyarrow(self, expr: Any, /, *, params: Any = None, limit: Any = None, **options: Any) -> Any:
        self._run_pre_execute_hooks(expr)
        table = expr.as_table()
        try:
            found = self.raw_sql(self.compile(table, params=params, limit=limit, **options)).toArrow()
        except KeyboardInterrupt:
            if not self.is_remote:
                self._session.sparkContext.cancelAllJobs()
            raise
        return expr.__pyarrow_result__(found.cast(table.schema().to_pyarrow()))

    def _register_in_memory_table(self, op: ops.InMemoryTable) -> None:
        table = op.data.to_pyarrow(op.schema)
        if self.is_remote:  # which takes no table without rows
            rows: Any = table if table.num_rows else []
            frame = self._session.createDataFrame(rows, schema=from_arrow_schema(table.schema))
            frame.createOrReplaceTempView(op.name)
            return
        active = SparkSession.getActiveSession()
        self._session.createDataFrame(table).createOrReplaceTempView(op.name)
        if active is not None:
            active.createDataFrame(_NO_ROWS)  # making a frame made this session the active one: give that back


def _session(threads: int | None, memory: ByteSize) -> SparkSession:
    if _SUBMITTED in os.environ:
        return SparkSession.builder.getOrCreate()
    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return _local_session(threads or os.cpu_count() or 1, memory)


def _local_session(threads: int, memory: ByteSize) -> SparkSession:
    if memory < LEAST_MEMORY:
        raise RocktokensError(
            f"memory = {memory.human_readable()} is too little for engine = 'spark': give at least 512MiB"
        )
    settings = {
        **_LOCAL_SETTINGS,
        "spark.driver.memory": f"{memory >> 20}m",
        "spark.local.dir": tempfile.gettempdir(),
    }
    conf = SparkConf().setAppName("rocktokens").setMaster(f"local[{threads}]").setAll(list(settings.items()))
    with tempfile.TemporaryFile() as log:
        try:
            gateway = SparkContext._gateway or launch_gateway(conf, {"stdout": log, "stderr": log})
        except PySparkRuntimeError:
            log.seek(0)
            reason = log.readline().decode(errors="replace").strip()  # the first thing the Java launcher said
            raise RocktokensError(
                f"engine = 'spark' did not start ({reason}): "
                "it needs Java 17 or newer, on the PATH or where JAVA_HOME points"
            ) from None
    with _own_interrupts():
        return SparkSession(SparkContext(conf=conf, gateway=gateway))


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """Keep what Ctrl-C does: a context that starts takes it over for the rest of the process."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGINT, before)
