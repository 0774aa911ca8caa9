"""Groups of types in logit space: what each one's gradient amounts to, and whether two differ (METHOD 4.8, 5).

1. A group's gradient is the sum of its types' sums; its norm, cosines and signed share ⟨Σ S_v, G⟩ / ‖G‖² are of that.
   The signed shares of a partition add up to 1, as do its shares of Σ‖g_i‖.
2. Two groups are compared by the numbers of their types (Mann–Whitney, two-sided, each test uncorrected). Types are
   the unit, and are taken as independent, which types that stand in for each other are not. Alignment
   falls with frequency by chance alone: compare it where frequencies match, or compare coherence.

Groups are token ids by name, and may overlap; categories are groups too.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy.stats import mannwhitneyu

from rocktokens.gradients import estimates
from rocktokens.gradients.estimates import Estimate, median, ratio
from rocktokens.gradients.geometry import COLUMNS, TypeTable
from rocktokens.gradients.type_sums import Space, TypeGradients

Groups = Mapping[str, Collection[int] | np.ndarray]


@dataclass(frozen=True, slots=True)
class GroupGradient:
    """What the gradients of a group of types are like in one space."""

    name: str
    space: Space
    n_types: int
    n_occurrences: int
    token_share: float
    norm_share: float
    """Of Σ‖g_i‖ over all positions; exact."""
    mean_norm: float
    """Mean of ‖g_i‖ over the group's occurrences; exact."""
    norm: Estimate
    """Of the sum of the group's gradients."""
    alignment: Estimate
    """That, over Σ‖g_i‖ of the group: 1 where all of it pushes one way."""
    cos_pooled: Estimate
    cos_balanced: Estimate
    signed_share: Estimate
    medians: dict[str, float]
    """Over the types of the group, by the names of ``COLUMNS``."""


@dataclass(frozen=True, slots=True)
class RankTest:
    """Mann–Whitney's test on one number of the types of two groups."""

    n_first: int
    """Types for which the number is defined."""
    n_second: int
    median_first: float
    median_second: float
    superiority: float
    """Chance that a type of the first group has the larger number, ties counting half; NaN for an empty group."""
    p: float


@dataclass(frozen=True, slots=True)
class GroupTest(RankTest):
    """The same, with what was tested."""

    column: str
    space: Space
    first: str
    second: str


def describe_groups(gradients: TypeGradients, table: TypeTable, groups: Groups) -> list[GroupGradient]:
    """What each group amounts to, in the space of ``table``, which is ``describe_types`` of ``gradients``."""
    whole = gradients.pooled(table.space), gradients.balanced(table.space)
    return [
        _describe(name, gradients.members(token_ids), gradients, table, *whole) for name, token_ids in groups.items()
    ]


def compare_groups(table: TypeTable, groups: Groups, columns: Sequence[str] = COLUMNS) -> list[GroupTest]:
    """Test every pair of groups on every one of some columns of ``table``."""
    members = {name: np.isin(table.token_ids, np.fromiter(ids, dtype=np.int64)) for name, ids in groups.items()}
    return [
        _test(column, table, (first, members[first]), (second, members[second]))
        for first, second in combinations(groups, 2)
        for column in columns
    ]


def rank_test(first: np.ndarray, second: np.ndarray) -> RankTest:
    """Mann–Whitney's test, two-sided, of numbers of which some may not be defined."""
    first, second = (values[~np.isnan(values)] for values in (first, second))
    superiority = p = float("nan")
    if len(first) and len(second):
        test: Any = mannwhitneyu(first, second, alternative="two-sided")
        superiority, p = float(test.statistic) / (len(first) * len(second)), float(test.pvalue)
    return RankTest(len(first), len(second), median(first), median(second), superiority, p)


def _describe(
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
        norm_share=float(table.share[chosen_U].sum()),
        mean_norm=float(ratio(length, freq.sum())),
        norm=estimates.norm(square, width).to_floats(),
        alignment=estimates.norm(square, width).scaled(ratio(1.0, length)).to_floats(),
        cos_pooled=estimates.cosine(*pooled).to_floats(),
        cos_balanced=estimates.cosine(*balanced).to_floats(),
        signed_share=estimates.signed_share(*pooled).to_floats(),
        medians={column: median(table.value(column)[chosen_U]) for column in COLUMNS},
    )


def _test(column: str, table: TypeTable, *groups: tuple[str, np.ndarray]) -> GroupTest:
    (first, first_U), (second, second_U) = groups
    values_U = table.value(column)
    found = asdict(rank_test(values_U[first_U], values_U[second_U]))
    return GroupTest(**found, column=column, space=table.space, first=first, second=second)
