"""``rocktokens gradients``: where the gradient goes, in logit space, in parameter space and through Adam."""

from typing import Annotated

import typer

from rocktokens.cli.common import AsJson, Overrides, RunPath, notes, output, print_json, terminal
from rocktokens.config import run_config
from rocktokens.run_dir import RunDir


def gradients(
    run_path: RunPath,
    checkpoint: Annotated[int | None, typer.Option(help="The student to look at; default that of the rocks.")] = None,
    baseline: Annotated[int | None, typer.Option(help="The earlier student; default that of the rocks.")] = None,
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
    with notes.status("loading"):
        from rocktokens.cli.gradients_tables import print_gradients
        from rocktokens.gradients.measure import measure_gradients
        from rocktokens.report.charts.figures import draw_figures

    with run.lock():
        record = measure_gradients(run, config, checkpoint, baseline, terminal)
        with notes.status("drawing"):
            draw_figures(run, run.gradients.name)
    if as_json:
        return print_json(record.to_record())
    print_gradients(record, show)
    output.print(f"everything: {run.gradients}", soft_wrap=True, markup=False)
    output.print(f"figures: {run.path / 'figures'}", soft_wrap=True, markup=False)
