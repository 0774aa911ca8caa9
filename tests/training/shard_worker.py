"""One of two processes that distil one config after the other; run by test_shard.py.

Groups of rows are so small that the processes have unequally many. Each writes how much of models and optimizer it
holds, beside the config. With KILL_AT both are killed in the last config, between the rollouts of that step and its
update, once a checkpoint is there; they leave those before it by an exception, before the update STOP_AT. The device of
the process SMALL_RANK has too little memory for anything.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from accelerate import PartialState
from torch.distributed.tensor import DTensor

from rocktokens.config import load_config
from rocktokens.run_dir import RunDir
from rocktokens.scoring import batch
from rocktokens.training import layout, loop
from rocktokens.training.checkpoint import optimizer_tensors
from rocktokens.training.session import make_session

GROUP_TOKENS = 46


def distill(path: Path) -> None:
    sessions = []
    loop.make_session = lambda *arguments: sessions.append(make_session(*arguments)) or sessions[-1]
    loop.distill(load_config(path), resume=True)
    [session] = sessions
    held = {
        "student": numbers(session.student.parameters()),
        "teacher": numbers(session.teacher.parameters()),
        "optimizer": numbers(value for _, value in optimizer_tensors(session.student, session.optimizer) if value.ndim),
    }
    path.with_suffix(f".rank-{session.accelerator.process_index}.json").write_text(json.dumps(held))


def numbers(tensors) -> int:
    """How many this process holds."""
    return sum((own.to_local() if isinstance(own, DTensor) else own).numel() for own in tensors)


class Interruption(BaseException):
    """Ends a run."""


def ended_at(step: int, end):
    def update(session, rollouts, current, own=loop.update_student):
        if current == step:
            end(session)
        return own(session, rollouts, current)

    return update


def kill(session) -> None:
    while max(RunDir(session.config.run.directory).checkpoints()) == 0:  # a thread writes the next
        time.sleep(0.01)
    session.accelerator.wait_for_everyone()  # the main process has stored the rollouts
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(_session) -> None:
    raise Interruption


if __name__ == "__main__":
    batch.CPU_GROUP_TOKENS = GROUP_TOKENS
    if os.environ.get("SMALL_RANK") == os.environ["RANK"]:
        layout.device_memory = lambda *_: 1000
    *paths, last = map(Path, sys.argv[1:])
    whole_update = loop.update_student
    if "STOP_AT" in os.environ:
        loop.update_student = ended_at(int(os.environ["STOP_AT"]), interrupt)
    for path in paths:
        with suppress(Interruption):
            distill(path)
    loop.update_student = whole_update
    if "KILL_AT" in os.environ:
        loop.update_student = ended_at(int(os.environ["KILL_AT"]), kill)
    distill(last)
    PartialState().destroy_process_group()
