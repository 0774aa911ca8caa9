"""The log of a run that may still be written: every reading takes in what was added since the last one.

A line that is not finished yet is left for the next reading. A log that was replaced, as a resumed run does to cut it
back to its checkpoint, is read anew.
"""

import json
import os
from pathlib import Path
from typing import Any


class LogTail:
    """The finished lines of a file of JSON objects."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._read_to = 0
        self._lines: list[dict[str, Any]] = []

    def lines(self) -> list[dict[str, Any]]:
        """All lines there are now; none where there is no log."""
        try:
            with self._path.open("rb") as file:
                self._start_over_if_replaced(os.fstat(file.fileno()))
                file.seek(self._read_to)
                added = file.read()
        except OSError:
            return []
        finished = added[: added.rfind(b"\n") + 1]
        self._read_to += len(finished)
        self._lines += [line for text in finished.splitlines() if (line := _parsed(text)) is not None]
        return list(self._lines)

    def _start_over_if_replaced(self, file: os.stat_result) -> None:
        identity = (file.st_dev, file.st_ino)
        if identity != self._file or file.st_size < self._read_to:
            self._file, self._read_to, self._lines = identity, 0, []


def _parsed(text: bytes) -> dict[str, Any] | None:
    """The object on a line; None where a killed process left half of one."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
