"""``rocktokens evaluate``: accuracy of checkpoints, or of any model, on a task, with intervals."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from rocktokens.cli.common import (
    AsJson,
    Overrides,
    RunPath,
    notes,
    output,
    print_json,
    progress_bar,
)
from rocktokens.cli.tables import print_table
from rocktokens.config import Config, run_config
from rocktokens.errors import RocktokensError
from rocktokens.report.tables import accuracy_table
from rocktokens.run_dir import RunDir

Record = dict[str, Any]


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
    config = run_config(run, overrides)
    records = run_evaluate(run, config, resolve_models(run, config, checkpoint or ["last"]))
    if as_json:
        return print_json({"evaluations": records})
    print_table(accuracy_table(records))
    output.print(f"kept in {run.evaluations}", soft_wrap=True, markup=False)


def resolve_models(run: RunDir, config: Config, names: Sequence[str]) -> dict[str, str]:
    """What to load for each name given on the command line, in order."""
    steps = run.checkpoints()
    models: dict[str, str] = {}
    for name in names:
        if name in ("teacher", "student"):
            models[name] = getattr(config.models, name)
        elif name in ("all", "last") or name.isdecimal():
            chosen = {"all": steps, "last": steps[-1:]}.get(name, [int(name)] if name.isdecimal() else [])
            if not chosen or not set(chosen) <= set(steps):
                raise RocktokensError(f"checkpoint {name!r} is not in {run.path}: it has the steps {steps}")
            models |= {f"step {step}": str(run.checkpoint(step)) for step in chosen}
        else:
            models[name] = name
    return models


def run_evaluate(run: RunDir, config: Config, models: dict[str, str]) -> list[Record]:
    """Evaluate each model that has not been evaluated with these settings yet; all records, in the order asked for."""
    with run.lock():
        return [_kept_or_measured(run, config, name, model) for name, model in models.items()]


def _kept_or_measured(run: RunDir, config: Config, name: str, model: str) -> Record:
    with notes.status("loading"):
        from rocktokens.evaluation.ledger import kept_evaluation, measure_evaluation
        from rocktokens.models.load import load_model

        kept = kept_evaluation(run, config, name, model, seed=config.run.seed)
        if kept is not None:
            return kept
        loaded = load_model(model, config.models.dtype, config.models.device)
    return measure_evaluation(run, config, name, loaded, seed=config.run.seed, progress=progress_bar)
