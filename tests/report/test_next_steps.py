"""One screen after a search: its numbers are the record's, it stays short, and every next step is a command."""

import json
import shlex
import shutil
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from class_traces import planted_trace
from explorer_run import CLASSES, make_run
from report_run import TEXTS, make_find, make_knockout, make_rocks, make_study
from trace_oracle import write_trace

from replay_records import make_replay
from rocktokens.classes import TokenClasses
from rocktokens.cli.common import output
from rocktokens.cli.find_tables import SCREEN, print_next, print_screen
from rocktokens.config import load_config
from rocktokens.report.next_steps import Step, next_steps, step_after_report
from rocktokens.report.views.run_view import RunView
from rocktokens.rocks.classes import find_classes
from rocktokens.rocks.find import find_rocks
from rocktokens.run_dir import RunDir
from rocktokens.traces.store import TraceStore
from rocktokens.types import RockSet

MODELS = 'models = { student = "s", teacher = "t" }\n'


def screen(rocks: RockSet, show: int = 10) -> list[str]:
    with output.capture() as shown:
        print_screen(rocks, make_find().choice, show)
    return shown.get().splitlines()


def test_the_conclusion_has_the_numbers_of_the_record():
    shown = " ".join(" ".join(screen(make_rocks(("###", " So")))).split())
    assert shown.startswith(
        "2 of 50 token types are rocks at checkpoint 10. They make up 25.0 % [20.0, 30.0] of the tokens and hold "
        "87.5 % [75.0, 93.8] of the loss that is left (held-out half, 90 prompts, 95 % intervals). "
        "Training never moved 1 of 2 rocks (stuck on both halves of the prompts) and 1 is residual (the loss fell "
        "early and then stopped falling). 25.0 % [12.5, 37.5] of the remaining loss is choice"
    )
    assert "1 ### latex_math 150 [120, 180] stuck 1.00 pillar 2 ·So latex_math 151 [120, 180] residual 0.50" in shown


def test_hostile_texts_neither_act_nor_make_it_longer():
    plain, rows = screen(make_rocks(("x",) * 10)), range(0, len(TEXTS), 10)
    assert len(plain) < 28 and max(map(len, plain)) <= SCREEN
    for start in rows:
        lines = screen(make_rocks(TEXTS[start : start + 10]))
        assert len(lines) <= len(plain) and max(map(len, lines)) <= SCREEN
        assert all(line.isprintable() for line in lines)


def parsed(step: Step) -> dict[str, Any]:
    """What the verb would be called with."""
    program, verb, *arguments = shlex.split(step.command)
    app = typer.Typer()
    app.command(verb)(getattr(import_module(f"rocktokens.cli.{verb}"), verb))
    context = typer.main.get_command(app).make_context(verb, arguments)
    assert program == "rocktokens" and step.purpose
    return {"verb": verb, **context.params}


def suggested(run: RunDir, rocks: RockSet) -> list[dict[str, Any]]:
    steps = next_steps(run, rocks)
    assert 2 <= len(steps) <= 4
    found = [parsed(step) for step in steps]
    assert [own["verb"] for own in found[-2:]] == ["report", "find"] and found[-1]["verbose"]
    return found[:-2]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RockSet]:
    run = write_trace(tmp_path_factory.mktemp("planted") / "run", {0: planted_trace(2)})
    return run, find_rocks(TraceStore(run))


@pytest.fixture
def searched(planted: tuple[Path, RockSet], tmp_path: Path) -> tuple[RunDir, RockSet]:
    path, rocks = planted
    return RunDir(shutil.copytree(path, tmp_path / "a run")), rocks


def with_config(run: RunDir, directory: Path | None = None) -> None:
    run.commit_text("config.toml", f"{MODELS}[run]\ndirectory = {json.dumps(str(directory or run.path))}\n")


def test_a_folder_of_traces_is_not_sent_where_a_config_is_needed(searched: tuple[RunDir, RockSet]):
    [step] = suggested(*searched)
    assert (step["verb"], step["classes"], step["runs"]) == ("find", True, [str(searched[0].path)])


def test_each_state_has_its_step(searched: tuple[RunDir, RockSet]):
    run, rocks = searched
    with_config(run)
    bans, links = suggested(run, rocks)
    assert (bans["verb"], bans["classes"], links["verb"]) == ("knockout", False, "find")
    classes = find_classes(TraceStore(run))
    run.commit("classes.json", classes.save)
    _, test = suggested(run, rocks)
    assert (test["verb"], test["classes"]) == ("knockout", True)
    classes.criterion["tested"] = {}
    run.commit("classes.json", classes.save)
    _, split = suggested(run, rocks)
    assert (split["verb"], split["classes"], split["overrides"]) == ("trace", True, ())
    with_config(run, run.path.parent / "where it was")
    _, split = suggested(run, rocks)
    assert Path(load_config(*split["paths"], split["overrides"]).run.directory) == run.path
    run.commit_text("classes.json", "{")
    assert [own["verb"] for own in suggested(run, rocks)] == ["knockout"]


def test_without_answers_no_ban_is_suggested(searched: tuple[RunDir, RockSet]):
    run, rocks = searched
    task = '[task]\nname = "jsonl"\npath = "prompts.jsonl"\n'
    run.commit_text("config.toml", f"{MODELS}[run]\ndirectory = {json.dumps(str(run.path))}\n{task}")
    assert [own["verb"] for own in suggested(run, rocks)] == ["find"]


def test_too_few_prompts_come_first(searched: tuple[RunDir, RockSet]):
    run, _ = searched
    with_config(run)
    [more] = suggested(run, make_rocks(("a",), n_prompts=4, n_prompts_selection=4))
    assert (more["verb"], more["restart"], more["overrides"]) == ("trace", True, ["trace.num_prompts=40"])


@pytest.mark.parametrize(("asked", "setting"), [(39, "trace.num_prompts=40"), (40, "task.path=MORE.jsonl")])
def test_where_enough_prompts_were_asked_for_the_data_has_too_few(
    searched: tuple[RunDir, RockSet], asked: int, setting: str
):
    run, _ = searched
    with_config(run)
    run.update_manifest(replay=make_replay(num_prompts=asked).to_manifest())
    [more] = suggested(run, make_rocks(("a",), n_prompts=4, n_prompts_selection=4))
    assert (more["verb"], more["restart"], more["overrides"]) == ("trace", True, [setting])


def test_safe_classes_can_be_trained_with(tmp_path: Path):
    run = RunDir(make_run(tmp_path / "run"))
    with_config(run)
    tested = TokenClasses(CLASSES, criterion={"tested": {}})
    run.commit_text("classes.json", json.dumps(tested.to_record()))  # surrogates escaped
    again, coarse = suggested(run, make_rocks(("a",)))
    assert (again["verb"], coarse["verb"]) == ("knockout", "distill")
    config = load_config(coarse["config"], coarse["overrides"])
    assert (config.policy.name, config.run.directory) == ("coarse", f"{run.path}-coarse")
    assert json.loads(config.policy.model_dump_json())["classes"] == str(run.classes)


def test_the_page_asks_the_first_question_that_is_open(tmp_path: Path):
    """Find, ban, study, then what would decide: seeds, prompts; in the end the explorer."""
    run = RunDir(make_run(tmp_path / "a run"))
    run.drop(["rocks.json", "knockout.json", "classes.json"])

    def step() -> dict[str, Any]:
        return parsed(step_after_report(RunView.open(run.path)))

    with_config(run)
    assert (step()["verb"], step()["runs"]) == ("find", [str(run.path)])
    run.commit_text("rocks.json", json.dumps({"schema_version": 1, **asdict(make_rocks(("a",)))}))
    assert step()["verb"] == "knockout"
    undecided = replace(make_knockout().knockouts[3], neutral_prompts=1234)
    run.commit_text("knockout.json", json.dumps({"schema_version": 1, **asdict(make_knockout([undecided]))}))
    assert step()["verb"] == "study"
    study = RunDir(run.path / "study")
    study.commit_text("study.json", json.dumps({"schema_version": 1, **make_study().to_record()}))
    assert (step()["verb"], step()["prompts"]) == ("knockout", 1234)
    toml = study.path / "study.toml"
    toml.touch()
    seeds = step()
    assert (seeds["verb"], list(seeds["overrides"])) == ("study", ["study.seeds=[1,2,3,4]"])
    toml.unlink()
    run.commit_text("knockout.json", json.dumps({"schema_version": 1, **asdict(make_knockout())}))
    assert (step()["verb"], step()["runs"]) == ("explore", [run.path])
    run.commit_text("config.toml", "[run]\nno_such_key = 1\n")  # a page does not need a config
    assert step()["runs"] == [Path(run.path.name)]


def test_a_command_is_printed_whole_whatever_the_path():
    steps = [Step("rocktokens report 'a\x1b[2J'", "x"), Step(f"rocktokens find {'y' * 200}", "[bold]")]
    with output.capture() as shown:
        print_next(steps)
    lines = shown.get().splitlines()
    assert lines[-1] == f"{steps[1].command}  # [bold]" and "\x1b" not in lines[-2]
