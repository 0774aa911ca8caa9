"""Numbers, lists and names as tables and sentences show them. A dash stands for what is not known.

A minus is as wide as a plus (−), and a number that rounds to 0 has no sign.
"""

from collections.abc import Callable, Sequence
from functools import partial

DASH = "—"
MINUS = "−"
Show = Callable[[float], str]
"""How one number is written."""


def percent(share: float | None, digits: int = 1) -> str:
    """Show a share as a percentage: ``25.0 %``."""
    return DASH if share is None else f"{decimal(100 * share, digits)} %"


def signed_percent(change: float | None) -> str:
    """Show a relative change as a percentage with its sign: ``+25.0 %``."""
    return DASH if change is None else f"{signed(100 * change, 1)} %"


def points(change: float | None) -> str:
    """Show a change of accuracy in points (hundredths) with its sign: ``−2.5``."""
    return DASH if change is None else signed(100 * change, 1)


def decimal(value: float | None, digits: int) -> str:
    """Show a number with this many decimals."""
    if value is None:
        return DASH
    return _minus(f"{value:,.{digits}f}") if round(value, digits) else f"{0:.{digits}f}"


def signed(value: float | None, digits: int) -> str:
    """Show a number with this many decimals and its sign."""
    if value is None:
        return DASH
    return _minus(f"{value:+,.{digits}f}") if round(value, digits) else f"{0:.{digits}f}"


def fixed(digits: int) -> Show:
    """Return the format with this many decimals."""
    return partial(decimal, digits=digits)


def count(value: float | None) -> str:
    """Show a whole number: ``184,320``."""
    return decimal(value, 0)


def about(value: int) -> str:
    """Show a whole number to two significant digits, rounded up: ``1,300`` for 1,241."""
    unit = 10 ** max(len(str(value)) - 2, 0)
    return count(-(-value // unit) * unit)


def significant(value: float | None) -> str:
    """Show a number to three significant digits, with at least its whole part and at most three decimals."""
    if value is None:
        return DASH
    size = abs(value)
    if 0 < size < 0.001:
        return _minus(f"{value:.3g}")
    return decimal(value, 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3)


def p_value(value: float | None) -> str:
    """Show a p-value to three decimals."""
    return DASH if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def interval(ends: Sequence[float] | None, show: Show = percent) -> str:
    """Show an interval, its ends without a unit: ``[20.0, 30.0]``; empty where there is none."""
    return "" if ends is None else f"[{', '.join(show(end).removesuffix(' %') for end in ends)}]"


def extent(low: float, high: float, most: float, digits: int, unit: str) -> str:
    """Show a range: ``1.2 to 4.5 points``; ``1.2 points or more`` where it ends beyond the most that is possible."""
    if high >= most:
        return f"{decimal(low, digits)} {unit} or more"
    return f"{decimal(low, digits)} to {decimal(high, digits)} {unit}"


def with_interval(value: float | None, ends: Sequence[float] | None, show: Show = percent) -> str:
    """Show a number and its interval: ``25.0 % [20.0, 30.0]``; the number alone where there is no interval."""
    return DASH if value is None else f"{show(value)} {interval(ends, show)}".rstrip()


def level(alpha: float) -> str:
    """Show the level of intervals: ``95 %`` for α = 0.05."""
    return f"{100 * (1 - alpha):g} %"


def parameter_count(parameters: int) -> str:
    """Show the size of a model: ``1.2 M``, ``0.5 B``."""
    billions = parameters / 10**9
    return f"{billions:.2g} B" if billions >= 0.1 else f"{parameters / 10**6:.2g} M"


def byte_size(size: float) -> str:
    """Show bytes in the largest unit that leaves at least one: ``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def duration(seconds: float) -> str:
    """Show a time: ``90 s``, ``15 min``, ``2.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def listed(items: Sequence[str], ending: str = "and") -> str:
    """Join items: ``a, b and c``."""
    *first, last = items
    return f"{', '.join(first)} {ending} {last}" if first else last


def counted(number: int, what: str) -> str:
    """Count things: ``1 rock``, ``18 rocks``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def quoted(text: str) -> str:
    """Put a token in a sentence, told apart from the words around it."""
    return f"“{text}”"


def _minus(text: str) -> str:
    return text.replace("-", MINUS)
