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
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path

IMPORTED = [
    *(f"rocktokens.{name}" for name in ("training.loop", "evaluation.evaluate", "replay.replay", "knockout.knockout")),
    *(f"rocktokens.{name}" for name in ("knockout.classes", "gradients.measure", "rocks.analysis", "traces.store")),
    *(f"rocktokens.{name}" for name in ("report.build", "report.explorer.server", "studies.study", "integrity")),
    *(f"rocktokens.cli.{name}" for name in ("distill", "trace", "find", "gradients", "knockout", "evaluate", "study")),
    *("transformers.models.llama.modeling_llama", "transformers.generation", "peft"),
    *("pandas", "ibis.backends.duckdb", "altair", "vl_convert"),
]
"""What the commands import, some of it late."""
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(IMPORTED)


def start_server() -> None:
    """Start the server now, before a study of this process, which forks from it too, has it import less."""
    from rocktokens.cli.main import quiet_libraries

    quiet_libraries()  # of the server
    ensure_running()


def start_command(arguments: list[str], log: Path) -> BaseProcess:
    """Start ``rocktokens ARGUMENTS…`` on one thread; what it prints is appended to ``log``."""
    return _started(_run_command, arguments, log)


def start_script(script: Path, arguments: list[str], log: Path, environment: dict[str, str]) -> BaseProcess:
    """Start ``python SCRIPT ARGUMENTS…`` on one thread; what it prints is appended to ``log``."""
    return _started(_run_script, script, arguments, log, environment)


def _started(target, *arguments) -> BaseProcess:
    start_server()
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
