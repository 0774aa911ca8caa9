"""What a ban changes besides accuracy: where the texts part, what takes the token's place, how long answers get.

1. A rollout without a banned token is the same under the ban. ``first_occurrences`` finds, for all bans in one pass,
   where each free rollout first holds a banned token.
2. Up to there both texts are the same. A ``Continuation`` is what the model writes from there on under the ban; its
   first token is the one that took the banned token's place.
3. ``describe_changes`` sets each continuation beside the free rollout it belongs to. A sweep that stops early decodes
   only some of the rollouts that hold a banned token: these are counted in full, all else is over the decoded ones.

Shape legend: K bans, R free rollouts, T their tokens one after another.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocktokens.knockout.records import Ban, Changes
from rocktokens.types import Rollout

NOWHERE = -1
"""The position of the first banned token in a rollout that holds none."""
MOST_REPLACEMENTS = 5


@dataclass(frozen=True, slots=True)
class Continuation:
    """A rollout under a ban, from the free rollout's first banned token on.

    Example: ``Continuation(start=12, token_ids=np.array([7, 2]), finished=True, right=False)`` is a rollout of 14
    tokens, the first 12 of them as in the free one.
    """

    start: int
    """Position of the free rollout's first banned token."""
    token_ids: np.ndarray
    """int32: what stands from ``start`` on; at least one token."""
    finished: bool
    """As in ``Rollout``."""
    right: bool
    """Whether the whole answer is right."""

    @property
    def length(self) -> int:
        """Tokens of the whole rollout under the ban."""
        return self.start + len(self.token_ids)


def first_occurrences(free: Sequence[Rollout], bans: Sequence[Ban]) -> np.ndarray:
    """int32 (K, R): by ban, the position of the first banned token in each rollout, ``NOWHERE`` where it holds none."""
    lengths_R = np.array([len(rollout.token_ids) for rollout in free])
    ends_R = np.cumsum(lengths_R)
    places_of = _places(np.concatenate([rollout.token_ids for rollout in free]), bans)
    first_KR = np.full((len(bans), len(free)), NOWHERE, dtype=np.int32)
    for first_R, ban in zip(first_KR, bans, strict=True):
        places = np.sort(np.concatenate([places_of[token_id] for token_id in ban.ids]))
        holders, earliest = np.unique(np.searchsorted(ends_R, places, side="right"), return_index=True)
        first_R[holders] = places[earliest] - (ends_R - lengths_R)[holders]
    return first_KR


def describe_changes(
    first_R: np.ndarray,
    free: Sequence[Rollout],
    banned: Mapping[int, Continuation],
    free_right_R: np.ndarray,
    text_of: Callable[[int], str],
) -> Changes:
    """What else one ban changes.

    Args:
        first_R: the ban's row of ``first_occurrences``.
        free: all free rollouts.
        banned: by index into ``free``, the rollouts decoded under the ban: all that hold a banned token, or fewer.
        free_right_R: bool, whether each free answer is right.
        text_of: what a token id reads.
    """
    holders = np.flatnonzero(first_R != NOWHERE).tolist()
    decoded = [(free[index], bool(free_right_R[index]), banned[index]) for index in sorted(banned)]
    return Changes(
        n_rollouts=len(holders),
        n_prompts=len({free[index].prompt_id for index in holders}),
        length=_over(decoded, np.mean, lambda before, after: after.length - len(before.token_ids)),
        truncated=_over(decoded, np.mean, lambda before, after: (not after.finished) - (not before.finished)),
        first_difference=_over(decoded, np.median, lambda _, after: after.start),
        first_difference_share=_over(decoded, np.median, lambda before, after: after.start / len(before.token_ids)),
        replacements=_replacements([after for _, _, after in decoded], text_of),
        lost=[(before.prompt_id, before.sample) for before, right, after in decoded if right and not after.right],
        gained=[(before.prompt_id, before.sample) for before, right, after in decoded if after.right and not right],
    )


def _places(tokens_T: np.ndarray, bans: Sequence[Ban]) -> dict[int, np.ndarray]:
    """Indices into the tokens, in no particular order, by banned id."""
    ids = np.unique(np.array([token_id for ban in bans for token_id in ban.ids], dtype=np.int64))
    hits = np.flatnonzero(np.isin(tokens_T, ids))
    hits = hits[np.argsort(tokens_T[hits])]
    starts, ends = (np.searchsorted(tokens_T[hits], ids, side=side) for side in ("left", "right"))
    return {token_id: hits[start:end] for token_id, start, end in zip(ids.tolist(), starts, ends, strict=True)}


def _over(
    decoded: Sequence[tuple[Rollout, bool, Continuation]],
    statistic: Callable[[list[float]], Any],
    value: Callable[[Rollout, Continuation], float],
) -> float | None:
    """A statistic of the decoded rollouts; None when there are none."""
    return float(statistic([value(before, after) for before, _, after in decoded])) if decoded else None


def _replacements(continuations: Sequence[Continuation], text_of: Callable[[int], str]) -> list[tuple[int, str, float]]:
    counts = Counter(int(continuation.token_ids[0]) for continuation in continuations)
    commonest = sorted(counts, key=lambda token_id: (-counts[token_id], token_id))[:MOST_REPLACEMENTS]
    return [(token_id, text_of(token_id), counts[token_id] / len(continuations)) for token_id in commonest]
