"""Which tokens a sweep bans, from what is asked for.

1. The first rocks in rank order, of all categories and labels or of the wanted ones.
2. Types given by id, or by a text that is exactly one token; when only these are asked for, no other rocks are taken.
3. All of these one by one, or all at once as one set.
4. Beside such a set of rocks, a set of as many types that are as frequent and no rocks.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rocktokens.display.text import visible
from rocktokens.errors import ControlMatchError, RocktokensError
from rocktokens.knockout.records import Ban
from rocktokens.types import RockSet, RockToken

if TYPE_CHECKING:
    from rocktokens.traces.store import TraceStore
    from rocktokens.traces.token_text import Vocabulary

NAMED = 3
"""A set of more types than this is called by their number."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for."""

    top: int
    """Rocks at most."""
    categories: Sequence[str] = ()
    labels: Sequence[str] = ()
    ids: Sequence[int] = ()
    texts: Sequence[str] = ()
    rocks_too: bool = False
    """Whether rocks are wanted besides the types that are named."""
    together: bool = False
    """All of it banned at once, as one set."""
    controls: bool = False
    """Beside such a set, another one: types as frequent that are no rocks."""

    def __post_init__(self) -> None:
        if self.controls and not self.together:
            raise RocktokensError(
                "controls are wanted without together: a set of controls stands beside a set of rocks (on the command "
                "line --controls with --together)"
            )

    @property
    def any_rocks(self) -> bool:
        """Whether rocks are wanted at all: named types alone are wanted alone."""
        return self.rocks_too or not (self.ids or self.texts)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a tokenizer knows about its tokens."""

    vocabulary: "Vocabulary"
    split: Callable[[str], list[int]]
    """A text into ids, nothing added."""


def choose_bans(rocks: RockSet, wanted: Wanted, tokens: Tokens) -> list[Ban]:
    """Choose what to ban, each type once; one set of it all when ``wanted.together``."""
    named_ids = dict.fromkeys([*wanted.ids, *(_only_id(text, tokens) for text in wanted.texts)])
    named = [_named_ban(token_id, rocks, tokens.vocabulary) for token_id in named_ids]
    chosen = ranked_rocks(rocks, wanted) if wanted.any_rocks else []
    ranked = [Ban((token.id,), token.text, category=token.category) for token in chosen]
    bans = list(dict.fromkeys([*ranked, *named]))
    if not wanted.together or len(bans) == 1:
        return bans
    categories = {ban.category for ban in bans}
    common = categories.pop() if len(categories) == 1 else ""
    return [
        Ban(tuple(sorted(ban.ids[0] for ban in bans)), _set_name(ranked, bans[len(ranked) :], wanted), category=common)
    ]


def _set_name(ranked: list[Ban], named: list[Ban], wanted: Wanted) -> str:
    """Name a set: its rocks by number, label and category, few other types by their texts, more by number."""
    of = f" of category {', '.join(wanted.categories)}" if wanted.categories else ""
    labelled = f"{' or '.join(wanted.labels)} " if wanted.labels else ""
    rocks = f"{len(ranked)} {labelled}rock{'s' if len(ranked) > 1 else ''}{of}" if ranked else ""
    types = " + ".join(visible(ban.name) for ban in named) if len(named) <= NAMED else f"{len(named)} types"
    return " and ".join(filter(None, [rocks, types]))


def control_ban(
    store: "TraceStore", rocks: RockSet, ban: Ban, end_ids: Collection[int], tolerance: float, seed: int
) -> Ban:
    """Match types that are as frequent as the rocks of a set and no rocks, as one set."""
    from rocktokens.rocks.controls import match_controls

    own = replace(rocks, tokens=[token for token in rocks.tokens if token.id in ban.ids])
    if len(own.tokens) < len(ban.ids):
        raise RocktokensError(
            "controls are found for rocks alone: leave out the types named by id or text (--id, --text), or the "
            "controls"
        )
    try:
        controls = match_controls(store, own, tolerance, 1, seed, excluded={*rocks.ids.tolist(), *end_ids})
    except ControlMatchError as error:
        alone = ", ".join(repr(token.text) for token in own.tokens if token.id in error.unmatched)
        raise RocktokensError(
            f"controls: no set of types that are no rocks is as frequent, within knockout.tolerance = {tolerance:g} "
            f"each and 2 % in all{f' (none is for {alone})' if alone else ''}: raise knockout.tolerance, take fewer "
            "rocks (knockout.top, --top), or leave out the controls"
        ) from None
    return Ban(tuple(sorted(controls.draws[0].ids)), f"controls of {ban.name}", role="matched")


def ranked_rocks(rocks: RockSet, wanted: Wanted) -> list[RockToken]:
    """Return the rocks that are wanted, in rank order."""
    if not rocks.tokens:
        remedy = rocks.too_few_prompts or "trace more prompts (trace.num_prompts)"
        raise RocktokensError(
            f"rocks.json holds no rocks that can be banned: {remedy} and run `rocktokens find` again, or name types by "
            "id or text (--id, --text)"
        )
    there = {token.category for token in rocks.tokens}
    if absent := sorted(set(wanted.categories) - there):
        raise RocktokensError(f"category {absent[0]!r}: no rock is of it, they are of {', '.join(sorted(there))}")
    of_categories = [token for token in rocks.tokens if token.category in (wanted.categories or there)]
    return (_with_labels(of_categories, wanted.labels) if wanted.labels else of_categories)[: wanted.top]


def _with_labels(tokens: list[RockToken], labels: Sequence[str]) -> list[RockToken]:
    """Return the rocks with one of the labels; that none is left is refused, and so is a file without labels."""
    if any(token.label is None for token in tokens):
        raise RocktokensError(
            "knockout.labels needs rocks with labels and these have none: write rocks.json again with `rocktokens find`"
        )
    kept = [token for token in tokens if token.label in labels]
    if not kept:
        there = ", ".join(sorted({str(token.label) for token in tokens}))
        raise RocktokensError(f"knockout.labels = {list(labels)} leaves no rock: give some of {there}")
    return kept


def _only_id(text: str, tokens: Tokens) -> int:
    """Return the one token that has this text."""
    found = tokens.vocabulary.ids(text)
    if len(found) == 1:
        return found[0]
    if found:
        listed = " and ".join(map(str, found))
        raise RocktokensError(f"the text {text!r} is that of {len(found)} tokens, {listed}: give one by its id")
    parts = [f"{tokens.vocabulary.text(token_id)!r} (id {token_id})" for token_id in tokens.split(text)]
    if not parts:
        raise RocktokensError(f"the text {text!r} holds no token: give a text of at least one character")
    raise RocktokensError(
        f"the text {text!r} is not one token, it splits into {', '.join(parts)}: give one of these, or all of them "
        "together (--together)"
    )


def _named_ban(token_id: int, rocks: RockSet, vocabulary: "Vocabulary") -> Ban:
    """Make the ban of one type; a rock keeps the text and the category it was found with."""
    for token in rocks.tokens:
        if token.id == token_id:
            return Ban((token_id,), token.text, category=token.category)
    from rocktokens.rocks.categories import categorise_all

    text = vocabulary.text(token_id)
    special = vocabulary.is_special(token_id)
    return Ban((token_id,), text, category="other" if special else categorise_all([text], vocabulary)[0])
