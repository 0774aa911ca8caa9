"""Finds interchangeable tokens while training: pairs that both models hold likely where the other is written.

docs/method.md, section 10, and docs/online.md. At an occurrence of type a, student and teacher list their likeliest
tokens. S[a, b] is the sum of p(b) + q(b) over the occurrences of a, as far as b is listed, and S[a, a] the same of a
itself. Steps are gathered into windows of ``window_steps``; when one closes:

1. **Linked.** a and b are linked if S[a, b] ≥ ``share`` · S[a, a] and S[b, a] ≥ ``share`` · S[b, b]; the strength of
   the link is the smaller of the two ratios. Each must have occurred ``min_freq`` times and in ``MIN_ROLLOUTS``
   rollouts, so that no link is that of one prompt, and neither may be protected.
2. **Held.** A link holds as long as it has 75 % of the strength it had when it came up. One that weakens is a decision
   which the student is learning: what it cannot tell apart yet looks like a choice too.
3. **Used.** A link is used after ``patience`` windows running that held it, and until ``patience`` windows running did
   not.
4. **Classes** are made of the links in use by complete linkage, strongest first (``link_classes``); a link in use that
   is not there in this window comes last.
5. Sums, occurrences and rollouts count ``decay`` times as much one window later.

Masses of a step are integers, in units of 2^-24: the same for any order of the rows and any split over ranks. Memory
grows with the distinct types seen, and with the pairs seen up to ``MAX_PAIRS``: beyond, those of the least mass are
forgotten, of equal ones those of larger ids.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from rocktokens.classes import link_classes
from rocktokens.errors import RocktokensError
from rocktokens.types import KEPT, ONE, LikelyTokens

MIN_ROLLOUTS = 5
MAX_PAIRS = 1 << 17
"""Ordered pairs: 2 MiB of state."""
_BITS = 32
"""A pair (a, b) is one number, a · 2^32 + b."""
_STATE = ("steps_in_window", "types", "type_sums", "pairs", "pair_mass", "links", "first_strengths", "classes")


@dataclass(frozen=True, slots=True)
class StepMasses:
    """What one step says of types and pairs: one sum over all ranks, which are gathered before ``observe``."""

    types: np.ndarray
    """int64 (U,), ascending: those that were written."""
    type_sums: np.ndarray
    """int64 (3, U): occurrences, rollouts that have any, and S[a, a] in fixed point."""
    pairs: np.ndarray
    """int64 (N,), ascending: the ordered pairs with any mass."""
    mass: np.ndarray
    """int64 (N,): S[a, b] in fixed point."""

    @classmethod
    def of(cls, likely: LikelyTokens) -> Self:
        """Sum what both models could have written."""
        written_P = likely.ids[:, 0, 0].astype(np.int64)
        mass_P2K = np.rint(np.exp(likely.logp.astype(np.float64)) * ONE).astype(np.int64)
        types, type_P = np.unique(written_P, return_inverse=True)
        rollouts, rollout_P = np.unique(likely.rollout_ids, return_inverse=True)
        type_of_answer = np.unique(type_P * len(rollouts) + rollout_P) // len(rollouts)
        own_U = _sums_by(type_P, mass_P2K[:, :, 0].sum(axis=1), len(types))
        type_sums = np.stack([np.bincount(type_P), np.bincount(type_of_answer), own_U])
        ids_P2K, other_P2K = likely.ids[:, :, 1:].astype(np.int64), mass_P2K[:, :, 1:]
        is_pair_P2K = (ids_P2K != written_P[:, None, None]) & (other_P2K > 0)
        pairs, pair_index = np.unique((written_P[:, None, None] << _BITS | ids_P2K)[is_pair_P2K], return_inverse=True)
        return cls(types, type_sums, pairs, _sums_by(pair_index, other_P2K[is_pair_P2K], len(pairs)))


class _Link(NamedTuple):
    """What is known of a pair that is linked now, or in use."""

    first: float
    """Its strength when it came up."""
    used: bool
    streak: int
    """Windows running that spoke against its being used, or not used."""


class Changes(NamedTuple):
    """Classes that changed at the end of a step; one that gained a member is formed, and without it dissolved."""

    formed: list[tuple[int, ...]]
    dissolved: list[tuple[int, ...]]


class ClassTracker:
    """What is known of pairs in a run in progress, and the classes made of it.

    Args:
        share: least share of the other's mass, both ways.
        window_steps: steps of a window.
        decay: what a window's evidence still counts one window later.
        patience: windows running that must agree.
        min_freq: least (decayed) occurrences of a member.
        protected: ids that are in no class.
    """

    def __init__(
        self,
        share: float = 0.1,
        window_steps: int = 8,
        decay: float = 0.8,
        patience: int = 2,
        min_freq: int = 20,
        protected: Iterable[int] = (),
    ) -> None:
        self.share, self.window_steps, self.decay = share, window_steps, decay
        self.patience, self.min_freq = patience, min_freq
        self.protected = np.array(sorted(protected), dtype=np.int64)
        self.classes: list[tuple[int, ...]] = []
        """Those of the last window that closed."""
        self._steps = 0
        self._types, self._type_sums = np.empty(0, dtype=np.int64), np.empty((3, 0))
        self._pairs, self._mass = np.empty(0, dtype=np.int64), np.empty((1, 0))
        self._links: dict[tuple[int, int], _Link] = {}
        """In ascending order."""

    def observe(self, step: StepMasses) -> Changes:
        """Take in one step; when it closes a window, make the classes again."""
        self._types, self._type_sums = _added(self._types, self._type_sums, step.types, step.type_sums)
        self._pairs, self._mass = _added(self._pairs, self._mass, step.pairs, step.mass[None])
        if len(self._pairs) > MAX_PAIRS:
            kept = np.sort(np.argsort(-self._mass[0], kind="stable")[:MAX_PAIRS])
            self._pairs, self._mass = self._pairs[kept], self._mass[:, kept]
        self._steps += 1
        if self._steps < self.window_steps:
            return Changes([], [])
        before, strengths = self.classes, self._strengths()
        self._judge(strengths)
        self.classes = link_classes({pair: strengths.get(pair, 0.0) for pair, link in self._links.items() if link.used})
        self._type_sums, self._mass, self._steps = self._type_sums * self.decay, self._mass * self.decay, 0
        return Changes(
            formed=[each for each in self.classes if each not in before],
            dissolved=[each for each in before if each not in self.classes],
        )

    def state(self) -> dict[str, np.ndarray]:
        """Return all that ``restore`` needs to continue bit for bit."""
        links = [(*pair, int(link.used), link.streak) for pair, link in self._links.items()]
        classes = [(number, each) for number, ids in enumerate(self.classes) for each in ids]
        arrays = (
            np.array([self._steps]),
            self._types.copy(),
            self._type_sums.copy(),
            self._pairs.copy(),
            self._mass.copy(),
            np.array(links, dtype=np.int64).reshape(-1, 4),
            np.array([link.first for link in self._links.values()]),
            np.array(classes, dtype=np.int64).reshape(-1, 2),
        )
        return dict(zip(_STATE, arrays, strict=True))

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from ``state``."""
        if missing := [name for name in _STATE if name not in state]:
            raise RocktokensError(
                f"the checkpoint's state of online_coarse lacks {', '.join(missing)}: resume with the policy that "
                "wrote it, or start the run again"
            )
        self._steps = int(state["steps_in_window"][0])
        self._types, self._type_sums = state["types"].copy(), state["type_sums"].copy()
        self._pairs, self._mass = state["pairs"].copy(), state["pair_mass"].copy()
        links = zip(state["links"].tolist(), state["first_strengths"].tolist(), strict=True)
        self._links = {(a, b): _Link(first, bool(used), streak) for (a, b, used, streak), first in links}
        number, ids = state["classes"].T
        self.classes = [tuple(ids[number == each].tolist()) for each in np.unique(number)]

    def _strengths(self) -> dict[tuple[int, int], float]:
        """The pairs that are linked now, and how strongly."""
        count, rollouts, own = self._type_sums
        may_be_linked = (count >= self.min_freq) & (rollouts >= MIN_ROLLOUTS) & ~np.isin(self._types, self.protected)
        a, b = self._pairs >> _BITS, self._pairs & ((1 << _BITS) - 1)
        own_of_a = own[np.searchsorted(self._types, a)]
        share = np.divide(self._mass[0], own_of_a, out=np.zeros_like(own_of_a), where=own_of_a > 0)
        back = b << _BITS | a
        place = np.searchsorted(self._pairs, back)
        share_back = np.where(np.append(self._pairs, -1)[place] == back, np.append(share, 0.0)[place], 0.0)
        strength = np.minimum(share, share_back)
        linkable = self._types[may_be_linked]
        linked = (a < b) & (strength >= self.share) & np.isin(a, linkable) & np.isin(b, linkable)
        pairs = zip(a[linked].tolist(), b[linked].tolist(), strict=True)
        return dict(zip(pairs, strength[linked].tolist(), strict=True))

    def _judge(self, strengths: Mapping[tuple[int, int], float]) -> None:
        """2 and 3 of the algorithm; links that are neither there nor in use are forgotten."""
        judged: dict[tuple[int, int], _Link] = {}
        for pair in sorted(strengths.keys() | self._links.keys()):
            strength = strengths.get(pair, 0.0)
            first, used, streak = self._links.get(pair, _Link(strength, used=False, streak=0))
            streak = streak + 1 if (strength >= KEPT * first) != used else 0
            if streak == self.patience:
                used, streak = not used, 0
            if used or pair in strengths:
                judged[pair] = _Link(first, used, streak)
        self._links = judged


def _sums_by(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Whole numbers summed by index: exact, so the same in any order."""
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, index, values)
    return sums


def _added(
    keys: np.ndarray, sums_CN: np.ndarray, more_keys: np.ndarray, fixed_CM: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Add sums of a step, of which the last row is in fixed point, to those so far; both have ascending keys."""
    places = np.searchsorted(keys, more_keys)
    new = np.append(keys, -1)[places] != more_keys
    keys, sums_CN = np.insert(keys, places[new], more_keys[new]), np.insert(sums_CN, places[new], 0.0, axis=1)
    sums_CN[:, np.searchsorted(keys, more_keys)] += np.concatenate([fixed_CM[:-1], fixed_CM[-1:] / ONE])
    return keys, sums_CN
