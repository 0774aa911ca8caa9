"""The rocks as a table, and in sentences what they hold and whether training moved them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from rocktokens.config.checkpoints import NO_NAMES, checkpoint_label
from rocktokens.config.sections import POSITIVE
from rocktokens.display.numbers import (
    counted,
    fixed,
    listed,
    percent,
    points,
    quoted,
    signed_percent,
    significant,
    with_interval,
)
from rocktokens.display.table import WIDE, WIDEST, Column, Table, ends, flat, number, text, token, verdict
from rocktokens.display.text import visible
from rocktokens.types import KEPT, has_tail, of_teacher

if TYPE_CHECKING:
    from rocktokens.types import RockSet, RockToken

LABELS = {
    "stuck": "at least {kept} of the loss is left",
    "residual": "the loss fell early and then stopped falling",
    "moving": "the loss still fell in the second half of training",
    "moved": "less than {kept} of the loss is left",
    "unclear": "the prompts cannot tell",
}
VERDICT_RULES = {
    "method": "Verdicts by our rule.",
    "paper": "Verdicts by the paper's rule, which calls neutral whatever is inconclusive.",
}


def rock_table(rocks: "RockSet", show: int | None = None, both_labels: bool = False) -> Table:
    """Make the table of the first ``show`` rocks: what selected them, what held-out prompts say, and their verdicts.

    ``both_labels`` gives the label of either half of the prompts a column; default: one, with a mark where they differ.
    """
    is_context = rocks.criterion.get("stage") == "context"
    is_bound = rocks.criterion.get("stage") == "bound"
    is_tested = any(own.verdict != "untested" for own in rocks.tokens)
    score = _score_name(rocks)
    columns: list[Column[RockToken]] = [
        Column("rank", lambda own: number(own.rank)),
        Column("token", lambda own: token(own.text, own.id)),
        Column("category", lambda own: text(own.category), room=WIDE),
        Column("freq", lambda own: number(own.freq)),
        Column("in", lambda own: number(own.n_prompts), room=WIDE),
        Column("mean kl", lambda own: number(own.mean_kl, fixed(3)), room=WIDE),
        Column("held out" if rocks.is_split else "again", lambda own: number(own.held_out_mean_kl, fixed(3))),
        Column("change", lambda own: number(own.held_out_change, signed_percent)),
        *(_label_columns(both_labels) if any(own.label for own in rocks.tokens) else []),
        Column(score, lambda own: number(own.score, significant)),
        Column("95 %", lambda own: ends(own.score_interval, significant), room=WIDEST if is_bound else WIDE),
    ]
    if is_bound:
        columns.append(Column("L", lambda own: number(own.bound, significant)))
    if is_context:
        columns.append(Column("CCR", lambda own: number(own.ccr, fixed(2))))
        columns.append(Column(f"{score}·CCR", lambda own: number(own.score_ctx, significant)))
    columns.append(Column("P(K)", lambda own: number(own.p_in_top_k, fixed(2))))
    if is_tested:
        columns.append(Column("ban, points", lambda own: number(own.delta, points, own.delta_interval), room=WIDEST))
        columns.append(Column("verdict", lambda own: verdict(own.verdict), room=WIDEST))
    shown = rocks.tokens[:show]
    records = [flat({**asdict(own), "text": visible(own.text)}) for own in shown]
    return Table.of("rocks", columns, shown, _title(rocks, len(shown)), _notes(rocks, score, both_labels), records)


def _label_columns(both: bool) -> list[Column["RockToken"]]:
    if not both:
        return [Column("label", lambda own: text(label_text(own)))]
    return [
        Column("label", lambda own: text(own.label or "")),
        Column("label, other half", lambda own: text(own.held_out_label or "")),
    ]


def brief_rock_table(rocks: "RockSet", show: int) -> Table:
    """Make the table of the first ``show`` rocks that fits on a screen: what they hold, their labels and verdicts."""
    score = _score_name(rocks)
    columns: list[Column[RockToken]] = [
        Column("rank", lambda own: number(own.rank)),
        Column("token", lambda own: token(own.text, own.id)),
        Column("category", lambda own: text(own.category)),
        Column(f"{score} [95 %]", lambda own: number(own.score, significant, own.score_interval)),
        Column("label", lambda own: text(label_text(own))),
        Column("P(K)", lambda own: number(own.p_in_top_k, fixed(2))),
    ]
    if any(own.verdict != "untested" for own in rocks.tokens):
        columns.append(Column("if banned", lambda own: verdict(own.verdict)))
    ranked = {"bound": f" Ranked by a lower bound of {score}.", "context": f" Ranked by {score}·CCR."}
    note = (
        f"{_column_note(score)}{ranked.get(rocks.criterion.get('stage', ''), '')} "
        "?: the other prompts do not give this label."
    )
    notes = [*filter(None, (teacher_sentence(rocks.teacher),)), note]
    return Table.of("rocks", columns, rocks.tokens[:show], _title(rocks, len(rocks.tokens[:show])), notes)


def _score_name(rocks: "RockSet") -> str:
    return "min R" if rocks.criterion.get("joint") else "R"


def _title(rocks: "RockSet", shown: int) -> str:
    whole = counted(len(rocks.tokens), "rock")
    count = whole if shown == len(rocks.tokens) else f"The first {shown} of {whole}"
    return f"{count} at checkpoint {rocks.criterion.get('reference')}{of_teacher(rocks.teacher)}."


def _column_note(score: str) -> str:
    return (
        f"{score}: occurrences × mean kl in nats, with its 95 % interval. P(K): how often the type is among the first "
        "K when prompts are resampled."
    )


def _notes(rocks: "RockSet", score: str, both_labels: bool) -> list[str]:
    """Say what the columns are, and which prompts they were measured on."""
    notes = [teacher_sentence(rocks.teacher)] if rocks.teacher else []
    notes.append(f"In: prompts the type occurs in. {_column_note(score)}")
    if rocks.criterion.get("stage") == "context":
        notes.append(
            "CCR: share of the occurrences that are hard before and after training in contexts that recur; these are "
            f"taken as found. Ranked by {score}·CCR."
        )
    if rocks.criterion.get("stage") == "bound":
        notes.append(f"Ranked by L, a lower bound of {score} that is low where few prompts hold the loss.")
    if rocks.is_split:
        notes.append(
            "Held out: mean kl on prompts that did not select the rocks. Change: of that kl over training. All other "
            "columns are of the prompts that selected the rocks."
        )
    else:
        notes.append(
            "All prompts selected the rocks, so every number is of prompts that selected them, which flatters it. "
            "Change: of the kl over training."
        )
    if labels := {own.label: None for own in rocks.tokens if own.label}:
        meaning = "; ".join(f"{label}: {label_meaning(label)}" for label in labels)
        other = (
            "Other half: the label by the prompts that did not select the rocks."
            if both_labels
            else "A question mark: the other prompts do not say so."
        )
        notes.append(f"Label: {meaning}, with 95 % confidence. {other}")
    rule = VERDICT_RULES.get(rocks.source.get("verdicts", {}).get("rule"))
    return [*notes, rule] if rule else notes


def teacher_sentence(teacher: str) -> str:
    """Say what kl is where the teacher named its likeliest tokens alone, and what may be said of it; else ""."""
    if not has_tail(teacher):
        return ""
    return (
        f"kl is of the teacher's {teacher}, a lower bound of the whole one over all of the teacher's tokens: rankings "
        "hold, values of single tokens do not, and how far loss fell may be understated."
    )


def with_teacher(table: Table, teacher: str) -> Table:
    """Add to the notes of a table that its kl is of likely tokens and a tail, where the teacher has such a label."""
    return replace(table, notes=(*table.notes, f"Teacher: {teacher}.")) if has_tail(teacher) else table


def label_text(token: "RockToken") -> str:
    """Show a label, with a question mark where the held-out prompts say another one."""
    if token.label is None:
        return ""
    return token.label if token.held_out_label in (token.label, None) else f"{token.label}?"


def share_sentence(rocks: "RockSet", named: int = 0, checkpoints: Mapping[int, str] = NO_NAMES) -> str:
    """Say how many rocks there are, and what share of the tokens and of the remaining loss is theirs.

    The first ``named`` are called by name, for where no table follows. Where there are none, it says why.
    ``checkpoints`` are the names of those that have one.
    """
    summary, checkpoint = rocks.summary, checkpoint_label(rocks.criterion["reference"], checkpoints)
    if not rocks.tokens:
        return f"No token type is a rock at checkpoint {checkpoint}: {why_none(rocks)}."
    names = [quoted(visible(token.text)) for token in rocks.tokens[:named]]
    rest = len(rocks.tokens) - len(names)
    list_of = f": {listed([*names, f'{rest} more'] if rest else names)}" if names else ""
    is_one = len(rocks.tokens) == 1
    are, make, hold = ("is a rock", "It makes", "holds") if is_one else ("are rocks", "They make", "hold")
    intervals = summary.get("intervals") or {}
    tokens, kl = (with_interval(summary.get(name), intervals.get(name)) for name in ("token_share", "kl_share"))
    doubt = f"{few}. What follows may be chance. " if (few := rocks.too_few_prompts) else ""
    return (
        f"{doubt}{len(rocks.tokens):,} of {counted(summary['n_types'], 'token type')} {are} at checkpoint "
        f"{checkpoint}{list_of}. {make} up {tokens} of the tokens and {hold} {kl} of the loss that is left "
        f"({summary['measured_on']}, {counted(summary['n_prompts'], 'prompt')}, 95 % intervals"
        f"{f'; teacher: {rocks.teacher}' if rocks.teacher else ''})."
    )


def label_sentence(rocks: "RockSet") -> str:
    """Say how many rocks training never moved, by both halves of the prompts, and what the others are.

    Empty where nothing is known of single rocks, or where too few prompts say it.
    """
    labelled = [token for token in rocks.tokens if token.label is not None]
    if not labelled or not rocks.is_split or rocks.too_few_prompts:
        return ""
    agreed = Counter(str(token.label) if token.label == token.held_out_label else "unclear" for token in labelled)
    never = agreed.pop("stuck", 0)
    said = [f"training never moved {never} of {counted(len(labelled), 'rock')} (stuck on both halves of the prompts)"]
    said += [
        f"{count} {'is' if count == 1 else 'are'} {label} ({label_meaning(label)})" for label, count in agreed.items()
    ]
    doubt = f"; by {rocks.teacher}, which may understate how far loss fell" if rocks.teacher else ""
    return f"{listed(said)[:1].upper()}{listed(said)[1:]}{doubt}."


def label_meaning(label: str) -> str:
    """Say what a label means."""
    return LABELS[label].format(kept=percent(KEPT, 0))


def why_none(rocks: "RockSet") -> str:
    """Say why a search found no rocks; as a clause, without a full stop."""
    if rocks.too_few_prompts:
        return rocks.too_few_prompts
    if not rocks.summary.get("kl_share", True):
        return "there is no kl to rank: on these tokens the student and the teacher are the same"
    criterion, least = rocks.criterion, rocks.criterion.get("min_score") or 0.0
    asked = [f"find.{name} = {criterion.get(name)}" for name in ("require", "min_prompts")]
    if least > POSITIVE:
        return f"no type passes {listed([*asked, f'find.min_score = {least:g}'])}: lower find.min_score"
    return f"no type with a loss passes {listed(asked)}: trace more prompts (trace.num_prompts)"


def movement_sentence(rocks: "RockSet") -> str:
    """Say whether the rocks, as a set, moved less than other tokens; by intervals, empty where there are none."""
    intervals = rocks.summary.get("intervals") or {}
    own, rest = intervals.get("kl_change_rocks"), intervals.get("kl_change_rest")
    if own is None or rest is None:
        return ""
    if own[0] > rest[1]:
        return "Rocks moved less than other tokens."
    if own[1] < rest[0]:
        return "Rocks moved more than other tokens; the table shows each one."
    return "No evidence that rocks moved less than other tokens."
