"""What the verbs share: their options, the terminal that stages report to, and JSON output.

Names of runs, keys and files are whatever someone called them: what is printed acts on no terminal (``display.text``).
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from rocktokens.config import checkpoint_label, run_checkpoint_names
from rocktokens.display.text import for_json, for_terminal, printable
from rocktokens.run_dir import RunDir

ConfigPath = Annotated[
    Path, typer.Argument(metavar="RUN.TOML", help="The config of the run, or a recipe's name.", show_default=False)
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one value of the config; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]

FILE_WIDTH = 112
"""Columns of tables that go to a file or a pipe; a terminal has its own width."""


class InertConsole(Console):
    """Prints strings with everything that is not seen, but line ends, as its code point. Texts come escaped already."""

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return a string as Rich shows it; styles are added to what is harmless."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **settings)


output = InertConsole(emoji=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
notes = InertConsole(stderr=True, emoji=False)


def print_json(record: dict[str, Any]) -> None:
    """Print the result as one JSON object on standard output, which may be a terminal."""
    typer.echo(for_json(json.dumps(record, ensure_ascii=False, allow_nan=False)))


def print_checkpoint_names(run: RunDir) -> None:
    """Print which students the numbers of checkpoints stand for, where they have names of their own."""
    if names := run_checkpoint_names(run):
        listed = ", ".join(checkpoint_label(step, names) for step in names)
        output.print(f"checkpoints: {listed}", soft_wrap=True, markup=False, highlight=False)


class _Bar(Progress):
    """A bar that goes away when what it measures fails: what stays is the sentence that says why."""

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if exc_type is None:
            return super().__exit__(exc_type, exc_val, exc_tb)
        self.live.transient = True
        return self.live.stop()


class Terminal:
    """Shows on standard error what a stage reports; see ``rocktokens.progress.Progress``."""

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a bar with an estimate of the time left, on the first process of several; none for no work at all."""
        if not total:
            yield lambda _steps: None
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with _Bar(*columns, console=notes, disable=os.environ.get("LOCAL_RANK", "0") != "0") as bars:
            task = bars.add_task(printable(label), total=total)
            yield lambda steps: bars.update(task, advance=steps)

    def status(self, label: str) -> AbstractContextManager[object]:
        """Show a spinner with a label."""
        return notes.status(for_terminal(label))

    def note(self, line: str) -> None:
        """Print one line."""
        notes.print(line, markup=False, highlight=False, soft_wrap=True)

    def heading(self, title: str) -> None:
        """Print a rule with the title of what comes next."""
        notes.rule(for_terminal(title))


terminal = Terminal()
