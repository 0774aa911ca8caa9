"""One job, and the process that works through jobs.

1. Train the run to its end, from its latest checkpoint if it was interrupted.
2. Evaluate its checkpoints, all jobs on the same prompts with the same random numbers; what was measured is kept.
3. Drop the optimizer's state, twice the size of the student: the run is finished, and nothing resumes from it.

A CPU worker computes on one thread, a GPU worker sees one GPU: a result never depends on how many work at a time.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from rocktokens.errors import RocktokensError
from rocktokens.evaluation.records import EvaluationRecord
from rocktokens.progress import Silent
from rocktokens.provenance import metered
from rocktokens.run_dir import OPTIMIZER_FILE, RunDir, derive_seed
from rocktokens.studies.plan import Job

EVALUATION_SEED = derive_seed(0, "study evaluation")
"""Of prompts and noise in every study, arm and seed; no run has it, so no knock-out has seen these prompts."""
Report = Callable[[int], None]
"""Told how much of a job's work is done, in all."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The job cannot be finished."""

    message: str
    is_sentence: bool
    """Whether the message is a sentence for the user; otherwise it is a traceback."""
    errno: int | None = None
    """The system's number for what went wrong, if it came from the system."""


Message = int | Failed | None
"""What a worker says of its job: how much of the work is done in all, why it cannot be finished, or that it is."""


def serve(connection: Connection, gpu: str | None) -> None:
    """Work through the jobs that come over the connection until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study's process decides what an interrupt means
    # End as a process does by itself: what it has opened is closed, what it is writing is taken back.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _settle(gpu)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        _send(connection, _attempt(job, lambda work: _send(connection, work)))


def run_job(job: Job, report: Report) -> None:
    """Train and evaluate one run; whatever an earlier attempt has done is not done again."""
    from rocktokens.evaluation.evaluate import evaluate
    from rocktokens.training.loop import distill

    per_step = job.training_work // job.config.training.max_steps
    with metered(job.run, "distill"):
        distill(job.config, resume=True, on_step=lambda made, _total, _record: report(made * per_step))
    report(job.training_work)
    with metered(job.run, "evaluate"):
        for index, step in enumerate(job.evaluated):
            done = job.training_work + index * job.evaluation_work
            model = {f"step {step}": str(job.run.checkpoint(step))}
            counting = _Counting(lambda work, done=done: report(done + work))
            evaluate(job.run, job.config, model, counting, seed=EVALUATION_SEED)
            report(done + job.evaluation_work)
    drop_optimizers(job.run)


def drop_optimizers(run: RunDir) -> None:
    """Delete the optimizer's state from all checkpoints of a run that is trained."""
    run.drop([entry.path for entry in run.files("checkpoints/") if entry.path.endswith(f"/{OPTIMIZER_FILE}")])


def is_complete(job: Job) -> bool:
    """Return whether every evaluation of the job has been made."""
    return all(evaluation(job, step) is not None for step in job.evaluated)


def evaluation(job: Job, step: int) -> EvaluationRecord | None:
    """Return what a checkpoint answered, None if it has not been evaluated yet."""
    from rocktokens.evaluation.evaluate import kept_evaluation

    model = str(job.run.checkpoint(step))
    return kept_evaluation(job.run, job.config, f"step {step}", model, seed=EVALUATION_SEED)


@dataclass(frozen=True, slots=True)
class _Counting(Silent):
    """Reports how many answers have been written in all."""

    report: Report

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Count what the bar would show."""
        answered = 0

        def advance(count: int) -> None:
            nonlocal answered
            answered += count
            self.report(answered)

        yield advance


def _attempt(job: Job, report: Report) -> Failed | None:
    try:
        run_job(job, report)
    except RocktokensError as error:
        return Failed(str(error), is_sentence=True)
    except OSError as error:
        return Failed(traceback.format_exc(), is_sentence=False, errno=error.errno)
    except Exception:
        return Failed(traceback.format_exc(), is_sentence=False)
    return None


def _send(connection: Connection, message: Message) -> None:
    """Tell the study's process; once that is gone, the job has no purpose."""
    try:
        connection.send(message)
    except OSError:
        raise SystemExit(1) from None


def _settle(gpu: str | None) -> None:
    """Take one thread and, if given, one GPU: that hides the others only if torch is not imported yet."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    torch.set_num_threads(1)
