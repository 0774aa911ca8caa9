"""The scout of a study: it finds the rocks once, for all arms; what cannot be matched is refused before they train."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import require_sound, snapshot, succeed

from rocktokens.classes import TokenClass, TokenClasses
from rocktokens.config.files import dump_toml
from rocktokens.errors import ConfigError, ControlMatchError
from rocktokens.policies import policy_from_section
from rocktokens.progress import SILENT
from rocktokens.rocks.controls import draw_set
from rocktokens.rocks.sums import occurrences, type_sums
from rocktokens.run_dir import RunDir, file_sha256
from rocktokens.studies.class_arms import find_tested_classes
from rocktokens.studies.config import StudyConfig, make_study
from rocktokens.studies.plan import plan_jobs, require_unchanged, scout_config
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
            "models": {"student": "pebbles-student", "teacher": "pebbles-teacher", "device": "cpu"},
            "rollouts": {"max_completion_length": 48},
            "training": {
                "max_steps": 2,
                "save_steps": 2,
                "per_device_train_batch_size": 4,
                "max_truncated_share": 1.0,
                "trace": False,
            },
            "trace": {"num_prompts": 8, "top_k": 8},
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


SAFE, UNTESTED, UNSAFE = ["###", "**"], [" \\(", " $"], ["\n", "\n\n"]


@pytest.fixture
def with_classes(scouted: Path, tmp_path: Path) -> Callable[..., StudyConfig]:
    """A copy of the study whose classes are given: one safe, one untested, one not interchangeable."""
    directory = shutil.copytree(scouted, tmp_path / "study")
    vocabulary = TraceStore(directory / "scout").vocabulary
    classes = [
        TokenClass(tuple(vocabulary.ids(text)[0] for text in texts), safe=safe)
        for texts, safe in ((SAFE, True), (UNTESTED, None), (UNSAFE, False))
    ]
    TokenClasses(classes).save(tmp_path / "classes.json")

    def make(untested: bool = False, draws: int = 2, **section: Any) -> StudyConfig:
        record = record_of(directory)
        record["study"] |= {"classes": str(tmp_path / "classes.json"), "seeds": [0, 1], **section}
        record["arm"][1:] = [
            {"name": "coarse", "policy": {"name": "coarse", "classes": "@classes", "untested": untested}},
            {"name": "random", "policy": {"name": "coarse", "classes": "@random_classes", "untested": True}},
            {"name": "others", "policy": {"name": "coarse", "classes": "@other_classes", "untested": True}},
            {"name": "twins", "draws": draws, "policy": {"name": "type_control", "controls": "@twins"}},
        ]
        return make_study(record)

    return make


def _prepare(study: StudyConfig) -> Path:
    run = RunDir(study.study.directory)
    with run.lock():
        prepare_files(study, run)
    return run.path


@pytest.mark.parametrize(("untested", "count"), [(False, 1), (True, 2)])
def test_arms_and_controls_have_the_classes_in_use(
    with_classes: Callable[..., StudyConfig], untested: bool, count: int
):
    study = with_classes(untested)
    directory = _prepare(study)
    everything = TokenClasses.load(directory / "classes.json")
    members = {token_id for own in everything for token_id in own.ids}
    jobs = {(job.arm, job.seed): job for job in plan_jobs(study)}
    terms = {key: policy_from_section(job.config.policy).term for key, job in jobs.items()}
    used = everything.only((True, None) if untested else (True,))
    assert terms["coarse", 0].classes == terms["coarse", 1].classes == used and len(used) == count
    rocks = set(RockSet.load(directory / "rocks.json").ids.tolist())
    for arm, forbidden in (("random", members), ("others", members | rocks)):
        for seed in (0, 1):
            groups = terms[arm, seed].classes.groups
            assert [len(ids) for ids in groups] == [2] * count
            assert not forbidden & {own for ids in groups for own in ids}
    assert terms["random", 0].classes != terms["random", 1].classes != terms["others", 1].classes
    for seed in (0, 1):
        twins = ControlSet.load(directory / f"twins-{seed}.json")
        assert len(twins) == 2
        assert all(own in ids for draw in twins for own, ids in zip(draw.ids, used.groups, strict=True))


def test_controls_of_classes_stay_when_seeds_and_draws_are_added(with_classes: Callable[..., StudyConfig]):
    directory = _prepare(with_classes())
    before = snapshot(directory)
    assert {"classes.json", "random_classes-0.json", "other_classes-1.json", "twins-1.json"} <= before.keys()
    _prepare(with_classes())
    assert snapshot(directory) == before
    few = ControlSet.load(directory / "twins-0.json")
    _prepare(with_classes(draws=3, seeds=[4, 1, 0]))
    after = snapshot(directory)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"twins-0.json", "twins-1.json", "manifest.json"}
    assert ControlSet.load(directory / "twins-0.json").draws[:2] == few.draws
    assert after.keys() - before.keys() == {f"{name}-4.json" for name in ("random_classes", "other_classes", "twins")}


def test_controls_of_other_classes_are_refused(with_classes: Callable[..., StudyConfig]):
    directory = _prepare(with_classes())
    before = snapshot(directory)
    with pytest.raises(ConfigError, match=r"random_classes-0\.json is a control of other classes .* put back untested"):
        _prepare(with_classes(untested=True))
    assert snapshot(directory) == before


def test_classes_that_were_judged_otherwise_are_refused(with_classes: Callable[..., StudyConfig], tmp_path: Path):
    directory = _prepare(with_classes())
    before = snapshot(directory)
    classes = TokenClasses.load(tmp_path / "classes.json")
    TokenClasses([replace(own, safe=True) for own in classes]).save(tmp_path / "classes.json")
    with pytest.raises(ConfigError, match=r"study\.classes = .* holds other classes than .*study/classes\.json"):
        _prepare(with_classes())
    assert snapshot(directory) == before


def test_a_study_without_a_class_to_use_says_why_before_training(
    with_classes: Callable[..., StudyConfig], tmp_path: Path
):
    classes = TokenClasses.load(tmp_path / "classes.json")
    TokenClasses([replace(own, safe=False) for own in classes]).save(tmp_path / "classes.json")
    with pytest.raises(ConfigError, match=r"^arm 'coarse' .*\(0 interchangeable, 3 not interchangeable, 0 und"):
        _prepare(with_classes(untested=True))
    assert not (tmp_path / "study/arms").exists()


def test_a_scout_without_candidates_names_the_settings_of_the_study(scouted: Path, tmp_path: Path):
    """The folder of the scout is nothing its user has made: no command on that is a remedy."""
    record = record_of(shutil.copytree(scouted, tmp_path / "study"))
    record["base"]["find"] = record["base"].get("find", {}) | {"min_freq": 10**6}
    config = scout_config(make_study(record))
    with pytest.raises(
        ConfigError, match=r"no candidates .* on \d+ prompts: .*base\.trace\.num_prompts.*scout\.stages$"
    ):
        find_tested_classes(RunDir(tmp_path / "study/scout"), config, SILENT)


def test_the_scout_finds_classes_and_tests_them(scouted: Path, tmp_path: Path):
    pytest.importorskip("rocktokens.knockout.classes")
    record = record_of(shutil.copytree(scouted, tmp_path / "study"))
    scout = RunDir(tmp_path / "study/scout")
    with scout.lock():
        found = find_tested_classes(scout, scout_config(make_study(record)), SILENT)
    assert found.groups and found.classes == TokenClasses.load(scout.verified("classes.json")).classes
    assert all(len(own.banned) == len(own.forced) == len(own.ids) and "untested" not in own.banned for own in found)
