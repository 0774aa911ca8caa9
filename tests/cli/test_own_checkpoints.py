"""Checkpoints that rocktokens did not train: every command works on them, and calls them by their names."""

import json
from pathlib import Path

import pytest
import torch
from command_line import Outcome, changed, other_tokenizer, refuse, require_sound, snapshot, succeed
from starlette.testclient import TestClient

from rocktokens.classes import TokenClasses
from rocktokens.config import TraceOptions, checkpoint_names, find_step, parse_config
from rocktokens.config.options import in_order
from rocktokens.report.explorer.server import make_app
from rocktokens.report.explorer.shelf import Shelf
from rocktokens.report.views.run_view import RunView
from rocktokens.rocks.classes import _end_ids
from rocktokens.run_dir import RunDir
from training.tiny_pair import END_IDS, byte_tokenizer, tiny_llama

NAMES = ("alpha", "beta", "gamma-final")
SMALL = changed(
    "models.device=cpu",
    "rollouts.max_completion_length=6",
    "rollouts.temperature=0.1",
    "trace.num_prompts=40",
    "find.k=2",
    "find.require=any",
    "find.min_prompts=2",
    "evaluation.num_prompts=4",
    "knockout.num_prompts=4",
    "knockout.top=1",
    "knockout.matched=0",
    "knockout.never=1",
    "gradients.batches=2",
)


def write_students(folder: Path) -> None:
    """Write a teacher, and students that come nearer to it by no more than a change of their weights."""
    models = {"teacher": tiny_llama(16, 1, 2), **{f"ckpt/{name}": tiny_llama(16, 1, 1) for name in NAMES}}
    for place, name in enumerate(NAMES):
        with torch.no_grad():
            for own, towards in zip(models[f"ckpt/{name}"].parameters(), models["teacher"].parameters(), strict=True):
                own.lerp_(towards, 0.3 * place)
    for name, model in models.items():
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    lines = [{"question": f"{n} + {n % 5}?", "answer": str(n + n % 5)} for n in range(40)]
    for name, fields in (("data", ("question", "answer")), ("questions", ("question",))):
        text = "".join(json.dumps({field: line[field] for field in fields}) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write_students(folder)
    return folder


def trace_of(folder: Path, *names: str, data: str = "data.jsonl") -> list[str]:
    """The command as a shell hands it over: only the first checkpoint is a value of the option."""
    students = [str(folder / name) for name in names]
    return ["trace", "--student-checkpoints", *students, "--teacher", f"{folder}/teacher", "--data", f"{folder}/{data}"]


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Outcome]:
    """What each command says, in the order in which a user would call them."""
    run = folder / "runs/mine"
    told = {"trace": succeed(*trace_of(folder, *(f"ckpt/{name}" for name in NAMES)), "--run", run, *SMALL)}
    classes = TokenClasses([[40, 41]], tokenizer_sha256=RunDir(run).manifest()["tokenizer_sha256"])
    RunDir(run).commit("classes.json", classes.save)
    told["trace --classes"] = succeed("trace", run / "config.toml", "--classes")
    told["find"] = succeed("find", run)
    told["evaluate"] = succeed("evaluate", run, "--checkpoint", "all", "--checkpoint", "teacher")
    told["gradients"] = succeed("gradients", run)
    told["knockout"] = succeed("knockout", run, "--checkpoint", "gamma-final")
    told["report"] = succeed("report", run, "-o", folder / "report.html")
    told["run"] = succeed("run", run / "config.toml")
    told["knockout --classes"] = succeed("knockout", run, "--classes")
    require_sound(run)
    return told


def test_every_command_calls_checkpoints_by_their_names(folder: Path, told: dict[str, Outcome]):
    listed = "0 (alpha), 1 (beta), 2 (gamma-final)"
    assert f"replayed at checkpoints {listed}" in told["trace"].stdout
    assert all(f"checkpoints: {listed}" in told[verb].stdout for verb in ("find", "gradients"))
    rows = [line for line in told["evaluate"].stdout.splitlines() if line.startswith(("checkpoint", "teacher"))]
    assert [row.split("  ")[0] for row in rows] == [*(f"checkpoint {own}" for own in listed.split(", ")), "teacher"]
    assert "checkpoint 2 (gamma-final)" in told["knockout"].stdout
    assert "Adam's view needs the optimizer's state" in told["gradients"].stdout.replace("\n", " ")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert all(f"checkpoint {own}" in page for own in listed.split(", "))
    assert "pebbles" not in RunView.open(folder / "runs/mine").manifest["student"]


def test_a_run_of_them_is_finished_by_one_command(told: dict[str, Outcome]):
    """It finds what the commands made, and nothing is trained."""
    assert "made: report" in told["run"].stdout


def test_verdicts_on_them_are_verdicts_on_their_rocks(folder: Path, told: dict[str, Outcome]):
    assert "verdicts of single rocks" in told["knockout"].stdout
    assert "classes and their verdicts" in told["knockout --classes"].stdout


def test_the_explorer_serves_them_with_their_names(folder: Path, told: dict[str, Outcome]):
    client = TestClient(make_app(Shelf([folder / "runs/mine"]), "secret"), base_url="http://127.0.0.1")
    overview = client.get("/secret/api/runs/0").json()
    assert overview["checkpoints"] == [0, 1, 2]
    assert overview["checkpoint_names"] == {str(place): name for place, name in enumerate(NAMES)}
    strip = client.get("/secret/api/runs/0/rollouts/0", params={"checkpoint": 1}).json()
    assert strip["checkpoint_label"] == "1 (beta)"


def test_classes_know_the_end_tokens_of_a_student_elsewhere(folder: Path, told: dict[str, Outcome]):
    assert _end_ids(RunDir(folder / "runs/mine"), 1) == set(END_IDS)


@pytest.mark.parametrize("name", ["first", "0", "alpha", "ckpt/alpha"])
def test_a_checkpoint_has_several_names(folder: Path, told: dict[str, Outcome], name: str):
    given = str(folder / name) if "/" in name else name
    [record] = succeed("evaluate", folder / "runs/mine", "--checkpoint", given, "--json").record["evaluations"]
    assert record["name"] == "checkpoint 0 (alpha)"


@pytest.mark.parametrize("listed", [[], ["out/step-2", "out/step-10"]], ids=["its own", "yours"])
def test_a_folder_that_is_named_after_its_step_goes_by_that_name(tmp_path: Path, listed: list[str]):
    run = RunDir(tmp_path)
    for step in (2, 10):
        run.commit_text(f"checkpoints/step-{step}/trainer_state.json", "{}")
    models = 'run.directory = "x"\nmodels.student = "s"\nmodels.teacher = "t"'
    config = parse_config(models, [f"trace.checkpoints={json.dumps(listed)}"])
    assert [find_step(name, run, config) for name in ("step-10", "10", "last", "step-3")] == [10, 10, 10, None]


def test_a_name_that_no_checkpoint_has_is_refused(folder: Path, told: dict[str, Outcome]):
    before = snapshot(folder / "runs/mine")
    refuse("gradients", folder / "runs/mine", "--checkpoint", "delta", naming=("'delta'", "1 (beta)"))
    refuse("knockout", folder / "runs/mine", "--checkpoint", "9", naming=("'9'", "1 (beta)"))
    assert snapshot(folder / "runs/mine") == before


def test_one_checkpoint_without_answers_has_rocks_and_gradients(folder: Path, tmp_path: Path):
    """There is no before, and no accuracy; the rest is there, and says what is left out."""
    run = tmp_path / "run"
    outcome = succeed(*trace_of(folder, "ckpt/beta", data="questions.jsonl"), "--run", run, *SMALL)
    assert "no field 'answer', so accuracy cannot be measured" in outcome.stderr
    result = succeed("run", run / "config.toml", "--json").record
    assert {"find", "gradients", "report"} <= set(result["made"])
    assert list(result["skipped"]) == ["knockout"] and "evaluation.task" in result["skipped"]["knockout"]
    assert "no earlier checkpoint scored the same tokens" in (run / "report.html").read_text(encoding="utf-8")
    refuse("evaluate", run, naming=("evaluation.task is not set", "answers"))
    refuse("knockout", run, naming=("evaluation.task is not set", "answers"))


# Options in the place of a config


@pytest.mark.parametrize(
    ("given", "expected", "because"),
    [
        (("c/step-1000", "c/step-200"), ["c/step-200", "c/step-1000"], "by the numbers in their names"),
        (("c/v2-epoch10", "c/v2-epoch9/"), ["c/v2-epoch9/", "c/v2-epoch10"], "by the numbers in their names"),
        (("c/late", "c/early-1"), ["c/late", "c/early-1"], "as given"),
        (("b/step-1", "a/step-1"), ["b/step-1", "a/step-1"], "as given"),
    ],
)
def test_the_order_of_checkpoints(given: tuple[str, ...], expected: list[str], because: str):
    assert in_order(given) == (expected, because)


def test_the_run_is_named_after_the_folder_of_the_checkpoints(folder: Path):
    def directory(*students: str) -> str:
        overrides, _ = TraceOptions(students, "T", "no-such-file.jsonl").complete().overrides()
        return parse_config("", overrides).run.directory

    assert directory("out/ckpt/step-1", "out/ckpt/step-2") == "runs/ckpt"
    assert directory("a/first", "b/last") == "runs/last"


def test_options_stand_for_a_config_file(folder: Path, tmp_path: Path):
    overrides, _ = TraceOptions(("b-2", "a-10"), "T", f"{folder}/data.jsonl", "runs/x", prompt_field="q").overrides()
    config = parse_config("", overrides)
    assert config.trace.checkpoints == ["b-2", "a-10"] and config.models.teacher == "T"
    assert config.task == config.evaluation.task and config.task.prompt_field == "q"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (["ckpt/alpha", "ckpt/beta/"], {0: "alpha", 1: "beta"}),
        (["a/final", "b/final"], {0: "a/final", 1: "b/final"}),
        (["out/checkpoint-5", "out/checkpoint-10"], {}),
        (["out/a-step-5", "out/step-10"], {5: "a-step-5"}),
    ],
)
def test_names_tell_checkpoints_apart(listed: list[str], names: dict[int, str]):
    config = parse_config('run.directory = "x"\nmodels.teacher = "t"', [f"trace.checkpoints={json.dumps(listed)}"])
    assert checkpoint_names(config) == names


@pytest.mark.parametrize(
    ("students", "naming"),
    [
        (("ckpt/alpha", "ckpt/none"), ("trace.checkpoints", "ckpt/none", "does not exist")),
        (("ckpt/alpha", "data.jsonl"), ("trace.checkpoints", "data.jsonl", "is a file")),
        (("ckpt/alpha", "ckpt/alpha/"), ("trace.checkpoints", "ckpt/alpha", "twice")),
        (("ckpt/step-3", "other/step-3"), ("trace.checkpoints", "[3, 3]", "once")),
        (("ckpt/foreign", "ckpt/alpha"), ("ckpt/foreign", "vocabularies")),
    ],
)
def test_checkpoints_that_cannot_be_traced_leave_nothing(
    folder: Path, tmp_path: Path, students: tuple[str, ...], naming: tuple[str, ...]
):
    if not (folder / "ckpt/foreign").exists():
        other_tokenizer(folder / "ckpt/foreign")
    refuse(*trace_of(folder, *students), "--run", tmp_path / "run", *SMALL, naming=naming)
    assert not (tmp_path / "run").exists()


def test_options_that_are_missing_are_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    refuse("trace", naming=("--student-checkpoints", "--teacher", "--data"))
    refuse("trace", "--student-checkpoints", folder / "ckpt/alpha", naming=("--teacher and --data",))
    refuse("trace", folder / "ckpt/alpha", folder / "ckpt/beta", naming=("one RUN.TOML", "--student-checkpoints"))
    refuse(*trace_of(folder, "ckpt/alpha")[:5], "--answer-field", "a", naming=("--data",))
    assert list(tmp_path.iterdir()) == []
