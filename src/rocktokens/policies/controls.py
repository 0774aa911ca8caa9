"""What freezing rocks is compared with: as much frozen elsewhere, or less training (docs/method.md, section 7)."""

from typing import Any

import numpy as np

from rocktokens.errors import ConfigError
from rocktokens.policies.base import UpdateTokens, WeightPolicy
from rocktokens.policies.formulas import top_share, weigh_types
from rocktokens.policies.rocks import RocksPolicy
from rocktokens.run_dir import derive_seed
from rocktokens.splitmix import occurrence_uniforms
from rocktokens.types import ControlSet
from rocktokens.windows import random_windows


class RandomPositionsPolicy(WeightPolicy):
    """1 at round(ρ·T) random positions, else 0: the largest of numbers keyed by (seed, step, rollout, position)."""

    name = "random_positions"

    def __init__(self, rho: float, seed: int = 0) -> None:
        self.rho, self.seed = rho, seed

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """1 where kept."""
        key = derive_seed(self.seed, "random_positions", tokens.step)
        return top_share(occurrence_uniforms(key, tokens.rollout_ids, tokens.positions), self.rho)


class TypeControlPolicy(WeightPolicy):
    """λ on the types of one draw of controls, each as frequent as its rock, else 1."""

    name = "type_control"

    def __init__(self, controls: ControlSet, draw: int = 0, lam: float = 0.0) -> None:
        if draw >= len(controls):
            raise ConfigError(f"policy.draw = {draw} is not valid: the controls have draws 0 to {len(controls) - 1}")
        self.lam, self.control_ids = lam, controls.ids(draw)

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """λ on the controls."""
        return weigh_types(tokens.token_ids, self.control_ids, self.lam)


class OccurrenceControlPolicy(RocksPolicy):
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
        free_T = ~np.isin(tokens.token_ids, self.protected)
        moved_T = np.zeros(len(free_T), dtype=bool)
        moved_T[free_T] = random_windows(
            self.marked(tokens)[free_T], tokens.rollout_ids[free_T], (self.seed, self.draw, tokens.step)
        )
        return np.where(moved_T, self.lam, 1.0)
