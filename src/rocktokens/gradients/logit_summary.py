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
from rocktokens.gradients.estimates import column, defined, median, ratio
from rocktokens.gradients.records import (
    ROCKS,
    BySpace,
    DirectionTest,
    GroupGradient,
    GroupPersistence,
    GroupTest,
    LargestPart,
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
    members,
    total_cosine,
)

SPACES: tuple[Space, Space] = ("vocabulary", "hidden")
TESTED = ("mean_norm", "norm", "coherence", "cos_balanced", "cos_pooled", "contribution")
COSINES = ("cosine", "split_half_before", "split_half_after", "cross_half", "corrected")
RELIABLE = 0.25
"""The least cosine of two halves of the prompts that makes a direction of a mean gradient."""
IdsByName = Mapping[str, Collection[int] | np.ndarray]


# One checkpoint


def describe_checkpoint(gradients: TypeGradients, groups: IdsByName, categories: IdsByName) -> BySpace[SpaceGradients]:
    """Describe one checkpoint in logit space; the rocks are among the groups."""
    return BySpace(*(_describe_space(gradients, space, groups, categories) for space in SPACES))


def _describe_space(gradients: TypeGradients, space: Space, groups: IdsByName, categories: IdsByName) -> SpaceGradients:
    table, sketch = describe_types(gradients, space), gradients.sums(space).sketch
    is_rock_U = members(gradients.token_ids, groups[ROCKS])
    cos_others_U, largest = compare_with_others(gradients, space, is_rock_U)
    test = rank_test(cos_others_U[is_rock_U], cos_others_U[~is_rock_U])
    return SpaceGradients(
        sketch=None if sketch is None else SketchSettings(*sketch),
        whole=describe_whole(gradients, space),
        groups=describe_groups(gradients, table, groups),
        tests=compare_groups(table, groups),
        categories=describe_groups(gradients, table, categories),
        direction=DirectionTest(**asdict(test), largest=largest),
        rocks=RockColumns(
            token_id=gradients.token_ids[is_rock_U].tolist(),
            direction=directions(gradients.totals(space, np.flatnonzero(is_rock_U))).tolist(),
            alignment=column(table.alignment.value[is_rock_U]),
            coherence=column(table.coherence.value[is_rock_U]),
            cos_others=column(cos_others_U[is_rock_U]),
        ),
        others=OtherTypes(median(table.coherence.value[~is_rock_U])),
        types=TypeColumns(
            token_id=table.token_ids.tolist(),
            freq=table.freq.tolist(),
            cos_others=column(cos_others_U),
            **{name: column(values_U) for name, values_U in table.columns().items()},
        ),
    )


def describe_groups(gradients: TypeGradients, table: TypeTable, groups: IdsByName) -> dict[str, GroupGradient]:
    """Describe each group in the space of ``table``, which is ``describe_types`` of ``gradients``."""
    sums, space = gradients.sums(table.space), table.space
    pooled_W, balanced_W, width = gradients.pooled(space), gradients.balanced(space), sums.sketch_width
    found = {}
    for name, token_ids in groups.items():
        chosen_U = members(gradients.token_ids, token_ids)
        n_occurrences, length = gradients.freq[chosen_U].sum(), sums.norm_U[chosen_U].sum()
        x_W = gradients.weighted_sum(space, chosen_U.astype(np.float64))
        square = x_W @ x_W
        pooled = (x_W @ pooled_W, square, pooled_W @ pooled_W, width)
        balanced = (x_W @ balanced_W, square, balanced_W @ balanced_W, width)
        found[name] = GroupGradient(
            name=name,
            space=space,
            n_types=int(chosen_U.sum()),
            n_occurrences=int(n_occurrences),
            token_share=float(n_occurrences / gradients.freq.sum()),
            norm_share=defined(table.share[chosen_U].sum()),
            mean_norm=defined(ratio(length, n_occurrences)),
            norm=estimates.norm(square, width).to_record(),
            alignment=estimates.norm(square, width).scaled(ratio(1.0, length)).to_record(),
            cos_pooled=estimates.cosine(*pooled).to_record(),
            cos_balanced=estimates.cosine(*balanced).to_record(),
            signed_share=estimates.signed_share(*pooled).to_record(),
            medians={each: median(table.value(each)[chosen_U]) for each in COLUMNS},
        )
    return found


def compare_groups(table: TypeTable, groups: IdsByName, columns: Sequence[str] = TESTED) -> list[GroupTest]:
    """Test every pair of groups on some columns of ``table``."""
    found = []
    for first, second in combinations(groups, 2):
        first_U, second_U = (members(table.token_ids, groups[name]) for name in (first, second))
        for name in columns:
            test = asdict(rank_test(table.value(name)[first_U], table.value(name)[second_U]))
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


def compare_with_others(
    gradients: TypeGradients, space: Space, is_rock_U: np.ndarray
) -> tuple[np.ndarray, LargestPart]:
    """Return the cosine (U,) of ḡ_v with R, v itself left out, and the type with the largest signed share of R."""
    others_W = gradients.weighted_sum(space, ~is_rock_U / gradients.freq)
    square, (square_U, product_U) = others_W @ others_W, gradients.products(space, others_W)
    own_U, product_U = square_U / gradients.freq**2, product_U / gradients.freq
    inside_U = np.where(is_rock_U, 0.0, own_U)
    left_U = square - np.where(is_rock_U, 0.0, 2 * product_U - own_U)
    left_U = np.where(left_U > estimates.ROUNDING * (square + inside_U), left_U, 0.0)
    cosine_U = ratio(product_U - inside_U, np.sqrt(own_U * left_U))
    share_U = np.where(is_rock_U, np.nan, ratio(product_U, square))
    if np.isnan(share_U).all():
        return cosine_U, LargestPart(token_id=None, freq=0, share=None)
    place = int(np.nanargmax(share_U))
    return cosine_U, LargestPart(int(gradients.token_ids[place]), int(gradients.freq[place]), float(share_U[place]))


# Two checkpoints


@dataclass(frozen=True, slots=True)
class Persistence:
    """Cosines of every type between two checkpoints in one space, all (U,); NaN where a type has no halves."""

    space: Space
    token_ids: np.ndarray
    cosine: np.ndarray
    split_half_before: np.ndarray
    split_half_after: np.ndarray
    cross_half: np.ndarray

    @property
    def corrected(self) -> np.ndarray:
        """The cosine between checkpoints, corrected for the noise of the sample; NaN where halves disagree.

        What is divided by must not be noise itself: both split halves have to reach ``RELIABLE``.
        """
        before_U, after_U = self.split_half_before, self.split_half_after
        reliable_U = (before_U >= RELIABLE) & (after_U >= RELIABLE)
        return self.cross_half / np.sqrt(np.where(reliable_U, before_U * after_U, np.nan))


def persistence(before: TypeGradients, after: TypeGradients, space: Space) -> Persistence:
    """Measure how the direction of each type changed between two passes over the same rollouts, with the same seed."""
    _require_comparable(before, after, space)
    return Persistence(
        space=space,
        token_ids=before.token_ids,
        cosine=total_cosine(before, after, space),
        split_half_before=half_cosine(before, before, space),
        split_half_after=half_cosine(after, after, space),
        cross_half=(half_cosine(before, after, space) + half_cosine(after, before, space)) / 2,
    )


def describe_change(before: TypeGradients, after: TypeGradients, groups: IdsByName) -> BySpace[SpacePersistence]:
    """Describe how directions changed between two checkpoints."""
    described = []
    for found in (persistence(before, after, space) for space in SPACES):
        is_rock_U = members(found.token_ids, groups[ROCKS])
        types = {name: column(getattr(found, name)) for name in COSINES}
        described.append(
            SpacePersistence(
                groups=describe_persistence(found, groups),
                rocks=RockPersistence(column(found.corrected[is_rock_U])),
                types=TypePersistence(token_id=found.token_ids.tolist(), **types),
            )
        )
    return BySpace(*described)


def describe_persistence(found: Persistence, groups: IdsByName) -> dict[str, GroupPersistence]:
    """Take the medians over each group of types."""
    described = {}
    for name, token_ids in groups.items():
        chosen_U = members(found.token_ids, token_ids)
        split_U = chosen_U & ~np.isnan(found.cross_half)
        described[name] = GroupPersistence(
            name=name,
            space=found.space,
            n_types=int(chosen_U.sum()),
            n_split=int(split_U.sum()),
            cosine=median(found.cosine[chosen_U]),
            cosine_split=median(found.cosine[split_U]),
            **{each: median(getattr(found, each)[split_U]) for each in COSINES if each != "cosine"},
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
