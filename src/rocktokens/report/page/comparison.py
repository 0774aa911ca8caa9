"""Two runs side by side: tiles in pairs with what differs, rocks aligned by token, sections in two columns.

1. Rocks are compared by token id, so only where both runs have the same tokenizer; the page says so where they do not.
2. The loss curves of both runs lie over each other; every other figure stands beside its counterpart.
3. Where their teachers gave different kinds of kl, curves, R and labels are not compared, and the page says why.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocktokens.display.numbers import counted, decimal, listed, quoted, significant
from rocktokens.display.rocks import label_text, with_teacher
from rocktokens.display.table import Column, Table, number, text, token, verdict
from rocktokens.display.text import visible
from rocktokens.report.charts.plots import Plot, overlaid
from rocktokens.report.page.parts import Part
from rocktokens.report.page.sections import Section
from rocktokens.report.page.tiles import Tile
from rocktokens.report.views.run_view import RunView
from rocktokens.rocks.cutoff import jaccard
from rocktokens.types import RockToken

OVERLAID = "loss"
"""The figure, and section, whose curves lie over each other."""
OF_KL = ("R", "label")
"""Columns that rest on the kl."""
NAMED = 4
"""Tokens that a sentence names."""
Pairs = dict[int, tuple[RockToken | None, RockToken | None]]


@dataclass(frozen=True, slots=True)
class Overlay:
    """The curves of both runs over each other."""

    plot: Plot
    caption: str


@dataclass(frozen=True, slots=True)
class PairedSection:
    """One question, both runs."""

    key: str
    title: str
    columns: tuple[tuple[Part, Section | None], ...]
    table: Table | None = None
    """What aligns the two."""
    over: Overlay | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs side by side."""

    tiles: list[tuple[Tile, Tile, str]]
    """The tiles of one question, and what differs."""
    sections: list[PairedSection]

    @property
    def plots(self) -> dict[str, Plot]:
        """What the page draws of both runs together."""
        return {f"both-{own.key}": own.over.plot for own in self.sections if own.over}

    @property
    def tables(self) -> list[Table]:
        """What aligns them."""
        return [own.table for own in self.sections if own.table]


def pair_of(runs: Sequence[RunView], parts: Sequence[Part]) -> Pair:
    """Put two runs side by side."""
    names = [part.name if parts[0].name != parts[1].name else f"{part.name} {part.id[-1]}" for part in parts]
    pairs = aligned(runs) if parts[0].vocabulary == parts[1].vocabulary else None
    labels = [run.teacher_label for run in runs]
    apart = different_kinds(labels, names)
    rocks = aligned_table(pairs, names, has_same_kl=not apart) if pairs else None
    tiles = zip(parts[0].tiles, parts[1].tiles, strict=True)
    told = zip(tiles, differences(pairs, names, apart), strict=True)
    by_key = [{section.key: section for section in part.sections} for part in parts]
    titles = {key: section.title for own in reversed(by_key) for key, section in own.items()}
    order = list(dict.fromkeys(key for own in by_key for key in own))
    return Pair(
        [(first, second, f"{_states(first, second, names)} {rest}".strip()) for (first, second), rest in told],
        [
            PairedSection(
                key,
                titles[key],
                tuple((part, own.get(key)) for part, own in zip(parts, by_key, strict=True)),
                rocks and with_teacher(rocks, "" if apart else labels[0]) if key == "rocks" else None,
                _over_each_other(parts, names) if key == OVERLAID and not apart else None,
            )
            for key in order
        ],
    )


def aligned(runs: Sequence[RunView]) -> Pairs | None:
    """Return the rocks of both runs by id, in the order of the first run, then of the second; None without both."""
    first, second = (run.rocks for run in runs)
    if first is None or second is None:
        return None
    own, other = ({rock.id: rock for rock in rocks.tokens} for rocks in (first, second))
    return {token_id: (own.get(token_id), other.get(token_id)) for token_id in dict.fromkeys((*own, *other))}


def different_kinds(labels: Sequence[str], names: Sequence[str]) -> str:
    """Say why nothing that rests on the kl is compared, by the labels of the teachers; empty where it is."""
    if labels[0] == labels[1]:
        return ""
    given = "; ".join(f"{name}: {label or 'the whole one'}" for label, name in zip(labels, names, strict=True))
    return f"Loss curves, R and labels are not compared: the teachers gave different kinds of kl ({given})."


def differences(pairs: Pairs | None, names: Sequence[str], apart: str) -> list[str]:
    """Say for each question what single rocks differ in; empty where nothing can be said of single rocks.

    ``apart`` says why their labels are not compared; empty where they are.
    """
    if pairs is None:
        return ["Rocks cannot be aligned: the runs have different tokenizers, or one has no rocks.", "", apart, "", ""]
    both = [(first, second) for first, second in pairs.values() if first and second]
    only = [sum(other is None for _, other in pairs.values()), sum(own is None for own, _ in pairs.values())]
    ids = [np.array([rock.id for each in pairs.values() if (rock := each[place])]) for place in (0, 1)]
    shared = (
        f"{counted(len(both), 'rock')} in both, {only[0]} only in {names[0]}, {only[1]} only in {names[1]} "
        f"(Jaccard {decimal(jaccard(*ids), 2)})."
    )
    labels = apart or _other(both, "label", label_text)
    return [shared, "", labels, _other(both, "verdict", lambda rock: rock.verdict), ""]


def _other(both: Sequence[tuple[RockToken, RockToken]], what: str, of: Callable[[RockToken], str]) -> str:
    """Name the rocks of both runs of which they say something else."""
    said = [f"{quoted(visible(own.text))} ({of(own)}, {of(other)})" for own, other in both if of(own) != of(other)]
    if not said:
        return f"Every rock in both has the same {what}." if both else ""
    more = [f"{len(said) - NAMED} more"] if len(said) > NAMED else []
    have = "has" if len(said) == 1 else "have"
    named = listed([*said[:NAMED], *more])
    return f"{len(said)} of {counted(len(both), 'rock')} in both {have} another {what}: {named}."


def _states(first: Tile, second: Tile, names: Sequence[str]) -> str:
    if first.state == second.state:
        return f"Both: {first.state}."
    return f"{names[0]}: {first.state}; {names[1]}: {second.state}."


def aligned_table(pairs: Pairs, names: Sequence[str], *, has_same_kl: bool) -> Table:
    """Make the table of the rocks of both runs, a row per token; a dash where it is no rock.

    R and labels are left out where the kl of the runs is of different kinds.
    """
    rows = list(pairs.items())

    def shown(place: int, show: Callable[[RockToken], Any], missing: Any) -> Callable[[tuple[int, Any]], Any]:
        return lambda row: show(row[1][place]) if row[1][place] else missing

    columns: list[Column[Any]] = [
        Column("token", lambda row: token(next(filter(None, row[1])).text, row[0])),
        *(
            Column(f"{title}, {name}", shown(place, show, missing))
            for title, show, missing in (
                ("rank", lambda rock: number(rock.rank), number(None)),
                ("R", lambda rock: number(rock.score, significant), number(None)),
                ("label", lambda rock: text(label_text(rock)), text("—")),
                ("if banned", lambda rock: verdict(rock.verdict), text("—")),
            )
            if has_same_kl or title not in OF_KL
            for place, name in enumerate(names)
        ),
        Column("differs in", lambda row: text(_differs_in(*row[1], has_same_kl=has_same_kl))),
    ]
    title = "The rocks of both runs, a row per token; a dash where it is no rock of that run."
    return Table.of("aligned", columns, rows, title)


def _differs_in(first: RockToken | None, second: RockToken | None, *, has_same_kl: bool) -> str:
    if first is None or second is None:
        return "being a rock"
    has_other_label = has_same_kl and label_text(first) != label_text(second)
    said = {"label": has_other_label, "verdict": first.verdict != second.verdict}
    return ", ".join(what for what, differs in said.items() if differs)


def _over_each_other(parts: Sequence[Part], names: Sequence[str]) -> Overlay | None:
    """Lay the curves of both runs over each other, where both have some."""
    found = [own for part in parts for own in part.figures.values() if own.name == OVERLAID and own.plot.panels]
    if len(found) != len(parts):
        return None
    plot = overlaid([own.plot for own in found], names)
    return Overlay(plot, f"{found[0].title}: {names[0]} solid, {names[1]} dashed")
