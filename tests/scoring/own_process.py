"""Cases of kernels in a process of their own, since Triton is told before its import how to run them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

no_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_cases(*names: str, interpreted: bool) -> None:
    """Let pytest run files of this folder; they are not imported here, where there may be no Triton."""
    files = [str(Path(__file__).with_name(name)) for name in names]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=0", *files]
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpreted))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
