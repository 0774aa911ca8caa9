"""``rocktokens gradients``: where the gradient goes, in logit space, in parameter space and through Adam."""

from typing import Annotated

import typer

from rocktokens.cli.common import (
    AsJson,
    Overrides,
    RunPath,
    notes,
    output,
    print_checkpoint_names,
    print_json,
    terminal,
)
from rocktokens.config import Config, find_step, require_step, run_config
from rocktokens.run_dir import RunDir
from rocktokens.types import RockSet


def gradients(
    run_path: RunPath,
    checkpoint: Annotated[
        str | None, typer.Option(help="The student to look at, by number or name; default that of the rocks.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The earlier student, by number or name; default that of the rocks.")
    ] = None,
    batches: Annotated[int | None, typer.Option(help="Batches of parameter space; intervals are over them.")] = None,
    show: Annotated[int, typer.Option(min=1, help="Rows of the table of types.")] = 20,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show who owns the gradient: in logit space, in parameter space and in Adam's step.

    The numbers go into RUN/gradients.json.

    Example: [bold]rocktokens gradients runs/mine --batches 8[/bold]
    """
    run = RunDir(run_path)
    settings = [] if batches is None else [f"gradients.batches={batches}"]
    config = run_config(run, [*(overrides or []), *settings])
    RockSet.load(run.verified(run.rocks.name))  # a file that is missing is named before anything heavy is loaded
    with notes.status("loading"):
        from rocktokens.cli.gradients_tables import print_gradients
        from rocktokens.gradients.measure import measure_gradients
        from rocktokens.report.charts.figures import draw_figures

    with run.lock():
        steps = (None if name is None else _step(name, run, config) for name in (checkpoint, baseline))
        record = measure_gradients(run, config, *steps, progress=terminal)
        with notes.status("drawing"):
            draw_figures(run, run.gradients.name)
    if as_json:
        return print_json(record.to_record())
    print_checkpoint_names(run)
    print_gradients(record, show)
    output.print(f"everything: {run.gradients}", soft_wrap=True, markup=False)
    output.print(f"figures: {run.path / 'figures'}", soft_wrap=True, markup=False)


def _step(name: str, run: RunDir, config: Config) -> int:
    """Return the step of a checkpoint by number or name; a number without traces is refused where they are read."""
    step = find_step(name, run, config)
    return int(name) if step is None and name.isdecimal() else require_step(name, run, config)
