"""Finds rocks while training: the types that hold much of the loss and have stopped moving (docs/method.md, section 7).

Steps are gathered into windows of ``window_steps``. Per type there are sums over its occurrences and nothing per step,
so memory grows with the distinct types seen and with nothing else. When a window closes, every type is judged:

1. **Heavy.** Its mass is its decayed count times its mean kl, taken over the occurrences that were scored. It is heavy
   when that is at least ``min_share`` of the mass of all types.
2. **Still, moving, or unclear.** A line is fitted to its mean kl per step against time, a step weighing by occurrences
   and by ``decay`` to the power of its age in windows. The slope per window has a 95 % confidence interval, from the
   scatter of the steps about the line. Still: the interval lies within ± ``tolerance`` times the mean kl. Moving: it
   lies outside. Unclear: neither, the steps do not decide.
3. **Kept.** Its mean kl is still at least 75 % of what it was in the first window in which it had any. What has lost
   more has been learned, in good part, and lies still where that ended: no rock.
4. **Called.** Heavy, still and kept for ``patience`` windows running: the type is a rock, and frozen. Not before
   ``start``, nor from ``stop`` on: where the learning rate is near 0 everything lies still.
5. **On trial.** What is not trained does not fall, so stillness under a freeze proves little. After ``freeze_windows``
   windows a frozen type is trained again, and frozen again as in 4; every further freeze lasts twice as long.
6. **Released.** Frozen or on trial, and light, moving or not kept for ``patience`` windows running.

Every change of state restarts the evidence of 2, and so does movement of a type that is trained: what it did before
says nothing about where it will come to rest. Discounting older steps as if they were noisier makes the interval too
wide rather than too narrow (their true variance is no larger), so doubt ends in "unclear", and "unclear" freezes
nothing.

Sums of kl over a step are integers, in units of 2^-24: the same for any order of the rows and any split over ranks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from scipy.special import stdtrit

from rocktokens.errors import RocktokensError
from rocktokens.types import KEPT, ONE

MAX_KL = 2.0**15
"""Largest kl of one token, as in a trace; a token above it counts as this much."""
CONFIDENCE = 0.95
MAX_DOUBLINGS = 20

TRAINED, FROZEN, ON_TRIAL = 0, 1, 2
_TREND = ("n", "t", "tt", "y", "ty", "yy", "steps")
_SUMS = ("count", "level", "early", *_TREND)
"""Decayed occurrences; the last known mean kl; that of the first window with any; what the line is fitted to."""
_COUNTERS = ("phase", "streak", "windows", "freezes")
"""The phase; windows running that spoke for freezing (> 0) or release (< 0); windows in the phase; freezes so far."""


@dataclass(frozen=True, slots=True)
class StepSums:
    """What one step says of each type it used: one sum over all ranks, whose scores are gathered before ``observe``."""

    ids: np.ndarray
    """int64 (U,), ascending."""
    count: np.ndarray
    """int64 (U,): occurrences."""
    scored: np.ndarray
    """int64 (U,): those whose kl is known."""
    kl: np.ndarray
    """int64 (U,): summed kl of those, in fixed point."""

    @classmethod
    def of(cls, kl_T: np.ndarray, token_ids_T: np.ndarray) -> Self:
        """Sum rows by type; a kl that is not finite was not scored."""
        ids, index_T = np.unique(token_ids_T.astype(np.int64), return_inverse=True)
        known_T = np.isfinite(kl_T)
        fixed_T = np.rint(np.minimum(np.where(known_T, kl_T.astype(np.float64), 0.0), MAX_KL) * ONE).astype(np.int64)
        sums_CU = np.zeros((3, len(ids)), dtype=np.int64)
        for sums_U, column_T in zip(sums_CU, (1, known_T, fixed_T), strict=True):
            np.add.at(sums_U, index_T, column_T)  # exact, so the same in any order
        return cls(ids, *sums_CU)


class Changes(NamedTuple):
    """Ids whose state changed at the end of a step."""

    called: np.ndarray
    """Trained so far, frozen now."""
    released: np.ndarray
    """Frozen or on trial so far, trained now."""
    tried: np.ndarray
    """Frozen so far, on trial now."""
    refrozen: np.ndarray
    """On trial so far, frozen now."""


class RockTracker:
    """Per-type evidence of a run in progress, and the types called rocks because of it.

    Args:
        window_steps: steps of a window.
        decay: what a window's evidence still counts one window later.
        min_share: least share of the summed kl of a rock.
        tolerance: the change per window, as a share of the kl itself, below which a type lies still.
        patience: windows running that must agree.
        freeze_windows: windows a type stays frozen before it is trained again on trial.
        start: the first step at whose end a window may speak for freezing.
        stop: the first step at whose end no type is called any more; those called before are still tried, frozen
            again and released. None: there is no such step.
        protected: ids that are never called.
    """

    def __init__(
        self,
        window_steps: int = 8,
        decay: float = 0.8,
        min_share: float = 0.005,
        tolerance: float = 0.05,
        patience: int = 2,
        freeze_windows: int = 8,
        start: int = 0,
        stop: int | None = None,
        protected: Iterable[int] = (),
    ) -> None:
        self.window_steps, self.decay, self.min_share, self.tolerance = window_steps, decay, min_share, tolerance
        self.patience, self.freeze_windows, self.start, self.stop = patience, freeze_windows, start, stop
        self.protected = np.array(sorted(protected), dtype=np.int64)
        self._ids = np.empty(0, dtype=np.int64)
        self._steps = 0
        self._sums = {name: np.empty(0) for name in _SUMS}
        self._counters = {name: np.empty(0, dtype=np.int64) for name in _COUNTERS}

    @property
    def frozen(self) -> np.ndarray:
        """int64, ascending: the rocks that are not trained now."""
        return self._ids[self._counters["phase"] == FROZEN]

    @property
    def rocks(self) -> np.ndarray:
        """int64, ascending: the types called and not released, frozen or on trial."""
        return self._ids[self._counters["phase"] != TRAINED]

    def observe(self, sums: StepSums, step: int) -> Changes:
        """Take in one step; when it closes a window, judge every type."""
        self._make_room(sums.ids)
        self._add(sums)
        self._steps += 1
        if self._steps < self.window_steps:
            return Changes(*[self._ids[:0]] * len(Changes._fields))
        changes = self._close_window(step)
        self._age()
        return changes

    def state(self) -> dict[str, np.ndarray]:
        """Return all that ``restore`` needs to continue bit for bit."""
        arrays = {"ids": self._ids, "steps_in_window": np.array([self._steps]), **self._sums, **self._counters}
        return {name: array.copy() for name, array in arrays.items()}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from ``state``; one that an older version wrote lacks what types began with, and is refused."""
        if missing := [name for name in ("ids", "steps_in_window", *_SUMS, *_COUNTERS) if name not in state]:
            raise RocktokensError(
                f"the checkpoint's state of online_rocks lacks {', '.join(missing)}, so an older version wrote it: "
                "resume with that version, or start the run again"
            )
        self._ids, self._steps = state["ids"].copy(), int(state["steps_in_window"][0])
        self._sums = {name: state[name].copy() for name in _SUMS}
        self._counters = {name: state[name].copy() for name in _COUNTERS}

    def _make_room(self, ids: np.ndarray) -> None:
        """Give types not seen before a row of zeros."""
        places = np.searchsorted(self._ids, ids)
        new = np.append(self._ids, -1)[places] != ids
        if not new.any():
            return
        places = places[new]
        self._ids = np.insert(self._ids, places, ids[new])
        self._sums = {name: np.insert(column, places, 0.0) for name, column in self._sums.items()}
        self._counters = {name: np.insert(column, places, 0) for name, column in self._counters.items()}

    def _add(self, step: StepSums) -> None:
        """Time is in windows and ends at 0 with this one, so that no sum grows with the length of the run."""
        rows, time = np.searchsorted(self._ids, step.ids), (self._steps + 1) / self.window_steps - 1.0
        n, y = step.scored.astype(np.float64), step.kl / ONE
        yy = np.divide(y * y, n, out=np.zeros_like(y), where=n > 0)
        added = (n, n * time, n * time**2, y, y * time, yy, n > 0)
        for name, column in zip(("count", *_TREND), (step.count, *added), strict=True):
            self._sums[name][rows] += column

    def _close_window(self, step: int) -> Changes:
        """4 to 6 of the algorithm for every type."""
        phase, streak, windows, freezes = (self._counters[name] for name in _COUNTERS)
        before = phase.copy()
        votes, moving = self._votes(step)
        streak[:] = np.where(streak * votes > 0, streak, 0) + votes
        windows += 1
        served = (phase == FROZEN) & (windows >= self.freeze_windows << np.clip(freezes - 1, 0, MAX_DOUBLINGS))
        frozen, released = streak >= self.patience, streak <= -self.patience
        phase[served], phase[frozen], phase[released] = ON_TRIAL, FROZEN, TRAINED
        freezes += frozen
        changed = phase != before
        for name in _TREND:
            self._sums[name][changed | (moving & (phase == TRAINED))] = 0.0
        for counter in (streak, windows):
            counter[changed] = 0
        return Changes(
            called=self._ids[frozen & (before == TRAINED)],
            released=self._ids[released],
            tried=self._ids[(before == FROZEN) & (phase == ON_TRIAL)],
            refrozen=self._ids[frozen & (before == ON_TRIAL)],
        )

    def _votes(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """What the window says of each type: 1 for freezing, -1 for release, 0 for neither; and whether it moves."""
        mean, slope, error = trend(*(self._sums[name] for name in _TREND))
        limit = self.tolerance * mean
        still, moving = np.abs(slope) + error < limit, np.abs(slope) - error > limit
        heavy, phase = self._shares() >= self.min_share, self._counters["phase"]
        early, level = self._sums["early"], self._sums["level"]
        np.copyto(early, level, where=early == 0)
        kept = level >= KEPT * early
        may_be_called = ~np.isin(self._ids, self.protected) & (step >= self.start)
        if self.stop is not None and step >= self.stop:
            may_be_called &= phase == ON_TRIAL
        freeze = (phase != FROZEN) & heavy & still & kept & may_be_called
        release = (phase != TRAINED) & (moving | ~heavy | ~kept)
        return freeze.astype(np.int64) - release, moving

    def _shares(self) -> np.ndarray:
        """Each type's share of the kl; where nothing was scored since the evidence began, at its last known level."""
        n, y, level = self._sums["n"], self._sums["y"], self._sums["level"]
        np.divide(y, n, out=level, where=n > 0)
        mass = self._sums["count"] * level
        return mass / max(float(mass.sum()), np.finfo(np.float64).tiny)

    def _age(self) -> None:
        """Open the next window: older evidence counts less and lies one window further back."""
        for name in ("count", *_TREND):
            self._sums[name] *= self.decay
        n, t, tt, y, ty = (self._sums[name] for name in _TREND[:5])
        tt += n - 2.0 * t
        t -= n
        ty -= y
        self._steps = 0


def trend(
    n: np.ndarray, t: np.ndarray, tt: np.ndarray, y: np.ndarray, ty: np.ndarray, yy: np.ndarray, steps: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, slope, and half the slope's confidence interval of weighted straight lines, one per entry.

    Args:
        n: Σ w over steps, w being the scored occurrences of a step times its discount.
        t: Σ w · time.
        tt: Σ w · time².
        y: Σ w · mean kl of the step.
        ty: Σ w · time · mean kl.
        yy: Σ w · mean kl².
        steps: Σ discount over the steps that have a mean.

    Returns:
        Three float64 arrays; slope 0 and an infinite interval where two steps or fewer, or one point in time, say
        nothing.
    """
    total = np.where(n > 0, n, 1.0)
    spread = tt - t**2 / total
    known = (steps > 2.0) & (spread > 1e-9 * total)
    spread, freedom = np.where(known, spread, 1.0), np.where(known, steps - 2.0, 1.0)
    covariance = ty - t * y / total
    slope = np.where(known, covariance / spread, 0.0)
    residual = np.maximum(yy - y**2 / total - slope * covariance, 0.0)
    error = stdtrit(freedom, (1.0 + CONFIDENCE) / 2.0) * np.sqrt(residual / freedom / spread)
    return y / total, slope, np.where(known, error, np.inf)
