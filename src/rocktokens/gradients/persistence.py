"""Is a type pushed the same way at another checkpoint? Cosines of its mean gradients then and now (METHOD 5).

1. ``cosine``: of ḡ_v at both checkpoints over the same occurrences.
2. ``split_half``, at each: of one random half of the prompts with the other. A mean over few noisy gradients falls
   below 1 there although nothing changed.
3. ``cross_half``: of one half then with the other half now, the mean of both ways. It has all the noise of a split half
   plus whatever changed: as high as the split halves means that the direction stayed.

The coordinates of ``hidden`` are those of each checkpoint's own last state, those of ``vocabulary`` common to both.
"""

from dataclasses import dataclass

import numpy as np

from rocktokens.errors import RocktokensError
from rocktokens.gradients.estimates import Estimate, median
from rocktokens.gradients.geometry import half_cosine, split_half, total_cosine
from rocktokens.gradients.groups import Groups
from rocktokens.gradients.type_sums import Space, TypeGradients


@dataclass(frozen=True, slots=True)
class Persistence:
    """Cosines of every type between two checkpoints in one space, all (U,); NaN where a type has no halves."""

    space: Space
    token_ids: np.ndarray
    freq: np.ndarray
    cosine: Estimate
    split_half_before: Estimate
    split_half_after: Estimate
    cross_half: Estimate


@dataclass(frozen=True, slots=True)
class GroupPersistence:
    """Medians over the types of a group."""

    name: str
    space: Space
    n_types: int
    n_split: int
    """Those with halves, which are alone in the medians that follow the first."""
    cosine: float
    """Of all types of the group."""
    cosine_split: float
    """Of those with halves."""
    split_half_before: float
    split_half_after: float
    cross_half: float


def persistence(before: TypeGradients, after: TypeGradients, space: Space) -> Persistence:
    """How the direction of each type changed between two passes over the same rollouts, with the same seed."""
    _require_comparable(before, after, space)
    ways = half_cosine(before, after, space), half_cosine(after, before, space)
    return Persistence(
        space=space,
        token_ids=before.token_ids,
        freq=before.freq,
        cosine=total_cosine(before, after, space),
        split_half_before=split_half(before, space),
        split_half_after=split_half(after, space),
        # The two ways share their collisions: their errors may be one and the same, and are averaged as if they were.
        cross_half=Estimate(*((one + other) / 2 for one, other in zip(*ways, strict=True))),
    )


def describe_persistence(found: Persistence, groups: Groups) -> list[GroupPersistence]:
    """The medians of each group of types."""
    return [_describe(name, found, np.fromiter(ids, dtype=np.int64)) for name, ids in groups.items()]


def _describe(name: str, found: Persistence, token_ids: np.ndarray) -> GroupPersistence:
    chosen_U = np.isin(found.token_ids, token_ids)
    split_U = chosen_U & ~np.isnan(found.cross_half.value)
    return GroupPersistence(
        name=name,
        space=found.space,
        n_types=int(chosen_U.sum()),
        n_split=int(split_U.sum()),
        cosine=median(found.cosine.value[chosen_U]),
        cosine_split=median(found.cosine.value[split_U]),
        split_half_before=median(found.split_half_before.value[split_U]),
        split_half_after=median(found.split_half_after.value[split_U]),
        cross_half=median(found.cross_half.value[split_U]),
    )


def _require_comparable(before: TypeGradients, after: TypeGradients, space: Space) -> None:
    """Refuse passes over different rollouts, or summed in different ways."""
    if before.rollouts_sha256 != after.rollouts_sha256 or not np.array_equal(before.token_ids, after.token_ids):
        raise RocktokensError(
            "the two passes took gradients over different rollouts: give both checkpoints the same rollouts"
        )
    same_rows = np.array_equal(before.second_row, after.second_row)
    if before.sums(space).sketch != after.sums(space).sketch or not same_rows:
        raise RocktokensError(
            f"the two passes summed the {space} space in different ways (sketch {before.sums(space).sketch} and "
            f"{after.sums(space).sketch}): give both the same seed, sketch_width and memory"
        )
