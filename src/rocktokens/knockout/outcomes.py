"""What every free rollout becomes under every ban: what follows without decoding, and decoding the rest.

1. With common random numbers a ban changes nothing before a banned token would first have been written. So a rollout
   that holds no banned token is its own outcome (``first_occurrences`` finds that for all bans in one pass). Any other
   is a job, decoded from its first banned token on: a ``Continuation``. That holds of bans with alternatives too, which
   act at fewer positions: where they do is seen while decoding.
2. The jobs of all bans are decoded together, and what the journal has is not decoded again. Results count only once
   their prompt is looked at, so that what a design decides does not depend on what happened to be decoded before.
3. Amid the jobs every free rollout is continued once more, from a random position, under the ban of an id that no free
   rollout holds. Nothing should change: what does is the engine's own noise.

Shape legend: K bans, R free rollouts, N prompts, T the tokens of all rollouts one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocktokens.knockout.designs import Design, Interim, Settled
from rocktokens.knockout.journal import Decoded, Journal, Key
from rocktokens.knockout.records import Ban, BanKey, EngineNoise
from rocktokens.knockout.verdicts import EXACT, VerdictRule, paired_effects
from rocktokens.progress import Progress
from rocktokens.rollouts.encode import Sampling, make_rollouts
from rocktokens.rollouts.sampler import Branch, Completion, Sampler
from rocktokens.run_dir import derive_seed
from rocktokens.tasks.base import Task
from rocktokens.types import Prompt, Rollout

Job = tuple[BanKey, int, int]
"""The ban, place of the free rollout, and the first position that may differ."""
NOTHING = BanKey(())
"""What is banned when free rollouts are decoded again and every id occurs in one of them."""
NOWHERE = -1
"""The position of the first banned token in a rollout that holds none."""


@dataclass(frozen=True, slots=True)
class Answering:
    """How answers are written and graded."""

    sampler: Sampler
    tokenizer: Any
    task: Task
    prompts: Sequence[Prompt]
    sampling: Sampling

    def grade(self, prompt: Prompt, token_ids: np.ndarray) -> bool:
        """Return whether an answer is right."""
        return self.task.grade(prompt, self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class Continuation:
    """A rollout under a ban, from the free rollout's first banned token on.

    Example: ``Continuation(start=12, token_ids=np.array([7, 2]), finished=True, right=False)`` is a rollout of 14
    tokens, the first 12 of them as in the free one.
    """

    start: int
    """Position of the free rollout's first banned token."""
    token_ids: np.ndarray
    """int32: what stands from ``start`` on; at least one token. The first took the banned token's place, or is it where
    no alternative is likely there."""
    finished: bool
    """As in ``Rollout``."""
    right: bool
    """Whether the whole answer is right."""

    @property
    def length(self) -> int:
        """Tokens of the whole rollout under the ban."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SweepOutcomes:
    """All that was decoded and decided."""

    bans: list[Ban]
    free: list[Rollout]
    free_right_R: np.ndarray
    first_KR: np.ndarray
    """From ``first_occurrences``."""
    looked: list[dict[int, Continuation]]
    """By ban, what was decoded of which free rollouts."""
    interim: Interim
    settled: list[Settled]
    noise: EngineNoise
    retraced_tokens: int


class SweepDecoder:
    """The free rollouts, and what is known so far of every ban and every one of them."""

    def __init__(
        self, answering: Answering, free: list[Rollout], bans: list[Ban], num_samples: int, journal: Journal
    ) -> None:
        self.answering, self.free, self.bans, self.journal = answering, free, bans, journal
        self.num_samples = num_samples
        self.free_right_R = np.array(
            [answering.grade(self._prompt(place), rollout.token_ids) for place, rollout in enumerate(free)]
        )
        self.first_KR = first_occurrences(free, bans)
        affected_KR = self.first_KR != NOWHERE
        self._lowest_KR = np.where(affected_KR, -self.free_right_R.astype(int), 0)
        self._highest_KR = np.where(affected_KR, 1 - self.free_right_R.astype(int), 0)
        self._looked_KR = np.zeros_like(affected_KR)
        self._stop = 0
        self._retraced = 0
        self._graded: dict[Key, Continuation] = {}
        self._again = self._repetitions()

    def settle(self, design: Design, rule: VerdictRule, progress: Progress) -> SweepOutcomes:
        """Decode block by block what the design still wants to see, until it has settled every ban."""
        settled: dict[int, Settled] = {}
        noise: EngineNoise | None = None
        for number, block in enumerate(design.blocks):
            still_open = [ban for ban in range(len(self.bans)) if ban not in settled]
            again = [] if noise else self._again
            self._look(still_open, block, again, f"decoding under bans {number + 1}/{len(design.blocks)}", progress)
            noise = noise or self._noise(rule)
            found = design.judge(self._interim().of(still_open), number, noise.interval)
            settled |= {ban: own for ban, own in zip(still_open, found, strict=True) if own is not None}
        assert noise is not None, "a design has blocks"
        return SweepOutcomes(
            bans=self.bans,
            free=self.free,
            free_right_R=self.free_right_R,
            first_KR=self.first_KR,
            looked=[
                {int(place): self._outcome((ban.key, int(place))) for place in np.flatnonzero(looked_R)}
                for ban, looked_R in zip(self.bans, self._looked_KR, strict=True)
            ],
            interim=self._interim(),
            settled=[settled[ban] for ban in range(len(self.bans))],
            noise=noise,
            retraced_tokens=self._retraced,
        )

    def _prompt(self, place: int) -> Prompt:
        return self.answering.prompts[place // self.num_samples]

    def _repetitions(self) -> list[Job]:
        """Return every free rollout from some position on, under bans that change nothing."""
        idle = [ban.key for ban in self.bans if ban.role == "never"] or [NOTHING]
        rng = np.random.Generator(np.random.PCG64(derive_seed(self.answering.sampling.seed, "repetitions")))
        return [
            (idle[place % len(idle)], place, int(rng.integers(len(rollout.token_ids))))
            for place, rollout in enumerate(self.free)
        ]

    def _noise(self, rule: VerdictRule) -> EngineNoise:
        """Return what has changed in the free rollouts that were decoded again, amid the jobs."""
        again = [self._outcome((ban, place)) for ban, place, _ in self._again]
        changes_R = np.array([own.right for own in again]).astype(int) - self.free_right_R
        [effect] = paired_effects(changes_R[None], self.num_samples, rule)
        flips = int(np.count_nonzero(changes_R))
        same = [
            np.array_equal(own.token_ids, rollout.token_ids[own.start :])
            for own, rollout in zip(again, self.free, strict=True)
        ]
        return EngineNoise(
            rollouts=len(again),
            tokens=sum(len(own.token_ids) for own in again),
            differing=len(same) - sum(same),
            flips=flips,
            delta=effect.delta,
            # What changes no answer moves no accuracy: only flips are a sample of something.
            interval=effect.interval if flips else EXACT,
        )

    def _interim(self) -> Interim:
        """Return what is known now."""
        return Interim(
            lowest_KR=self._lowest_KR.copy(),
            highest_KR=self._highest_KR.copy(),
            affected_KR=self.first_KR != NOWHERE,
            free_right_R=self.free_right_R,
            num_samples=self.num_samples,
            looked=self._stop,
        )

    def _look(self, bans: list[int], block: range, others: list[Job], label: str, progress: Progress) -> None:
        """Learn the outcomes of a block, and decode some other jobs among them."""
        inside_R = np.isin(np.arange(len(self.free)) // self.num_samples, block)
        jobs = [
            (ban, int(place)) for ban in bans for place in np.flatnonzero((self.first_KR[ban] != NOWHERE) & inside_R)
        ]
        wanted = [(self.bans[ban].key, place, int(self.first_KR[ban, place])) for ban, place in jobs]
        self._decode([*others, *wanted], label, progress)
        for ban, place in jobs:
            right = self._outcome((self.bans[ban].key, place)).right
            change = int(right) - int(self.free_right_R[place])
            self._lowest_KR[ban, place] = self._highest_KR[ban, place] = change
            self._looked_KR[ban, place] = True
        last_start = {place: start for _, place, start in sorted([*others, *wanted], key=lambda job: job[2])}
        self._retraced += sum(last_start.values())
        self._stop = block.stop

    def _decode(self, wanted: list[Job], label: str, progress: Progress) -> None:
        """Decode what the journal does not have, rollout by rollout."""
        missing = [job for job in dict.fromkeys(wanted) if job[:2] not in self.journal.finished]
        missing.sort(key=lambda job: job[1])
        with progress.bar(label, len(missing)) as advance:

            def done(index: int, completion: Completion) -> None:
                ban, place, start = missing[index]
                self.journal.add((ban, place), Decoded(start, completion.token_ids, completion.finished))
                self._outcome((ban, place))
                advance(1)

            sampling = self.answering.sampling
            self.answering.sampler.branch(
                self.free,
                [
                    Branch(place, start, frozenset(ban.ids), frozenset(ban.alternatives))
                    for ban, place, start in missing
                ],
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_new_tokens,
                seed=sampling.seed,
                on_done=done,
            )
        self.journal.flush()

    def _outcome(self, key: Key) -> Continuation:
        """Return what was decoded, graded."""
        if key not in self._graded:
            decoded, place = self.journal.finished[key], key[1]
            token_ids = np.concatenate([self.free[place].token_ids[: decoded.start], decoded.token_ids])
            right = self.answering.grade(self._prompt(place), token_ids)
            self._graded[key] = Continuation(decoded.start, decoded.token_ids, decoded.finished, right)
        return self._graded[key]


def free_rollouts(answering: Answering, num_samples: int, journal: Journal, progress: Progress) -> list[Rollout]:
    """Answer every prompt ``num_samples`` times without a ban, unless the journal has the answers."""
    kept = journal.free()
    if kept is not None:
        return kept
    with progress.bar("decoding free answers", len(answering.prompts) * num_samples) as advance:
        free = make_rollouts(
            answering.sampler,
            answering.tokenizer,
            answering.prompts,
            answering.sampling,
            num_generations=num_samples,
            on_done=advance,
        )
    journal.keep_free(free)
    return free


def first_occurrences(free: Sequence[Rollout], bans: Sequence[Ban]) -> np.ndarray:
    """Return int32 (K, R): by ban, where the first banned token of each rollout is, ``NOWHERE`` where there is none."""
    lengths_R = np.array([len(rollout.token_ids) for rollout in free])
    ends_R = np.cumsum(lengths_R)
    places_of = _places(np.concatenate([rollout.token_ids for rollout in free]), bans)
    first_KR = np.full((len(bans), len(free)), NOWHERE, dtype=np.int32)
    for first_R, ban in zip(first_KR, bans, strict=True):
        places = np.sort(np.concatenate([places_of[token_id] for token_id in ban.ids]))
        holders, earliest = np.unique(np.searchsorted(ends_R, places, side="right"), return_index=True)
        first_R[holders] = places[earliest] - (ends_R - lengths_R)[holders]
    return first_KR


def _places(tokens_T: np.ndarray, bans: Sequence[Ban]) -> dict[int, np.ndarray]:
    """Return indices into the tokens, in no particular order, by banned id."""
    ids = np.unique(np.array([token_id for ban in bans for token_id in ban.ids], dtype=np.int64))
    hits = np.flatnonzero(np.isin(tokens_T, ids))
    hits = hits[np.argsort(tokens_T[hits])]
    starts, ends = (np.searchsorted(tokens_T[hits], ids, side=side) for side in ("left", "right"))
    return {token_id: hits[start:end] for token_id, start, end in zip(ids.tolist(), starts, ends, strict=True)}
