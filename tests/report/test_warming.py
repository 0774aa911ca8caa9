"""What the explorer reads ahead, so that the first list and the first search are as fast as the next."""

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import pytest
from explorer_run import N_ROLLOUTS, make_run
from starlette.testclient import TestClient

from rocktokens.report.explorer.server import make_app
from rocktokens.report.explorer.shelf import Shelf
from rocktokens.report.views import rollout_list
from rocktokens.report.views.run_view import RunView

TOKEN = "secret-token"


class CountingRun(RunView):
    """A run that counts the texts it reads."""

    n_read = 0

    def read(self, sequences: Iterable[Iterable[int]]) -> list[str]:
        texts = super().read(sequences)
        self.n_read += len(texts)
        return texts


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "hostile")


def test_a_warm_run_reads_no_text_again(path: Path):
    run = CountingRun.open(path)
    rollout_list.warm(run)
    n_read = run.n_read
    found = rollout_list.rollouts(run, rollout_list.Filters(text="so"))
    assert n_read >= N_ROLLOUTS and run.n_read == n_read
    assert found == rollout_list.rollouts(RunView.open(path), rollout_list.Filters(text="so"))


def test_warming_ends_when_it_is_no_longer_wanted(path: Path):
    run = CountingRun.open(path)
    rollout_list.warm(run, lambda: run.n_read < N_ROLLOUTS)
    assert run.n_read == N_ROLLOUTS  # the responses, and for no grade a prompt


def test_the_application_warms_its_runs_and_ends_with_its_thread(path: Path):
    shelf = Shelf([path, path], CountingRun.open)
    runs = [cast(CountingRun, shelf.view(number)) for number in range(2)]
    with TestClient(make_app(shelf, TOKEN), base_url="http://127.0.0.1") as client:
        _wait_for(lambda: all(run.n_read >= 2 * N_ROLLOUTS for run in runs))
        n_read = runs[1].n_read
        assert client.get(f"/{TOKEN}/api/runs/1/rollouts?text=so").status_code == 200
        assert runs[1].n_read == n_read
    assert "warming" not in {thread.name for thread in threading.enumerate()}


def test_a_run_that_cannot_be_warmed_still_answers(tmp_path: Path):
    path = make_run(tmp_path / "damaged")
    for part in path.glob("traces/*/*.parquet"):
        part.write_bytes(b"not a table")
    with TestClient(make_app(Shelf([path]), TOKEN), base_url="http://127.0.0.1") as client:
        assert client.get(f"/{TOKEN}/api/runs/0/knockouts").status_code == 200


def _wait_for(is_done, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < until
        time.sleep(0.01)
