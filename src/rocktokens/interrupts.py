"""What a signal to stop does: Ctrl-C (SIGINT), and what schedulers and shells send (SIGTERM).

1. By default a signal is obeyed at once, by an exception: blocks are left, what is being written is taken back, locks
   are released. ``obeying_terminate`` makes SIGTERM do what SIGINT does anyway.
2. ``held_signals`` notes the first signal and goes on, so that a step can be finished and kept. It is obeyed when the
   block ends; a second one is obeyed at once.
3. Only the main thread has signals. In other threads, and for a signal that the process ignores or handles in a way
   of its own, nothing changes.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Terminated(BaseException):
    """SIGTERM was obeyed; no ``except Exception``, nor one for SystemExit, takes it for a failure."""


@dataclass(slots=True)
class HeldSignal:
    """The signal that waits to be obeyed, if there is one; who sets it has it obeyed too."""

    number: int | None = None


@contextmanager
def obeying_terminate() -> Iterator[None]:
    """Have SIGTERM raise ``Terminated``, where it would end the process without leaving its blocks."""
    with _handled({signal.SIGTERM: _raise_terminated} if _is_ours(signal.SIGTERM) else {}):
        yield


@contextmanager
def held_signals(on_first: Callable[[], None]) -> Iterator[HeldSignal]:
    """Note the first SIGINT or SIGTERM, tell ``on_first``, and obey it when the block ends."""
    held = HeldSignal()
    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOPPING if _is_ours(number)}

    def note(number: int, _frame: FrameType | None) -> None:
        for own, handler in before.items():
            signal.signal(own, handler)
        held.number = number
        with suppress(Exception, SystemExit):  # who reads what is said may have got the same signal
            on_first()

    # No name here refers to ``note`` and is used by it: a cycle would keep the caller's model, and its files, open.
    with _handled(dict.fromkeys(before, note)):
        yield held
    if held.number is not None:
        signal.raise_signal(held.number)


@contextmanager
def _handled(handlers: dict[int, Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_ours(number: int) -> bool:
    """Whether a signal does here what it does by default, or what this module has it do."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler, _raise_terminated)


def _raise_terminated(_number: int, _frame: FrameType | None) -> None:
    raise Terminated
