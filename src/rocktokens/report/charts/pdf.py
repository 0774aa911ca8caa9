"""A chart's PDF in one order: its writer numbers and lists the same objects at random, so that no two files agree.

1. The objects are read by the offsets of the file's own table (ISO 32000-1, 7.5.4), never by searching in streams.
2. Entries of a resource dictionary are sorted by name; then objects are numbered as they are met from the root on.
3. They are written in that order, under a new table.
"""

import re
from collections.abc import Iterator

_TABLE = re.compile(rb"xref\n0 (\d+)\n(.*?)trailer\n(.*?)startxref\n\d+\n%%EOF\s*$", re.DOTALL)
_RESOURCES = re.compile(rb"(?: +/[A-Za-z]+\d+ \d+ 0 R\n){2,}")
_REFERENCE = re.compile(rb"(\d+) 0 R\b")
_HEADER = re.compile(rb"\d+ 0 obj\n")
_STREAM = b"\nstream\n"


def in_one_order(pdf: bytes) -> bytes:
    """The same document, byte for byte the same for the same content."""
    table = _TABLE.search(pdf)
    if table is None:
        raise ValueError("the PDF has no table of objects at its end")
    bodies = {number: _sorted_resources(body) for number, body in _objects(pdf, table)}
    trailer = table.group(3)
    order = _met_from(trailer, bodies)
    numbers = {old: new for new, old in enumerate(order, start=1)}
    parts, offsets, at = [pdf[: _first_offset(table)]], [], _first_offset(table)
    for old in order:
        head, stream, rest = bodies[old].partition(_STREAM)
        parts.append(b"%d 0 obj\n%s%s%s" % (numbers[old], _renumbered(head, numbers), stream, rest))
        offsets.append(at)
        at += len(parts[-1])
    lines = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = re.sub(rb"/Size \d+", b"/Size %d" % (len(order) + 1), _renumbered(trailer, numbers))
    parts.append(b"xref\n0 %d\n0000000000 65535 f \n%strailer\n%s" % (len(order) + 1, lines, size))
    return b"".join((*parts, b"startxref\n%d\n%%%%EOF\n" % at))


def _entries(table: re.Match[bytes]) -> list[tuple[int, int]]:
    """Offset and number of every object in use, in order of place."""
    rows = [line.split() for line in table.group(2).splitlines()]
    return sorted((int(row[0]), number) for number, row in enumerate(rows) if row[2] == b"n")


def _first_offset(table: re.Match[bytes]) -> int:
    return _entries(table)[0][0]


def _objects(pdf: bytes, table: re.Match[bytes]) -> Iterator[tuple[int, bytes]]:
    """Number and content of every object, what lies between two objects included."""
    entries = _entries(table)
    ends = [*(offset for offset, _ in entries[1:]), table.start()]
    for (offset, number), end in zip(entries, ends, strict=True):
        yield number, _HEADER.sub(b"", pdf[offset:end], count=1)


def _sorted_resources(body: bytes) -> bytes:
    head, stream, rest = body.partition(_STREAM)
    return _RESOURCES.sub(lambda own: b"".join(sorted(own.group().splitlines(keepends=True))), head) + stream + rest


def _met_from(trailer: bytes, bodies: dict[int, bytes]) -> list[int]:
    """Objects in the order in which references lead to them, depth first."""
    met: dict[int, None] = {}
    waiting = [*reversed(_references(trailer))]
    while waiting:
        number = waiting.pop()
        if number not in met:
            met[number] = None
            waiting += reversed(_references(bodies[number].partition(_STREAM)[0]))
    return list(met)


def _references(head: bytes) -> list[int]:
    return [int(own) for own in _REFERENCE.findall(head)]


def _renumbered(head: bytes, numbers: dict[int, int]) -> bytes:
    return _REFERENCE.sub(lambda own: b"%d 0 R" % numbers[int(own.group(1))], head)
