"""A study's file and the jobs it stands for, without training anything."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from rocktokens.config import Config, dump_config
from rocktokens.config.policies import files_of
from rocktokens.errors import ConfigError
from rocktokens.run_dir import RunDir
from rocktokens.studies.config import BaseSections, StudyConfig, dump_study, load_study, make_study
from rocktokens.studies.plan import evaluated_steps, plan_jobs, require_unchanged, scout_config
from rocktokens.studies.pool import choose_places
from rocktokens.studies.preflight import warnings

UNIFORM: dict[str, Any] = {"name": "uniform", "policy": {"name": "uniform"}}
FREEZE: dict[str, Any] = {"name": "rock freeze", "policy": {"name": "rocks", "rocks": "@rocks"}}
CONTROL: dict[str, Any] = {"name": "control", "policy": {"name": "occurrence_control", "rocks": "@rocks"}, "draws": 3}
SCOUT: dict[str, Any] = {"scout": {"seed": 9}}
COARSE: dict[str, Any] = {"name": "coarse", "policy": {"name": "coarse", "classes": "@classes"}}
RANDOM: dict[str, Any] = {
    "name": "random",
    "policy": {"name": "coarse", "classes": "@random_classes", "untested": True},
}
TWINS: dict[str, Any] = {"name": "twins", "policy": {"name": "type_control", "controls": "@twins"}, "draws": 2}


def study_of(*arms: dict[str, Any], base: dict[str, Any] | None = None, **rest: Any) -> StudyConfig:
    section = {"directory": "runs/s", "seeds": [0, 1], "evaluate_every": 4, **rest.pop("study", {})}
    models = {"models": {"student": "pebbles-student", "teacher": "pebbles-teacher"}}
    return make_study({"study": section, "base": {**models, **(base or {})}, "arm": list(arms), **rest})


def test_the_base_has_every_section_of_a_run_but_run_and_policy():
    """Also with the same defaults: a study trains as `rocktokens distill` does."""
    assert BaseSections.model_fields.keys() == Config.model_fields.keys() - {"run", "policy"}
    for name, field in BaseSections.model_fields.items():
        assert field.annotation == Config.model_fields[name].annotation
        assert field.default == Config.model_fields[name].default


def test_jobs_differ_in_seed_and_policy_only():
    jobs = plan_jobs(study_of(UNIFORM, FREEZE, base={"training": {"max_steps": 7}}, **SCOUT))
    assert [(job.arm, job.seed) for job in jobs] == [
        ("uniform", 0), ("rock freeze", 0), ("uniform", 1), ("rock freeze", 1)
    ]  # fmt: skip
    shared = [job.config.model_dump(exclude={"run", "policy"}) for job in jobs]
    assert all(other == shared[0] for other in shared)
    assert [job.config.run.seed for job in jobs] == [0, 0, 1, 1]
    assert len({job.config.run.directory for job in jobs}) == 4
    assert jobs[0].config.training.save_steps == 4


def test_only_the_first_job_evaluates_the_start():
    jobs = plan_jobs(study_of(UNIFORM, FREEZE, base={"training": {"max_steps": 10}}, **SCOUT))
    assert [job.evaluated for job in jobs] == [(0, 4, 8, 10), (4, 8, 10), (4, 8, 10), (4, 8, 10)]


@pytest.mark.parametrize(
    ("steps", "every", "expected"), [(8, 4, (0, 4, 8)), (3, 4, (0, 3)), (4, 4, (0, 4)), (1, 1, (0, 1))]
)
def test_evaluations_include_first_and_last_step_once(steps: int, every: int, expected: tuple[int, ...]):
    study = study_of(UNIFORM, FREEZE, base={"training": {"max_steps": steps}}, study={"evaluate_every": every}, **SCOUT)
    assert evaluated_steps(study) == expected


def test_work_counts_every_rollout_and_answer():
    base = {
        "training": {"max_steps": 5, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2},
        "evaluation": {"num_prompts": 7, "num_samples": 2},
    }
    first, second, *_ = plan_jobs(study_of(UNIFORM, FREEZE, base=base, **SCOUT))
    assert (first.work, second.work) == (3 * 5 * 3 * 2 + 3 * 14, 3 * 5 * 3 * 2 + 2 * 14)


def test_draws_are_runs_of_their_own():
    jobs = [job for job in plan_jobs(study_of(UNIFORM, CONTROL, **SCOUT)) if job.arm == "control"]
    assert [(job.seed, job.draw) for job in jobs] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [job.config.model_dump()["policy"]["draw"] for job in jobs] == [0, 1, 2, 0, 1, 2]
    assert jobs[1].config.run.directory == "runs/s/arms/control/seed-0-draw-1"
    assert jobs[1].label == "control, seed 0, draw 1"


def test_a_first_draw_keeps_its_folder_when_draws_are_added():
    few, many = (plan_jobs(study_of(UNIFORM, {**CONTROL, "draws": draws}, **SCOUT)) for draws in (1, 3))
    assert {job.config.run.directory for job in few} < {job.config.run.directory for job in many}


def test_placeholders_become_files_of_the_study_however_deep():
    parts = [{"name": "rocks", "rocks": "@rocks"}, {"name": "type_control", "controls": "@controls"}]
    arm = {"name": "deep", "policy": {"name": "product", "policies": parts, "protect": "@rocks"}}
    policy = plan_jobs(study_of(UNIFORM, arm, **SCOUT))[1].config.model_dump()["policy"]
    assert policy["protect"] == policy["policies"][0]["rocks"] == "runs/s/rocks.json"
    assert policy["policies"][1]["controls"] == "runs/s/controls.json"


def test_every_seed_has_its_own_controls_of_the_classes():
    jobs = plan_jobs(study_of(UNIFORM, COARSE, RANDOM, TWINS, study={"seeds": [3, 8], "classes": "c.json"}, **SCOUT))
    files = {(job.arm, job.seed, job.draw): [*files_of(job.config.policy).values()] for job in jobs}
    assert files == {
        **{("uniform", seed, 0): [] for seed in (3, 8)},
        **{("coarse", seed, 0): ["runs/s/classes.json"] for seed in (3, 8)},
        **{("random", seed, 0): [f"runs/s/random_classes-{seed}.json"] for seed in (3, 8)},
        **{("twins", seed, draw): [f"runs/s/twins-{seed}.json"] for seed in (3, 8) for draw in (0, 1)},
    }


def test_a_study_that_was_moved_still_knows_the_controls_of_each_seed(tmp_path: Path):
    def study_at(folder: Path, seed: int) -> StudyConfig:
        section = {"directory": str(folder), "seeds": [seed], "classes": "c.json"}
        return study_of(UNIFORM, COARSE, RANDOM, study=section, **SCOUT)

    begun = plan_jobs(study_at(tmp_path / "here", 3))[2]
    begun.run.commit_text("config.toml", dump_config(begun.config))
    (tmp_path / "here").rename(tmp_path / "there")
    moved = study_at(tmp_path / "there", 3)
    require_unchanged(moved, plan_jobs(moved))
    config = begun.config.model_copy(update={"policy": plan_jobs(study_at(tmp_path / "here", 4))[2].config.policy})
    RunDir(plan_jobs(moved)[2].config.run.directory).commit_text("config.toml", dump_config(config))
    with pytest.raises(ConfigError, match=r"arm 'random': policy\.classes = '@random_classes', but"):
        require_unchanged(moved, plan_jobs(moved))


def test_the_scout_is_uniform_with_a_seed_of_its_own():
    study = study_of(UNIFORM, FREEZE, base={"training": {"save_steps": 5}}, **SCOUT)
    config = scout_config(study)
    assert (config.run.directory, config.run.seed, config.policy.name) == ("runs/s/scout", 9, "uniform")
    assert config.training == study.base.training


def test_checkpoints_that_are_evaluated_may_not_be_dropped():
    with pytest.raises(
        ConfigError, match=r"base.training.save_total_limit = 2, but a study evaluates its runs at every"
    ):
        study_of(UNIFORM, FREEZE, base={"training": {"save_total_limit": 2}}, **SCOUT)


def test_every_arm_meets_the_baseline_unless_pairs_are_named():
    third = {"name": "third", "policy": {"name": "asymmetric"}}
    assert study_of(UNIFORM, FREEZE, third, **SCOUT).pairs == [("rock freeze", "uniform"), ("third", "uniform")]
    named = study_of(UNIFORM, FREEZE, third, study={"compare": [["third", "rock freeze"]]}, **SCOUT)
    assert named.pairs == [("third", "rock freeze")]


def test_primary_pairs_come_first_and_default_to_the_first_three():
    arms = [UNIFORM, *({**UNIFORM, "name": name} for name in "abcd")]
    default = study_of(*arms)
    assert default.primary == default.pairs[:3] == [("a", "uniform"), ("b", "uniform"), ("c", "uniform")]
    named = study_of(*arms, study={"primary": [["uniform", "d"], ["a", "b"]]})
    assert named.primary == [("uniform", "d"), ("a", "b")]
    assert named.pairs == [*named.primary, ("a", "uniform"), ("b", "uniform"), ("c", "uniform")]


@pytest.mark.parametrize(("seeds", "count"), [([0, 1, 2, 3, 4], 1), ([0, 1, 2, 3, 4, 5], 0)])
def test_seeds_that_cannot_decide_anything_are_a_warning(seeds: list[int], count: int):
    assert len(warnings(study_of(UNIFORM, FREEZE, study={"seeds": seeds}, **SCOUT))) == count


def test_a_study_survives_being_written_out(tmp_path: Path):
    study = study_of(UNIFORM, FREEZE, CONTROL, study={"compare": [["control", "uniform"]], "margin": 0.02}, **SCOUT)
    (tmp_path / "study.toml").write_text(dump_study(study), encoding="utf-8")
    assert load_study(tmp_path / "study.toml") == study
    assert make_study(tomllib.loads(dump_study(study))) == study


@pytest.mark.parametrize(
    ("arms", "rest", "naming"),
    [
        ([UNIFORM, FREEZE], {}, ("'rock freeze'", "@rocks", "[scout]", "study.rocks")),
        ([UNIFORM, FREEZE], {"scout": {"seed": 1}}, ("scout.seed = 1", "study.seeds")),
        ([UNIFORM, FREEZE], {"scout": {"seed": 9, "stages": ["knockout"]}}, ("scout.stages", '["find", "knockout"]')),
        ([UNIFORM, {**UNIFORM, "name": "Uniform!"}], {}, ("'uniform'", "'Uniform!'", "folder")),
        ([UNIFORM, {**UNIFORM, "name": "…"}], {}, ("'…'", "letter")),
        ([UNIFORM, {**FREEZE, "draws": 2}], SCOUT, ("'rock freeze'", "draws = 2", "rocks draws nothing")),
        ([UNIFORM, {**CONTROL, "policy": {**CONTROL["policy"], "draw": 1}}], SCOUT, ("'control'", "draw")),
        (
            [UNIFORM, {"name": "kept", "policy": {"name": "uniform", "denominator": "kept"}}],
            {},
            ("'uniform'", "'kept'", "policy.denominator"),
        ),
        (
            [UNIFORM, {"name": "types", "policy": {"name": "type_control", "controls": "@controls"}}],
            {"study": {"rocks": "rocks.json"}},
            ("'types'", "@controls", "[scout]"),
        ),
        ([UNIFORM, FREEZE], {**SCOUT, "study": {"compare": [["uniform", "uniform"]]}}, ("study.compare", "itself")),
        ([UNIFORM, {"name": "odd", "policy": {"name": "rocks", "rockz": "@rocks"}}], SCOUT, ("rockz", "rocks")),
        ([UNIFORM], {}, ("arm",)),
        (
            [UNIFORM, {**FREEZE, "policy": {"name": "rocks", "rocks": "@rock"}}],
            SCOUT,
            ("policy.rocks = '@rock'", "stands for nothing there: use @rocks"),
        ),
        (
            [UNIFORM, {"name": "types", "policy": {"name": "type_control", "controls": "@rocks"}}],
            SCOUT,
            ("policy.controls = '@rocks'", "use @controls, @type_sets or @twins"),
        ),
        ([UNIFORM, COARSE], SCOUT, ("'coarse'", "@classes", "add 'classes' to scout.stages, or set study.classes")),
        (
            [UNIFORM, COARSE],
            {"scout": {"seed": 9, "stages": ["find", "knockout", "classes"]}, "study": {"classes": "c.json"}},
            ("study.classes", "scout.stages", "remove the other"),
        ),
        (
            [UNIFORM, COARSE],
            {"scout": {"seed": 9, "stages": ["find", "classes"]}, "base": {"trace": {"top_k": 0}}},
            ("scout.stages", "base.trace.top_k = 8"),
        ),
        ([UNIFORM, COARSE, RANDOM], {"study": {"classes": "c.json"}}, ("'random'", "@random_classes", "[scout]")),
        ([UNIFORM, RANDOM], {**SCOUT, "study": {"classes": "c.json"}}, ("'random'", "no arm with @classes")),
        (
            [UNIFORM, COARSE, {"name": "others", "policy": {"name": "coarse", "classes": "@other_classes"}}],
            {**SCOUT, "study": {"classes": "c.json"}},
            ("'others'", "@other_classes", "untested = true"),
        ),
        ([UNIFORM, FREEZE], {"scout": {"seed": 9, "stages": ["classes"]}}, ("scout.stages", '["find", "classes"]')),
        (
            [UNIFORM, FREEZE],
            {**SCOUT, "study": {"compare": [["uniform", "rock freeze"], ["rock freeze", "uniform"]]}},
            ("study.compare", "'rock freeze' and 'uniform' 2 times"),
        ),
        ([UNIFORM, FREEZE], {**SCOUT, "study": {"compare": ["rock freeze", "uniform"]}}, ("study.compare", "of pairs")),
        ([UNIFORM, FREEZE], {**SCOUT, "study": {"primary": [["uniform", "uniform"]]}}, ("study.primary", "itself")),
        ([UNIFORM, FREEZE], {**SCOUT, "study": {"primary": [["uniform", "other"]]}}, ("study.primary", "'other'")),
        (
            [UNIFORM, *({**UNIFORM, "name": name} for name in "abcd")],
            {"study": {"primary": [[name, "uniform"] for name in "abcd"]}},
            ("study.primary", "3 pairs at most"),
        ),
        ([UNIFORM, FREEZE], {**SCOUT, "study": {"seeds": 3}}, ("study.seeds = 3", "[0, 1, 2]")),
        ([UNIFORM, FREEZE], {**SCOUT, "study": {"seeds": [2**63]}}, ("study.seeds", "2⁶³ − 1")),
        ([UNIFORM, FREEZE], {**SCOUT, "base": {"evaluation": {"num_prompts": 1}}}, ("num_prompts = 1", "2 or more")),
        (
            [UNIFORM, FREEZE],
            {**SCOUT, "base": {"evaluation": {"task": {"name": "jsonl", "path": "x.jsonl", "answer_field": ""}}}},
            ("base.evaluation.task.answer_field",),
        ),
    ],
)
def test_what_does_not_fit_together_is_one_sentence(
    arms: list[dict[str, Any]], rest: dict[str, Any], naming: tuple[str, ...]
):
    with pytest.raises(ConfigError) as refused:
        study_of(*arms, **rest)
    sentence = str(refused.value)
    assert "\n" not in sentence and [name for name in naming if name not in sentence] == []


def test_what_is_no_study_is_called_so():
    with pytest.raises(ConfigError, match=r"^run\.toml has neither \[study\] nor .*rocktokens distill"):
        make_study({"run": {"directory": "runs/a"}}, "run.toml")
    with pytest.raises(ConfigError, match=r"write \[\[arm\]\]"):
        make_study({"study": {"directory": "runs/a"}, "arm": UNIFORM})


@pytest.mark.parametrize(("processes", "jobs", "expected"), [(1, 5, 1), (3, 5, 3), (8, 5, 5)])
def test_as_many_processes_as_asked_for_but_never_more_than_jobs(processes: int, jobs: int, expected: int):
    assert choose_places(processes, "cpu", jobs) == [None] * expected


@pytest.mark.parametrize(
    ("processes", "device", "expected"),
    [
        ("auto", "auto", ["3", "5"]),
        (3, "cuda", ["3", "5", "3"]),
        ("auto", "cuda:1", [None]),
        (2, "cpu", [None, None]),
    ],
)
def test_gpus_are_shared_out_by_the_names_this_process_sees(
    monkeypatch: pytest.MonkeyPatch, processes: Any, device: str, expected: list[str | None]
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_places(processes, device, 9) == expected
