"""Reads the trace parts of a run through ibis, on an embedded DuckDB.

1. The manifest says which parts exist; stray files do not, and a listed part that is missing or cut short is an error.
2. Every part's footer is checked (schema version, row count) when its checkpoint is first asked for.
3. Statistics are ibis expressions over ``table(checkpoint)``; integer sums make them the same at any thread count.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import ibis
import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from rocktokens.errors import RocktokensError, RunDirError
from rocktokens.run_dir import FileEntry, RunDir
from rocktokens.traces.schema import require_readable
from rocktokens.traces.writer import Source, parts_folder

ENGINES = ("duckdb",)
_CHECKPOINT = re.compile(r"traces/checkpoint=(\d+)/")


class TraceStore:
    """A read-only view over the committed trace parts of one run, as they were when it was opened.

    Args:
        run_dir: the run's folder.
        engine: what evaluates the expressions; "duckdb" is in-process.
        threads: of the engine; None lets it use every core.
        source: "replay" (rows by checkpoint, paired) or "training" (on-policy rows, no checkpoints).
    """

    def __init__(
        self,
        run_dir: str | Path | RunDir,
        engine: str = "duckdb",
        threads: int | None = None,
        source: Source = "replay",
    ) -> None:
        if engine not in ENGINES:
            raise RocktokensError(f"engine = {engine!r} is not known: use one of {', '.join(ENGINES)}")
        self.run = (run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)).require()
        self.source: Source = source
        self._manifest = self.run.manifest()
        self._parts = [part for part in self.run.files("traces/") if _belongs(part, source)]
        self._connection = ibis.duckdb.connect(**({} if threads is None else {"threads": threads}))
        self._tables: dict[str, ir.Table] = {}

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the replayed checkpoints, oldest first; none in a store of training rows."""
        matches = (_CHECKPOINT.match(part.path) for part in self._parts)
        return sorted({int(match.group(1)) for match in matches if match})

    @property
    def manifest_sha256(self) -> str:
        """SHA-256 over the manifest's entries of these parts: names the data, whatever else the run writes later."""
        entries = json.dumps([asdict(part) for part in self._parts], sort_keys=True)
        return hashlib.sha256(entries.encode()).hexdigest()

    @property
    def replay(self) -> dict[str, Any]:
        """What ``rocktokens trace`` recorded of the replay; empty where the rows were written without it."""
        return self._manifest.get("replay", {})

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
            self._tables[folder] = self._read(
                [part for part in self._parts if part.path.startswith(folder)], checkpoint
            )
        return self._tables[folder]

    def rollout(self, rollout_id: int, checkpoint: int | None = None) -> pa.Table:
        """One rollout's rows in order of position."""
        rows = self.table(checkpoint)
        found = rows.filter(rows.rollout_id == rollout_id).order_by("position").to_pyarrow()
        if not found.num_rows:
            raise RocktokensError(f"rollout {rollout_id} is not in the traces of checkpoint {checkpoint}")
        return found

    def token_texts(self, ids: Iterable[int]) -> list[str]:
        """The decoded text of each id alone, special tokens kept; ``<id>`` where there is nothing to decode with."""
        return [self._token_text(int(token_id)) for token_id in ids]

    def _token_text(self, token_id: int) -> str:
        piece = self._tokenizer.id_to_token(token_id) if self._tokenizer else None
        if self._tokenizer is None or piece is None:
            return f"<{token_id}>"
        # A decoder that strips the leading space of a text leaves nothing of a lone space.
        return self._tokenizer.decode([token_id], skip_special_tokens=False) or piece.replace("▁", " ")

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        path = self.run.path / "tokenizer" / "tokenizer.json"
        return Tokenizer.from_file(str(path)) if path.exists() else None

    def _read(self, parts: list[FileEntry], checkpoint: int | None) -> ir.Table:
        if not parts:
            raise RocktokensError(self._absent(checkpoint))
        paths = [_glob_escape(str(self._checked(part))) for part in parts]
        # The folder name "checkpoint=N" is ours to read, and not every part need have the optional columns.
        return self._connection.read_parquet(paths, hive_partitioning=False, union_by_name=True)

    def _absent(self, checkpoint: int | None) -> str:
        if self.source == "training":
            return f"{self.run.path} has no training traces: run `rocktokens distill`"
        if not self.checkpoints:
            return f"{self.run.path} has no replay traces: run `rocktokens trace`"
        available = ", ".join(map(str, self.checkpoints))
        return f"checkpoint {checkpoint} has no traces in {self.run.path}: available are {available}"

    def _checked(self, part: FileEntry) -> Path:
        path = self.run.path / part.path
        try:
            footer = pq.read_metadata(path)
        except FileNotFoundError:
            raise RunDirError(
                f"{path} is listed in the manifest but missing: restore it from a copy of the run"
            ) from None
        except (pa.ArrowInvalid, OSError) as error:
            raise RunDirError(f"{path} is damaged ({error}): restore it from a copy of the run") from None
        require_readable(footer.schema.to_arrow_schema(), path)
        if footer.num_rows != part.rows:
            raise RunDirError(
                f"{path} has {footer.num_rows} rows, its manifest lists {part.rows}: restore it from a copy of the run"
            )
        return path


def _belongs(part: FileEntry, source: Source) -> bool:
    return part.path.startswith(parts_folder("training", None)) == (source == "training")


def _glob_escape(path: str) -> str:
    """DuckDB reads every path as a pattern; a character class of one is that character."""
    return re.sub(r"[*?\[]", r"[\g<0>]", path)
