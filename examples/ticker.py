"""Progress as plain lines with an estimate of the time left, readable in a log file as well as on a terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_SECONDS = 10.0


@contextmanager
def ticker(label: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
    """Yield a function to advance by some, with words to print along; a line appears every ten seconds and at the end.

    Args:
        label: What is going on.
        total: How much there is to do.
        done: How much of it was done before, which the estimate must not count.
    """
    started = shown = time.monotonic()
    first = done

    def advance(steps: int, words: str = "") -> None:
        nonlocal done, shown
        done += steps
        now = time.monotonic()
        if now - shown < EVERY_SECONDS and done < total:
            return
        shown, took = now, now - started
        left = took / max(done - first, 1) * (total - done)
        extra = f", {words}" if words else ""
        print(f"{label}: {done:,} of {total:,}, {took:.0f} s, {left:.0f} s left{extra}", file=sys.stderr, flush=True)

    yield advance
