"""A Spark Connect server with two workers gives the bytes of DuckDB; one that is not there is named."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from both_engines import needs_spark
from trace_oracle import random_trace, rescored, write_trace

from ranks import free_port
from rocktokens.errors import RocktokensError
from rocktokens.rocks.find import find_rocks
from rocktokens.traces.engines import open_engine
from rocktokens.traces.store import TraceStore

pytestmark = needs_spark
WORKERS = "local-cluster[2,1,512]"
"""Two processes with a core and 512 MB each."""
PATIENCE = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server in processes of its own."""
    if find_spec("grpc") is None:
        pytest.skip("the client of Spark Connect is not installed: pip install 'rocktokens[spark]'")
    import pyspark

    folder, port = tmp_path_factory.mktemp("server"), free_port()
    home = Path(pyspark.__file__).parent
    settings = {
        "spark.connect.grpc.binding.port": port,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "768m",
        "spark.executor.memory": "512m",
        "spark.sql.shuffle.partitions": 2,
        "spark.ui.enabled": "false",
    }
    line = [str(home / "bin/spark-submit"), "--master", WORKERS]
    line += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    line += [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*line, "spark-internal"],
            cwd=folder,
            env={**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        began = time.monotonic()
        while "Spark Connect server started" not in log.read_text():
            assert process.poll() is None and time.monotonic() - began < PATIENCE, log.read_text()[-2000:]
            time.sleep(0.2)
        yield f"sc://127.0.0.1:{port}"
        assert log.read_text().count("Registered executor") == 2
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["bound", "context"])
def test_rocks_json_is_the_same_bytes(server: str, tmp_path: Path, stage: str):
    late = random_trace(5, prompts=20, vocabulary=40)
    run = write_trace(tmp_path / "run", {0: rescored(late, 1), 200: late}, rows_per_part=150)
    embeddings = np.random.default_rng(0).normal(size=(40, 4))
    written = []
    for engine in ("duckdb", server):
        found = find_rocks(TraceStore(run, engine=engine), stage=stage, min_prompts=1, embeddings=embeddings)
        found.save(tmp_path / "rocks.json")
        written.append((tmp_path / "rocks.json").read_bytes())
    assert written[0] == written[1] and len(found.tokens) > 0


@pytest.mark.parametrize("address", ["sc://127.0.0.1:{port}", "sc://127.0.0.1:{port}/;token=abc", "sc://"])
def test_a_server_that_is_not_there_is_named_at_once(address: str):
    url = address.format(port=free_port())
    with pytest.raises(RocktokensError, match=rf"engine = '{url}' cannot be reached .*: start a Spark Connect server"):
        open_engine(url, None, "1GiB")


@pytest.mark.skipif(find_spec("grpc") is not None, reason="the client of Spark Connect is installed")
def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    class Answered:
        def close(self) -> None: ...

    monkeypatch.setattr("socket.create_connection", lambda *_, **__: Answered())
    with pytest.raises(RocktokensError, match=r"needs the client of Spark Connect.*pip install 'rocktokens\[spark\]'"):
        open_engine("sc://somewhere", None, "1GiB")
