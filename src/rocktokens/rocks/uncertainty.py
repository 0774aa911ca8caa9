"""Measure how far the numbers about rocks would move with other prompts: a seeded cluster bootstrap.

See docs/method.md, sections 4.6 and 4.8.

1. The unit is the cluster of prompts. Occurrences of one prompt share its text and are not independent, so whole
   clusters are drawn with replacement, as many as there are: a replicate is a row of counts over the clusters. Where
   all types are ranked again in each, more than 2,000 clusters are first pooled at random into 500.
2. Every statistic is a function of sums over clusters, so a replicate is that statistic under other weights; a ranking
   is made again in every replicate, with ``min_freq`` and the rest; only the flags of the context stage stay as found.
3. Intervals are bootstrap-t: on the log scale for R and for ratios (means, what is kept of a loss), on the logit scale
   for shares, on its own scale for a difference (``inference.bootstrap``).
4. Paired changes are also tested: Wilcoxon's signed-rank test with one difference per cluster.

Rankings rest on sums of whole numbers below 2^53 in float64, which are exact, and intervals on sums in one fixed order:
nothing here depends on threads or on the size of blocks.

Shape legend: C clusters, U types used, B replicates, R rollouts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata, wilcoxon

from rocktokens.errors import RocktokensError
from rocktokens.inference.bootstrap import (
    bootstrap_counts,
    mean_interval,
    ratio_interval,
    ratio_intervals,
    share_interval,
)
from rocktokens.rocks.ranking import Rules, frequent_enough, rank_types, rankable, rankings
from rocktokens.rocks.records import PairedChange
from rocktokens.rocks.selectors import POOLED_CLUSTERS, Sample, Selector, summed_kl
from rocktokens.types import ONE, Interval

CANDIDATES = 1000
CANDIDATES_PER_ROCK = 10
"""Types a replicate looks at: this many, or this many for every rock if that is more (see ``candidates``)."""
MOST_DRAWN = 2000
"""Clusters that are drawn one by one where every replicate ranks again."""
LEAST_NONZERO = 6
"""With 5 differences the smallest two-sided p of a signed-rank test is 2/2^5 > 0.05: it cannot reject anything."""


@dataclass(frozen=True, slots=True)
class ScoreUncertainty:
    """What the bootstrap says of each type; all float64 (U,)."""

    low: np.ndarray
    """Lower end of the interval of the score in nats; NaN for a type that is no candidate."""
    high: np.ndarray
    p_in_top_k: np.ndarray
    """Share of replicates that rank the type among the first k; 0 for a type that is no candidate."""

    def interval(self, column: int) -> Interval | None:
        """The interval of one type's score."""
        return None if np.isnan(self.low[column]) else (float(self.low[column]), float(self.high[column]))


def score_uncertainty(
    sample: Sample,
    selector: Selector,
    rules: Rules,
    draws: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    joint: bool = False,
) -> ScoreUncertainty:
    """Return the interval of R and the probability of being in the top k, for every type that has a chance of it.

    A type whose score is 0 in a replicate is there by its token id alone and does not count as being in the top k.
    What the context stage kept is taken as found, so under that stage the probability leaves out how much the choice of
    contexts would change with other prompts.

    A probability estimated from B replicates has a Monte-Carlo standard error of sqrt(p(1 − p)/B): with 1,000 of them
    at most 1.6 percentage points.

    The rules are applied again in every replicate, so a type may fall below ``min_freq`` or out of the excluded ones.
    ``selector`` is the score that ranks. Under ``joint`` R is the smaller one of the two checkpoints, and its interval
    ends at the smaller of both low and the smaller of both high ends.
    """
    columns = candidates(sample, selector, rules)
    part = sample.columns(columns)
    if sample.n_clusters > MOST_DRAWN:
        part = part.pooled(POOLED_CLUSTERS, seed)
    part, counts_BC = part.by_type(), bootstrap_counts(part.n_clusters, draws, seed)
    ends = np.full((2, len(sample.token_ids)), np.nan)
    sums = [part.kl, part.kl_before] if joint else [part.kl]
    ends[:, columns] = np.min([ratio_intervals(kl, None, counts_BC, level) for kl in sums], axis=0) / ONE
    inside = np.zeros(len(sample.token_ids), dtype=np.int64)
    for score_U, first in rankings(part, selector, rules, counts_BC):
        inside[columns[first[score_U[first] > 0]]] += 1
    return ScoreUncertainty(ends[0], ends[1], inside / draws)


def candidates(sample: Sample, selector: Selector, rules: Rules) -> np.ndarray:
    """Choose ascending columns of the types that may come into the top k of a replicate.

    The best max(1000, 10·k) by R and by the selector are taken: drawing the prompts again hardly ever lifts a type past
    that many others. It is an approximation: where types are rare, a probability may be off by about 0.01, which more
    replicates do not fix. Where the score does not grow with frequency (mean kl), types too rare to be ranked stand
    before the others, so the best are also taken among those that half reach ``min_freq`` and among those that do; and
    among those that may be ranked by all rules. The most frequent types are taken as far as they decide which ones are
    excluded.
    """
    freq_U = sample.totals("freq")
    once = np.ones((1, sample.n_clusters))
    reach = max(CANDIDATES, CANDIDATES_PER_ROCK * (rules.k + rules.exclude_top_freq))
    best = [
        rank_types(score(sample, once)[0], frequent_enough(freq_U, Rules(reach, least)), Rules(reach))
        for score in (summed_kl, selector)
        for least in (1, (rules.min_freq + 1) // 2, rules.min_freq)
    ]
    best.append(rank_types(selector(sample, once)[0], rankable(sample, rules)[0], Rules(reach)))
    frequent = np.argsort(-freq_U, kind="stable")[: CANDIDATES_PER_ROCK * rules.exclude_top_freq]
    return np.unique(np.concatenate([*best, frequent]))


def share_intervals(
    sample: Sample, is_rock_U: np.ndarray, paired: bool, draws: int = 1000, seed: int = 0, level: float = 0.95
) -> dict[str, Interval | None]:
    """Return intervals of what a set of rocks amounts to, by the names these statistics have in the summary.

    The set is given, so its choice adds nothing to the intervals: the sample should not be the one it was selected on.
    ``paired`` says whether ``kl_before`` is of the same occurrences; without that there is no change to measure.
    """
    counts_BC = bootstrap_counts(sample.n_clusters, draws, seed)
    rocks, rest = (_cluster_totals(sample, chosen_U) for chosen_U in (is_rock_U, ~is_rock_U))
    whole = {name: rocks[name] + rest[name] for name in rocks}
    shares = {"token_share": "freq", "kl_share": "kl", "grad_share": "grad_norm"}
    intervals = {name: share_interval(rocks[of], rest[of], counts_BC, level) for name, of in shares.items()}
    for name, sums in (("mean_kl", whole), ("mean_kl_rocks", rocks), ("mean_kl_rest", rest)):
        intervals[name] = ratio_interval(sums["kl"] / ONE, sums["freq"], counts_BC, level)
    for name, sums in (("kl_change_rocks", rocks), ("kl_change_rest", rest)):
        before_C = sums.get("kl_before") if paired else None
        kept = None if before_C is None else ratio_interval(sums["kl"], before_C, counts_BC, level)
        intervals[name] = _less_one(kept)
    return intervals


def choice_share(
    sample: Sample, chosen_U: np.ndarray, draws: int = 1000, seed: int = 0, level: float = 0.95
) -> tuple[float | None, Interval | None]:
    """Measure what share of the kl of the chosen types is a choice within classes, with its interval.

    The sample has ``kl_choice``. By rounding the choice of a cluster may exceed its kl: nothing of that is decision.
    """
    totals = _cluster_totals(sample, chosen_U)
    choice_C = np.maximum(totals["kl_choice"], 0)
    decision_C = np.maximum(totals["kl"] - choice_C, 0)
    choice, decision = int(choice_C.sum()), int(decision_C.sum())
    if not choice + decision:
        return None, None
    counts_BC = bootstrap_counts(sample.n_clusters, draws, seed)
    return choice / (choice + decision), share_interval(choice_C, decision_C, counts_BC, level)


def paired_tests(
    sample: Sample, in_group_U: np.ndarray, draws: int = 1000, seed: int = 0, level: float = 0.95
) -> PairedChange:
    """Measure how the kl of a group of types changed from baseline to reference, and whether chance explains it.

    The unit of the test is the prompt (cluster), not the occurrence: occurrences of one prompt are not independent, and
    counting them as if they were makes any change significant. Each cluster enters with its mean Δkl per occurrence.

    Clusters without any change are ranked with the others and then take neither side (Pratt): they are evidence that
    nothing changed, which leaving them out would hide, and splitting them between both sides overstates the variance.
    With fewer than 6 clusters that changed there is no p: the test could not reject. ``kl_before`` of the sample is of
    the same occurrences.
    """
    if sample.kl_before is None:
        raise RocktokensError("a paired test needs two checkpoints, the sample has only one: trace another checkpoint")
    totals = _cluster_totals(sample, in_group_U)
    freq_C, after_C, before_C = (totals[name] for name in ("freq", "kl", "kl_before"))
    present = freq_C > 0
    counts_BC = bootstrap_counts(sample.n_clusters, draws, seed)
    freq, after, before = (int(sums_C.sum()) for sums_C in (freq_C, after_C, before_C))
    wilcoxon_p, rank_biserial = _signed_rank((after_C - before_C)[present] / (freq_C[present] * ONE))
    return PairedChange(
        n_occurrences=freq,
        n_clusters=int(present.sum()),
        kl_before=before / (freq * ONE) if freq else None,
        kl_after=after / (freq * ONE) if freq else None,
        delta=(after - before) / (freq * ONE) if freq else None,
        delta_interval=mean_interval((after_C - before_C) / ONE, freq_C, counts_BC, level),
        relative=(after - before) / before if before else None,
        relative_interval=_less_one(ratio_interval(after_C, before_C, counts_BC, level)),
        wilcoxon_p=wilcoxon_p,
        rank_biserial=rank_biserial,
    )


def _signed_rank(delta_C: np.ndarray) -> tuple[float | None, float | None]:
    """The p of Wilcoxon's test, and (W₊ − W₋)/(W₊ + W₋ + W₀), both with ranks over zeros too."""
    if not len(delta_C):
        return None, None
    ranks = rankdata(np.abs(delta_C))
    effect = float((ranks * np.sign(delta_C)).sum() / ranks.sum())
    if np.count_nonzero(delta_C) < LEAST_NONZERO:
        return None, effect
    test: Any = wilcoxon(delta_C, zero_method="pratt")
    return float(test.pvalue), effect


def _less_one(ends: Interval | None) -> Interval | None:
    """The interval of a relative change, from that of what is kept."""
    return None if ends is None else (ends[0] - 1, ends[1] - 1)


def _cluster_totals(sample: Sample, chosen_U: np.ndarray) -> dict[str, np.ndarray]:
    """Sums int64 (C,) of the chosen types, by name of the matrix; kl and gradient in fixed point."""
    names = ("freq", "kl", "grad_norm", "kl_before", "kl_choice")
    matrices = {name: getattr(sample, name) for name in names if getattr(sample, name) is not None}
    return {name: matrix @ chosen_U.astype(np.int64) for name, matrix in matrices.items()}
