"""What bans have shown of classes of tokens, as records that read and write knockout-classes.json; no torch.

1. A member is banned where another member of its class is likely (``banned_in``), and forced: all others are banned
   where it is likely (``forced_in``). In a class of two, forcing one is banning the other.
2. The whole class is banned everywhere, and for comparison so is each member.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from rocktokens.classes import TokenClass
from rocktokens.knockout.records import BanKey, Knockout, KnockoutSweep
from rocktokens.types import Record, Verdict, load_record, write_record

CLASS_SWEEP_SCHEMA_VERSION = 1
SERIOUS: tuple[Verdict, ...] = ("pillar", "stumbling", "undecided", "neutral")
"""Verdicts, the one that speaks most against a class first."""


@dataclass(frozen=True, slots=True)
class Replacement(Record):
    """How often one token takes the place of another that is banned, where free answers first have that."""

    places: int
    """Free answers that hold the banned token."""
    share: float | None
    """None with too few places to tell."""


@dataclass(frozen=True, slots=True)
class ClassLink(Record):
    """Two tokens that compete for the same places in the trace, and whether they replace each other."""

    a: int
    b: int
    strength: float
    b_for_a: Replacement
    a_for_b: Replacement
    kept: bool
    """False where one of the shares is known and too small."""


@dataclass(frozen=True, slots=True)
class ClassSweep(Record):
    """Everything in knockout-classes.json."""

    classes: tuple[TokenClass, ...]
    """Those that the kept links make, with their verdicts."""
    links: tuple[ClassLink, ...]
    sweep: KnockoutSweep
    schema_version: int = CLASS_SWEEP_SCHEMA_VERSION

    def save(self, path: str | Path) -> None:
        """Write knockout-classes.json, byte for byte the same for the same content."""
        write_record(path, asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read knockout-classes.json; a newer schema or a damaged file is refused by name."""
        maker = "`rocktokens knockout --classes`"
        return load_record(cls, path, "knockout-classes.json", maker, CLASS_SWEEP_SCHEMA_VERSION)

    def within(self, ids: tuple[int, ...]) -> list[Knockout]:
        """Return what bans within a class did, those first that speak most against it; each once."""
        keys = {test(ids, member) for test in (banned_in, forced_in) for member in ids}
        found = [own for own in self.sweep.knockouts if own.ban.key in keys]
        return sorted(found, key=lambda own: (SERIOUS.index(own.verdict), -abs(own.delta or 0.0)))

    def whole(self, ids: tuple[int, ...]) -> Knockout:
        """Return what the ban of a whole class did."""
        return self.sweep.of_ban(BanKey(ids))


def banned_in(ids: tuple[int, ...], member: int) -> BanKey:
    """Return the ban of a member of a class where another one is likely."""
    return BanKey((member,), _others(ids, member))


def forced_in(ids: tuple[int, ...], member: int) -> BanKey:
    """Return the ban of all other members of a class where this one is likely."""
    return BanKey(_others(ids, member), (member,))


def _others(ids: tuple[int, ...], member: int) -> tuple[int, ...]:
    return tuple(token_id for token_id in ids if token_id != member)
