"""How many vectors are similar to each vector: exact cosine counts by blocked matrix products (METHOD 4.3).

1. Cosines are symmetric: a block of pairs (A rows × B rows) is computed once and counted for both sides. No more than
   one block is ever in memory.
2. A block is a float32 product. A dot product of D terms, in whatever order a BLAS adds them up, is off by at most
   (D + 2) · 2^-24 for vectors of length 1, so only cosines within that band of a threshold can be on the wrong side.
3. Those pairs are decided again in float64, with 1e-12 of tolerance: a cosine that equals the threshold in exact
   arithmetic reaches it. So the counts depend neither on the size of the blocks nor on the number of threads.

Shape legend: N vectors of width D, G thresholds, A × B the pairs of one block, P pairs.
"""

from collections.abc import Sequence

import numpy as np

BLOCK = 2048
"""Rows of a block: its 16 MiB of float32 cosines are large enough for the BLAS to run at full speed."""
FLOAT32_UNIT = 2.0**-24
EQUAL = 1e-12
"""Far above the rounding of a float64 cosine, far below any difference that means something."""
GATHERED_BYTES = 1 << 22
FEW = 1 / 64
"""Below this share of a block, fetching pairs one by one is cheaper than multiplying the block again in float64."""


def neighbour_counts(vectors_ND: np.ndarray, gammas: Sequence[float], block: int = BLOCK) -> np.ndarray:
    """For every vector the number of *other* vectors whose cosine with it is at least γ.

    Args:
        vectors_ND: float64, every row of length 1, or 0 for a vector that is similar to none.
        gammas: thresholds above 0, up to 1.
        block: rows multiplied at once; changes nothing but time and memory.

    Returns:
        int64 (G, N), one row per threshold.
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


def _similar(cosines_AB: np.ndarray, left_AD: np.ndarray, right_BD: np.ndarray, gamma: float) -> np.ndarray:
    """Which pairs reach the threshold, bool (A, B), given their float32 cosines."""
    band = (left_AD.shape[1] + 4) * FLOAT32_UNIT  # two more units: the bounds are themselves rounded to float32
    similar_AB = cosines_AB >= gamma + band
    near_AB = (cosines_AB >= gamma - band) ^ similar_AB
    near = np.count_nonzero(near_AB)
    if near > FEW * near_AB.size:
        similar_AB |= near_AB & (left_AD @ right_BD.T >= gamma - EQUAL)
    elif near:
        a_P, b_P = np.divmod(np.flatnonzero(near_AB), len(right_BD))  # many times faster than nonzero in two dimensions
        similar_AB[a_P, b_P] = _cosines_of(left_AD, a_P, right_BD, b_P) >= gamma - EQUAL
    return similar_AB


def _cosines_of(left_AD: np.ndarray, a_P: np.ndarray, right_BD: np.ndarray, b_P: np.ndarray) -> np.ndarray:
    """float64 (P,): cosines of single pairs."""
    cosines_P = np.empty(len(a_P))
    at_once = max(1, GATHERED_BYTES // (16 * left_AD.shape[1]))
    for start in range(0, len(a_P), at_once):
        part = slice(start, start + at_once)
        np.einsum("pd,pd->p", left_AD[a_P[part]], right_BD[b_P[part]], out=cosines_P[part])
    return cosines_P
