"""When a sweep looks at its results, and what it decides then: at the end, or as soon as nothing can change a verdict.

A design divides the prompts into blocks. After each block it sees what is known of every ban that is still open, and
settles some of them; nothing more is decoded for those. After the last block it settles the rest.

What is known of a ban and an answer is a box: its change is between ``lowest`` and ``highest``. An answer whose free
rollout holds no banned id has changed by 0 before anything is decoded. Of the others, where their prompt has not been
looked at, right ones can be lost and wrong ones can be gained, no more.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from rocktokens.knockout.verdicts import VerdictRule, paired_effects, settled_verdicts, verdict
from rocktokens.types import Interval, Verdict

CURTAILED_LOOKS = 20


@dataclass(frozen=True, slots=True)
class Interim:
    """What is known after a block, of K bans over R answers, ``num_samples`` to each prompt one after another."""

    lowest_KR: np.ndarray
    """int, −1, 0 or 1: the least that the change of an answer can be."""
    highest_KR: np.ndarray
    affected_KR: np.ndarray
    """bool: the free rollout holds a banned id."""
    free_right_R: np.ndarray
    """bool: right without a ban."""
    num_samples: int
    looked: int
    """Prompts before this one are known."""

    def of(self, bans: list[int]) -> "Interim":
        """Return the same for some of the bans."""
        own = {name: getattr(self, name)[bans] for name in ("lowest_KR", "highest_KR", "affected_KR")}
        return replace(self, **own)


@dataclass(frozen=True, slots=True)
class Settled:
    """What a design says about one ban; ``stopped`` says why it was not looked at to the end."""

    verdict: Verdict
    delta: float | None
    interval: Interval | None
    p: float | None
    stopped: str | None = None


class Design(Protocol):
    """Plans looks and settles bans."""

    @property
    def blocks(self) -> list[range]:
        """The prompts, in consecutive parts."""
        ...

    def judge(self, interim: Interim, block: int, noise: Interval) -> list[Settled | None]:
        """Return what is settled after a block, ban by ban; after the last block everything is.

        ``interim`` is of the bans still open, ``noise`` the interval of the change between two free runs of the engine.
        """
        ...


@dataclass(frozen=True, slots=True)
class Complete:
    """Every prompt of every ban, judged once."""

    n_prompts: int
    rule: VerdictRule

    @property
    def blocks(self) -> list[range]:
        """All prompts at once."""
        return [range(self.n_prompts)]

    def judge(self, interim: Interim, block: int, noise: Interval) -> list[Settled | None]:
        """Return the verdict of each ban with all its numbers."""
        return [*complete(interim, self.rule, noise)]


@dataclass(frozen=True, slots=True)
class Curtailed:
    """Stops a ban as soon as no outcome of the prompts that are left can change its verdict.

    The verdicts are those of ``Complete``. Where it stops, it does not know the change, only that.
    """

    n_prompts: int
    rule: VerdictRule

    @property
    def blocks(self) -> list[range]:
        """Twenty parts of about the same size."""
        ends = np.unique(np.linspace(0, self.n_prompts, CURTAILED_LOOKS + 1).round().astype(int)).tolist()
        return [range(start, end) for start, end in pairwise(ends)]

    def judge(self, interim: Interim, block: int, noise: Interval) -> list[Settled | None]:
        """Return verdicts that nothing can change any more; with their numbers where every prompt is known."""
        verdicts = settled_verdicts(interim.lowest_KR, interim.highest_KR, interim.num_samples, self.rule, noise)
        known_K = (interim.lowest_KR == interim.highest_KR).all(axis=1)
        stopped = [None if certain is None else Settled(certain, None, None, None, "curtailed") for certain in verdicts]
        wholes = complete(interim, self.rule, noise)
        return [own if known else stop for own, known, stop in zip(wholes, known_K, stopped, strict=True)]


def complete(interim: Interim, rule: VerdictRule, noise: Interval) -> list[Settled]:
    """Return the verdicts of bans of which everything is known (of others, as if the lowest change were)."""
    effects = paired_effects(interim.lowest_KR, interim.num_samples, rule, noise)
    return [
        Settled(verdict(effect.delta, effect.interval, rule), effect.delta, effect.interval, effect.p)
        for effect in effects
    ]
