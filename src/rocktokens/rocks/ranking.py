"""Turn scores into rankings: who may be ranked, in which order, and how many are taken (docs/method.md, section 4.3).

1. A type may be ranked when it occurs often enough and in enough prompts, is not among the most frequent ones that are
   left out, and has the label that is asked for: not ``moving`` ("stopped"), or ``stuck``.
2. The best score comes first; ties go to the smaller token id.
3. Under other weights of the prompts everything is decided again: score, frequency, prompts and label.

Shape legend: C clusters, U types used, B sets of weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rocktokens.inference.bootstrap import row_blocks
from rocktokens.rocks.movement import label_types, still_moving
from rocktokens.rocks.selectors import Sample, Selector, weighted_totals

Require = Literal["stopped", "stuck", "any"]


@dataclass(frozen=True, slots=True)
class Rules:
    """Who may be ranked, and how many are taken."""

    k: int
    min_freq: int = 2
    exclude_top_freq: int = 0
    min_score: float = -np.inf
    """Types whose score is below it are not ranked."""
    min_prompts: int = 1
    require: Require = "any"


def rankable(sample: Sample, rules: Rules, weights_BC: np.ndarray | None = None) -> np.ndarray:
    """Say which types may be ranked, whatever their score, bool (B, U)."""
    weights_BC = np.ones((1, sample.n_clusters)) if weights_BC is None else weights_BC
    may_BU = np.stack([frequent_enough(freq_U, rules) for freq_U in weighted_totals(weights_BC, sample.freq)])
    if rules.min_prompts > 1:
        may_BU &= weighted_totals(weights_BC > 0, sample.holds) >= rules.min_prompts
    if rules.require == "stuck":
        may_BU &= label_types(sample, weights_BC) == "stuck"
    elif rules.require == "stopped":
        may_BU &= ~still_moving(sample, weights_BC)
    return may_BU


def frequent_enough(freq_U: np.ndarray, rules: Rules) -> np.ndarray:
    """Say which types occur often enough and are not among the most frequent ones that are left out."""
    may_U = freq_U >= rules.min_freq
    if rules.exclude_top_freq:
        may_U[np.argsort(-freq_U, kind="stable")[: rules.exclude_top_freq]] = False
    return may_U


def rank_types(score_U: np.ndarray, rankable_U: np.ndarray, rules: Rules) -> np.ndarray:
    """Return column indices of the first ``k`` types that may be ranked, best first."""
    eligible = rankable_U & (score_U >= rules.min_score)
    order = np.argsort(-score_U, kind="stable")
    return order[eligible[order]][: rules.k]


def rankings(
    sample: Sample, selector: Selector, rules: Rules, weights_BC: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the scores (U,) and the ranking under each set of weights, or once on the whole sample."""
    weights_BC = np.ones((1, sample.n_clusters)) if weights_BC is None else weights_BC
    for block_BC in row_blocks(weights_BC, len(sample.token_ids)):
        for score_U, rankable_U in zip(selector(sample, block_BC), rankable(sample, rules, block_BC), strict=True):
            yield score_U, rank_types(score_U, rankable_U, rules)


def rank_all(
    sample: Sample, selector: Selector, rules: Rules, weights_BC: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the same with every type that may be ranked, however many are to be taken."""
    return rankings(sample, selector, replace(rules, k=len(sample.token_ids)), weights_BC)
