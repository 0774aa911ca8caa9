"""``rocktokens report`` on a real run: the page, the figures, one JSON object, and refusals of one sentence."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import FinishedRun, refuse, require_sound, rocktokens, snapshot, succeed

from rocktokens.run_dir import RunDir
from rocktokens.types import RockSet


def test_help_shows_an_example():
    shown = " ".join(succeed("report", "--help").stdout.split())
    assert "Example: rocktokens report" in shown and "--json" in shown and "--figures" in shown


def test_a_run_becomes_one_page_and_is_left_as_it_was(finished: FinishedRun, tmp_path: Path):
    before = snapshot(finished.path)
    page, figures = tmp_path / "deep/report.html", tmp_path / "figures"
    record = succeed("report", finished.path, "-o", page, "--figures", figures, "--json").record
    assert snapshot(finished.path) == before
    assert record["report"] == str(page) and record["bytes"] == page.stat().st_size
    assert set(record["figures"]) == {str(own) for own in figures.iterdir()} and (figures / "funnel.pdf").exists()
    (run,) = record["runs"]
    rocks = RockSet.load(finished.path / "rocks.json")
    answer = run["answers"][0]["sentence"]
    assert answer.startswith("8 prompts are too few to find rocks: trace at least 40 (trace.num_prompts). ")
    assert f" {len(rocks.tokens)} of {rocks.summary['n_types']} token types are rocks" in answer
    assert [bool(answer["sources"]) for answer in run["answers"]] == [True, True, True, False, False]
    assert run["answers"][3]["sentence"] == "Not known yet: run `rocktokens knockout`."


def test_the_answer_is_printed_too_and_the_page_is_the_same_again(finished: FinishedRun, tmp_path: Path):
    first, second = tmp_path / "first.html", tmp_path / "second.html"
    shown = succeed("report", finished.path, "-o", first).stdout
    assert "Which tokens?" in shown and shown.endswith(f"report: {first}\n")
    succeed("report", finished.path, "-o", second, "--json")
    assert first.read_bytes() == second.read_bytes()


def test_a_run_is_named_as_its_folder_whatever_that_looks_like(finished: FinishedRun, tmp_path: Path):
    run = tmp_path / "lr[red]5"
    RunDir(run).commit_text("rocks.json", (finished.path / "rocks.json").read_text(encoding="utf-8"))
    assert succeed("report", run, "-o", tmp_path / "page.html").stdout.startswith("lr[red]5 ")


def test_several_runs_are_answered_in_turn(finished: FinishedRun, tmp_path: Path):
    record = succeed("report", finished.path, finished.path, "-o", tmp_path / "two.html", "--json").record
    assert [own["name"] for own in record["runs"]] == ["run", "run"]


def test_by_default_the_page_goes_into_the_run(finished: FinishedRun, tmp_path: Path):
    run = shutil.copytree(finished.path, tmp_path / "run")
    assert succeed("report", run).stdout.endswith(f"report: {run / 'report.html'}\n")
    require_sound(run)
    elsewhere = tmp_path / "page.html"
    succeed("report", run, "-o", elsewhere)
    assert elsewhere.read_bytes() == (run / "report.html").read_bytes()
    before = snapshot(tmp_path)
    refuse("report", run, run, naming=("a page of 2 runs", "-o FILE"))
    refuse("report", tmp_path / "nowhere", naming=("nowhere is not a run directory",))
    assert snapshot(tmp_path) == before and not (tmp_path / "nowhere").exists()


def test_bad_input_is_one_sentence(finished: FinishedRun, tmp_path: Path):
    page = tmp_path / "report.html"
    refuse("report", tmp_path / "nowhere", "-o", page, naming=("nowhere is not a run directory", "manifest.json"))
    RunDir(tmp_path / "empty").commit_text("config.toml", "")
    refuse("report", tmp_path / "empty", "-o", page, naming=("nothing to show", "rocktokens trace"))
    refused = f"the report cannot be written to {tmp_path} (is a directory): give another place"
    refuse("report", finished.path, "-o", tmp_path, naming=(refused,))
    (tmp_path / "file").write_text("", encoding="utf-8")
    refuse(
        *("report", finished.path, "-o", page, "--figures", tmp_path / "file"),
        naming=(f"the figures cannot be written to {tmp_path / 'file'} (", "give another place"),
    )
    RunDir(tmp_path / "empty").commit_text("rocks.json", json.dumps({"schema_version": 99}))
    refuse("report", tmp_path / "empty", "-o", page, naming=("rocks.json", "schema_version 99"))


def test_a_run_must_be_named():
    assert rocktokens("report").code == 2


@pytest.mark.parametrize("name", ["knockout.json", "gradients.json", "study.json"])
def test_a_record_that_lacks_a_field_is_refused(tmp_path: Path, name: str):
    RunDir(tmp_path / "run").commit_text(name, '{"schema_version": 1, "alpha": 0.05}')
    refuse("report", tmp_path / "run", "-o", tmp_path / "x.html", naming=(name, "with `rocktokens"))
