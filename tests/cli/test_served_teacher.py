"""A teacher behind a server through the commands: the results of one in memory, labelled."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from command_line import FinishedRun, changed, refuse, rocktokens, succeed

from fake_vllm import FakeVllm, serving
from rocktokens.models.load import load_model
from rocktokens.run_dir import RunDir

NAME = "pebbles-teacher"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    teacher = load_model(NAME)
    fake = FakeVllm(teacher.model, name=NAME, tokenizer=teacher.tokenizer)
    fake.max_model_len = 384
    with serving(fake) as url:
        yield url


def served(url: str, *settings: str) -> list[str]:
    return changed("teacher.engine=vllm", f"teacher.url={url}", *settings)


def kl(run: Path) -> np.ndarray:
    parts = [pq.read_table(run / own.path) for own in RunDir(run).files("traces/checkpoint=")]
    return np.concatenate([part.column("kl").to_numpy() for part in parts])


def test_rocks_and_gradients_are_those_of_a_teacher_in_memory(finished: FinishedRun, tmp_path: Path, url: str):
    students = json.dumps([str(finished.path / f"checkpoints/step-{step}") for step in (0, 4)])
    found: list[tuple[np.ndarray, list[int], list[float]]] = []
    for name, over in (("memory", changed()), ("served", served(url))):
        run = tmp_path / name
        replay = changed(f"run.directory={run}", f"trace.checkpoints={students}")
        succeed("trace", finished.config, *replay, *over)
        rocks = succeed("find", run, "--json").record["tokens"]
        succeed("gradients", run, "--set", "gradients.batches=2")
        shares = json.loads((run / "gradients.json").read_text())["logit"]["reference"]["hidden"]["groups"]
        found.append((kl(run), [own["id"] for own in rocks], [own["norm_share"] for own in shares.values()]))
    (kl_a, rocks_a, shares_a), (kl_b, rocks_b, shares_b) = found
    assert np.abs(kl_a - kl_b).max() < 1e-4 and rocks_a == rocks_b
    np.testing.assert_allclose(shares_a, shares_b, rtol=1e-4)
    assert RunDir(tmp_path / "served").manifest()["replay"]["served"] == "states float32"
    # What one began, the other does not finish.
    RunDir(tmp_path / "served").drop([own.path for own in RunDir(tmp_path / "served").files("traces/checkpoint=4/")])
    replay = changed(f"run.directory={tmp_path / 'served'}", f"trace.checkpoints={students}")
    refuse("trace", finished.config, *replay, naming=("teacher was served (states float32), now it is in memory",))


def test_check_looks_at_the_server(finished: FinishedRun, url: str):
    findings = {
        own["name"]: own for own in rocktokens("check", finished.config, *served(url), "--json").record["findings"]
    }
    assert findings["teacher head"]["level"] == "ok" and url in findings["teacher head"]["value"]
    assert findings["divergence"]["level"] == "ok"
    refuse("check", finished.config, *served(url, "teacher.model=other"), naming=("not 'other'", "teacher.model"))
