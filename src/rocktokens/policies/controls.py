"""What freezing rocks is compared with: as much frozen elsewhere, or less training (docs/method.md, section 7).

Rocks are some of the tokens, but more of the kl and most of its gradient. So each of these amounts has its control:
types as frequent (``type_control``), as many positions (``occurrence_control``), positions with as much kl or gradient
norm (``loss_control``), and as much gradient norm taken from all tokens alike (``weight_control``).

A control adds to the log line of an update how well it matches the rocks:

- ``control_token_share``: the share of the tokens that it marks.
- ``control_rock_overlap``: the share of the marked tokens that are rocks, or in their windows.
- ``control_kl_ratio`` and ``control_grad_norm_ratio``, where it knows these scores: what it takes from the summed loss
  or gradient norm, Σ (1 − w)·kl or Σ (1 − w)·‖g‖, over what weight λ on the rocks would take. 1 is an exact match, and
  said where there is nothing to take.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from rocktokens.errors import ConfigError
from rocktokens.policies.base import UpdateTokens, WeightPolicy
from rocktokens.policies.formulas import top_share
from rocktokens.policies.rocks import RocksPolicy
from rocktokens.run_dir import derive_seed
from rocktokens.splitmix import occurrence_uniforms
from rocktokens.types import ONE, ControlSet
from rocktokens.windows import random_windows

MATCHED = frozenset({"kl", "grad_norm"})
"""Scores whose sums over a control are compared with those over the rocks."""


class RandomPositionsPolicy(WeightPolicy):
    """1 at round(ρ·T) random positions, else 0: the largest of numbers keyed by (seed, step, rollout, position)."""

    name = "random_positions"

    def __init__(self, rho: float, seed: int = 0) -> None:
        self.rho, self.seed = rho, seed

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """1 where kept."""
        key = derive_seed(self.seed, "random_positions", tokens.step)
        return top_share(occurrence_uniforms(key, tokens.rollout_ids, tokens.positions), self.rho)


class ControlPolicy(WeightPolicy):
    """Weigh the marks of a control, and log how they compare with those of the rocks."""

    lam: float
    _compared: Mapping[str, float] = {}

    def weigh_marks(
        self, tokens: UpdateTokens, control_T: np.ndarray, rocks_T: np.ndarray, weight: float | None = None
    ) -> np.ndarray:
        """``weight`` (default: λ) on the control, else 1."""
        weights_T = np.where(control_T, self.lam if weight is None else weight, 1.0)
        self._compared = {
            "control_token_share": float(np.mean(control_T)) if control_T.size else 0.0,
            "control_rock_overlap": float(np.mean(rocks_T[control_T])) if control_T.any() else 0.0,
        }
        for name in sorted(MATCHED & tokens.scores.keys()):
            taken, wanted = (1.0 - weights_T) @ tokens.scores[name], (1.0 - self.lam) * (rocks_T @ tokens.scores[name])
            self._compared[f"control_{name}_ratio"] = float(taken / wanted) if wanted else 1.0
        return weights_T

    def observe(self, scores: Any, token_ids_T: np.ndarray, step: int) -> dict[str, Any]:
        """Return how the control compared with the rocks in the update just weighed."""
        return dict(self._compared)


class TypeControlPolicy(ControlPolicy):
    """λ on the types of one draw of controls, matched to the rocks, else 1."""

    name = "type_control"

    def __init__(self, controls: ControlSet, draw: int = 0, lam: float = 0.0) -> None:
        if draw >= len(controls):
            raise ConfigError(f"policy.draw = {draw} is not valid: the controls have draws 0 to {len(controls) - 1}")
        self.lam, self.control_ids, self.rock_ids = lam, controls.ids(draw), controls.rock_ids

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """λ on the controls."""
        control_T, rocks_T = (np.isin(tokens.token_ids, ids) for ids in (self.control_ids, self.rock_ids))
        return self.weigh_marks(tokens, control_T, rocks_T)


class OccurrenceControlPolicy(ControlPolicy, RocksPolicy):
    """λ on as many random positions of every response as ``rocks`` has there, in runs as long, else 1.

    Protected tokens are left out before the runs are measured and moved, so that none of them is hit.

    Takes what ``RocksPolicy`` takes. Draws with one seed differ, and so do steps.
    """

    name = "occurrence_control"

    def __init__(self, rocks: Any, draw: int = 0, seed: int = 0, **as_rocks: Any) -> None:
        super().__init__(rocks, **as_rocks)
        self.draw, self.seed = draw, seed

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """λ on the moved marks."""
        free_T, rocks_T = self.unprotected(tokens), self.marked(tokens)
        moved_T = np.zeros(len(free_T), dtype=bool)
        moved_T[free_T] = random_windows(
            rocks_T[free_T], tokens.rollout_ids[free_T], (self.seed, self.draw, tokens.step)
        )
        return self.weigh_marks(tokens, moved_T, rocks_T)


class LossControlPolicy(ControlPolicy, RocksPolicy):
    """λ on random positions of every response that hold as much kl, or gradient norm, as ``rocks`` has there, else 1.

    The unprotected positions of a response are taken in random order until their sum reaches that of the rocks in the
    response. The last one is as a rule too much. It is taken with probability (what is missing) / (what it has), so
    the expected sum, for any order, is that of the rocks: neither always more nor always less. Sums are in fixed
    point, so that the order of the rows and rounding decide nothing.

    Takes what ``RocksPolicy`` takes. Draws with one seed differ, and so do steps.

    Args:
        rocks: a RockSet or token ids in rank order.
        by: the score that is matched, per response.
        draw: which of the draws with this seed.
        seed: of the order and of the last position.
        as_rocks: further parameters of ``RocksPolicy``.
    """

    name = "loss_control"

    def __init__(
        self, rocks: Any, by: Literal["kl", "grad_norm"] = "kl", draw: int = 0, seed: int = 0, **as_rocks: Any
    ) -> None:
        super().__init__(rocks, **as_rocks)
        self.by, self.draw, self.seed = by, draw, seed
        self.needs = MATCHED

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """λ on the positions drawn."""
        free_T, rocks_T = self.unprotected(tokens), self.marked(tokens)
        order_T, last_T = (
            occurrence_uniforms(
                derive_seed(self.seed, f"loss_control {use}", self.draw, tokens.step),
                tokens.rollout_ids,
                tokens.positions,
            )
            for use in ("order", "last")
        )
        drawn_T = np.zeros(len(free_T), dtype=bool)
        drawn_T[free_T] = draw_until(
            *(array_T[free_T] for array_T in (tokens.scores[self.by], rocks_T, tokens.rollout_ids, order_T, last_T))
        )
        return self.weigh_marks(tokens, drawn_T, rocks_T)


class WeightControlPolicy(ControlPolicy, RocksPolicy):
    """One weight on every unprotected token, so that Σ w‖g‖ of the update is what weight λ on ``rocks`` would leave.

    w = 1 − (1 − λ) · Σ over the rocks ‖g‖ / Σ over the unprotected tokens ‖g‖; 1 where no token has a gradient.

    Takes what ``RocksPolicy`` takes.
    """

    name = "weight_control"

    def __init__(self, rocks: Any, **as_rocks: Any) -> None:
        super().__init__(rocks, **as_rocks)
        self.needs = MATCHED

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """The weight on all that is not protected."""
        free_T, rocks_T = self.unprotected(tokens), self.marked(tokens)
        of_rocks, of_all = (float(marks_T @ tokens.scores["grad_norm"]) for marks_T in (rocks_T, free_T))
        weight = 1.0 - (1.0 - self.lam) * of_rocks / of_all if of_all > 0 else 1.0
        return self.weigh_marks(tokens, free_T, rocks_T, weight)


def draw_until(
    values_T: np.ndarray, rocks_T: np.ndarray, rollout_ids_T: np.ndarray, order_T: np.ndarray, last_T: np.ndarray
) -> np.ndarray:
    """Draw positions of every response until their values add up to those of the rocks in it.

    Args:
        values_T: what is summed; below 0, by rounding, counts as 0.
        rocks_T: whether a position is a rock.
        rollout_ids_T: of each position; a response is a run of rows.
        order_T: positions of a response are taken by ascending number.
        last_T: uniform in [0, 1); a position that is more than what is missing is taken if its number is less than
            (what is missing) / (its value).

    Returns:
        bool (T,)
    """
    fixed_T = np.rint(np.maximum(values_T, 0.0) * ONE).astype(np.int64)
    taken_first_T = np.lexsort((order_T, rollout_ids_T))
    ordered_T = fixed_T[taken_first_T]
    _, starts_R, lengths_R = np.unique(rollout_ids_T, return_index=True, return_counts=True)
    sums_T, wanted_T = np.cumsum(ordered_T), np.cumsum(np.where(rocks_T, fixed_T, 0))
    before_R, ends_R = (sums_T - ordered_T)[starts_R], starts_R + lengths_R - 1
    wanted_R = np.diff(wanted_T[ends_R], prepend=0)
    missing_T = np.repeat(wanted_R + before_R, lengths_R) - (sums_T - ordered_T)
    drawn_T = np.empty(len(values_T), dtype=bool)
    drawn_T[taken_first_T] = (missing_T > 0) & (last_T[taken_first_T] * ordered_T < missing_T)
    return drawn_T
