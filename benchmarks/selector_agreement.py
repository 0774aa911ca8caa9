"""Which selector names rocks that other prompts confirm: every one of them on halves of the prompts of real runs.

1. The prompts of a run are halved at random, several times. On each half everything is decided again: sums, labels,
   thresholds, contexts, ranking. The first K types of both halves are compared (Jaccard), and so is the share of the
   *other* half's kl that they hold (held-out coverage).
2. Where rocks are known, recall is the share of them among the first K, or of K where there are more of them. The
   pebbles' task plants its choices: which marker, closer, heading, delimiter, line break and box. Runs of other tasks
   have none, though some of these texts may be in their vocabularies.
3. The rule by which the default is judged was written before any of these numbers: another selector replaces it if, at
   every K on every run, its halves agree at least as well and its held-out coverage is at most 1 point lower, and at
   half of them or more its Jaccard index is higher by 0.05.

``python benchmarks/selectors.py runs/demo --k 5 10 20`` takes a minute on two cores; a run with a vocabulary of 49,152
types some more.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from context_defaults import swapped
from printing import machine, print_table
from rocktokens.config import load_config
from rocktokens.rocks.cutoff import coverage, jaccard
from rocktokens.rocks.encoders import Encoder, embedding_encoder, traced_embeddings
from rocktokens.rocks.persistence import find_thresholds, persistent_occurrences
from rocktokens.rocks.ranking import Rules, rank_types, rankable
from rocktokens.rocks.search import Criterion, compare_contexts, score_types, with_kept
from rocktokens.rocks.selectors import Sample, mean_kl
from rocktokens.rocks.sums import PromptSums, gather
from rocktokens.tasks.wordmath import CLOSERS, MARKERS
from rocktokens.traces.store import TraceStore

PACKAGES = ("rocktokens", "numpy", "scipy", "duckdb")
PLANTED = (*MARKERS, *CLOSERS, "###", "**", " $", " \\(", "\n", "\n\n", "\\boxed", "\\mathbf")
"""The texts of the pebbles' choices."""
MEAN = "mean kl"
CONTEXT = "context (the paper)"
CRITERIA = {
    "bound, stopped (the default)": Criterion(),
    "bound, any label": Criterion(require="any"),
    "bound, stuck": Criterion(require="stuck"),
    "R, stopped, 5 prompts": Criterion(stage="score"),
    "R alone (the public code)": Criterion(stage="score", require="any", min_prompts=1),
    "smaller R of both checkpoints": Criterion(stage="score", require="any", min_prompts=1, joint=True),
    MEAN: Criterion(stage="score", require="any", min_prompts=1),
    CONTEXT: Criterion(stage="context", require="any", min_prompts=1),
}


@dataclass(frozen=True)
class Half:
    """What one half of the prompts names, by selector, and the kl of the other half."""

    first: dict[str, np.ndarray]
    """Columns, best first, as many as the largest K."""
    held_out_kl: np.ndarray


def main() -> None:
    """Print a table for every run and K."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--k", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--splits", type=int, default=20, help="random halvings of the prompts")
    arguments = parser.parse_args()
    print(machine(PACKAGES))
    for run in arguments.runs:
        report(run, arguments.k, arguments.splits)


def report(run: Path, ks: Sequence[int], splits: int) -> None:
    """Print the tables of one run."""
    store = TraceStore(run)
    last, context = store.checkpoints[-1], CRITERIA[CONTEXT]
    encoder = embedding_encoder(store.table(last), traced_embeddings(store, last), context.window)
    pairs = []
    for seed in range(splits):
        sums = gather(store, None, None, 0.5, seed)
        pairs.append([search(store, side, encoder, max(ks)) for side in (sums, swapped(sums))])
    token_ids = gather(store, None, None, None, 0).selection.token_ids
    has_planted = load_config(store.run.verified("config.toml")).task.name == "wordmath"
    planted = np.flatnonzero(np.isin(store.token_texts(token_ids), PLANTED if has_planted else []))
    steps = ", ".join(map(str, store.checkpoints))
    print(f"\n# {run}: checkpoints {steps}, {len(token_ids):,} types, {splits} halvings of the prompts\n")
    for k in ks:
        print(f"## K = {k}\n")
        header = ("selector", "rocks", "two halves", "± sd", "held-out coverage", "planted rocks")
        print_table(header, [row(name, pairs, k, planted) for name in CRITERIA])


def search(store: TraceStore, sums: PromptSums, encoder: Encoder, k: int) -> Half:
    """Rank the types of one half by every selector."""
    first = {name: top(sums.selection, name, criterion, k) for name, criterion in CRITERIA.items() if name != CONTEXT}
    first[CONTEXT] = top(with_contexts(store, sums, encoder, k), CONTEXT, CRITERIA[CONTEXT], k)
    return Half(first, sums.measuring.totals("kl"))


def with_contexts(store: TraceStore, sums: PromptSums, encoder: Encoder, k: int) -> Sample:
    """Say which occurrences of the selection half are hard in contexts that recur there."""
    criterion = CRITERIA[CONTEXT]
    persistent = persistent_occurrences(store, sums, find_thresholds(store, sums, criterion.tau, None))
    context = compare_contexts(sums.selection, persistent, criterion, k, encoder)
    return with_kept(sums.selection, persistent, context, criterion.gamma, criterion.eta)


def top(sample: Sample, name: str, criterion: Criterion, k: int) -> np.ndarray:
    """Return the first K with a score."""
    score = score_types(sample, mean_kl if name == MEAN else criterion.selector)
    rules: Rules = criterion.rules(k)
    columns = rank_types(score, rankable(sample, rules)[0], rules)
    return columns[score[columns] > 0]


def row(name: str, pairs: Sequence[Sequence[Half]], k: int, planted: np.ndarray) -> tuple[str, ...]:
    """Summarise one selector at one K."""
    halves = [half for pair in pairs for half in pair]
    agreement = [jaccard(one.first[name][:k], other.first[name][:k]) or 0.0 for one, other in pairs]
    covered = [_last(coverage(half.first[name][:k], half.held_out_kl)) for half in halves]
    recall = [len(np.intersect1d(half.first[name][:k], planted)) / max(min(k, len(planted)), 1) for half in halves]
    return (
        name,
        f"{_mean(len(half.first[name][:k]) for half in halves):.1f}",
        f"{np.mean(agreement):.3f}",
        f"{np.std(agreement):.3f}",
        f"{100 * np.mean(covered):.1f} %",
        f"{np.mean(recall):.2f}" if len(planted) else "–",
    )


def _last(curve: np.ndarray) -> float:
    return float(curve[-1]) if len(curve) else 0.0


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


if __name__ == "__main__":
    main()
