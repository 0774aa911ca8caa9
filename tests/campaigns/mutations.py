"""Seeded damage: to bytes, and to the structure of what JSON and TOML hold."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

MOST = 4
"""Mutations of one input."""
DEEP = 300
"""Levels of what is nested too deep for its reader, or nearly."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.0, -0.0, 1e308, 5e-324, 0.5),
    *(float("nan"), float("inf"), "", " ", "x", "\x00", "\ud800", "../../etc/passwd", "/", "nan", "1", "é" * 50),
    *("<script>", "\x1b[2J", [], {}, [[]], [None], {"": None}, {"x": {}}, [0] * 50, "a" * 5000),
)
"""What stands where something else belongs."""
TOKENS = (
    b"",
    b"\x00",
    b"\xff",
    b"\xfe\xff",
    b"\n",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"=",
    b"-",
    b"e",
    b"\\u0000",
)
PIECES = (
    *TOKENS,
    b"null",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b"[" * 50_000,
    b'{"a":' * 5000,
    b"\\ud800",
    b"#",
)


# Bytes


def flipped(rng: random.Random, content: bytes) -> bytes:
    """One bit is another."""
    own = bytearray(content)
    own[rng.randrange(len(own))] ^= 1 << rng.randrange(8)
    return bytes(own)


def zeroed(rng: random.Random, content: bytes) -> bytes:
    """A stretch is zero, as after a write that never reached the disk; one that was zero already becomes ones."""
    start, end = _stretch(rng, content)
    filling = b"\x00" if any(content[start:end]) else b"\xff"
    return content[:start] + filling * (end - start) + content[end:]


def garbled(rng: random.Random, content: bytes) -> bytes:
    """A stretch is noise."""
    start, end = _stretch(rng, content)
    noise = rng.randbytes(end - start)
    return content[:start] + (noise if noise != content[start:end] else b"\x00" * (end - start)) + content[end:]


def truncated(rng: random.Random, content: bytes) -> bytes:
    """The end is missing, or all of it."""
    return content[: rng.randrange(len(content))]


def extended(rng: random.Random, content: bytes) -> bytes:
    """There is more at the end: noise, or the content again."""
    return content + (content if rng.random() < 0.3 else rng.randbytes(rng.randint(1, 64)))


def cut_out(rng: random.Random, content: bytes) -> bytes:
    """A stretch in the middle is missing."""
    start, end = _stretch(rng, content)
    return content[:start] + content[end:]


def spliced(rng: random.Random, content: bytes) -> bytes:
    """A piece that parsers stumble over stands somewhere."""
    at = rng.randint(0, len(content))
    return content[:at] + rng.choice(PIECES) + content[at:]


def doubled(rng: random.Random, content: bytes) -> bytes:
    """A stretch stands there twice."""
    start, end = _stretch(rng, content)
    return content[:end] + content[start:end] + content[end:]


DAMAGES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    own.__name__: own for own in (flipped, zeroed, garbled, truncated, extended, cut_out)
}
"""What disks, transfers and editors do to a file."""
EDITS = (flipped, garbled, truncated, cut_out, spliced, doubled)


def edited(rng: random.Random, content: bytes) -> bytes:
    """The bytes after a few edits."""
    for _ in range(rng.randint(1, MOST)):
        content = rng.choice(EDITS)(rng, content) if content else spliced(rng, content)
    return content


def _stretch(rng: random.Random, content: bytes) -> tuple[int, int]:
    start = rng.randrange(len(content))
    return start, min(len(content), start + 1 + int(rng.expovariate(1 / 64)))


# Structure


def mutated(rng: random.Random, record: Any) -> Any:
    """A record whose values, keys and lists are not what they were in a few places."""
    own = copy.deepcopy(record)
    for _ in range(rng.randint(1, MOST)):
        own = _with_change(rng, own)
    return own


def _with_change(rng: random.Random, record: Any) -> Any:
    """The record after one change, at a place reached by walking down at random."""
    inner, outer, key = record, None, None
    while isinstance(inner, dict | list) and inner and rng.random() < 0.85:
        outer, key = inner, rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        inner = outer[key]
    if outer is None:
        return _value(rng, record)
    change = rng.randrange(6)
    if change == 0:
        del outer[key]
    elif change == 1 and isinstance(outer, dict):
        outer[rng.choice(("", "x", f"{key}s", "__class__", "\x00", "files"))] = inner
    elif change == 1:
        outer.insert(key, copy.deepcopy(inner))
    elif change == 2 and isinstance(outer, dict):
        other = rng.choice(list(outer))
        outer[key], outer[other] = outer[other], outer[key]
    else:
        outer[key] = _value(rng, inner)
    return record


def _value(rng: random.Random, before: Any) -> Any:
    """Something of another type, or nearly the same."""
    if isinstance(before, bool) or before is None or rng.random() < 0.6:
        return copy.deepcopy(rng.choice(VALUES)) if rng.random() < 0.97 else _nested(rng)
    if isinstance(before, int | float):
        return rng.choice(
            (
                -before,
                before + 1,
                before * 10**9,
                hex(before) if isinstance(before, int) else before.hex(),
                [before],
                before // 3,
            )
        )
    if isinstance(before, str):
        return rng.choice((before[:-1], before + "x", before.upper(), before * 2, repr(before), [before]))
    if isinstance(before, list):
        return rng.choice((before[::-1], before * 2, before[:1], {"0": before}, [before]))
    return rng.choice((list(before), list(map(list, before.items())), {**before, "x": 1}, {}))


def _nested(rng: random.Random) -> Any:
    own: Any = 0
    for _ in range(rng.randint(1, DEEP)):
        own = [own] if rng.random() < 0.5 else {"a": own}
    return own


def as_json(record: Any) -> bytes:
    """JSON of anything a mutation makes: NaN and lone surrogates too."""
    return json.dumps(record).encode("utf-8", "surrogatepass")
