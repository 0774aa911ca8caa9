"""Weight λ on the types frozen so far: rocks found and bypassed in the same run (docs/method.md, section 7).

1. Before an update, tokens of frozen types weigh λ. That needs nothing of either model, so with λ = 0 their rows never
   reach a head.
2. Then their kl would be unknown. A share ``probe`` of them, chosen by a hash of (seed, step, rollout, position), is
   scored all the same, without gradient.
3. After the update, the tracker takes in the kl of every scored token, and freezes, tries and releases types.
4. The log line gets ``online_frozen``, ``online_tried``, ``online_refrozen`` and ``online_released`` (ids, where there
   are any), ``online_rocks`` (how many types are called now) and ``online_on_trial`` (how many of these are being
   trained). ``freezes`` reads it back.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rocktokens.policies.base import UpdateTokens, WeightPolicy, as_numpy, like
from rocktokens.policies.tracker import RockTracker, StepSums
from rocktokens.run_dir import derive_seed
from rocktokens.splitmix import occurrence_uniforms

LOGGED = ("online_frozen", "online_tried", "online_refrozen", "online_released")


class OnlineRocksPolicy(WeightPolicy):
    """Weight ``lam`` on types that hold much of the kl and have stopped moving, as found during this run.

    Args:
        lam: weight of a frozen type's tokens.
        probe: share of the frozen tokens that are scored all the same.
        seed: of the choice of these.
        tracker: parameters of ``RockTracker``: window_steps, decay, min_share, tolerance, patience,
            freeze_windows, start, stop, protected.
    """

    name = "online_rocks"

    def __init__(self, lam: float = 0.0, probe: float = 0.05, seed: int = 0, **tracker: Any) -> None:
        self.lam, self.probe_share, self.seed = lam, probe, seed
        self.tracker = RockTracker(**tracker)

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """λ on the types frozen now, 1 elsewhere."""
        return np.where(np.isin(tokens.token_ids, self.tracker.frozen), self.lam, 1.0)

    def probe(self, weights_T: Any, token_ids_T: Any, positions_T: Any, rollout_ids_T: Any, step: int) -> Any:
        """A random share of the rows that were frozen out of the loss."""
        frozen_T = np.isin(as_numpy(token_ids_T), self.tracker.frozen) & (as_numpy(weights_T) == 0)
        key = derive_seed(self.seed, "probe", step)
        uniform_T = occurrence_uniforms(key, as_numpy(rollout_ids_T), as_numpy(positions_T))
        return like(frozen_T & (uniform_T < self.probe_share), weights_T)

    def observe(self, scores: Any, token_ids_T: Any, step: int) -> dict[str, Any]:
        """Let the tracker learn from an update; returns what it changed."""
        changes = self.tracker.observe(StepSums.of(as_numpy(scores.kl), as_numpy(token_ids_T)), step)
        changed = zip(LOGGED, (changes.called, changes.tried, changes.refrozen, changes.released), strict=True)
        called, frozen = len(self.tracker.rocks), len(self.tracker.frozen)
        counts = {"online_rocks": called, "online_on_trial": called - frozen}
        return {name: ids.tolist() for name, ids in changed if len(ids)} | counts

    def state(self) -> dict[str, np.ndarray]:
        """The tracker's."""
        return self.tracker.state()

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from ``state``."""
        self.tracker.restore(state)


class Freeze(NamedTuple):
    """A stretch of training without a type: from the end of step ``frozen`` to the end of step ``until``."""

    token_id: int
    frozen: int
    until: int | None
    """When it was tried or released; None while it lasts."""


def freezes(log: Iterable[Mapping[str, Any]]) -> list[Freeze]:
    """When each type was frozen, first and after a trial, in that order, from the log lines of a run."""
    found: dict[tuple[int, int], Freeze] = {}
    last: dict[int, int] = {}
    for line in log:
        step = line["step"]
        for token_id in (*line.get("online_tried", ()), *line.get("online_released", ())):
            if token_id in last:  # a type may be released on trial, or frozen before the log begins
                frozen = last.pop(token_id)
                found[token_id, frozen] = Freeze(token_id, frozen, step)
        for token_id in (*line.get("online_frozen", ()), *line.get("online_refrozen", ())):
            last[token_id] = step
            found[token_id, step] = Freeze(token_id, step, None)
    return list(found.values())
