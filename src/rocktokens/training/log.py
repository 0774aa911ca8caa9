"""What is watched while a run trains: timings, a JSON line per step, response lengths (docs/method.md, section 9).

Answers that no longer end stop the run with a named error before the weights are changed, so that the last checkpoint
stays a good one. So do a loss or gradient that is not finite, and an update without any weight (``step.py``).
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocktokens.config import ModelsSection
from rocktokens.errors import LengthExplosionError, NonFiniteLossError
from rocktokens.parsing import parse_json
from rocktokens.run_dir import RunDir, write_atomically
from rocktokens.training.step import Update
from rocktokens.types import Rollout

PHASES = ("sample", "update", "write")
LENGTH_PATIENCE = 3


class PhaseClock:
    """Seconds spent in each phase since the last reading."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - began

    def read(self) -> dict[str, float]:
        """Return the seconds by phase and start again from zero."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


@dataclass(slots=True)
class LengthWatch:
    """Counts consecutive steps in which more than ``limit`` of the rollouts hit the length limit."""

    limit: float
    streak: int = 0

    def observe(self, step: int, truncated_share: float) -> None:
        """Take in one step; the third bad one in a row stops the run."""
        self.streak = self.streak + 1 if truncated_share > self.limit else 0
        if self.streak >= LENGTH_PATIENCE:
            raise LengthExplosionError(
                f"step {step}: {truncated_share:.0%} of the rollouts hit rollouts.max_completion_length, "
                f"{LENGTH_PATIENCE} steps running (training.max_truncated_share = {self.limit}): raise "
                "max_completion_length if the answers are just long, otherwise lower training.learning_rate"
            )


@contextmanager
def naming_step(step: int, models: ModelsSection) -> Iterator[None]:
    """Add the training step to a non-finite error that comes from below, where steps are not known.

    Before the first update it is one of the models: no learning rate has done anything yet.
    """
    try:
        yield
    except NonFiniteLossError as error:
        said = str(error).removeprefix(f"step {step}: ")
        hint = (
            "the last checkpoint is untouched; a lower training.learning_rate may help"
            if step
            else f"nothing was trained yet: check models.student = {models.student!r} and models.teacher = "
            f"{models.teacher!r}"
        )
        raise NonFiniteLossError(f"step {step}: {said} ({hint})") from error


def step_record(
    step: int,
    rollouts: Sequence[Rollout],
    update: Update,
    seconds: dict[str, float],
    scoring_temperature: float,
) -> dict[str, Any]:
    """Make the log line of one step; means are over the tokens that were scored, which is all that reached a head.

    ``weight_dropped_share`` is 1 − the mean weight: negative where a policy weighs tokens by more than 1 on average.
    Of a teacher of which only the likeliest tokens are known there is no entropy, and no overlap if it names fewer than
    16; ``teacher_tail`` is the mean probability of all its other tokens, ``tail_unresolved_share`` the share of tokens
    where that is not distinguishable from 0.
    ``kl_decision`` is there where the policy has classes: the kl less the choice within them.
    ``share_<phase>`` is the phase's part of the step's seconds; writing a checkpoint counts to the step after it.
    """
    scores = update.scores
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    step_seconds = max(sum(seconds.values()), 1e-9)
    of_teacher = {
        "entropy_teacher": scores.entropy_teacher,
        "entropy_gap": np.abs(scores.entropy_teacher - scores.entropy_student),
        "overlap16": update.overlap,
    }
    record: dict[str, Any] = {
        "step": step,
        "loss": update.loss,
        "kl": _mean(scores.kl),
        "log_ratio": _mean(scores.logp_student - scores.logp_teacher),
        "entropy_student": _mean(scores.entropy_student),
        **{name: _mean(values) for name, values in of_teacher.items() if not np.isnan(values).all()},
        "response_length": float(np.mean(lengths)),
        "truncated_share": truncated_share(rollouts),
        "weight_dropped_share": 1.0 - float(np.mean(update.weights.weights, dtype=np.float64)),
        "head_rows_skipped": float(np.mean(np.isnan(scores.kl))),
        "head_compute_saved": update.head_compute_saved,
        "grad_norm": update.grad_norm,
        "learning_rate": update.learning_rate,
        "tokens_per_second": sum(lengths) / step_seconds,
        **{f"seconds_{phase}": duration for phase, duration in seconds.items()},
        **{f"share_{phase}": seconds.get(phase, 0.0) / step_seconds for phase in PHASES},
    }
    if update.tails is not None:
        record |= {"teacher_tail": update.tails.mean_mass, "tail_unresolved_share": update.tails.unresolved_share}
    if scores.kl_choice is not None:
        record["kl_decision"] = _mean(scores.kl - scores.kl_choice)
    if scoring_temperature == 1:
        sampled = np.concatenate([rollout.logprobs for rollout in rollouts])
        record["sampler_gap"] = _mean(np.abs(sampled - scores.logp_student))
    return record


def truncated_share(rollouts: Sequence[Rollout]) -> float:
    """Share of the rollouts that ran into the length limit."""
    return float(np.mean([not rollout.finished for rollout in rollouts]))


def append_log(run: RunDir, record: dict[str, Any]) -> None:
    """Add one line and flush it to the disk, so that a checkpoint never knows more steps than the log."""
    run.require_held()
    with run.logs.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def cut_log(run: RunDir, step: int) -> int:
    """Keep the lines of the steps before ``step``, and return how many lines of those were damaged, and are gone.

    The others, whole or torn by a kill, will be written again.
    """
    if not run.logs.exists():
        return 0
    lines = run.logs.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _is_before(step, line)]
    write_atomically(run.logs, lambda path: path.write_bytes(b"".join(kept)))
    return max(0, min(step, len(lines)) - len(kept))


def _is_before(step: int, line: bytes) -> bool:
    try:
        return parse_json(line)["step"] < step
    except (ValueError, TypeError, KeyError):  # torn or damaged
        return False


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values, dtype=np.float64))
