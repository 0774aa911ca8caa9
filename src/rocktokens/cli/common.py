"""What the verbs share: their options, progress bars, JSON output, and names for models and checkpoints."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rocktokens.config import Config, load_config
from rocktokens.run_dir import RunDir

ConfigPath = Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The config of the run.", show_default=False)]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one value of the config; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]

output = Console(emoji=False)
notes = Console(stderr=True, emoji=False)


def print_json(record: dict[str, Any]) -> None:
    """The result as one JSON object on standard output."""
    typer.echo(json.dumps(record, ensure_ascii=False, allow_nan=False))


class _Bar(Progress):
    """A bar that goes away when what it measures fails: what stays is the sentence that says why."""

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if exc_type is None:
            return super().__exit__(exc_type, exc_val, exc_tb)
        self.live.transient = True
        return self.live.stop()


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with an estimate of the time left, on standard error; yields a function to advance it by some."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with _Bar(*columns, console=notes, disable=os.environ.get("LOCAL_RANK", "0") != "0") as progress:
        task = progress.add_task(label, total=total)
        yield lambda steps: progress.update(task, advance=steps)


def config_of(run: RunDir, overrides: list[str] | None) -> Config:
    """The config a run was started with, overrides applied, pointing at where the run lies now."""
    run.require()
    return load_config(run.config, [*(overrides or []), f"run.directory={json.dumps(str(run.path))}"])


def visible(text: str) -> str:
    """Token text with its whitespace and control characters made visible."""
    marks = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
    return "".join(marks.get(c, c if c.isprintable() else f"\\u{ord(c):04x}") for c in text) or "∅"


def percent(share: float | None) -> str:
    """A share as a percentage, or a dash where there is none."""
    return "—" if share is None else f"{100 * share:.1f} %"


def percent_interval(interval: tuple[float, float]) -> str:
    """An interval of shares in percent."""
    return f"[{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
