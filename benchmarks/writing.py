"""What writing a trace costs: seconds and bytes of a part, beside Parquet's own defaults and a line of JSON per token.

1. Rows of rollouts of 512 tokens with made-up scores, hardly any equal to another.
2. Ours is all that a replay does with scores that have arrived: ``trace_table``, checks, Parquet, and the commit of the
   part with its flushes to the disk. Beside it the file alone: ours, pyarrow's defaults with the same compression (a
   dictionary for every column), and JSON lines through gzip, as scripts write them.
3. The same with the likeliest tokens of both models.

In turn, ``--rounds`` times; medians. ``python benchmarks/writing.py`` takes half a minute on one core.
"""

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from printing import machine, print_table, whole
from rocktokens.traces.schema import trace_table
from rocktokens.traces.writer import TraceWriter, write_parquet
from rocktokens.types import Rollout, TokenScores
from synthetic_trace import tokens

LENGTH = 512
JSON_SHARE = 8
"""JSON lines are timed on so many times fewer rows."""
Side = Callable[[Path], int]
"""Writes into a folder; how many rows."""


def make_rollouts(rows: int) -> list[Rollout]:
    token_ids = tokens(np.random.default_rng(0), 25 * -(-rows // 25))[:rows]
    return [
        Rollout(number, f"prompt-{number}", 0, own[:1], own, np.zeros(len(own), np.float32), 0, finished=True)
        for number, own in enumerate(np.split(token_ids, range(LENGTH, rows, LENGTH)))
    ]


def make_scores(rows: int) -> TokenScores:
    rng = np.random.default_rng(1)
    return TokenScores(*np.exp(rng.normal(-2, 2, (6, rows))).astype(np.float32))


def make_tops(rows: int, k: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(2)

    def top() -> tuple[np.ndarray, np.ndarray]:
        ids_TK = np.stack([tokens(rng, 25 * -(-rows // 25))[:rows] for _ in range(k)], axis=1)
        return ids_TK, -np.sort(rng.exponential(1.0, (rows, k)), axis=1).astype(np.float32)

    return {name: top() for name in ("student_top", "teacher_top")} if k else {}


def commit(make_table: Callable[[], pa.Table], folder: Path) -> int:
    with TraceWriter(folder, checkpoint=0, rows_per_part=sys.maxsize) as writer:
        table = make_table()
        writer.append(table)
    return table.num_rows


def write_plainly(table: pa.Table, folder: Path) -> int:
    pq.write_table(table, folder / "part.parquet", compression="zstd")
    return table.num_rows


def write_ours(table: pa.Table, folder: Path) -> int:
    write_parquet(table, folder / "part.parquet")
    return table.num_rows


def write_json(table: pa.Table, folder: Path) -> int:
    some = table.slice(0, table.num_rows // JSON_SHARE)
    with gzip.open(folder / "part.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in some.to_pylist())
    return some.num_rows


def measure(side: Side) -> tuple[float, float]:
    """Milliseconds for 100,000 rows, and bytes of one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        rows = side(folder)
        seconds = time.perf_counter() - began
        size = sum(path.stat().st_size for path in folder.rglob("part*"))
    return 1e8 * seconds / rows, size / rows


def sides(rows: int, top_k: int) -> dict[str, Side]:
    rollouts, scores, tops = make_rollouts(rows), make_scores(rows), make_tops(rows, top_k)
    make_table = partial(trace_table, rollouts, scores, tops=tops)
    table = make_table()
    return {
        "ours, from scores to the committed part": partial(commit, make_table),
        "ours, the file": partial(write_ours, table),
        "pyarrow's defaults, the file": partial(write_plainly, table),
        "JSON lines and gzip, the file": partial(write_json, table),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=whole, default=131_072)
    parser.add_argument("--top-k", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    print(machine(("numpy", "pyarrow"), cores=1))
    print(f"{given.rows:,} rows\n", flush=True)
    pa.set_cpu_count(1)
    rows = []
    for top_k in given.top_k:
        each = sides(given.rows, top_k)
        rounds = [{name: measure(side) for name, side in each.items()} for _ in range(given.rounds)]
        for name in each:
            times, sizes = zip(*(found[name] for found in rounds), strict=True)
            milliseconds = f"{statistics.median(times):.0f} ({min(times):.0f}–{max(times):.0f})"
            rows.append([str(top_k), name, milliseconds, f"{statistics.median(sizes):.1f}"])
    print_table(["top_k", "", "ms for 100,000 rows: median (range)", "bytes a row"], rows)


if __name__ == "__main__":
    main()
