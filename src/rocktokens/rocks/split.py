"""Split the prompts and gather what a search rests on: sums per cluster of prompts and type.

One pass per checkpoint (docs/method.md, section 4.7).

1. Split the prompts at the reference checkpoint, seeded, into a selection half and a measuring half.
2. A cluster is one prompt; a half with more than 500 prompts pools them at random into 500 clusters. Prompts are what
   is independent, so clusters are what a bootstrap draws; pooled ones are independent too, and 500 of them keep the
   sums small at any number of rows.
3. One group-by per checkpoint gives the sums of every (cluster, type) as sparse matrices, both halves at once.
4. Whether the baseline scored the same occurrences is read off sums too; only then are before/after statements paired.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_array

from rocktokens.errors import RocktokensError
from rocktokens.rocks.aggregate import cluster_keys, cluster_sums, occurrences, prompts_of
from rocktokens.rocks.selectors import Sample
from rocktokens.traces.store import TraceStore

MAX_CLUSTERS = 500
"""Of one half: a bootstrap over this many gives standard errors to about 3 %."""


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """Prompts that select the rocks and prompts that they are measured on; None means all of them."""

    selection: list[str] | None
    measuring: list[str] | None
    n_measuring: int


@dataclass(frozen=True, slots=True)
class PromptSums:
    """The sums of both halves, over the types that occur at the reference checkpoint."""

    reference: int
    baseline: int
    paired: bool
    """Whether the baseline scored the same occurrences; False too when there is no other checkpoint."""
    prompts: PromptSplit
    clusters: pa.Table
    """prompt_id, cluster: those of the selection half are numbered first."""
    selection: Sample
    measuring: Sample
    """The same sums as ``selection`` when the prompts are not split."""

    @property
    def is_split(self) -> bool:
        """Whether there are prompts that did not select."""
        return self.prompts.measuring is not None

    @property
    def halves(self) -> dict[str, Sample]:
        """Samples by the name of their half."""
        if not self.is_split:
            return {NOT_SPLIT: self.selection}
        return {SELECTION: self.selection, HELD_OUT: self.measuring}


SELECTION = "selection half"
HELD_OUT = "held-out half"
NOT_SPLIT = "selection half (no split)"


def gather(
    store: TraceStore, reference: int | None, baseline: int | None, split: float | None, seed: int
) -> PromptSums:
    """Read the sums of both checkpoints for both halves of the prompts."""
    reference, baseline = resolve_checkpoints(store, reference, baseline)
    everyone = prompts_of(store.table(reference))
    prompts = split_prompts(everyone, split, seed)
    clusters, bounds = _clusters(everyone, prompts, seed)
    now = _read_cells(store, reference, clusters, ("freq", "kl", "grad_norm"))
    samples = [Sample(token_ids=now.token_ids, **now.matrices(*ends)) for ends in pairwise(bounds)]
    paired = False
    if baseline != reference:
        before = _read_cells(store, baseline, clusters, ("freq", "kl"), now.token_ids)
        samples = [
            replace(sample, kl_before=before.matrices(*ends)["kl"])
            for sample, ends in zip(samples, pairwise(bounds), strict=True)
        ]
        paired = now.same_counts(before) and _same_occurrences(store, reference, baseline, clusters)
    return PromptSums(reference, baseline, paired, prompts, clusters, samples[0], samples[-1])


def checkpoint_samples(store: TraceStore, sums: PromptSums, checkpoint: int) -> dict[str, Sample]:
    """Return both halves with the kl of another checkpoint, by name; none where it scored other occurrences."""
    if checkpoint == sums.reference:
        return sums.halves
    if checkpoint == sums.baseline and sums.paired:
        return {half: _rescored(sample, sample.kl_before) for half, sample in sums.halves.items()}
    cells = _read_cells(store, checkpoint, sums.clusters, ("kl",), sums.selection.token_ids)
    if not _same_occurrences(store, sums.reference, checkpoint, sums.clusters):
        return {}
    samples: dict[str, Sample] = {}
    first = 0
    for half, sample in sums.halves.items():
        samples[half] = _rescored(sample, cells.matrices(first, first + sample.n_clusters)["kl"])
        first += sample.n_clusters
    return samples


def _rescored(sample: Sample, kl: Any) -> Sample:
    return replace(sample, kl=kl, kl_before=None, kept=None)


@dataclass(frozen=True, slots=True)
class _Cells:
    """Sums of (cluster, type), in order of both: those of consecutive clusters are slices, and no copies."""

    token_ids: np.ndarray
    columns: np.ndarray
    """int32 (N,): indices into ``token_ids``."""
    starts: np.ndarray
    """int32 (C + 1,): where each cluster begins."""
    sums: dict[str, np.ndarray]

    def matrices(self, first: int, last: int) -> dict[str, Any]:
        """Sparse (cluster, type) matrices of the clusters from ``first`` to before ``last``, by name."""
        starts = self.starts[first : last + 1]
        inside = slice(starts[0], starts[-1])
        where = self.columns[inside], starts - starts[0]
        shape = last - first, len(self.token_ids)
        return {name: csr_array((sums[inside], *where), shape=shape) for name, sums in self.sums.items()}

    def same_counts(self, other: "_Cells") -> bool:
        """Whether every type occurs as often in every cluster."""
        pairs = (self.starts, other.starts), (self.columns, other.columns), (self.sums["freq"], other.sums["freq"])
        return all(np.array_equal(one, two) for one, two in pairs)


def _read_cells(
    store: TraceStore, checkpoint: int, clusters: pa.Table, names: Sequence[str], token_ids: np.ndarray | None = None
) -> _Cells:
    """The named sums of one checkpoint, over the given types, or over all that occur."""
    cells = cluster_sums(occurrences(store.table(checkpoint)), clusters, names)
    ids, rows = (cells[name].to_numpy() for name in ("token_id", "cluster"))
    token_ids = np.unique(ids).astype(np.int64) if token_ids is None else token_ids
    columns = np.minimum(np.searchsorted(token_ids, ids), len(token_ids) - 1).astype(np.int32)
    order = np.argsort(rows * np.int64(len(token_ids)) + columns)
    order = order[token_ids[columns[order]] == ids[order]]
    counts = np.bincount(rows[order], minlength=int(clusters["cluster"].to_numpy().max()) + 1)
    return _Cells(
        token_ids=token_ids,
        columns=columns[order],
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        sums={name: cells[name].to_numpy().astype(np.int64, copy=False)[order] for name in names},
    )


def _same_occurrences(store: TraceStore, reference: int, baseline: int, clusters: pa.Table) -> bool:
    late, early = (cluster_keys(occurrences(store.table(step)), clusters) for step in (reference, baseline))
    return np.array_equal(late, early)


def resolve_checkpoints(store: TraceStore, reference: int | None, baseline: int | None) -> tuple[int, int]:
    """Return the named checkpoints, by default the last and the first; one without traces is refused by name."""
    available = store.checkpoints
    if not available:
        raise RocktokensError(f"{store.run.path} has no replay traces: run `rocktokens trace`")
    _require_finished(store, [step for step in (reference, baseline) if step is not None])
    resolved = {
        "reference": available[-1] if reference is None else reference,
        "baseline": available[0] if baseline is None else baseline,
    }
    for role, checkpoint in resolved.items():
        if checkpoint not in available:
            steps = ", ".join(map(str, available))
            raise RocktokensError(f"{role} = {checkpoint} is not a traced checkpoint: available are {steps}")
    if resolved["baseline"] > resolved["reference"]:
        raise RocktokensError(
            "baseline = {baseline} is later than reference = {reference}: swap them".format(**resolved)
        )
    return resolved["reference"], resolved["baseline"]


def _require_finished(store: TraceStore, named: list[int]) -> None:
    """Refuse a replay that was interrupted, unless both checkpoints are named and it is done with them."""
    steps = sorted(map(int, store.replay.get("checkpoints", {})))
    rows = {step: store.rows(step) for step in steps}
    paired = store.replay.get("probe") != "each"
    for step in steps if len(named) < 2 else sorted(set(steps) & set(named)):
        if not rows[step] or (paired and rows[step] < max(rows.values())):
            found = f"{rows[step]} of {max(rows.values())} rows" if rows[step] else "no traces"
            raise RocktokensError(
                f"the replay is not finished (checkpoint {step} of {', '.join(map(str, steps))} has {found}): "
                "run `rocktokens trace` again"
            )


def split_prompts(prompt_ids: list[str], share: float | None, seed: int) -> PromptSplit:
    """Divide sorted prompt ids by a seeded permutation, both sides getting at least one; None or 1 does not divide."""
    count = len(prompt_ids)
    if not count:
        raise RocktokensError("no row of the trace has a kl: trace again, with a student that is scored at every token")
    if share is None or share >= 1:
        return PromptSplit(None, None, count)
    if count < 2:
        raise RocktokensError(f"split = {share} needs at least 2 prompts, the trace has {count}: give split = 1")
    order = np.random.Generator(np.random.PCG64(seed)).permutation(count)
    cut = min(max(int(share * count + 0.5), 1), count - 1)
    selection, measuring = (sorted(prompt_ids[i] for i in half) for half in (order[:cut], order[cut:]))
    return PromptSplit(selection, measuring, count - cut)


def _clusters(everyone: list[str], prompts: PromptSplit, seed: int) -> tuple[pa.Table, list[int]]:
    """Every prompt with the number of its cluster, and the bounds of the numbers of each half."""
    if prompts.selection is None or prompts.measuring is None:
        halves = [everyone]
    else:
        halves = [prompts.selection, prompts.measuring]
    bounds = [0, *accumulate(min(len(half), MAX_CLUSTERS) for half in halves)]
    numbers = [first + _cluster_numbers(len(half), seed) for first, half in zip(bounds, halves, strict=False)]
    table = {
        "prompt_id": pa.array([prompt for half in halves for prompt in half], pa.string()),
        "cluster": pa.array(np.concatenate(numbers), pa.int32()),
    }
    return pa.table(table), bounds


def _cluster_numbers(count: int, seed: int) -> np.ndarray:
    if count <= MAX_CLUSTERS:
        return np.arange(count)
    return np.random.Generator(np.random.PCG64([seed, count])).permutation(count) % MAX_CLUSTERS
