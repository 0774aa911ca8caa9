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
from typing import TYPE_CHECKING, Any

from rocktokens.config import Config, JsonlTask, evaluation_task, run_config
from rocktokens.errors import RocktokensError
from rocktokens.evaluation.records import EvaluationRecord, Ledger
from rocktokens.models.fingerprints import model_identity
from rocktokens.progress import SILENT, Progress
from rocktokens.run_dir import RunDir, derive_seed, file_sha256

if TYPE_CHECKING:
    from rocktokens.models.load import LoadedModel


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
    """Return what to load for each name: a step, "all" steps, the "last", "teacher", "student", or any model."""
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


def _kept_or_measured(
    run: RunDir, config: Config, name: str, model: str, seed: int, progress: Progress
) -> EvaluationRecord:
    with progress.status("loading"):
        kept = kept_evaluation(run, config, name, model, seed=seed)
        if kept is not None:
            return kept
        from rocktokens.models.load import load_model

        loaded = load_model(model, config.models.dtype, config.models.device)
    return _measured(run, config, name, loaded, seed, progress)


def kept_evaluation(run: RunDir, config: Config, name: str, model: str, *, seed: int) -> EvaluationRecord | None:
    """Return an evaluation that the run has already made under these settings, None if it has not."""
    return _ledger(run).find(name, _settings(run, config, model, seed))


def _ledger(run: RunDir) -> Ledger:
    """What the run has measured; nothing where the file was removed to measure again, or a killed process left it."""
    has_any = run.evaluations.exists() and run.lists(run.evaluations.name)
    return Ledger.load(run.verified(run.evaluations.name)) if has_any else Ledger()


def _measured(
    run: RunDir, config: Config, name: str, loaded: "LoadedModel", seed: int, progress: Progress
) -> EvaluationRecord:
    """Let a model answer the evaluation's prompts, and file its accuracy in the run."""
    from rocktokens.evaluation.accuracy import measure_accuracy
    from rocktokens.rollouts.encode import Sampling
    from rocktokens.rollouts.sampler import make_sampler
    from rocktokens.tasks import make_task

    section = config.evaluation
    task = make_task(evaluation_task(config))
    prompts = task.prompts(section.num_prompts, derive_seed(seed, "evaluation prompts"))
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
    """Return what an accuracy depends on: the content of model and data, not where they lie or what they are called."""
    task = evaluation_task(config)
    data = Path(task.path) if isinstance(task, JsonlTask) else None
    return {
        "model": model_identity(model, run),
        "dtype": config.models.dtype,
        "evaluation": config.evaluation.model_dump(mode="json") | {"task": task.model_dump(mode="json")},
        "data_sha256": file_sha256(data) if data and data.is_file() else None,  # loading says what is wrong
        "rollouts": config.rollouts.model_dump(mode="json"),
        "seed": seed,
    }
