"""One of two processes that distil one config after the other; run by test_shard.py.

Groups of rows are so small that the processes have unequally many. Each writes how much of models and optimizer it
holds, beside the config. With KILL_AT both are killed in the last config, between the rollouts of that step and its
update. The device of the process SMALL_RANK has too little memory for anything.
"""

import json
import os
import signal
import sys
from pathlib import Path

from accelerate import PartialState
from torch.distributed.tensor import DTensor

from rocktokens.config import load_config
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


def killed_at(step: int):
    def update(session, rollouts, current, own=loop.update_student):
        if current == step:
            session.accelerator.wait_for_everyone()  # the main process has stored the rollouts
            os.kill(os.getpid(), signal.SIGKILL)
        return own(session, rollouts, current)

    return update


if __name__ == "__main__":
    batch.CPU_GROUP_TOKENS = GROUP_TOKENS
    if os.environ.get("SMALL_RANK") == os.environ["RANK"]:
        layout.device_memory = lambda *_: 1000
    *paths, last = map(Path, sys.argv[1:])
    for path in paths:
        distill(path)
    if "KILL_AT" in os.environ:
        loop.update_student = killed_at(int(os.environ["KILL_AT"]))
    distill(last)
    PartialState().destroy_process_group()
