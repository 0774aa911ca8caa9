"""What ``rocktokens knockout --classes`` prints: which classes are interchangeable, and what that rests on.

Changes of accuracy are in points (hundredths), with intervals; a dash stands for what is not known.
"""

from collections.abc import Iterator
from dataclasses import replace

from rocktokens.classes import TokenClass
from rocktokens.cli.knockout_tables import brief_conditions, condition_sentences
from rocktokens.cli.tables import print_lines, print_table
from rocktokens.display.numbers import counted, level, listed, points, quoted, with_interval
from rocktokens.display.table import WIDE, Column, Table, ends, number, text, verdict
from rocktokens.display.text import printable, visible
from rocktokens.knockout.class_records import ClassSweep, banned_in
from rocktokens.knockout.records import BanKey
from rocktokens.report.knockout_notes import neutral_sentence, states_sentence, undecided_sentence


def print_class_sweep(found: ClassSweep, show: int, verbose: bool = False) -> None:
    """Print the conclusion and the classes; with ``verbose`` also what the sweep cost and how exact it is."""
    conditions = condition_sentences(found.sweep) if verbose else brief_conditions(found.sweep)
    print_lines(conclusion(found), *conditions, *_link_sentences(found), "")
    print_table(class_sweep_table(found, show))
    within = [own for each in found.classes for own in found.within(each.ids)]
    tested = replace(found.sweep, knockouts=within)
    print_lines(*_pillar_sentences(found), *filter(None, [undecided_sentence(tested), neutral_sentence(tested)]))


def conclusion(found: ClassSweep) -> str:
    """Count the classes by whether their members are interchangeable, in one sentence."""
    if not found.classes:
        return "No class is left: none of the linked tokens replace each other."
    return states_sentence(each.state for each in found.classes)


def class_sweep_table(found: ClassSweep, show: int) -> Table:
    """Make the table of the tested classes, those first that are written most."""
    columns: list[Column[TokenClass]] = [
        Column("members", lambda own: text("  ".join(map(visible, own.texts)))),
        Column("in", lambda own: number(found.whole(own.ids).changes.n_rollouts)),
        Column("members are", lambda own: text(own.state)),
        Column("worst ban within", lambda own: verdict(found.within(own.ids)[0].verdict)),
        Column("Δ", lambda own: number(found.within(own.ids)[0].delta, points)),
        Column(level(found.sweep.settings.alpha), lambda own: ends(found.within(own.ids)[0].interval, points)),
        Column("neutral at", lambda own: number(_prompts_needed(found, own)), room=WIDE),
        Column("none allowed", lambda own: verdict(own.verdict)),
        Column("Δ of none", lambda own: number(found.whole(own.ids).delta, points)),
    ]
    most_written = sorted(found.classes, key=lambda own: -found.whole(own.ids).changes.n_rollouts)
    title = "Classes of tokens" if show >= len(most_written) else f"The {show} classes that are written most"
    notes = [
        "in: answers that hold a member; a class in none was not put to the test · ban within: a member banned where "
        "another is likely, or all others where it is · neutral at: prompts that would show all these to be neutral · "
        "none allowed: the whole class banned everywhere, a pillar where the decision matters"
    ]
    return Table.of("classes", columns, most_written[:show], title, notes)


def _prompts_needed(found: ClassSweep, own: TokenClass) -> int | None:
    """Return with how many prompts every undecided ban within a class would be neutral."""
    needs = [test.neutral_prompts for test in found.within(own.ids) if test.verdict == "undecided"]
    return max((need for need in needs if need is not None), default=None)


def _link_sentences(found: ClassSweep) -> Iterator[str]:
    kept = sum(link.kept for link in found.links)
    unknown = sum(None in (link.a_for_b.share, link.b_for_a.share) for link in found.links if link.kept)
    sentence = f"Of {counted(len(found.links), 'link')}, {kept} {'is' if kept == 1 else 'are'} kept: the two tokens "
    yield (
        sentence
        + "replace each other where one is banned"
        + (f", or too few answers hold one of them to tell ({unknown})." if unknown else ".")
    )


def _pillar_sentences(found: ClassSweep) -> Iterator[str]:
    """Name the members that answers need, unless another one can take their place."""
    own_of = {own.ban.key: own for own in found.sweep.knockouts}
    named = [
        f"{quoted(visible(text))} {with_interval(plain.delta, plain.interval, points)}"
        for each in found.classes
        for member, text in zip(each.ids, each.texts, strict=True)
        if (plain := own_of[BanKey((member,))]).verdict == "pillar"
        and own_of[banned_in(each.ids, member)].verdict in ("neutral", "undecided")
    ]
    if named:
        yield printable(f"Pillars when banned everywhere, but not where another member is likely: {listed(named)}.")
