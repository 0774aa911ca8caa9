"""A token strip for a notebook: HTML without a script or a style sheet, so that any front end shows it.

1. The kl of a token, between the 5th and the 95th percentile of the strip, becomes one of ten colours of cividis
   (https://doi.org/10.1371/journal.pone.0199239) and the thickness of a line below the token.
2. Rocks have a diamond; a token's numbers are its tooltip.
3. All text is made visible and escaped here. Long strips are cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rocktokens.display.numbers import decimal
from rocktokens.display.text import for_html, visible

LEVELS = (
    *(("#fdfdfb", "#000"), ("#f7f0cc", "#000"), ("#e7e2c3", "#000"), ("#d2cfb9", "#000"), ("#bbb8ac", "#000")),
    *(("#9f9d9b", "#000"), ("#7c7e88", "#000"), ("#4d5c79", "#fff"), ("#183a6d", "#fff"), ("#00275f", "#fff")),
)
"""Background and ink, from little to much."""
MOST, LONGEST = 1_000, 48
"""Tokens of a strip, the others are counted; and characters of a token."""
_STRIP = (
    "font:14px/2 ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;background:#fdfdfb;color:#000;padding:8px;"
    "white-space:pre-wrap;"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a strip."""

    token_id: int
    text: str
    kl: float | None
    rock_rank: int | None = None
    """None where it is no rock."""


def strip_html(title: str, pieces: Sequence[Piece]) -> str:
    """Show the tokens one after the other under a title, coloured by kl."""
    shown = pieces[:MOST]
    kl = np.array([np.nan if piece.kl is None else piece.kl for piece in shown])
    known = kl[np.isfinite(kl)]
    low, high = np.quantile(known, (0.05, 0.95)) if len(known) else (0.0, 0.0)
    spans = "".join(_span(piece, level(value, low, high)) for piece, value in zip(shown, kl, strict=True))
    more = f"<div>… {len(pieces) - MOST:,} more</div>" if len(pieces) > MOST else ""
    return f'<div><div>{for_html(title)}</div><div style="{_STRIP}">{spans}</div>{more}</div>'


def level(value: float, low: float, high: float) -> int:
    """Choose the colour of a value."""
    if not np.isfinite(value):
        return 0
    share = (value - low) / (high - low) if high > low else float(value > high)
    return round(min(max(share, 0.0), 1.0) * (len(LEVELS) - 1))


def _span(piece: Piece, at: int) -> str:
    background, ink = LEVELS[at]
    style = f"background:{background};color:{ink};border-bottom:{at / 2:g}px solid {ink};unicode-bidi:isolate;"
    is_rock = piece.rock_rank is not None
    mark = '<sup style="color:#d55e00;line-height:0">◆</sup>' if is_rock else ""
    tip = f"{piece.token_id}: kl {decimal(piece.kl, 3)} nats{f', rock {piece.rock_rank}' if is_rock else ''}"
    shown = for_html(visible(piece.text, LONGEST))
    line_end = "<br>" if "\n" in piece.text else ""
    return f'{mark}<span style="{style}" title="{for_html(tip)}">{shown}</span>{line_end}'
