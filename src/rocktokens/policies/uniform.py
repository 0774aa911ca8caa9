"""Every response token counts the same; what is weighed may differ."""

import numpy as np


def uniform(token_ids_T: np.ndarray) -> np.ndarray:
    """1 everywhere: plain on-policy distillation."""
    return np.ones(len(token_ids_T))


def asymmetric(token_ids_T: np.ndarray) -> np.ndarray:
    """1 everywhere, on reverse KL where logp_t > logp_s of the sampled token and forward KL elsewhere (2605.06387)."""
    return np.ones(len(token_ids_T))
