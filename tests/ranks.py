"""A script as two processes of one gloo group."""

import os
import random
import socket
import subprocess
import sys
from pathlib import Path


def run_two_ranks(*arguments: str, cwd: Path | None = None, **environment: str) -> None:
    """Run python with these arguments as ranks 0 and 1; both must end well."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **shared, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def free_port() -> int:
    """A port below those the system hands to outgoing connections, so that none of them takes it meanwhile."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no free port")
