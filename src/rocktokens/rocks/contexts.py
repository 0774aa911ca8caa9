"""Judge whether the persistent occurrences of a type stand in contexts that are alike (docs/method.md, section 4.4).

1. An ``Encoder`` makes a vector of the context of each occurrence.
2. ρ(o) is the share of the *other* persistent occurrences of its type whose cosine with o is at least γ; o is kept when
   ρ(o) ≥ η. A type with fewer than two persistent occurrences keeps nothing.
3. Every pair is compared as long as all types together have at most ``max_pairs`` ordered pairs. Above that a cap is
   filled like water: types with fewer pairs are judged in full, each of the others on a random sample of its
   occurrences. Samples are seeded by token id and nested: other types only decide how large one is.
4. A sample estimates twice: which occurrences are kept, each by an estimated ρ, and how many they are. So its interval
   goes from the lower bound of the share that is surely above η to the upper bound of the share that may be.
5. Counts of similar contexts are exact. Cosines are symmetric, so a block of pairs is computed once, in float32, and
   counted for both sides. A dot product of D terms, in whatever order a BLAS adds them up, is off by at most
   (D + 2) · 2^-24 for vectors of length 1; pairs within that band of γ are decided again in float64, with 1e-12 of
   tolerance: a cosine that equals γ in exact arithmetic reaches it. So the counts depend neither on the size of the
   blocks nor on the number of threads.

Shape legend: N occurrences given, M of them judged, U types, J judged types, G values of γ; D width of a vector, A × B
the pairs of one block, P pairs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

import numpy as np

from rocktokens.errors import RocktokensError
from rocktokens.inference.proportions import Z_95, wilson_bounds
from rocktokens.rocks.encoders import Encoder
from rocktokens.run_dir import derive_seed

BLOCK = 2048
"""Rows of a block: its 16 MiB of float32 cosines are large enough for the BLAS to run at full speed."""
FLOAT32_UNIT = 2.0**-24
EQUAL = 1e-12
"""Far above the rounding of a float64 cosine, far below any difference that means something."""
GATHERED_BYTES = 1 << 22
FEW = 1 / 64
"""Below this share of a block, fetching pairs one by one is cheaper than multiplying the block again in float64."""


@dataclass(frozen=True, slots=True)
class ContextResult:
    """The neighbours of the judged occurrences, and what is kept at each γ that was asked for and any η."""

    gammas: tuple[float, ...]
    persistent: np.ndarray
    """int64 (U,): persistent occurrences of each type, n."""
    judged: np.ndarray
    """int64 (U,): how many of them were compared with each other, m; 0 for a type with fewer than two."""
    occurrences: np.ndarray
    """int64 (M,): indices of the judged occurrences, ascending."""
    columns: np.ndarray
    """int64 (M,): their types."""
    neighbours: np.ndarray
    """int32 (G, M): how many other judged occurrences of the type are similar."""

    @property
    def exact(self) -> np.ndarray:
        """Whether nothing about a type is estimated, bool (U,)."""
        return (self.judged == self.persistent) | (self.persistent < 2)

    @property
    def scales(self) -> np.ndarray:
        """float64 (U,): how many persistent occurrences each judged one stands for, n/m; 1 where exact."""
        return np.where(self.exact, 1.0, self.persistent / np.maximum(self.judged, 1))

    def rho(self, gamma: float) -> np.ndarray:
        """float64 (M,): ρ of the judged occurrences."""
        return self.neighbours[self.gammas.index(gamma)] / (self.judged[self.columns] - 1)

    def kept(self, gamma: float, eta: float) -> np.ndarray:
        """Which judged occurrences stand in a consistent context, bool (M,)."""
        _require_above_zero("eta", eta)
        return self.rho(gamma) >= eta

    def kept_count(self, gamma: float, eta: float) -> np.ndarray:
        """float64 (U,): kept occurrences of each type; those of a sample are scaled by n/m."""
        return self._count(self.kept(gamma, eta)) * self.scales

    def kept_share_interval(self, gamma: float, eta: float) -> np.ndarray:
        """float64 (U, 2): 95 % interval of the kept share of the persistent ones; both ends the share where exact."""
        shares_U = self._count(self.kept(gamma, eta)) / np.maximum(self.judged, 1)
        interval_U2 = np.stack([shares_U, shares_U], axis=1)
        sampled = ~self.exact
        n, m = self.persistent[sampled], self.judged[sampled]
        # ρ is a share of m − 1 others out of n − 1, the kept share one of m out of n, both drawn without replacement.
        margin_U = np.zeros(len(shares_U))
        margin_U[sampled] = Z_95 * np.sqrt(eta * (1 - eta) / (m - 1) * (n - m) / (n - 2))
        size = m * (n - 1) / (n - m)
        rho_M, margin_M = self.rho(gamma), margin_U[self.columns]
        # At η = 1 the margin is 0, and no sample can be sure that every other occurrence is similar: hence ">".
        surely = self._count(rho_M > eta + margin_M)[sampled]
        maybe = self._count(rho_M >= eta - margin_M)[sampled]
        # Half a count outwards: without it, what is called 95 % is 90 % for some shares of a small sample.
        interval_U2[sampled, 0] = wilson_bounds(np.maximum(surely - 0.5, 0) / m, size)[0]
        interval_U2[sampled, 1] = wilson_bounds(np.minimum(maybe + 0.5, m) / m, size)[1]
        return interval_U2

    def _count(self, chosen_M: np.ndarray) -> np.ndarray:
        return np.bincount(self.columns[chosen_M], minlength=len(self.judged))


def context_consistency(
    columns_N: np.ndarray,
    rollout_ids_N: np.ndarray,
    positions_N: np.ndarray,
    token_ids_U: np.ndarray,
    encoder: Encoder,
    gammas: Sequence[float],
    max_pairs: int = 400_000_000,
    seed: int = 0,
    on_done: Callable[[int], None] | None = None,
) -> ContextResult:
    """Count similar contexts within every type.

    Args:
        columns_N: the type of each persistent occurrence as an index into ``token_ids_U``, ascending.
        rollout_ids_N: their rollouts; within a type in a fixed order, such as by rollout and position.
        positions_N: their positions in the response.
        token_ids_U: the types; a sample is seeded by its token id.
        encoder: makes vectors of contexts.
        gammas: the least cosine of similar contexts, above 0 and up to 1; further values cost little.
        max_pairs: ordered pairs to compare in all; no type gets fewer than two occurrences, whatever this says.
        seed: of the samples.
        on_done: called with a number of ordered pairs when they are done, Σ m(m − 1) over ``judged_sizes`` in the end.
    """
    for gamma in gammas:
        _require_above_zero("gamma", gamma)
    if (columns_N[1:] < columns_N[:-1]).any():
        raise ValueError("columns_N must ascend")
    persistent_U = np.bincount(columns_N, minlength=len(token_ids_U))
    judged_U = judged_sizes(persistent_U, max_pairs)
    chosen_M = _chosen(persistent_U, judged_U, token_ids_U, seed)
    neighbours_GM = np.empty((len(gammas), len(chosen_M)), dtype=np.int32)
    bounds = np.cumsum([0, *judged_U[judged_U > 0]])
    for some in _batches(bounds, encoder.at_once):
        batch_M = chosen_M[some[0] : some[-1]]
        found = encoder.look_up(rollout_ids_N[batch_M], positions_N[batch_M])
        for start, stop in pairwise(some.tolist()):
            vectors_ND = encoder.encode(found[start - some[0] : stop - some[0]])
            neighbours_GM[:, start:stop] = neighbour_counts(vectors_ND, gammas)
            if on_done is not None:
                on_done((stop - start) * (stop - start - 1))
    columns_M = np.asarray(columns_N, dtype=np.int64)[chosen_M]
    return ContextResult(tuple(gammas), persistent_U, judged_U, chosen_M, columns_M, neighbours_GM)


def judged_sizes(persistent_U: np.ndarray, max_pairs: int) -> np.ndarray:
    """Choose how many occurrences of a type to compare, int64 (U,): m is n, or what the cap allows; 0 where n < 2.

    ``max_pairs`` bounds Σ m(m − 1), unless even m = 2 for every type exceeds it.
    """
    if max_pairs < 2:
        raise RocktokensError(f"max_pairs = {max_pairs} is not valid: give a whole number of at least 2")
    sizes_U = np.where(persistent_U < 2, 0, persistent_U)
    pairs_U = np.sort(sizes_U * (sizes_U - 1))
    if pairs_U.sum() <= max_pairs:
        return sizes_U
    # From the smallest type on: what is left if it and those before are full, divided among it and those after.
    caps_U = (max_pairs - (np.cumsum(pairs_U) - pairs_U)) // np.arange(len(pairs_U), 0, -1)
    cap = max(int(caps_U[np.argmax(caps_U < pairs_U)]), 2)
    return np.minimum(sizes_U, (1 + isqrt(1 + 4 * cap)) // 2)


def neighbour_counts(vectors_ND: np.ndarray, gammas: Sequence[float], block: int = BLOCK) -> np.ndarray:
    """Count for every vector the *other* vectors whose cosine with it is at least γ, int64 (G, N).

    Vectors are float64 of length 1, or 0 where one is similar to none. ``block`` rows are multiplied at once, which
    changes nothing but time and memory.
    """
    count = len(vectors_ND)
    counts_GN = np.zeros((len(gammas), count), dtype=np.int64)
    for i in range(0, count, block):
        left_AD = vectors_ND[i : i + block]
        narrow_AD = left_AD.astype(np.float32)
        for j in range(i, count, block):
            right_BD = vectors_ND[j : j + block]
            cosines_AB = narrow_AD @ (narrow_AD if i == j else right_BD.astype(np.float32)).T
            if i == j:
                np.fill_diagonal(cosines_AB, -np.inf)
            for counts_N, gamma in zip(counts_GN, gammas, strict=True):
                similar_AB = _similar(cosines_AB, left_AD, right_BD, gamma)
                counts_N[i : i + block] += np.count_nonzero(similar_AB, axis=1)
                if i != j:
                    counts_N[j : j + block] += np.count_nonzero(similar_AB, axis=0)
    return counts_GN


def _chosen(persistent_U: np.ndarray, judged_U: np.ndarray, token_ids_U: np.ndarray, seed: int) -> np.ndarray:
    """Choose the occurrences to judge, int64 (M,): their indices, ascending."""
    chosen_N = np.repeat(judged_U == persistent_U, persistent_U)
    starts_U = np.cumsum(persistent_U) - persistent_U
    for u in np.flatnonzero((judged_U > 0) & (judged_U < persistent_U)):
        generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "context", int(token_ids_U[u]))))
        chosen_N[starts_U[u] + generator.permutation(persistent_U[u])[: judged_U[u]]] = True
    return np.flatnonzero(chosen_N)


def _batches(bounds: np.ndarray, at_once: int) -> Iterator[np.ndarray]:
    """Cut the bounds of consecutive types into runs of at most ``at_once`` occurrences, or of a single type."""
    first = 0
    while first < len(bounds) - 1:
        last = max(int(np.searchsorted(bounds, bounds[first] + at_once, side="right")) - 1, first + 1)
        yield bounds[first : last + 1]
        first = last


def _require_above_zero(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise RocktokensError(f"{name} = {value} is not valid: give a number above 0, up to 1")


def _similar(cosines_AB: np.ndarray, left_AD: np.ndarray, right_BD: np.ndarray, gamma: float) -> np.ndarray:
    """Decide which pairs reach the threshold, bool (A, B), given their float32 cosines."""
    band = (left_AD.shape[1] + 4) * FLOAT32_UNIT  # two more units: the bounds are themselves rounded to float32
    similar_AB = cosines_AB >= gamma + band
    near_AB = (cosines_AB >= gamma - band) ^ similar_AB
    near = np.count_nonzero(near_AB)
    if near > FEW * near_AB.size:
        similar_AB |= near_AB & (left_AD @ right_BD.T >= gamma - EQUAL)
    elif near:
        a_P, b_P = np.divmod(np.flatnonzero(near_AB), len(right_BD))  # many times faster than nonzero in two dimensions
        at_once = max(1, GATHERED_BYTES // (16 * left_AD.shape[1]))
        for start in range(0, near, at_once):
            some = a_P[start : start + at_once], b_P[start : start + at_once]
            cosines_P = np.einsum("pd,pd->p", left_AD[some[0]], right_BD[some[1]])
            similar_AB[some] = cosines_P >= gamma - EQUAL
    return similar_AB
