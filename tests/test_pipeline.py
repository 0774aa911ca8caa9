"""``rocktokens run``: a second call makes nothing, what is gone or stale is made again, and interrupts cost nothing."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "cli"))
from command_line import changed, require_sound, rocktokens, snapshot, succeed, write_config

from rocktokens import pipeline
from rocktokens.config import Config, load_config
from rocktokens.run_dir import RunDir
from rocktokens.training import loop
from rocktokens.types import RockSet

SETTINGS = ["gradients.batches=2", "knockout.num_prompts=4", "knockout.top=2", "knockout.resamples=100"]
ALL = ["distill", "trace", "find", "gradients", "knockout", "report"]


def config_of(run: Path, *settings: str) -> Config:
    return load_config(write_config(run.with_suffix(".toml"), run), [*SETTINGS, *settings])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that one call has made."""
    run = tmp_path_factory.mktemp("pipeline") / "run"
    shown = succeed("run", write_config(run.with_suffix(".toml"), run), *changed(*SETTINGS))
    assert "made: distill, trace, find, gradients, knockout, report" in " ".join(shown.stdout.split())
    assert str(run / "report.html") in shown.stdout
    require_sound(run)
    return run


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def test_a_second_call_makes_nothing(whole: Path):
    before = snapshot(whole)
    record = succeed("run", whole.with_suffix(".toml"), *changed(*SETTINGS), "--json").record
    assert record == {"directory": str(whole), "made": [], "kept": ALL, "report": str(whole / "report.html")}
    assert snapshot(whole) == before


def drop_a_part(run: RunDir) -> None:
    run.drop([run.files("traces/checkpoint=2/")[-1].path])


def forget_verdicts(run: RunDir) -> None:
    rocks = RockSet.load(run.rocks)
    rocks.source.pop("verdicts")
    run.commit("rocks.json", rocks.save)


@pytest.mark.parametrize(
    ("spoil", "made"),
    [
        (drop_a_part, ["trace"]),
        (lambda run: run.drop(["rocks.json"]), ["find", "knockout"]),
        (lambda run: (run.path / "find.json").unlink(), ["find", "knockout"]),
        (lambda run: (run.path / "gradients.json").write_text("{}"), ["gradients"]),
        (lambda run: run.drop(["knockout.json"]), ["knockout"]),
        (forget_verdicts, ["knockout"]),
        (lambda run: (run.path / "report.html").unlink(), ["report"]),
    ],
)
def test_what_is_gone_or_spoilt_is_made_again_as_it_was(copy: Path, spoil: Callable[[RunDir], object], made: list[str]):
    """Results are the same bytes, so what was made from them stays."""
    before = snapshot(copy)
    spoil(RunDir(copy))
    assert pipeline.run(config_of(copy)).made == made
    after = snapshot(copy)
    assert {path: after.get(path) for path in before if path != "manifest.json"} == {
        path: sha for path, sha in before.items() if path != "manifest.json"
    }
    require_sound(copy)


@pytest.mark.parametrize(
    ("setting", "made"),
    [
        ("find.k=5", ["find", "gradients", "knockout", "report"]),
        ("gradients.batches=3", ["gradients", "report"]),
        ("knockout.num_prompts=3", ["knockout", "report"]),
        ("evaluation.num_prompts=7", []),
    ],
)
def test_other_settings_make_a_stage_and_what_depends_on_it_stale(copy: Path, setting: str, made: list[str]):
    assert pipeline.run(config_of(copy, setting)).made == made
    assert pipeline.run(config_of(copy, setting)).made == []


@pytest.mark.parametrize(
    ("setting", "naming"),
    [
        ("training.learning_rate=0.5", ("training.learning_rate = 0.5",)),
        ("trace.num_prompts=3", ("num_prompts = 8", "--restart")),
    ],
)
def test_a_stage_refuses_what_its_command_refuses(whole: Path, setting: str, naming: tuple[str, ...]):
    before = snapshot(whole)
    outcome = rocktokens("run", whole.with_suffix(".toml"), *changed(*SETTINGS, setting))
    last = outcome.stderr.splitlines()[-1]
    assert outcome.code == 2 and last.startswith("rocktokens: ") and "Traceback" not in outcome.stderr
    assert all(name in last for name in naming), last
    assert snapshot(whole) == before


def test_an_interrupted_call_continues(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stopped while it trains, and again after the replay: the result is that of one call."""
    run, update = tmp_path / "run", loop.update_student
    config = config_of(run)

    def interrupted(session: object, rollouts: object, step: int) -> object:
        if step == 3:
            raise KeyboardInterrupt
        return update(session, rollouts, step)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(loop, "update_student", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(config)
    assert RunDir(run).checkpoints() == [0, 2]
    stages = pipeline.STAGES
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "STAGES", (*stages[:2], pipeline.Stage("find", "", lambda *_: 1 / 0)))
        with pytest.raises(ZeroDivisionError):
            pipeline.run(config)
    assert pipeline.run(config).kept == ["distill", "trace"]
    first, second = snapshot(whole), snapshot(run)
    for name in ("rocks.json", "find.json", "gradients.json", "knockout.json"):
        assert second[name] == first[name], name


def test_checkpoints_of_your_own_are_traced_and_searched(whole: Path, tmp_path: Path):
    students = json.dumps([str(whole / f"checkpoints/step-{step}") for step in (0, 4)])
    result = pipeline.run(config_of(tmp_path / "mine", f"trace.checkpoints={students}"))
    assert result.made == ALL[1:]
    assert RockSet.load(tmp_path / "mine/rocks.json").ids.tolist() == RockSet.load(whole / "rocks.json").ids.tolist()
    assert pipeline.run(config_of(tmp_path / "mine", f"trace.checkpoints={students}")).made == []
