"""Numbers, lists and verdicts as sentences and tables have them; a dash stands for what is not known."""

from collections.abc import Mapping, Sequence
from typing import Any

from rocktokens.display.text import printable, visible

DASH = "—"
MINUS = "−"


def percent(share: float | None, digits: int = 1) -> str:
    """A share as a percentage."""
    return DASH if share is None else f"{_minus(f'{100 * share:.{digits}f}')} %"


def signed_percent(change: float | None) -> str:
    """A relative change as a percentage with its sign."""
    return DASH if change is None else f"{_signed(100 * change, 1)} %"


def points(change: float | None) -> str:
    """A change of accuracy in points (hundredths) with its sign."""
    return DASH if change is None else _signed(100 * change, 1)


def hundredths(interval: Sequence[float] | None) -> str:
    """An interval of shares in hundredths, empty where there is none."""
    return "" if interval is None else f"[{_minus(f'{100 * interval[0]:.1f}')}, {_minus(f'{100 * interval[1]:.1f}')}]"


def signed_hundredths(interval: Sequence[float] | None) -> str:
    """An interval of changes in hundredths, with signs; empty where there is none."""
    return "" if interval is None else f"[{_signed(100 * interval[0], 1)}, {_signed(100 * interval[1], 1)}]"


def with_interval(value: str, interval: str) -> str:
    """A number and its interval, the number alone where there is none."""
    return f"{value} {interval}".rstrip()


def decimal(value: float | None, digits: int) -> str:
    """A number to so many digits."""
    return DASH if value is None else _minus(f"{value:,.{digits}f}")


def signed_decimal(value: float | None, digits: int) -> str:
    """A number to so many digits with its sign."""
    return DASH if value is None else _signed(value, digits)


def significant(value: float | None) -> str:
    """A number to three significant digits, never in powers of ten."""
    if value is None:
        return DASH
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return decimal(value, digits)


def listed(items: Sequence[str], ending: str = "and") -> str:
    """``a, b and c``."""
    *first, last = items
    return f"{', '.join(first)} {ending} {last}" if first else last


def counted(count: int, what: str) -> str:
    """``1 rock``, ``18 rocks``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def quoted(text: str) -> str:
    """A token in a sentence, told apart from the words around it."""
    return f"“{text}”"


def ban_name(ban: dict[str, Any]) -> str:
    """What a knock-out banned: a token with its spaces visible, a set by its name."""
    return visible(ban["name"]) if len(ban["ids"]) == 1 else printable(ban["name"])


def as_a_set(intervals: Mapping[str, Sequence[float] | None]) -> str:
    """Whether the rocks, as a set, kept their loss better than the rest; by intervals, empty where there are none."""
    rocks, rest = (intervals.get(f"kl_change_{name}") for name in ("rocks", "rest"))
    if rocks is None or rest is None:
        return ""
    if rocks[0] > rest[1]:
        return "as a set, the rocks kept more of their loss than the rest"
    if rocks[1] < rest[0]:
        return "as a set, the rocks lost more of their loss than the rest; what each one did is in the table"
    return "as a set, the rocks moved no less than the rest, as far as these prompts tell"


def byte_size(count: float) -> str:
    """Bytes in the largest unit that leaves at least one."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _signed(value: float, digits: int) -> str:
    """The minus is as wide as the plus; a number that rounds to 0 has no sign."""
    return _minus(f"{value:+,.{digits}f}") if round(value, digits) else f"{0:.{digits}f}"


def _minus(text: str) -> str:
    return text.replace("-", MINUS)
