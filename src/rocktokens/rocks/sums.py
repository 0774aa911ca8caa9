"""Sum over the occurrences of a trace, exactly and in any order: the arithmetic every statistic here rests on.

1. A score enters a sum in fixed point, ``floor(x · 2^24 + 1/2)`` as int64. Integer addition is associative, so a sum
   does not depend on threads, parts or engine; one occurrence is rounded by at most 2^-25 nats. Probabilities are
   summed likewise; a polynomial makes them from log-probabilities, as engines may differ in the last bit of exp.
2. Range: a token's score is at most 2^15 (checked when written), and before a sum is taken, rows × largest score is
   checked to stay below 2^39, so no partial sum can leave int64 (100 million tokens may average 5,000 nats).
3. Rows without a ``kl`` (positions that a policy froze, never scored) are not occurrences: they count nowhere.
4. Whether two checkpoints scored the same occurrences is decided by counts and by sums of a hash of (rollout,
   position), per type, or with the token in it, per cluster of prompts. That needs no join of the two.
5. Order statistics are found by counting in buckets of equal width and looking closer only where the rank falls, so a
   quantile is exact, the same on every engine, and needs no sorted copy of the column.

What a search rests on, ``gather`` (docs/method.md, section 4.7):

6. The prompts of the reference checkpoint are split, seeded, into a selection half and a measuring half.
7. A cluster is one prompt. A half with more than 8,000 prompts pools them at random into 500 clusters, which keeps the
   sums small at any number of rows. Prompts are what is independent; pooled ones are independent too.
8. One group-by per checkpoint gives the sums of every (cluster, type) as sparse matrices, both halves at once. Only
   where both checkpoints scored the same occurrences are before/after statements paired.
9. The middle checkpoint is the one nearest to half the reference step, the earlier on a tie, of those that lie between
   the two and scored the same occurrences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, pairwise
from operator import or_
from typing import Any

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
from scipy.sparse import csr_array

from rocktokens.errors import RocktokensError
from rocktokens.rocks.selectors import POOLED_CLUSTERS, Sample, pooled_groups
from rocktokens.traces.store import TraceStore
from rocktokens.types import CHOICE, ONE

MAX_TOTAL = 2.0**63 / ONE
MAX_ROWS = 1 << 31
SUMS = ("freq", "kl", "grad_norm", "occurrence_key")
PRIME = (1 << 31) - 1
"""Occurrence keys lie below it: sums of up to ``MAX_ROWS`` of them stay within int64, and so does a product of two."""
FIRST_BUCKET_WIDTH = 2.0**-12
BUCKETS_PER_BUCKET = 2.0**12
"""Powers of two, so that the edges of buckets are exact."""
MAX_VALUES = 1 << 20
"""Values of one bucket that are sorted in memory; a fuller bucket is divided first."""
MOST_PROMPTS = 8_000
"""Of one half, before it is pooled: their sums take some hundred MiB."""
LOG_ZERO = -40.0
"""Log-probabilities below count as this one, whose probability is 0 in fixed point."""
LOG_2, PER_LOG_2 = 0.693147180559945, 1.4427
"""Engines take such a literal for a decimal; with 15 digits or fewer all of them make the same float of it."""
EXP_TERMS = 8
"""Of Taylor's series: e^r to 2·10^-10 where 2 |r| ≤ log 2."""
SELECTION, HELD_OUT, NOT_SPLIT = "selection half", "held-out half", "selection half (no split)"


@dataclass(frozen=True, slots=True)
class TypeSums:
    """Per-type sums over one set of occurrences, all int64 (U,), U types used, in order of token id."""

    token_id: np.ndarray
    freq: np.ndarray
    kl: np.ndarray
    """Fixed point."""
    grad_norm: np.ndarray
    """Fixed point; an occurrence without a gradient norm adds nothing."""
    occurrence_key: np.ndarray
    """Sum of hashed (rollout, position): equal for equal sets of occurrences."""
    kl_choice: np.ndarray | None = None
    """Fixed point; None where it was not asked for."""

    def same_occurrences(self, other: "TypeSums") -> bool:
        """Whether both were summed over the same (rollout, position, token) occurrences."""
        columns = ("token_id", "freq", "occurrence_key")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in columns)


def occurrences(rows: ir.Table, prompt_ids: Sequence[str] | None = None) -> ir.Table:
    """Return the scored rows of a trace; only those of the given prompts, if any are given."""
    scored = rows.filter(rows.kl.notnull())
    if prompt_ids is None:
        return scored
    wanted = ibis.memtable(pa.table({"prompt_id": pa.array(prompt_ids, pa.string())}))
    return scored.semi_join(wanted, "prompt_id")


def prompts_of(rows: ir.Table) -> list[str]:
    """Return ids of the prompts with an occurrence, sorted by code point."""
    return sorted(occurrences(rows).select("prompt_id").distinct().to_pyarrow()["prompt_id"].to_pylist())


def type_sums(rows: ir.Table, with_choice: bool = False) -> TypeSums:
    """Sum the occurrences of every type; the choice too where that is asked for, which every row must have then."""
    _require_summable(rows)
    sums = _sums_of(rows)
    names = (*SUMS, CHOICE) if with_choice else SUMS
    by_type = rows.group_by("token_id").agg(**{name: sums[name] for name in names})
    columns = _arrays(by_type.order_by("token_id"))
    return TypeSums(**{name: column.astype(np.int64) for name, column in columns.items()})


def cluster_sums(rows: ir.Table, clusters: pa.Table, names: Sequence[str] = SUMS) -> pa.Table:
    """Sum by (cluster, token_id), in no particular order; occurrences of prompts without a cluster are left out.

    ``clusters`` has columns prompt_id and cluster, ``names`` are those of ``TypeSums`` and, where the rows have it,
    ``kl_choice``: each takes memory per cell.
    """
    _require_summable(rows)
    joined: Any = rows.inner_join(ibis.memtable(clusters), "prompt_id")
    sums = _sums_of(joined)
    return joined.group_by("cluster", "token_id").agg(**{name: sums[name] for name in names}).to_pyarrow()


def cluster_keys(rows: ir.Table, clusters: pa.Table) -> np.ndarray:
    """Sum hashed (rollout, position, token) by cluster, int64 (C,): equal for equal sets of occurrences."""
    joined: Any = rows.inner_join(ibis.memtable(clusters), "prompt_id")
    key = _occurrence_key(joined.rollout_id, joined.position, joined.token_id)
    return _arrays(joined.group_by("cluster").agg(key=key.sum()).order_by("cluster"))["key"].astype(np.int64)


def kl_quantiles(rows: ir.Table, shares: Sequence[float]) -> list[float]:
    """Return quantiles of kl over the occurrences, interpolated linearly as numpy does by default."""
    count = int(rows.count().to_pyarrow().as_py())
    if not count:
        raise RocktokensError("a quantile of kl over no occurrences is not defined: choose prompts that were scored")
    places = np.array(shares) * (count - 1)
    lows = np.minimum(places.astype(np.int64), count - 1)
    highs = np.minimum(lows + 1, count - 1)
    kl: Any = rows.kl
    ranks = np.union1d(lows, highs)
    values = np.array(_order_statistics(rows.select(kl=kl.cast("float64")), ranks, FIRST_BUCKET_WIDTH))
    low, high = (values[np.searchsorted(ranks, chosen)] for chosen in (lows, highs))
    weight, step = places - lows, high - low
    return np.where(weight < 0.5, low + step * weight, high - step * (1 - weight)).tolist()


def fixed_probability(logp: Any) -> Any:
    """Turn a column of log-probabilities into probabilities in fixed point, the same bits on every engine.

    e^x = 2^n · e^(x − n log 2) with whole n: of sums, products, quotients and powers of 2, each rounded in one way.
    A null counts 0.
    """
    x: Any = ibis.least(0.0, ibis.greatest(LOG_ZERO, logp.cast("float64")))
    n = (x * PER_LOG_2 + 0.5).floor().cast("float64")
    r = x - n * LOG_2
    return _fixed_point(reduce(lambda inner, k: inner * r / k + 1, range(EXP_TERMS, 0, -1), 1) * ibis.literal(2.0) ** n)


def rollout_shares(rows: ir.Table, token_ids: np.ndarray, clusters: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of the given types in each rollout's occurrences, and its cluster, in order of rollout id."""
    chosen = ibis.memtable(pa.table({"token_id": pa.array(token_ids, pa.int32())}))
    joined: Any = rows.inner_join(ibis.memtable(clusters), "prompt_id")
    counts = joined.group_by("rollout_id").agg(
        total=joined.count(), chosen=joined.token_id.isin(chosen.token_id).sum(), cluster=joined.cluster.max()
    )
    columns = _arrays(counts.order_by("rollout_id"))
    return columns["chosen"] / columns["total"], columns["cluster"]


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """Prompts that select the rocks and prompts that they are measured on; None means all of them."""

    selection: list[str] | None
    measuring: list[str] | None
    n_selection: int
    n_measuring: int


@dataclass(frozen=True, slots=True)
class PromptSums:
    """The sums of both halves, over the types that occur at the reference checkpoint."""

    reference: int
    baseline: int
    middle: int | None
    """The checkpoint halfway, by which a type is still moving or has stopped; None where there is none."""
    paired: bool
    """Whether the baseline scored the same occurrences; False too when there is no other checkpoint."""
    prompts: PromptSplit
    clusters: pa.Table
    """prompt_id, cluster: those of the selection half are numbered first."""
    keys: np.ndarray
    """int64 (C,): by cluster, what the occurrences of the reference are known by."""
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


def gather(
    store: TraceStore, reference: int | None, baseline: int | None, split: float | None, seed: int
) -> PromptSums:
    """Read the sums of both checkpoints for both halves of the prompts."""
    reference, baseline = resolve_checkpoints(store, reference, baseline)
    everyone = prompts_of(store.table(reference))
    prompts = split_prompts(everyone, split, seed)
    clusters, bounds = _clusters(everyone, prompts, seed)
    choice = [] if store.classes_sha256(reference) is None else [CHOICE]
    token_ids, now = _read_matrices(store, reference, clusters, ("freq", "kl", "grad_norm", *choice))
    keys = _keys(store, reference, clusters)
    matrices, paired, middle = {}, False, None
    if baseline != reference:
        _, before = _read_matrices(store, baseline, clusters, ("freq", "kl"), token_ids)
        same_counts = not (now["freq"] != before["freq"]).nnz
        paired = same_counts and np.array_equal(_keys(store, baseline, clusters), keys)
        matrices["kl_before"] = before["kl"]
        middle = _middle(store, reference, baseline, clusters, keys) if paired else None
    if middle is not None:
        matrices["kl_middle"] = _read_matrices(store, middle, clusters, ("kl",), token_ids)[1]["kl"]
    samples = [Sample(token_ids, paired=paired, **_rows({**now, **matrices}, *ends)) for ends in pairwise(bounds)]
    return PromptSums(reference, baseline, middle, paired, prompts, clusters, keys, samples[0], samples[-1])


def _middle(store: TraceStore, reference: int, baseline: int, clusters: pa.Table, keys: np.ndarray) -> int | None:
    """Choose the checkpoint nearest to half the reference step, the earlier on a tie, that scored the same tokens."""
    between = [step for step in store.checkpoints if baseline < step < reference]
    for step in sorted(between, key=lambda step: (abs(2 * step - reference), step)):
        if np.array_equal(_keys(store, step, clusters), keys):
            return step
    return None


def checkpoint_samples(store: TraceStore, sums: PromptSums, checkpoint: int) -> dict[str, Sample]:
    """Return both halves with the kl of another checkpoint, by name; none where it scored other occurrences."""
    if checkpoint == sums.reference:
        return sums.halves
    if checkpoint == sums.baseline and sums.paired:
        matrices = [sample.kl_before for sample in sums.halves.values()]
    elif checkpoint == sums.middle:
        matrices = [sample.kl_middle for sample in sums.halves.values()]
    elif np.array_equal(_keys(store, checkpoint, sums.clusters), sums.keys):
        _, cells = _read_matrices(store, checkpoint, sums.clusters, ("kl",), sums.selection.token_ids)
        bounds = accumulate((sample.n_clusters for sample in sums.halves.values()), initial=0)
        matrices = [_rows(cells, *ends)["kl"] for ends in pairwise(bounds)]
    else:
        return {}
    return {
        half: replace(sample, kl=kl, kl_before=None, kl_middle=None, kl_choice=None, kept=None)
        for (half, sample), kl in zip(sums.halves.items(), matrices, strict=True)
    }


def resolve_checkpoints(store: TraceStore, reference: int | None, baseline: int | None) -> tuple[int, int]:
    """Return the named checkpoints, by default the last and the first; one without traces is refused by name."""
    available = store.checkpoints
    if not available:
        raise RocktokensError(f"{store.run.path} has no replay traces: run `rocktokens trace`")
    _require_finished(store, [step for step in (reference, baseline) if step is not None])
    reference = available[-1] if reference is None else reference
    baseline = available[0] if baseline is None else baseline
    for role, checkpoint in (("reference", reference), ("baseline", baseline)):
        if checkpoint not in available:
            steps = ", ".join(map(str, available))
            raise RocktokensError(f"{role} = {checkpoint} is not a traced checkpoint: available are {steps}")
    if baseline > reference:
        raise RocktokensError(f"baseline = {baseline} is later than reference = {reference}: swap them")
    return reference, baseline


def _require_finished(store: TraceStore, named: list[int]) -> None:
    """Refuse a replay that was interrupted, unless both checkpoints are named and it is done with them."""
    if store.replay is None:
        return
    steps = sorted(store.replay.checkpoints)
    rows = {step: store.rows(step) for step in steps}
    paired = store.replay.probe != "each"
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
        return PromptSplit(None, None, count, count)
    if count < 2:
        raise RocktokensError(
            f"split = {share} needs prompts for both halves, the trace has {count}: trace at least 40 "
            "(trace.num_prompts)"
        )
    order = np.random.Generator(np.random.PCG64(seed)).permutation(count)
    cut = min(max(int(share * count + 0.5), 1), count - 1)
    selection, measuring = (sorted(prompt_ids[i] for i in half) for half in (order[:cut], order[cut:]))
    return PromptSplit(selection, measuring, cut, count - cut)


Matrices = dict[str, Any]
"""Sums of (cluster, type) by name, as sparse arrays."""


def _read_matrices(
    store: TraceStore, checkpoint: int, clusters: pa.Table, names: Sequence[str], token_ids: np.ndarray | None = None
) -> tuple[np.ndarray, Matrices]:
    """The given types, or all that occur, and the named sums of one checkpoint over them, in order of both."""
    cells = cluster_sums(occurrences(store.table(checkpoint)), clusters, names)
    ids, rows = (cells[name].to_numpy() for name in ("token_id", "cluster"))
    token_ids = np.unique(ids).astype(np.int64) if token_ids is None else token_ids
    columns = np.minimum(np.searchsorted(token_ids, ids), len(token_ids) - 1).astype(np.int32)
    order = np.argsort(rows * np.int64(len(token_ids)) + columns)
    order = order[token_ids[columns[order]] == ids[order]]
    counts = np.bincount(rows[order], minlength=int(clusters["cluster"].to_numpy().max()) + 1)
    where = columns[order], np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    sums = {name: cells[name].to_numpy().astype(np.int64, copy=False)[order] for name in names}
    shape = len(counts), len(token_ids)
    return token_ids, {name: csr_array((values, *where), shape=shape) for name, values in sums.items()}


def _rows(matrices: Matrices, first: int, last: int) -> Matrices:
    """The clusters from ``first`` to before ``last``: slices, and no copies as scipy would make."""
    rows = {}
    for name, matrix in matrices.items():
        starts = matrix.indptr[first : last + 1]
        inside = slice(starts[0], starts[-1])
        where = matrix.indices[inside], starts - starts[0]
        rows[name] = csr_array((matrix.data[inside], *where), shape=(last - first, matrix.shape[1]))
    return rows


def _keys(store: TraceStore, checkpoint: int, clusters: pa.Table) -> np.ndarray:
    return cluster_keys(occurrences(store.table(checkpoint)), clusters)


def _clusters(everyone: list[str], prompts: PromptSplit, seed: int) -> tuple[pa.Table, list[int]]:
    """Every prompt with the number of its cluster, and the bounds of the numbers of each half."""
    halves = [half for half in (prompts.selection, prompts.measuring) if half is not None] or [everyone]
    sizes = [len(half) if len(half) <= MOST_PROMPTS else POOLED_CLUSTERS for half in halves]
    bounds = [0, *accumulate(sizes)]
    numbers = []
    for first, size, half in zip(bounds, sizes, halves, strict=False):
        numbers.append(first + (np.arange(size) if size == len(half) else pooled_groups(len(half), size, seed)))
    table = {
        "prompt_id": pa.array([prompt for half in halves for prompt in half], pa.string()),
        "cluster": pa.array(np.concatenate(numbers), pa.int32()),
    }
    return pa.table(table), bounds


def _sums_of(rows: Any) -> dict[str, Any]:
    """The aggregates of ``TypeSums`` as expressions over occurrences."""
    sums = {
        "freq": rows.count(),
        "kl": _fixed_point(rows.kl).sum(),
        "grad_norm": ibis.coalesce(_fixed_point(rows.grad_norm).sum(), 0),
        "occurrence_key": _occurrence_key(rows.rollout_id, rows.position).sum(),
    }
    return {**sums, CHOICE: _fixed_point(rows.kl_choice).sum()} if CHOICE in rows.columns else sums


def _occurrence_key(rollout_id: Any, position: Any, token_id: Any | None = None) -> Any:
    """A number below 2^31 for an occurrence, by whole-number arithmetic that no engine does otherwise.

    The product ties a position, and a token, to its rollout; with its square, an exchange between rollouts shows in a
    sum.
    """
    product = (rollout_id % PRIME * 48271 + 11) % PRIME * ((position.cast("int64") * 69621 + 7) % PRIME) % PRIME
    if token_id is not None:
        product = product * ((token_id.cast("int64") * 40692 + 3) % PRIME) % PRIME
    return product * product % PRIME


def _order_statistics(values: Any, ranks: np.ndarray, width: float) -> list[float]:
    """The values of kl at the given ascending ranks, counted from 0."""
    by_bucket = values.group_by(bucket=(values.kl / width).floor().cast("int64")).agg(
        count=values.count(), least=values.kl.min(), most=values.kl.max()
    )
    buckets = _arrays(by_bucket.order_by("bucket"))
    reached = np.cumsum(buckets["count"])
    places = np.searchsorted(reached, ranks, side="right")
    inner = ranks - (reached - buckets["count"])[places]
    equal, few = buckets["least"] == buckets["most"], buckets["count"] <= MAX_VALUES

    def within(place: int) -> Any:
        return (values.kl >= float(buckets["least"][place])) & (values.kl <= float(buckets["most"][place]))

    fetched: dict[int, np.ndarray] = {}
    if sorted_here := [place for place in np.unique(places).tolist() if few[place] and not equal[place]]:
        inside = np.sort(values.filter(reduce(or_, map(within, sorted_here))).kl.to_pyarrow().to_numpy())
        ends = np.cumsum(buckets["count"][sorted_here])
        fetched = dict(zip(sorted_here, np.split(inside, ends[:-1]), strict=True))
    found: list[float] = []
    for place in np.unique(places).tolist():
        some = inner[places == place]
        if equal[place]:
            found += [float(buckets["least"][place])] * len(some)
        elif place in fetched:
            found += fetched[place][some].tolist()
        else:
            found += _order_statistics(values.filter(within(place)), some, width / BUCKETS_PER_BUCKET)
    return found


def _arrays(table: ir.Table) -> dict[str, np.ndarray]:
    result = table.to_pyarrow()
    return {name: result[name].to_numpy() for name in result.column_names}


def _fixed_point(score: Any) -> Any:
    # Not round(): engines disagree on halves. The product is exact in float64, and floor means one thing.
    return (score.cast("float64") * ONE + 0.5).floor().cast("int64")


def _require_summable(rows: ir.Table) -> None:
    names = [name for name in ("kl", "grad_norm", CHOICE) if name in rows.columns]
    bounds = rows.agg([rows.count().name("rows"), *(rows[name].max().name(name) for name in names)]).to_pyarrow()
    count = bounds["rows"][0].as_py()
    if count >= MAX_ROWS:
        raise RocktokensError(f"{count} trace rows are more than the {MAX_ROWS} that sums are exact for: use fewer")
    for name in names:
        largest = bounds[name][0].as_py() or 0.0
        if count * largest >= MAX_TOTAL:
            raise RocktokensError(
                f"{count} rows with {name} up to {largest:g} exceed what fixed-point sums hold ({MAX_TOTAL:g}): "
                "trace fewer prompts, or look for the outlier"
            )
