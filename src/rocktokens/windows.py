"""The windows of rock occurrences, and random windows like them (docs/method.md, section 7).

1. The window of an occurrence is the maximal run of positions around it whose kl is at least ``min_kl``, cut off at
   ``max_each_side`` positions to either side. The occurrence is part of that run: one whose own kl is lower, or not
   known, has no window beyond itself.
2. A run stays within its rollout and ends where a position is missing.
3. Random windows keep how long the runs of marked positions are in every rollout and change where they lie: uniformly,
   one of all arrangements in which no two runs touch. The given arrangement is one of them, so there always is one.

Arrays hold one rollout after the other, the rows of each in order of position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from rocktokens.errors import RocktokensError


@dataclass(frozen=True, slots=True)
class WindowRule:
    """What makes a window: a rule, so that it applies to occurrences that are yet to come."""

    max_each_side: int
    min_kl: float
    """Nats; compared with kl as the float32 that traces hold."""

    def __post_init__(self) -> None:
        side, least = self.max_each_side, self.min_kl
        if not isinstance(side, int | np.integer) or isinstance(side, bool) or side < 0:
            raise RocktokensError(f"max_each_side = {side!r} is not valid: give a whole number of at least 0")
        if not isinstance(least, int | float | np.number) or isinstance(least, bool) or not np.isfinite(least):
            raise RocktokensError(f"min_kl = {least!r} is not valid: give a finite number of nats")

    def to_dict(self) -> dict[str, Any]:
        """The rule as rocks.json holds it."""
        return {"max_each_side": int(self.max_each_side), "min_kl": float(self.min_kl)}

    @classmethod
    def from_dict(cls, record: Any) -> Self:
        """The rule that ``to_dict`` gave; anything else is refused."""
        if not isinstance(record, dict) or record.keys() != {"max_each_side", "min_kl"}:
            raise RocktokensError(
                f"windows = {record!r} is not a window rule: give max_each_side and min_kl, as `rocktokens find` does"
            )
        return cls(**record)


def rock_windows(is_rock_T: Any, kl_T: Any, rollout_ids_T: Any, positions_T: Any, rule: WindowRule) -> Any:
    """Mark where a rock or its window is: bool (T,), numpy or torch as the input, on its device.

    ``is_rock_T`` is True at the rock occurrences; kl, in nats, is NaN where it is not known.
    """
    high_T = _reaches(kl_T, rule.min_kl)
    is_next = (rollout_ids_T[1:] == rollout_ids_T[:-1]) & (positions_T[1:] == positions_T[:-1] + 1)
    joined = is_next & high_T[1:] & high_T[:-1]
    marked_T = is_rock_T | False  # a copy, of either kind
    for _ in range(min(rule.max_each_side, len(marked_T) - 1)):
        from_left, from_right = marked_T[:-1] & joined, marked_T[1:] & joined
        marked_T[1:] |= from_left
        marked_T[:-1] |= from_right
    return marked_T


def random_windows(marked_T: Any, rollout_ids_T: Any, seed: int | Sequence[int]) -> Any:
    """Mark as many positions in every rollout, in runs of the same lengths, at random places.

    The seed is one number or several, each 0 or more; with it a rollout's result depends on nothing but its own rows.

    Returns:
        bool (T,), numpy or torch as ``marked_T``, on its device.
    """
    if not isinstance(marked_T, np.ndarray):
        import torch

        moved_T = random_windows(marked_T.cpu().numpy(), torch.as_tensor(rollout_ids_T).cpu().numpy(), seed)
        return torch.as_tensor(moved_T, device=marked_T.device)
    seeds = [seed] if isinstance(seed, int | np.integer) else list(seed)
    edges_T = np.zeros(len(marked_T) + 1, dtype=np.int8)
    for rollout_id, start, end in _rollouts(rollout_ids_T):
        steps = np.diff(marked_T[start:end].astype(np.int8), prepend=0, append=0)
        lengths = np.flatnonzero(steps == -1) - np.flatnonzero(steps == 1)
        if lengths.size:
            rng = np.random.Generator(np.random.PCG64([*seeds, rollout_id % 2**64]))
            firsts, lasts = _place(lengths, end - start, rng)
            edges_T[start + firsts] += 1
            edges_T[start + lasts] -= 1
    return np.cumsum(edges_T[:-1]) > 0


def _reaches(kl_T: Any, least: float) -> Any:
    """Where kl is at least ``least``. The bound is rounded up: among float32 numbers that decides as the exact one."""
    bound = np.float32(least)
    if float(bound) < least:
        bound = np.nextafter(bound, np.float32(np.inf))
    kl_T = kl_T.astype(np.float32) if isinstance(kl_T, np.ndarray) else kl_T.float()
    return kl_T >= float(bound)


def _rollouts(rollout_ids_T: np.ndarray) -> list[tuple[int, int, int]]:
    """(id, first row, row after the last) of every rollout."""
    if not rollout_ids_T.size:
        return []
    starts = np.concatenate([[0], 1 + np.flatnonzero(rollout_ids_T[1:] != rollout_ids_T[:-1])])
    ids, counts = np.unique(rollout_ids_T[starts], return_counts=True)
    if (counts > 1).any():
        raise RocktokensError(f"the rows of rollout {ids[counts > 1][0]} are not together: order them by rollout")
    ends = np.append(starts[1:], len(rollout_ids_T))
    return list(zip(rollout_ids_T[starts].tolist(), starts.tolist(), ends.tolist(), strict=True))


def _place(lengths: np.ndarray, size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """First position of every run and the one after its last, of all ways to place them apart in ``size`` positions.

    The free positions, in a row, have one slot before each and one after the last. Runs in different slots have a free
    position between them, so an arrangement is a choice of slots and an order of the runs.
    """
    lengths = rng.permutation(lengths)
    slots = np.sort(rng.choice(size - lengths.sum() + 1, size=len(lengths), replace=False))
    lasts = slots + np.cumsum(lengths)
    return lasts - lengths, lasts
