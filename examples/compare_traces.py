"""Print how far two replays of the same probe are from each other, such as one with a served teacher from one without.

    python examples/compare_traces.py runs/local runs/served

Rows are compared one by one, so both runs must have replayed the same rollouts through as many checkpoints. Rocks are
compared where both runs have a rocks.json. What either teacher gave is said first: of one that named its likeliest
tokens alone, the kl is a lower bound of the other's.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
from options import run_main

from rocktokens import RockSet, TraceStore
from rocktokens.errors import RocktokensError

KEYS = ["rollout_id", "position", "token_id"]
COLUMNS = (
    "tokens",
    "types",
    "largest |Δkl|",
    "largest Δkl",
    "median |Δkl|",
    "median |Δkl| / kl",
    "largest |ΔΣkl| / Σkl",
    "Σkl / Σkl",
)
"""Of tokens, then of the sums that rocks are found by: Δ is right less left."""


def main() -> None:
    """Compare all checkpoints, then the rocks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("left", type=Path, help="folder of a run")
    parser.add_argument("right", type=Path, help="folder of another")
    arguments = parser.parse_args()
    stores = [TraceStore(own) for own in (arguments.left, arguments.right)]
    print(teachers_sentence(stores))
    print("  ".join(("checkpoint", *COLUMNS)))
    for checkpoint in stores[0].checkpoints:
        left, right = (rows(store, checkpoint) for store in stores)
        found = zip(COLUMNS, comparison(left, right), strict=True)
        print("  ".join((f"{checkpoint:10d}", *(f"{value:>{len(name)}}" for name, value in found))))
    print(rocks_sentence(arguments.left, arguments.right))


def teachers_sentence(stores: list[TraceStore]) -> str:
    """Say how the teacher's values of both came."""
    left, right = (store.teacher(store.checkpoints[-1]) or "in memory" for store in stores)
    return f"teachers: {left} (left), {right} (right)"


def rows(store: TraceStore, checkpoint: int) -> pa.Table:
    """The keys and the kl of all tokens, in one order."""
    return store.table(checkpoint).select(*KEYS, "kl").order_by(KEYS[:2]).to_pyarrow()


def comparison(left: pa.Table, right: pa.Table) -> tuple[str, ...]:
    """Return what ``COLUMNS`` are called after; shares are of the left run's kl."""
    if not left.select(KEYS).equals(right.select(KEYS)):
        raise RocktokensError("the runs have replayed different rollouts: give two replays of one probe")
    a, b = (table.column("kl").to_numpy().astype(np.float64) for table in (left, right))
    _, type_T = np.unique(left.column("token_id").to_numpy(), return_inverse=True)
    sums_a, sums_b = (np.bincount(type_T, weights=kl) for kl in (a, b))
    gap, by_type = np.abs(b - a), np.abs(sums_a - sums_b) / np.maximum(np.abs(sums_a), np.finfo(float).tiny)
    numbers = (gap.max(), (b - a).max(), np.median(gap), np.median(gap[a > 0] / a[a > 0]), by_type.max())
    return (str(len(a)), str(len(sums_a)), *(f"{own:.2g}" for own in numbers), f"{b.sum() / a.sum():.6f}")


def rocks_sentence(left: Path, right: Path) -> str:
    """Say whether both have found the same rocks, and say the same of each."""
    if not all((own / "rocks.json").exists() for own in (left, right)):
        return "Rocks are not compared: run `rocktokens find` on both runs."
    first, second = ({rock.id: rock for rock in RockSet.load(own / "rocks.json").tokens} for own in (left, right))
    a, b = [*first], [*second]
    shared = [v for v in a if v in second]
    alike = sum(first[v].label == second[v].label for v in shared)
    kept = {v: (first[v].kept_first, second[v].kept_first) for v in shared}
    gaps = {v: abs(before - now) for v, (before, now) in kept.items() if before is not None and now is not None}
    said = f"{alike} of the {len(shared)} labels are the same"
    if gaps:
        worst = max(gaps, key=lambda v: gaps[v])
        before, now = kept[worst]
        said += (
            f"; {first[worst].text!r} kept {before:.3f} (left) and {now:.3f} (right) of its first kl, the largest gap"
        )
    if a == b:
        return f"The {len(a)} rocks are the same, in the same order. {said}."
    return f"{len(shared)} rocks are in both sets, which have {len(a)} and {len(b)}. {said}."


if __name__ == "__main__":
    run_main(main)
