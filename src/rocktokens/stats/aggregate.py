"""Sums over the occurrences of a trace, exact and in any order: the arithmetic every statistic here rests on.

1. A score enters a sum in fixed point, ``floor(x · 2^24 + 1/2)`` as int64. Integer addition is associative, so a sum
   does not depend on threads, parts or engine; one occurrence is rounded by at most 2^-25 nats.
2. Range: a token's score is at most 2^15 (checked when written), and before a sum is taken, rows × largest score is
   checked to stay below 2^39, so no partial sum can leave int64 (100 million tokens may average 5,000 nats).
3. Rows without a ``kl`` (positions that a policy froze, never scored) are not occurrences: they count nowhere.
4. Whether two checkpoints scored the same occurrences is decided per type by count and by the sum of a hash of
   (rollout, position), which needs no join of the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa

from rocktokens.errors import RocktokensError

FRACTION_BITS = 24
ONE = 1 << FRACTION_BITS
MAX_TOTAL = 2.0 ** (63 - FRACTION_BITS)
MAX_ROWS = 1 << 31
"""Occurrence keys are 32 bits wide: this many of them sum up within int64."""


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
    """The scored rows of a trace, of the given prompts only when there are any given."""
    scored = rows.filter(rows.kl.notnull())
    if prompt_ids is None:
        return scored
    wanted = ibis.memtable(pa.table({"prompt_id": pa.array(prompt_ids, pa.string())}))
    return scored.semi_join(wanted, "prompt_id")


def prompts_of(rows: ir.Table) -> list[str]:
    """Ids of the prompts with an occurrence, sorted by code point."""
    return sorted(occurrences(rows).select("prompt_id").distinct().to_pyarrow()["prompt_id"].to_pylist())


def type_sums(rows: ir.Table) -> TypeSums:
    """Sum the occurrences of every type."""
    _require_summable(rows)
    # Hashed twice, the rollout cannot trade places with the position: 5 hashes alike as either.
    key: Any = (rows.rollout_id.hash().hash() ^ rows.position.hash()).hash() & 0xFFFF_FFFF
    sums = rows.group_by("token_id").agg(
        freq=rows.count(),
        kl=_fixed_point(rows.kl).sum(),
        grad_norm=ibis.coalesce(_fixed_point(rows.grad_norm).sum(), 0),
        occurrence_key=key.sum(),
    )
    columns = sums.order_by("token_id").to_pyarrow()
    return TypeSums(**{name: columns[name].to_numpy().astype(np.int64) for name in columns.column_names})


def share_per_rollout(rows: ir.Table, token_ids: np.ndarray) -> np.ndarray:
    """float64 (R,): the share of each rollout's occurrences that are of the given types, in order of rollout id."""
    chosen = ibis.memtable(pa.table({"token_id": pa.array(token_ids, pa.int32())}))
    is_chosen: Any = rows.token_id.isin(chosen.token_id)
    counts = rows.group_by("rollout_id").agg(total=rows.count(), chosen=is_chosen.sum())
    columns = counts.order_by("rollout_id").to_pyarrow()
    return columns["chosen"].to_numpy() / columns["total"].to_numpy()


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
