"""Rollouts on disk: one Parquet row each, written before they are used and read back exactly as sampled."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rocktokens.parts import PartKind
from rocktokens.run_dir import FileEntry, RunDir
from rocktokens.types import Rollout

SCHEMA_VERSION = 1
_VERSION_KEY = b"rocktokens.rollouts.version"
SCHEMA = pa.schema(
    [
        ("rollout_id", pa.int64()),
        ("prompt_id", pa.string()),
        ("sample", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("policy_step", pa.int32()),
        ("finished", pa.bool_()),
    ],
    metadata={_VERSION_KEY: str(SCHEMA_VERSION)},
)
ROLLOUTS = PartKind("rollouts", SCHEMA, _VERSION_KEY, (str(SCHEMA_VERSION),))


def rollouts_table(rollouts: Sequence[Rollout]) -> pa.Table:
    """One row per rollout, in order."""
    columns = [_column(field, [getattr(rollout, field.name) for rollout in rollouts]) for field in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def table_rollouts(table: pa.Table) -> list[Rollout]:
    """The rollouts of a table made by ``rollouts_table``, in order."""
    ROLLOUTS.require_version(table.schema, "the table")
    columns = [_values(table.column(field.name)) for field in SCHEMA]
    return [Rollout(**dict(zip(SCHEMA.names, values, strict=True))) for values in zip(*columns, strict=True)]


def rollouts_bytes(rollouts: Sequence[Rollout]) -> bytes:
    """Pack rollouts for another process."""
    table = rollouts_table(rollouts)
    with pa.BufferOutputStream() as stream, pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue().to_pybytes()


def bytes_rollouts(packed: bytes) -> list[Rollout]:
    """Unpack what ``rollouts_bytes`` packed."""
    with pa.ipc.open_stream(packed) as reader:
        return table_rollouts(reader.read_all())


def write_rollouts(run: RunDir, relative: str, rollouts: Sequence[Rollout]) -> FileEntry:
    """Commit rollouts to the run under ``relative``, such as ``rollouts/training/step-3.parquet``."""
    table = rollouts_table(rollouts)
    return run.commit(relative, lambda path: pq.write_table(table, path, compression="zstd"), rows=table.num_rows)


def read_rollouts(run: RunDir, relative: str) -> list[Rollout]:
    """Committed rollouts, after checking that the file is the one that was committed."""
    return table_rollouts(ROLLOUTS.read(run, relative))


def _column(field: pa.Field, values: list) -> pa.Array:
    if not pa.types.is_list(field.type):
        return pa.array(values, type=field.type)
    offsets = np.cumsum([0, *(len(value) for value in values)], dtype=np.int32)
    dtype = field.type.value_type.to_pandas_dtype()
    flat = np.concatenate([np.empty(0, dtype), *values]).astype(dtype, casting="same_kind")
    return pa.ListArray.from_arrays(offsets, flat)


def _values(column: pa.ChunkedArray) -> list:
    """Python scalars, or one numpy array a row for list columns."""
    array = column.combine_chunks()
    if not pa.types.is_list(array.type):
        return array.to_pylist()
    flat, offsets = array.flatten().to_numpy(zero_copy_only=False, writable=True), array.offsets.to_numpy()
    return np.split(flat, offsets[1:-1]) if len(array) else []
