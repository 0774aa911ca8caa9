"""The scout of a study: it finds the rocks once, for all arms; what cannot be matched is refused before they train."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import require_sound, snapshot, succeed

from rocktokens.config.files import dump_toml
from rocktokens.errors import ConfigError, ControlMatchError
from rocktokens.rocks.controls import draw_set
from rocktokens.rocks.sums import occurrences, type_sums
from rocktokens.run_dir import RunDir, file_sha256
from rocktokens.studies.config import StudyConfig, make_study
from rocktokens.studies.plan import plan_jobs, require_unchanged
from rocktokens.studies.preflight import require_policies
from rocktokens.studies.scout import prepare_files
from rocktokens.traces.store import TraceStore
from rocktokens.types import ControlSet, RockSet

Make = Callable[..., StudyConfig]


def record_of(directory: Path) -> dict[str, Any]:
    """Two steps of four rollouts; of the types that are not frequent, one is the rock."""
    return {
        "study": {"directory": str(directory), "seeds": [0], "evaluate_every": 2},
        "scout": {"seed": 5, "stages": ["find", "knockout"]},
        "base": {
            "models": {"device": "cpu"},
            "rollouts": {"max_completion_length": 48},
            "training": {
                "max_steps": 2,
                "save_steps": 2,
                "per_device_train_batch_size": 4,
                "max_truncated_share": 1.0,
                "trace": False,
            },
            "trace": {"num_prompts": 8},
            "find": {"stage": "score", "k": 1, "exclude_top_freq": 20, "min_prompts": 1},
            "knockout": {"num_prompts": 2, "matched": 0, "never": 0},
        },
        "arm": [
            {"name": "uniform", "policy": {"name": "uniform"}},
            {"name": "freeze", "policy": {"name": "rocks", "rocks": "@rocks", "protect": "@rocks"}},
            {"name": "types", "draws": 2, "policy": {"name": "type_control", "controls": "@controls"}},
        ],
    }


@pytest.fixture(scope="module")
def scouted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study whose scout is done, and nothing else."""
    directory = tmp_path_factory.mktemp("scout") / "study"
    prepare_files(make_study(record_of(directory)), RunDir(directory))
    return directory


@pytest.fixture
def changed_study(scouted: Path) -> Make:
    """The same study with some keys of some sections changed."""

    def make(**changes: dict[str, Any]) -> StudyConfig:
        record = record_of(scouted)
        for section, values in changes.items():
            place = record if section in record else record["base"]
            place[section] = place.get(section, {}) | values
        return make_study(record)

    return make


def test_arms_find_what_the_scout_left(scouted: Path, changed_study: Make):
    rocks = RockSet.load(scouted / "rocks.json")
    controls = ControlSet.load(scouted / "controls.json")
    assert rocks == RockSet.load(scouted / "scout/rocks.json") and rocks.tokens[0].verdict != "untested"
    assert controls.rock_ids == rocks.ids.tolist() and len(controls) == 2
    require_policies(plan_jobs(changed_study()), rocks.tokenizer_sha256)


def test_a_scout_is_sent_out_once(scouted: Path, changed_study: Make):
    before = snapshot(scouted)
    assert prepare_files(changed_study(), RunDir(scouted)) == RockSet.load(scouted / "rocks.json")
    assert snapshot(scouted) == before


def test_the_command_draws_what_the_scout_found(tmp_path: Path):
    """Before the arms are trained, so that it can be looked at while they are."""
    record = record_of(tmp_path / "study")
    record["scout"]["stages"], record["arm"] = ["find"], record["arm"][:2]
    del record["arm"][1]["policy"]["protect"]  # needs verdicts
    record["base"] |= {"evaluation": {"num_prompts": 2}}
    path = tmp_path / "study.toml"
    path.write_text(dump_toml(record), encoding="utf-8")
    succeed("study", path)
    figures = tmp_path / "study/scout/figures"
    assert sorted(file.stem for file in figures.iterdir()) == ["cutoff", "funnel", "loss", "sensitivity"]
    drawn, arms = figures / "sensitivity.png", (tmp_path / "study/arms").rglob("logs.jsonl")
    assert all(drawn.stat().st_mtime <= log.stat().st_mtime for log in arms)
    require_sound(tmp_path / "study")
    before = snapshot(tmp_path / "study")
    drawn.unlink()
    succeed("study", path)
    assert snapshot(tmp_path / "study").keys() == before.keys()
    assert file_sha256(drawn) == before["scout/figures/sensitivity.png"]


def test_draws_may_be_added_and_the_first_stay(scouted: Path, changed_study: Make):
    few = ControlSet.load(scouted / "controls.json")
    study = changed_study()
    more = study.model_copy(update={"arm": [*study.arm[:2], study.arm[2].model_copy(update={"draws": 3})]})
    prepare_files(more, RunDir(scouted))
    many = ControlSet.load(scouted / "controls.json")
    assert many.draws[:2] == few.draws and len(many) == 3


@pytest.mark.parametrize(
    ("changes", "naming"),
    [
        ({"find": {"k": 2, "stage": "score", "exclude_top_freq": 20}}, r"^base\.find\.k = 2"),
        ({"scout": {"seed": 6}}, r"^scout\.seed = 6"),
    ],
)
def test_a_scout_under_another_config_is_refused(changed_study: Make, changes: dict[str, Any], naming: str):
    study = changed_study(**changes)
    with pytest.raises(ConfigError, match=naming):
        require_unchanged(study, plan_jobs(study))


def test_other_stages_are_refused(scouted: Path, changed_study: Make):
    with pytest.raises(ConfigError, match=r"scout\.stages"):
        prepare_files(changed_study(scout={"stages": ["find"]}), RunDir(scouted))


def test_rocks_without_equals_are_refused_before_training(scouted: Path, tmp_path: Path):
    """The study's rock becomes the most frequent type: nothing is as frequent."""
    study = shutil.copytree(scouted, tmp_path / "study")
    with RunDir(study).lock():
        RunDir(study).drop(["controls.json"])
        record = json.loads((study / "rocks.json").read_text())
        frequent = _most_frequent(study / "scout")
        record["tokens"] = [{**record["tokens"][0], "id": frequent}]
        RunDir(study).commit_text("rocks.json", json.dumps(record))
    with pytest.raises(ControlMatchError, match="tolerance"):
        prepare_files(make_study(record_of(study)), RunDir(study))
    assert not (study / "arms").exists()


def test_a_set_of_types_is_matched_to_the_rocks_or_refused_before_training(scouted: Path, tmp_path: Path):
    """This rock has no set with as much kl; the first type that has one takes its place."""
    record = record_of(shutil.copytree(scouted, tmp_path / "study"))
    record["arm"][2] = {"name": "set", "policy": {"name": "type_control", "controls": "@type_sets"}}
    study, run = make_study(record), RunDir(tmp_path / "study")
    with run.lock(), pytest.raises(ControlMatchError, match="no set of other types occurs as often as the rocks"):
        prepare_files(study, run)
    assert not run.files("type_sets.json")
    sums = type_sums(occurrences(TraceStore(RunDir(scouted / "scout")).table(2)))
    amounts, rng = np.stack([sums.freq, sums.kl]), np.random.default_rng(0)
    own = next(i for i in range(amounts.shape[1]) if draw_set(np.delete(amounts, i, 1), amounts[:, i], rng) is not None)
    content, token_id = json.loads(run.rocks.read_text()), int(sums.token_id[own])
    content["tokens"] = [{**content["tokens"][0], "id": token_id}]
    with run.lock():
        run.commit_text("rocks.json", json.dumps(content))
        prepare_files(study, run)
    (drawn,) = ControlSet.load(run.path / "type_sets.json").draws
    assert token_id not in drawn.ids and max(abs(drawn.total_gap), abs(drawn.kl_gap)) <= 0.02
    require_policies(plan_jobs(study), RockSet.load(run.rocks).tokenizer_sha256)


def _most_frequent(run: Path) -> int:
    sums = type_sums(occurrences(TraceStore(run).table(2)))
    return int(sums.token_id[sums.freq.argmax()])


def test_a_study_without_rocks_says_why_before_training(tmp_path: Path):
    record = record_of(tmp_path / "study")
    del record["scout"], record["arm"][2]
    record["study"]["rocks"] = str(tmp_path / "none.json")
    summary = {"n_prompts": 4, "n_prompts_selection": 4}
    RockSet("", {"split": 0.5}, {}, summary).save(tmp_path / "none.json")
    too_few = r"arm 'freeze' uses @rocks and there are none: 8 prompts are too few to find rocks: trace at least 40 \("
    with pytest.raises(ConfigError, match=too_few):
        prepare_files(make_study(record), RunDir(tmp_path / "study"))
