"""Read the trace parts of a run through ibis, on an embedded DuckDB or on Spark.

1. The manifest says which parts exist; stray files do not, and a listed part that is missing or changed is an error.
2. When a checkpoint is first asked for, its parts are verified (SHA-256, on as many threads as the engine has) and
   their footers checked (schema version, row count), before any engine reads them.
3. Statistics are ibis expressions over ``table(checkpoint)``; integer sums make them the same on any engine.
4. Data has one name, ``manifest_sha256``, whether or not parts have the column ``kl_choice``, and whenever they got it:
   records that do not look at that column stay those of the traces. Whoever looks at it asks ``classes_sha256``.
5. Of a served teacher every part says what it gave (``teacher``); parts of one table say the same.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from rocktokens.display.numbers import listed
from rocktokens.display.strip import Piece, strip_html
from rocktokens.display.table import Column, Table, number
from rocktokens.display.text import visible
from rocktokens.errors import RocktokensError, RunDirError, TokenizerMismatchError
from rocktokens.parts import read_parquet, whole_table
from rocktokens.run_dir import MAKERS, FileEntry, RunDir
from rocktokens.traces.engines import DEFAULT_MEMORY, open_engine
from rocktokens.traces.schema import classes_of, require_readable, served_of
from rocktokens.traces.token_text import Vocabulary
from rocktokens.traces.writer import CHOICE_ADDED, Source, parts_folder
from rocktokens.types import ReplayRecord, of_teacher

TOKENIZER = "tokenizer/tokenizer.json"
SEARCHED = "searched"
"""Entry of the manifest: ``manifest_sha256`` of the parts that records of the run were ever made from, oldest first."""
_CHECKPOINT = re.compile(r"traces/checkpoint=(\d+)/")


@dataclass(frozen=True, slots=True)
class RolloutTable:
    """The rows of one rollout in order of position; what it does not have itself is asked of ``table``.

    Example: ``store.rollout(3, 64).to_pandas()``.
    """

    table: pa.Table
    vocabulary: Vocabulary
    teacher: str = ""
    """``TraceStore.teacher``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)

    def __getitem__(self, column: int | str) -> pa.ChunkedArray:
        return self.table[column]

    def __len__(self) -> int:
        return self.table.num_rows

    def _repr_html_(self) -> str:
        """Show the tokens as text, coloured by kl."""
        rows = self.table.select(["rollout_id", "prompt_id", "token_id", "kl"]).to_pylist()
        where = f"rollout {rows[0]['rollout_id']} of prompt {visible(rows[0]['prompt_id'])}"
        title = f"{where}; coloured by kl{of_teacher(self.teacher)}"
        text = self.vocabulary.text
        return strip_html(title, [Piece(row["token_id"], text(row["token_id"]), row["kl"]) for row in rows])


class TraceStore:
    """A read-only view over the committed trace parts of one run, as they were when it was opened.

    Args:
        run_dir: the run's folder.
        engine: what evaluates the expressions: "duckdb" in this process, or "spark" on the session this process has,
            else on this machine.
        threads: of the engine; None lets it use every core.
        source: "replay" (rows by checkpoint, paired) or "training" (on-policy rows, no checkpoints).
        memory: what the engine may hold before it spills into the system's temporary folder, such as "4GiB". A Spark
            session that is there already keeps its own threads and memory.
    """

    def __init__(
        self,
        run_dir: str | Path | RunDir,
        engine: str = "duckdb",
        threads: int | None = None,
        source: Source = "replay",
        memory: str = DEFAULT_MEMORY,
    ) -> None:
        self.run = (run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)).require()
        self.source: Source = source
        self._manifest = self.run.manifest()
        is_training, folder = source == "training", parts_folder("training", None)
        self._parts = [part for part in self.run.files("traces/") if part.path.startswith(folder) == is_training]
        # Of the run alone: an engine that knew the store would keep its memory until cycles are collected.
        self._read_parquet = open_engine(engine, threads, memory, partial(_name_unreadable, self.run))
        self._threads = threads
        self._tables: dict[str, ir.Table] = {}
        self._classes: dict[str, set[str | None]] = {}
        self._teachers: dict[str, set[str]] = {}

    def __repr__(self) -> str:
        rows = sum(part.rows for part in self._parts)
        steps = ", ".join(map(str, self.checkpoints)) or "none"
        where = f"checkpoints {steps}" if self.source == "replay" else "training"
        return f"TraceStore({str(self.run.path)!r}, {where}, {rows:,} rows)"

    def _repr_html_(self) -> str:
        """Show the rows by checkpoint as a table in a notebook."""
        columns: list[Column[int]] = [
            Column("checkpoint", number),
            Column("rows", lambda step: number(self.rows(step))),
        ]
        return Table.of("traces", columns, self.checkpoints, f"{self!r}.").to_html()

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the replayed checkpoints, oldest first; none in a store of training rows."""
        matches = (_CHECKPOINT.match(part.path) for part in self._parts)
        return sorted({int(match.group(1)) for match in matches if match})

    @property
    def manifest_sha256(self) -> str:
        """SHA-256 over the manifest's entries of these parts: names the data, whatever else the run writes later.

        A part of a replay that has the column ``kl_choice`` counts as the part that it is without.
        """
        before = self._manifest.get(CHOICE_ADDED, {})
        parts = [replace(part, sha256=before.get(part.sha256, part.sha256)) for part in self._parts]
        entries = json.dumps([asdict(part) for part in parts], sort_keys=True)
        return hashlib.sha256(entries.encode()).hexdigest()

    def note_searched(self) -> None:
        """Note in the manifest that a record is made from these parts; needs the run's lock, as every change of it."""
        before = [own for own in self.run.manifest().get(SEARCHED, []) if own != self.manifest_sha256]
        self.run.update_manifest(**{SEARCHED: [*before, self.manifest_sha256]})

    def made(self, source: Mapping[str, Any], record: str) -> bool:
        """Whether a record of the run was made from these parts; refused where it was from those of another run.

        False for parts that the run had before, as far as it noted what its records were made from.
        """
        found, searched = source.get("manifest_sha256"), self._manifest.get(SEARCHED)
        if found == self.manifest_sha256:
            return True
        if self._parts and found is not None and searched is not None and found not in searched:
            raise RunDirError(
                f"{self.run.path / record} was made from traces that this run never had, so it is of another run: "
                f"restore it from a copy of the run, or run `{MAKERS[record]}` again"
            )
        return False

    def require_own(self, name: str, record: Any) -> None:
        """Refuse a record of the run, the content of its file ``name``, made from other traces or tokens than its own.

        What a record does not say of its ``source`` and ``tokenizer_sha256`` is not compared.
        """
        self.made(getattr(record, "source", {}), name)
        own, found = self.tokenizer_sha256, getattr(record, "tokenizer_sha256", "")
        if own and found and found != own:
            raise TokenizerMismatchError(
                f"{self.run.path / name} was made with tokenizer {found[:12]}, the run's is {own[:12]}: run "
                f"`{MAKERS[name]}` again"
            )

    @cached_property
    def replay(self) -> ReplayRecord | None:
        """What ``rocktokens trace`` recorded of the replay; None where the rows were written without it."""
        return ReplayRecord.of(self._manifest, self.run.path / "manifest.json")

    @property
    def tokenizer_sha256(self) -> str:
        """The run's vocabulary hash, "" when it was recorded without a tokenizer."""
        return self._manifest.get("tokenizer_sha256", "")

    @property
    def vocab_size(self) -> int | None:
        """Entries of the run's tokenizer, None when it has none."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True) if self._tokenizer else None

    def rows(self, checkpoint: int) -> int:
        """How many rows a replayed checkpoint has; 0 when it has no traces."""
        folder = parts_folder("replay", checkpoint)
        return sum(part.rows for part in self._parts if part.path.startswith(folder))

    def table(self, checkpoint: int | None = None) -> ir.Table:
        """The rows of one replayed checkpoint (or, in a training store, of the whole training run)."""
        folder = parts_folder(self.source, checkpoint)
        if folder not in self._tables:
            parts = [part for part in self._parts if part.path.startswith(folder)]
            if not parts:
                raise RocktokensError(self._absent(checkpoint))
            paths = self.run.verify_all(parts, self._threads)
            schemas = [self._fitting_schema(part, path) for part, path in zip(parts, paths, strict=True)]
            self._classes[folder] = set(map(classes_of, schemas))
            self._teachers[folder] = set(map(served_of, schemas))
            are_alike = len({tuple(schema.names) for schema in schemas}) == 1
            self._tables[folder] = self._read_parquet(paths, are_alike)
        return self._tables[folder]

    def classes_sha256(self, checkpoint: int | None = None) -> str | None:
        """Hash of the classes that ``kl_choice`` of these rows is of; None unless every part has that column."""
        self.table(checkpoint)
        folder = parts_folder(self.source, checkpoint)
        found = self._classes[folder]
        if len(known := found - {None}) > 1:
            names = " and ".join(sorted(f"{own:.12}" for own in known if own))
            raise RunDirError(
                f"{self.run.path / folder} has kl_choice by different classes ({names}): run `rocktokens trace "
                "--classes` again"
            )
        return None if None in found else next(iter(known), None)

    def teacher(self, checkpoint: int | None = None) -> str:
        """Return how the teacher's values of these rows came (``TeacherSection.label``), "" where it was in memory."""
        self.table(checkpoint)
        folder = parts_folder(self.source, checkpoint)
        if len(found := self._teachers[folder]) > 1:
            names = listed(sorted(f"{own or 'in memory'}" for own in found))
            raise RunDirError(
                f"{self.run.path / folder} has parts of different teachers ({names}): run `rocktokens trace --restart`"
            )
        return next(iter(found))

    def rollout(self, rollout_id: int, checkpoint: int | None = None) -> RolloutTable:
        """One rollout's rows in order of position; a token strip in a notebook."""
        rows = self.table(checkpoint)
        found = rows.filter(rows.rollout_id == rollout_id).order_by("position").to_pyarrow()
        if not found.num_rows:
            raise RocktokensError(f"rollout {rollout_id} is not in the traces of checkpoint {checkpoint}")
        return RolloutTable(found, self.vocabulary, self.teacher(checkpoint))

    def token_texts(self, ids: Iterable[int]) -> list[str]:
        """The text of each id as it stands inside a text; ``<id>`` where there is nothing to decode with."""
        return [self.vocabulary.text(int(token_id)) for token_id in ids]

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the run's tokens read."""
        return Vocabulary(self._tokenizer)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        path = self.run.path / TOKENIZER
        # A folder of traces alone may have been given a tokenizer by hand; a run lists its own.
        if self.run.lists(TOKENIZER) or (self.tokenizer_sha256 and path.exists()):
            path = self.run.verified(TOKENIZER)
        try:
            return Tokenizer.from_file(str(path)) if path.exists() else None
        except Exception as error:  # the library has no other
            raise self.run.damaged(TOKENIZER, f"is no tokenizer ({error})") from None

    def _absent(self, checkpoint: int | None) -> str:
        if self.source == "training":
            return f"{self.run.path} has no training traces: run `rocktokens distill`"
        if not self.checkpoints:
            return f"{self.run.path} has no replay traces: run `rocktokens trace`"
        available = ", ".join(map(str, self.checkpoints))
        return f"checkpoint {checkpoint} has no traces in {self.run.path}: available are {available}"

    def _fitting_schema(self, part: FileEntry, path: Path) -> pa.Schema:
        """The schema of a part; refuses one of another version, or with other rows than listed."""
        schema, rows = read_parquet(self.run, part.path, path, _footer)
        require_readable(schema, path)
        if rows != part.rows:
            raise self.run.damaged(part.path, f"has {rows} rows, its manifest lists {part.rows}")
        return schema


def _footer(path: Path) -> tuple[pa.Schema, int]:
    """Read schema and rows; the names of columns too, which may be no text."""
    footer = pq.read_metadata(path)
    schema = footer.schema.to_arrow_schema()
    _ = schema.names
    return schema, footer.num_rows


def _name_unreadable(run: RunDir, paths: Sequence[Path]) -> None:
    """Refuse the first part whose pages are damaged; nothing where all of them can be read."""
    for path in paths:
        is_own = path.is_relative_to(run.path)  # else a copy of what a writer replaces
        relative = path.relative_to(run.path).as_posix() if is_own else f"traces/{path.name}"
        read_parquet(run, relative, path, whole_table)
