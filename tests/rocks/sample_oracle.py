"""Occurrences in clusters of prompts, the sample they make, and the naive statistics of them in plain Python."""

import math
from dataclasses import dataclass
from statistics import variance

import numpy as np
from scipy.sparse import csr_array

from rocktokens.rocks.ranking import Rules
from rocktokens.rocks.selectors import Sample

ONE = 2**24
Z = 1.6448536269514722


@dataclass
class Occurrences:
    """One entry per occurrence; kl and gradient in fixed point, ``kept`` 0 or 1."""

    cluster: np.ndarray
    column: np.ndarray
    kl: np.ndarray
    kl_before: np.ndarray
    grad_norm: np.ndarray
    kept: np.ndarray
    n_clusters: int
    n_types: int

    def sample(self, without: tuple[str, ...] = ()) -> Sample:
        sums = {name: self._matrix(getattr(self, name)) for name in ("kl", "grad_norm", "kl_before", "kept")}
        ids = 3 * np.arange(self.n_types, dtype=np.int64) + 1
        return Sample(ids, freq=self._matrix(np.ones_like(self.kl)), **{**sums, **dict.fromkeys(without)})

    def drawn(self, counts_C: np.ndarray) -> "Occurrences":
        """Every cluster as often as counted, each copy a cluster of its own; uncounted clusters are gone."""
        copies = [np.flatnonzero(self.cluster == c) for c in np.repeat(np.arange(self.n_clusters), counts_C)]
        index = np.concatenate(copies)
        names = ("column", "kl", "kl_before", "grad_norm", "kept")
        cluster = np.repeat(np.arange(len(copies)), [len(copy) for copy in copies])
        fields = {name: getattr(self, name)[index] for name in names}
        return Occurrences(cluster=cluster, n_clusters=len(copies), n_types=self.n_types, **fields)

    def of(self, column: int, name: str) -> list[int]:
        return getattr(self, name)[self.column == column].tolist()

    @property
    def freq(self) -> list[int]:
        return [len(self.of(column, "kl")) for column in range(self.n_types)]

    def _matrix(self, values: np.ndarray) -> csr_array:
        dense = np.zeros((self.n_clusters, self.n_types), dtype=np.int64)
        np.add.at(dense, (self.cluster, self.column), values)
        return csr_array(dense)


def random_occurrences(seed: int, clusters: int = 12, types: int = 15, per_cluster: int = 25) -> Occurrences:
    """Uneven types, some hardly ever used, with their own mean kl; the last cluster is empty."""
    rng = np.random.default_rng(seed)
    count = clusters * per_cluster
    column = np.minimum(rng.geometric(0.2, count) - 1, types - 1)
    mean = rng.exponential(1.0, types)
    kl, before, grad = (np.floor(rng.exponential(mean[column]) * ONE).astype(np.int64) for _ in range(3))
    kept = (rng.random(count) < rng.random(types)[column]).astype(np.int64)
    return Occurrences(rng.integers(0, clusters - 1, count), column, kl, before, grad, kept, clusters, types)


def naive_score(occurrences: Occurrences, selector: str) -> list[float]:
    """The score of every type, by the name of its selector."""
    return [_score_of(occurrences, selector, column) for column in range(occurrences.n_types)]


def _score_of(occurrences: Occurrences, selector: str, column: int) -> float:
    kl, before, kept = (occurrences.of(column, name) for name in ("kl", "kl_before", "kept"))
    if selector == "freq x mean":
        return sum(kl) / ONE
    if selector == "mean":
        return sum(kl) / ONE / len(kl) if kl else 0.0
    if selector == "joint":
        return min(sum(kl), sum(before)) / ONE
    if selector == "context":
        return sum(kl) / ONE * (sum(kept) / len(kept)) if kl else 0.0
    per_cluster = [0.0] * occurrences.n_clusters
    for cluster, value in zip(occurrences.of(column, "cluster"), kl, strict=True):
        per_cluster[cluster] += value / ONE
    total, error = sum(per_cluster), math.sqrt(len(per_cluster) * variance(per_cluster))
    return total * math.exp(-Z * error / total) if total else 0.0


def naive_rank(score: list[float], freq: list[int], rules: Rules) -> list[int]:
    """Columns of the first k, best first."""
    columns = range(len(score))
    frequent = sorted(columns, key=lambda v: (-freq[v], v))[: rules.exclude_top_freq]
    ranked = [v for v in columns if freq[v] >= rules.min_freq and v not in frequent]
    return sorted(ranked, key=lambda v: (-score[v], v))[: rules.k]


def naive_jaccard(first: list[int], second: list[int]) -> float:
    return len(set(first) & set(second)) / len(set(first) | set(second))
