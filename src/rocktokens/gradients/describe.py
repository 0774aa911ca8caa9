"""The figures of both spaces as JSON: one checkpoint, two checkpoints, and one checkpoint's parameters. No torch.

1. A checkpoint in logit space: the whole, every group, every pair of groups, every category and every type, in each of
   the two spaces, which stay apart by name.
2. ``direction``: does a rock point where the types point that are no rocks? G_bal holds the rock itself and the rocks
   that can stand in for it, with the same gradient, so R = Σ ḡ_u over the types that are no rocks takes its place. Such
   a type is compared with R − ḡ_v, without its own part. ``largest``: whether R is more than one type's gradient.
3. Two checkpoints: the cosine of each type's mean gradients and, since noise lowers it, the same corrected as a
   correlation between noisy measurements is: cross half / √(split half before · split half after).
4. A checkpoint in parameter space: the shares of every batch, and each share less the share of the tokens.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rocktokens.gradients import estimates
from rocktokens.gradients.claims import directions
from rocktokens.gradients.estimates import Estimate, median, to_record
from rocktokens.gradients.geometry import describe_types, describe_whole, products
from rocktokens.gradients.groups import compare_groups, describe_groups, rank_test
from rocktokens.gradients.persistence import Persistence, describe_persistence, persistence
from rocktokens.gradients.records import (
    ROCKS,
    CheckpointGradients,
    LogitPersistence,
    PartitionShares,
    parsed,
)
from rocktokens.gradients.shares import GradientShares, batch_mean
from rocktokens.gradients.type_sums import Space, TypeGradients

SPACES: tuple[Space, ...] = ("vocabulary", "hidden")
TESTED = ("mean_norm", "norm", "coherence", "cos_balanced", "cos_pooled", "contribution")
RELIABLE = 0.25
"""The least cosine of two halves of the prompts that makes a direction of a mean gradient."""
IdSets = Mapping[str, np.ndarray]


def describe_checkpoint(gradients: TypeGradients, groups: IdSets, categories: IdSets) -> CheckpointGradients:
    """Everything logit space says of one checkpoint, by space.

    Args:
        gradients: of ``logit_gradients``.
        groups: token ids by name; the first group is the rocks.
        categories: token ids by category.
    """
    spaces = {space: _describe_space(gradients, space, groups, categories) for space in SPACES}
    return parsed(CheckpointGradients, spaces)


def describe_change(before: TypeGradients, after: TypeGradients, groups: IdSets) -> LogitPersistence:
    """How directions changed between two checkpoints, by space."""
    spaces = {space: _describe_change(persistence(before, after, space), groups) for space in SPACES}
    return parsed(LogitPersistence, spaces)


def describe_shares(shares: GradientShares) -> PartitionShares:
    """Everything parameter space says of one checkpoint, for one partition of the tokens."""
    token_share_NA = shares.tokens_NA / shares.tokens_NA.sum(axis=1, keepdims=True)
    geometry = shares.gradient().groups
    excess = {
        name: batch_mean(np.array(geometry[name].share.values, dtype=np.float64) - token_share_NA[:, column])
        for column, name in enumerate(shares.groups)
    }
    token_share = dict(zip(shares.groups, (shares.tokens_NA.sum(0) / shares.tokens_NA.sum()).tolist(), strict=True))
    return PartitionShares(shares.summary(), token_share, excess)


def cosine_with_others(gradients: TypeGradients, space: Space, is_rock_U: np.ndarray) -> Estimate:
    """(U,): the cosine of ḡ_v with the balanced sum of the types that are no rocks, v itself left out; NaN of zeros."""
    others_W = gradients.weighted_sum(space, ~is_rock_U / gradients.freq)
    square, (square_U, product_U) = others_W @ others_W, products(gradients, space, others_W)
    own_U, product_U = square_U / gradients.freq**2, product_U / gradients.freq
    inside_U = np.where(is_rock_U, 0.0, own_U)
    left_U = square - np.where(is_rock_U, 0.0, 2 * product_U - own_U)
    left_U = np.where(left_U > estimates.ROUNDING * (square + inside_U), left_U, 0.0)
    return estimates.cosine(product_U - inside_U, own_U, left_U, gradients.sums(space).sketch_width)


def largest_part(gradients: TypeGradients, space: Space, is_rock_U: np.ndarray) -> dict[str, Any]:
    """The type with the largest signed share of the balanced sum of the types that are no rocks."""
    others_W = gradients.weighted_sum(space, ~is_rock_U / gradients.freq)
    _, product_U = products(gradients, space, others_W)
    share_U = np.where(is_rock_U, np.nan, estimates.ratio(product_U / gradients.freq, others_W @ others_W))
    if np.isnan(share_U).all():
        return {"token_id": None, "freq": 0, "share": None}
    place = int(np.nanargmax(share_U))
    return {
        "token_id": int(gradients.token_ids[place]),
        "freq": int(gradients.freq[place]),
        "share": float(share_U[place]),
    }


def corrected_cosine(found: Persistence) -> np.ndarray:
    """float64 (U,): the cosine between checkpoints, freed of the noise of the sample; NaN where halves disagree.

    What is divided by must not be noise itself: both split halves have to reach ``RELIABLE``.
    """
    before_U, after_U = found.split_half_before.value, found.split_half_after.value
    reliable_U = (before_U >= RELIABLE) & (after_U >= RELIABLE)
    noise_U = np.sqrt(np.where(reliable_U, before_U * after_U, np.nan))
    return np.divide(found.cross_half.value, noise_U)


def _describe_space(gradients: TypeGradients, space: Space, groups: IdSets, categories: IdSets) -> dict[str, Any]:
    table, whole = describe_types(gradients, space), describe_whole(gradients, space)
    is_rock_U = gradients.members(groups[ROCKS])
    others_U = cosine_with_others(gradients, space, is_rock_U).value
    types = {name: to_record(column.to_numpy()) for name, column in table.to_frame().items()}
    return {
        "sketch": None if (sketch := gradients.sums(space).sketch) is None else {"width": sketch[0], "seed": sketch[1]},
        "whole": to_record(whole),
        "groups": {own.name: to_record(own) for own in describe_groups(gradients, table, groups)},
        "tests": to_record(compare_groups(table, groups, TESTED)),
        "categories": {own.name: to_record(own) for own in describe_groups(gradients, table, categories)},
        "direction": to_record(rank_test(others_U[is_rock_U], others_U[~is_rock_U]))
        | {"largest": largest_part(gradients, space, is_rock_U)},
        "rocks": {
            "token_id": gradients.token_ids[is_rock_U].tolist(),
            "direction": directions(gradients.totals(space, np.flatnonzero(is_rock_U))).tolist(),
            "alignment": to_record(table.alignment.value[is_rock_U]),
            "coherence": to_record(table.coherence.value[is_rock_U]),
            "cos_others": to_record(others_U[is_rock_U]),
        },
        "others": {"coherence": to_record(median(table.coherence.value[~is_rock_U]))},
        "types": {**types, "cos_others": to_record(others_U)},
    }


def _describe_change(found: Persistence, groups: IdSets) -> dict[str, Any]:
    corrected_U = corrected_cosine(found)
    columns = ("cosine", "split_half_before", "split_half_after", "cross_half")
    return {
        "groups": {
            own.name: {**to_record(own), "corrected": to_record(median(corrected_U[_members(found, groups[own.name])]))}
            for own in describe_persistence(found, groups)
        },
        "rocks": {"corrected": to_record(corrected_U[_members(found, groups[ROCKS])])},
        "types": {
            "token_id": found.token_ids.tolist(),
            **{name: to_record(getattr(found, name).value) for name in columns},
            "corrected": to_record(corrected_U),
        },
    }


def _members(found: Persistence, token_ids: np.ndarray) -> np.ndarray:
    return np.isin(found.token_ids, token_ids)
