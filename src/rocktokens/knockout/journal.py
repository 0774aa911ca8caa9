"""What a sweep has decoded so far, so that it can be interrupted at any moment and go on with the same result.

Free rollouts are written once. What was decoded under bans is gathered and committed to the run as immutable Parquet
parts, which end by what they hold and not by the clock: the same sweep leaves the same parts on any machine, and a
process that is killed loses at most a fiftieth of its work. An entry is found again by what was banned, where,
and which rollout it continues, so a later sweep over other tokens uses what is there. The folder is named after the
conditions the rollouts were decoded under. Only ids are kept, not whether an answer was right: grades are made by the
grader of today.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rocktokens.knockout.records import BanKey
from rocktokens.parts import PartKind
from rocktokens.rollouts.store import read_rollouts, write_rollouts
from rocktokens.run_dir import RunDir
from rocktokens.types import Rollout

Key = tuple[BanKey, int]
"""The ban, and the place of the free rollout."""
SHARE_PER_PART, LEAST_TOKENS = 0.02, 2048
"""A part is written when it has this share of all tokens decoded so far, and this number: few parts, little lost."""
SCHEMA_VERSION = 2
READABLE = ("1", "2")
"""In parts of version 1 every ban acts everywhere."""
_VERSION_KEY = b"rocktokens.knockout.version"
SCHEMA = pa.schema(
    [
        ("banned", pa.list_(pa.int32())),
        ("alternatives", pa.list_(pa.int32())),
        ("rollout_id", pa.int64()),
        ("start", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("finished", pa.bool_()),
    ],
    metadata={_VERSION_KEY: str(SCHEMA_VERSION)},
)
DECODED = PartKind("knock-outs", SCHEMA, _VERSION_KEY, READABLE, optional=frozenset({"alternatives"}))


@dataclass(frozen=True, slots=True)
class Decoded:
    """What was written from a position of a free rollout on."""

    start: int
    token_ids: np.ndarray
    """int32."""
    finished: bool


class Journal:
    """Remembers what a sweep has decoded, until the process ends."""

    def __init__(self) -> None:
        self.finished: dict[Key, Decoded] = {}
        self._free: list[Rollout] | None = None

    def free(self) -> list[Rollout] | None:
        """Return the free rollouts, None if they have not been kept."""
        return self._free

    def keep_free(self, rollouts: Sequence[Rollout]) -> None:
        """Remember the free rollouts."""
        self._free = list(rollouts)

    def add(self, key: Key, decoded: Decoded) -> None:
        """Remember an entry."""
        self.finished[key] = decoded

    def flush(self) -> None:
        """Commit what has not been committed yet; in memory nothing ever is."""


class RunJournal(Journal):
    """Keeps everything in a run directory, under ``knockout/<conditions>/``."""

    def __init__(self, run: RunDir, conditions: str) -> None:
        """Read what is there, under the caller's lock; ``conditions`` digest all that the rollouts depend on."""
        super().__init__()
        self._run = run
        self._folder = f"knockout/{conditions}"
        parts = run.files(f"{self._folder}/part-")
        self._n_parts = len(parts)
        self._new: list[tuple[Key, Decoded]] = []
        for table in DECODED.read_listed(run, parts):
            self.finished.update(_entries(table))
        self._new_tokens, self._tokens = 0, sum(len(own.token_ids) for own in self.finished.values())

    def free(self) -> list[Rollout] | None:
        """Read the free rollouts, None if they have not been written."""
        path = f"{self._folder}/free.parquet"
        return read_rollouts(self._run, path) if self._run.files(path) else None

    def keep_free(self, rollouts: Sequence[Rollout]) -> None:
        """Commit the free rollouts."""
        write_rollouts(self._run, f"{self._folder}/free.parquet", rollouts)

    def add(self, key: Key, decoded: Decoded) -> None:
        """Remember an entry; committed once there are enough for a part."""
        self.finished[key] = decoded
        self._new.append((key, decoded))
        self._new_tokens += len(decoded.token_ids)
        self._tokens += len(decoded.token_ids)
        if self._new_tokens >= max(LEAST_TOKENS, SHARE_PER_PART * self._tokens):
            self.flush()

    def flush(self) -> None:
        """Commit what has not been committed yet."""
        if self._new:
            rows = [
                {"banned": ban.ids, "alternatives": ban.alternatives, "rollout_id": place, **asdict(own)}
                for (ban, place), own in self._new
            ]
            path, table = f"{self._folder}/part-{self._n_parts:05d}.parquet", pa.Table.from_pylist(rows, schema=SCHEMA)
            self._run.commit(path, lambda target: pq.write_table(table, target, compression="zstd"), table.num_rows)
            self._n_parts += 1
            self._new, self._new_tokens = [], 0


def _entries(table: pa.Table) -> dict[Key, Decoded]:
    return {
        (BanKey(tuple(row["banned"]), tuple(row.get("alternatives", ()))), row["rollout_id"]): Decoded(
            row["start"], np.array(row["token_ids"], np.int32), row["finished"]
        )
        for row in table.to_pylist()
    }
