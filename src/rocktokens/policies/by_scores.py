"""Weights by the scores of both models, ranked or scaled over the update."""

import numpy as np

from rocktokens.policies.ranking import clipped, min_max, top_share


def high_entropy(entropy_student_T: np.ndarray, *, rho: float) -> np.ndarray:
    """1 if H_s is in the top ρ, else 0 (arXiv 2506.01939)."""
    return top_share(entropy_student_T, rho)


def tip(entropy_student_T: np.ndarray, kl_T: np.ndarray, *, rho: float) -> np.ndarray:
    """1 for the top ρ by s = ĥ + δ̂ − ĥδ̂, ĥ = norm(H_s), δ̂ = norm(kl), else 0 (arXiv 2604.14084)."""
    h_T, delta_T = min_max(entropy_student_T), min_max(kl_T)
    return top_share(h_T + delta_T - h_T * delta_T, rho)


def teachable(kl_T: np.ndarray, teacher_mass_top16_T: np.ndarray, *, rho: float) -> np.ndarray:
    """1 for the top ρ by norm(kl)·norm(q on the student's top 16), both clipped at 5/95 %, else 0 (2605.26844)."""
    return top_share(min_max(clipped(kl_T)) * min_max(clipped(teacher_mass_top16_T)), rho)


def selectkd(student_top1_in_teacher_top5_T: np.ndarray, *, beta: float) -> np.ndarray:
    """1 if argmax p is in the top 5 of q, else β (arXiv 2510.24021)."""
    return np.where(student_top1_in_teacher_top5_T > 0, 1.0, beta)


def entropy_mix(
    entropy_teacher_T: np.ndarray, entropy_student_T: np.ndarray, *, alpha: float, beta: float
) -> np.ndarray:
    """(1 + α(1 − H_t/max H_t))(1 + β H_s/max H_s), maxima over the update, rescaled to mean 1 (arXiv 2606.02684).

    Where a maximum is 0, its factor is the same everywhere and cancels.
    """
    certain_T, unsure_T = 1 - _of_largest(entropy_teacher_T), _of_largest(entropy_student_T)
    mixed_T = (1 + alpha * certain_T) * (1 + beta * unsure_T)
    return mixed_T / mixed_T.mean() if mixed_T.size else mixed_T


def _of_largest(values_T: np.ndarray) -> np.ndarray:
    largest = values_T.max(initial=0.0)
    return values_T / largest if largest > 0 else np.zeros_like(values_T)
