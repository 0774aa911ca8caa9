import tomllib
from pathlib import Path
from typing import Any

import pytest

from rocktokens.config import dump_config, parse_config
from rocktokens.config.policies import OnlineRocksSection
from rocktokens.demo import bypass_study
from rocktokens.policies import POLICIES
from rocktokens.recipes import recipes
from rocktokens.run_dir import RunDir
from rocktokens.studies.config import dump_study, make_study
from rocktokens.studies.plan import plan_jobs

ROOT = Path(__file__).parents[1]
STUDIES = {name: recipe.text for name, recipe in recipes().items() if recipe.kind == "study"}
SHIPPED = {name: recipe.text for name, recipe in recipes().items() if recipe.kind == "run"}
REAL_PAIRS = {"smollm2-study": "smollm2-renumbered", "qwen-study": "qwen-gsm8k"}
"""Studies of real pairs, and the run each is like."""
NOT_ON_THE_LEADERBOARD = {"type_control", "loss_control", "weight_control", "product", "schedule"}
"""The vocabulary is too small for the first; the next two answer a question of pebbles-paper; products and schedules
are made of several."""


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_is_valid_and_survives_being_written_out(name: str) -> None:
    config = parse_config(SHIPPED[name], name=name)
    assert parse_config(dump_config(config)) == config


@pytest.mark.parametrize("name", STUDIES)
def test_every_shipped_study_is_valid_and_survives_being_written_out(name: str) -> None:
    study = make_study(tomllib.loads(STUDIES[name]), name)
    assert make_study(tomllib.loads(dump_study(study))) == study
    jobs = plan_jobs(study)
    assert (
        len({job.config.run.directory for job in jobs})
        == len(jobs)
        == len(study.study.seeds) * sum(arm.draws for arm in study.arm)
    )


def test_shipped_studies_train_the_embedded_pair_alike() -> None:
    """What one study says of an arm holds beside what another says: they differ in arms, seeds, steps and what
    a scout looks at."""
    bases = [make_study(tomllib.loads(text)).base for name, text in STUDIES.items() if name not in REAL_PAIRS]
    differing: Any = {"training": {"max_steps"}, "trace": {"top_k"}, "knockout": {"num_prompts"}}
    shared = [base.model_dump(exclude=differing) for base in bases]
    assert len(shared) == 6 and all(base == shared[0] for base in shared)


@pytest.mark.parametrize("name", REAL_PAIRS)
def test_a_study_of_a_real_pair_trains_it_as_its_run_does(name: str) -> None:
    """Its length may differ, and what its runs write: they are many."""
    base, run = make_study(tomllib.loads(STUDIES[name])).base, parse_config(SHIPPED[REAL_PAIRS[name]])
    differing: Any = {"training": {"max_steps", "save_steps", "trace"}, "knockout": {"top"}}
    record = base.model_dump(exclude=differing)
    assert record == {key: run.model_dump(exclude=differing)[key] for key in record}


def test_studies_of_real_pairs_name_their_primary_pairs_and_say_whether_they_have_been_run() -> None:
    said = {"smollm2-study": "(docs/results/smollm2.md", "qwen-study": "It has not been run yet."}
    assert said.keys() == set(REAL_PAIRS)
    for name, words in said.items():
        study = make_study(tomllib.loads(STUDIES[name])).study
        assert study.primary is not None and len(study.primary) <= 3
        assert words in " ".join(STUDIES[name].replace("\n#", "").split())


def test_shipped_studies_have_the_seeds_they_need() -> None:
    """Three seeds make intervals of ± 9 standard errors and more with so many pairs."""
    seeds = {name: len(make_study(tomllib.loads(text)).study.seeds) for name, text in STUDIES.items()}
    assert seeds.pop("qwen-study") == 3, "what one GPU can afford, with two primary pairs and a warning in its text"
    assert min(seeds.values()) >= 5, seeds


def test_the_leaderboard_has_every_policy() -> None:
    arms = make_study(tomllib.loads(STUDIES["pebbles-leaderboard"])).arm
    assert {arm.policy.name for arm in arms} == POLICIES.keys() - NOT_ON_THE_LEADERBOARD


def test_shipped_studies_call_no_rock_while_the_learning_rate_runs_out() -> None:
    studies = [make_study(tomllib.loads(text)) for text in STUDIES.values()]
    stops = [
        (arm.policy.stop, study.base.training.max_steps)
        for study in studies
        for arm in study.arm
        if isinstance(arm.policy, OnlineRocksSection)
    ]
    assert stops and all(stop == 3 * steps // 4 for stop, steps in stops)


def test_the_study_of_the_demo_is_no_larger_than_the_demo() -> None:
    small = ["training.max_steps=2", "training.per_device_train_batch_size=64", "run.seed=5"]
    config, directory = parse_config(SHIPPED["demo"], small), RunDir("runs/demo")
    study = bypass_study(config, directory, has_classes=True)
    assert (study.base.training.max_steps, study.base.training.per_device_train_batch_size) == (2, 24)
    assert study.base.evaluation.num_prompts == 200 and study.study.seeds == [6, 7]
    assert study.study.rocks == "runs/demo/rocks.json" and study.study.classes == "runs/demo/study/classes.json"
    assert [arm.name for arm in study.arm] == ["uniform", "rock freeze", "matched control", "coarse"]
    without = bypass_study(config, directory, has_classes=False)
    assert without.arm == study.arm[:3] and without.study.classes is None


def test_the_config_in_the_readme_is_valid() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = readme.split("```toml\n")[1].split("```")[0]
    assert parse_config(block, name="README").task.name == "jsonl"
