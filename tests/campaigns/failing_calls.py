"""Have one call to the disk of a long command fail, or all from one on, and see that it ends in a sentence and goes on.

1. The call is a write (half of it done), a flush, a rename, an open, a link, a removal or a new folder. It fails: no
   space, an input/output error, a read-only file system.
2. The command must end with code 2 and a last line that says why, without a traceback, or with 0 where it has another
   way (a link that fails is a copy).
3. The run must be sound, and the same command, undisturbed, must end as if nothing had happened (``struck_commands``).
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from disk_calls import KINDS, Strike
from frame import BrokenPromiseError, Campaign, Judge, chance
from struck_commands import Commands, Prepared, as_reason

NAME = "failing-calls"
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS)


@contextmanager
def opened(folder: Path) -> Iterator[Judge]:
    """Judge failing calls of commands that are made ready when they are first asked for."""
    commands = Commands(folder)
    yield lambda kind, number: judge_failure(commands[kind], number)


def judge_failure(command: Prepared, number: int) -> str:
    """Have calls of a command fail, and see what it says and leaves."""
    rng = chance(NAME, command.command, number)
    # Writes, flushes and renames twice as often: the other kinds make up few of the calls.
    kind = rng.choice([own for own in (*KINDS, "write", "fsync", "rename") if command.calls[own]])
    strike = Strike(command.work, kind, rng.randint(1, command.calls[kind]), rng.choice(ERRORS), rng.random() < 0.5)
    command.fresh()
    ending = command.run(strike)
    what = f"{strike.kind} {strike.number} fails ({as_reason(strike.error)}{', from then on' if strike.lasts else ''})"
    if ending.code not in (0, 2) or "Traceback" in ending.said:
        raise BrokenPromiseError(f"{what}: code {ending.code}, {ending.said[-1200:]}")
    if ending.code == 2 and not ending.said.splitlines()[-1].startswith("rocktokens: "):
        raise BrokenPromiseError(f"{what}: it ends with {ending.said[-400:]}")
    try:
        command.require_sound()
        command.require_finished()
    except BrokenPromiseError as error:
        raise BrokenPromiseError(f"{what}: {error}") from None
    return "refused" if ending.code else "went on"


FULL = {"distill": 70, "trace": 50, "find": 40, "gradients": 30, "evaluate": 40, "knockout": 50, "study": 20}
CAMPAIGN = Campaign(NAME, FULL, {"trace": 1, "evaluate": 1}, limit=400.0, opened=opened)
