"""Token text for people: a token is any bytes a model was taught, and must not be able to act on what shows it.

1. Whitespace gets a mark; every character that cannot be seen, or that moves others about (control and bidi
   characters, escapes, fillers, lone surrogates), is written as its code point.
2. A combining mark at the start sits on a dotted circle, not on whatever is printed before it.
3. Long texts are cut, never inside a code point that was written out.
"""

import unicodedata
from bisect import bisect_right
from itertools import accumulate

MAX_LENGTH = 24
MAX_TEXT = 20_000
_LAYOUT = " \t\n"
_MARKS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_FILLERS = (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0)
_VARIATION_SELECTORS = (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
_NOT_SEEN = frozenset((*map(chr, (*_FILLERS, *_VARIATION_SELECTORS)), *_MARKS.values()))
"""Printable by the book, but they show nothing, or would be taken for what they mark."""
MARKS_LEGEND = (
    "In tokens, {} is a space, {} a line end and {} a tab; \\u and digits stand for a character that could not be seen."
).format(*(_MARKS[character] for character in " \n\t"))


def visible(text: str, max_length: int = MAX_LENGTH) -> str:
    """Token text on one line, at most ``max_length`` characters, with whitespace and control characters visible."""
    return _cut([_shown(character) for character in _start(text, max_length)], max_length) or "∅"


def legible(text: str, max_length: int = MAX_TEXT) -> str:
    """Text with its spaces, tabs and line ends, all else as ``visible`` shows it; at most ``max_length`` characters."""
    return _cut([c if c in _LAYOUT else _shown(c) for c in _start(text, max_length)], max_length)


def printable(text: str) -> str:
    """A name or a path on one line: spaces and letters as they are, what cannot be printed as its code point."""
    return "".join(c if c.isprintable() else _code_point(c) for c in text)


def _start(text: str, max_length: int) -> str:
    """What of a text can matter, since a character shows as at least one; a mark at its start gets a seat."""
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
