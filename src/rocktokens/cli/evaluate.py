"""``rocktokens evaluate``: accuracy of checkpoints, or of any model, on a task, with intervals."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from rocktokens.cli.common import (
    AsJson,
    Overrides,
    RunPath,
    output,
    percent,
    percent_interval,
    print_json,
    terminal,
)
from rocktokens.config import run_config
from rocktokens.evaluation.evaluate import evaluate as evaluate_models
from rocktokens.evaluation.records import EvaluationRecord
from rocktokens.run_dir import RunDir


def evaluate(
    run_path: RunPath,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(help="A step of the run, `all`, `teacher`, `student`, or any model; default: the last step."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy; every model answers the same prompts with the same random numbers.

    Example: [bold]rocktokens evaluate runs/mine --checkpoint all --checkpoint teacher[/bold]
    """
    run = RunDir(run_path)
    records = evaluate_models(run, run_config(run, overrides), checkpoint or ["last"], terminal)
    if as_json:
        return print_json({"evaluations": [record.to_record() for record in records]})
    output.print(accuracy_table(records))
    output.print(f"kept in {run.evaluations}", soft_wrap=True, markup=False)


def accuracy_table(records: Sequence[EvaluationRecord]) -> Table:
    """One row per model, all on one task: accuracy with its interval, length, and answers cut off."""
    table = Table(title=Text(f"accuracy on {records[0].task}"), title_justify="left")
    for name in ("model", "accuracy", "95 % interval", "prompts", "tokens", "cut off"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for record in records:
        table.add_row(
            Text(record.name),
            percent(record.accuracy),
            percent_interval(record.interval),
            str(record.n_prompts),
            f"{record.mean_response_length:.0f}",
            percent(record.truncated_share),
        )
    return table
