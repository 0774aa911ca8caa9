"""How γ and η of the context stage were chosen: what they do to the rocks of real runs.

1. Chance: contexts of persistent occurrences of *different* types in different rollouts have nothing to do with each
   other. How often such a pair reaches γ is the level that η has to exceed. What the stage keeps where contexts mean
   nothing is seen by dealing the contexts out to the types at random: each type gets as many as it has.
2. A grid over γ and η: what is kept, and whether the rocks are a property of the student or of the prompts. The search
   runs anew on two disjoint halves of the prompts (thresholds, persistent occurrences, contexts, ranking), several
   times; the Jaccard index of the two sets says what to expect of other prompts.
3. Beside it, how much of the set stays when γ or η moves by one step of the grid, and how much of it the plain score
   names too. Only types whose score is above 0 count as rocks.

``python benchmarks/context_defaults.py runs/demo runs/smollm2`` takes half a minute a run of some ten thousand tokens.
"""

import argparse
import datetime
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from rocktokens.config import load_config
from rocktokens.rocks.contexts import ContextResult
from rocktokens.rocks.cutoff import jaccard
from rocktokens.rocks.encoders import Encoder, embedding_encoder, traced_embeddings
from rocktokens.rocks.persistence import Persistent, find_thresholds, persistent_occurrences
from rocktokens.rocks.ranking import Rules, rank_types
from rocktokens.rocks.search import Criterion, compare_contexts, score_types, with_kept
from rocktokens.rocks.selectors import selector_of
from rocktokens.rocks.sums import PromptSplit, PromptSums, gather
from rocktokens.run_dir import RunDir
from rocktokens.traces.store import TraceStore

GAMMAS = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
ETAS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
GRID = tuple((gamma, eta) for gamma in GAMMAS for eta in ETAS)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
SAMPLED = 5000
"""Occurrences whose pairs show how alike contexts are."""
FEW_ROCKS = 20

Setting = tuple[float, float]
Rocks = dict[Setting | None, np.ndarray]
"""The rocks at each (γ, η), and by the plain score at None, as ascending columns."""


@dataclass(frozen=True)
class Half:
    """One search at every setting."""

    rocks: dict[int, Rocks]
    """By K."""
    kept: dict[Setting, float]
    """Share of the persistent occurrences that have another of their type; next, with contexts dealt out at random."""
    kept_by_chance: dict[Setting, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--k", type=int, nargs="+", help=f"default find.k of the run's config, and {FEW_ROCKS}")
    parser.add_argument("--splits", type=int, default=10, help="random halvings of the prompts")
    arguments = parser.parse_args()
    print(f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    for run in arguments.runs:
        report(run, arguments.k, arguments.splits)


def report(run: Path, wanted: Sequence[int] | None, splits: int) -> None:
    """Print all tables of one run."""
    store, criterion = TraceStore(run), Criterion(stage="context", require="any", min_prompts=1)
    first, last = store.checkpoints[0], store.checkpoints[-1]
    encoder = embedding_encoder(store.table(last), traced_embeddings(store, last), criterion.window)
    print(f"\n# {run}: checkpoints {first} and {last}, window {criterion.window}, tau {criterion.tau}\n")
    chance = _print_cosines(*sample_cosines(store, criterion, encoder))
    ks = wanted or sorted({int(load_config(RunDir(run).config).find.k), FEW_ROCKS})
    pairs = [search_halves(store, criterion, encoder, ks, seed) for seed in range(splits)]
    for k in ks:
        print(f"\n## K = {k}, mean (± standard deviation) over {splits} halvings of the prompts\n")
        _print_grid(chance, pairs, k)


def sample_cosines(store: TraceStore, criterion: Criterion, encoder: Encoder) -> tuple[np.ndarray, np.ndarray]:
    """Cosines of contexts in different rollouts, of different types and of one type, in a seeded sample."""
    found = _persistent(store, gather(store, None, None, None, 0), criterion)
    some = _shuffle(len(found.columns))[:SAMPLED]
    columns, rollouts = found.columns[some], found.rollout_ids[some]
    vectors_ND = encoder.encode(encoder.look_up(rollouts, found.positions[some])).astype(np.float32)
    cosines_NN = vectors_ND @ vectors_ND.T
    apart_NN, same_NN = rollouts[:, None] != rollouts, columns[:, None] == columns
    return cosines_NN[apart_NN & ~same_NN], cosines_NN[apart_NN & same_NN]


def search_halves(
    store: TraceStore, criterion: Criterion, encoder: Encoder, ks: Sequence[int], seed: int
) -> tuple[Half, Half]:
    """Search on a random half of the prompts, and on the other."""
    sums = gather(store, None, None, 0.5, seed)
    one, other = (_search(store, side, criterion, encoder, ks) for side in (sums, swapped(sums)))
    return one, other


def _search(store: TraceStore, sums: PromptSums, criterion: Criterion, encoder: Encoder, ks: Sequence[int]) -> Half:
    sample, persistent = sums.selection, _persistent(store, sums, criterion)
    context = compare_contexts(sample, persistent, criterion, len(sample.token_ids), encoder, gammas=GAMMAS)
    if not context.exact.all():
        raise SystemExit(f"{store.run.path} has more pairs of contexts than are compared in full: take a smaller run")
    scores: dict[Setting | None, np.ndarray] = {None: score_types(sample, selector_of("score", joint=False))}
    for setting in GRID:
        scores[setting] = score_types(with_kept(sample, persistent, context, *setting), criterion.selector)
    freq = sample.totals("freq")
    deal = _shuffle(len(persistent.columns))
    dealt = replace(persistent, rollout_ids=persistent.rollout_ids[deal], positions=persistent.positions[deal])
    return Half(
        rocks={k: {at: _first(score, freq, criterion, k) for at, score in scores.items()} for k in ks},
        kept=_kept_shares(context),
        kept_by_chance=_kept_shares(
            compare_contexts(sample, dealt, criterion, len(sample.token_ids), encoder, gammas=GAMMAS)
        ),
    )


def _kept_shares(context: ContextResult) -> dict[Setting, float]:
    return {setting: float(context.kept_count(*setting).sum() / context.persistent.sum()) for setting in GRID}


def _persistent(store: TraceStore, sums: PromptSums, criterion: Criterion) -> Persistent:
    return persistent_occurrences(store, sums, find_thresholds(store, sums, criterion.tau, None))


def _first(score: np.ndarray, freq: np.ndarray, criterion: Criterion, k: int) -> np.ndarray:
    rules = Rules(k, criterion.min_freq)
    columns = rank_types(score, freq >= rules.min_freq, rules)
    return np.sort(columns[score[columns] > 0])


def swapped(sums: PromptSums) -> PromptSums:
    """Let the halves change places; clusters of the selection half are numbered first."""
    total, measuring = sums.selection.n_clusters + sums.measuring.n_clusters, sums.measuring.n_clusters
    numbers = (sums.clusters["cluster"].to_numpy() + measuring) % total
    split = sums.prompts
    return replace(
        sums,
        prompts=PromptSplit(split.measuring, split.selection, split.n_measuring, split.n_selection),
        keys=np.roll(sums.keys, measuring),
        clusters=sums.clusters.set_column(1, "cluster", pa.array(numbers, pa.int32())),
        selection=sums.measuring,
        measuring=sums.selection,
    )


def _shuffle(count: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(0)).permutation(count)


def _neighbours(setting: Setting) -> list[Setting]:
    """The settings one step away."""
    i, j = GAMMAS.index(setting[0]), ETAS.index(setting[1])
    near = [(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]
    return [(GAMMAS[a], ETAS[b]) for a, b in near if 0 <= a < len(GAMMAS) and 0 <= b < len(ETAS)]


def _print_cosines(unrelated: np.ndarray, same_type: np.ndarray) -> dict[float, float]:
    """The share of unrelated pairs that reach each γ."""
    print(
        "Cosine of the contexts of two persistent occurrences in different rollouts: quantiles, and share that reach γ"
    )
    rows = [
        (
            kind,
            f"{len(cosines):,}",
            *(f"{value:.2f}" for value in np.quantile(cosines, QUANTILES)),
            *(f"{np.mean(cosines >= gamma):.3f}" for gamma in GAMMAS),
        )
        for kind, cosines in (("different types", unrelated), ("one type", same_type))
    ]
    _print_table(("", "pairs", *(f"{q:.0%}" for q in QUANTILES), *(f"≥ {gamma}" for gamma in GAMMAS)), rows)
    return {gamma: float(np.mean(unrelated >= gamma)) for gamma in GAMMAS}


def _print_grid(chance: dict[float, float], pairs: Sequence[tuple[Half, Half]], k: int) -> None:
    header = ("γ", "η", "chance", "kept", "kept by chance", "rocks", "halves agree", "one step away", "plain score")
    _print_table(header, [_row(chance[gamma], pairs, k, (gamma, eta)) for gamma, eta in GRID])
    print(f"halves agree by the plain score: {_agreement(pairs, k, None)}")


def _row(chance: float, pairs: Sequence[tuple[Half, Half]], k: int, at: Setting) -> tuple[str, ...]:
    halves = [half for pair in pairs for half in pair]
    found = [half.rocks[k] for half in halves]
    return (
        *map(str, at),
        f"{chance:.3f}",
        f"{_mean(half.kept[at] for half in halves):.3f}",
        f"{_mean(half.kept_by_chance[at] for half in halves):.3f}",
        f"{_mean(len(rocks[at]) for rocks in found):.1f}",
        _agreement(pairs, k, at),
        f"{_mean(_overlap(rocks[at], rocks[near]) for rocks in found for near in _neighbours(at)):.3f}",
        f"{_mean(_overlap(rocks[at], rocks[None]) for rocks in found):.3f}",
    )


def _agreement(pairs: Sequence[tuple[Half, Half]], k: int, at: Setting | None) -> str:
    """Mean and standard deviation over the halvings."""
    overlaps = [_overlap(one.rocks[k][at], other.rocks[k][at]) for one, other in pairs]
    return f"{np.mean(overlaps):.3f} ± {np.std(overlaps):.3f}"


def _overlap(first: np.ndarray, second: np.ndarray) -> float:
    """Jaccard index; 0 where there are no rocks to agree on."""
    return jaccard(first, second) or 0.0


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As Markdown."""
    lines = [header, ["---:"] * len(header), *rows]
    print("".join(f"| {' | '.join(line)} |\n" for line in lines), flush=True)


if __name__ == "__main__":
    main()
