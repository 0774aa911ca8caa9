"""Sum over the occurrences of a trace, exactly and in any order: the arithmetic every statistic here rests on.

1. A score enters a sum in fixed point, ``floor(x · 2^24 + 1/2)`` as int64. Integer addition is associative, so a sum
   does not depend on threads, parts or engine; one occurrence is rounded by at most 2^-25 nats.
2. Range: a token's score is at most 2^15 (checked when written), and before a sum is taken, rows × largest score is
   checked to stay below 2^39, so no partial sum can leave int64 (100 million tokens may average 5,000 nats).
3. Rows without a ``kl`` (positions that a policy froze, never scored) are not occurrences: they count nowhere.
4. Whether two checkpoints scored the same occurrences is decided by counts and by sums of a hash of (rollout,
   position), per type, or with the token in it, per cluster of prompts. That needs no join of the two.
5. Order statistics are found by counting in buckets of equal width and looking closer only where the rank falls, so a
   quantile is exact, the same on every engine, and needs no sorted copy of the column.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa

from rocktokens.errors import RocktokensError
from rocktokens.types import ONE

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


def type_sums(rows: ir.Table) -> TypeSums:
    """Sum the occurrences of every type."""
    _require_summable(rows)
    sums = rows.group_by("token_id").agg(**_sums_of(rows))
    columns = sums.order_by("token_id").to_pyarrow()
    return TypeSums(**{name: columns[name].to_numpy().astype(np.int64) for name in columns.column_names})


def cluster_sums(rows: ir.Table, clusters: pa.Table, names: Sequence[str] = SUMS) -> pa.Table:
    """Sum by (cluster, token_id), in no particular order.

    Args:
        rows: occurrences.
        clusters: columns prompt_id and cluster; occurrences of other prompts are left out.
        names: which of the sums of ``TypeSums``; each takes memory per cell.
    """
    _require_summable(rows)
    joined: Any = rows.inner_join(ibis.memtable(clusters), "prompt_id")
    sums = _sums_of(joined)
    return joined.group_by("cluster", "token_id").agg(**{name: sums[name] for name in names}).to_pyarrow()


def cluster_keys(rows: ir.Table, clusters: pa.Table) -> np.ndarray:
    """Sum hashed (rollout, position, token) by cluster, int64 (C,): equal for equal sets of occurrences."""
    joined: Any = rows.inner_join(ibis.memtable(clusters), "prompt_id")
    key = _occurrence_key(joined.rollout_id, joined.position, joined.token_id)
    columns = _columns(joined.group_by("cluster").agg(key=key.sum()).order_by("cluster"))
    return columns["key"].to_numpy().astype(np.int64)


def kl_quantiles(rows: ir.Table, shares: Sequence[float]) -> list[float]:
    """Return quantiles of kl over the occurrences, interpolated linearly as numpy does by default."""
    count = int(rows.count().to_pyarrow().as_py())
    if not count:
        raise RocktokensError("a quantile of kl over no occurrences is not defined: choose prompts that were scored")
    places = [share * (count - 1) for share in shares]
    lows = [min(int(place), count - 1) for place in places]
    kl: Any = rows.kl
    ranks = np.unique([rank for low in lows for rank in (low, min(low + 1, count - 1))])
    values = _order_statistics(rows.select(kl=kl.cast("float64")), ranks, FIRST_BUCKET_WIDTH)
    value_at = dict(zip(ranks.tolist(), values, strict=True))
    return [
        _interpolated(value_at[low], value_at[min(low + 1, count - 1)], place - low)
        for place, low in zip(places, lows, strict=True)
    ]


def rollout_shares(rows: ir.Table, token_ids: np.ndarray, clusters: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of the given types in each rollout's occurrences, and its cluster, in order of rollout id."""
    chosen = ibis.memtable(pa.table({"token_id": pa.array(token_ids, pa.int32())}))
    joined: Any = rows.inner_join(ibis.memtable(clusters), "prompt_id")
    counts = joined.group_by("rollout_id").agg(
        total=joined.count(), chosen=joined.token_id.isin(chosen.token_id).sum(), cluster=joined.cluster.max()
    )
    columns = {name: column.to_numpy() for name, column in _columns(counts.order_by("rollout_id")).items()}
    return columns["chosen"] / columns["total"], columns["cluster"]


def _sums_of(rows: Any) -> dict[str, Any]:
    """The aggregates of ``TypeSums`` as expressions over occurrences."""
    return {
        "freq": rows.count(),
        "kl": _fixed_point(rows.kl).sum(),
        "grad_norm": ibis.coalesce(_fixed_point(rows.grad_norm).sum(), 0),
        "occurrence_key": _occurrence_key(rows.rollout_id, rows.position).sum(),
    }


def _occurrence_key(rollout_id: Any, position: Any, token_id: Any | None = None) -> Any:
    """A number below 2^31 for an occurrence, by whole-number arithmetic that no engine does otherwise.

    The product ties a position, and a token, to its rollout; with its square, an exchange between rollouts shows in a
    sum.
    """
    product = (rollout_id % PRIME * 48271 + 11) % PRIME * ((position.cast("int64") * 69621 + 7) % PRIME) % PRIME
    if token_id is not None:
        product = product * ((token_id.cast("int64") * 40692 + 3) % PRIME) % PRIME
    return product * product % PRIME


def _interpolated(first: float, second: float, weight: float) -> float:
    return first + (second - first) * weight if weight < 0.5 else second - (second - first) * (1 - weight)


def _order_statistics(values: Any, ranks: np.ndarray, width: float) -> list[float]:
    """The values of kl at the given ascending ranks, counted from 0."""
    by_bucket = values.group_by(bucket=(values.kl / width).floor().cast("int64")).agg(
        count=values.count(), least=values.kl.min(), most=values.kl.max()
    )
    buckets = {name: column.to_numpy() for name, column in _columns(by_bucket.order_by("bucket")).items()}
    reached = np.cumsum(buckets["count"])
    places = np.searchsorted(reached, ranks, side="right")
    inner = ranks - (reached - buckets["count"])[places]
    equal, few = buckets["least"] == buckets["most"], buckets["count"] <= MAX_VALUES
    fetched = _fetch(values, buckets, [int(place) for place in np.unique(places) if few[place] and not equal[place]])
    found: list[float] = []
    for place in np.unique(places).tolist():
        some = inner[places == place]
        if equal[place]:
            found += [float(buckets["least"][place])] * len(some)
        elif place in fetched:
            found += fetched[place][some].tolist()
        else:
            found += _order_statistics(values.filter(_within(values, buckets, place)), some, width / BUCKETS_PER_BUCKET)
    return found


def _fetch(values: Any, buckets: dict[str, np.ndarray], places: list[int]) -> dict[int, np.ndarray]:
    """The sorted values of each of some buckets, by one query."""
    if not places:
        return {}
    inside = values.filter(reduce(or_, (_within(values, buckets, place) for place in places)))
    ends = np.cumsum(buckets["count"][places])
    return dict(zip(places, np.split(np.sort(inside.kl.to_pyarrow().to_numpy()), ends[:-1]), strict=True))


def _within(values: Any, buckets: dict[str, np.ndarray], place: int) -> Any:
    return (values.kl >= float(buckets["least"][place])) & (values.kl <= float(buckets["most"][place]))


def _columns(table: ir.Table) -> dict[str, pa.ChunkedArray]:
    result = table.to_pyarrow()
    return dict(zip(result.column_names, result.columns, strict=True))


def _fixed_point(score: Any) -> Any:
    # Not round(): engines disagree on halves. The product is exact in float64, and floor means one thing.
    return (score.cast("float64") * ONE + 0.5).floor().cast("int64")


def _require_summable(rows: ir.Table) -> None:
    bounds = rows.agg(rows=rows.count(), kl=rows.kl.max(), grad_norm=rows.grad_norm.max()).to_pyarrow()
    count = bounds["rows"][0].as_py()
    if count >= MAX_ROWS:
        raise RocktokensError(f"{count} trace rows are more than the {MAX_ROWS} that sums are exact for: use fewer")
    for name in ("kl", "grad_norm"):
        largest = bounds[name][0].as_py() or 0.0
        if count * largest >= MAX_TOTAL:
            raise RocktokensError(
                f"{count} rows with {name} up to {largest:g} exceed what fixed-point sums hold ({MAX_TOTAL:g}): "
                "trace fewer prompts, or look for the outlier"
            )
