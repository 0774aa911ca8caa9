"""A real vLLM server on a CPU that names the teacher's likeliest tokens: what a stand-in cannot show."""

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
pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(pebbles.directory("teacher"), NAME, tmp_path_factory.mktemp("server") / "log") as server:
        yield server


def demo(run: Path, *overrides: str) -> Config:
    """A part of the demo's probe by an untrained student, and another one to compare it with."""
    students = f'trace.checkpoints=["{pebbles.directory("student")}", "pebbles-student"]'
    few = ("models.device=cpu", "trace.num_prompts=96", students)
    return load_config("demo", [f"run.directory={run}", *few, *overrides])


def named(server: Server, *overrides: str) -> tuple[str, ...]:
    return ("teacher.engine=vllm", "teacher.values=top_k", f"teacher.url={server.url}", *overrides)


def test_kl_is_a_lower_bound_and_ranks_the_same_types(server: Server, tmp_path: Path):
    """No token above the whole kl by more than rounding; the sum and most rocks are those of the whole."""
    replay(demo(tmp_path / "memory"))
    replay(demo(tmp_path / "named", *named(server)))
    stores = [TraceStore(tmp_path / name) for name in ("memory", "named")]
    step = stores[0].checkpoints[-1]
    tables = [own.table(step).order_by(["rollout_id", "position"]).to_pyarrow() for own in stores]
    whole, tailed = (table.column("kl").to_numpy().astype(float) for table in tables)
    assert len(whole) > 2_000 and (tailed <= whole + 0.05).all() and np.median(whole - tailed) >= 0
    assert 0.5 < tailed.sum() / whole.sum() < 1, "of a student that is not trained a third is missing"
    logps = [table.column("logp_teacher").to_numpy() for table in tables]
    np.testing.assert_allclose(logps[1], logps[0], rtol=0, atol=1e-3)
    tops = [table.column("teacher_top").to_pylist() for table in tables]
    assert np.mean([a[0]["id"] == b[0]["id"] for a, b in zip(*tops, strict=True)]) > 0.99
    first, second = ({own.id for own in find_rocks(store, k=10).tokens} for store in stores)
    assert len(first & second) >= 9
    assert stores[1].teacher(step) == "top-20 + tail"


def test_a_server_of_another_kind_is_refused(server: Server, tmp_path: Path):
    with pytest.raises(RocktokensError, match=r"max-logprobs|max allowed"):
        load_teacher(demo(tmp_path, *named(server, "teacher.top_k=21")), "cpu")
    with pytest.raises(RocktokensError, match="has 'pebbles-teacher', not 'pebbles-student'"):
        load_teacher(demo(tmp_path, *named(server, "models.teacher=pebbles-student")), "cpu")
