"""Weights that follow the course of a response; rows come in order of rollout and position."""

import numpy as np


def prefix(rollout_ids_T: np.ndarray, *, fraction: float) -> np.ndarray:
    """1 on the first round(fraction·length) tokens of a response, else 0; Python's round (arXiv 2605.27028)."""
    starts_R, lengths_R = _responses(rollout_ids_T)
    kept_R = np.array([round(fraction * length) for length in lengths_R.tolist()], dtype=np.int64)
    place_T = np.arange(len(rollout_ids_T)) - np.repeat(starts_R, lengths_R)
    return np.where(place_T < np.repeat(kept_R, lengths_R), 1.0, 0.0)


def first_n(positions_T: np.ndarray, *, n: int) -> np.ndarray:
    """1 on the first n tokens of a response, else 0 (arXiv 2605.27028)."""
    return np.where(positions_T < n, 1.0, 0.0)


def prefix_importance(
    rollout_ids_T: np.ndarray, logp_teacher_T: np.ndarray, logp_student_T: np.ndarray, *, w_max: float
) -> np.ndarray:
    """1 + (w_max − 1)(1 − Σ_{<t}|a| / Σ|a|), a = logp_t − logp_s, sums within the response (arXiv 2606.22600).

    Up to the first disagreement a position has none before it and weighs w_max; so does a response without any.
    """
    starts_R, lengths_R = _responses(rollout_ids_T)
    disagreement_T = np.abs(logp_teacher_T - logp_student_T)
    behind_T = np.zeros(len(rollout_ids_T))
    for start, length in zip(starts_R.tolist(), lengths_R.tolist(), strict=True):
        sums = np.cumsum(disagreement_T[start : start + length])
        if sums[-1] > 0:
            behind_T[start + 1 : start + length] = sums[:-1] / sums[-1]
    return 1 + (w_max - 1) * (1 - behind_T)


def _responses(rollout_ids_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First row and number of rows of every response."""
    _, starts_R, lengths_R = np.unique(rollout_ids_T, return_index=True, return_counts=True)
    return starts_R, lengths_R
