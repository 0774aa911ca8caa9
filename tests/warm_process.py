"""Commands and scripts in processes of their own that need not import torch again.

Importing torch and transformers takes a process six seconds. A server imports them once and forks for everything that
is started here: a process like any other, with a pid, a process group, signals and an end of its own. What only a fresh
interpreter shows is tested with ``python -m rocktokens.cli.main``.
"""

import multiprocessing
import os
import runpy
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
IMPORTED = ("training.loop", "evaluation.evaluate", "replay.replay", "knockout.knockout")
SERVER.set_forkserver_preload([f"rocktokens.{name}" for name in IMPORTED])


def start_command(arguments: list[str], log: Path) -> BaseProcess:
    """Start ``rocktokens ARGUMENTS…`` on one thread; what it prints is appended to ``log``."""
    return _started(_run_command, arguments, log)


def start_script(script: Path, arguments: list[str], log: Path, environment: dict[str, str]) -> BaseProcess:
    """Start ``python SCRIPT ARGUMENTS…`` on one thread; what it prints is appended to ``log``."""
    return _started(_run_script, script, arguments, log, environment)


def _started(target, *arguments) -> BaseProcess:
    from rocktokens.cli.main import quiet_libraries

    quiet_libraries()  # of the server, when it is started
    process = SERVER.Process(target=target, args=arguments)
    process.start()
    return process


def _run_command(arguments: list[str], log: Path) -> None:
    from rocktokens.cli.main import main

    _settle(log)
    sys.argv = ["rocktokens", *arguments]
    main()


def _run_script(script: Path, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    _settle(log)
    os.environ.update(environment)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _settle(log: Path) -> None:
    import torch

    os.setsid()
    # A study that started the server held interrupts back; a suite in the background ignores them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
