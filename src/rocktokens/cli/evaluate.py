"""``rocktokens evaluate``: accuracy of checkpoints, or of any model, on a task, with intervals."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from rocktokens.cli.common import (
    AsJson,
    Overrides,
    RunPath,
    config_of,
    notes,
    output,
    percent,
    percent_interval,
    print_json,
    progress_bar,
)
from rocktokens.cli.trace import make_sampler
from rocktokens.config import Config, JsonlTask, TaskSection, evaluation_task
from rocktokens.errors import RocktokensError, RunDirError
from rocktokens.run_dir import RunDir, derive_seed, file_sha256

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
    config = config_of(run, overrides)
    records = run_evaluate(run, config, resolve_models(run, config, checkpoint or ["last"]))
    if as_json:
        return print_json({"evaluations": records})
    output.print(accuracy_table(records))
    output.print(f"kept in {run.evaluations}", soft_wrap=True, markup=False)


def resolve_models(run: RunDir, config: Config, names: Sequence[str]) -> dict[str, str]:
    """What to load for each name given on the command line, in order."""
    from rocktokens.training.checkpoint import list_checkpoints

    steps = list_checkpoints(run)
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
    head = {"name": name, "settings": _settings(run, config, model)}
    for record in _read(run):
        if head.items() <= record.items():
            return record
    record = head | _evaluate_one(config, name, model)
    text = json.dumps({"schema_version": 1, "evaluations": [*_read(run), record]}, ensure_ascii=False)
    run.commit_text(run.evaluations.name, text + "\n")
    return record


def _evaluate_one(config: Config, name: str, model: str) -> Record:
    with notes.status("loading"):
        from rocktokens.interventions.evaluate import evaluate as measure
        from rocktokens.models.load import load_model
        from rocktokens.tasks import make_task

        loaded = load_model(model, config.models.dtype, config.models.device)
    section, rollouts = config.evaluation, config.rollouts
    task = make_task(evaluation_task(config))
    prompts = task.prompts(section.num_prompts, derive_seed(config.run.seed, "evaluation prompts"))
    with progress_bar(f"evaluating {name}", len(prompts) * section.num_samples) as advance:
        return measure(
            make_sampler(config, loaded),
            loaded.tokenizer,
            task,
            prompts,
            num_samples=section.num_samples,
            temperature=rollouts.temperature if section.temperature is None else section.temperature,
            max_new_tokens=rollouts.max_completion_length,
            seed=derive_seed(config.run.seed, "evaluation"),
            chat_template=rollouts.chat_template,
            max_prompt_length=rollouts.max_prompt_length,
            on_done=advance,
        ).to_record()


def _settings(run: RunDir, config: Config, model: str) -> Record:
    """What an accuracy depends on: the content of model and data, not where they lie or what they are called."""
    from rocktokens.models.fingerprints import model_identity

    task = evaluation_task(config)
    return {
        "model": model_identity(model, run),
        "dtype": config.models.dtype,
        "evaluation": config.evaluation.model_dump(mode="json") | {"task": task.model_dump(mode="json")},
        "data_sha256": _data_sha256(task),
        "rollouts": config.rollouts.model_dump(mode="json"),
        "seed": config.run.seed,
    }


def _data_sha256(task: TaskSection) -> str | None:
    """The hash of a file of prompts; None where there is none, or where loading it will say what is wrong."""
    if not isinstance(task, JsonlTask) or not Path(task.path).is_file():
        return None
    return file_sha256(Path(task.path))


def _read(run: RunDir) -> list[Record]:
    if not run.evaluations.exists():
        return []
    try:
        records = json.loads(run.evaluations.read_text(encoding="utf-8"))["evaluations"]
        if not all({"name", "settings"} <= record.keys() for record in records):
            raise ValueError("a record has no name or settings")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirError(
            f"{run.evaluations} is damaged ({type(error).__name__}: {error}): restore it from a copy of the run, or "
            "remove it to measure again"
        ) from None
    return records


def accuracy_table(records: Sequence[Record]) -> Table:
    """One row a model, all on one task: accuracy with its interval, length, and answers cut off."""
    table = Table(title=Text(f"accuracy on {records[0]['task']}"), title_justify="left")
    for name in ("model", "accuracy", "95 % interval", "prompts", "tokens", "cut off"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for record in records:
        interval = record["bootstrap_interval"] or record["wilson_interval"]
        table.add_row(
            Text(record["name"]),
            percent(record["accuracy"]),
            percent_interval(interval),
            str(record["n_prompts"]),
            f"{record['mean_response_length']:.0f}",
            percent(record["truncated_share"]),
        )
    return table
