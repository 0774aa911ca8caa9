"""A real vLLM server on a CPU, in the environment that ``make vllm`` makes."""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-vllm/bin/python"
MORE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT / "src"),
}
NEEDS_VLLM = pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM: make vllm installs it")


class Server:
    """A server of a folder, which can be killed and started again."""

    def __init__(self, folder: Path, name: str, log: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{self.port}", log
        self._command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), "--max-model-len", "384", "--enforce-eager"]
        self._command += ["--dtype", "float32", "--served-model-name", name, *options]
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env={**os.environ, **MORE}, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        while True:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            try:
                return urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)

    def kill(self) -> None:
        os.killpg(self._process.pid, 9)
        self._process.wait()


@contextmanager
def running(folder: Path, name: str, log: Path, *options: str) -> Iterator[Server]:
    """A server that answers, until the end of the block."""
    server = Server(folder, name, log, *options)
    try:
        server.wait()
        yield server
    finally:
        server.kill()
