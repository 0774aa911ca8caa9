"""``rocktokens gradients``: where the gradient goes, in logit space, in parameter space and through Adam."""

from typing import TYPE_CHECKING, Annotated

import typer

from rocktokens.cli.common import AsJson, Overrides, RunPath, notes, output, print_json, terminal
from rocktokens.config import Config, run_config
from rocktokens.run_dir import RunDir

if TYPE_CHECKING:
    from rocktokens.gradients.records import GradientsRecord


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
    record = run_gradients(run, run_config(run, [*(overrides or []), *settings]), checkpoint, baseline)
    if as_json:
        return print_json(record.to_record())
    from rocktokens.cli.gradients_tables import print_gradients

    print_gradients(record, show)
    output.print(f"everything: {run.gradients}", soft_wrap=True, markup=False)
    output.print(f"figures: {run.path / 'figures'}", soft_wrap=True, markup=False)


def run_gradients(
    run: RunDir, config: Config, checkpoint: int | None = None, baseline: int | None = None
) -> "GradientsRecord":
    """Measure with progress bars; commit gradients.json, then the figures as PNG."""
    with notes.status("loading"):
        from rocktokens.gradients.measure import measure_gradients
        from rocktokens.report.charts.gradient_charts import gradient_charts
        from rocktokens.report.charts.save import commit_charts

    with run.lock():
        record = measure_gradients(run, config, checkpoint, baseline, terminal)
        with notes.status("drawing"):
            commit_charts(run, gradient_charts(record, run.path.name))
    return record
