"""Leave out the choice within classes that this very run finds (docs/method.md, section 10; docs/online.md).

1. Every token weighs 1, as with ``coarse``.
2. After an update the tracker takes in what both models could have written, and makes classes when a window closes.
3. From ``start`` on, what is weighed is ``Coarse`` with the classes of the last closed window; as long as there are
   none, the run's divergence.
4. The log line gets ``online_classes`` (how many are in use), and where they change ``online_formed`` and
   ``online_dissolved``: lists of the ids of each.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rocktokens.classes import TokenClasses
from rocktokens.policies.base import Coarse, UpdateTokens, WeightPolicy
from rocktokens.policies.class_tracker import ClassTracker, StepMasses
from rocktokens.types import LikelyTokens


class OnlineCoarsePolicy(WeightPolicy):
    """Weight 1 on the decision, ``lam`` on the choice within classes found during this run.

    Args:
        lam: weight of the choice.
        start: the first step that may leave it out.
        tracker: parameters of ``ClassTracker``: share, window_steps, decay, patience, min_freq, protected.
    """

    name = "online_coarse"
    sees_likely = True

    def __init__(self, lam: float = 0.0, start: int = 0, **tracker: Any) -> None:
        self.lam, self.start = lam, start
        self.tracker = ClassTracker(**tracker)
        self.term = Coarse(TokenClasses([]), lam)  # of what kind it is; the classes are those of ``term_at``

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """1 everywhere."""
        return np.ones(len(tokens.token_ids))

    def term_at(self, step: int) -> Coarse | None:
        """The loss without the choice within the classes known now, if there are any."""
        known = self.tracker.classes if step >= self.start else []
        return Coarse(TokenClasses(known), self.lam) if known else None

    def observe_likely(self, likely: LikelyTokens, step: int) -> dict[str, Any]:
        """Let the tracker learn from an update; returns what it changed."""
        changes = self.tracker.observe(StepMasses.of(likely))
        changed = {"online_formed": changes.formed, "online_dissolved": changes.dissolved}
        entries: dict[str, Any] = {name: [list(ids) for ids in each] for name, each in changed.items() if each}
        return entries | {"online_classes": len(self.tracker.classes)}

    def state(self) -> dict[str, np.ndarray]:
        """The tracker's."""
        return self.tracker.state()

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from ``state``."""
        self.tracker.restore(state)
