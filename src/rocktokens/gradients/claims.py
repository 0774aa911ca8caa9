r"""Does the paper's gradient paradox show in a run? One verdict per claim, decided by an interval or a test. No torch.

The paper says that rocks have small gradients each but own much of the total, point along the global direction, and do
not move; it suspects that Adam suppresses them. Each claim is an inequality here:

    small       a rock's ‖g‖ per occurrence < that of another type of as high a kl       interval of the ratio
    total       share of Σ‖g‖ > share of the tokens                                       interval of the ratio
    direction   cos(ḡ_v, R) of most rocks > 0.1, and of rocks > that of other types       sign test, Mann–Whitney
    kept        most rocks kept more than 3/4 of their kl, on the same tokens             sign test over rocks
    unmoved     the set kept more than 3/4 of its kl                                      interval
    parameters  signed share of the parameter gradient > share of the tokens              interval over batches
    adam        share of Adam's step < share of the gradient                              interval, sign test of batches
    cancels     alignment of most rocks < 1/2: averaging leaves less than half            sign test over rocks
    persists    ḡ_v of most rocks turned by less than 45° in between, noise corrected     sign test over rocks

1. Supported: the whole interval, or p ≤ 0.05, on the side of the claim. Contradicted: on the other side. Inconclusive:
   neither, or the numbers do not exist.
2. A claim of two parts is supported if both are, and contradicted if one of them is.
3. Rocks that can stand in for each other, such as ``\boxed`` and ``\mathbf``, have one gradient between them and are
   not independent. A sign test over rocks therefore counts directions: rocks whose mean gradients lie along one line
   (``directions``) have one vote, that of most of them. A direction that is evenly divided is not counted, as ties
   are not.
4. Every claim is judged at 5 % on its own: of nine without any effect, one or more are decided one time in three.

Against all other tokens, "small each" would be the negation of "own more than their share". So rocks are compared with
the types of the highest mean kl; if the kl of those is below the rocks', so is their gradient, and the comparison is
inconclusive. R is the balanced sum of the types that are not rocks: a large gradient points along any total that it
dominates, and rocks that can stand in for each other point along each other. Where one type makes up most of R, it is
the direction of that type alone, and the claim is inconclusive too.

Paper: https://arxiv.org/abs/2605.09253
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from scipy.sparse.csgraph import connected_components
from scipy.stats import binomtest

from rocktokens.display.numbers import p_value, percent
from rocktokens.gradients.records import (
    CONTRADICTED,
    CONTROL,
    INCONCLUSIVE,
    ROCKS,
    SUPPORTED,
    AdamEffect,
    BatchMean,
    Claim,
    ClaimVerdict,
    DirectionTest,
    HighKlTypes,
    KeptKl,
    LogitSummary,
    NormRatio,
    ParameterSummary,
    RockColumns,
    TraceGroup,
    TraceSummary,
)
from rocktokens.rocks.records import PairedChange
from rocktokens.types import KEPT, Interval

ALPHA = 0.05
ONE_LINE = 0.9
"""The least |cosine| of mean gradients that are taken for one direction."""
LEAST_BATCHES = 4
"""For a verdict by an interval over batches."""
HALF_LEFT = 0.5
"""The alignment at which the mean of many gradients is half as long as they are."""
ALONG = 0.1
"""The least cosine of what points along something: a tenth of its length does."""
SAME_WAY = math.cos(math.pi / 4)
HALF_OF_IT = 0.5
"""The share of a sum of gradients above which its direction is that of one of them."""
Judged = tuple[str, ClaimVerdict]
"""What a verdict rests on, and the verdict."""
_NOT_PAIRED = "no other checkpoint scored the same tokens"
_NO_BATCH = "the rocks or the gradient are missing from every batch"
_OF_ADAM: dict[str, ClaimVerdict] = {
    "suppresses": SUPPORTED,
    "amplifies": CONTRADICTED,
    "inconclusive": INCONCLUSIVE,
}


def judge(trace: TraceSummary, logit: LogitSummary, parameter: ParameterSummary) -> list[Claim]:
    """Judge every claim, from the other parts of gradients.json."""
    vocabulary, update = logit.reference.vocabulary, parameter.shares.update
    rocks, traced = vocabulary.rocks, trace.groups[ROCKS]
    own_share = parameter.shares.gradient.all.groups[ROCKS].share
    corrected = logit.persistence and logit.persistence.vocabulary.rocks.corrected
    of_total = "rocks own more of the total than their share of the tokens"
    of_gradient = "rocks own more of the gradient in parameter space than their share of the tokens"
    cancelling = "a rock is pushed in different directions, so its pushes cancel"
    return [
        Claim("small", "rocks have small gradients each", *small(trace.high_mean_kl)),
        Claim("total", of_total, *total(trace.norm_ratios["all"], traced)),
        Claim("direction", "rocks point along the global direction", *direction(vocabulary.direction, rocks)),
        Claim("kept", "each rock keeps its kl", *kept(trace.rocks_kept, rocks)),
        Claim("unmoved", "as a set, rocks do not move", *unmoved(traced.change)),
        Claim("parameters", of_gradient, *parameters(parameter.excess[ROCKS], own_share)),
        Claim("adam", "Adam suppresses rocks", *adam(update and update.effects)),
        Claim("cancels", cancelling, *cancels(rocks, vocabulary.others.coherence)),
        Claim("persists", "each rock is pushed the same way at both checkpoints", *persists(corrected, rocks)),
    ]


def small(high_kl: HighKlTypes) -> Judged:
    """Compare the norm of a rock's gradient with that of another type of as high a kl."""
    ratio = high_kl.norm_ratio
    if ratio.ratio is None:
        return "no high-mean-kl type has a gradient on these prompts to compare them with", INCONCLUSIVE
    because = (
        f"in logit space an occurrence of a rock has {ratio.ratio:.2f} × {interval_text(ratio.interval)} the "
        "gradient norm of one of a high-mean-kl type"
    )
    if high_kl.kl is not None and high_kl.rocks_kl is not None and high_kl.kl < high_kl.rocks_kl:
        because += (
            f", but no other type of as high a kl recurs: the {high_kl.n_types} highest have {high_kl.kl:.3f} "
            f"nats per token on these prompts, rocks {high_kl.rocks_kl:.3f}"
        )
        return because, INCONCLUSIVE
    inverted = ratio.interval and (-ratio.interval[1], -ratio.interval[0])
    return because, above(inverted, -1.0)


def total(ratio: NormRatio, rocks: TraceGroup) -> Judged:
    """Compare the rocks' share of Σ‖g‖ with their share of the tokens; ``ratio``: of their mean norm to all tokens'."""
    if ratio.ratio is None:
        return "there is no gradient on these prompts", INCONCLUSIVE
    because = (
        f"they are {percent(rocks.token_share)} of the tokens and have {percent(rocks.norm_share)} of Σ‖g‖ in "
        f"logit space, {ratio.ratio:.2f} × {interval_text(ratio.interval)} as much"
    )
    return because, above(ratio.interval, 1.0)


def direction(test: DirectionTest, rocks: RockColumns) -> Judged:
    """Compare the cosines with R of rocks with 0.1, and with those of other types."""
    if test.p is None or test.superiority is None:
        return "there are no other types to compare the rocks with", INCONCLUSIVE
    tally = Tally.of([_over(value, ALONG) for value in rocks.cos_others], rocks.direction)
    because = (
        f"{tally.yes} of {tally.known} rocks have a cosine above {ALONG:g} with the balanced sum of the types that are "
        f"not rocks ({tally.text}); their median is {test.median_first:.2f}, that of other types "
        f"{test.median_second:.2f} (Mann–Whitney p {p_value(test.p)}, {test.n_second} types)"
    )
    if test.largest.share is not None and test.largest.share > HALF_OF_IT:
        because += (
            f"; but {percent(test.largest.share)} of that sum is one type (token {test.largest.token_id}, "
            f"occurrences: {test.largest.freq}), which is no global direction"
        )
        return because, INCONCLUSIVE
    larger: ClaimVerdict = INCONCLUSIVE if test.p > ALPHA else SUPPORTED if test.superiority > 0.5 else CONTRADICTED
    parts = {larger, tally.verdict}
    return because, CONTRADICTED if CONTRADICTED in parts else INCONCLUSIVE if INCONCLUSIVE in parts else SUPPORTED


def kept(shares: KeptKl | None, rocks: RockColumns) -> Judged:
    """Count the rocks that kept more than 3/4 of their kl."""
    if shares is None:
        return _NOT_PAIRED, INCONCLUSIVE
    direction_of = dict(zip(rocks.token_id, rocks.direction, strict=True))
    known = {
        token_id: share
        for token_id, share in zip(shares.token_id, shares.kept, strict=True)
        if share is not None and token_id in direction_of
    }
    tally = Tally.of([share > KEPT for share in known.values()], [direction_of[token_id] for token_id in known])
    because = f"{tally.yes} of {tally.known} rocks kept more than {100 * KEPT:.0f} % on the same tokens ({tally.text})"
    return because, tally.verdict


def unmoved(change: PairedChange | None) -> Judged:
    """Compare the change of the rocks' kl between the checkpoints with a fall by 1/4."""
    if change is None or change.relative is None:
        return _NOT_PAIRED, INCONCLUSIVE
    interval = change.relative_interval
    because = (
        f"on the same tokens their kl went from {change.kl_before:.3f} to {change.kl_after:.3f} nats per token, "
        f"{100 * change.relative:+.1f} % {percent_text(interval)}, where a fall by {100 * (1 - KEPT):.0f} % counts "
        "as moving"
    )
    return because, above(interval, KEPT - 1)


def parameters(excess: BatchMean, share: BatchMean) -> Judged:
    """Compare the rocks' signed share of the gradient with their share of the tokens, batch by batch."""
    if excess.mean is None or share.mean is None:
        return _NO_BATCH, INCONCLUSIVE
    because = (
        f"their signed share of the gradient is {100 * share.mean:.1f} %, {_points(excess)} from their share of the "
        "tokens, batch by batch"
    )
    n_defined = sum(value is not None for value in excess.values)
    return because, above(excess.interval if n_defined >= LEAST_BATCHES else None, 0.0)


def adam(effects: Mapping[str, AdamEffect] | None) -> Judged:
    """Compare the rocks' share of Adam's step with their share of the gradient; None without the optimizer's state."""
    if effects is None:
        return "this checkpoint has no optimizer state, so only the gradient is known", INCONCLUSIVE
    own, control = effects[ROCKS], effects.get(CONTROL)
    if own.difference.mean is None:
        return _NO_BATCH, INCONCLUSIVE
    beside = "there is no control" if control is None else f"that of the control by {_points(control.difference)}"
    because = (
        f"their share of the optimizer's step differs from their share of the gradient by {_points(own.difference)}, "
        f"and is the smaller one in {own.below} of {own.below + own.above} batches (sign test p {p_value(own.p)}); "
        f"{beside}"
    )
    return because, _OF_ADAM[own.verdict]


def cancels(rocks: RockColumns, others: float | None) -> Judged:
    """Count the rocks of which averaging leaves less than half; ``others``: the median coherence of other types."""
    coherence = [value for value in rocks.coherence if value is not None]
    if not coherence:
        return "no rock occurs twice on these prompts", INCONCLUSIVE
    cancelled = [
        None if left is None or again is None else left < HALF_LEFT
        for left, again in zip(rocks.alignment, rocks.coherence, strict=True)
    ]
    tally = Tally.of(cancelled, rocks.direction)
    because = (
        f"averaging leaves less than half of the push on {tally.yes} of {tally.known} rocks ({tally.text}); the median "
        f"coherence of a rock is {np.median(coherence):.2f}, that of another type "
        f"{'not defined' if others is None else f'{others:.2f}'}"
    )
    return because, tally.verdict


def persists(corrected: Sequence[float | None] | None, rocks: RockColumns) -> Judged:
    """Count the rocks whose mean gradient turned by less than 45°; ``corrected``: its cosine, noise corrected."""
    known = [value for value in corrected or () if value is not None]
    if corrected is None or not known:
        return "no rock has a direction at two checkpoints to compare", INCONCLUSIVE
    tally = Tally.of([_over(value, SAME_WAY) for value in corrected], rocks.direction)
    because = (
        f"of the {tally.known} of {len(corrected)} rocks whose direction two halves of the prompts agree on, "
        f"{tally.yes} turned by less than 45° (median cosine {np.median(known):.2f}, noise corrected; {tally.text})"
    )
    return because, tally.verdict


# How a claim is decided


@dataclass(frozen=True, slots=True)
class Tally:
    """How many rocks something is true of, and how many directions.

    Example: of three rocks it is true of two, which are one direction: ``Tally(2, 3, 1, 1, 2)``.
    """

    yes: int
    known: int
    """Rocks for which the answer is known."""
    directions_for: int
    directions_against: int
    directions: int
    """All of them, evenly divided ones included."""

    @classmethod
    def of(cls, answers: Sequence[bool | None], directions: Sequence[int]) -> Self:
        """Count answers, None where there is none, by rock and by direction."""
        votes: dict[int, list[bool]] = {}
        for answer, direction in zip(answers, directions, strict=True):
            if answer is not None:
                votes.setdefault(direction, []).append(answer)
        margins = [2 * sum(own) - len(own) for own in votes.values()]
        counts = sum(margin > 0 for margin in margins), sum(margin < 0 for margin in margins), len(margins)
        return cls(sum(map(sum, votes.values())), sum(map(len, votes.values())), *counts)

    @property
    def p(self) -> float:
        """Of the sign test over directions."""
        return sign_test(self.directions_for, self.directions_against)

    @property
    def verdict(self) -> ClaimVerdict:
        """Whether it is true of most."""
        if self.p > ALPHA:
            return INCONCLUSIVE
        return SUPPORTED if self.directions_for > self.directions_against else CONTRADICTED

    @property
    def text(self) -> str:
        """What the sign test rests on."""
        return (
            f"{self.known} rocks, {self.directions} directions: {self.directions_for} for it, "
            f"{self.directions_against} against, sign test p {p_value(self.p)}"
        )


def directions(vectors_nW: np.ndarray) -> np.ndarray:
    """Number the directions of vectors, (n,): those with |cosine| > ``ONE_LINE``, and chains of them, share one."""
    lengths_n1 = np.linalg.norm(vectors_nW, axis=1, keepdims=True)
    units_nW = vectors_nW / np.where(lengths_n1 > 0, lengths_n1, 1)
    return connected_components(np.abs(units_nW @ units_nW.T) > ONE_LINE, directed=False)[1]


def sign_test(above: int, below: int) -> float:
    """Return the two-sided p of an exact sign test; 1 where nothing is counted."""
    return float(binomtest(above, above + below).pvalue) if above + below else 1.0


def above(interval: Interval | None, bound: float) -> ClaimVerdict:
    """Judge the claim that something lies above a bound."""
    if interval is None:
        return INCONCLUSIVE
    return SUPPORTED if interval[0] > bound else CONTRADICTED if interval[1] < bound else INCONCLUSIVE


def interval_text(interval: Interval | None) -> str:
    """Format an interval, or say that there is none."""
    return "[no interval]" if interval is None else "[{:.2f}, {:.2f}]".format(*interval)


def percent_text(interval: Interval | None) -> str:
    """Format an interval in percent, or say that there is none."""
    return "[no interval]" if interval is None else "[{:+.1f}, {:+.1f}]".format(*(100 * end for end in interval))


def _points(difference: BatchMean) -> str:
    if difference.mean is None:
        return "[not defined]"
    return f"{100 * difference.mean:+.1f} points {percent_text(difference.interval)}"


def _over(value: float | None, bound: float) -> bool | None:
    return None if value is None else value > bound
