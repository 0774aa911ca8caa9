"""Graders of your own: a Python function, or a command that answers JSON lines. Both run your code.

1. A function is named ``module:function`` and imported from the environment or the working directory. It gets the
   response and the ``Prompt``, and returns whether the response is right.
2. A command is started once, at the first response, without a shell. It reads one JSON object per line (``id``,
   ``prompt``, ``messages``, ``answers``, ``response``) and answers each by one line: true, false, or an object with
   ``correct``.
3. What a grader is, for whoever keeps grades: its name or arguments, and the content of the module's file or of the
   files among the arguments.
"""

import hashlib
import importlib
import importlib.util
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rocktokens.config import HubTask, JsonlTask, TaskSection, WordmathTask
from rocktokens.errors import RocktokensError
from rocktokens.run_dir import file_sha256
from rocktokens.tasks.child import ChildError, LineChild
from rocktokens.types import Prompt


class Grader(Protocol):
    """Grades responses in the place of the built-in gradings."""

    def require(self) -> None:
        """Refuse a grader that cannot be used, before hours are spent on what it should grade."""
        ...

    def grade(self, prompt: Prompt, text: str) -> bool:
        """Return whether a response is right."""
        ...


def make_grader(section: JsonlTask | HubTask) -> Grader | None:
    """Make the grader that a task names, None where it names none; nothing is imported or started yet."""
    if section.grader is None:
        return None
    if isinstance(section.grader, str):
        return FunctionGrader(section.grader)
    return CommandGrader(section.grader, section.grader_timeout)


def grader_files(section: TaskSection) -> list[Path]:
    """Return the files that a task's grader is known to consist of; none where they are not found."""
    if isinstance(section, WordmathTask) or section.grader is None:
        return []
    if not isinstance(section.grader, str):
        return [path for path in map(Path, section.grader) if path.is_file()]
    try:
        found = _in_working_directory(importlib.util.find_spec, section.grader)
    except (ImportError, ValueError):
        return []
    return [Path(found.origin)] if found and found.origin and Path(found.origin).is_file() else []


def grader_identity(section: TaskSection) -> dict[str, str]:
    """Return what grades depend on beside the config, by name: nothing for built-in gradings."""
    if isinstance(section, WordmathTask) or section.grader is None:
        return {}
    content = [section.grader, [file_sha256(path) for path in grader_files(section)]]
    return {"grader_sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest()}


class FunctionGrader:
    """A Python function ``(response, prompt) -> bool``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._function: Callable[[str, Prompt], Any] | None = None

    def require(self) -> None:
        """Import the function."""
        self._function = self._function or _load_function(self._name)

    def grade(self, prompt: Prompt, text: str) -> bool:
        """Call the function; an exception or anything but a bool is the grader's mistake."""
        self.require()
        assert self._function
        try:
            verdict = self._function(text, prompt)
        except (Exception, SystemExit) as error:
            raise RocktokensError(
                f"task.grader {self._name!r} failed on a response to prompt {prompt.id!r} ({_reason(error)}): fix the "
                "function"
            ) from error
        if not isinstance(verdict, bool | np.bool_):
            raise RocktokensError(
                f"task.grader {self._name!r} returned {verdict!r:.80} for prompt {prompt.id!r}: return True or False"
            )
        return bool(verdict)


class CommandGrader:
    """A command that is asked line by line."""

    def __init__(self, command: Sequence[str], timeout: float) -> None:
        self._command, self._timeout = command, timeout
        self._child: LineChild | None = None

    def require(self) -> None:
        """Look for the program."""
        if shutil.which(self._command[0]) is None:
            raise self._error(
                f"cannot be started: there is no program {self._command[0]!r}", "install it, or fix its name"
            )

    def grade(self, prompt: Prompt, text: str) -> bool:
        """Ask the child, which is started at the first response."""
        self.require()
        question = {
            "id": prompt.id,
            "prompt": prompt.text,
            "messages": [asdict(own) for own in prompt.messages] or [{"role": "user", "content": prompt.text}],
            "answers": prompt.answers,
            "response": text,
        }
        try:
            self._child = self._child or LineChild(self._command)
            line = self._child.ask(json.dumps(question).encode(), self._timeout)
        except ChildError as error:
            self._end()
            raise self._error(
                f"{error} (prompt {prompt.id!r})", "fix the program, flush every answer, or raise task.grader_timeout"
            ) from None
        return self._verdict(prompt, line)

    def _verdict(self, prompt: Prompt, line: bytes) -> bool:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        verdict = answer.get("correct") if isinstance(answer, dict) else answer
        if not isinstance(verdict, bool):
            self._end()
            said = f"answered {line.decode(errors='replace')!r:.80} for prompt {prompt.id!r}"
            raise self._error(said, 'answer true, false or {"correct": true} in JSON, one line each')
        return verdict

    def _end(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None

    def _error(self, what: str, remedy: str) -> RocktokensError:
        return RocktokensError(f"task.grader `{shlex.join(self._command)}` {what}: {remedy}")


def _load_function(name: str) -> Callable[[str, Prompt], Any]:
    module_name, _, attribute = name.partition(":")
    try:
        module = _in_working_directory(importlib.import_module, name)
    except ModuleNotFoundError as error:
        if error.name is None or f"{module_name}.".startswith(f"{error.name}."):
            raise RocktokensError(
                f"task.grader {name!r}: there is no module {error.name or module_name} in the working directory "
                f"{str(Path.cwd())!r} or among the installed ones: start where it lies, or fix the name"
            ) from None
        raise RocktokensError(f"task.grader {name!r} cannot be imported ({_reason(error)}): install that") from None
    except (Exception, SystemExit) as error:
        raise RocktokensError(f"task.grader {name!r} cannot be imported ({_reason(error)}): fix the module") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        what = f"has no {attribute!r}" if function is None else f"has {attribute!r}, which is no function"
        where = getattr(module, "__file__", None) or "built in"
        raise RocktokensError(f"task.grader {name!r}: module {module_name} ({where}) {what}: name a function of it")
    return function


def _in_working_directory(look_up: Callable[[str], Any], name: str) -> Any:
    """Look a module up where the command was started, too; behind all else, so that nothing there hides a package."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    return look_up(name.partition(":")[0])


def _reason(error: BaseException) -> str:
    """Return kind and first line of an error."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
