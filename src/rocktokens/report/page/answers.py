"""Five short answers, made from the numbers a run holds.

1. Which tokens are rocks, and how much of everything are they?
2. How sure is that?
3. Did training move them?
4. Do they matter for the answers?
5. What is gained by leaving them out of the loss?

Each starts with its conclusion; numbers with their intervals follow, and the files it is made from. Where a part was
not run, the answer says so and names the command that runs it, or why none can.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rocktokens.config import checkpoint_label
from rocktokens.config.checkpoints import NO_NAMES
from rocktokens.display.numbers import (
    about,
    counted,
    decimal,
    interval,
    level,
    listed,
    percent,
    points,
    quoted,
    signed_percent,
    with_interval,
)
from rocktokens.display.rocks import label_sentence, movement_sentence, share_sentence
from rocktokens.display.text import printable
from rocktokens.knockout.records import Ban, Knockout, KnockoutSettings, KnockoutSweep
from rocktokens.report.knockout_notes import states_sentence
from rocktokens.report.tables import KINDS, ban_name, detectable
from rocktokens.rocks.cutoff import BAND
from rocktokens.rocks.records import FindRecord
from rocktokens.studies.records import Arm, Comparison, StudyResult
from rocktokens.types import SURE, RockSet

if TYPE_CHECKING:
    from rocktokens.report.views.classes import ClassView
    from rocktokens.report.views.run_view import RunView

NAMED, NAMED_BANS, NAMED_ARMS = 6, 4, 3
"""How many tokens, bans and arms an answer names."""
EFFECTS = {"pillar": ("costs", "cost"), "stumbling": ("improves", "improve")}
TURNED = {"better": "worse", "worse": "better"}


@dataclass(frozen=True, slots=True)
class Answer:
    """One question, its answer, and the files of the run it was read from."""

    question: str
    sentence: str
    """The conclusion, then what it rests on."""
    sources: tuple[str, ...]
    """Empty where nothing is known."""

    @property
    def known(self) -> bool:
        """Whether the part of the run that answers this was run."""
        return bool(self.sources)


def five_answers(run: "RunView") -> tuple[Answer, ...]:
    """Answer the five questions for one run, in the order a reader asks."""
    rocks, find, knockout, study = run.rocks, run.find, run.knockout, run.study
    sure_of = ("rocks.json", "find.json") if find else ("rocks.json",)
    asked = (
        ("Which tokens?", which(rocks, run.checkpoint_names) if rocks else "", ("rocks.json",), "find"),
        ("How sure is that?", sure(rocks, find) if rocks else "", sure_of, "find"),
        ("Did training move them?", moved(rocks, run.checkpoint_names) if rocks else "", ("rocks.json",), "find"),
        (
            "Do they matter?",
            matter(knockout, rocks) if knockout and rocks else "",
            ("knockout.json", "rocks.json"),
            "find" if knockout else "knockout",
        ),
        ("What do I gain?", gain(study) if study else "", ("study.json",), "study"),
    )
    return tuple(
        Answer(question, sentence, sources) if sentence else Answer(question, _unknown(run, verb), ())
        for question, sentence, sources, verb in asked
    )


def _unknown(run: "RunView", verb: str) -> str:
    """Name the command that would answer, or say why there is none."""
    if run.ungraded and verb in ("knockout", "study"):
        return f"Not known: {printable(run.ungraded)}."
    return f"Not known yet: run `rocktokens {verb}`."


# Which tokens, how sure, did training move them


def which(rocks: RockSet, names: Mapping[int, str] = NO_NAMES) -> str:
    """Name the rocks and give their shares; ``names`` are those of checkpoints that have one."""
    return share_sentence(rocks, NAMED, names)


def sure(rocks: RockSet, found: FindRecord | None) -> str:
    """Say how often the same rocks come up with other prompts and other settings."""
    if not rocks.tokens:
        return "There are no rocks whose place could be in doubt."
    known = [token.p_in_top_k for token in rocks.tokens if token.p_in_top_k is not None]
    parts = []
    if known:
        stable = sum(p >= SURE for p in known)
        parts.append(
            f"{stable} of {counted(len(rocks.tokens), 'rock')} {'is' if stable == 1 else 'are'} stable: "
            f"in at least {percent(SURE, 0)} of resamples of the prompts."
        )
    if found:
        parts += _stability(rocks, found)
    return " ".join(parts) or "Not known: the prompts were too few to resample."


def _stability(rocks: RockSet, found: FindRecord) -> Iterator[str]:
    """Say that no cut-off was found where one was wanted, how far halves of the prompts agree, what matters most."""
    cutoff, crossing = found.cutoff, found.cutoff.auto
    if rocks.criterion["k"] == "auto" and crossing is not None and not crossing.crossed:
        yield "No cut-off was found: K is all types with a score, so it takes little to stay a rock."
    for point in cutoff.curve:
        if point.k == cutoff.k and point.stability is not None:
            yield (
                "Random halves of the prompts that selected them agree with the set to "
                f"{decimal(point.stability, 2)} (Jaccard; {percent(BAND[1] - BAND[0], 0)} of halves between "
                f"{decimal(point.stability_low, 2)} and {decimal(point.stability_high, 2)})."
            )
    others = [own for own in found.sensitivity if not own.default and own.jaccard is not None]
    if others:
        most = min(others, key=lambda own: own.jaccard or 0.0)
        yield (
            f"The setting that changes the set most is {most.parameter} = {most.value} (Jaccard "
            f"{decimal(most.jaccard, 2)})."
        )


def moved(rocks: RockSet, names: Mapping[int, str] = NO_NAMES) -> str:
    """Give the paired change of the kl of rocks and of other tokens, together and one by one."""
    summary = rocks.summary
    if not rocks.tokens:
        return "There are no rocks to follow through training."
    if summary.get("kl_change_rocks") is None:
        return "Not known: no earlier checkpoint scored the same tokens, so there is no before and after."
    intervals = summary.get("intervals") or {}
    own, rest = (
        with_interval(summary.get(name), intervals.get(name), signed_percent)
        for name in ("kl_change_rocks", "kl_change_rest")
    )
    before, now = (checkpoint_label(rocks.criterion[name], names) for name in ("baseline", "reference"))
    whole = (
        f"From checkpoint {before} to {now}, on the same tokens, the loss of rocks changed by {own} to "
        f"{decimal(summary['mean_kl_rocks'], 3)} nats per token, that of other tokens by {rest} to "
        f"{decimal(summary['mean_kl_rest'], 3)}."
    )
    is_labelled = any(token.label for token in rocks.tokens)
    remedy = "" if is_labelled else "Single rocks have no labels: run `rocktokens find` again."
    return " ".join(filter(None, (label_sentence(rocks), movement_sentence(rocks), whole, remedy)))


# Choice and decision


def choice(run: "RunView", views: "Sequence[ClassView]") -> str:
    """Say which classes of a run are interchangeable, and how much of the loss is a choice within them."""
    known = run.find.choice if run.find else None
    if run.classes is not None and run.classes.groups and not run.classes.unrefuted.groups:
        share = "So there is no choice that could be left out."
    elif known is not None and run.classes is not None and known.classes_sha256 == run.classes.unrefuted.sha256:
        share = known.sentence
    elif run.teacher_label:
        share = f"How much of the loss is choice is not known: the teacher gave {run.teacher_label}."
    elif run.splits_by_its_classes:
        share = "Run `rocktokens find` to see what share of the loss is choice."
    else:
        share = "The traces do not split the loss by these classes: run `rocktokens trace --classes`."
    return f"{states_sentence(own.state for own in views)} {share}"


# Do they matter: what banning the rocks did
#
# 1. Only bans of rocks count, and placebos as frequent as a rock: a sweep may have banned other types too.
# 2. Of the verdicts that claim an effect, the answer says how many are left when p is corrected for the number of bans
#    (Benjamini-Hochberg, ``q`` of knockout.json).
# 3. Sets that were banned together stand by themselves.


def matter(sweep: KnockoutSweep, rocks: RockSet) -> str:
    """Say what bans of rocks did, one by one and together, beside what placebos did."""
    if not rocks.tokens:
        return "There are no rocks to ban."
    rock_ids = {token.id for token in rocks.tokens}
    sets = [own for own in sweep.knockouts if _is_about(own.ban, rock_ids) and len(own.ban.ids) > 1]
    alone, placebos = bans_of_rocks(sweep, rocks)
    if not alone and not sets:
        return f"Not known: none of {counted(len(rock_ids), 'rock')} was banned, only other types."
    baseline, alpha = sweep.baseline, sweep.settings.alpha
    right = with_interval(baseline.accuracy, baseline.interval)
    answers = counted(baseline.n_prompts * baseline.num_samples, "answer")
    parts = ["No rock was banned by itself."]
    if alone:
        parts = [*_alone_parts(alone, sweep.settings), placebo_sentence(placebos, alpha)]
    if sets:
        said = [f"{ban_name(own.ban)} {_change(own)}, {own.verdict}" for own in sets]
        parts.append(f"Banned together (points, {level(alpha)} intervals): {'; '.join(said)}.")
    parts.append(f"Without a ban, {right} of {answers} are right (95 % interval).")
    if alone and len(alone) < len(rock_ids):
        parts.append(f"{len(alone)} of {counted(len(rock_ids), 'rock')} {'was' if len(alone) == 1 else 'were'} banned.")
    return " ".join(parts)


def bans_of_rocks(sweep: KnockoutSweep, rocks: RockSet) -> tuple[list[Knockout], list[Knockout]]:
    """Return the bans of single rocks, and those of single types that are as frequent."""
    rock_ids = {token.id for token in rocks.tokens}
    single = [own for own in sweep.knockouts if own.ban.is_one_type and _is_about(own.ban, rock_ids)]
    return [own for own in single if own.ban.role == "tested"], [own for own in single if own.ban.role == "matched"]


def _is_about(ban: Ban, rock_ids: set[int]) -> bool:
    """Tell whether it bans rocks alone, or what is as frequent as rocks."""
    if ban.role == "tested":
        return rock_ids.issuperset(ban.ids)
    return ban.role == "matched" and (ban.beside is None or ban.beside in rock_ids)


def _alone_parts(alone: list[Knockout], settings: KnockoutSettings) -> Iterator[str]:
    alpha = settings.alpha
    by_verdict = {kind: [own for own in alone if own.verdict == kind] for kind in KINDS}
    claimed = [
        f"{len(own)} {verbs[len(own) != 1]} accuracy ({kind}; {_corrected(own, alpha)} for the number of bans"
        f"{_largest(own, alpha)})"
        for kind, verbs in EFFECTS.items()
        if (own := by_verdict[kind])
    ]
    banned = f"Of {counted(len(alone), 'rock')} banned one at a time"
    yield f"{banned}, {listed(claimed)}." if claimed else f"{banned}, none is shown to change accuracy."
    if count := len(by_verdict["neutral"]):
        margin = f"less than {100 * settings.margin:g} points either way"
        yield f"{count} {'is' if count == 1 else 'are'} neutral: banning changes accuracy by {margin}."
    if count := len(by_verdict["undecided"]):
        needs = [own.neutral_prompts for own in by_verdict["undecided"] if own.neutral_prompts is not None]
        enough = (
            f": about {about(max(needs))} prompts would be needed to call {'it' if count == 1 else 'them'} neutral"
            if needs
            else ""
        )
        yield f"{count} {'is' if count == 1 else 'are'} undecided on these prompts{enough}."


def _corrected(effects: list[Knockout], alpha: float) -> str:
    """Count the bans that keep their effect after correction; a sweep that stopped early has no p to correct."""
    qs = [own.q for own in effects]
    return "not corrected" if None in qs else f"{sum(q <= alpha for q in qs if q is not None)} after correction"


def _largest(effects: list[Knockout], alpha: float) -> str:
    """Name the bans with the largest effects, with what they did."""
    known = sorted((own for own in effects if own.delta is not None), key=lambda own: -abs(own.delta or 0.0))
    if not known:
        return ""
    names = [f"{quoted(ban_name(own.ban))} {_change(own)}" for own in known[:NAMED_BANS]]
    rest = len(effects) - len(names)
    return f"; points, {level(alpha)} intervals: {', '.join([*names, f'{rest} more'] if rest else names)}"


def placebo_sentence(placebos: Sequence[Knockout], alpha: float) -> str:
    """Say how many of the types that were banned to compare with cost accuracy."""
    if not placebos:
        return "No other type as frequent was banned to compare with."
    pillars = [own for own in placebos if own.verdict == "pillar"]
    correction = f" ({_corrected(pillars, alpha)})" if pillars else ""
    verb = "costs" if len(pillars) == 1 else "cost"
    return f"Of {counted(len(placebos), 'placebo')} as frequent, {len(pillars)} {verb} accuracy{correction}."


def _change(own: Knockout) -> str:
    return with_interval(own.delta, own.interval, points)


# What do I gain


def gain(study: StudyResult) -> str:
    """Say what other weights did to accuracy at equal steps, and what they saved."""
    compared = against_baseline(study)
    conclusion = gain_conclusion(study)
    if not compared:
        return conclusion
    baseline = study.arm(study.baseline)
    end = baseline.end
    reached = with_interval(end.accuracy, end.interval) + (" (unreliable)" if baseline.is_unreliable else "")
    parts = [
        conclusion,
        f"{printable(study.baseline)} reaches {reached} after {end.step:,} steps "
        f"({level(study.alpha)} intervals, {counted(len(study.seeds), 'seed')}).",
        *(_arm_part(own, study.arm(own.first)) for own in compared[:NAMED_ARMS]),
    ]
    if len(compared) > NAMED_ARMS:
        parts.append(f"{len(compared) - NAMED_ARMS} more below.")
    return " ".join(parts)


def gain_conclusion(study: StudyResult) -> str:
    """Say which arms collapsed, if any did, then name those that beat the baseline at equal steps.

    Pairs that the study was not about are named as exploratory.
    """
    compared = against_baseline(study)
    if not compared:
        return "Not known: the study compared no arm with its baseline at equal steps."
    better = [_named(own) for own in compared if own.verdict == "better"]
    baseline = printable(study.baseline)
    if better:
        shown = f"{listed(better)} {'is' if len(better) == 1 else 'are'} better than {baseline} at equal steps."
    else:
        shown = f"No arm is shown to be better than {baseline} at equal steps."
    return " ".join([*map(_collapse, study.collapsed_arms), shown])


def _collapse(arm: Arm) -> str:
    own = arm.collapsed
    if own is None:
        return ""
    share = with_interval(own.share, own.interval)
    runs = f"{own.count} of {counted(own.n_runs, 'run')}"
    return f"{runs} of {printable(arm.name)} collapsed ({share} ended below their start): its mean is unreliable."


def _named(own: Comparison) -> str:
    marks = ["exploratory"] if own.role == "exploratory" else []
    marks += ["unreliable mean"] if own.unreliable else []
    return printable(own.first) + (f" ({', '.join(marks)})" if marks else "")


def against_baseline(study: StudyResult) -> list[Comparison]:
    """Return the comparisons of other arms with the baseline at equal steps, whichever of the two came first."""
    found = []
    for pair in study.of_kind("equal_steps"):
        if pair.second == study.baseline:
            found.append(pair)
        elif pair.first == study.baseline and pair.difference is not None and pair.interval is not None:
            low, high = pair.interval
            found.append(
                replace(
                    pair,
                    first=pair.second,
                    second=study.baseline,
                    difference=-pair.difference,
                    interval=(-high, -low),
                    verdict=TURNED.get(pair.verdict, pair.verdict),
                )
            )
    return found


def _arm_part(own: Comparison, arm: Arm) -> str:
    parts = [f"{points(own.difference)} points {interval(own.interval, points)}", own.verdict]
    saved = arm.facts.get("head_compute_saved")
    parts += [f"{percent(saved)} of the LM head's work saved"] if saved else []
    sentence = f"{_named(own)}: {', '.join(parts)}."
    if own.verdict == "undecided" and own.could_be_called:
        sentence += f" Smallest effect this study could detect: {detectable(own)}."
    return sentence
