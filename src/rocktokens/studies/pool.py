"""The processes that jobs run in: as many as wanted, each given the next job when it has finished one.

1. A worker is a process with a pipe of its own: no lock or queue is shared, so any may be killed at any time.
2. On Linux workers are forked from a server that has imported what every job needs (``IMPORTED_ONCE``, torch among it),
   which takes seconds, once for all of them. A worker that is given a GPU is a fresh process: it must hide the others
   before torch is imported.
3. A job that fails stops the study with its sentence; the others' work stays on the disk, as after an interrupt.
"""

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Literal

from rocktokens.errors import RocktokensError
from rocktokens.studies.plan import Job
from rocktokens.studies.worker import Failed, Message, serve

PATIENCE = 10.0
"""Seconds an idle worker is given to leave."""
IMPORTED_ONCE = ["rocktokens.training.loop", "rocktokens.evaluation.evaluate", "pandas"]
"""What every job imports; pyarrow imports pandas with the first array it makes."""


@dataclass(slots=True)
class _Worker:
    """A process, what it is working on, and how much of that it has reported."""

    process: BaseProcess
    connection: Connection
    job: Job | None = None
    reported: int = 0

    def give(self, job: Job) -> None:
        self.job, self.reported = job, 0
        with suppress(OSError):  # a worker that is gone already is found out by listening to it
            self.connection.send(job)


def run_jobs(
    jobs: Sequence[Job], places: Sequence[str | None], on_work: Callable[[int], None], on_done: Callable[[Job], None]
) -> None:
    """Finish all jobs, begun in this order, one worker at each place.

    Args:
        jobs: one run each.
        places: for each worker, the GPU it sees (as ``CUDA_VISIBLE_DEVICES`` names it), or None for the CPU.
        on_work: called with the work that was done since the last call.
        on_done: called with every job that is finished.
    """
    pending = deque(jobs)
    workers = [_start(place) for place, _ in zip(places, jobs, strict=False)]
    try:
        for worker in workers:
            worker.give(pending.popleft())
        while busy := [worker for worker in workers if worker.job is not None]:
            ready = wait([worker.connection for worker in busy])
            for worker in busy:
                if worker.connection in ready and (job := _hear(worker, on_work)) is not None:
                    on_done(job)
                    worker.job = None
                    if pending:
                        worker.give(pending.popleft())
    finally:
        _stop(workers)


def choose_places(processes: int | Literal["auto"], device: str, n_jobs: int) -> list[str | None]:
    """Choose where the workers work: one per GPU, else one per CPU core, or as many as asked for; at most the jobs."""
    gpus = _gpus(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = (len(gpus) or cores) if processes == "auto" else processes
    return [gpus[index % len(gpus)] if gpus else None for index in range(min(wanted, n_jobs))]


def _gpus(device: str) -> list[str | None]:
    """Return the GPUs to share out; with ``cuda:N`` the config has chosen: workers see what this process sees."""
    if device == "cpu":
        return []
    import torch

    count = torch.cuda.device_count()
    if device not in ("auto", "cuda"):
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else list(map(str, range(count)))
    return list(names[:count])


def _start(gpu: str | None) -> _Worker:
    context = _context(gpu)
    own, other = context.Pipe()
    process = context.Process(target=serve, args=(other, gpu), daemon=True)
    with _interrupts_held():
        process.start()
    other.close()
    return _Worker(process, own)


def _context(gpu: str | None) -> ForkServerContext | SpawnContext:
    if gpu is not None or sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    return context


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C from a process that is started here, even while it imports; this one sees it after the block."""
    resource_tracker.getfd()  # starts the tracker, which would let interrupts through again
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _hear(worker: _Worker, on_work: Callable[[int], None]) -> Job | None:
    """Take one message of a worker; return the job when it is finished."""
    job = worker.job
    assert job is not None
    try:
        message: Message = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join(PATIENCE)
        raise RocktokensError(
            f"the process of {job.label} ended with code {worker.process.exitcode}, as when memory runs out: nothing "
            "is lost, run the same command again, with fewer at a time (--set study.processes=1)"
        ) from None
    if isinstance(message, Failed):
        worker.job = None  # it waits for another, and leaves by itself
        raise _as_error(job, message)
    work = job.work if message is None else message
    on_work(work - worker.reported)
    worker.reported = work
    return job if message is None else None


def _as_error(job: Job, failed: Failed) -> Exception:
    if failed.is_sentence:
        return RocktokensError(f"{job.label}: {failed.message}")
    if failed.errno is None:
        return RuntimeError(f"{job.label} failed:\n{failed.message}")
    error = OSError(failed.errno, os.strerror(failed.errno), str(job.run.path))
    error.add_note(failed.message)
    return error


def _stop(workers: Sequence[_Worker]) -> None:
    """Let the idle ones leave and end the others: what they have committed stays."""
    for worker in workers:
        if worker.job is not None:
            worker.process.terminate()
        worker.connection.close()
    for worker in workers:
        worker.process.join(PATIENCE)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
