"""A run as the pages see it: whole, in parts, damaged, asked by several threads; and views as JSON."""

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from view_run import CHECKPOINTS, log_line, probe_rollouts, rock_ids, scores, write_traced, write_whole

from replay_records import make_replay
from rocktokens.errors import RocktokensError
from rocktokens.report.views.grades import FIRST_PROMPTS, Grades
from rocktokens.report.views.live import live
from rocktokens.report.views.log_tail import LogTail
from rocktokens.report.views.rollout_list import Filters, rollouts
from rocktokens.report.views.run_view import RunView, to_json
from rocktokens.report.views.strips import interesting_rollouts, rollout_strip
from rocktokens.report.views.type_card import type_card
from rocktokens.run_dir import RunDir, derive_seed, file_sha256
from rocktokens.studies.records import StudyResult
from rocktokens.tasks.wordmath import Wordmath
from rocktokens.traces.schema import trace_table
from rocktokens.traces.writer import TraceWriter
from rocktokens.types import ReplayRecord, RockSet


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(tmp_path_factory.mktemp("whole")).path


def test_a_whole_run(whole: Path):
    run = RunView.open(whole)
    assert (run.name, run.checkpoints, run.reference) == (whole.name, list(CHECKPOINTS), 20)
    assert run.rocks is not None and list(run.rock_ranks) == [token.id for token in run.rocks.tokens]
    assert run.knockout is not None and run.knockout.knockouts[0].verdict == "pillar"
    assert [line["step"] for line in run.logs] == [0, 1, 2]
    assert "max_steps" in run.config_text and "replay" in run.manifest
    assert run.text_of(rock_ids()[0]) == "So"
    assert run.categories_of(rock_ids()[:1]) == {rock_ids()[0]: "discourse"}
    assert (run.find, run.gradients, run.study, run.evaluations) == (None, None, None, [])


@pytest.mark.parametrize(("model", "verdicts"), [("f" * 64, {"pillar"}), ("e" * 64, set())])
def test_verdicts_that_a_search_left_in_knockout_json_are_those_of_the_rocks(
    whole: Path, tmp_path: Path, model: str, verdicts: set[str]
):
    """Only if a checkpoint of the replay wrote the answers, not the teacher."""
    run = RunDir(shutil.copytree(whole, tmp_path / "run"))
    with run.lock():
        run.update_manifest(replay=make_replay(checkpoints={CHECKPOINTS[-1]: model}).to_manifest())
    found = RockSet.load(run.rocks)
    untested = [replace(own, verdict="untested", delta=None, delta_interval=None) for own in found.tokens]
    run.commit("rocks.json", replace(found, tokens=untested).save)
    rocks = RunView.open(run.path).rocks
    assert rocks is not None
    assert {own.verdict for own in rocks.tokens} - {"untested"} == verdicts
    assert {own.delta for own in rocks.tokens} - {None} == ({-0.5} if verdicts else set())


def test_a_run_that_was_only_traced(tmp_path: Path):
    run = RunView.open(write_traced(tmp_path).path)
    assert (run.rocks, run.knockout, run.logs, run.config_text) == (None, None, [], "")
    page = rollouts(run, Filters(sort="-mean_kl"))
    assert page.total == len(probe_rollouts())
    assert {(row.correct, row.finished, row.n_rocks) for row in page.rows} == {(None, None, 0)}
    assert rollouts(run, Filters(correct=True)).total == rollouts(run, Filters(rock=True)).total == 0
    strip = rollout_strip(run, 0)
    assert strip.prompt_text == "" and strip.tokens[0].text == f"<{strip.tokens[0].token_id}>"
    assert strip.tokens[0].category is None and strip.correct is None
    highest = max(row.mean_kl or 0 for row in page.rows if row.length >= np.median([r.length for r in page.rows]))
    assert next(row.mean_kl for row in page.rows if row.rollout_id == interesting_rollouts(run, 3)[0]) == highest


def test_a_run_that_is_still_training(tmp_path: Path):
    rows = probe_rollouts()[:2]
    with TraceWriter(tmp_path, source="training") as writer:
        writer.append(trace_table(rows, scores(sum(len(own.token_ids) for own in rows), 0)))
    (tmp_path / "logs.jsonl").write_text(log_line(0, kl=2.0), encoding="utf-8")
    run = RunView.open(tmp_path)
    assert (run.checkpoints, interesting_rollouts(run, 3)) == ([], [])
    assert live(run).step == 0
    with pytest.raises(RocktokensError, match="has no replay traces: run `rocktokens trace`"):
        rollouts(run, Filters())


def test_a_study_is_found_in_its_folder_and_in_its_run(tmp_path: Path):
    run = write_traced(tmp_path / "run")
    study = StudyResult("uniform", 0.05, None, None, 0, [0], 1, [], [], teacher="top-20 + tail")
    RunDir(run.path / "study").commit("study.json", study.save)
    for path in (run.path, run.path / "study"):
        assert RunView.open(path).study == study
    assert RunView.open(run.path / "study").checkpoints == []
    assert [RunView.open(path).teacher_label for path in (run.path, run.path / "study")] == ["", "top-20 + tail"]


def test_what_is_not_a_run_or_is_damaged_is_named(whole: Path, tmp_path: Path):
    with pytest.raises(RocktokensError, match="is not a run directory"):
        RunView.open(tmp_path)
    for name in ("rocks.json", "knockout.json", "evaluations.json", "find.json"):
        copy = shutil.copytree(whole, tmp_path / name)
        (copy / name).write_text("{", encoding="utf-8")
        refusal = "is not the file that" if RunDir(copy).lists(name) else "is not listed in"
        with pytest.raises(RocktokensError, match=rf"{name} {refusal} .*manifest\.json"):
            RunView.open(copy)
        RunDir(copy).commit_text(name, "{")
        with pytest.raises(RocktokensError, match=rf"{name} is not valid JSON"):
            RunView.open(copy)


def test_a_record_that_was_never_listed_because_its_writer_was_killed_is_not_there(whole: Path, tmp_path: Path):
    copy = shutil.copytree(whole, tmp_path / "run")
    RunDir(copy).drop(["rocks.json"])
    (copy / "rocks.json").write_text("{", encoding="utf-8")
    with pytest.raises(RocktokensError, match=r"rocks\.json is not listed in"):
        RunView.open(copy)
    (copy / ".rocks.json.former").touch()
    assert RunView.open(copy).rocks is None


def test_looking_changes_nothing(whole: Path):
    before = {path: file_sha256(path) for path in whole.rglob("*") if path.is_file()}
    run = RunView.open(whole)
    rollouts(run, Filters(text="so", correct=True))
    type_card(run, rock_ids()[0])
    assert {path: file_sha256(path) for path in whole.rglob("*") if path.is_file()} == before


def test_threads_get_the_answers_of_one(whole: Path):
    def ask(run: RunView, number: int) -> str:
        filters = Filters(checkpoint=CHECKPOINTS[number % 2], text="answer", correct=number % 3 == 0)
        card = type_card(run, rock_ids()[number % 3])
        return to_json([rollouts(run, filters), rollout_strip(run, number), card])

    alone = RunView.open(whole)
    expected = [ask(alone, number) for number in range(12)]
    shared = RunView.open(whole)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda number: ask(shared, number), range(12))) == expected


# Grades


def graded(path: Path, response: str, seen: str = "user: 1 + 1? assistant:") -> bool | None:
    recorded = make_replay(task={"name": "jsonl", "path": str(path)}, num_prompts=1)
    return Grades(recorded, "probe prompts").is_right("jsonl-0", seen, response)


def test_answers_are_graded_by_the_prompts_that_were_recorded(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}), encoding="utf-8")
    assert graded(path, "The answer is 2.") is True
    assert graded(path, "The answer is 3.") is False
    assert graded(path, "The answer is 2.", seen="user: 1 + 2? assistant:") is None  # the file was changed since
    assert graded(tmp_path / "gone.jsonl", "The answer is 2.") is None


@pytest.mark.parametrize("recorded", [None, make_replay(), make_replay(task={"name": "hub", "path": "x"})])
def test_prompts_that_cannot_be_made_again_give_no_grade(recorded: ReplayRecord | None):
    assert Grades(recorded, "probe prompts").is_right("jsonl-0", "1 + 1?", "2") is None


def test_prompts_beyond_the_first_are_graded_alike():
    recorded = make_replay(task={"name": "wordmath"}, num_prompts=FIRST_PROMPTS + 2, seed=3)
    *prompts, beyond = Wordmath().prompts(FIRST_PROMPTS + 3, derive_seed(3, "probe prompts"))
    grades = Grades(recorded, "probe prompts")
    for own in (prompts[-1], prompts[0]):
        assert grades.is_right(own.id, own.text, f"The answer is {own.answer}.") is True
        assert grades.is_right(own.id, own.text, f"The answer is {own.answer}1.") is False
    assert grades.is_right(beyond.id, beyond.text, f"The answer is {beyond.answer}.") is None


# The log


def test_a_log_is_followed_while_it_is_written(tmp_path: Path):
    path, torn = tmp_path / "logs.jsonl", log_line(1)[:7]
    tail = LogTail(path)
    assert tail.lines() == []
    path.write_text(log_line(0) + torn, encoding="utf-8")
    assert [line["step"] for line in tail.lines()] == [0]
    path.write_text(log_line(0) + log_line(1) + log_line(2), encoding="utf-8")
    assert [line["step"] for line in tail.lines()] == [0, 1, 2]
    (tmp_path / "cut").write_text(log_line(0), encoding="utf-8")
    (tmp_path / "cut").replace(path)
    assert [line["step"] for line in tail.lines()] == [0]
    with path.open("a", encoding="utf-8") as file:
        file.write(torn + "\n" + log_line(5))
    assert [line["step"] for line in tail.lines()] == [0, 5]


# JSON


@dataclass(frozen=True)
class _View:
    value: object


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [finite(item) for item in value]
    return {key: finite(item) for key, item in value.items()} if isinstance(value, dict) else value


@given(PLAIN)
def test_json_is_read_back_and_cannot_end_a_script(value: object):
    text = to_json(_View(value))
    assert "<" not in text and text.isascii()
    assert json.loads(text, parse_constant=pytest.fail) == {"value": finite(value)}


def test_json_of_arrays_and_paths():
    view = _View((np.float32(0.5), np.array([1, 2]), np.int64(3), np.float64("nan"), Path("a/b"), {1: np.bool_(True)}))
    assert json.loads(to_json(view)) == {"value": [0.5, [1, 2], 3, None, "a/b", {"1": True}]}
