"""A token strip for a notebook: still HTML, no script and no style sheet, so that any front end shows it.

1. The kl of a token, between the 5th and the 95th percentile of the strip, becomes one of ten colours of cividis
   (https://doi.org/10.1371/journal.pone.0199239) and the thickness of a line below the token.
2. Rocks have a diamond; a token's numbers are its tooltip.
3. All text is escaped; that it can be seen is up to who gives it. Long strips are cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

LEVELS = (
    *(("#fdfdfb", "#000"), ("#f7f0cc", "#000"), ("#e7e2c3", "#000"), ("#d2cfb9", "#000"), ("#bbb8ac", "#000")),
    *(("#9f9d9b", "#000"), ("#7c7e88", "#000"), ("#4d5c79", "#fff"), ("#183a6d", "#fff"), ("#00275f", "#fff")),
)
"""Background and ink, from little to much."""
MOST = 1_000
"""Tokens of a strip; the others are counted."""
_STRIP = (
    "font:14px/2 ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;background:#fdfdfb;color:#000;padding:8px;"
    "white-space:pre-wrap;"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a strip."""

    text: str
    """As it is to be read, on one line."""
    kl: float | None
    tip: str
    is_rock: bool = False
    ends_line: bool = False


def strip_html(title: str, pieces: Sequence[Piece]) -> str:
    """The tokens one after the other under a title, coloured by kl."""
    shown = pieces[:MOST]
    kl = np.array([np.nan if piece.kl is None else piece.kl for piece in shown])
    known = kl[np.isfinite(kl)]
    low, high = np.quantile(known, (0.05, 0.95)) if len(known) else (0.0, 0.0)
    spans = "".join(_span(piece, level(value, low, high)) for piece, value in zip(shown, kl, strict=True))
    more = f"<div>… {len(pieces) - MOST:,} more</div>" if len(pieces) > MOST else ""
    return f'<div><div>{escape(title)}</div><div style="{_STRIP}">{spans}</div>{more}</div>'


def level(value: float, low: float, high: float) -> int:
    """Which of the colours a value has."""
    if not np.isfinite(value):
        return 0
    share = (value - low) / (high - low) if high > low else float(value > high)
    return round(min(max(share, 0.0), 1.0) * (len(LEVELS) - 1))


def _span(piece: Piece, at: int) -> str:
    background, ink = LEVELS[at]
    style = f"background:{background};color:{ink};border-bottom:{at / 2:g}px solid {ink};unicode-bidi:isolate;"
    mark = '<sup style="color:#d55e00;line-height:0">◆</sup>' if piece.is_rock else ""
    line_end = "<br>" if piece.ends_line else ""
    return f'{mark}<span style="{style}" title="{escape(piece.tip)}">{escape(piece.text)}</span>{line_end}'
