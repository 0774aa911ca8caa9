"""A teacher behind a server through the commands: the results of one in memory, labelled."""

import html
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from command_line import FinishedRun, changed, refuse, rocktokens, succeed
from small_study import write_study

from fake_vllm import FakeVllm, serving
from rocktokens.errors import RocktokensError
from rocktokens.models.load import load_model
from rocktokens.policies import make_policy
from rocktokens.report.views.run_view import RunView
from rocktokens.rocks import persistence
from rocktokens.rocks.find import find_rocks
from rocktokens.run_dir import RunDir
from rocktokens.traces.schema import TEACHER_KEY
from rocktokens.traces.store import TraceStore
from rocktokens.types import RockSet

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


LABEL = "top-20 + tail"


def named(url: str, *settings: str) -> list[str]:
    return served(url, "teacher.values=top_k", *settings)


@pytest.fixture(scope="module")
def labelled(finished: FinishedRun, tmp_path_factory: pytest.TempPathFactory, url: str) -> Path:
    """A run of two checkpoints whose teacher named 20 tokens, with its rocks."""
    run = tmp_path_factory.mktemp("labelled") / "run"
    students = json.dumps([str(finished.path / f"checkpoints/step-{step}") for step in (0, 4)])
    replay = changed(f"run.directory={run}", f"trace.checkpoints={students}")
    said = succeed("trace", finished.config, *replay, *named(url)).stderr
    assert "the tail beside the teacher's 20 likeliest tokens has probability" in said
    succeed("find", run, "--json")
    return run


def test_a_study_says_what_the_teacher_gave(url: str, tmp_path: Path):
    short = ("study.seeds=[0]", "study.processes=1", "base.training.max_steps=1", "base.evaluation.num_prompts=2")
    teacher = ("engine=vllm", "values=top_k", f"url={url}")
    settings = [*short, *(f"base.teacher.{own}" for own in teacher)]
    succeed("study", write_study(tmp_path, "study"), *changed(*settings))
    assert RunView.open(tmp_path / "study").teacher_label == LABEL


def test_everything_says_what_the_teacher_gave(labelled: Path):
    part = RunDir(labelled).files("traces/checkpoint=0/")[0].path
    table = pq.read_table(labelled / part)
    assert table.schema.metadata[TEACHER_KEY] == LABEL.encode()
    assert table.column("entropy_teacher").null_count == table.num_rows and not table.column("kl").null_count
    assert RunDir(labelled).manifest()["replay"]["served"] == LABEL
    rocks = json.loads((labelled / "rocks.json").read_text())
    assert rocks["source"]["teacher"] == LABEL and rocks["windows"] is None
    assert json.loads((labelled / "find.json").read_text())["source"]["teacher"] == LABEL
    short = " ".join(succeed("find", labelled).stdout.split())
    assert f"(teacher: {LABEL})" in short and "values of single" in short
    long = " ".join(succeed("find", labelled, "--verbose").stdout.split())
    assert long.count(f"Teacher: {LABEL}.") == 4, "persistence, selectors, sensitivity, categories"
    assert f"Teacher: {LABEL}." in succeed("find", labelled, labelled, "--compare").stdout
    succeed("verify", labelled)
    succeed("report", labelled)
    page = (labelled / "report.html").read_text()
    assert f"Where the teacher is labelled {LABEL}" in page and "over the whole vocabulary" not in page
    assert f"Left out: gradients need the teacher's whole distribution, and it gave {LABEL}." in html.unescape(page)
    assert f"pebbles-teacher ({LABEL})" in page and page.count(f"teacher: {LABEL}") > 2


def test_kl_is_below_that_of_a_teacher_in_memory(finished: FinishedRun, labelled: Path, tmp_path: Path):
    students = json.dumps([str(finished.path / f"checkpoints/step-{step}") for step in (0, 4)])
    run = tmp_path / "memory"
    succeed("trace", finished.config, *changed(f"run.directory={run}", f"trace.checkpoints={students}"))
    whole, partial = kl(run), kl(labelled)
    assert (partial <= whole + 1e-4).all() and 0.5 < partial.sum() / whole.sum() < 1
    script = Path(__file__).parents[2] / "examples/compare_traces.py"
    said = subprocess.run([sys.executable, script, run, labelled], capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"teachers: in memory (left), {LABEL} (right)\ncheckpoint  tokens")
    refuse("find", run, labelled, "--compare", naming=("different values (in memory, top-20 + tail)",))


def test_statements_on_single_tokens_are_refused(
    labelled: Path, finished: FinishedRun, url: str, monkeypatch: pytest.MonkeyPatch
):
    refuse("gradients", labelled, naming=(LABEL, 'teacher.values = "states"'))
    refuse("gradients", labelled, *changed("teacher.engine=local", "teacher.values=states"), naming=(LABEL,))
    refuse("find", labelled, *changed("find.stage=context"), naming=("find.stage", "single tokens"))
    with pytest.raises(RocktokensError, match=f"the teacher of these traces gave {re.escape(LABEL)}"):
        find_rocks(TraceStore(labelled), stage="context")
    with pytest.raises(RocktokensError, match=f"the teacher of these gave {re.escape(LABEL)}, .*: leave it out"):
        make_policy("rocks", rocks=RockSet.load(labelled / "rocks.json"), window=True)
    refuse("trace", finished.config, *named(url, "trace.classes=classes.json"), naming=("trace.classes",))
    with monkeypatch.context() as patch:
        patch.setattr(persistence, "kl_quantiles", None)  # which no query needs
        summary = find_rocks(TraceStore(labelled)).summary
    assert summary["tau_pre_nats"] is summary["tau_post_nats"] is None
    RunDir(labelled).drop([own.path for own in RunDir(labelled).files("traces/checkpoint=4/")[-1:]])
    students = json.dumps([str(finished.path / f"checkpoints/step-{step}") for step in (0, 4)])
    replay = changed(f"run.directory={labelled}", f"trace.checkpoints={students}")
    refuse("trace", finished.config, *replay, *served(url), naming=(f"was served ({LABEL}), now it is served",))
    refuse("trace", finished.config, *replay, *named(url, "teacher.top_k=19"), naming=("(top-19 + tail)",))
    succeed("trace", finished.config, *replay, *named(url))


def test_check_says_what_is_known(finished: FinishedRun, url: str):
    findings = {
        own["name"]: own for own in rocktokens("check", finished.config, *named(url), "--json").record["findings"]
    }
    assert findings["teacher head"]["value"].startswith("none is needed: log-probabilities of 20 tokens and one tail")
    assert LABEL in findings["divergence"]["value"] and findings["overlap"]["measured"]["overlap"] > 0
    assert 0 < findings["teacher tail"]["measured"]["mass"] < 1 and findings["memory"]["measured"]["teacher"] == 0
    few = named(url, "teacher.top_k=9")
    findings = {own["name"]: own for own in rocktokens("check", finished.config, *few, "--json").record["findings"]}
    assert "names fewer than 16" in findings["overlap"]["value"]


def test_stop_mass_is_that_of_the_whole(finished: FinishedRun, url: str):
    whole, known = (
        {own["name"]: own for own in rocktokens("check", finished.config, *over, "--json").record["findings"]}
        for over in (changed(), named(url))
    )
    masses = [own["stop mass"]["measured"]["stop_mass"] for own in (whole, known)]
    assert masses[0] == pytest.approx(masses[1], rel=1e-3) and masses[0] > 0


def test_a_whole_run_leaves_out_what_cannot_be_had(finished: FinishedRun, url: str, tmp_path: Path):
    students = json.dumps([str(finished.path / f"checkpoints/step-{step}") for step in (0, 4)])
    settings = ("knockout.num_prompts=2", "gradients.batches=2")
    run = changed(f"run.directory={tmp_path / 'run'}", f"trace.checkpoints={students}", *settings)
    made = succeed("run", finished.config, *run, *named(url), "--json").record
    assert made["skipped"]["gradients"] == f"gradients need the teacher's whole distribution, and it gave {LABEL}"
    assert {"trace", "find", "report"} <= {*made["made"]}
    again = succeed("run", finished.config, *run, *named(url), "--json").record
    assert again["made"] == []
