"""The first screen of a run: five questions as tiles, each with a number, a sentence and a state; and its first rocks.

A state is about one claim, by a rule on the numbers and never by how they read:

1. Rocks hold more of the loss than of the tokens: supported where the interval of their share of the loss lies above
   that of their share of the tokens, contradicted where it lies below.
2. Most rocks are stable: in at least ``SURE`` of the resamples of the prompts. Inconclusive where K was to be found by
   the data and was not.
3. Training never moved most rocks: stuck on both halves of the prompts. Contradicted where even with the unclear ones
   they are no majority.
4. Accuracy depends on some rock: a ban changes it after correction for the number of bans. Contradicted only where
   every rock was banned and all are neutral; undecided is not neutral.
5. Some arm beats the baseline at equal steps: in a primary pair whose mean is reliable. Contradicted where every pair
   is reliable and worse or equivalent.

Whatever is neither is inconclusive, and so are 1 to 3 where there are too few prompts to find rocks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rocktokens.display.numbers import (
    DASH,
    counted,
    decimal,
    percent,
    points,
    quoted,
    signed_percent,
    with_interval,
)
from rocktokens.display.rocks import label_meaning, label_text
from rocktokens.display.text import printable, visible
from rocktokens.knockout.records import Knockout, KnockoutSweep
from rocktokens.report.page.answers import Answer, against_baseline, bans_of_rocks
from rocktokens.report.tables import ban_name
from rocktokens.rocks.records import FindRecord
from rocktokens.studies.records import StudyResult
from rocktokens.types import KEPT, SURE, RockSet, Verdict

if TYPE_CHECKING:
    from rocktokens.report.views.run_view import RunView

State = Literal["supported", "contradicted", "inconclusive", "not run"]
SIGNS: dict[State, str] = {"supported": "✓", "contradicted": "✗", "inconclusive": "?", "not run": "–"}
NAMED_ROCKS = 20
"""Rocks of the first screen."""
VERDICTS: dict[Verdict, str] = {
    "pillar": "accuracy falls",
    "stumbling": "accuracy rises",
    "neutral": "accuracy stays within the margin",
    "undecided": "too few prompts to tell",
    "untested": "not tried yet",
}
CLAIMS = (
    "Rocks hold more of the loss than of the tokens.",
    "Most rocks are stable.",
    "Training never moved most rocks.",
    "Accuracy depends on some rock.",
    "Leaving tokens out of the loss improves accuracy.",
)


@dataclass(frozen=True, slots=True)
class Tile:
    """One question at a glance."""

    question: str
    claim: str
    """What the state is about."""
    state: State
    number: str
    unit: str
    sentence: str
    """One, conclusion first, with the interval."""
    section: str
    """Key of the section that shows more."""

    @property
    def sign(self) -> str:
        """Tells the state without its colour."""
        return SIGNS[self.state]

    @property
    def is_known(self) -> bool:
        """Whether the part of the run that decides it was run."""
        return self.state != "not run"

    @property
    def conclusion(self) -> str:
        """What its section begins with."""
        return f"{self.number} {self.unit}. {self.sentence}" if self.unit else self.sentence


@dataclass(frozen=True, slots=True)
class NamedRock:
    """A rock of the first screen."""

    id: int
    text: str
    label: str
    verdict: Verdict
    change: str
    """Of accuracy under its ban, in points with its interval; empty where it is not known."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a tile says of records that are there."""

    state: State
    number: str
    unit: str
    sentence: str


def five_tiles(run: "RunView", answers: Sequence[Answer]) -> tuple[Tile, ...]:
    """Make the tiles of a run; an answer that is not known stands as it is."""
    rocks, knockout, study = run.rocks, run.knockout, run.study
    found = (
        which_tile(rocks) if rocks else None,
        sure_tile(rocks, run.find) if rocks else None,
        moved_tile(rocks) if rocks else None,
        matter_tile(knockout, rocks) if knockout and rocks else None,
        gain_tile(study) if study else None,
    )
    keys = ("rocks", "sureness", "loss", "knockout", "study")
    return tuple(
        Tile(answer.question, claim, *_facts(own or Finding("not run", DASH, "", answer.sentence)), key)
        for answer, claim, own, key in zip(answers, CLAIMS, found, keys, strict=True)
    )


def _facts(own: Finding) -> tuple[State, str, str, str]:
    return own.state, own.number, own.unit, own.sentence


def named_rocks(rocks: RockSet) -> list[NamedRock]:
    """Return the first rocks with what is known of each."""
    return [
        NamedRock(
            token.id,
            visible(token.text),
            label_text(token),
            token.verdict,
            with_interval(token.delta, token.delta_interval, points) if token.delta is not None else "",
        )
        for token in rocks.tokens[:NAMED_ROCKS]
    ]


def terms_of(rocks: Sequence[NamedRock]) -> str:
    """Explain what a rock is, and the labels and verdicts of these."""
    if not rocks:
        return ""
    labels = dict.fromkeys(rock.label.removesuffix("?") for rock in rocks if rock.label)
    verdicts: dict[Verdict, None] = dict.fromkeys(rock.verdict for rock in rocks)
    said = [
        "A rock is a token type that holds much of the loss and is not shown to be still falling.",
        *([f"Label: {'; '.join(f'{own}, {label_meaning(own)}' for own in labels)}."] if labels else []),
        f"If banned: {'; '.join(f'{own}, {VERDICTS[own]}' for own in verdicts)}.",
        *(["?: other prompts do not confirm the label."] if any(rock.label.endswith("?") for rock in rocks) else []),
    ]
    return " ".join(said)


def which_tile(rocks: RockSet) -> Finding:
    """Count the rocks, and compare what they hold of the loss with what they are of the tokens."""
    summary, count = rocks.summary, len(rocks.tokens)
    number = f"{count:,} of {summary['n_types']:,}"
    unit = f"token types {'is a rock' if count == 1 else 'are rocks'}"
    few = rocks.too_few_prompts
    if not count:
        why = "the prompts are too few to tell" if few else "nothing is both expensive and no longer falling"
        return Finding("inconclusive" if few else "contradicted", number, unit, f"No token type is a rock: {why}.")
    ends: Mapping[str, Any] = summary.get("intervals") or {}
    kl, tokens = ends.get("kl_share"), ends.get("token_share")
    holds = with_interval(summary.get("kl_share"), kl)
    state = "inconclusive" if few else _order(tokens, kl)
    start = "Too few prompts, so perhaps by chance: they" if few else "They"
    share = percent(summary.get("token_share"))
    return Finding(state, number, unit, f"{start} hold {holds} of the loss that is left, with {share} of the tokens.")


def sure_tile(rocks: RockSet, found: FindRecord | None) -> Finding:
    """Count the rocks that come back when prompts are resampled."""
    known = [token.p_in_top_k for token in rocks.tokens if token.p_in_top_k is not None]
    if not known:
        return Finding("inconclusive", DASH, "", "Not known: there is nothing to resample.")
    stable, count = sum(p >= SURE for p in known), len(rocks.tokens)
    crossing = found.cutoff.auto if found else None
    is_open = rocks.criterion["k"] == "auto" and crossing is not None and not crossing.crossed
    at_k = [own for own in found.cutoff.curve if own.k == found.cutoff.k and own.stability is not None] if found else []
    halves = "".join(
        f"; random halves agree to {decimal(own.stability, 2)} "
        f"[{decimal(own.stability_low, 2)}, {decimal(own.stability_high, 2)}]"
        for own in at_k
    )
    state = "inconclusive" if is_open or rocks.too_few_prompts else _majority(stable, 0, count)
    how_many = {"supported": "Most", "contradicted": "Few"}.get(state, "Some")
    sentence = f"{how_many} come back in at least {percent(SURE, 0)} of prompt resamples{halves}."
    if is_open:
        sentence = f"No cut-off was found, so K is arbitrary. {sentence}"
    return Finding(state, f"{stable} of {count}", f"{'rock is' if stable == 1 else 'rocks are'} stable", sentence)


def moved_tile(rocks: RockSet) -> Finding:
    """Count the rocks that training never moved, and give the change of all of them together."""
    summary, count = rocks.summary, len(rocks.tokens)
    change = with_interval(
        summary.get("kl_change_rocks"), (summary.get("intervals") or {}).get("kl_change_rocks"), signed_percent
    )
    if not count or change == DASH:
        return Finding("inconclusive", DASH, "", "Not known: there is no before and after to compare.")
    labelled = all(token.label and token.held_out_label for token in rocks.tokens)
    if not labelled or rocks.too_few_prompts:
        return Finding(
            *("inconclusive", change.split(" [")[0], "change of the rocks' loss"),
            f"As a set, their loss changed by {change}; of single rocks too little is known.",
        )
    never = sum(token.never_learned for token in rocks.tokens)
    unclear = sum(token.label != token.held_out_label or token.label == "unclear" for token in rocks.tokens)
    state = _majority(never, unclear, count)
    kept = f"Each of these kept at least {percent(KEPT, 0)} of its loss. " if never else ""
    with_others = f"With the other {count - never}, the" if 0 < never < count else "The"
    sentence = f"{kept}{with_others} set's loss changed by {change}."
    return Finding(state, f"{never} of {count}", f"{'rock' if never == 1 else 'rocks'} never moved", sentence)


def matter_tile(sweep: KnockoutSweep, rocks: RockSet) -> Finding:
    """Count the rocks whose ban costs accuracy, beside the placebos whose ban does."""
    alone, placebos = bans_of_rocks(sweep, rocks)
    if not alone:
        return Finding("inconclusive", DASH, "", "Not known: no rock was banned by itself.")
    count = Counter(own.verdict for own in alone)
    is_shown = any(own.q is not None and own.q <= sweep.settings.alpha for own in _effects(alone))
    all_neutral = count["neutral"] == len(alone) == len(rocks.tokens)
    state = "supported" if is_shown else "contradicted" if all_neutral else "inconclusive"
    rest = ", ".join(f"{count[kind]} {kind}" for kind in ("neutral", "undecided") if count[kind])
    said = (_effect(alone), rest and f"Of the rocks, {rest}", _beside(alone, placebos))
    sentence = ". ".join(filter(None, said))
    unit = "rock is a pillar" if count["pillar"] == 1 else "rocks are pillars"
    return Finding(state, f"{count['pillar']} of {len(alone)}", unit, f"{sentence}.")


def _effect(alone: Sequence[Knockout]) -> str:
    """Name the ban that changes accuracy most."""
    shown = sorted(_effects(alone), key=lambda own: -abs(own.delta or 0.0))
    if not shown:
        return "No ban is shown to change accuracy"
    most = shown[0].verdict
    does = "Banning one of these costs accuracy" if most == "pillar" else "Banning some improves accuracy"
    if shown[0].delta is not None:
        change = with_interval(shown[0].delta, shown[0].interval, points)
        does += f" ({quoted(ban_name(shown[0].ban))}: {change} points)"
    return does


def _beside(alone: Sequence[Knockout], placebos: Sequence[Knockout]) -> str:
    """Count the placebos that accuracy needs, where it needs a rock."""
    if not placebos or not any(own.verdict == "pillar" for own in alone):
        return ""
    needed = sum(own.verdict == "pillar" for own in placebos)
    return f"Equally frequent non-rocks: {needed} of {len(placebos)} are pillars"


def _effects(alone: Sequence[Knockout]) -> list[Knockout]:
    return [own for own in alone if own.verdict in ("pillar", "stumbling")]


def gain_tile(study: StudyResult) -> Finding:
    """Count the arms that beat the baseline, and give the difference of the first of them, or of the first arm."""
    compared = against_baseline(study)
    if not compared:
        return Finding("inconclusive", DASH, "", "Not known: no arm was compared with the baseline at equal steps.")
    shown = [own for own in compared if own.verdict == "better" and own.role != "exploratory" and not own.unreliable]
    is_no_gain = all(own.verdict in ("worse", "equivalent") and not own.unreliable for own in compared)
    state = "supported" if shown else "contradicted" if is_no_gain else "inconclusive"
    own = (shown or compared)[0]
    saved = study.arm(own.first).facts.get("head_compute_saved")
    start = {"supported": "A gain", "contradicted": "No gain"}.get(state, "No gain shown")
    sentence = (
        f"{start}: {printable(own.first)} {with_interval(own.difference, own.interval, points)} points, {own.verdict}"
    )
    sentence += ", its mean unreliable" if own.unreliable else f" on {counted(len(study.seeds), 'seed')}"
    sentence += f"; it saves {percent(saved)} of the LM head's work." if saved else "."
    unit = f"{'arm beats' if len(shown) == 1 else 'arms beat'} the baseline, {printable(study.baseline)}"
    return Finding(state, f"{len(shown)} of {len(compared)}", unit, sentence)


def _order(below: Sequence[float] | None, above: Sequence[float] | None) -> State:
    """Compare two intervals; inconclusive where they overlap or one is not known."""
    if below is None or above is None:
        return "inconclusive"
    return "supported" if above[0] > below[1] else "contradicted" if above[1] < below[0] else "inconclusive"


def _majority(count: int, unclear: int, whole: int) -> State:
    """Tell whether more than half are counted, whatever the unclear ones are."""
    return "supported" if 2 * count > whole else "contradicted" if 2 * (count + unclear) < whole else "inconclusive"
