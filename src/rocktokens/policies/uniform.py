"""Every response token counts the same."""

from typing import Any

import numpy as np


class UniformPolicy:
    """Weight 1 everywhere: plain on-policy distillation."""

    name = "uniform"
    needs_scores = False

    def __call__(self, scores: Any, token_ids_T: Any, positions_T: Any, rollout_ids_T: Any, step: int) -> Any:
        """Weights, float32 (T,)."""
        return ones_like(token_ids_T)


def ones_like(token_ids_T: Any) -> Any:
    """float32 (T,) ones of the same kind, numpy or torch, and on the same device."""
    if isinstance(token_ids_T, np.ndarray):
        return np.ones(token_ids_T.shape, dtype=np.float32)
    import torch

    return torch.ones_like(token_ids_T, dtype=torch.float32)
