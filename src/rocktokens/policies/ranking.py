"""Ranking and scaling over an update, shared by the policies that select."""

import numpy as np


def min_max(values_T: np.ndarray) -> np.ndarray:
    """The values scaled to [0, 1] over the update; equal values all become 0, for none stands out."""
    if not values_T.size:
        return values_T
    least, most = values_T.min(), values_T.max()
    return (values_T - least) / (most - least) if most > least else np.zeros_like(values_T)


def clipped(values_T: np.ndarray, low: float = 0.05, high: float = 0.95) -> np.ndarray:
    """The values cut off at two of their quantiles (linear interpolation)."""
    return np.clip(values_T, *np.quantile(values_T, [low, high])) if values_T.size else values_T


def top_share(values_T: np.ndarray, rho: float) -> np.ndarray:
    """1.0 at the round(ρ·T) largest values, else 0.0; of equal ones the first rows come first.

    ``round`` is Python's: halves go to the even number.
    """
    kept_T = np.zeros(len(values_T))
    kept_T[np.argsort(-values_T, kind="stable")[: round(rho * len(values_T))]] = 1.0
    return kept_T


def top_types(token_ids_T: np.ndarray, values_T: np.ndarray | None, k: int) -> np.ndarray:
    """The k types of the largest mean value, or of the most occurrences; ties go to the smaller id."""
    types_V, which_T, counts_V = np.unique(token_ids_T, return_inverse=True, return_counts=True)
    if values_T is None:
        ranked_V = counts_V
    else:
        ranked_V = np.bincount(which_T, weights=values_T, minlength=len(types_V)) / counts_V
    return types_V[np.argsort(-ranked_V, kind="stable")[:k]]


def weigh_types(token_ids_T: np.ndarray, types_K: np.ndarray, lam: float) -> np.ndarray:
    """λ where the predicted token is one of the types, else 1."""
    return np.where(np.isin(token_ids_T, types_K), lam, 1.0)
