"""Kill every long command with SIGKILL, run it again, and compare with one that was not killed.

Two moments in three are calls to the disk: just before one of them, or in the middle of a write; those are the moments
that can leave something torn, and a number makes each of them again. The third is any moment, drawn over the time that
the command takes. A study and its workers are different processes, and each of them is killed now and then. What was
running at the kill goes on to be judged by ``struck_commands``.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from disk_calls import KINDS, Strike
from frame import BrokenPromiseError, Campaign, Judge, chance
from struck_commands import BEFORE, Commands, Prepared

NAME = "kills"


@contextmanager
def opened(folder: Path) -> Iterator[Judge]:
    """Judge kills of commands that are made ready when they are first asked for."""
    commands = Commands(folder)
    yield lambda kind, number: judge_kill(commands[kind], number)


def judge_kill(command: Prepared, number: int) -> str:
    """Kill a command once, and see that nothing is lost or doubled."""
    rng = chance(NAME, command.command, number)
    command.fresh()
    if number % 3 == 2:
        process = command.start()
        process.join(rng.uniform(0, command.seconds))
        process.kill()
    else:
        kind = rng.choice([own for own in KINDS if command.calls[own]])
        process = command.start(Strike(command.work, kind, rng.randint(1, command.calls[kind])))
    ending = command.ended(process)
    is_worker = command.command == "study" and ending.code == 2 and "ended with code -9" in ending.said
    if ending.code not in (0, -signal.SIGKILL) and not is_worker:
        raise BrokenPromiseError(f"code {ending.code}: {ending.said[-800:]}")
    command.require_sound()
    command.require_finished()
    return "killed" if ending.code else "came late"


FULL = {"distill": 40, "trace": 35, "find": 30, "gradients": 30, "evaluate": 30, "knockout": 35, "study": 25}
CAMPAIGN = Campaign(NAME, FULL, {"distill": 1, "trace": 1}, limit=400.0, opened=opened)
assert FULL.keys() == BEFORE.keys()
