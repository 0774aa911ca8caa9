"""What ``rocktokens find`` costs: seconds and memory over three decades of trace rows, and beside plain pandas.

1. ``find_rocks`` is timed on synthetic traces of each size, and on the largest once more on one thread: the rocks must
   be the same bytes. On the largest, also what verifying the parts adds: the same search in processes that have done so
   before.
2. Beside it stands the way of one dict per token, a data frame and a group-by, as far as it fits in memory.
3. The context stage alone: 20,000 occurrences of one type, exact, beside the whole matrix of cosines at once.
4. The whole analysis that the command prints.

Every measurement runs in a process of its own, so that its peak of memory is its own. ``python benchmarks/find.py``
takes some ten minutes on two cores and 4 GB of disk; with ``--rows 1e5 1e6`` a minute. Seconds mean something on a
machine that does nothing else: its load is printed first and last.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from printing import machine, print_table, whole
from rocktokens.rocks.analysis import analyse, other_gammas
from rocktokens.rocks.contexts import context_consistency
from rocktokens.rocks.encoders import encode_windows
from rocktokens.rocks.find import find_rocks, rock_set, search_traces
from rocktokens.rocks.search import Criterion
from rocktokens.run_dir import file_sha256
from rocktokens.traces.store import TraceStore
from synthetic_trace import PHRASE, TYPES, tokens, write_trace

SEED = 7
K = 100
GAMMA = Criterion().gamma
WIDTH = 64
CONTEXT_WIDTH = 576
WINDOW = 5
MIB = 1 << 20
PACKAGES = ("rocktokens", "duckdb", "ibis-framework", "pyarrow", "numpy", "scipy", "pandas")
COLUMNS = ("seconds", "CPU s", "peak MiB")
AT_ROWS, AT_MOST = 10**8, (60.0, 2048.0)
"""Where the target of a search applies, and its seconds and MiB; next those of the context stage."""
CONTEXTS_AT_MOST = (10.0, 500e6 / MIB)
VERIFICATION_AT_MOST = 0.2
"""By which share verification may lengthen a search."""
REPEATS = 3

Measured = dict[str, Any]
Work = Callable[[], Measured]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=whole, nargs="+", default=[10**5, 10**6, 10**7, 10**8])
    parser.add_argument("--pandas-rows", type=whole, default=10**7, help="the largest trace that pandas is tried on")
    parser.add_argument("--contexts", type=whole, default=20_000, help="occurrences of one type")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--traces", type=Path, nargs="+", help="runs to measure, instead of writing traces")
    parser.add_argument("--keep", type=Path, help="an empty folder for the traces, which then stay")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(_timed(**arguments.child)))
        return
    print(machine(PACKAGES), end="\n\n", flush=True)
    home = arguments.keep or Path(tempfile.mkdtemp(prefix="rocktokens-find-"))
    try:
        traces = arguments.traces or [_written(home / f"rows-{rows}", rows) for rows in arguments.rows]
        by_size = dict(sorted((_count_rows(trace), trace) for trace in traces))
        same = report_find(by_size, arguments.threads)
        report_verification(by_size, arguments.threads)
        report_pandas(by_size, arguments.pandas_rows)
        report_contexts(arguments.contexts, arguments.threads)
        report_analysis(by_size, arguments.threads)
        print(f"load at the end: {os.getloadavg()[0]:.1f}")
    finally:
        if not arguments.keep:
            shutil.rmtree(home)
    sys.exit(0 if same else 1)


def report_find(by_size: dict[int, Path], threads: int) -> bool:
    """Whether one thread finds the same as several."""
    costs = {rows: _measure("find", threads, trace=str(trace)) for rows, trace in by_size.items()}
    print(f"find_rocks(k={K}), {threads} threads: both halves, contexts, bootstrap, summary")
    print_table(
        ("trace rows", *COLUMNS, "rows/s", f"at most {AT_MOST[0]:.0f} s and {AT_MOST[1]:.0f} MiB"),
        [
            (
                f"{rows:,}",
                *_cells(cost),
                f"{rows / cost['seconds']:,.0f}",
                _verdict(cost, AT_MOST) if rows >= AT_ROWS else "",
            )
            for rows, cost in costs.items()
        ],
    )
    rows, trace = list(by_size.items())[-1]
    alone = _measure("find", 1, trace=str(trace))
    same = alone["sha256"] == costs[rows]["sha256"]
    print(
        f"rocks.json of {rows:,} rows at 1 and {threads} threads: {'identical' if same else 'DIFFERENT'} "
        f"({alone['sha256'][:12]}; 1 thread: {alone['seconds']:.1f} s, {alone['peak_mib']:,.0f} MiB)\n",
        flush=True,
    )
    return same


def report_verification(by_size: dict[int, Path], threads: int) -> None:
    """In turns, so that whatever else the machine does falls on both alike."""
    rows, trace = list(by_size.items())[-1]
    size = sum(file.stat().st_size for file in trace.glob("traces/*/*.parquet"))
    ways: dict[str, list[Measured]] = {"find, parts verified before": [], "find": []}
    for _ in range(REPEATS):
        for way, costs in ways.items():
            costs.append(_measure(way, threads, trace=str(trace)))
    before, now = (statistics.median(cost["seconds"] for cost in costs) for costs in ways.values())
    cpu_before, cpu_now = (statistics.median(cost["cpu"] for cost in costs) for costs in ways.values())
    print(
        f"what verifying {size / 1e9:.1f} GB adds to {rows:,} rows, {threads} threads; medians of {REPEATS}, in turns"
    )
    print_table(
        ("", *COLUMNS, "fastest", "slowest"),
        [
            (
                way,
                *_cells(
                    {name: statistics.median(cost[name] for cost in costs) for name in ("seconds", "cpu", "peak_mib")}
                ),
                *(f"{end(cost['seconds'] for cost in costs):.1f}" for end in (min, max)),
            )
            for way, costs in ways.items()
        ],
    )
    verdict = "met" if now <= (1 + VERIFICATION_AT_MOST) * before else "missed"
    added, most = 100 * (now / before - 1), 100 * VERIFICATION_AT_MOST
    cpu = f"{cpu_now - cpu_before:.1f} CPU s, {100 * (cpu_now / cpu_before - 1):.1f} %"
    print(
        f"verification adds {now - before:.1f} s, {added:.1f} % ({cpu}); at most {most:.0f} %: {verdict}\n", flush=True
    )


def report_pandas(by_size: dict[int, Path], most: int) -> None:
    print("a dict per token and pandas: ranks one of the two checkpoints by freq x mean, and does nothing else of it")
    tried = {rows: _measure("pandas", 1, trace=str(trace)) for rows, trace in by_size.items() if rows <= most}
    print_table(("trace rows", *COLUMNS), [(f"{rows:,}", *_cells(cost)) for rows, cost in tried.items()])
    beyond = [f"{rows:,}" for rows in by_size if rows > most]
    print(f"stopped there: not run on {', '.join(beyond)} rows\n" if beyond else "", flush=True)


def report_contexts(count: int, threads: int) -> None:
    print(f"context consistency of {count:,} occurrences of one type, width {CONTEXT_WIDTH}, {threads} threads")
    ways = {
        name: _measure(name, threads, count=count) for name in ("blocked", "all pairs float32", "all pairs float64")
    }
    exact = np.array(ways["all pairs float64"]["neighbours"])
    print_table(
        ("", *COLUMNS, "occurrences with another count than in float64"),
        [(name, *_cells(cost), str(np.count_nonzero(exact != cost["neighbours"]))) for name, cost in ways.items()],
    )
    seconds, mib = CONTEXTS_AT_MOST
    print(f"at most {seconds:.0f} s and {mib:.0f} MiB: {_verdict(ways['blocked'], CONTEXTS_AT_MOST)}\n", flush=True)


def report_analysis(by_size: dict[int, Path], threads: int) -> None:
    print(f"search, rock set and the whole analysis (sensitivity, controls, cut-off …), {threads} threads")
    chosen = {rows for rows in by_size if rows == 10**6} | {max(by_size)}
    costs = {rows: _measure("analysis", threads, trace=str(by_size[rows])) for rows in sorted(chosen)}
    print_table(("trace rows", *COLUMNS), [(f"{rows:,}", *_cells(cost)) for rows, cost in costs.items()])


# What is measured: each function prepares, and gives back what to time.


def write_work(trace: str, rows: int, threads: int) -> Work:
    def work() -> Measured:
        write_trace(trace, rows)
        return {}

    return work


def find_work(trace: str, threads: int) -> Work:
    embeddings_VD = _embeddings(WIDTH)

    def work() -> Measured:
        rocks = find_rocks(TraceStore(trace, threads=threads), embeddings=embeddings_VD, k=K)
        with tempfile.TemporaryDirectory() as folder:
            rocks.save(Path(folder, "rocks.json"))
            return {"sha256": file_sha256(Path(folder, "rocks.json"))}

    return work


def verified_find_work(trace: str, threads: int) -> Work:
    """The search in a process that has verified the parts already."""
    store = TraceStore(trace)
    store.run.verify_all(store.run.files("traces/"))
    return find_work(trace, threads)


def analysis_work(trace: str, threads: int) -> Work:
    embeddings_VD = _embeddings(WIDTH)

    def work() -> Measured:
        store, criterion = TraceStore(trace, threads=threads), Criterion(k=K)
        gammas = other_gammas(criterion.gamma)
        result = search_traces(store, criterion, embeddings=embeddings_VD, gammas=gammas)
        analysis = analyse(store, result, rock_set(store, result))
        return {"parts": sorted(analysis.to_record())}

    return work


def pandas_work(trace: str, threads: int) -> Work:
    """The obvious script: every token a dict in a list, the list a data frame, the frame grouped by type."""
    import pandas as pd  # not above: it would count as memory of the others
    import pyarrow.parquet as pq

    reference = TraceStore(trace, threads=threads).checkpoints[-1]

    def work() -> Measured:
        scored: list[dict[str, Any]] = []
        for part in sorted(Path(trace, "traces", f"checkpoint={reference}").glob("*.parquet")):
            scored += pq.read_table(part, columns=["rollout_id", "position", "token_id", "kl"]).to_pylist()
        types: Any = pd.DataFrame(scored).groupby("token_id").agg(freq=("kl", "size"), mean=("kl", "mean"))
        types["score"] = types["freq"] * types["mean"]
        ranked = types[types["freq"] >= 2].sort_values("score", ascending=False)
        return {"ids": ranked.index[:K].tolist()}

    return work


def blocked_work(count: int, threads: int) -> Work:
    encoder = _GivenWindows(_windows(count), _embeddings(CONTEXT_WIDTH))
    zeros, numbers = np.zeros(count, dtype=np.int64), np.arange(count)

    def work() -> Measured:
        result = context_consistency(zeros, numbers, zeros, np.array([0]), encoder, (GAMMA,), count * count)
        return {"neighbours": result.neighbours[0].tolist()}

    return work


def all_pairs_work(dtype: type, count: int, threads: int) -> Work:
    """The whole matrix of cosines by one product."""
    windows_NW, embeddings_VD = _windows(count), _embeddings(CONTEXT_WIDTH)

    def work() -> Measured:
        vectors_ND = encode_windows(windows_NW, embeddings_VD).astype(dtype)
        others_ND = vectors_ND.copy()  # OpenBLAS 0.3.31 crashes on a large float64 product of a matrix with itself
        return {"neighbours": ((vectors_ND @ others_ND.T >= GAMMA).sum(axis=1) - 1).tolist()}

    return work


WORK: dict[str, Callable[..., Work]] = {
    "write": write_work,
    "find": find_work,
    "find, parts verified before": verified_find_work,
    "analysis": analysis_work,
    "pandas": pandas_work,
    "blocked": blocked_work,
    "all pairs float32": partial(all_pairs_work, np.float32),
    "all pairs float64": partial(all_pairs_work, np.float64),
}


@dataclass(frozen=True)
class _GivenWindows:
    """An encoder whose windows need no look-up: occurrence i is rollout i."""

    windows_NW: np.ndarray
    embeddings_VD: np.ndarray
    at_once: int = 4_000_000

    def look_up(self, rollout_ids_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
        return self.windows_NW[rollout_ids_N]

    def encode(self, found_N: np.ndarray) -> np.ndarray:
        return encode_windows(found_N, self.embeddings_VD)


def _windows(count: int) -> np.ndarray:
    """int32 (N, W): contexts from the phrase book and others, one token in eight replaced: alike, but not the same."""
    rng = np.random.default_rng(SEED)
    windows_NW = tokens(rng, count * PHRASE).reshape(count, PHRASE)[:, : 2 * WINDOW].copy()
    replaced_NW = rng.random(windows_NW.shape) < 1 / 8
    windows_NW[replaced_NW] = rng.integers(TYPES, size=int(replaced_NW.sum()))
    return windows_NW


def _embeddings(width: int) -> np.ndarray:
    return np.random.default_rng(SEED).standard_normal((TYPES, width), dtype=np.float32)


def _timed(task: str, **parameters: Any) -> Measured:
    """Do one piece of work in this process, and say what it took."""
    work = WORK[task](**parameters)
    began, cpu = time.perf_counter(), time.process_time()
    result = work()
    cost = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
    unit = 1 if sys.platform == "darwin" else 1 << 10
    return {**cost, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB, **result}


def _measure(task: str, threads: int, **parameters: Any) -> Measured:
    """Do one piece of work in a process of its own, with so many threads for everything in it."""
    request = json.dumps({"task": task, "threads": threads, **parameters})
    limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    done = subprocess.run(
        [sys.executable, __file__, "--child", request], env=os.environ | limits, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def _written(trace: Path, rows: int) -> Path:
    cost = _measure("write", 1, trace=str(trace), rows=rows)
    print(f"wrote {rows:,} rows in {cost['seconds']:.0f} s", flush=True)
    return trace


def _count_rows(trace: Path) -> int:
    store = TraceStore(trace)
    return sum(store.rows(checkpoint) for checkpoint in store.checkpoints)


def _cells(cost: Measured) -> tuple[str, str, str]:
    return f"{cost['seconds']:.1f}", f"{cost['cpu']:.1f}", f"{cost['peak_mib']:,.0f}"


def _verdict(cost: Measured, at_most: tuple[float, float]) -> str:
    return "met" if cost["seconds"] <= at_most[0] and cost["peak_mib"] <= at_most[1] else "missed"


if __name__ == "__main__":
    main()
