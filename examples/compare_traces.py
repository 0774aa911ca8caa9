"""Print how far two replays of the same probe are from each other, such as one with a served teacher from one without.

    python examples/compare_traces.py runs/local runs/served

Rows are compared one by one, so both runs must have replayed the same rollouts through as many checkpoints. Rocks are
compared where both runs have a rocks.json.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa

from rocktokens import RockSet, TraceStore
from rocktokens.errors import RocktokensError

KEYS = ["rollout_id", "position", "token_id"]


def main() -> None:
    """Compare all checkpoints, then the rocks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("left", type=Path, help="folder of a run")
    parser.add_argument("right", type=Path, help="folder of another")
    arguments = parser.parse_args()
    stores = [TraceStore(own) for own in (arguments.left, arguments.right)]
    print("checkpoint   tokens  largest |Δkl|  median |Δkl|  types  largest |ΔΣkl| / Σkl  |ΔΣkl| / Σkl of all")
    for checkpoint in stores[0].checkpoints:
        left, right = (rows(store, checkpoint) for store in stores)
        print(f"{checkpoint:10d} {comparison(left, right)}")
    print(rocks_sentence(arguments.left, arguments.right))


def rows(store: TraceStore, checkpoint: int) -> pa.Table:
    """The keys and the kl of all tokens, in one order."""
    return store.table(checkpoint).select(*KEYS, "kl").order_by(KEYS[:2]).to_pyarrow()


def comparison(left: pa.Table, right: pa.Table) -> str:
    """Differences by token, and of the sums that rocks are found by."""
    if not left.select(KEYS).equals(right.select(KEYS)):
        raise RocktokensError("the runs have replayed different rollouts: give two replays of one probe")
    a, b = (table.column("kl").to_numpy().astype(np.float64) for table in (left, right))
    _, type_T = np.unique(left.column("token_id").to_numpy(), return_inverse=True)
    sums_a, sums_b = (np.bincount(type_T, weights=kl) for kl in (a, b))
    gap, by_type = np.abs(a - b), np.abs(sums_a - sums_b) / np.maximum(np.abs(sums_a), np.finfo(float).tiny)
    total = abs(a.sum() - b.sum()) / a.sum()
    return f"{len(a):8d} {gap.max():14.2g} {np.median(gap):13.2g} {len(sums_a):6d} {by_type.max():21.2g} {total:21.2g}"


def rocks_sentence(left: Path, right: Path) -> str:
    """Say whether both have found the same rocks."""
    if not all((own / "rocks.json").exists() for own in (left, right)):
        return "Rocks are not compared: run `rocktokens find` on both runs."
    a, b = ([rock.id for rock in RockSet.load(own / "rocks.json").tokens] for own in (left, right))
    if a == b:
        return f"The {len(a)} rocks are the same, in the same order."
    return f"{len(set(a) & set(b))} rocks are in both sets, which have {len(a)} and {len(b)}."


if __name__ == "__main__":
    main()
