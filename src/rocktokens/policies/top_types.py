"""Weight λ on the types that stand out in the update itself: baselines for a list of rocks."""

import numpy as np

from rocktokens.policies.ranking import top_types, weigh_types


def top_frequency(token_ids_T: np.ndarray, *, k: int, lam: float) -> np.ndarray:
    """λ on the k most frequent types of the update, else 1."""
    return weigh_types(token_ids_T, top_types(token_ids_T, None, k), lam)


def top_mean_loss(token_ids_T: np.ndarray, kl_T: np.ndarray, *, k: int, lam: float) -> np.ndarray:
    """λ on the k types of largest mean kl in the update, else 1."""
    return weigh_types(token_ids_T, top_types(token_ids_T, kl_T, k), lam)


def top_grad_norm(token_ids_T: np.ndarray, grad_norm_T: np.ndarray, *, k: int, lam: float) -> np.ndarray:
    """λ on the k types of largest mean ‖∂kl/∂z‖ in the update, else 1."""
    return weigh_types(token_ids_T, top_types(token_ids_T, grad_norm_T, k), lam)
