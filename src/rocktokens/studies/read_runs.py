"""What finished jobs left on the disk, as curves: accuracy by steps, tokens and seconds of training.

1. Runs of one seed are pairs only if they began alike: the student's first answers must be the same, token by token.
   Data, a model or a machine that changed between runs shows there.
2. Accuracies come from evaluations.json. Step 0 was evaluated once, by the first job, for all; every evaluation must be
   of the same prompts.
3. Tokens and seconds come from logs.jsonl. Seconds are those of sampling and updates: they mean something only where
   all jobs ran under the same load, without interruption.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rocktokens.errors import RunDirError
from rocktokens.evaluation.records import EvaluationRecord
from rocktokens.parsing import parse_json
from rocktokens.rollouts.store import read_rollouts
from rocktokens.studies.plan import Job
from rocktokens.studies.records import Curve
from rocktokens.studies.worker import evaluation

TRAINING_PHASES = ("seconds_sample", "seconds_update")
REUSED = "rollouts_reused"
"""What the log says of a step whose rollouts an interrupted attempt had sampled."""
FIRST_ROLLOUTS = "rollouts/training/step-0.parquet"
FACTS = (
    "head_compute_saved",
    "weight_dropped_share",
    "control_token_share",
    "control_rock_overlap",
    "control_kl_ratio",
    "control_grad_norm_ratio",
)
"""Columns of the log whose means over the steps tell arms apart; those of controls are in the logs of controls only."""


def require_paired(jobs: Sequence[Job]) -> None:
    """Refuse to compare runs of a seed whose first rollouts differ."""
    firsts: dict[int, Job] = {}
    for job in jobs:
        first = firsts.setdefault(job.seed, job)
        if not _began_alike(first, job):
            raise RunDirError(
                f"{job.label}: its first rollouts are not those of {first.label}, so the two are no pair (data, model "
                f"or machine changed between them): remove {job.run.path} and run the study again"
            )


def _began_alike(first: Job, other: Job) -> bool:
    entries = [[entry.sha256 for entry in job.run.files(FIRST_ROLLOUTS)] for job in (first, other)]
    if entries[0] == entries[1]:
        return True
    own, others = (read_rollouts(job.run, FIRST_ROLLOUTS) for job in (first, other))
    return len(own) == len(others) and all(
        np.array_equal(one.prompt_ids, two.prompt_ids) and np.array_equal(one.token_ids, two.token_ids)
        for one, two in zip(own, others, strict=True)
    )


def read_curves(jobs: Sequence[Job]) -> list[Curve]:
    """Read the curve of every job; all of them must be finished."""
    start = _answers(jobs[0], 0)
    return [_curve(job, start) for job in jobs]


def _curve(job: Job, start: EvaluationRecord) -> Curve:
    steps = (0, *(step for step in job.evaluated if step > 0))
    records = [start, *(_answers(job, step) for step in steps[1:])]
    for step, record in zip(steps, records, strict=True):
        _require_same_prompts(job, step, record, start)
    log = _log(job)
    tokens = np.cumsum([0, *(round(line["response_length"] * job.config.training.rollouts_per_step) for line in log)])
    seconds = np.cumsum([0.0, *(sum(line.get(phase, 0.0) for phase in TRAINING_PHASES) for line in log)])
    means = {name: float(np.mean([line[name] for line in log])) for name in FACTS if all(name in line for line in log)}
    return Curve(
        arm=job.arm,
        seed=job.seed,
        draw=job.draw,
        steps=np.array(steps),
        tokens=tokens[list(steps)],
        seconds=seconds[list(steps)],
        correct_EP=np.array([record.correct for record in records]) / start.num_samples,
        prompt_ids=start.prompt_ids,
        facts={**means, "mean_response_length": records[-1].mean_response_length},
        is_retimed=any(line.get(REUSED) for line in log),
    )


def _answers(job: Job, step: int) -> EvaluationRecord:
    record = evaluation(job, step)
    if record is None:
        raise RunDirError(f"{job.run.path} has no evaluation of step {step}: run the study again")
    return record


def _require_same_prompts(job: Job, step: int, record: EvaluationRecord, start: EvaluationRecord) -> None:
    if (record.prompt_ids, record.num_samples) != (start.prompt_ids, start.num_samples):
        raise RunDirError(
            f"{job.run.evaluations}: step {step} answered other prompts than the student before training: remove that "
            "file and run the study again"
        )


def _log(job: Job) -> list[dict[str, Any]]:
    lines = job.run.logs.read_bytes().splitlines()
    if len(lines) != job.config.training.max_steps:
        raise RunDirError(
            f"{job.run.logs} has {len(lines)} lines for {job.config.training.max_steps} steps: restore it from a copy "
            "of the run"
        )
    try:
        return [_log_line(line) for line in lines]
    except ValueError as error:
        raise RunDirError(f"{job.run.logs} has a damaged line ({error}): restore it from a copy of the run") from None


def _log_line(line: bytes) -> dict[str, Any]:
    content = parse_json(line)
    if not isinstance(content, dict) or not isinstance(content.get("response_length"), int | float):
        raise ValueError("it has no response_length")
    return content
