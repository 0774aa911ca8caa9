"""The runs of an explorer: which are found, how they are numbered, and that a changed run is read again."""

import json
import shutil
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from explorer_run import N_ROLLOUTS, ROCK_IDS, make_run
from starlette.testclient import TestClient

from rocktokens.errors import RocktokensError
from rocktokens.evaluation.records import EvaluationRecord, Ledger
from rocktokens.report.explorer import shelf as shelf_module
from rocktokens.report.explorer.server import make_app
from rocktokens.report.explorer.shelf import MAX_DEPTH, Shelf
from rocktokens.report.views.run_row import QUIET, RunRow, run_row, run_version
from rocktokens.run_dir import RunDir

TOKEN = "secret-token"


def make_small(path: Path, max_steps: int = 2, logged: int = 2) -> Path:
    """A run of two small files."""
    run = RunDir(path)
    with run.lock():
        run.record_start("distill", student="small", teacher="large")
        run.commit_text("config.toml", f'[task]\nname = "sums"\n[training]\nmax_steps = {max_steps}\n')
    run.logs.write_text("".join(json.dumps({"step": step, "kl": 1.0}) + "\n" for step in range(logged)))
    return path


def listed(shelf: Shelf) -> dict[int, str]:
    return {number: row.name for number, row in shelf.listing(time.time()).rows}


@pytest.fixture
def path(tmp_path: Path, whole: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(whole, tmp_path / "run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "whole")


# The search


def test_runs_are_found_at_any_depth_within_bounds(tmp_path: Path):
    deep = Path(*"abcdef")
    assert len(deep.parts) == MAX_DEPTH
    for name in ("one", "one/study/arms/uniform/seed-1", deep, deep / "too-deep", ".hidden", "one/traces/not-a-run"):
        make_small(tmp_path / name)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/manifest.json").write_text('{"name": "a web page"}')
    (tmp_path / "odd/manifest.json").mkdir(parents=True)
    shelf = Shelf([tmp_path])
    assert sorted(listed(shelf).values()) == ["a/b/c/d/e/f", "one", "one/study/arms/uniform/seed-1"]
    assert shelf.listing(None).left_out == (
        f"Not searched: 1 folder more than {MAX_DEPTH} levels below {tmp_path.name}. Give a folder further down."
    )


def test_a_link_is_followed_and_no_run_is_listed_twice(tmp_path: Path):
    make_small(tmp_path / "elsewhere/real")
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "linked").symlink_to(tmp_path / "elsewhere/real")
    (runs / "circle").symlink_to(runs)
    (runs / "linked-again").symlink_to(tmp_path / "elsewhere/real")
    assert list(listed(Shelf([runs])).values()) == ["linked"]
    assert list(listed(Shelf([runs, runs / "linked"])).values()) == ["real"]


def test_a_given_run_comes_first_and_a_new_run_last(tmp_path: Path):
    given = make_small(tmp_path / "given")
    make_small(tmp_path / "runs/b")
    shelf = Shelf([tmp_path / "runs", given])
    assert (listed(shelf), shelf.n_given) == ({0: "given", 1: "b"}, 1)
    make_small(tmp_path / "runs/a")
    assert listed(shelf) == {0: "given", 1: "b", 2: "a"}
    shutil.rmtree(tmp_path / "runs/b")
    assert listed(shelf) == {0: "given", 2: "a"}
    with pytest.raises(RocktokensError, match="not a run directory"):
        shelf.view(1)
    with pytest.raises(RocktokensError, match="run 3 is not there"):
        shelf.view(3)


def test_a_bounded_number_of_runs_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for number in range(4):
        make_small(tmp_path / str(number))
    monkeypatch.setattr(shelf_module, "MAX_RUNS", 3)
    assert "Only the first 3 runs are listed." in Shelf([tmp_path]).listing(None).left_out
    monkeypatch.setattr(shelf_module, "MAX_FOLDERS", 2)
    listing = Shelf([tmp_path]).listing(None)
    assert "Only the first 2 folders" in listing.left_out and len(listing.rows) == 2


@pytest.mark.parametrize("name", ["empty", "missing", "file"])
def test_where_there_are_no_runs(tmp_path: Path, name: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(RocktokensError, match=f"{tmp_path / name} is not a"):
        Shelf([make_small(tmp_path / "run"), tmp_path / name])


# The rows


def test_the_state_of_a_run(tmp_path: Path):
    run, now = make_small(tmp_path / "run", max_steps=3), time.time()

    def state(seconds_later: float | None = 0) -> str:
        return run_row(run, "run", None if seconds_later is None else now + seconds_later).state

    assert (state(), state(2 * QUIET), state(None)) == ("training", "stopped", "unfinished")
    with (run / "logs.jsonl").open("a") as log:
        log.write('{"step": 2, "kl": 1.0}\n{"step": 3, "k')
    assert (state(), state(None)) == ("finished", "finished")
    (run / "logs.jsonl").unlink()
    assert state() == "not trained here"


def test_a_row_tells_what_came_out(path: Path):
    row = run_row(path, "name")
    assert (row.name, row.n_rocks, row.accuracy) == ("name", len(ROCK_IDS), ())
    assert row.stages == ("traces", "rocks", "classes", "knock-out")
    accuracies = {"teacher": 0.9, "step 64": 0.8, "step 0": 0.5, "step 16": 0.2}
    numbers: tuple[Any, ...] = (1, 1, 1, (0.0, 1.0), None, 1.0, 0.0, 1.0, 0, ["a"], [1], [["1"]])
    records = [EvaluationRecord("sums", own, *numbers, name=name, settings={}) for name, own in accuracies.items()]
    RunDir(path).commit("evaluations.json", Ledger(records).save)
    assert run_row(path, "name").accuracy == (0.5, 0.8)
    RunDir(path).commit("evaluations.json", Ledger(records[:2]).save)
    assert run_row(path, "name").accuracy == (0.8,)


def test_a_row_is_read_again_only_where_something_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read = []
    monkeypatch.setattr(shelf_module, "run_row", lambda *own: read.append(own[1]) or run_row(*own))
    for name in "ab":
        make_small(tmp_path / name, max_steps=3)
    shelf, now = Shelf([tmp_path]), time.time()
    states = [[row.state for _, row in shelf.listing(at).rows] for at in (now, now + 1, None, now + 2 * QUIET)]
    assert states == [["training"] * 2, ["training"] * 2, ["unfinished"] * 2, ["stopped"] * 2]
    assert read == ["a", "b"] * 3
    with (tmp_path / "a/logs.jsonl").open("a") as log:
        log.write('{"step": 2}\n')
    RunDir(tmp_path / "b").commit_text("notes.json", "{}")
    assert [row.step for _, row in shelf.listing(now + 2 * QUIET).rows] == [3, 2] and read == ["a", "b"] * 4


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path, path: Path):
    make_small(tmp_path / "sound")
    (path / "rocks.json").write_text("{")
    rows = {row.name: row for _, row in Shelf([tmp_path]).listing(None).rows}
    assert rows["sound"].problem == "" and isinstance(rows["sound"], RunRow)
    assert rows["run"].state == "damaged" and "rocks.json is not the file" in rows["run"].problem


# Runs that change


def test_the_version_is_of_what_is_shown(path: Path):
    run, before = RunDir(path), run_version(RunDir(path))
    for unseen in ("traces/training/part-0.parquet", "rollouts/training/step-1.parquet", "checkpoints/step-1/x.json"):
        run.commit_text(unseen, "{}")
        assert run_version(run) == before
    run.commit_text("find.json", "{}")
    assert run_version(run) != before


def test_a_changed_run_is_opened_again_and_the_old_view_let_go(path: Path):
    shelf = Shelf([path])
    view = shelf.view(0)
    view.index()
    gone = weakref.ref(view)
    assert shelf.view(0) is view
    RunDir(path).drop(["rocks.json"])
    assert shelf.view(0) is not view and not shelf.is_open(view)
    del view
    assert shelf.view(0).rocks is None and gone() is None


def test_only_some_views_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shelf_module, "MAX_OPEN", 2)
    shelf = Shelf([make_small(tmp_path / name) for name in "abc"])
    first, second, _ = (shelf.view(number) for number in range(3))
    assert not shelf.is_open(first) and shelf.is_open(second)


def test_the_next_request_shows_the_new_data(path: Path):
    with TestClient(make_app(Shelf([path]), TOKEN), base_url="http://127.0.0.1") as client:

        def ask(route: str, status: int = 200):
            response = client.get(f"/{TOKEN}/api/runs/0{route}")
            assert response.status_code == status, response.text
            return response.json()

        before, version = ask(""), ask("/version")["version"]
        assert before["version"] == version and len(before["rocks"]) == len(ROCK_IDS)
        assert ask("/rollouts?rock=true")["total"] > 0
        record = json.loads((path / "rocks.json").read_text())
        RunDir(path).commit_text("rocks.json", json.dumps({**record, "tokens": record["tokens"][:1]}))
        assert ask("/version")["version"] != version
        assert len(ask("")["rocks"]) == 1
        strip = ask("/rollouts/0")
        assert {own["rock_rank"] for own in strip["tokens"] if own["rock_rank"]} <= {1}

        RunDir(path).commit_text("rocks.json", "no record")
        assert "rocks.json" in ask("", 404)["error"]
        (path / "manifest.json").write_text("{")
        assert "manifest.json is not valid JSON" in ask("/rollouts", 404)["error"]


def test_traces_that_vanish_are_named_not_a_failure(path: Path):
    """Their content was verified, and the engine knows their names: then they are gone, or others."""
    client = TestClient(make_app(Shelf([path]), TOKEN), base_url="http://127.0.0.1")
    assert client.get(f"/{TOKEN}/api/runs/0/rollouts").json()["total"] == N_ROLLOUTS
    part = next(path.glob("traces/checkpoint=10/*.parquet"))
    content = part.read_bytes()
    for damage in (part.unlink, lambda: part.write_bytes(b"PAR1 no table"), lambda: part.write_bytes(content[:-99])):
        damage()
        response = client.get(f"/{TOKEN}/api/runs/0/rollouts/3")
        assert response.status_code == 404 and part.name in response.json()["error"], response.text
    part.write_bytes(content)
    assert client.get(f"/{TOKEN}/api/runs/0/rollouts/3").status_code == 200
