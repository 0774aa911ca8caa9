"""Parquet parts of a run: what the parts of a kind hold, and the one way to read one.

1. The bytes must be those that the manifest lists (``RunDir.verified``).
2. The file must be Parquet in whole, of a version that can be read, with every column in its type.
3. It must have as many rows as the manifest lists.

Anything else is refused in one sentence that names the file and what makes it again.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from rocktokens.errors import RunDirError
from rocktokens.run_dir import FileEntry, RunDir

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class PartKind:
    """What the parts of one kind hold.

    Example: ``PartKind("rollouts", schema, b"rocktokens.rollouts.version", ("1",))``.
    """

    name: str
    schema: pa.Schema
    version_key: bytes
    """Where the metadata of a file has its version."""
    readable: tuple[str, ...]
    """Versions that can be read, the current one last."""
    optional: frozenset[str] = frozenset()
    """Columns that a part may lack."""

    def read(self, run: RunDir, relative: str) -> pa.Table:
        """The rows of a committed part."""
        path, entry = run.verified_entry(relative)
        return self._table(run, entry, path)

    def read_listed(self, run: RunDir, entries: Iterable[FileEntry]) -> Iterator[pa.Table]:
        """The rows of committed parts that were looked up together: a manifest of thousands is long to read."""
        for entry in entries:
            yield self._table(run, entry, run.verify(entry))

    def _table(self, run: RunDir, entry: FileEntry, path: Path) -> pa.Table:
        table = read_parquet(run, entry.path, path, whole_table)
        self.require(run, entry, table.schema, table.num_rows)
        return table

    def require_version(self, schema: pa.Schema, what: str) -> None:
        """Refuse a table that another version wrote; ``what`` is what the sentence calls it."""
        version = (schema.metadata or {}).get(self.version_key, b"none").decode(errors="replace")
        if version not in self.readable:
            raise RunDirError(
                f"{what} has {self.name} of schema version {version}, this rocktokens reads {self.readable[-1]}: use "
                "the version that wrote it"
            )

    def require(self, run: RunDir, entry: FileEntry, schema: pa.Schema, rows: int) -> None:
        """Refuse a part of another version, with other columns, or with other rows than listed."""
        self.require_version(schema, str(run.path / entry.path))
        known = {column.name: column.type for column in self.schema}
        found = {column.name: column.type for column in schema}
        wrong = [name for name, kind in found.items() if known.get(name) != kind]
        if wrong or (wrong := [name for name in known if name not in found and name not in self.optional]):
            raise run.damaged(entry.path, f"has not the columns of {self.name} (first: {wrong[0]})")
        if rows != entry.rows:
            raise run.damaged(entry.path, f"has {rows} rows, its manifest lists {entry.rows}")


def whole_table(path: Path) -> pa.Table:
    """Read all columns; their names too, which may be no text."""
    table = pq.read_table(path)
    _ = table.schema.names
    return table


def read_parquet(run: RunDir, relative: str, path: Path, read: Callable[[Path], Found]) -> Found:
    """Read something of a Parquet file of a run; refused where it is none, but for a FileNotFoundError."""
    try:
        return read(path)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip().splitlines()[-1].rstrip(".")
        raise run.damaged(relative, f"cannot be read as Parquet ({reason})") from None
