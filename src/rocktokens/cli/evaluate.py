"""``rocktokens evaluate``: accuracy of checkpoints, or of any model, on a task, with intervals."""

from typing import Annotated

import typer

from rocktokens.cli.common import AsJson, Overrides, RunPath, output, print_json, terminal
from rocktokens.cli.tables import print_table
from rocktokens.config import run_config
from rocktokens.evaluation.evaluate import evaluate as evaluate_models
from rocktokens.evaluation.records import accuracy_table
from rocktokens.run_dir import RunDir


def evaluate(
    run_path: RunPath,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="A number or name, `first`, `last`, `all`, `teacher`, `student`, or any model; default last."
        ),
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
    print_table(accuracy_table(records))
    output.print(f"kept in {run.evaluations}", soft_wrap=True, markup=False)
