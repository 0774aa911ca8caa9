"""Set two searches side by side: do runs, tasks, seeds or checkpoints have the same rocks?

1. Both were made by one criterion over one vocabulary.
2. The sets are compared by their Jaccard index, the scores of all types ranked in both by Spearman's correlation.
3. Two yardsticks tell whether an index is high: what random sets of these sizes would share, and what two halves of the
   prompts of one and the same run share.
4. Scores are shown as shares of the run's kl, so that runs of different size compare; what moved most comes first.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rocktokens.errors import RocktokensError, TokenizerMismatchError
from rocktokens.progress import SILENT, Progress
from rocktokens.rocks.categories import store_categories
from rocktokens.rocks.cutoff import jaccard, spearman, split_half
from rocktokens.rocks.find import EVERYWHERE, FindOptions, find_settings, open_search, search_traces
from rocktokens.rocks.search import SearchResult, require_comparable
from rocktokens.rocks.sums import resolve_checkpoints
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.traces.store import TraceStore
from rocktokens.types import Category, has_tail


@dataclass(frozen=True, slots=True)
class MovedType:
    """A type that is a rock in either search, with its rank and its shares of the kl and the tokens in both."""

    id: int
    text: str
    category: Category
    rank_a: int | None
    kl_share_a: float
    token_share_a: float
    rank_b: int | None
    kl_share_b: float
    token_share_b: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two searches agree, ``a`` the first and ``b`` the second; None where a number is not defined."""

    jaccard: float | None
    jaccard_by_chance: float | None
    """Of random sets of these sizes."""
    jaccard_within: list[float | None]
    """Of two halves of the prompts of each run alone; which contexts recur is taken as found."""
    spearman: float | None
    n_types_in_both: int
    n_rocks: list[int]
    only_a: list[int]
    only_b: list[int]
    moved: list[MovedType]
    """The types that are rocks in either, what moved most first."""
    teacher: str = ""
    """Of both, where it named its likeliest tokens alone."""


@dataclass(frozen=True, slots=True)
class RunComparison:
    """What ``rocktokens find A B --compare`` says."""

    a: str
    b: str
    criterion: dict[str, Any]
    agreement: Agreement

    def to_record(self) -> dict[str, Any]:
        """Return one flat JSON object."""
        return {"a": self.a, "b": self.b, "criterion": self.criterion, **asdict(self.agreement)}


def compare_runs(
    names: tuple[str, str],
    overrides: list[str] | None = None,
    options: FindOptions = EVERYWHERE,
    progress: Progress = SILENT,
) -> RunComparison:
    """Search two runs, each ``RUN`` or ``RUN@CHECKPOINT``, with the settings of the first, and compare."""
    sides = [_run_at(name, options) for name in names]
    section, seed = find_settings(sides[0][0], overrides)
    require_same_vocabulary(*(run.manifest().get("tokenizer_sha256", "") for run, _ in sides))
    opened = [open_search(run, section, seed, at) for run, at in sides]
    for store, criterion in opened:
        resolve_checkpoints(store, criterion.reference, criterion.baseline)
    a, b = (search_traces(store, criterion, section.encoder, progress=progress) for store, criterion in opened)
    agreement = compare_results((opened[0][0], opened[1][0]), (a, b))
    return RunComparison(*names, {**section.model_dump(), "seed": seed}, agreement)


def compare_results(stores: tuple[TraceStore, TraceStore], results: tuple[SearchResult, SearchResult]) -> Agreement:
    """Measure how far two searches agree and what moved between them."""
    require_same_vocabulary(*(store.tokenizer_sha256 for store in stores))
    require_comparable(results[0].teacher, results[1].teacher, "the runs")
    ids = [result.sums.selection.token_ids[result.columns] for result in results]
    scores = []
    for result in results:
        sample = result.sums.selection
        ranked = sample.totals("freq") >= result.criterion.min_freq
        scores.append(dict(zip(sample.token_ids[ranked].tolist(), result.ranking_U[ranked].tolist(), strict=True)))
    shared = sorted(set(scores[0]) & set(scores[1]))
    return Agreement(
        jaccard=jaccard(*ids),
        jaccard_by_chance=_chance(len(ids[0]), len(ids[1]), len(shared)),
        jaccard_within=[
            split_half(
                result.sums.selection,
                result.criterion.selector,
                result.criterion.rules(max(result.k, 1)),
                seed=derive_seed(result.criterion.seed, "compare"),
            )["jaccard_halves"]
            for result in results
        ],
        spearman=spearman(*(np.array([side[v] for v in shared]) for side in scores)),
        n_types_in_both=len(shared),
        n_rocks=[len(side) for side in ids],
        only_a=np.setdiff1d(ids[0], ids[1]).tolist(),
        only_b=np.setdiff1d(ids[1], ids[0]).tolist(),
        moved=_moved(stores[0], results, np.union1d(*ids)),
        teacher=results[0].teacher if has_tail(results[0].teacher) else "",
    )


def require_same_vocabulary(first: str, second: str) -> None:
    """Refuse two runs, given by vocabulary hash, whose token ids mean different things."""
    if first != second:
        raise TokenizerMismatchError(
            f"the runs have different tokenizers ({first[:12] or 'none'} and {second[:12] or 'none'}): their token ids "
            "mean different things, compare runs of one vocabulary"
        )


def _chance(first: int, second: int, types: int) -> float | None:
    """Return the Jaccard index of two sets of these sizes that share as many types as random ones do on average."""
    shared = first * second / types if types else 0.0
    union = first + second - shared
    return shared / union if union > 0 and types >= max(first, second) else None


def _moved(store: TraceStore, results: tuple[SearchResult, SearchResult], union: np.ndarray) -> list[MovedType]:
    texts, categories = store.token_texts(union), store_categories(store, union)
    sides = [_side(result, union) for result in results]
    described = zip(union.tolist(), texts, categories, *sides, strict=True)
    moved = [MovedType(token_id, text, category, *a, *b) for token_id, text, category, a, b in described]
    return sorted(moved, key=lambda own: (-abs(own.kl_share_b - own.kl_share_a), own.id))


def _side(result: SearchResult, union: np.ndarray) -> list[tuple[int | None, float, float]]:
    """Return rank, share of the kl and share of the tokens of some types in one search."""
    sample = result.sums.selection
    column_of = {token_id: column for column, token_id in enumerate(sample.token_ids.tolist())}
    rank_of = {column: rank for rank, column in enumerate(result.columns.tolist(), start=1)}
    columns = [column_of.get(token_id) for token_id in union.tolist()]
    kl, freq = sample.totals("kl"), sample.totals("freq")
    whole_kl, whole_freq = max(int(kl.sum()), 1), max(int(freq.sum()), 1)
    return [
        (None, 0.0, 0.0)
        if column is None
        else (rank_of.get(column), int(kl[column]) / whole_kl, int(freq[column]) / whole_freq)
        for column in columns
    ]


def _run_at(name: str, options: FindOptions) -> tuple[RunDir, FindOptions]:
    """``RUN`` or ``RUN@CHECKPOINT``; a folder whose name has an @ in it is a folder first."""
    folder, at, checkpoint = name.rpartition("@")
    if not at or Path(name).exists():
        return RunDir(name).require(), options
    if not checkpoint.isdecimal():
        raise RocktokensError(f"{name!r} names checkpoint {checkpoint!r}: give a step, as in {folder}@200")
    return RunDir(folder).require(), replace(options, reference=int(checkpoint))
