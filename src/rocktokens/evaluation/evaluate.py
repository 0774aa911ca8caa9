"""The stage ``evaluate``: the accuracy of checkpoints, or of any model, on the run's task.

1. Every model answers the same prompts with the same random numbers (``accuracy``).
2. The accuracy is filed in evaluations.json under the model's name and its settings (``records``). The same question
   again is answered from the file; the model need not even be there any more.
3. ``seed`` is an argument of what is measured, not the run's: runs of different seeds that are compared answer the same
   prompts with the same random numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rocktokens.config import (
    Config,
    JsonlTask,
    checkpoint_label,
    checkpoint_names,
    evaluation_task,
    find_step,
    run_config,
    traced_students,
    unknown_checkpoint,
)
from rocktokens.evaluation.records import EvaluationRecord, Ledger
from rocktokens.models.fingerprints import model_identity
from rocktokens.progress import SILENT, Progress
from rocktokens.run_dir import RunDir, derive_seed, file_sha256


def evaluate(
    run: RunDir | str | Path,
    config: Config | None = None,
    models: Sequence[str] | Mapping[str, str] = ("last",),
    progress: Progress = SILENT,
    *,
    seed: int | None = None,
) -> list[EvaluationRecord]:
    """Measure the accuracy of each model that has not been measured under these settings, and file it in the run.

    Args:
        run: the run, or its folder; evaluations.json is there.
        config: gives the task, the prompts and how answers are sampled; default: the run's own.
        models: what to evaluate, as in ``resolve_models``; or what to load, by the name it is filed under.
        progress: shows what is going on.
        seed: of prompts and random numbers; default: the run's.

    Returns:
        One record per model, in the order asked for, measured now or before.

    Example: ``evaluate("runs/demo", models=["teacher", "last"])[1].accuracy``.
    """
    run = run if isinstance(run, RunDir) else RunDir(run)
    config = run_config(run) if config is None else config
    named = models if isinstance(models, Mapping) else resolve_models(run, config, models)
    seed = config.run.seed if seed is None else seed
    with run.lock():
        return [_kept_or_measured(run, config, name, model, seed, progress) for name, model in named.items()]


def resolve_models(run: RunDir, config: Config, names: Sequence[str]) -> dict[str, str]:
    """Return what to load for each name, by what it is filed under.

    A name is "teacher", "student", "all" traced checkpoints, one of them (its number, its own name, "first" or "last"),
    or any model.
    """
    students, called = traced_students(run, config), checkpoint_names(config)
    models: dict[str, str] = {}
    for name in names:
        if name in ("teacher", "student"):
            models[name] = getattr(config.models, name)
        elif name == "all" and students:
            models |= {_filed_as(step, called): model for step, model in students.items()}
        elif (step := find_step(name, run, config)) is not None:
            models[_filed_as(step, called)] = students[step]
        elif name in ("all", "first", "last") or name.isdecimal():
            raise unknown_checkpoint(name, run, config)
        else:
            models[name] = name
    return models


def _filed_as(step: int, called: Mapping[int, str]) -> str:
    """Return what a checkpoint is called: by its step, unless it has a name and so perhaps no step."""
    return f"checkpoint {checkpoint_label(step, called)}" if step in called else f"step {step}"


def _kept_or_measured(
    run: RunDir, config: Config, name: str, model: str, seed: int, progress: Progress
) -> EvaluationRecord:
    with progress.status("loading"):
        kept = kept_evaluation(run, config, name, model, seed=seed)
    return kept or _measured(run, config, name, model, seed, progress)


def kept_evaluation(run: RunDir, config: Config, name: str, model: str, *, seed: int) -> EvaluationRecord | None:
    """Return an evaluation that the run has already made under these settings, None if it has not."""
    return _ledger(run).find(name, _settings(run, config, model, seed))


def _ledger(run: RunDir) -> Ledger:
    """What the run has measured; nothing where the file was removed to measure again, or a killed process left it."""
    has_any = run.evaluations.exists() and run.lists(run.evaluations.name)
    return Ledger.load(run.verified(run.evaluations.name)) if has_any else Ledger()


def _measured(run: RunDir, config: Config, name: str, model: str, seed: int, progress: Progress) -> EvaluationRecord:
    """Let a model answer the evaluation's prompts, and file its accuracy in the run."""
    from rocktokens.tasks import make_task
    from rocktokens.tasks.base import prompts_to_grade, ungraded_note

    if run.lists(run.evaluations.name) and not run.evaluations.exists():
        progress.note(f"{run.evaluations} is listed in manifest.json and gone: accuracies are measured again")
    section = config.evaluation
    task = make_task(evaluation_task(config))
    prompts = prompts_to_grade(task, section.num_prompts, derive_seed(seed, "evaluation prompts"))
    if note := ungraded_note(task):
        progress.note(note)
    with progress.status("loading"):
        from rocktokens.evaluation.accuracy import measure_accuracy
        from rocktokens.models.load import load_model
        from rocktokens.models.projections import lay_side_by_side
        from rocktokens.rollouts.encode import Sampling
        from rocktokens.rollouts.sampler import make_sampler

        loaded = load_model(model, config.models.dtype, config.models.device)
        lay_side_by_side(loaded.model)
    with progress.bar(f"evaluating {name}", len(prompts) * section.num_samples) as advance:
        accuracy = measure_accuracy(
            make_sampler(config, loaded),
            loaded.tokenizer,
            task,
            prompts,
            Sampling.of(config.rollouts, derive_seed(seed, "evaluation"), section.temperature),
            num_samples=section.num_samples,
            on_done=advance,
        )
    record = EvaluationRecord(name=name, settings=_settings(run, config, loaded.name, seed), **asdict(accuracy))
    run.commit(run.evaluations.name, Ledger([*_ledger(run), record]).save)
    return record


def _settings(run: RunDir, config: Config, model: str, seed: int) -> dict[str, Any]:
    """Return what an accuracy depends on: the content of model, data and grader, not where they lie."""
    from rocktokens.tasks.graders import grader_identity

    task = evaluation_task(config)
    data = Path(task.path) if isinstance(task, JsonlTask) else None
    return {
        "model": model_identity(model, run),
        "dtype": config.models.dtype,
        "evaluation": config.evaluation.model_dump(mode="json") | {"task": task.model_dump(mode="json")},
        "data_sha256": file_sha256(data) if data and data.is_file() else None,  # loading says what is wrong
        "rollouts": config.rollouts.determining(),
        "seed": seed,
        **grader_identity(task),
    }
