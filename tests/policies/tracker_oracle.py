"""The tracker's algorithm written out naively: every step of every type is kept, lines are fitted by least squares."""

import numpy as np
from scipy.stats import t as student


class NaiveTracker:
    """As ``RockTracker``, one type and one step at a time, with float kl."""

    def __init__(self, window_steps, decay, min_share, tolerance, patience, freeze_windows, start, protected):
        self.window_steps, self.decay, self.min_share, self.tolerance = window_steps, decay, min_share, tolerance
        self.patience, self.freeze_windows, self.start, self.protected = patience, freeze_windows, start, protected
        self.types = {}
        self.seen = 0

    def observe(self, kl_T, token_ids_T, step):
        """Ids called and released by this step."""
        for v in sorted(set(token_ids_T.tolist())):
            known = kl_T[(token_ids_T == v) & ~np.isnan(kl_T)]
            fresh = {
                "phase": "trained",
                "streak": 0,
                "windows": 0,
                "freezes": 0,
                "level": 0.0,
                "counts": [],
                "steps": [],
            }
            entry = self.types.setdefault(v, fresh)
            entry["counts"].append((self.seen, int((token_ids_T == v).sum())))
            if len(known):
                entry["steps"].append((self.seen, len(known), float(known.mean())))
        self.seen += 1
        return self._close(step) if self.seen % self.window_steps == 0 else (set(), set())

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

    def _close(self, step):
        fits = {v: self._fit(entry["steps"]) for v, entry in self.types.items()}
        mass = {}
        for v, entry in self.types.items():
            entry["level"] = entry["level"] if fits[v][0] is None else fits[v][0]
            mass[v] = entry["level"] * sum(self._discount(when) * count for when, count in entry["counts"])
        called, released = set(), set()
        for v, entry in self.types.items():
            heavy = mass[v] >= self.min_share * sum(mass.values())
            self._judge(v, entry, fits[v], heavy, step, called, released)
        return called, released

    def _judge(self, v, entry, fit, heavy, step, called, released):
        mean, slope, error = fit
        still = slope is not None and abs(slope) + error < self.tolerance * mean
        moving = slope is not None and abs(slope) - error > self.tolerance * mean
        phase, vote = entry["phase"], 0
        if phase != "frozen" and heavy and still and v not in self.protected and step >= self.start:
            vote = 1
        if phase != "trained" and (moving or not heavy):
            vote = -1
        entry["streak"] = entry["streak"] + vote if entry["streak"] * vote > 0 else vote
        entry["windows"] += 1
        if entry["streak"] == self.patience:
            entry["phase"] = "frozen"
            entry["freezes"] += 1
            if phase == "trained":
                called.add(v)
        elif entry["streak"] == -self.patience:
            entry["phase"] = "trained"
            released.add(v)
        elif phase == "frozen" and entry["windows"] >= self.freeze_windows * 2 ** (entry["freezes"] - 1):
            entry["phase"] = "on trial"
        if entry["phase"] != phase:
            entry.update(streak=0, windows=0, steps=[])
        elif phase == "trained" and moving:
            entry["steps"] = []
