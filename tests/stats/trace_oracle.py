"""Random traces and the naive statistics of them, in plain numpy and Python integers."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rocktokens.traces.schema import validate_table
from rocktokens.traces.writer import TraceWriter


def random_trace(seed: int, prompts: int = 12, samples: int = 2, vocabulary: int = 9, length: int = 30) -> pa.Table:
    """Rollouts of varying length, an uneven vocabulary, and a tenth of the rows unscored."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length, size=prompts * samples)
    rows = int(lengths.sum())
    rollout = np.repeat(np.arange(len(lengths)), lengths)
    return _table(rng, rollout, lengths, samples, rng.integers(0, vocabulary, rows) * rng.integers(0, 2, rows), 0.1)


def rescored(table: pa.Table, seed: int) -> pa.Table:
    """The same occurrences as another checkpoint scores them."""
    rng = np.random.default_rng(seed)
    kl = rng.exponential(0.5, table.num_rows)
    return with_column(table, "kl", pa.array(kl, pa.float32(), mask=table["kl"].is_null().to_numpy()))


def large_trace(seed: int, rollouts: int = 4000, length: int = 100) -> pa.Table:
    """400,000 rows: several of the 122,880-row groups that DuckDB hands to its threads."""
    rng = np.random.default_rng(seed)
    rollout = np.repeat(np.arange(rollouts), length)
    tokens = np.minimum(rng.zipf(1.3, rollouts * length), 5000)
    return _table(rng, rollout, np.full(rollouts, length), 2, tokens, 0.0)


def _table(
    rng: np.random.Generator,
    rollout: np.ndarray,
    lengths: np.ndarray,
    samples: int,
    tokens: np.ndarray,
    unscored: float,
) -> pa.Table:
    rows = len(rollout)
    missing = rng.random(rows) < unscored
    score = {name: rng.exponential(1.0, rows) for name in ("kl", "entropy_student", "entropy_teacher", "grad_norm")}
    score |= {name: -rng.exponential(1.0, rows) for name in ("logp_student", "logp_teacher")}
    columns = {
        "rollout_id": pa.array(rollout, pa.int64()),
        "prompt_id": pa.array([f"p{index // samples}" for index in rollout]),
        "position": pa.array(np.concatenate([np.arange(length) for length in lengths]), pa.int32()),
        "token_id": pa.array(tokens, pa.int32()),
        **{name: pa.array(values, pa.float32(), mask=missing) for name, values in score.items()},
        "policy_step": pa.array(np.zeros(rows), pa.int32()),
        "weight": pa.array(np.ones(rows), pa.float32()),
    }
    return validate_table(pa.table(columns))


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    """The table with other values in one column."""
    field = table.schema.field(name)
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))


def write_trace(run: Path, tables: dict[int, pa.Table], rows_per_part: int = 1_000_000) -> Path:
    """A run whose replay traces are the given tables by checkpoint."""
    for checkpoint, table in tables.items():
        with TraceWriter(run, checkpoint=checkpoint, rows_per_part=rows_per_part) as writer:
            writer.append(table)
    return run


def fixed(value: float) -> int:
    """One score as the int64 that is summed."""
    return int(np.floor(float(np.float32(value)) * 2**24 + 0.5))


def occurrences_of(table: pa.Table, prompts: set[str] | None = None) -> list[dict]:
    """Scored rows, one dict each."""
    return [
        row for row in table.to_pylist() if row["kl"] is not None and (prompts is None or row["prompt_id"] in prompts)
    ]


def summed(rows: list[dict], column: str = "kl") -> dict[int, int]:
    """Fixed-point sum by type."""
    sums: dict[int, int] = {}
    for row in rows:
        sums[row["token_id"]] = sums.get(row["token_id"], 0) + fixed(row[column])
    return sums


def counted(rows: list[dict]) -> dict[int, int]:
    """Occurrences by type."""
    counts: dict[int, int] = {}
    for row in rows:
        counts[row["token_id"]] = counts.get(row["token_id"], 0) + 1
    return counts
