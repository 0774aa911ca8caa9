"""A token strip for a notebook: still HTML, no script and no style sheet, so that any front end shows it.

1. The kl of a token, between the 5th and the 95th percentile of the strip, becomes one of ten colours of cividis
   (https://doi.org/10.1371/journal.pone.0199239) and the thickness of a line below the token.
2. Rocks have a diamond; a token's numbers are its tooltip.
3. All text is escaped, and made visible first.
"""

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from rocktokens.report.text import visible
from rocktokens.report.wording import decimal

if TYPE_CHECKING:
    from rocktokens.report.strips import Strip, StripToken

LEVELS = (
    *(("#fdfdfb", "#000"), ("#f7f0cc", "#000"), ("#e7e2c3", "#000"), ("#d2cfb9", "#000"), ("#bbb8ac", "#000")),
    *(("#9f9d9b", "#000"), ("#7c7e88", "#000"), ("#4d5c79", "#fff"), ("#183a6d", "#fff"), ("#00275f", "#fff")),
)
"""Background and ink, from little to much."""
LONGEST = 48
_STRIP = "font:14px/2 ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;background:#fdfdfb;padding:8px;"


def strip_html(strip: "Strip") -> str:
    """One rollout, token by token, coloured by kl."""
    kl = np.array([np.nan if token.kl is None else token.kl for token in strip.tokens])
    known = kl[np.isfinite(kl)]
    low, high = np.quantile(known, (0.05, 0.95)) if len(known) else (0.0, 0.0)
    spans = [_span(token, level(value, low, high)) for token, value in zip(strip.tokens, kl, strict=True)]
    grade = {True: ", right", False: ", wrong", None: ""}[strip.correct]
    title = f"{visible(strip.run)}: rollout {strip.rollout_id}, checkpoint {strip.checkpoint}{grade}; coloured by kl"
    return f'<div><div>{escape(title)}</div><div style="{_STRIP}">{"".join(spans)}</div></div>'


def level(value: float, low: float, high: float) -> int:
    """Which of the colours a value has."""
    if not np.isfinite(value):
        return 0
    share = (value - low) / (high - low) if high > low else float(value > high)
    return round(min(max(share, 0.0), 1.0) * (len(LEVELS) - 1))


def _span(token: "StripToken", at: int) -> str:
    background, ink = LEVELS[at]
    style = f"background:{background};color:{ink};border-bottom:{at / 2:g}px solid {ink};unicode-bidi:isolate;"
    rock = "" if token.rock_rank is None else f", rock {token.rock_rank}"
    mark = "" if token.rock_rank is None else '<sup style="color:#d55e00;line-height:0">◆</sup>'
    tip = f"{token.token_id}: kl {decimal(token.kl, 3)} nats{rock}"
    line_end = "<br>" if "\n" in token.text else ""
    return f'{mark}<span style="{style}" title="{escape(tip)}">{escape(visible(token.text, LONGEST))}</span>{line_end}'
