"""Classes of interchangeable tokens, such as ``###`` and ``**``, and classes.json (docs/method.md, section 10).

1. A class is a set of vocabulary ids; an id is in one class at most, and an id in none is a class of its own. So a
   class of one id changes nothing.
2. classes.json keeps with every class what bans have shown of it, and names the tokenizer it belongs to.
3. Classes with the same members are equal, and have one hash, whatever their order and whatever is known of them.
4. ``link_classes`` makes classes of pairs that were found to be interchangeable.
"""

import hashlib
import heapq
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

from rocktokens.errors import RocktokensError, TokenizerMismatchError
from rocktokens.types import Record, Verdict, load_record, write_record

CLASSES_SCHEMA_VERSION = 1
MAKER = "`rocktokens find --classes`"
MAX_MEMBERS = 16
State = Literal["interchangeable", "not interchangeable", "undecided", "untested"]
"""What bans have shown of a class. Undecided: too few prompts, or none, show it either way."""
STATES: tuple[State, ...] = get_args(State)
Links = Mapping[tuple[int, int], float]
"""Strengths by pair of ids that are linked, each pair once."""


@dataclass(frozen=True, slots=True)
class TokenClass(Record):
    """Ids that may stand for each other, and what is known of them; lists are in the order of the ids, or empty."""

    ids: tuple[int, ...]
    texts: tuple[str, ...] = ()
    banned: tuple[Verdict, ...] = ()
    """Of each member, banned where another one is likely."""
    forced: tuple[Verdict, ...] = ()
    """Of each member, all others banned there."""
    verdict: Verdict = "untested"
    """Of the whole class banned everywhere: a pillar's decision matters."""
    safe: bool | None = None
    """Whether the members are interchangeable; None where too few prompts, or none, have shown it."""

    @property
    def state(self) -> State:
        """What bans have shown: ``safe`` in a word, undecided apart from untested."""
        if self.safe is not None:
            return "interchangeable" if self.safe else "not interchangeable"
        return "undecided" if {*self.banned, *self.forced, self.verdict} - {"untested"} else "untested"


@dataclass(frozen=True, slots=True)
class _ClassesRecord(Record):
    schema_version: int
    tokenizer_sha256: str
    source: dict[str, Any]
    criterion: dict[str, Any]
    classes: tuple[TokenClass, ...]


class TokenClasses:
    """Disjoint classes of vocabulary ids.

    Example: ``TokenClasses([[12, 40], [7, 8, 9]])``.

    Args:
        classes: the ids of each class, or ``TokenClass`` records.
        tokenizer_sha256: of the vocabulary that the ids are of; "" where it is not known.
        source: what the classes were found in.
        criterion: every parameter of how they were found and tested.
    """

    def __init__(
        self,
        classes: Iterable[TokenClass | Iterable[int]],
        *,
        tokenizer_sha256: str = "",
        source: dict[str, Any] | None = None,
        criterion: dict[str, Any] | None = None,
    ) -> None:
        self.classes = tuple(
            each if isinstance(each, TokenClass) else TokenClass(tuple(map(_as_id, each))) for each in classes
        )
        self.tokenizer_sha256 = tokenizer_sha256
        self.source, self.criterion = source or {}, criterion or {}
        _require_sound(self.classes)

    @classmethod
    def from_texts(cls, tokenizer: Any, texts: Iterable[Iterable[str]]) -> Self:
        """Make classes of tokens given by their texts, each of which is exactly one token of ``tokenizer``."""
        from rocktokens.models.fingerprints import vocabulary_sha256

        groups = [(group,) if isinstance(group, str) else tuple(group) for group in texts]
        classes = [TokenClass(tuple(_token_of(tokenizer, text) for text in group), group) for group in groups]
        return cls(classes, tokenizer_sha256=vocabulary_sha256(tokenizer.get_vocab()))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read classes.json; a newer schema or a damaged file is refused by name."""
        record = load_record(_ClassesRecord, path, "classes.json", MAKER, CLASSES_SCHEMA_VERSION)
        try:
            return cls(
                record.classes,
                tokenizer_sha256=record.tokenizer_sha256,
                source=record.source,
                criterion=record.criterion,
            )
        except RocktokensError as error:
            raise RocktokensError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write classes.json, byte for byte the same for the same content."""
        write_record(path, self.to_record())

    def to_record(self) -> dict[str, Any]:
        """Return what classes.json holds."""
        content = (self.tokenizer_sha256, self.source, self.criterion, self.classes)
        return asdict(_ClassesRecord(CLASSES_SCHEMA_VERSION, *content))

    def __len__(self) -> int:
        return len(self.classes)

    def __iter__(self) -> Iterator[TokenClass]:
        return iter(self.classes)

    def __repr__(self) -> str:
        return f"TokenClasses({[list(each.ids) for each in self.classes]})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenClasses) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """The ids of the classes that change anything, those of two or more, in ascending order."""
        return sorted(tuple(sorted(each.ids)) for each in self.classes if len(each.ids) > 1)

    @cached_property
    def sha256(self) -> str:
        """Hex SHA-256 of ``groups``: what the choice and the decision depend on."""
        return hashlib.sha256(json.dumps(self.groups, separators=(",", ":")).encode()).hexdigest()

    def only(self, safe: Collection[bool | None]) -> Self:
        """The classes whose ``safe`` is one of these."""
        return self._of(each for each in self.classes if each.safe in safe)

    @property
    def unrefuted(self) -> Self:
        """The classes that no ban has shown to be unsafe: what counts as choice."""
        return self.only((True, None))

    def without(self, ids: Iterable[int]) -> Self:
        """The classes less some ids; what bans have shown of a class that loses members is no longer known."""
        left_out = set(map(_as_id, ids))
        return self._of(
            each if left_out.isdisjoint(each.ids) else TokenClass(tuple(v for v in each.ids if v not in left_out))
            for each in self.classes
        )

    def require_width(self, width: int) -> None:
        """Refuse ids that are not among the ``width`` logits of both models."""
        largest = max((max(each.ids, default=-1) for each in self.classes), default=-1)
        if largest >= width:
            raise RocktokensError(
                f"token id {largest} of the classes is outside the {width} logits that student and teacher share: give "
                "classes that were made with their tokenizer"
            )

    def require_tokenizer(self, sha256: str) -> None:
        """Refuse to be used with another vocabulary than the one the classes are of."""
        if self.tokenizer_sha256 and self.tokenizer_sha256 != sha256:
            raise TokenizerMismatchError(
                f"the classes were made with tokenizer {self.tokenizer_sha256[:12]}, this model's is {sha256[:12]}: "
                "token ids mean other things there; make classes with this model's tokenizer"
            )

    def _of(self, classes: Iterable[TokenClass]) -> Self:
        """Make other classes of these, found and tested as they were; links of ids that leave go with them.

        Links of ids that were in no class stay: bans refuted them, and may be tried again with more prompts.
        """
        left = type(self)(classes, tokenizer_sha256=self.tokenizer_sha256, source=self.source, criterion=self.criterion)
        gone = {v for each in self for v in each.ids} - {v for each in left for v in each.ids}
        with suppress(KeyError, TypeError):  # what are no links is refused where they are read
            links = [link for link in self.source["links"] if gone.isdisjoint(link[:2])]
            left.source = {**self.source, "links": links}
        return left


def link_classes(links: Links, max_members: int = MAX_MEMBERS) -> list[tuple[int, ...]]:
    """Cluster ids by complete linkage, strongest link first; the classes of two or more, in ascending order.

    Args:
        links: strength by pair of ids, in either order; pairs that are not in it are not linked.
        max_members: two classes that have more together are not merged.
    """
    if max_members < 2:
        raise RocktokensError(f"max_members = {max_members} is not valid: give at least 2")
    # A class goes by its smallest id.
    members: dict[int, tuple[int, ...]] = {token_id: (token_id,) for pair in links for token_id in pair}
    weakest: dict[int, dict[int, float]] = {token_id: {} for token_id in members}
    for (a, b), strength in links.items():
        weakest[a][b] = weakest[b][a] = strength
    queue = [(-strength, min(pair), max(pair)) for pair, strength in links.items()]
    heapq.heapify(queue)
    while queue:
        strength, a, b = heapq.heappop(queue)
        is_current = weakest.get(a, {}).get(b) == -strength
        if not is_current or len(members[a]) + len(members[b]) > max_members:
            continue
        members[a] = tuple(sorted(members[a] + members.pop(b)))
        own, other = weakest.pop(a), weakest.pop(b)
        weakest[a] = {c: min(own[c], other[c]) for c in own.keys() & other.keys()}
        for c in (own.keys() | other.keys()) - {a, b}:
            weakest[c].pop(a, None)
            weakest[c].pop(b, None)
            if c in weakest[a]:
                weakest[c][a] = weakest[a][c]
                heapq.heappush(queue, (-weakest[a][c], min(a, c), max(a, c)))
    return sorted(ids for ids in members.values() if len(ids) > 1)


def _as_id(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise RocktokensError(f"classes hold {value!r}, which is no token id: give whole numbers of 0 or more")
    return int(value.__index__())


def _require_sound(classes: Iterable[TokenClass]) -> None:
    seen: set[int] = set()
    for each in classes:
        for values in (each.texts, each.banned, each.forced):
            if len(values) not in (0, len(each.ids)):
                raise RocktokensError(
                    f"the class {list(each.ids)} has {len(values)} texts or verdicts for {len(each.ids)} ids: give one "
                    "of each, or none"
                )
        for token_id in each.ids:
            if token_id < 0:
                raise RocktokensError(f"classes hold the token id {token_id}: give whole numbers of 0 or more")
            if token_id in seen:
                raise RocktokensError(f"token id {token_id} is in the classes twice: keep it in one of them, once")
            seen.add(token_id)


def _token_of(tokenizer: Any, text: Any) -> int:
    if not isinstance(text, str):
        raise RocktokensError(f"classes hold {text!r} where a text was expected: give texts of one token each")
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise RocktokensError(
            f"the text {text!r} of a class is {len(ids)} tokens, not one: give texts that are one token each (a space "
            "before a word often belongs to it), or token ids"
        )
    return int(ids[0])
