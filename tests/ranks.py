"""A script as two processes of one gloo group."""

import random
import socket
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path

from warm_process import start_script

PATIENCE = 300
"""Seconds a rank is given."""


def run_two_ranks(
    script: Path, arguments: Iterable[str], logs: Path, *, ends_well: bool = True, **environment: str
) -> None:
    """Run ``python SCRIPT ARGUMENTS…`` as ranks 0 and 1; both end well, or both badly. They print into ``logs``."""
    processes, files = start_two_ranks(script, arguments, logs, **environment)
    for process, log in zip(processes, files, strict=True):
        process.join(PATIENCE)
        assert process.exitcode is not None, f"still running after {PATIENCE} s: {log.read_text(encoding='utf-8')}"
        assert (process.exitcode == 0) == ends_well, log.read_text(encoding="utf-8")


def start_two_ranks(
    script: Path, arguments: Iterable[str], logs: Path, **environment: str
) -> tuple[list[BaseProcess], list[Path]]:
    """Start the same; the two processes, and the file that each prints into."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", **environment}
    places = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    files = [logs / f"rank-{rank}.log" for rank in range(2)]
    line = list(arguments)
    return [start_script(script, line, log, place) for log, place in zip(files, places, strict=True)], files


def free_port() -> int:
    """A port below those the system hands to outgoing connections, so that none of them takes it meanwhile."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no free port")
