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

from rocktokens.report.runs import RunView
from rocktokens.report.text import printable, visible
from rocktokens.report.wording import (
    ban_name,
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
from rocktokens.types import RockSet, RockToken

KEPT = 0.75
"""A type that keeps more than this share of its kl has not been moved by training."""
SURE = 0.95
"""A rock that is one in this share of the resamples is a sure one."""
NAMED, NAMED_PILLARS, NAMED_ARMS = 6, 4, 3
"""How many tokens, pillars and arms a sentence names."""


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
        _answer("Do they matter?", matter(run.knockout) if run.knockout else "", ("knockout.json",), "knockout"),
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
    known = [token.p_in_top_k for token in rocks.tokens if token.p_in_top_k is not None]
    parts = []
    if known:
        certain = sum(p >= SURE for p in known)
        share = percent(SURE, 0)
        parts.append(f"{certain} of the {len(rocks.tokens)} stay rocks in at least {share} of resamples of the prompts")
    if found:
        parts += [*_repeats(found), *_depends(found["sensitivity"])]
    if not parts:
        return "Not known: the prompts were too few to resample."
    sentence = "; ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}."


def moved(rocks: RockSet) -> str:
    """The paired change of the kl of rocks and of the rest."""
    summary, criterion = rocks.summary, rocks.criterion
    if summary.get("kl_change_rocks") is None:
        return "Not known: no earlier checkpoint scored the same tokens, so there is no before and after."
    kept = [token for token in rocks.tokens if _keeps(token)]
    changes = {name: _change(summary, f"kl_change_{name}") for name in ("rocks", "rest")}
    return (
        f"From checkpoint {criterion['baseline']} to {criterion['reference']}, on the same tokens, the loss of the "
        f"rocks changed by {changes['rocks']} to {decimal(summary['mean_kl_rocks'], 3)} nats a token and that of all "
        f"others by {changes['rest']} to {decimal(summary['mean_kl_rest'], 3)}; {len(kept)} of the "
        f"{len(rocks.tokens)} rocks kept more than {percent(KEPT, 0)} of theirs."
    )


def matter(knockout: dict[str, Any]) -> str:
    """What bans did, beside what placebos did."""
    tested = [own for own in knockout["knockouts"] if own["ban"]["role"] == "tested"]
    placebos = [own for own in knockout["knockouts"] if own["ban"]["role"] == "matched"]
    baseline, margin = knockout["baseline"], 100 * knockout["settings"]["margin"]
    kinds = {verdict: [own for own in tested if own["verdict"] == verdict] for verdict in VERDICTS}
    said = [
        f"{len(own)} {says.format(margin=f'{margin:g}')}{_named_pillars(own) if verdict == 'pillar' else ''}"
        for (verdict, says), own in zip(VERDICTS.items(), kinds.values(), strict=True)
        if own
    ]
    answers = counted(baseline["n_prompts"] * baseline["num_samples"], "answer")
    return (
        f"Of {counted(len(tested), 'ban')} while decoding, {listed(said) if said else 'none has a verdict'}, where "
        f"{with_interval(percent(baseline['accuracy']), hundredths(baseline['interval']))} of {answers} are right "
        f"without a ban; {_placebo_part(placebos)}."
    )


def gain(study: dict[str, Any]) -> str:
    """What other weights did to accuracy at equal steps, and what they saved."""
    compared = [
        own for own in study["comparisons"] if own["kind"] == "equal_steps" and own["second"] == study["baseline"]
    ]
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


VERDICTS = {
    "pillar": "cost accuracy",
    "stumbling": "improve it",
    "neutral": "change it by less than {margin} points either way",
    "undecided": "cannot be told on these prompts",
}


def _answer(question: str, sentence: str, sources: tuple[str, ...], verb: str) -> Answer:
    if sentence:
        return Answer(question, sentence, sources)
    return Answer(question, f"Not known yet: this part was not run (rocktokens {verb}).", ())


def _sureness(run: RunView) -> tuple[str, tuple[str, ...]]:
    if run.rocks is None:
        return "", ()
    return sure(run.rocks, run.find), ("rocks.json", "find.json") if run.find else ("rocks.json",)


def _share(summary: dict[str, Any], name: str) -> str:
    return with_interval(percent(summary.get(name)), hundredths((summary.get("intervals") or {}).get(name)))


def _change(summary: dict[str, Any], name: str) -> str:
    interval = signed_hundredths((summary.get("intervals") or {}).get(name))
    return with_interval(signed_percent(summary.get(name)), interval)


def _keeps(token: RockToken) -> bool:
    return token.held_out_change is not None and 1 + token.held_out_change > KEPT


def _repeats(found: dict[str, Any]) -> list[str]:
    """How much of the set random subsets of the prompts have in common with it."""
    at_k = [point for point in found["cutoff"]["curve"] if point["k"] == found["cutoff"]["k"]]
    return [
        f"random halves of the prompts agree with the set to {decimal(point['stability'], 2)} "
        f"[{decimal(point['stability_low'], 2)}, {decimal(point['stability_high'], 2)}] (Jaccard)"
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


def _named_pillars(own: list[dict[str, Any]]) -> str:
    """The pillars by name with what their bans cost, the costliest first."""
    known = sorted((one for one in own if one["delta"] is not None), key=lambda one: one["delta"])
    names = [
        f"{quoted(ban_name(one['ban']))} {with_interval(points(one['delta']), signed_hundredths(one['interval']))}"
        for one in known[:NAMED_PILLARS]
    ]
    if not names:
        return ""
    rest = len(own) - len(names)
    return f" (points: {', '.join([*names, f'{rest} more'] if rest else names)})"


def _placebo_part(placebos: list[dict[str, Any]]) -> str:
    if not placebos:
        return "no other type as frequent was banned to compare with"
    pillars = sum(own["verdict"] == "pillar" for own in placebos)
    return f"of {counted(len(placebos), 'other type')} as frequent, {pillars} cost accuracy"


def _arm_part(own: dict[str, Any], arm: dict[str, Any]) -> str:
    change = with_interval(points(own["difference"]), signed_hundredths(own["interval"]))
    verdict = own["verdict"]
    if verdict == "undecided" and own["detectable"] is not None:
        verdict = f"undecided, ±{100 * own['detectable']:.1f} could have been seen"
    saved = arm["facts"].get("head_compute_saved")
    cost = f", with {percent(saved)} of the head's work saved" if saved else ""
    return f"{printable(own['first'])} {change}, {verdict}{cost}"
