"""Which group every response position belongs to, and which rollouts make up a batch.

1. A partition gives each response position exactly one group, keyed by the token it predicts: position t of a response
   is the one at which x_t was predicted, never the one at which x_t was read.
2. Batches are made of whole prompts: answers to one prompt are not independent, so an interval over batches may not
   find them on both sides.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rocktokens.errors import RocktokensError
from rocktokens.gradients.records import REST
from rocktokens.types import Rollout


@dataclass(frozen=True, slots=True)
class Partition:
    """Named groups of response positions.

    Example: ``Partition(("rocks", "rest"), np.array([0, 1, 1, 0]))`` for four response tokens.
    """

    names: tuple[str, ...]
    group_T: np.ndarray
    """int64 (T,): index into ``names`` of every response token, rollout after rollout."""

    def require_fit(self, rollouts: Sequence[Rollout]) -> None:
        """Refuse a partition that does not give every response token one of its groups."""
        n_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
        if self.group_T.shape != (n_tokens,):
            raise RocktokensError(
                f"group_T has shape {self.group_T.shape} for {n_tokens} response tokens: give one group per token"
            )
        if len(set(self.names)) < len(self.names):
            raise RocktokensError(f"the groups are called {list(self.names)}: give each its own name")
        outside = self.group_T[(self.group_T < 0) | (self.group_T >= len(self.names))]
        if len(outside):
            raise RocktokensError(f"group_T holds {outside[0]}, but there are {len(self.names)} groups: count from 0")


def by_type(rollouts: Sequence[Rollout], sets: Mapping[str, Collection[int]]) -> Partition:
    """Group positions that predict a token of the same set; tokens of no set, if any, are the group ``rest``.

    Args:
        rollouts: those the partition is for, in order.
        sets: token ids by name, no id in two of them: rocks and controls, or one set per category.
    """
    if REST in sets:
        raise RocktokensError(f"groups has a set called {REST!r}, which is what the other tokens are called: rename it")
    group_of: dict[int, int] = {}
    for group, (name, ids) in enumerate(sets.items()):
        for token_id in ids:
            if group_of.setdefault(int(token_id), group) != group:
                first = list(sets)[group_of[int(token_id)]]
                raise RocktokensError(
                    f"token id {token_id} is in the groups {first!r} and {name!r}: leave it out of one of them"
                )
    groups = (group_of.get(int(token_id), len(sets)) for rollout in rollouts for token_id in rollout.token_ids)
    group_T = np.fromiter(groups, dtype=np.int64)
    return Partition((*sets, REST) if np.any(group_T == len(sets)) else tuple(sets), group_T)


def by_edges(values_T: np.ndarray, edges: Sequence[float], quantity: str) -> Partition:
    """Group positions whose value lies between the same edges, such as quantiles of kl, or positions in a response.

    Args:
        values_T: one number per response token, rollout after rollout.
        edges: ascending; an edge belongs to the group above it.
        quantity: what the values are called in the groups' names.

    Example: ``by_edges(kl_T, [0.1, 1], "kl")`` has the groups "kl < 0.1", "0.1 ≤ kl < 1" and "1 ≤ kl".
    """
    if not len(edges) or np.isnan(values_T).any() or np.any(np.diff(edges) <= 0):
        raise RocktokensError(f"{quantity} cannot be cut at {list(edges)}: give ascending edges and values without NaN")
    inner = (f"{low:g} ≤ {quantity} < {high:g}" for low, high in pairwise(edges))
    names = (f"{quantity} < {edges[0]:g}", *inner, f"{edges[-1]:g} ≤ {quantity}")
    return Partition(names, np.searchsorted(np.asarray(edges), values_T, side="right").astype(np.int64))


def prompt_batches(rollouts: Sequence[Rollout], batches: int) -> list[list[int]]:
    """Deal rollouts, by index, into batches: about equally many prompts each, in order, none in two batches."""
    by_prompt: dict[str, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        by_prompt.setdefault(rollout.prompt_id, []).append(index)
    if not 1 <= batches <= len(by_prompt):
        raise RocktokensError(
            f"batches is {batches} for rollouts of {len(by_prompt)} prompts: give at least 1, at most one per prompt"
        )
    prompts = list(by_prompt.values())
    ends = [len(prompts) * number // batches for number in range(batches + 1)]
    return [[index for own in prompts[start:end] for index in own] for start, end in pairwise(ends)]


def split_by_rollout(values_T: np.ndarray, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Split an array into the entries of each rollout's response tokens."""
    return np.split(values_T, np.cumsum([len(rollout.token_ids) for rollout in rollouts])[:-1])
