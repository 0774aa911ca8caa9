"""How a long stage says where it is: bars, a status line, notes. Silent unless the caller shows them.

Every stage takes ``progress``; the command line passes one that draws on the terminal, a notebook may pass its own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    """What a stage may report."""

    def bar(self, label: str, total: int) -> AbstractContextManager[Advance]:
        """Show a bar with an estimate of the time left; the block gets a function that advances it."""
        ...

    def status(self, label: str) -> AbstractContextManager[object]:
        """Show that something is going on whose length is not known."""
        ...

    def note(self, line: str) -> None:
        """Show one line that stays."""
        ...

    def heading(self, title: str) -> None:
        """Show that one stage of several begins."""
        ...


class Silent:
    """Reports nothing."""

    def bar(self, label: str, total: int) -> AbstractContextManager[Advance]:
        """Show nothing."""
        return nullcontext(lambda _steps: None)

    def status(self, label: str) -> AbstractContextManager[object]:
        """Show nothing."""
        return nullcontext()

    def note(self, line: str) -> None:
        """Show nothing."""

    def heading(self, title: str) -> None:
        """Show nothing."""


SILENT = Silent()
