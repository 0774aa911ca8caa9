"""What logit space says of groups of types: at one checkpoint, and from one checkpoint to another. No torch.

1. A group's gradient is the sum of its types' sums; its norm, cosines and signed share ⟨Σ S_v, G⟩ / ‖G‖² are of that
   sum. The signed shares of a partition add up to 1, as do its shares of Σ‖g_i‖ (docs/method.md, section 5).
2. Two groups are compared by the numbers of their types (Mann–Whitney, two-sided, each test uncorrected). Types are
   the unit, and are taken as independent, which types that stand in for each other are not. Alignment
   falls with frequency by chance alone: compare it where frequencies match, or compare coherence.
3. ``direction``: do rocks point where the other types point? G_bal holds the rock itself and the rocks that can stand
   in for it, with the same gradient, so R = Σ ḡ_u over the types that are not rocks takes its place. Such a type is
   compared with R − ḡ_v, without its own part. ``largest`` says whether R is more than one type's gradient.
4. ``persistence``: is a type pushed the same way at another checkpoint?
   - ``cosine``: of ḡ_v at both checkpoints over the same occurrences.
   - ``split_half``, at each: of one random half of the prompts with the other. A mean over few noisy gradients falls
     below 1 there although nothing changed.
   - ``cross_half``: of one half then with the other half now, the mean of both ways. It has all the noise of a split
     half plus whatever changed: as high as the split halves means that the direction stayed.
   - ``corrected``, as a correlation between noisy measurements is: cross half / √(split half before · after).

Groups are token ids by name, and may overlap; categories are groups too. The coordinates of ``hidden`` are those of
each checkpoint's own last state, those of ``vocabulary`` common to both.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy.stats import mannwhitneyu

from rocktokens.errors import RocktokensError
from rocktokens.gradients import estimates
from rocktokens.gradients.claims import directions
from rocktokens.gradients.estimates import Estimate, column, defined, median, ratio
from rocktokens.gradients.records import (
    ROCKS,
    CheckpointGradients,
    DirectionTest,
    GroupGradient,
    GroupPersistence,
    GroupTest,
    LargestPart,
    LogitPersistence,
    OtherTypes,
    RankTest,
    RockColumns,
    RockPersistence,
    SketchSettings,
    Space,
    SpaceGradients,
    SpacePersistence,
    TypeColumns,
    TypePersistence,
)
from rocktokens.gradients.type_gradients import (
    COLUMNS,
    TypeGradients,
    TypeTable,
    describe_types,
    describe_whole,
    half_cosine,
    split_half,
    total_cosine,
)

TESTED = ("mean_norm", "norm", "coherence", "cos_balanced", "cos_pooled", "contribution")
RELIABLE = 0.25
"""The least cosine of two halves of the prompts that makes a direction of a mean gradient."""
Groups = Mapping[str, Collection[int] | np.ndarray]


# One checkpoint


def describe_checkpoint(gradients: TypeGradients, groups: Groups, categories: Groups) -> CheckpointGradients:
    """Describe one checkpoint in logit space.

    Args:
        gradients: of ``logit_gradients``.
        groups: token ids by name, the rocks among them.
        categories: token ids by category.
    """
    vocabulary, hidden = (_describe_space(gradients, space, groups, categories) for space in ("vocabulary", "hidden"))
    return CheckpointGradients(vocabulary, hidden)


def _describe_space(gradients: TypeGradients, space: Space, groups: Groups, categories: Groups) -> SpaceGradients:
    table, sketch = describe_types(gradients, space), gradients.sums(space).sketch
    is_rock_U = gradients.members(groups[ROCKS])
    others_U = cosine_with_others(gradients, space, is_rock_U).value
    test = rank_test(others_U[is_rock_U], others_U[~is_rock_U])
    return SpaceGradients(
        sketch=None if sketch is None else SketchSettings(*sketch),
        whole=describe_whole(gradients, space),
        groups=describe_groups(gradients, table, groups),
        tests=compare_groups(table, groups, TESTED),
        categories=describe_groups(gradients, table, categories),
        direction=DirectionTest(**asdict(test), largest=largest_part(gradients, space, is_rock_U)),
        rocks=RockColumns(
            token_id=gradients.token_ids[is_rock_U].tolist(),
            direction=directions(gradients.totals(space, np.flatnonzero(is_rock_U))).tolist(),
            alignment=column(table.alignment.value[is_rock_U]),
            coherence=column(table.coherence.value[is_rock_U]),
            cos_others=column(others_U[is_rock_U]),
        ),
        others=OtherTypes(median(table.coherence.value[~is_rock_U])),
        types=TypeColumns(
            token_id=table.token_ids.tolist(),
            freq=table.freq.tolist(),
            cos_others=column(others_U),
            **{name: column(values_U) for name, values_U in table.columns().items()},
        ),
    )


def describe_groups(gradients: TypeGradients, table: TypeTable, groups: Groups) -> dict[str, GroupGradient]:
    """Describe each group in the space of ``table``, which is ``describe_types`` of ``gradients``."""
    pooled_W, balanced_W = gradients.pooled(table.space), gradients.balanced(table.space)
    found = {}
    for name, token_ids in groups.items():
        chosen_U = gradients.members(token_ids)
        found[name] = _describe_group(name, chosen_U, gradients, table, pooled_W, balanced_W)
    return found


def _describe_group(
    name: str,
    chosen_U: np.ndarray,
    gradients: TypeGradients,
    table: TypeTable,
    pooled_W: np.ndarray,
    balanced_W: np.ndarray,
) -> GroupGradient:
    sums, freq = gradients.sums(table.space), gradients.freq[chosen_U]
    x_W = gradients.weighted_sum(table.space, chosen_U.astype(np.float64))
    square, length, width = x_W @ x_W, sums.norm_U[chosen_U].sum(), sums.sketch_width
    pooled = (x_W @ pooled_W, square, pooled_W @ pooled_W, width)
    balanced = (x_W @ balanced_W, square, balanced_W @ balanced_W, width)
    return GroupGradient(
        name=name,
        space=table.space,
        n_types=int(chosen_U.sum()),
        n_occurrences=int(freq.sum()),
        token_share=float(freq.sum() / gradients.freq.sum()),
        norm_share=defined(table.share[chosen_U].sum()),
        mean_norm=defined(ratio(length, freq.sum())),
        norm=estimates.norm(square, width).to_record(),
        alignment=estimates.norm(square, width).scaled(ratio(1.0, length)).to_record(),
        cos_pooled=estimates.cosine(*pooled).to_record(),
        cos_balanced=estimates.cosine(*balanced).to_record(),
        signed_share=estimates.signed_share(*pooled).to_record(),
        medians={each: median(table.value(each)[chosen_U]) for each in COLUMNS},
    )


def compare_groups(table: TypeTable, groups: Groups, columns: Sequence[str] = COLUMNS) -> list[GroupTest]:
    """Test every pair of groups on some columns of ``table``."""
    members = {name: np.isin(table.token_ids, np.fromiter(ids, dtype=np.int64)) for name, ids in groups.items()}
    found = []
    for first, second in combinations(groups, 2):
        for name in columns:
            values_U = table.value(name)
            test = asdict(rank_test(values_U[members[first]], values_U[members[second]]))
            found.append(GroupTest(**test, column=name, space=table.space, first=first, second=second))
    return found


def rank_test(first: np.ndarray, second: np.ndarray) -> RankTest:
    """Run a two-sided Mann–Whitney test on numbers of which some may be NaN."""
    first, second = (values[~np.isnan(values)] for values in (first, second))
    superiority = p = None
    if len(first) and len(second):
        test: Any = mannwhitneyu(first, second, alternative="two-sided")
        superiority, p = float(test.statistic) / (len(first) * len(second)), float(test.pvalue)
    return RankTest(len(first), len(second), median(first), median(second), superiority, p)


def cosine_with_others(gradients: TypeGradients, space: Space, is_rock_U: np.ndarray) -> Estimate:
    """Estimate (U,): the cosine of ḡ_v with the balanced sum of the types that are not rocks, v itself left out."""
    others_W = gradients.weighted_sum(space, ~is_rock_U / gradients.freq)
    square, (square_U, product_U) = others_W @ others_W, gradients.products(space, others_W)
    own_U, product_U = square_U / gradients.freq**2, product_U / gradients.freq
    inside_U = np.where(is_rock_U, 0.0, own_U)
    left_U = square - np.where(is_rock_U, 0.0, 2 * product_U - own_U)
    left_U = np.where(left_U > estimates.ROUNDING * (square + inside_U), left_U, 0.0)
    return estimates.cosine(product_U - inside_U, own_U, left_U, gradients.sums(space).sketch_width)


def largest_part(gradients: TypeGradients, space: Space, is_rock_U: np.ndarray) -> LargestPart:
    """Find the type with the largest signed share of the balanced sum of the types that are not rocks."""
    others_W = gradients.weighted_sum(space, ~is_rock_U / gradients.freq)
    _, product_U = gradients.products(space, others_W)
    share_U = np.where(is_rock_U, np.nan, ratio(product_U / gradients.freq, others_W @ others_W))
    if np.isnan(share_U).all():
        return LargestPart(token_id=None, freq=0, share=None)
    place = int(np.nanargmax(share_U))
    return LargestPart(int(gradients.token_ids[place]), int(gradients.freq[place]), float(share_U[place]))


# Two checkpoints


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


def describe_change(before: TypeGradients, after: TypeGradients, groups: Groups) -> LogitPersistence:
    """Describe how directions changed between two checkpoints."""
    vocabulary, hidden = (
        _describe_change(persistence(before, after, space), groups) for space in ("vocabulary", "hidden")
    )
    return LogitPersistence(vocabulary, hidden)


def _describe_change(found: Persistence, groups: Groups) -> SpacePersistence:
    corrected_U = corrected_cosine(found)
    is_rock_U = np.isin(found.token_ids, np.fromiter(groups[ROCKS], dtype=np.int64))
    return SpacePersistence(
        groups=describe_persistence(found, groups),
        rocks=RockPersistence(column(corrected_U[is_rock_U])),
        types=TypePersistence(
            token_id=found.token_ids.tolist(),
            cosine=column(found.cosine.value),
            split_half_before=column(found.split_half_before.value),
            split_half_after=column(found.split_half_after.value),
            cross_half=column(found.cross_half.value),
            corrected=column(corrected_U),
        ),
    )


def persistence(before: TypeGradients, after: TypeGradients, space: Space) -> Persistence:
    """Measure how the direction of each type changed between two passes over the same rollouts, with the same seed."""
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


def corrected_cosine(found: Persistence) -> np.ndarray:
    """Correct the cosine between checkpoints for the noise of the sample: float64 (U,), NaN where halves disagree.

    What is divided by must not be noise itself: both split halves have to reach ``RELIABLE``.
    """
    before_U, after_U = found.split_half_before.value, found.split_half_after.value
    reliable_U = (before_U >= RELIABLE) & (after_U >= RELIABLE)
    noise_U = np.sqrt(np.where(reliable_U, before_U * after_U, np.nan))
    return np.divide(found.cross_half.value, noise_U)


def describe_persistence(found: Persistence, groups: Groups) -> dict[str, GroupPersistence]:
    """Take the medians over each group of types."""
    corrected_U, described = corrected_cosine(found), {}
    for name, token_ids in groups.items():
        chosen_U = np.isin(found.token_ids, np.fromiter(token_ids, dtype=np.int64))
        split_U = chosen_U & ~np.isnan(found.cross_half.value)
        described[name] = GroupPersistence(
            name=name,
            space=found.space,
            n_types=int(chosen_U.sum()),
            n_split=int(split_U.sum()),
            cosine=median(found.cosine.value[chosen_U]),
            cosine_split=median(found.cosine.value[split_U]),
            split_half_before=median(found.split_half_before.value[split_U]),
            split_half_after=median(found.split_half_after.value[split_U]),
            cross_half=median(found.cross_half.value[split_U]),
            corrected=median(corrected_U[chosen_U]),
        )
    return described


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
