"""A token strip in a notebook, its texts made visible and its rocks marked."""

from typing import TYPE_CHECKING

from rocktokens.display.numbers import decimal
from rocktokens.display.text import visible
from rocktokens.traces.notebook import Piece, strip_html

if TYPE_CHECKING:
    from rocktokens.report.views.strips import Strip, StripToken

LONGEST = 48


def rollout_html(strip: "Strip") -> str:
    """One rollout, token by token, coloured by kl."""
    grade = {True: ", right", False: ", wrong", None: ""}[strip.correct]
    title = f"{visible(strip.run)}: rollout {strip.rollout_id}, checkpoint {strip.checkpoint}{grade}; coloured by kl"
    return strip_html(title, [_piece(token) for token in strip.tokens])


def _piece(token: "StripToken") -> Piece:
    is_rock = token.rock_rank is not None
    return Piece(
        text=visible(token.text, LONGEST),
        kl=token.kl,
        tip=f"{token.token_id}: kl {decimal(token.kl, 3)} nats{f', rock {token.rock_rank}' if is_rock else ''}",
        is_rock=is_rock,
        ends_line="\n" in token.text,
    )
