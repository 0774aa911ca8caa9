"""Weight λ on the types that the tracker has frozen so far: rocks found and bypassed in the same run (METHOD 7).

1. Before an update, tokens of frozen types weigh λ. That needs nothing of either model, so with λ = 0 their rows never
   reach a head.
2. Then their kl would be unknown. A share ``probe`` of them, chosen by a hash of (seed, step, rollout, position), is
   scored all the same, without gradient.
3. After the update, the tracker takes in the kl of every scored token, and freezes, tries and releases types.
4. The log line gets ``online_frozen`` and ``online_released`` (ids, where there are any), ``online_rocks`` (how many
   types are called now) and ``online_on_trial`` (how many of these are being trained). ``freezes`` reads it back.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rocktokens.policies.base import UpdateTokens, WeightPolicy, as_numpy, like
from rocktokens.policies.tracker import RockTracker, StepSums
from rocktokens.run_dir import derive_seed

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


class OnlineRocksPolicy(WeightPolicy):
    """Weight ``lam`` on types that hold much of the kl and have stopped moving, as found during this run.

    Args:
        lam: weight of a frozen type's tokens.
        probe: share of the frozen tokens that are scored all the same.
        seed: of the choice of these.
        tracker: parameters of ``RockTracker``: window_steps, decay, min_share, tolerance, patience,
            freeze_windows, start, protected.
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
        uniform_T = uniform(derive_seed(self.seed, "probe", step), as_numpy(rollout_ids_T), as_numpy(positions_T))
        return like(frozen_T & (uniform_T < self.probe_share), weights_T)

    def observe(self, scores: Any, token_ids_T: Any, step: int) -> dict[str, Any]:
        """Let the tracker learn from an update; returns what it changed."""
        changes = self.tracker.observe(StepSums.of(as_numpy(scores.kl), as_numpy(token_ids_T)), step)
        record = {"online_frozen": changes.called.tolist(), "online_released": changes.released.tolist()}
        called, frozen = len(self.tracker.rocks), len(self.tracker.frozen)
        return {
            **{name: ids for name, ids in record.items() if ids},
            "online_rocks": called,
            "online_on_trial": called - frozen,
        }

    def state(self) -> dict[str, np.ndarray]:
        """The tracker's."""
        return self.tracker.state()

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from ``state``."""
        self.tracker.restore(state)


class Freeze(NamedTuple):
    """A type's time as a rock, in steps; ``released`` is None while it lasts."""

    token_id: int
    frozen: int
    released: int | None


def freezes(log: Iterable[Mapping[str, Any]]) -> list[Freeze]:
    """When each type was called and released, in the order of the calls, from the log lines of a run."""
    found: dict[tuple[int, int], Freeze] = {}
    open_calls: dict[int, int] = {}
    for line in log:
        for token_id in line.get("online_released", ()):
            call = open_calls.pop(token_id)
            found[token_id, call] = Freeze(token_id, call, line["step"])
        for token_id in line.get("online_frozen", ()):
            open_calls[token_id] = line["step"]
            found[token_id, line["step"]] = Freeze(token_id, line["step"], None)
    return list(found.values())


def uniform(key: int, rollout_ids_T: np.ndarray, positions_T: np.ndarray) -> np.ndarray:
    """float64 (T,) in [0, 1): SplitMix64 of the key and the occurrence, so the same in any order of the rows."""
    rows = np.uint64(key) + (rollout_ids_T.astype(np.uint64) + np.uint64(1)) * GAMMA
    bits = _mix(_mix(rows) + (positions_T.astype(np.uint64) + np.uint64(1)) * GAMMA)
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(words: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser; integers wrap."""
    words = (words ^ (words >> np.uint64(30))) * MIX_1
    words = (words ^ (words >> np.uint64(27))) * MIX_2
    return words ^ (words >> np.uint64(31))
