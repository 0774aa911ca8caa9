"""A child process that answers lines: one line in, one line out, for as long as it is asked.

1. It is started without a shell, in a session of its own, with its errors in a temporary file.
2. Writing and reading share one deadline, so a child that does not read cannot block either. It must be in step: a line
   that was not asked for, or a second one, is an error.
3. It ends with whoever asks: its input is closed, and what is left of its session after a second is killed.
"""

import os
import selectors
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

CHUNK = 1 << 16
LONGEST_ANSWER = 1 << 20
GRACE_SECONDS = 1.0


class ChildError(Exception):
    """The child cannot answer; the message continues a sentence that begins with its name."""


class LineChild:
    """A running command that answers every line by one."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the child)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},  # a script in Python need not flush
            )
        except OSError as error:
            raise ChildError(f"cannot be started ({(error.strerror or str(error)).lower()})") from None
        assert self._process.stdin and self._process.stdout
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._input, self._output):
            os.set_blocking(descriptor, False)
        self.stop = weakref.finalize(self, _stop, self._process, self._errors)

    def ask(self, line: bytes, timeout: float) -> bytes:
        """Send a line and return the answer, both without their line end; late, none or more than one is an error."""
        with suppress(BlockingIOError):
            if self._read():
                raise ChildError("wrote a line that was not asked for")
        pending, answer, deadline = memoryview(line + b"\n"), b"", time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._input, selectors.EVENT_WRITE)
            while pending or not answer.endswith(b"\n"):
                left = deadline - time.monotonic()
                ready = {key.fd for key, _ in selector.select(left)} if left > 0 else set()
                if not ready:
                    raise ChildError(f"has not answered within {timeout:g} seconds")
                if self._input in ready:
                    pending = self._write(pending)
                    if not pending:
                        selector.unregister(self._input)
                if self._output in ready:
                    answer += self._read()
                if len(answer) > LONGEST_ANSWER:
                    raise ChildError("answered by a line without end")
        if answer.count(b"\n") > 1:
            raise ChildError("answered by more than one line")
        return answer[:-1]

    def _write(self, pending: memoryview) -> memoryview:
        """Write as much as the pipe takes and return the rest; nothing is left for a child that no longer reads."""
        try:
            return pending[os.write(self._input, pending[:CHUNK]) :]
        except BrokenPipeError:  # what it may have ended with is for reading to tell
            return pending[:0]

    def _read(self) -> bytes:
        if chunk := os.read(self._output, CHUNK):
            return chunk
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        last = f", saying {said[-1]!r}" if said else ""
        code = self._process.returncode
        ended = "closed its output" if code is None else f"ended with exit code {code}"
        raise ChildError(f"{ended} before it had answered{last}")


def _stop(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    assert process.stdin and process.stdout
    for pipe in (process.stdin, process.stdout, errors):
        with suppress(OSError):
            pipe.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
