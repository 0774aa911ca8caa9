"""Weight λ on rock types, 1 on every other token (METHOD 7): λ = 0 freezes the rocks out of the loss.

1. The rocks come as a RockSet, the path of a rocks.json, or plain token ids.
2. A position is a rock when the token *predicted* there is one; the input token that precedes it does not matter.
3. With ``window`` the positions of their windows weigh λ too, by the rule that comes with the rocks.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rocktokens.errors import ConfigError
from rocktokens.policies.uniform import ones_like
from rocktokens.types import RockSet
from rocktokens.windows import WindowRule, rock_windows


class RocksPolicy:
    """Weight ``lam`` where the predicted token is a rock.

    Args:
        rocks: a RockSet, the path of a rocks.json, or token ids.
        lam: weight of a rock token, 0 or more.
        window: whether the windows of the rocks weigh ``lam`` too; that needs the kl of every token, so scores.
    """

    name = "rocks"
    needs_scores = False

    def __init__(self, rocks: RockSet | str | Path | Iterable[int], lam: float = 0.0, window: bool = False) -> None:
        if isinstance(lam, str) or not (math.isfinite(lam) and lam >= 0):
            raise ConfigError(f"lam = {lam!r} is not valid: give a weight of 0 or more")
        if not isinstance(window, bool):
            raise ConfigError(f"window = {window!r} is not valid: give True or False")
        if isinstance(rocks, str | Path):
            rocks = RockSet.load(rocks)
        self.lam = float(lam)
        self.rule = _window_rule(rocks) if window else None
        self.needs_scores = window
        self.rock_ids = _rock_ids(rocks)

    def __call__(self, scores: Any, token_ids_T: Any, positions_T: Any, rollout_ids_T: Any, step: int) -> Any:
        """Weights, float32 (T,)."""
        chosen_T = _is_member(token_ids_T, self.rock_ids)
        if self.rule is not None:
            if scores is None:
                raise ConfigError(
                    "window = True needs the kl of every token and no scores were given: "
                    "score before weighing, or give window = False"
                )
            chosen_T = rock_windows(chosen_T, scores.kl, rollout_ids_T, positions_T, self.rule)
        weights_T = ones_like(token_ids_T)
        weights_T[chosen_T] = self.lam
        return weights_T


def _window_rule(rocks: RockSet | Iterable[int]) -> WindowRule:
    if not isinstance(rocks, RockSet) or rocks.windows is None:
        raise ConfigError(
            "window = True needs rocks with a window rule and these have none: give a rocks.json of `rocktokens find`"
        )
    return WindowRule.from_dict(rocks.windows)


def _rock_ids(rocks: RockSet | Iterable[int]) -> np.ndarray:
    """int64 (K,), whatever the rocks came as."""
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
