"""Policies that are formulas: pure functions of an update's arrays and a policy's parameters, and what applies them.

1. The positional parameters of a formula name the arrays it takes: ``token_ids_T``, ``positions_T``,
   ``rollout_ids_T``, or a column of TokenScores with ``_T``. These columns are what the policy needs.
2. Its keyword parameters are those of the policy's section.
3. Rows come in order of rollout and position; ranks, scales and means are over the whole update.
"""

import inspect
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from rocktokens.policies.base import Term, UpdateTokens, WeightPolicy

ROUNDING = 1e-9
"""Relative error of a mean in float64, with room to spare: 2^-52 times the tokens of a type."""
_ALWAYS_KNOWN = ("token_ids", "positions", "rollout_ids")


class FormulaPolicy(WeightPolicy):
    """Weights by a function: arrays and keyword parameters in, weights (T,) out."""

    def __init__(self, formula: Callable[..., np.ndarray], term: Term | None = None, **params: Any) -> None:
        self.name, self.term = formula.__name__, term
        self._formula, self._params = formula, params
        self._arrays = [
            parameter.name.removesuffix("_T")
            for parameter in inspect.signature(formula).parameters.values()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        self.needs = frozenset(self._arrays) - frozenset(_ALWAYS_KNOWN)

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """The formula's weights."""
        arrays = [tokens.scores[name] if name in self.needs else getattr(tokens, name) for name in self._arrays]
        return self._formula(*arrays, **self._params)


# The same weight everywhere


def uniform(token_ids_T: np.ndarray) -> np.ndarray:
    """1 everywhere: plain on-policy distillation."""
    return np.ones(len(token_ids_T))


def asymmetric(token_ids_T: np.ndarray) -> np.ndarray:
    """1 everywhere, on reverse KL where logp_t > logp_s of the sampled token and forward KL elsewhere (2605.06387)."""
    return np.ones(len(token_ids_T))


# Types that stand out in the update itself: baselines for a list of rocks


def top_frequency(token_ids_T: np.ndarray, *, k: int, lam: float) -> np.ndarray:
    """λ on the k most frequent types of the update, else 1."""
    return weigh_types(token_ids_T, top_types(token_ids_T, None, k), lam)


def top_mean_loss(token_ids_T: np.ndarray, kl_T: np.ndarray, *, k: int, lam: float) -> np.ndarray:
    """λ on the k types of largest mean kl in the update, else 1."""
    return weigh_types(token_ids_T, top_types(token_ids_T, kl_T, k), lam)


def top_grad_norm(token_ids_T: np.ndarray, grad_norm_T: np.ndarray, *, k: int, lam: float) -> np.ndarray:
    """λ on the k types of largest mean ‖∂kl/∂z‖ in the update, else 1."""
    return weigh_types(token_ids_T, top_types(token_ids_T, grad_norm_T, k), lam)


# Scores of both models


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


# The course of a response


def prefix(rollout_ids_T: np.ndarray, *, fraction: float) -> np.ndarray:
    """1 on the first round(fraction·length) tokens of a response, else 0; Python's round (arXiv 2605.27028)."""
    _, starts_R, lengths_R = np.unique(rollout_ids_T, return_index=True, return_counts=True)
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
    _, starts_R, lengths_R = np.unique(rollout_ids_T, return_index=True, return_counts=True)
    disagreement_T = np.abs(logp_teacher_T - logp_student_T)
    behind_T = np.zeros(len(rollout_ids_T))
    for start, length in zip(starts_R.tolist(), lengths_R.tolist(), strict=True):
        sums = np.cumsum(disagreement_T[start : start + length])
        if sums[-1] > 0:
            behind_T[start + 1 : start + length] = sums[:-1] / sums[-1]
    return 1 + (w_max - 1) * (1 - behind_T)


# Ranking and scaling over an update


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
    """The k types of the largest mean value, or of the most occurrences; ties go to the smaller id.

    Means in floating point can tell types apart by rounding alone, so those that are close to the k-th are compared
    exactly.
    """
    types_V, which_T, counts_V = np.unique(token_ids_T, return_inverse=True, return_counts=True)
    if values_T is None or k >= len(types_V):
        return types_V[np.argsort(-counts_V, kind="stable")[:k]]
    means_V = np.bincount(which_T, weights=values_T, minlength=len(types_V)) / counts_V
    last = np.partition(means_V, -k)[-k]
    close_V = np.abs(means_V - last) <= ROUNDING * abs(last)
    above = np.flatnonzero((means_V > last) & ~close_V)
    exact = {v: sum(map(Fraction, values_T[which_T == v].tolist())) / counts_V[v] for v in np.flatnonzero(close_V)}
    ranked = sorted(exact, key=lambda v: (-exact[v], v))
    return types_V[[*above, *ranked[: k - len(above)]]]


def weigh_types(token_ids_T: np.ndarray, types_K: np.ndarray, lam: float) -> np.ndarray:
    """λ where the predicted token is one of the types, else 1."""
    return np.where(np.isin(token_ids_T, types_K), lam, 1.0)
