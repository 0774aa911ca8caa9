"""Updates with tokens that stand for each other for a while, and the tracker of classes written out naively."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from rocktokens.classes import link_classes
from rocktokens.types import LikelyTokens

K = 3


def likely_of(rows: list[tuple[int, int, np.ndarray, np.ndarray]], k: int = K) -> LikelyTokens:
    """Rows are a rollout, the token written, and the distributions of student and teacher."""
    ids, logp = [], []
    for _, written, *models in rows:
        of_models = [[written, *np.argsort(-p, kind="stable")[:k]] for p in models]
        ids.append(of_models)
        logp.append([np.log(p[each]) for p, each in zip(models, of_models, strict=True)])
    rollouts = np.array([rollout for rollout, *_ in rows])
    return LikelyTokens(rollouts, np.array(ids, dtype=np.int32), np.array(logp, dtype=np.float32))


def changing_updates(seed: int, steps: int, types: int = 9) -> Iterator[LikelyTokens]:
    """At every place one of a few groups of types competes; which types form a group changes now and then."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        if step % 14 == 0:
            groups = np.array_split(rng.permutation(types), 4)
            often = rng.dirichlet(np.full(4, 0.7))
        rows = []
        for _ in range(rng.integers(5, 40)):
            group = groups[rng.choice(4, p=often)]
            models = []
            for _ in range(2):
                p = np.full(types, 0.01)
                p[group] += rng.dirichlet(np.full(len(group), 0.5))
                models.append(p / p.sum())
            rows.append((100 * step + int(rng.integers(0, 4)), int(rng.choice(types, p=models[0])), *models))
        yield likely_of(rows)


class NaiveClassTracker:
    """As ``ClassTracker``, with every row of the run kept and all sums made again when a window closes."""

    def __init__(self, share, window_steps, decay, patience, min_freq, min_rollouts, protected):
        self.share, self.window_steps, self.decay = share, window_steps, decay
        self.patience, self.min_freq, self.min_rollouts, self.protected = patience, min_freq, min_rollouts, protected
        self.steps: list[LikelyTokens] = []
        self.linked: list[dict] = []
        self.holding: list[set] = []
        self.used_after: list[set] = []
        self.used: set[tuple[int, int]] = set()
        self.classes: list[tuple[int, ...]] = []

    def sums(self) -> tuple[dict, dict, dict]:
        """Decayed S by ordered pair, occurrences and rollouts by type; a closed window has aged already."""
        mass, count, answers = (defaultdict(float) for _ in range(3))
        for when, likely in enumerate(self.steps):
            weight = self.decay ** ((len(self.steps) - 1) // self.window_steps - when // self.window_steps)
            for a, _ in set(zip(likely.ids[:, 0, 0].tolist(), likely.rollout_ids.tolist(), strict=True)):
                answers[a] += weight
            for ids, logp in zip(likely.ids.tolist(), likely.logp.astype(np.float64), strict=True):
                a = ids[0][0]
                count[a] += weight
                for model in range(2):
                    mass[a, a] += weight * np.exp(logp[model, 0])
                    for b, log in zip(ids[model][1:], logp[model, 1:], strict=True):
                        if b != a:
                            mass[a, b] += weight * np.exp(log)
        return mass, count, answers

    def strength_when_it_came_up(self, link: tuple[int, int]) -> float:
        """That of the first window of the present stretch of windows that link it or begin with it in use."""
        window = len(self.linked) - 1
        while window > 0 and (link in self.linked[window - 1] or link in self.used_after[window - 1]):
            window -= 1
        return self.linked[window][link]

    def observe(self, likely: LikelyTokens) -> None:
        """Take in a step, and judge when it closes a window."""
        self.steps.append(likely)
        if len(self.steps) % self.window_steps:
            return
        mass, count, answers = self.sums()
        enough = [
            a
            for a in count
            if count[a] >= self.min_freq and answers[a] >= self.min_rollouts and a not in self.protected
        ]
        held = {}
        for a in enough:
            for b in enough:
                strength = min(mass[a, b] / mass[a, a], mass[b, a] / mass[b, b])
                if a < b and strength >= self.share:
                    held[a, b] = strength
        self.linked.append(held)
        self.holding.append({link for link in held if held[link] >= 0.75 * self.strength_when_it_came_up(link)})
        lately = self.holding[-self.patience :]
        if len(lately) == self.patience:
            self.used |= set.intersection(*lately)
            self.used &= set.union(*lately)
        self.used_after.append(set(self.used))
        self.classes = link_classes({link: held.get(link, 0.0) for link in self.used})
