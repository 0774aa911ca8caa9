"""Find the occurrences that stayed hard, and choose the groups of types whose change is followed.

See docs/method.md, sections 4.4 and 4.8.

1. An occurrence is persistent when its kl reached τ_pre at the baseline and τ_post at the reference; both are quantiles
   over the occurrences of the selection half, or given in nats. The two checkpoints are joined by (rollout, position).
2. Three groups of types are followed: the rocks, types with a high mean kl that are not rocks, and random types.
   All three are chosen on the selection half, and their change is measured on both halves. What was picked for a high
   loss falls back when it is measured on other data (regression to the mean): the selection half flatters the group,
   the held-out half does not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ibis
import numpy as np
import pyarrow as pa

from rocktokens.errors import RocktokensError
from rocktokens.rocks.ranking import Rules, rank_types
from rocktokens.rocks.selectors import Sample, mean_kl
from rocktokens.rocks.sums import PromptSums, kl_quantiles, occurrences
from rocktokens.run_dir import derive_seed
from rocktokens.traces.store import TraceStore

KEYS = ("token_id", "rollout_id", "position", "cluster")
HIGH_KL_MIN_FREQ = 2
ROCK, HIGH_KL, RANDOM = "rock", "high mean kl", "random"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The least kl of a persistent occurrence, in nats, at the baseline and at the reference checkpoint."""

    pre: float
    post: float


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Occurrences of the selection half, sorted by (type, rollout, position)."""

    columns: np.ndarray
    """int64 (N,): indices into the sample's types."""
    rollout_ids: np.ndarray
    positions: np.ndarray
    clusters: np.ndarray

    def counts(self, n_types: int) -> np.ndarray:
        """int64 (U,): how many there are of each type."""
        return np.bincount(self.columns, minlength=n_types)


@dataclass(frozen=True, slots=True)
class Persistent(Occurrences):
    """O_PH of the selection half, and how many there are in the other half."""

    held_out_counts: np.ndarray
    """int64 (U,): by type, of the measuring half; those of the selection half again when there is no split."""


def find_thresholds(
    store: TraceStore, sums: PromptSums, tau: float, tau_nats: tuple[float, float] | None
) -> Thresholds:
    """Return the quantile ``tau`` of kl at each checkpoint over the selection half, or the given values."""
    return quantile_thresholds(store, sums, [tau])[0] if tau_nats is None else Thresholds(*map(float, tau_nats))


def quantile_thresholds(store: TraceStore, sums: PromptSums, taus: Sequence[float]) -> list[Thresholds]:
    """Return each quantile of kl at each checkpoint over the selection half."""
    prompts = sums.prompts.selection
    post = kl_quantiles(occurrences(store.table(sums.reference), prompts), taus)
    if sums.baseline == sums.reference:
        return [Thresholds(value, value) for value in post]
    pre = kl_quantiles(occurrences(store.table(sums.baseline), prompts), taus)
    return [Thresholds(*values) for values in zip(pre, post, strict=True)]


def persistent_occurrences(store: TraceStore, sums: PromptSums, thresholds: Thresholds) -> Persistent:
    """Join the hard occurrences of both checkpoints."""
    found = _hard_at_both(store, sums, thresholds).select(*KEYS).to_pyarrow()
    selects = found["cluster"].to_numpy() < sums.selection.n_clusters
    measured = ~selects if sums.is_split else selects
    token_ids = sums.selection.token_ids
    held_out = np.searchsorted(token_ids, found["token_id"].to_numpy()[measured])
    return Persistent(
        **_fields(found, np.flatnonzero(selects), token_ids),
        held_out_counts=np.bincount(held_out, minlength=len(token_ids)),
    )


def persistent_at_each(store: TraceStore, sums: PromptSums, ladder: Sequence[Thresholds]) -> Iterator[Occurrences]:
    """Find those of the selection half under each of some ascending thresholds, from one join at the first."""
    hard = _hard_at_both(store, sums, ladder[0])
    reached = sum((_reaches(hard.kl_before, step.pre) & _reaches(hard.kl, step.post)).cast("int8") for step in ladder)
    selected = hard.filter(hard.cluster < sums.selection.n_clusters)
    found = selected.select(*KEYS, reached=reached).to_pyarrow()
    for below in range(len(ladder)):
        chosen = np.flatnonzero(found["reached"].to_numpy() > below)
        yield Occurrences(**_fields(found, chosen, sums.selection.token_ids))


def paired_occurrences(store: TraceStore, reference: int, baseline: int) -> ibis.Table:
    """Return every occurrence with its kl at both checkpoints (``kl``, ``kl_before``) and the difference ``delta``."""
    late, early = (occurrences(store.table(checkpoint)) for checkpoint in (reference, baseline))
    before = early.select("rollout_id", "position", kl_before=early.kl)
    joined: Any = late.select("rollout_id", "prompt_id", "position", "token_id", "kl").inner_join(
        before, ["rollout_id", "position"]
    )
    return joined.mutate(delta=joined.kl.cast("float64") - joined.kl_before.cast("float64"))


def type_groups(selection: Sample, rock_columns: np.ndarray, min_freq: int, seed: int) -> dict[str, np.ndarray]:
    """Choose ascending columns of the rocks, of as many types with a high mean kl, and of as many random ones.

    The second lead the ranking by mean kl among types that occur at least twice and are not rocks. They are not called
    rare: where few types are used, some of them are frequent. The random ones are drawn from those that may be ranked
    and are not rocks.
    """
    freq = selection.totals("freq")
    others = np.setdiff1d(np.arange(len(freq)), rock_columns)
    score = mean_kl(selection, np.ones((1, selection.n_clusters)))[0]
    high_kl = others[rank_types(score[others], freq[others] >= HIGH_KL_MIN_FREQ, Rules(len(rock_columns)))]
    eligible = others[freq[others] >= min_freq]
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "random types")))
    drawn = rng.permutation(eligible)[: len(rock_columns)]
    return {ROCK: np.sort(rock_columns), HIGH_KL: np.sort(high_kl), RANDOM: np.sort(drawn)}


def _hard_at_both(store: TraceStore, sums: PromptSums, thresholds: Thresholds) -> Any:
    """The persistent occurrences of both halves: the keys, with ``kl`` and ``kl_before``."""
    alone = sums.baseline == sums.reference
    if not alone and not sums.paired:
        raise RocktokensError(
            f"checkpoints {sums.baseline} and {sums.reference} did not score the same tokens of the same "
            "rollouts, so no token can be followed: trace both with probe = 'last' or 'first', or use stage='score'"
        )
    rows: Any = occurrences(store.table(sums.reference))
    pairs: Any = rows.mutate(kl_before=rows.kl) if alone else paired_occurrences(store, sums.reference, sums.baseline)
    hard = pairs.filter(_reaches(pairs.kl, thresholds.post) & _reaches(pairs.kl_before, thresholds.pre))
    return hard.inner_join(ibis.memtable(sums.clusters), "prompt_id")


def _reaches(kl: Any, least: float) -> Any:
    return kl.cast("float64") >= least


def _fields(found: pa.Table, chosen: np.ndarray, token_ids: np.ndarray) -> dict[str, np.ndarray]:
    """What ``Occurrences`` says of the chosen rows."""
    ids, rollout_ids, positions, clusters = (found[name].to_numpy()[chosen] for name in KEYS)
    order = np.lexsort((positions, rollout_ids, ids))
    return {
        "columns": np.searchsorted(token_ids, ids[order]),
        "rollout_ids": rollout_ids[order],
        "positions": positions[order],
        "clusters": clusters[order],
    }
