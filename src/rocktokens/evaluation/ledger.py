"""The accuracies a run has measured: each once, found again by what it depends on.

1. An accuracy is filed in evaluations.json under a name and its settings: the content of model and data, how answers
   are sampled, and the seed of prompts and noise. Where they lie and what they are called does not matter.
2. The same question again is answered from the file; the model need not even be there any more.
3. ``seed`` is an argument, not the run's: runs of different seeds that are compared answer the same prompts with the
   same random numbers.
"""

import json
from pathlib import Path
from typing import Any

from rocktokens.config import Config, JsonlTask, TaskSection, evaluation_task
from rocktokens.errors import RunDirError
from rocktokens.evaluation.accuracy import evaluate
from rocktokens.knockout.outcomes import Progress, no_progress
from rocktokens.models.fingerprints import model_identity
from rocktokens.models.load import LoadedModel
from rocktokens.rollouts.encode import Sampling
from rocktokens.rollouts.sampler import make_sampler
from rocktokens.run_dir import RunDir, derive_seed, file_sha256
from rocktokens.tasks import make_task

Record = dict[str, Any]


def kept_evaluation(run: RunDir, config: Config, name: str, model: str, *, seed: int) -> Record | None:
    """The record of an evaluation that the run has already made under these settings, None if it has not."""
    head = {"name": name, "settings": _settings(run, config, model, seed)}
    return next((record for record in _read(run) if head.items() <= record.items()), None)


def measure_evaluation(
    run: RunDir, config: Config, name: str, loaded: LoadedModel, *, seed: int, progress: Progress = no_progress
) -> Record:
    """Let a model answer the evaluation's prompts, file its accuracy in the run, and return the record."""
    head = {"name": name, "settings": _settings(run, config, loaded.name, seed)}
    record = head | _measure(config, name, loaded, seed, progress)
    text = json.dumps({"schema_version": 1, "evaluations": [*_read(run), record]}, ensure_ascii=False)
    run.commit_text(run.evaluations.name, text + "\n")
    return record


def _measure(config: Config, name: str, loaded: LoadedModel, seed: int, progress: Progress) -> Record:
    section = config.evaluation
    task = make_task(evaluation_task(config))
    prompts = task.prompts(section.num_prompts, derive_seed(seed, "evaluation prompts"))
    with progress(f"evaluating {name}", len(prompts) * section.num_samples) as advance:
        return evaluate(
            make_sampler(config, loaded),
            loaded.tokenizer,
            task,
            prompts,
            Sampling.of(config.rollouts, derive_seed(seed, "evaluation"), section.temperature),
            num_samples=section.num_samples,
            on_done=advance,
        ).to_record()


def _settings(run: RunDir, config: Config, model: str, seed: int) -> Record:
    """What an accuracy depends on: the content of model and data, not where they lie or what they are called."""
    task = evaluation_task(config)
    return {
        "model": model_identity(model, run),
        "dtype": config.models.dtype,
        "evaluation": config.evaluation.model_dump(mode="json") | {"task": task.model_dump(mode="json")},
        "data_sha256": _data_sha256(task),
        "rollouts": config.rollouts.model_dump(mode="json"),
        "seed": seed,
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
