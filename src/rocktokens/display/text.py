"""The one escaper of token text: a token is any bytes a model was taught, and must not act on what shows it.

Characters, the same everywhere:

1. ``visible`` marks whitespace and writes every character that cannot be seen, or that moves others (control and bidi
   characters, escapes, fillers, lone surrogates), as its code point. A combining mark at the start sits on a dotted
   circle, not on whatever is printed before it. Long texts are cut, never inside a code point that was written out.
2. ``legible`` does the same for longer text that keeps its spaces, tabs and line ends; ``printable`` for names.

Media, each with characters of its own that act:

3. ``for_terminal``: a Rich text, so that nothing is read as markup.
4. ``for_html``: escaped for an element or a quoted attribute. (Pages are made by Jinja, which escapes by itself.)
5. ``for_json``: the same value, with what cannot be printed as escapes of JSON.
6. ``for_csv``: no spreadsheet evaluates it. Text that begins like a formula (= + - @, in full width too, after spaces
   or not; tab, carriage return) gets a leading apostrophe (https://owasp.org/www-community/attacks/CSV_Injection), and
   so does every place where a spreadsheet that separates by semicolons or tabs would see a cell begin like one.
"""

import json
import re
import unicodedata
from bisect import bisect_right
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

MAX_LENGTH = 24
MAX_TEXT = 20_000
MAX_CELL = 1_000
"""Characters of a text in a CSV cell; spreadsheets cut longer ones themselves further on."""
_LAYOUT = " \t\n"
_MARKS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_FILLERS = (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0)
_VARIATION_SELECTORS = (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
_NOT_SEEN = frozenset((*map(chr, (*_FILLERS, *_VARIATION_SELECTORS)), *_MARKS.values()))
"""Printable according to Unicode, but they show nothing, or would be mistaken for a mark of ours."""
_FORMULA_START = re.compile(r"(^|[;\t])(?=\s*[=+\-@＝＋－＠])|^(?=[\t\r])")
MARKS_LEGEND = (
    "In tokens, {} is a space, {} a line end and {} a tab; \\u and digits stand for a character that could not be seen."
).format(*(_MARKS[character] for character in " \n\t"))


def visible(text: str, max_length: int = MAX_LENGTH) -> str:
    """Show token text on one line, with whitespace and control characters visible; cut at ``max_length``."""
    return _cut([_shown(character) for character in _start(text, max_length)], max_length) or "∅"


def legible(text: str, max_length: int = MAX_TEXT) -> str:
    """Show text with its spaces, tabs and line ends, everything else as ``visible`` does; cut at ``max_length``."""
    return _cut([c if c in _LAYOUT else _shown(c) for c in _start(text, max_length)], max_length)


def printable(text: str) -> str:
    """Show a name or a path on one line: spaces and letters as they are, what cannot be printed as its code point."""
    return "".join(c if c.isprintable() else _code_point(c) for c in text)


def for_terminal(text: str, style: str = "") -> "Text":
    """Return text that Rich prints as it is, never as markup."""
    from rich.text import Text

    return Text(printable(text), style)


def for_html(text: str) -> str:
    """Escape text for an HTML element or a quoted attribute."""
    return escape(printable(text))


def for_json(text: str) -> str:
    """Return JSON of the same value in which every character can be printed."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def for_csv(value: Any) -> Any:
    """Return a cell that no spreadsheet evaluates; numbers stay numbers."""
    if not isinstance(value, str):
        return value
    inert = _FORMULA_START.sub(r"\1'", value[:MAX_CELL])
    return printable(inert) + ("…" if len(value) > MAX_CELL else "")


def _start(text: str, max_length: int) -> str:
    """Return the characters that can be shown, each as at least one; a combining mark at the start gets a circle."""
    if text and unicodedata.category(text[0]) in ("Mn", "Me", "Mc") and _is_seen(text[0]):
        text = "◌" + text[: max_length + 1]
    return text[: max_length + 1]


def _cut(shown: list[str], max_length: int) -> str:
    ends = list(accumulate(map(len, shown)))
    if not ends or ends[-1] <= max_length:
        return "".join(shown)
    return "".join(shown[: bisect_right(ends, max_length - 1)]) + "…"


def _shown(character: str) -> str:
    mark = _MARKS.get(character)
    return mark or (character if _is_seen(character) else _code_point(character))


def _is_seen(character: str) -> bool:
    return character.isprintable() and character not in _NOT_SEEN


def _code_point(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
