"""``rocktokens run``: a second call makes nothing, what is gone or stale is made again, and interrupts cost nothing."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "cli"))
from command_line import changed, require_sound, rocktokens, snapshot, succeed, write_config

from rocktokens import pipeline, run_dir
from rocktokens.config import Config, load_config
from rocktokens.provenance import source_commit
from rocktokens.report.charts import save
from rocktokens.report.views.run_view import RunView
from rocktokens.run_dir import OPTIMIZER_FILE, RunDir
from rocktokens.traces.store import TraceStore
from rocktokens.training import loop
from rocktokens.types import RockSet

SETTINGS = ["gradients.batches=2", "knockout.num_prompts=4", "knockout.top=2"]
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


def test_what_each_stage_took_is_kept(whole: Path):
    took = RunDir(whole).manifest()["took"]
    assert sorted(took) == sorted(ALL)
    assert all(own["seconds"] >= 0 and own["commit"] == source_commit() for own in took.values())


def test_a_second_call_makes_nothing(whole: Path):
    before = snapshot(whole)
    record = succeed("run", whole.with_suffix(".toml"), *changed(*SETTINGS), "--json").record
    page = str(whole / "report.html")
    assert record == {"directory": str(whole), "made": [], "kept": ALL, "skipped": {}, "report": page}
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
        (lambda run: (run.path / "figures/funnel.png").unlink(), ["find"]),
        (lambda run: (run.path / "figures/gradient_kl.png").write_bytes(b"PNG"), ["gradients"]),
        (lambda run: run.drop(["figures/loss.png", "figures/gradient_norm.png"]), ["find", "gradients"]),
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


def test_a_run_that_is_made_longer_is_trained_further_and_measured_again(copy: Path):
    before, longer = snapshot(copy), "training.max_steps=6"
    stages = pipeline.STAGES
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(pipeline, "STAGES", (*stages[:1], pipeline.Stage("trace", "", lambda *_: 1 / 0)))
        pipeline.run(config_of(copy, longer))
    assert pipeline.run(config_of(copy, longer)).made == ALL[1:]
    after = snapshot(copy)
    trained = [path for path in before if path.startswith(("checkpoints/", "rollouts/training/", "traces/training/"))]
    resumed_from = f"checkpoints/step-4/{OPTIMIZER_FILE}"  # only the latest checkpoint has such a state
    assert resumed_from in trained and resumed_from not in after
    assert all(after[path] == before[path] for path in trained if path != resumed_from), "what was trained stays"
    assert TraceStore(copy).checkpoints == [0, 2, 4, 6]
    assert RockSet.load(copy / "rocks.json").criterion["reference"] == 6
    require_sound(copy)
    assert pipeline.run(config_of(copy, longer)).made == []
    shown = rocktokens("run", copy.with_suffix(".toml"), *changed(*SETTINGS))
    assert shown.code == 2 and "training.max_steps = 4, but the run has made 6 steps" in shown.stderr


def test_gradients_at_another_checkpoint_are_measured_again(copy: Path):
    before = snapshot(copy)
    succeed("gradients", copy, "--checkpoint", "2", *changed(*SETTINGS))
    assert snapshot(copy)["gradients.json"] != before["gradients.json"]
    assert pipeline.run(config_of(copy)).made == ["gradients"]
    after = snapshot(copy)
    assert all(after[path] == before[path] for path in before if path != "manifest.json")


@pytest.mark.parametrize(
    ("command", "record", "figures"),
    [
        (("find", "--k", "5"), "find.json", ["cutoff", "funnel", "loss", "sensitivity"]),
        (("gradients", "--batches", "3"), "gradients.json", ["gradient_alignment", "gradient_blocks", "gradient_kl"]),
    ],
)
def test_figures_that_a_killed_command_left_out_are_drawn(
    copy: Path, command: tuple[str, ...], record: str, figures: list[str], monkeypatch: pytest.MonkeyPatch
):
    """The record is committed and half of its figures are drawn when the process dies."""
    verb, *options = command
    settings = {"find": "find.k=5", "gradients": "gradients.batches=3"}[verb]
    expected = shutil.copytree(copy, copy.parent / "whole/run")
    succeed(verb, expected, *options, *changed(*SETTINGS))
    calls = iter(range(100))

    def killed(run: RunDir, name: str, *arguments: object) -> object:
        if name.startswith("figures/") and next(calls) == 1:
            raise KeyboardInterrupt
        return commit(run, name, *arguments)  # type: ignore[arg-type]

    commit = RunDir.commit
    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "commit", killed)
        assert rocktokens(verb, copy, *options, *changed(*SETTINGS)).code != 0
    assert snapshot(copy)[record] == snapshot(expected)[record]
    assert verb in pipeline.run(config_of(copy, settings)).made
    for name in figures:
        assert snapshot(copy)[f"figures/{name}.png"] == snapshot(expected)[f"figures/{name}.png"], name


def test_figures_are_drawn_under_the_lock(copy: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever else wants to write between a record and its figures is refused."""
    held: list[bool] = []
    monkeypatch.setattr(
        save,
        "chart_bytes",
        lambda *_: held.append(os.path.realpath(copy) in {path for _, path in run_dir._held}) or b"",
    )
    succeed("find", copy)
    succeed("gradients", copy, *changed(*SETTINGS))
    assert len(held) == 8 and all(held)


def test_types_that_were_named_stay_on_the_page_without_rocks(copy: Path):
    """They were never rocks: what banning them did is true whatever the rocks are."""
    config = config_of(copy, "find.min_score=1e9")
    pipeline.run(config)
    succeed("knockout", copy, "--text", "7", "--prompts", "2", *changed(*SETTINGS))
    assert pipeline.run(config).made == ["report"]
    assert 'id="run-1-figure-knockout"' in (copy / "report.html").read_text(encoding="utf-8")


def test_evaluation_prompts_edited_in_place_make_the_knockout_stale(copy: Path, tmp_path: Path):
    data = tmp_path / "data.jsonl"
    rows = [{"id": str(number), "question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(4)]
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = config_of(copy, "evaluation.task.name=jsonl", f"evaluation.task.path={data}")
    assert pipeline.run(config).made == ["knockout", "report"]
    assert pipeline.run(config).made == []
    rows[2]["question"] = "What is 2 + 1, again?"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert "knockout" in pipeline.run(config).made
    assert pipeline.run(config).made == []


def test_without_rocks_stages_are_skipped_and_say_why(copy: Path):
    """What was measured of the earlier rocks stays in the run, but is not on the page."""
    arguments = ("run", copy.with_suffix(".toml"), *changed(*SETTINGS, "find.min_score=1e9"))
    write_config(copy.with_suffix(".toml"), copy)
    drawn = [f'id="run-1-figure-{name}"' for name in ("gradient_kl", "knockout")]
    assert all(figure in (copy / "report.html").read_text(encoding="utf-8") for figure in drawn)
    outcome = succeed(*arguments)
    assert "made: find, report\nskipped: gradients, knockout; 8 prompts are too few to find rocks: " in outcome.stdout
    assert outcome.stderr.count("skipped: 8 prompts are too few") == 2
    view = RunView.open(copy)
    assert view.gradients is not None and view.knockout is not None and view.rocks is not None
    assert view.rocks.tokens == []
    assert not any(figure in (copy / "report.html").read_text(encoding="utf-8") for figure in drawn)
    again = succeed(*arguments)
    assert "made: nothing, everything else was up to date\nskipped: gradients, knockout" in again.stdout
    record = succeed(*arguments, "--json").record
    assert record["kept"] == ["distill", "trace", "find", "report"]
    assert list(record["skipped"]) == ["gradients", "knockout"]


def test_gradients_that_too_few_prompts_cannot_measure_are_skipped(copy: Path):
    """With the default of eight batches four held-out prompts would be refused, and nothing after it made."""
    made = pipeline.run(config_of(copy, "gradients.batches=8"))
    assert made.skipped == {"gradients": "8 prompts are too few to find rocks: trace at least 40 (trace.num_prompts)"}


def test_bans_of_other_labels_are_stale(copy: Path):
    labels = [token.label for token in RockSet.load(copy / "rocks.json").tokens]
    every = json.dumps(sorted({str(label) for label in labels}))
    assert pipeline.run(config_of(copy, f"knockout.labels={every}")).made == []
    [other, *_] = [label for label in labels if label not in labels[:2]]  # the first two were banned
    assert "knockout" in pipeline.run(config_of(copy, f'knockout.labels=["{other}"]')).made
    absent = next(label for label in ("moving", "moved") if label not in labels)
    assert "knockout" in pipeline.run(config_of(copy, f'knockout.labels=["{absent}"]')).skipped


@pytest.mark.parametrize(
    ("setting", "naming"),
    [
        ("training.learning_rate=0.5", ("training.learning_rate = 0.5",)),
        ("trace.num_prompts=3", ("num_prompts = 8", "--restart")),
        ("training.max_steps=3", ("training.max_steps = 3", "has made 4 steps", "another run.directory")),
        ("training.num_train_epochs=2", ("training.num_train_epochs = 2", "'wordmath'", "training.max_steps")),
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
