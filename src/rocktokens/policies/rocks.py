"""Weight λ on rock types, 1 on every other token (METHOD 7): λ = 0 freezes the rocks out of the loss.

1. The rocks come as a RockSet, the path of a rocks.json, or plain token ids.
2. A position is a rock when the token *predicted* there is one; the input token that precedes it does not matter.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rocktokens.errors import ConfigError
from rocktokens.policies.uniform import ones_like
from rocktokens.types import RockSet


class RocksPolicy:
    """Weight ``lam`` where the predicted token is a rock.

    Args:
        rocks: a RockSet, the path of a rocks.json, or token ids.
        lam: weight of a rock token, 0 or more.
    """

    name = "rocks"
    needs_scores = False

    def __init__(self, rocks: RockSet | str | Path | Iterable[int], lam: float = 0.0) -> None:
        if isinstance(lam, str) or not (math.isfinite(lam) and lam >= 0):
            raise ConfigError(f"lam = {lam!r} is not valid: give a weight of 0 or more")
        self.lam = float(lam)
        self.rock_ids = _rock_ids(rocks)

    def __call__(self, scores: Any, token_ids_T: Any, positions_T: Any, rollout_ids_T: Any, step: int) -> Any:
        """Weights, float32 (T,)."""
        weights_T = ones_like(token_ids_T)
        weights_T[_is_member(token_ids_T, self.rock_ids)] = self.lam
        return weights_T


def _rock_ids(rocks: RockSet | str | Path | Iterable[int]) -> np.ndarray:
    """int64 (K,), whatever the rocks came as."""
    if isinstance(rocks, str | Path):
        rocks = RockSet.load(rocks)
    if isinstance(rocks, RockSet):
        return rocks.ids
    ids = np.asarray(list(rocks))
    if ids.size and not (np.issubdtype(ids.dtype, np.integer) and ids.min() >= 0):
        raise ConfigError(f"rocks = {ids.tolist()[:5]} are not token ids: give whole numbers of 0 or more")
    return ids.astype(np.int64)


def _is_member(token_ids_T: Any, ids_K: np.ndarray) -> Any:
    """Where a token is one of ``ids_K``: bool (T,), numpy or torch as the tokens are."""
    if isinstance(token_ids_T, np.ndarray):
        return np.isin(token_ids_T, ids_K)
    import torch

    return torch.isin(token_ids_T, torch.as_tensor(ids_K, device=token_ids_T.device))
