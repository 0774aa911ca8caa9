"""A real vLLM server on a CPU as the teacher: what a stand-in cannot show."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rocktokens.config import Config, load_config
from rocktokens.errors import RocktokensError
from rocktokens.models import pebbles
from rocktokens.replay.replay import replay
from rocktokens.rocks.find import find_rocks
from rocktokens.scoring.teachers import load_teacher
from rocktokens.traces.store import TraceStore
from vllm_server import NEEDS_VLLM, Server, running

NAME = "pebbles-teacher"
POOLING = ("--runner", "pooling", "--convert", "embed")
pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Started without ``use_activation``: every request says that states are not to be normalised."""
    log = tmp_path_factory.mktemp("server") / "log"
    pooler = ("--pooler-config", '{"task": "token_embed"}')
    with running(pebbles.directory("teacher"), NAME, log, *POOLING, *pooler) as server:
        yield server


def demo(run: Path, *overrides: str) -> Config:
    """The demo's probe by an untrained student, and another one to compare it with."""
    students = f'trace.checkpoints=["{pebbles.directory("student")}", "pebbles-student"]'
    return load_config("demo", [f"run.directory={run}", "models.device=cpu", students, *overrides])


def over(server: Server, *overrides: str) -> tuple[str, ...]:
    return ("teacher.engine=vllm", f"teacher.url={server.url}", *overrides)


def test_kl_and_rocks_are_those_of_a_teacher_in_memory(server: Server, tmp_path: Path):
    """Every token within 1e-4 nats, every type's sum within 1e-4 of it."""
    replay(demo(tmp_path / "memory"))
    replay(demo(tmp_path / "served", *over(server)))
    stores = [TraceStore(tmp_path / name) for name in ("memory", "served")]
    for checkpoint in stores[0].checkpoints:
        tables = [own.table(checkpoint).order_by(["rollout_id", "position"]).to_pyarrow() for own in stores]
        kl = [table.column("kl").to_numpy().astype(float) for table in tables]
        assert len(kl[0]) > 10_000 and np.abs(kl[0] - kl[1]).max() < 1e-4
        ids = [table.column("token_id").to_numpy() for table in tables]
        assert np.array_equal(*ids)
        sums = [np.bincount(ids[0], weights=own) for own in kl]
        np.testing.assert_allclose(sums[1], sums[0], rtol=1e-4)
    rocks = [find_rocks(own, k=20) for own in stores]
    assert [own.id for own in rocks[0].tokens] == [own.id for own in rocks[1].tokens]


def test_a_server_of_another_model_is_refused(server: Server, tmp_path: Path):
    with pytest.raises(RocktokensError, match="has 'pebbles-teacher', not 'pebbles-student'"):
        load_teacher(demo(tmp_path, *over(server, "models.teacher=pebbles-student")), "cpu")
    renamed = over(server, "models.teacher=pebbles-student", f"teacher.model={NAME}")
    with pytest.raises(RocktokensError, match="states of width 256 for a head of width 128"):
        load_teacher(demo(tmp_path, *renamed), "cpu")


def test_a_server_that_is_started_again_is_waited_for(server: Server, tmp_path: Path):
    load_teacher(demo(tmp_path, *over(server)), "cpu")
    server.kill()
    server.start()
    load_teacher(demo(tmp_path, *over(server)), "cpu")
