"""What holds of the paper's gradient paradox in a run: one sentence a claim, decided by an interval or a test.

The paper says that rocks have small gradients each but own much of the total, point along the global direction, and do
not move; it guesses that Adam suppresses them. Each claim is an inequality here:

    small       a rock's ‖g‖ per occurrence < that of a rare type of as high a kl         interval of the ratio
    total       share of Σ‖g‖ > share of the tokens                                       interval of the ratio
    direction   cos(ḡ_v, R) of most rocks > 0.1, and of rocks > that of other types       sign test, Mann–Whitney
    kept        most rocks kept more than 3/4 of their kl, on the same tokens             sign test over rocks
    unmoved     the set kept more than 3/4 of its kl                                      interval
    parameters  signed share of the parameter gradient > share of the tokens              interval over batches
    adam        share of Adam's step < share of the gradient                              interval, sign test of batches
    cancels     alignment of most rocks < 1/2: averaging leaves less than half            sign test over rocks
    persists    ḡ_v of most rocks turned by less than 45° in between, noise corrected     sign test over rocks

1. Sign tests over rocks count a direction once, however many rocks share it (``verdicts``).
2. A claim of two parts holds if both do, and does not hold if one of them does not.
3. Every claim is judged at 5 % on its own: of nine without any effect, one or more are decided one time in three.

Against all other tokens, "small each" would be the negation of "own more than their share", which is why it is said
beside the types of the highest mean kl; if their kl is lower than the rocks', so is their gradient, and nothing can be
told. R is the balanced sum of the types that are no rocks: a large gradient points along a total of which it is much,
and rocks that can stand in for each other point along each other. Where one type makes up most of R, it is that type's
direction and no other's, and nothing can be told either.

Paper: https://arxiv.org/abs/2605.09253
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rocktokens.gradients.verdicts import ALPHA, UNKNOWN, Interval, Tally, Verdict, above, below, both, p_text
from rocktokens.types import KEPT

LEAST_BATCHES = 4
"""For a verdict by an interval over batches."""
HALF_LEFT = 0.5
"""The alignment at which the mean of many gradients is half as long as they are."""
ALONG = 0.1
"""The least cosine of what points along something: a tenth of its length does."""
SAME_WAY = math.cos(math.pi / 4)
HALF_OF_IT = 0.5
"""The share of a sum of gradients above which its direction is that of one of them."""
ROCKS, RARE, CONTROL = "rocks", "rare high-kl", "control"
_NOT_PAIRED = "no other checkpoint scored the same tokens"
_NO_BATCH = "the rocks or the gradient are missing from every batch"
_OF_ADAM: dict[str, Verdict] = {"suppresses": "holds", "amplifies": "does not hold", "cannot be told": UNKNOWN}


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of the paper and what the numbers say of it."""

    name: str
    claim: str
    because: str
    verdict: Verdict

    @property
    def sentence(self) -> str:
        """All of it."""
        return f"{self.claim}: {self.because}: {self.verdict}"

    def to_record(self) -> dict[str, str]:
        """As JSON, the sentence included."""
        return {**asdict(self), "sentence": self.sentence}


def judge(record: dict[str, Any]) -> list[Claim]:
    """Every claim, from the content of gradients.json."""
    trace, logit, parameter = record["trace"], record["logit"], record["parameter"]
    vocabulary = logit["reference"]["vocabulary"]
    rocks, update = vocabulary["rocks"], parameter["shares"]["update"]
    return [
        small(trace["rare_high_kl"]),
        total(trace["norm_ratios"]["all"], trace["groups"][ROCKS]),
        direction(vocabulary["direction"], rocks),
        kept(trace["rocks_kept"], rocks),
        unmoved(trace["groups"][ROCKS]["change"]),
        parameters(parameter["excess"][ROCKS], parameter["shares"]["gradient"]["all"]["groups"][ROCKS]["share"]),
        adam(update and update["effects"]),
        cancels(rocks, vocabulary["others"]["coherence"]),
        persists(logit["persistence"] and logit["persistence"]["vocabulary"]["rocks"]["corrected"], rocks),
    ]


def small(rare: dict[str, Any]) -> Claim:
    """``rare``: the types of the highest kl that are no rocks, and the ratio of a rock's mean norm to theirs."""
    claim, ratio = "rocks have small gradients each", rare["norm_ratio"]
    if ratio["ratio"] is None:
        return Claim(
            "small", claim, "no rare high-kl type has a gradient on these prompts to compare them with", UNKNOWN
        )
    because = (
        f"in logit space an occurrence of a rock has {ratio['ratio']:.2f} × {interval_text(ratio['interval'])} the "
        "gradient norm of one of a rare high-kl type"
    )
    if rare["kl"] < rare["rocks_kl"]:
        because += (
            f", but no rare types of so high a kl recur: the {rare['n_types']} of the highest have {rare['kl']:.3f} "
            f"nats a token on these prompts, rocks {rare['rocks_kl']:.3f}"
        )
        return Claim("small", claim, because, UNKNOWN)
    return Claim("small", claim, because, below(ratio["interval"], 1.0))


def total(ratio: dict[str, Any], rocks: dict[str, Any]) -> Claim:
    """``ratio``: of the rocks' mean norm to that of all tokens, which is share of Σ‖g‖ over share of tokens."""
    claim = "they own more of the total than their share of the tokens"
    if ratio["ratio"] is None:
        return Claim("total", claim, "there is no gradient on these prompts", UNKNOWN)
    because = (
        f"they are {_percent(rocks['token_share'])} of the tokens and have {_percent(rocks['norm_share'])} of Σ‖g‖ in "
        f"logit space, {ratio['ratio']:.2f} × {interval_text(ratio['interval'])} as much"
    )
    return Claim("total", claim, because, above(ratio["interval"], 1.0))


def direction(test: dict[str, Any], rocks: dict[str, Any]) -> Claim:
    """``test``: Mann–Whitney's of rocks against other types on their cosines with R, and the largest part of R."""
    claim, p = "they point along the global direction", test["p"]
    if p is None:
        return Claim("direction", claim, "there are no other types to compare the rocks with", UNKNOWN)
    tally = Tally.of([_over(value, ALONG) for value in rocks["cos_others"]], rocks["direction"])
    because = (
        f"{tally.yes} of {tally.known} rocks have a cosine above {ALONG:g} with the balanced sum of the types that are "
        f"no rocks ({tally.text}); their median is {test['median_first']:.2f}, that of other types "
        f"{test['median_second']:.2f} (Mann–Whitney p {p_text(p)}, {test['n_second']} types)"
    )
    if (largest := test["largest"])["share"] > HALF_OF_IT:
        because += (
            f"; but {_percent(largest['share'])} of that sum is one type (token {largest['token_id']}, occurrences: "
            f"{largest['freq']}), which is no global direction"
        )
        return Claim("direction", claim, because, UNKNOWN)
    larger: Verdict = UNKNOWN if p > ALPHA else "holds" if test["superiority"] > 0.5 else "does not hold"
    return Claim("direction", claim, because, both(larger, tally.verdict))


def kept(shares: dict[str, Any] | None, rocks: dict[str, Any]) -> Claim:
    """``shares``: what share of its kl each rock kept, over the same tokens."""
    claim = "each rock keeps its kl"
    if shares is None:
        return Claim("kept", claim, _NOT_PAIRED, UNKNOWN)
    direction_of = dict(zip(rocks["token_id"], rocks["direction"], strict=True))
    known = {
        token_id: share
        for token_id, share in zip(shares["token_id"], shares["kept"], strict=True)
        if share is not None and token_id in direction_of
    }
    tally = Tally.of([share > KEPT for share in known.values()], [direction_of[token_id] for token_id in known])
    because = f"{tally.yes} of {tally.known} rocks kept more than {100 * KEPT:.0f} % on the same tokens ({tally.text})"
    return Claim("kept", claim, because, tally.verdict)


def unmoved(change: dict[str, Any] | None) -> Claim:
    """``change``: of the rocks' kl between the checkpoints, over the same tokens."""
    claim = "as a set they do not move"
    if change is None or change["relative"] is None:
        return Claim("unmoved", claim, _NOT_PAIRED, UNKNOWN)
    interval = change["relative_interval"]
    because = (
        f"on the same tokens their kl went from {change['kl_before']:.3f} to {change['kl_after']:.3f} nats a token, "
        f"{100 * change['relative']:+.1f} % {percent_text(interval)}, where a fall by {100 * (1 - KEPT):.0f} % counts "
        "as moving"
    )
    return Claim("unmoved", claim, because, above(interval, KEPT - 1))


def parameters(excess: dict[str, Any], share: dict[str, Any]) -> Claim:
    """``excess``: signed share of the gradient less share of the tokens, by batch."""
    claim = "they own more of the gradient in parameter space than their share of the tokens"
    if excess["mean"] is None:
        return Claim("parameters", claim, _NO_BATCH, UNKNOWN)
    because = (
        f"their signed share of the gradient is {_percent(share['mean'])}, {100 * excess['mean']:+.1f} points "
        f"{percent_text(excess['interval'])} from their share of the tokens, batch by batch"
    )
    return Claim("parameters", claim, because, above(_over_batches(excess), 0.0))


def adam(effects: dict[str, Any] | None) -> Claim:
    """``effects``: by group, share of Adam's step less share of the gradient; None without the optimizer's state."""
    claim = "Adam suppresses them"
    if effects is None:
        return Claim("adam", claim, "this checkpoint has no optimizer state, so only the gradient is known", UNKNOWN)
    own, control = effects[ROCKS], effects.get(CONTROL)
    difference = own["difference"]
    if difference["mean"] is None:
        return Claim("adam", claim, _NO_BATCH, UNKNOWN)
    beside = "there is no control" if control is None else f"that of the control by {_points(control['difference'])}"
    because = (
        f"their share of the optimizer's step differs from their share of the gradient by {_points(difference)}, and "
        f"is the smaller one in {own['below']} of {own['below'] + own['above']} batches (sign test p "
        f"{p_text(own['p'])}); {beside}"
    )
    return Claim("adam", claim, because, _OF_ADAM[own["verdict"]])


def cancels(rocks: dict[str, Any], others: float | None) -> Claim:
    """``rocks``: alignment and coherence of each one's occurrences; ``others``: the median coherence of other types."""
    claim = "a rock is pushed in different directions, so that its pushes cancel"
    repeated = [value is not None for value in rocks["coherence"]]
    if not any(repeated):
        return Claim("cancels", claim, "no rock occurs twice on these prompts", UNKNOWN)
    left = [value if again else None for value, again in zip(rocks["alignment"], repeated, strict=True)]
    tally = Tally.of([None if value is None else value < HALF_LEFT for value in left], rocks["direction"])
    because = (
        f"averaging leaves less than half of the push on {tally.yes} of {tally.known} rocks ({tally.text}); the median "
        f"coherence of a rock is {np.median(_known(rocks['coherence'])):.2f}, that of another type "
        f"{'not defined' if others is None else f'{others:.2f}'}"
    )
    return Claim("cancels", claim, because, tally.verdict)


def persists(corrected: Sequence[float | None] | None, rocks: dict[str, Any]) -> Claim:
    """``corrected``: cosine of each rock's mean gradients at both checkpoints, freed of what the sample adds."""
    claim = "each rock is pushed the same way at both checkpoints"
    if not corrected or not _known(corrected):
        return Claim("persists", claim, "no rock has a direction at two checkpoints to compare", UNKNOWN)
    tally = Tally.of([_over(value, SAME_WAY) for value in corrected], rocks["direction"])
    because = (
        f"of the {tally.known} of {len(corrected)} rocks whose direction two halves of the prompts agree on, "
        f"{tally.yes} turned by less than 45° (median cosine {np.median(_known(corrected)):.2f}, noise corrected; "
        f"{tally.text})"
    )
    return Claim("persists", claim, because, tally.verdict)


def interval_text(interval: Interval | None) -> str:
    """An interval, or that there is none."""
    return "[no interval]" if interval is None else "[{:.2f}, {:.2f}]".format(*interval)


def percent_text(interval: Interval | None) -> str:
    """Likewise, in hundredths."""
    return "[no interval]" if interval is None else "[{:+.1f}, {:+.1f}]".format(*(100 * end for end in interval))


def _over_batches(estimate: dict[str, Any]) -> Interval | None:
    """The interval, if enough batches have a value."""
    defined = sum(value is not None for value in estimate["values"])
    return estimate["interval"] if defined >= LEAST_BATCHES else None


def _points(estimate: dict[str, Any]) -> str:
    if estimate["mean"] is None:
        return "[not defined]"
    return f"{100 * estimate['mean']:+.1f} points {percent_text(estimate['interval'])}"


def _over(value: float | None, bound: float) -> bool | None:
    return None if value is None else value > bound


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _percent(share: float | None) -> str:
    return "—" if share is None else f"{100 * share:.1f} %"
