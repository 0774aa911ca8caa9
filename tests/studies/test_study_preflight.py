"""What a study reads from outside: it may not change under it, and what cannot work is refused before training."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rocktokens.classes import TokenClass, TokenClasses
from rocktokens.errors import ConfigError, RocktokensError, RunDirError, TokenizerMismatchError
from rocktokens.models import pebbles
from rocktokens.run_dir import RunDir
from rocktokens.studies.config import StudyConfig, make_study
from rocktokens.studies.preflight import record_inputs, require_ready, require_same_inputs
from rocktokens.types import RockSet, RockToken


def write_data(path: Path, count: int = 4, first: int = 0, **answer: str) -> None:
    lines = (
        {"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(first, first + count)
    )
    kept = [line if not answer else {"question": line["question"], **answer} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))


def write_rocks(path: Path, tokenizer_sha256: str = "") -> None:
    tokens = [RockToken(5, "x", 1, 9, 1.0, 9.0, None, None, "word")]
    RockSet(tokenizer_sha256=tokenizer_sha256, criterion={}, source={}, summary={}, tokens=tokens).save(path)


@pytest.fixture
def study(tmp_path: Path) -> StudyConfig:
    """Data, a model directory and rocks of its own."""
    for name in ("train.jsonl", "test.jsonl"):
        write_data(tmp_path / name)
    write_rocks(tmp_path / "rocks.json")
    write_rocks(tmp_path / "others.json")
    shutil.copytree(pebbles.directory("student"), tmp_path / "student")
    return make_study(record_of(tmp_path))


def record_of(folder: Path, **evaluation: Any) -> dict[str, Any]:
    return {
        "study": {
            "directory": str(folder / "study"),
            "seeds": [0],
            "evaluate_every": 2,
            "rocks": f"{folder}/rocks.json",
        },
        "base": {
            "models": {"student": str(folder / "student"), "teacher": "pebbles-teacher", "device": "cpu"},
            "task": {"name": "jsonl", "path": str(folder / "train.jsonl")},
            "evaluation": {"num_prompts": 3, "task": {"name": "jsonl", "path": f"{folder}/test.jsonl", **evaluation}},
            "training": {"max_steps": 2, "per_device_train_batch_size": 2},
        },
        "arm": [
            {"name": "uniform", "policy": {"name": "uniform"}},
            {"name": "freeze", "policy": {"name": "rocks", "rocks": "@rocks"}},
            {"name": "others", "policy": {"name": "rocks", "rocks": str(folder / "others.json")}},
        ],
    }


CHANGES: dict[str, Callable[[Path], object]] = {
    "base.task.path": lambda folder: write_data(folder / "train.jsonl", first=9),
    "base.evaluation.task.path": lambda folder: write_data(folder / "test.jsonl", count=5),
    "base.models.student": lambda folder: (folder / "student/tokenizer.json").write_text("{}"),
    "arm 'others': policy.rocks": lambda folder: write_rocks(folder / "others.json", "another"),
}


@pytest.mark.parametrize("key", CHANGES)
def test_inputs_that_changed_are_refused_by_name(study: StudyConfig, tmp_path: Path, key: str):
    run = RunDir(tmp_path / "study")
    record_inputs(study, run)
    assert set(run.manifest()["inputs"]) == CHANGES.keys()
    (tmp_path / "student/README.md").write_text("nothing depends on this")
    record_inputs(study, run)
    CHANGES[key](tmp_path)
    with pytest.raises(ConfigError) as refused:
        require_same_inputs(study, run)
    assert str(refused.value).startswith(f"{key} = '{tmp_path}/") and "another content" in str(refused.value)


def test_the_study_own_rocks_may_not_change_either(study: StudyConfig, tmp_path: Path):
    run = RunDir(tmp_path / "study")
    run.commit("rocks.json", RockSet.load(tmp_path / "rocks.json").save)
    record_inputs(study, run)
    write_rocks(run.rocks, "another")
    with pytest.raises(RunDirError, match=r"rocks\.json is not the file that .*: restore it from a copy of the run$"):
        require_same_inputs(study, run)


def test_inputs_of_arms_that_are_added_are_noted_then(study: StudyConfig, tmp_path: Path):
    run = RunDir(tmp_path / "study")
    record_inputs(study.model_copy(update={"arm": study.arm[:2]}), run)
    write_rocks(tmp_path / "others.json", "changed before the arm was there")
    record_inputs(study, run)
    assert set(run.manifest()["inputs"]) == CHANGES.keys()


def test_what_can_be_done_is_ready_and_nothing_is_written(study: StudyConfig, tmp_path: Path):
    before = sorted(tmp_path.rglob("*"))
    require_ready(study)
    assert sorted(tmp_path.rglob("*")) == before


def test_rocks_of_another_tokenizer_are_refused(study: StudyConfig, tmp_path: Path):
    write_rocks(tmp_path / "rocks.json", "deadbeef" * 8)
    with pytest.raises(TokenizerMismatchError, match="deadbeef"):
        require_ready(study)


@pytest.mark.parametrize(
    ("change", "naming"),
    [
        (lambda folder: write_data(folder / "test.jsonl", other="7"), "has no 'answer'"),
        (lambda folder: write_data(folder / "test.jsonl", count=1), "no spread"),
        (lambda folder: (folder / "train.jsonl").unlink(), "train.jsonl' does not exist"),
        (lambda folder: (folder / "others.json").unlink(), "others.json does not exist"),
    ],
)
def test_what_cannot_be_done_is_refused_before_training(
    study: StudyConfig, tmp_path: Path, change: Callable[[Path], object], naming: str
):
    change(tmp_path)
    with pytest.raises(RocktokensError, match=naming):
        require_ready(study)


def test_a_scout_that_has_yet_to_find_rocks_is_not_waited_for(study: StudyConfig, tmp_path: Path):
    record = record_of(tmp_path)
    del record["study"]["rocks"]
    scouted = make_study({**record, "scout": {"seed": 9}})
    require_ready(scouted)
    write_rocks(tmp_path / "others.json", "deadbeef" * 8)  # of the arm that waits for nothing
    with pytest.raises(TokenizerMismatchError, match="deadbeef"):
        require_ready(scouted)


def test_classes_given_as_texts_are_read_with_the_student_of_the_study(tmp_path: Path, study: StudyConfig):
    record = record_of(tmp_path)
    record["arm"][1] = {"name": "coarse", "policy": {"name": "coarse", "classes": [["###", "**"]]}}
    require_ready(make_study(record))
    record["arm"][1]["policy"] = {"name": "product", "policies": [{"name": "coarse", "classes": [["###", "# #"]]}]}
    with pytest.raises(ConfigError, match=r"the text '# #' of a class is \d tokens, not one"):
        require_ready(make_study(record))


@pytest.mark.parametrize(
    ("safe", "untested", "is_ready"), [(True, False, True), (None, True, True), (None, False, False)]
)
def test_classes_that_may_not_be_used_are_refused_before_training(
    study: StudyConfig, tmp_path: Path, safe: bool | None, untested: bool, is_ready: bool
):
    record = record_of(tmp_path)
    record["arm"][1] = {"name": "coarse", "policy": {"name": "coarse", "classes": "@classes", "untested": untested}}
    record["study"]["classes"] = str(tmp_path / "classes.json")
    TokenClasses([TokenClass((5, 6), safe=safe), TokenClass((7, 8), safe=False)]).save(tmp_path / "classes.json")
    if is_ready:
        require_ready(make_study(record))
        TokenClasses([TokenClass((5, 6), safe=False)]).save(tmp_path / "classes.json")
    with pytest.raises(ConfigError, match=r"no class of two tokens that may be used .*\(policy\.untested = true\)"):
        require_ready(make_study(record))
