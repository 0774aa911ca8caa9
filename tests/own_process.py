"""Cases of kernels in a process of their own, since Triton is told before its import how to run them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

no_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_cases(*names: str, interpreted: bool) -> None:
    """Let pytest run files of this folder's folders; they are not imported here, where there may be no Triton."""
    here = Path(__file__).parent
    plugins = ["no:cacheprovider", *(["quick_interpreter"] if interpreted else [])]
    options = ["--durations=0", *(f"-p{plugin}" for plugin in plugins)]
    command = [sys.executable, "-m", "pytest", *options, *(str(here / name) for name in names)]
    path = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpreted)), "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
