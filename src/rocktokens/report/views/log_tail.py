"""The log of a run that may still be written: each reading takes in what was added since the last one.

A line that is not finished yet is left for the next reading; one that is damaged is left out, with a warning that
counts them. A log that was replaced, as a resumed run does to cut it back to its checkpoint, is read from its start.
"""

import logging
import os
from pathlib import Path
from typing import Any

from rocktokens.parsing import parse_json

_log = logging.getLogger(__name__)
LONGEST_LINE = 1 << 20
"""Bytes from the end of a log that hold its last line."""
LogLine = dict[str, Any]
"""One training step, whatever its policy logs."""


class LogTail:
    """The finished lines of a file of JSON objects."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._read_to = 0
        self._lines: list[LogLine] = []
        self.n_damaged = 0
        """Finished lines that are no JSON objects."""

    def lines(self) -> list[LogLine]:
        """Return all lines there are now; none where there is no log."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if identity != self._file or status.st_size < self._read_to:
                    self._file, self._read_to, self._lines, self.n_damaged = identity, 0, [], 0
                file.seek(self._read_to)
                added = file.read()
        except OSError:
            return []
        finished = added[: added.rfind(b"\n") + 1]
        self._read_to += len(finished)
        parsed = [_parsed(text) for text in finished.splitlines()]
        self._lines += [line for line in parsed if line is not None]
        if damaged := parsed.count(None):
            self.n_damaged += damaged
            _log.warning("%s: damaged lines are left out, %d so far", self._path, self.n_damaged)
        return list(self._lines)


def last_line(path: Path) -> LogLine | None:
    """Return the last finished line without reading the lines before it; None where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LONGEST_LINE))
            tail = file.read()
    except OSError:
        return None
    finished = tail[: tail.rfind(b"\n") + 1].splitlines()
    return next(filter(None, map(_parsed, reversed(finished))), None)


def _parsed(text: bytes) -> LogLine | None:
    """Parse the object on a line; None where a killed process left half of one."""
    try:
        line = parse_json(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
