"""Nothing that was damaged, replaced or brought from elsewhere is measured: one sentence, code 2, nothing written."""

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import FinishedRun, changed, refuse, rocktokens, snapshot, succeed
from safetensors.torch import load_file, save_file

from rocktokens.config import load_config
from rocktokens.errors import RunDirError
from rocktokens.models import pebbles
from rocktokens.report.page.sections import EARLIER_TRACES
from rocktokens.run_dir import RunDir, file_sha256
from rocktokens.traces.store import SEARCHED
from rocktokens.training.loop import distill
from rocktokens.types import RockSet

NEW_QUESTION = changed("evaluation.num_prompts=3", "knockout.num_prompts=3")
"""What the run has not answered yet, so that the model must be read."""
FEW_PROMPTS = changed("find.stage=score", "find.require=any", "find.min_prompts=1")
"""A criterion that finds rocks in few prompts."""


@pytest.fixture(scope="module")
def searched(finished: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run, searched by a criterion that finds rocks in few prompts."""
    run = shutil.copytree(finished.path, tmp_path_factory.mktemp("searched") / "run")
    succeed("find", run, *FEW_PROMPTS)
    assert RockSet.load(run / "rocks.json").tokens
    return run


@pytest.fixture
def copy(searched: Path, tmp_path: Path) -> Path:
    return shutil.copytree(searched, tmp_path / "run")


@pytest.fixture(scope="module")
def other(searched: Path) -> Path:
    """Another run: as valid, with other rocks and another evaluation."""
    run = shutil.copytree(searched, searched.with_name("other"))
    succeed("find", run, "--k", "2", *FEW_PROMPTS)
    succeed("evaluate", run, *NEW_QUESTION)
    return run


def refuse_untouched(run: Path, *arguments: str | Path, naming: tuple[str, ...]) -> None:
    before = snapshot(run)
    refuse(*arguments, naming=naming)
    assert snapshot(run) == before


def zero(path: Path, count: int = 40_000) -> None:
    """Overwrite bytes in the middle of a file; it stays as long as it was, and loads."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + count] = bytes(count)
    path.write_bytes(content)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# Models


def test_a_teacher_without_a_layer(finished: FinishedRun, tmp_path: Path):
    teacher = shutil.copytree(pebbles.directory("teacher"), tmp_path / "teacher")
    weights = load_file(teacher / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "layers.1." not in name}
    save_file(kept, teacher / "model.safetensors", metadata={"format": "pt"})
    settings = changed(f"models.teacher={teacher}", f"run.directory={tmp_path / 'new'}")
    naming = (str(teacher), "9 tensors missing: model.layers.1.input_layernorm.weight, ", "and 6 more")
    refuse("distill", finished.config, *settings, naming=naming)
    assert snapshot(tmp_path / "new") == {}
    checked = rocktokens("check", finished.config, *settings)
    assert checked.code == 2 and all(name in checked.stdout + checked.stderr for name in naming)
    assert snapshot(tmp_path / "new") == {}


# Checkpoints


@pytest.mark.parametrize(
    ("step", "command"),
    [
        (2, lambda run: ("evaluate", run, "--checkpoint", "2", *NEW_QUESTION)),
        (4, lambda run: ("evaluate", run, *NEW_QUESTION)),
        (4, lambda run: ("knockout", run, *NEW_QUESTION)),
        (2, lambda run: ("trace", run / "config.toml", "--restart", *changed(f"run.directory={run}"))),
        (0, lambda run: ("gradients", run, "--batches", "2")),
        (4, lambda run: ("find", run, *changed("find.stage=context"))),
        (4, lambda run: ("find", run, *changed("find.stage=context", "find.encoder=hidden"))),
    ],
    ids=["evaluate 2", "evaluate", "knockout", "trace", "gradients", "embeddings", "hidden"],
)
def test_damaged_weights(copy: Path, step: int, command: Callable[[Path], tuple[str, ...]]):
    zero(copy / f"checkpoints/step-{step}/model.safetensors")
    naming = (f"checkpoints/step-{step}/model.safetensors is not the file that", "restore it from a copy of the run")
    refuse_untouched(copy, *command(copy), naming=naming)


def test_damaged_weights_of_another_run(finished: FinishedRun, copy: Path, tmp_path: Path):
    checkpoint = copy / "checkpoints/step-2"
    zero(checkpoint / "model.safetensors")
    naming = (f"{checkpoint}/model.safetensors is not the file that {copy}/manifest.json lists",)
    refuse_untouched(finished.path, "evaluate", finished.path, "--checkpoint", checkpoint, naming=naming)
    new = tmp_path / "new"
    refuse("distill", finished.config, *changed(f"models.student={checkpoint}", f"run.directory={new}"), naming=naming)
    assert snapshot(new) == {}


def test_what_a_killed_process_left_of_a_checkpoint_is_no_model(copy: Path):
    shutil.copytree(copy / "checkpoints/step-4", copy / "checkpoints/step-6")
    naming = ("has no checkpoint of step 6", "[0, 2, 4]")
    refuse_untouched(copy, "evaluate", copy, "--checkpoint", copy / "checkpoints/step-6", naming=naming)


# Traces and rollouts


@pytest.mark.parametrize(
    "command",
    [
        lambda run: ("find", run),
        lambda run: ("find", run, "--compare", run),
        lambda run: ("gradients", run, "--batches", "2"),
        lambda run: ("knockout", run, *NEW_QUESTION),
        lambda run: ("report", run, "-o", run / "page.html"),
    ],
    ids=["find", "compare", "gradients", "knockout", "report"],
)
def test_one_flipped_bit_in_a_trace_part(copy: Path, command: Callable[[Path], tuple[str, ...]]):
    flip(copy / "traces/checkpoint=4/part-00001.parquet")
    naming = ("traces/checkpoint=4/part-00001.parquet is not the file that", "`rocktokens trace --restart`")
    refuse_untouched(copy, *command(copy), naming=naming)


def test_a_changed_tokenizer(copy: Path):
    path = copy / "tokenizer/tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"7"', '"8"', 1), encoding="utf-8")
    refuse_untouched(copy, "find", copy, naming=("tokenizer/tokenizer.json is not the file that",))


# Records


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("rocks.json", ("report", "knockout", "gradients")),
        ("find.json", ("report",)),
        ("evaluations.json", ("report", "evaluate")),
    ],
)
def test_a_record_of_another_run(copy: Path, other: Path, name: str, commands: tuple[str, ...]):
    shutil.copy(other / name, copy / name)
    maker = {"evaluations.json": "evaluate"}.get(name, "find")
    for command in commands:
        options = ("-o", copy / "page.html") if command == "report" else ()
        naming = (f"{name} is not the file that {copy}/manifest.json lists", f"`rocktokens {maker}` again")
        refuse_untouched(copy, command, copy, *options, naming=naming)


@pytest.mark.parametrize("name", ["rocks.json", "find.json", "evaluations.json", "gradients.json", "knockout.json"])
def test_a_record_that_is_not_listed(copy: Path, other: Path, name: str):
    RunDir(copy).drop([name])
    (copy / name).write_bytes((other / "rocks.json").read_bytes())
    maker = {"rocks.json": "find", "find.json": "find", "evaluations.json": "evaluate"}.get(name, name[:-5])
    naming = (f"{name} is not listed in {copy}/manifest.json", f"run `rocktokens {maker}`")
    refuse_untouched(copy, "report", copy, "-o", copy / "page.html", naming=naming)
    if name == "rocks.json":
        refuse_untouched(copy, "knockout", copy, naming=naming)
        refuse_untouched(copy, "gradients", copy, naming=naming)


def test_rocks_that_were_found_in_the_traces_of_another_run(copy: Path):
    """Both the file and its entry in the manifest were copied."""
    rocks = RockSet.load(copy / "rocks.json")
    RunDir(copy).commit("rocks.json", replace(rocks, source={"manifest_sha256": "0" * 64}).save)
    naming = ("rocks.json was made from traces that this run never had", "`rocktokens find`")
    for command in (("report", copy, "-o", copy / "page.html"), ("knockout", copy), ("gradients", copy)):
        refuse_untouched(copy, *command, naming=naming)
    succeed("find", copy, *FEW_PROMPTS)
    assert RockSet.load(copy / "rocks.json") == rocks


def test_rocks_of_earlier_traces_of_this_run_are_said_to_be(copy: Path):
    page = copy.parent / "page.html"
    succeed("report", copy, "-o", page)
    assert EARLIER_TRACES not in page.read_text(encoding="utf-8")
    RunDir(copy).drop([f"traces/checkpoint={step}/part-00001.parquet" for step in (0, 2, 4)])
    succeed("report", copy, "-o", page)
    assert EARLIER_TRACES in page.read_text(encoding="utf-8")
    succeed("knockout", copy, "--top", "1", *NEW_QUESTION)
    warnings = json.loads((copy / "knockout.json").read_text(encoding="utf-8"))["warnings"]
    assert any("found in other traces than the run has now" in warning for warning in warnings)
    before = RunDir(copy).manifest()[SEARCHED]
    succeed("find", copy)
    assert RunDir(copy).manifest()[SEARCHED][:-1] == before


def test_rocks_that_a_policy_names_must_be_as_their_run_lists_them(finished: FinishedRun, copy: Path, tmp_path: Path):
    flip(copy / "rocks.json")
    policy = ("policy.name=rocks", f"policy.rocks={copy / 'rocks.json'}", "policy.lam=0.0")
    settings = changed(f"run.directory={tmp_path / 'new'}", *policy)
    refuse("distill", finished.config, *settings, naming=(f"{copy}/rocks.json is not the file that",))
    assert snapshot(tmp_path / "new") == {}


# The config


@pytest.mark.parametrize(
    ("change", "naming"),
    [
        (lambda path: path.write_text(""), "config.toml is not the file that"),
        (lambda path: path.write_text(path.read_text()[:200]), "config.toml is not the file that"),
        (lambda path: path.unlink(), "config.toml is listed in the manifest but missing"),
    ],
    ids=["empty", "truncated", "missing"],
)
def test_a_config_that_is_not_the_one_of_the_run(copy: Path, change: Callable[[Path], object], naming: str):
    change(copy / "config.toml")
    for command in ("evaluate", "find", "knockout", "gradients"):
        refuse_untouched(copy, command, copy, naming=(naming, "restore it from a copy of the run"))
    refuse_untouched(copy, "report", copy, "-o", copy / "page.html", naming=(naming,))
    refuse_untouched(copy, "trace", copy / "config.toml", "--restart", naming=(naming,))


def test_a_config_that_is_not_listed(copy: Path):
    text = (copy / "config.toml").read_text(encoding="utf-8")
    RunDir(copy).drop(["config.toml"])
    (copy / "config.toml").write_text(text, encoding="utf-8")
    naming = (f"config.toml is not listed in {copy}/manifest.json", "remove it")
    for command in ("evaluate", "find"):
        refuse_untouched(copy, command, copy, naming=naming)


# Damage that was listed as if it were content: by a failing disk while writing, or by hand


def relist(run: Path, *names: str) -> None:
    """Have the manifest list files as they are now."""
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    for name in names:
        manifest["files"][name]["sha256"] = file_sha256(run / name)
    (run / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def garble(path: Path) -> None:
    """Overwrite the first half of a file but for its first bytes: a Parquet footer stays as it was."""
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [garble, lambda path: path.write_bytes(path.read_bytes()[:100])])
def test_parts_that_are_no_parquet(copy: Path, damage: Callable[[Path], object]):
    part, probe = "traces/checkpoint=4/part-00001.parquet", "rollouts/probe/checkpoint=4.parquet"
    sound = (copy / part).read_bytes()
    damage(copy / part)
    relist(copy, part)
    naming = (f"{part} cannot be read as Parquet", "`rocktokens trace --restart` again")
    for command in (("find", copy), ("find", copy, copy, "--compare"), ("report", copy, "-o", copy / "page.html")):
        refuse_untouched(copy, *command, naming=naming)
    (copy / part).write_bytes(sound)
    damage(copy / probe)
    relist(copy, part, probe)
    naming = (f"{probe} cannot be read as Parquet", "`rocktokens trace --restart` again")
    refuse_untouched(copy, "gradients", copy, "--batches", "2", naming=naming)


def test_a_tokenizer_that_is_none(copy: Path):
    (copy / "tokenizer/tokenizer.json").write_text("{", encoding="utf-8")
    relist(copy, "tokenizer/tokenizer.json")
    naming = ("tokenizer/tokenizer.json is no tokenizer", "restore it from a copy of the run")
    for command in (("find", copy), ("report", copy, "-o", copy / "page.html")):
        refuse_untouched(copy, *command, naming=naming)


NO_JSON = {"deep": "[" * 200_000, "digits": '{"schema_version": ' + "9" * 6000 + "}", "bytes": b"\xff\xfe"}


@pytest.mark.parametrize("name", ["rocks.json", "find.json", "evaluations.json"])
@pytest.mark.parametrize("content", NO_JSON.values(), ids=NO_JSON)
def test_records_that_are_no_json(copy: Path, name: str, content: str | bytes):
    (copy / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    relist(copy, name)
    naming = (f"{name} is not valid JSON (",)
    refuse_untouched(copy, "report", copy, "-o", copy / "page.html", naming=naming)


@pytest.mark.parametrize(
    ("name", "keys", "value", "where"),
    [
        ("rocks.json", ("tokens", 0, "id"), "x", "tokens.0.id"),
        ("rocks.json", ("tokens", 0, "rank"), None, "tokens.0.rank"),
        ("rocks.json", ("tokens", 0, "text"), 3, "tokens.0.text"),
        ("rocks.json", ("tokens", 0, "score_interval"), [1], "tokens.0.score_interval"),
        ("rocks.json", ("tokens", 0, "label"), "odd", "tokens.0.label"),
        ("rocks.json", ("tokens", 0, "verdict"), 4, "tokens.0.verdict"),
        ("rocks.json", ("tokenizer_sha256",), 4, "tokenizer_sha256"),
        ("evaluations.json", ("evaluations", 0, "accuracy"), "x", "evaluations.0.accuracy"),
        ("evaluations.json", ("evaluations", 0, "name"), 4, "evaluations.0.name"),
        ("evaluations.json", ("evaluations", 0, "prompt_ids"), None, "evaluations.0.prompt_ids"),
        ("find.json", ("funnel", "text"), [], "the columns of funnel differ in length"),
    ],
)
def test_fields_of_another_type(copy: Path, name: str, keys: tuple[str | int, ...], value: object, where: str):
    record = json.loads((copy / name).read_text(encoding="utf-8"))
    inner = record
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (copy / name).write_text(json.dumps(record), encoding="utf-8")
    relist(copy, name)
    refuse_untouched(copy, "report", copy, "-o", copy / "page.html", naming=(name, where))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda manifest: manifest["files"]["rocks.json"].pop("sha256"), "lists 'rocks.json' without its rows and"),
        (lambda manifest: manifest["files"].update({"rocks.json": []}), "lists 'rocks.json' without its rows and"),
        (lambda manifest: manifest["files"]["rocks.json"].update(sha256=3), "with rows 0 and SHA-256 3"),
        (lambda manifest: manifest["files"].update({"../a": {"rows": 0, "sha256": ""}}), "'../a', which is outside"),
        (lambda manifest: manifest.update(searched=5), "has searched = 5, which is no list"),
        (lambda manifest: manifest.update(choice_added=3), "has choice_added = 3, which is no dict"),
        (lambda manifest: manifest.update(tokenizer_sha256=3), "has tokenizer_sha256 = 3, which is no str"),
        (lambda manifest: manifest.update(max_steps="x"), "has max_steps = 'x', which is no int"),
    ],
)
def test_a_manifest_that_does_not_say_what_it_must(
    copy: Path, change: Callable[[dict[str, Any]], object], problem: str
):
    manifest = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    change(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    naming = (f"{copy}/manifest.json", problem, "restore it from a copy of the run")
    refuse_untouched(copy, "find", copy, naming=naming)
    refuse_untouched(copy, "report", copy, "-o", copy / "page.html", naming=naming)


def test_a_manifest_nested_without_end(copy: Path):
    (copy / "manifest.json").write_text("[" * 200_000, encoding="utf-8")
    refuse_untouched(copy, "find", copy, naming=("manifest.json is not valid JSON (it is nested too deep)",))


def test_a_damaged_knockout_is_not_taken_for_none(copy: Path):
    """Verdicts on the rocks would be missing from what find prints."""
    RunDir(copy).commit_text("knockout.json", '{"schema_version": 3}')
    refuse_untouched(copy, "find", copy, naming=("knockout.json is no knockout.json", "`rocktokens knockout`"))


@pytest.mark.parametrize("rocks", ["damaged", "removed", "foreign"])
def test_there_is_a_way_out_where_rocks_and_knockout_are_damaged(copy: Path, rocks: str):
    """A knock-out needs rocks, so that find must not ask for a knock-out first."""
    run, sound = RunDir(copy), (copy / "rocks.json").read_bytes()
    run.commit_text("knockout.json", "{}")
    (copy / "knockout.json").unlink()
    if rocks == "foreign":
        run.commit("rocks.json", replace(RockSet.load(run.rocks), source={"manifest_sha256": "0" * 64}).save)
    else:
        run.rocks.write_text("{}", encoding="utf-8") if rocks == "damaged" else run.rocks.unlink()
    refuse_untouched(copy, "knockout", copy, naming=("rocks.json", "`rocktokens find`"))
    outcome = succeed("find", copy, *FEW_PROMPTS)
    assert "the rocks are shown without verdicts" in outcome.stderr and "`rocktokens knockout`" in outcome.stderr
    assert run.rocks.read_bytes() == sound
    refuse_untouched(copy, "find", copy, naming=("knockout.json is listed in the manifest but missing",))
    succeed("knockout", copy, "--top", "1", *NEW_QUESTION)
    succeed("find", copy, *FEW_PROMPTS)


def test_reading_that_the_disk_refuses(copy: Path):
    """Reading the first bytes of this file of the system is an input/output error."""
    (copy / "manifest.json").unlink()
    (copy / "manifest.json").symlink_to("/proc/self/mem")
    refuse("find", copy, naming=("manifest.json cannot be read (input/output error)",))


def test_damaged_lines_of_a_log_are_left_out_and_counted(copy: Path):
    log = copy / "logs.jsonl"
    first, *rest = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([b"\xff{\n", *rest]))
    settings = changed(f"run.directory={copy}", "training.max_steps=5")
    outcome = succeed("distill", copy / "config.toml", "--resume", *settings)
    assert "has 1 damaged or missing lines of steps before 4: they are left out" in outcome.stderr
    assert [json.loads(line)["step"] for line in log.read_text(encoding="utf-8").splitlines()] == [1, 2, 3, 4]
    assert first not in log.read_bytes()


# The folder of a run


def test_a_run_whose_manifest_is_gone_is_not_trained_over(copy: Path):
    (copy / "manifest.json").unlink()
    naming = (f"{copy} has files of a run (c", "restore the manifest from a copy")
    settings = changed(f"run.directory={copy}")
    for command in (("distill",), ("distill", "--resume"), ("trace",), ("trace", "--restart")):
        refuse_untouched(copy, command[0], copy / "config.toml", *command[1:], *settings, naming=naming)


def test_training_stops_where_its_folder_vanishes(finished: FinishedRun, tmp_path: Path):
    run = tmp_path / "new"

    def vanish(step: int, _total: int, _record: object) -> None:
        if step == 2:
            shutil.rmtree(run)

    config = load_config(finished.config, [f"run.directory={run}"])
    with pytest.raises(RunDirError, match=r"new/\.lock was removed or replaced while this process was writing"):
        distill(config, on_step=vanish)
    assert not run.exists()


def test_a_disk_that_fails_while_writing(copy: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    before = snapshot(copy)
    with monkeypatch.context() as patch:
        patch.setattr("rocktokens.run_dir.fsync", fail)
        refuse("find", copy, naming=("cannot be read or written (input/output error)", "check the disk"))
    assert snapshot(copy) == before
