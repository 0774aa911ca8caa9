"""The answer in five sentences, made from the numbers a run holds.

1. Which tokens are rocks, and how much of everything are they?
2. How sure is that?
3. Did training move them?
4. Do they matter for the answers?
5. What is gained by leaving them out of the loss?

Each sentence has its intervals and names the files it is made from; where a part was not run, it says so and names the
command that runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rocktokens.display.numbers import (
    as_a_set,
    counted,
    decimal,
    hundredths,
    listed,
    percent,
    points,
    quoted,
    signed_hundredths,
    signed_percent,
    with_interval,
)
from rocktokens.display.text import printable, visible
from rocktokens.report.page.ban_answer import matter
from rocktokens.report.views.run_view import RunView
from rocktokens.rocks.cutoff import BAND
from rocktokens.types import KEPT, SURE, RockSet

NAMED, NAMED_ARMS = 6, 3
"""How many tokens and arms a sentence names."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One question, its answer, and the files of the run it was read from."""

    question: str
    sentence: str
    sources: tuple[str, ...]
    """Empty where nothing is known."""

    @property
    def known(self) -> bool:
        """Whether the part of the run that answers this was run."""
        return bool(self.sources)


def five_answers(run: RunView) -> tuple[Answer, ...]:
    """The answers for one run, in the order a reader asks."""
    return (
        _answer("Which tokens?", which(run.rocks) if run.rocks else "", ("rocks.json",), "find"),
        _answer("How sure is that?", *_sureness(run), "find"),
        _answer("Did training move them?", moved(run.rocks) if run.rocks else "", ("rocks.json",), "find"),
        _answer("Do they matter?", *_mattering(run)),
        _answer("What do I gain?", gain(run.study) if run.study else "", ("study.json",), "study"),
    )


def which(rocks: RockSet) -> str:
    """The rocks by name, and their shares with intervals."""
    summary, checkpoint = rocks.summary, rocks.criterion["reference"]
    if not rocks.tokens:
        return f"No token type is a rock at checkpoint {checkpoint}: none passes the criterion."
    names = [quoted(visible(token.text)) for token in rocks.tokens[:NAMED]]
    rest = len(rocks.tokens) - len(names)
    named = listed([*names, f"{rest} more"] if rest else names)
    return (
        f"{len(rocks.tokens):,} of the {summary['n_types']:,} token types used at checkpoint {checkpoint} are rocks "
        f"({named}): {_share(summary, 'token_share')} of the tokens, which hold {_share(summary, 'kl_share')} of the "
        f"loss that is left ({summary['measured_on']}, {counted(summary['n_prompts'], 'prompt')}, 95 % intervals)."
    )


def sure(rocks: RockSet, found: dict[str, Any] | None) -> str:
    """How often the same rocks come up with other prompts and other settings."""
    if not rocks.tokens:
        return "There are no rocks whose place could be in doubt."
    known = [token.p_in_top_k for token in rocks.tokens if token.p_in_top_k is not None]
    parts = []
    if known:
        certain = sum(p >= SURE for p in known)
        share = percent(SURE, 0)
        parts.append(f"{certain} of the {len(rocks.tokens)} stay rocks in at least {share} of resamples of the prompts")
    if found:
        parts += [*_uncut(rocks, found["cutoff"]), *_repeats(found["cutoff"]), *_depends(found["sensitivity"])]
    if not parts:
        return "Not known: the prompts were too few to resample."
    sentence = "; ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}."


def moved(rocks: RockSet) -> str:
    """The paired change of the kl of rocks and of the rest, together and one by one."""
    summary, criterion = rocks.summary, rocks.criterion
    if not rocks.tokens:
        return "There are no rocks to follow through training."
    if summary.get("kl_change_rocks") is None:
        return "Not known: no earlier checkpoint scored the same tokens, so there is no before and after."
    changes = {name: _change(summary, f"kl_change_{name}") for name in ("rocks", "rest")}
    whole = (
        f"From checkpoint {criterion['baseline']} to {criterion['reference']}, on the same tokens, the loss of the "
        f"rocks changed by {changes['rocks']} to {decimal(summary['mean_kl_rocks'], 3)} nats a token and that of all "
        f"others by {changes['rest']} to {decimal(summary['mean_kl_rest'], 3)}"
    )
    verdict = as_a_set(summary.get("intervals") or {})
    return f"{'; '.join(filter(None, (whole, verdict, _kept_part(rocks))))}."


def gain(study: dict[str, Any]) -> str:
    """What other weights did to accuracy at equal steps, and what they saved."""
    at_equal_steps = [own for own in study["comparisons"] if own["kind"] == "equal_steps"]
    compared = [own for pair in at_equal_steps if (own := _against(study["baseline"], pair)) is not None]
    if not compared:
        return "Not known: the study compared no arm with its baseline at equal steps."
    arms = {arm["name"]: arm for arm in study["arms"]}
    parts = [_arm_part(own, arms[own["first"]]) for own in compared[:NAMED_ARMS]]
    if more := len(compared) - len(parts):
        parts.append(f"{more} more below")
    end = arms[study["baseline"]]["points"][-1]
    level = percent(1 - study["alpha"], 0)
    better = [printable(own["first"]) for own in compared if own["verdict"] == "better"]
    return (
        f"{f'A gain with {listed(better)}' if better else 'No sure gain'}: against "
        f"{printable(study['baseline'])}, which reaches "
        f"{with_interval(percent(end['accuracy']), hundredths(end['interval']))} after {end['step']:,} steps, "
        f"{'; '.join(parts)} (points of accuracy, {level} intervals, {counted(len(study['seeds']), 'seed')})."
    )


TURNED = {"better": "worse", "worse": "better"}


def _answer(question: str, sentence: str, sources: tuple[str, ...], verb: str) -> Answer:
    if sentence:
        return Answer(question, sentence, sources)
    return Answer(question, f"Not known yet: this part was not run (rocktokens {verb}).", ())


def _sureness(run: RunView) -> tuple[str, tuple[str, ...]]:
    if run.rocks is None:
        return "", ()
    return sure(run.rocks, run.find), ("rocks.json", "find.json") if run.find else ("rocks.json",)


def _mattering(run: RunView) -> tuple[str, tuple[str, ...], str]:
    if run.knockout and run.rocks:
        return matter(run.knockout, run.rocks), ("knockout.json", "rocks.json"), ""
    return "", (), "find" if run.knockout else "knockout"


def _share(summary: dict[str, Any], name: str) -> str:
    return with_interval(percent(summary.get(name)), hundredths((summary.get("intervals") or {}).get(name)))


def _change(summary: dict[str, Any], name: str) -> str:
    interval = signed_hundredths((summary.get("intervals") or {}).get(name))
    return with_interval(signed_percent(summary.get(name)), interval)


def _kept_part(rocks: RockSet) -> str:
    measured = [token.kept for token in rocks.tokens if token.kept is not None]
    if not measured:
        return "what each of them did was not measured"
    rest = len(rocks.tokens) - len(measured)
    whose = f"the {len(rocks.tokens)} rocks" if not rest else f"the {len(measured)} rocks that could be measured"
    return f"{sum(measured)} of {whose} kept more than {percent(KEPT, 0)} of theirs"


def _uncut(rocks: RockSet, cutoff: dict[str, Any]) -> list[str]:
    """That K was to be found and was not."""
    crossing = cutoff["auto"]
    if rocks.criterion["k"] != "auto" or crossing is None or crossing["crossed"]:
        return []
    return [
        "K is all types with a score: no cut-off was found, so that it takes little more than a score to stay a rock"
    ]


def _repeats(cutoff: dict[str, Any]) -> list[str]:
    """How much of the set random subsets of the prompts have in common with it."""
    at_k = [point for point in cutoff["curve"] if point["k"] == cutoff["k"]]
    share = percent(BAND[1] - BAND[0], 0)
    return [
        f"random halves of the prompts that selected them agree with the set to {decimal(point['stability'], 2)} "
        f"(Jaccard; {share} of halves between {decimal(point['stability_low'], 2)} and "
        f"{decimal(point['stability_high'], 2)})"
        for point in at_k
        if point.get("stability") is not None
    ]


def _depends(sensitivity: Sequence[dict[str, Any]]) -> list[str]:
    """The setting that changes the set most."""
    moved_ones = [own for own in sensitivity if not own["default"] and own["jaccard"] is not None]
    if not moved_ones:
        return []
    most = min(moved_ones, key=lambda own: own["jaccard"])
    return [
        f"of all settings, moved one at a time, {most['parameter']} = {most['value']} changes the set most "
        f"({decimal(most['jaccard'], 2)})"
    ]


def _against(baseline: str, pair: dict[str, Any]) -> dict[str, Any] | None:
    """A comparison as that of another arm with the baseline, whichever of them came first; None without baseline."""
    if pair["second"] == baseline:
        return pair
    if pair["first"] != baseline:
        return None
    low, high = pair["interval"]
    return {
        **pair,
        "first": pair["second"],
        "second": baseline,
        "difference": -pair["difference"],
        "interval": [-high, -low],
        "verdict": TURNED.get(pair["verdict"], pair["verdict"]),
    }


def _arm_part(own: dict[str, Any], arm: dict[str, Any]) -> str:
    change = with_interval(points(own["difference"]), signed_hundredths(own["interval"]))
    verdict = own["verdict"]
    if verdict == "undecided" and own["detectable"] is not None:
        verdict = f"undecided, ±{100 * own['detectable']:.1f} could have been seen"
    saved = arm["facts"].get("head_compute_saved")
    cost = f", with {percent(saved)} of the head's work saved" if saved else ""
    return f"{printable(own['first'])} {change}, {verdict}{cost}"
