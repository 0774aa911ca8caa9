"""Steps to track, and the tracker written out naively: every step of every type is kept, lines are polyfit's."""

import numpy as np
from scipy.stats import t as student


def changing_steps(seed: int, steps: int, types: int = 12):
    """Types that lie still, fall, come to rest, rise, and start to fall late; some rows have no score."""
    rng = np.random.default_rng(seed)
    rate, rest = rng.choice([0.0, 0.0, 0.02, 0.1, -0.03], types), rng.integers(10, 60, types)
    late = rng.choice([0.0, 0.06], types)
    noise, often = rng.choice([0.01, 0.1, 0.5], types), rng.choice([0.3, 3.0, 10.0], types)
    for step in range(steps):
        ids = np.repeat(np.arange(types), rng.poisson(often * (1 + np.cos(step / 20 + np.arange(types)) * 0.7)))
        level = np.exp(-rate * np.minimum(step, rest) - late * max(step - 70, 0))
        of_step = rng.gamma(1 / noise**2, noise**2)
        kl = (level * of_step)[ids] * rng.gamma(1 / noise[ids] ** 2, noise[ids] ** 2)
        yield np.where(rng.random(len(ids)) < 0.2, np.nan, kl).astype(np.float32), ids, step


class NaiveTracker:
    """As ``RockTracker``, one type and one step at a time, with float kl."""

    def __init__(self, window_steps, decay, min_share, tolerance, patience, freeze_windows, start, stop, protected):
        self.window_steps, self.decay, self.min_share, self.tolerance = window_steps, decay, min_share, tolerance
        self.patience, self.freeze_windows, self.start, self.stop = patience, freeze_windows, start, stop
        self.protected = protected
        self.types = {}
        self.seen = 0

    def observe(self, kl_T, token_ids_T, step):
        """Ids called, released, tried and frozen again by this step."""
        for v in sorted(set(token_ids_T.tolist())):
            known = kl_T[(token_ids_T == v) & ~np.isnan(kl_T)]
            fresh = {
                "phase": "trained",
                "streak": 0,
                "windows": 0,
                "freezes": 0,
                "level": 0.0,
                "early": None,
                "counts": [],
                "steps": [],
            }
            entry = self.types.setdefault(v, fresh)
            entry["counts"].append((self.seen, int((token_ids_T == v).sum())))
            if len(known):
                entry["steps"].append((self.seen, len(known), float(known.mean())))
        self.seen += 1
        changes = {name: set() for name in ("called", "released", "tried", "refrozen")}
        if self.seen % self.window_steps == 0:
            self._close(step, changes)
        return changes

    def frozen(self):
        """Ids not trained now."""
        return {v for v, entry in self.types.items() if entry["phase"] == "frozen"}

    def _discount(self, when):
        return self.decay ** ((self.seen - 1) // self.window_steps - when // self.window_steps)

    def _fit(self, steps):
        """Mean, slope per window, half interval; None for the last two when there is too little."""
        if not steps:
            return None, None, None
        time = np.array([when / self.window_steps for when, _, _ in steps])
        discount = np.array([self._discount(when) for when, _, _ in steps])
        weight = discount * np.array([n for _, n, _ in steps])
        y = np.array([mean for _, _, mean in steps])
        mean = float(np.average(y, weights=weight))
        if discount.sum() <= 2 or len(set(time.tolist())) < 2:
            return mean, None, None
        slope, intercept = np.polyfit(time, y, 1, w=np.sqrt(weight))
        residual = np.sum(weight * (y - slope * time - intercept) ** 2)
        spread = np.sum(weight * (time - np.average(time, weights=weight)) ** 2)
        freedom = discount.sum() - 2
        return mean, slope, student.ppf(0.975, freedom) * np.sqrt(residual / freedom / spread)

    def _close(self, step, changes):
        fits = {v: self._fit(entry["steps"]) for v, entry in self.types.items()}
        mass = {}
        for v, entry in self.types.items():
            entry["level"] = entry["level"] if fits[v][0] is None else fits[v][0]
            entry["early"] = entry["early"] or entry["level"]
            mass[v] = entry["level"] * sum(self._discount(when) * count for when, count in entry["counts"])
        for v, entry in self.types.items():
            heavy = mass[v] >= self.min_share * sum(mass.values())
            self._judge(v, entry, fits[v], heavy, step, changes)

    def _judge(self, v, entry, fit, heavy, step, changes):
        mean, slope, error = fit
        still = slope is not None and abs(slope) + error < self.tolerance * mean
        moving = slope is not None and abs(slope) - error > self.tolerance * mean
        phase, vote = entry["phase"], 0
        kept = entry["level"] >= 0.75 * entry["early"]
        if phase != "frozen" and heavy and still and kept and v not in self.protected and step >= self.start:
            vote = 0 if phase == "trained" and self.stop is not None and step >= self.stop else 1
        if phase != "trained" and (moving or not heavy or not kept):
            vote = -1
        entry["streak"] = entry["streak"] + vote if entry["streak"] * vote > 0 else vote
        entry["windows"] += 1
        if entry["streak"] == self.patience:
            entry["phase"] = "frozen"
            entry["freezes"] += 1
            changes["called" if phase == "trained" else "refrozen"].add(v)
        elif entry["streak"] == -self.patience:
            entry["phase"] = "trained"
            changes["released"].add(v)
        elif phase == "frozen" and entry["windows"] >= self.freeze_windows * 2 ** (entry["freezes"] - 1):
            entry["phase"] = "on trial"
            changes["tried"].add(v)
        if entry["phase"] != phase:
            entry.update(streak=0, windows=0, steps=[])
        elif phase == "trained" and moving:
            entry["steps"] = []
