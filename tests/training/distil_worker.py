"""One of two processes that distil one config after the other; run by test_distill.py.

A config whose name starts with "stopped" is distilled in two goes: both processes leave it before its last update. With
"parts" in its name, the rows of a step fill a part of the trace.
"""

import sys
from contextlib import suppress
from pathlib import Path

from accelerate import PartialState

from rocktokens.config import Config, load_config
from rocktokens.training import loop

FEW_ROWS = 15
"""Fewer than a process has in a step."""


class Interruption(BaseException):
    """Ends a go."""


def stop_before_the_last_update(config: Config) -> None:
    own = loop.update_student

    def update(session, rollouts, step):
        if step == config.training.max_steps - 1:
            raise Interruption
        return own(session, rollouts, step)

    loop.update_student = update
    try:
        with suppress(Interruption):
            loop.distill(config)
    finally:
        loop.update_student = own


if __name__ == "__main__":
    whole = loop.ROWS_PER_PART
    for path in map(Path, sys.argv[1:]):
        config = load_config(path)
        loop.ROWS_PER_PART = FEW_ROWS if "parts" in path.name else whole
        if path.name.startswith("stopped"):
            stop_before_the_last_update(config)
        loop.distill(config, resume=True)
    PartialState().destroy_process_group()
