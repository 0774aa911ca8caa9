"""``rocktokens verify`` names every file that is damaged, missing or foreign, and nothing else; it changes nothing."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import FinishedRun, changed, rocktokens, snapshot, succeed
from safetensors.numpy import save_file

from rocktokens.errors import RocktokensError
from rocktokens.integrity import verify_run
from rocktokens.rollouts.store import read_rollouts, write_rollouts
from rocktokens.run_dir import FileEntry, RunDir
from rocktokens.traces.store import TraceStore
from rocktokens.types import RockSet

PART = "traces/checkpoint=4/part-00001.parquet"
PROBE = "rollouts/probe/checkpoint=4.parquet"


@pytest.fixture(scope="module")
def searched(finished: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run with rocks."""
    run = shutil.copytree(finished.path, tmp_path_factory.mktemp("verify") / "run")
    succeed("find", run, *changed("find.stage=score", "find.require=any", "find.min_prompts=1"))
    assert RockSet.load(run / "rocks.json").tokens
    return run


@pytest.fixture
def copy(searched: Path, tmp_path: Path) -> Path:
    return shutil.copytree(searched, tmp_path / "run")


def listed(run: Path) -> list[str]:
    return [entry.path for entry in RunDir(run).files()]


def relist(run: Path, name: str, **entry: Any) -> None:
    """Have the manifest list a file as it is now."""
    RunDir(run).adopt([name])
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"][name] |= entry
    (run / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def test_a_sound_run(copy: Path):
    before = snapshot(copy)
    outcome = succeed("verify", copy)
    assert "All is well" in outcome.stdout and f"{len(listed(copy))} files" in outcome.stdout
    record = succeed("verify", copy, "--json").record
    assert record["is_sound"] and record["problems"] == record["notes"] == record["commands"] == []
    assert record["n_bytes"] == sum((copy / name).stat().st_size for name in listed(copy))
    assert snapshot(copy) == before


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_every_listed_file_that_is_damaged_is_named(copy: Path, damage: str):
    for name in listed(copy):
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content) if damage == "flip" else (copy / name).unlink()
    before = snapshot(copy)
    outcome = rocktokens("verify", copy, "--json")
    assert outcome.code == 2 and snapshot(copy) == before
    found = outcome.record
    assert {own["path"] for own in found["problems"]} == set(listed(copy))
    assert all(own["sentence"].startswith(f"{copy}/{own['path']} is") for own in found["problems"])
    assert found["commands"] == [
        f"rocktokens trace {copy}/config.toml --restart",
        f"rocktokens find {copy}",
        f"rocktokens evaluate {copy}",
    ]


def test_the_command_that_is_named_makes_the_file_again(copy: Path):
    sound = (copy / "rocks.json").read_bytes()
    (copy / "rocks.json").write_text("{}", encoding="utf-8")
    outcome = rocktokens("verify", copy)
    assert outcome.code == 2 and "1 problem" in outcome.stdout
    command = f"rocktokens find {copy}"
    assert f"  {command}\n" in outcome.stdout
    succeed(*command.split()[1:], *changed("find.stage=score", "find.require=any", "find.min_prompts=1"))
    assert verify_run(copy).is_sound and (copy / "rocks.json").read_bytes() == sound


def test_a_search_with_classes_stands_for_one_without(copy: Path):
    (copy / "rocks.json").unlink()
    RunDir(copy).commit_text("classes.json", "{}")
    RunDir(copy).commit_text("knockout-classes.json", "{}")
    RunDir(copy).commit_text("knockout.json", "{}")
    assert verify_run(copy).commands == (
        f"rocktokens find {copy} --classes",
        f"rocktokens knockout {copy}",
        f"rocktokens knockout {copy} --classes",
    )


def no_kl(path: Path) -> None:
    table = pq.read_table(path)
    values = table["kl"].to_pylist()
    values[0] = -5.0
    place = table.column_names.index("kl")
    pq.write_table(table.set_column(place, "kl", pa.array(values, pa.float32())), path)


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        (PART, lambda path: path.write_bytes(path.read_bytes()[:100]), "cannot be read as Parquet"),
        (PART, lambda path: pq.write_table(pq.read_table(path).drop_columns(["kl"]), path), "lacks column kl"),
        (PART, lambda path: pq.write_table(pq.read_table(path).slice(1), path), "rows, its manifest lists"),
        (PART, no_kl, "is no trace (column kl holds -5.0"),
        (PROBE, lambda path: pq.write_table(pa.table({"a": [1]}), path), "schema version none"),
        ("rocks.json", lambda path: path.write_text("[]"), "is not a JSON object"),
        ("find.json", lambda path: path.write_text('{"schema_version": 1}'), "criterion: field required"),
        ("config.toml", lambda path: path.write_text("[run"), "is not valid TOML"),
        ("tokenizer/tokenizer.json", lambda path: path.write_text("{}"), "is no tokenizer"),
        ("tokenizer/tokenizer_config.json", lambda path: path.write_text("{"), "is not what its name says"),
        ("checkpoints/step-2/model.safetensors", lambda path: path.write_bytes(b"0" * 99), "holds no tensors"),
        ("checkpoints/step-2/trainer_state.json", lambda path: path.write_text('{"step": 3}'), "is of step-3"),
    ],
)
def test_a_listed_file_that_is_not_what_its_name_says(
    copy: Path, name: str, damage: Callable[[Path], object], problem: str
):
    rows = RunDir(copy).listed(name).rows
    damage(copy / name)
    relist(copy, name, rows=rows)
    [found] = [own for own in verify_run(copy).problems if own.path == name]
    assert problem in found.sentence and str(copy / name) in found.sentence


def test_records_and_rows_of_another_run(copy: Path):
    run, rocks = RunDir(copy), RockSet.load(copy / "rocks.json")
    run.commit("rocks.json", replace(rocks, source={"manifest_sha256": "0" * 64}).save)
    [found] = verify_run(copy).problems
    assert found.path == "rocks.json" and "traces that this run never had" in found.sentence
    run.commit("rocks.json", replace(rocks, tokenizer_sha256="0" * 64).save)
    [found] = verify_run(copy).problems
    assert "rocks.json was made with tokenizer 000000000000" in found.sentence
    stranger = replace(rocks.tokens[0], id=1300)
    run.commit("rocks.json", replace(rocks, tokens=[stranger, *rocks.tokens[1:]]).save)
    [found] = verify_run(copy).problems
    assert "has the rock 1300, which is nowhere in traces/checkpoint=4/" in found.sentence
    run.commit("rocks.json", rocks.save)
    rollouts = read_rollouts(run, PROBE)
    other = replace(rollouts[0], token_ids=rollouts[0].token_ids[::-1].copy())
    write_rollouts(run, PROBE, [other, *rollouts[1:]])
    found = verify_run(copy).problems
    assert [own.path for own in found] == [f"traces/checkpoint={step}/part-00000.parquet" for step in (0, 2, 4)]
    assert all("has rows that are no tokens of the probe" in own.sentence for own in found)


def test_another_tokenizer_in_its_place(copy: Path):
    path = copy / "tokenizer/tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"7"', '"§"', 1), encoding="utf-8")
    relist(copy, "tokenizer/tokenizer.json")
    [found] = verify_run(copy).problems
    assert found.path == "tokenizer/tokenizer.json" and "has another vocabulary" in found.sentence


def test_files_that_are_there_and_not_listed(copy: Path):
    (copy / "mine.txt").write_text("a note", encoding="utf-8")
    (copy / "traces/checkpoint=4/.part-00002.parquet.tmp").write_text("half", encoding="utf-8")
    found = verify_run(copy)
    assert found.is_sound and [own.path for own in found.notes] == ["mine.txt"]
    assert "mine.txt, traces/checkpoint=4/.part-00002.parquet.tmp" in found.notes[0].sentence
    (copy / "gradients.json").write_text("{}", encoding="utf-8")
    save_file({}, copy / "checkpoints/step-2/adapter_model.safetensors")
    found = verify_run(copy)
    assert [own.path for own in found.problems] == ["checkpoints/step-2", "gradients.json"]
    assert found.commands == (f"rocktokens gradients {copy}",)


def test_files_that_commands_take_as_they_are_are_notes(copy: Path):
    """Records that a user saved into a run, as ``as_listed`` allows."""
    for name in ("controls.json", "type_sets.json"):
        (copy / name).write_text("{}", encoding="utf-8")
    found = verify_run(copy)
    assert found.is_sound and [own.path for own in found.notes] == ["controls.json"]
    assert "type_sets.json" in found.notes[0].sentence


def test_a_tokenizer_that_is_not_listed(copy: Path):
    """Brought to a folder of traces, or left by a process that was killed before it listed it; else unknown."""
    tokenizers = [name for name in listed(copy) if name.startswith("tokenizer/")]
    manifest = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if name not in tokenizers}
    (copy / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert "tokenizer/tokenizer.json" in [own.path for own in verify_run(copy).problems]
    del manifest["tokenizer_sha256"]
    (copy / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert TraceStore(copy).vocab_size
    found = verify_run(copy)
    assert found.is_sound and all(name in found.notes[0].sentence for name in tokenizers[:3])


def test_a_record_of_a_replay_that_cannot_be_read(copy: Path):
    RunDir(copy).update_manifest(replay={"nonsense": 1})
    with pytest.raises(RocktokensError) as refused:
        _ = TraceStore(copy).replay
    [found] = verify_run(copy).problems
    assert found.path == "manifest.json" and found.sentence == str(refused.value)


def test_a_probe_without_rows(copy: Path):
    """Every replayed row is then of no rollout."""
    write_rollouts(RunDir(copy), PROBE, [])
    found = verify_run(copy).problems
    assert {own.path for own in found} == {name for name in listed(copy) if name.startswith("traces/checkpoint=")}
    assert all("has rows that are no tokens of the probe" in own.sentence for own in found)


def test_damaged_lines_of_the_log_are_counted(copy: Path):
    with (copy / "logs.jsonl").open("ab") as log:
        log.write(b"\xff\n[]\n{torn")
    found = verify_run(copy)
    assert found.is_sound and "has 2 damaged lines" in found.notes[0].sentence


def test_runs_within_a_run_are_checked_too(copy: Path, searched: Path):
    inner = shutil.copytree(searched, copy / "study/arms/a")
    (inner / "rocks.json").unlink()
    [found] = verify_run(copy).problems
    assert found.path == "study/arms/a/rocks.json" and found.command == f"rocktokens find {inner}"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda text: text[: len(text) // 2], "is not valid JSON"),
        (lambda text: text.replace('"rows"', '"row"', 1), "without its rows and SHA-256"),
    ],
)
def test_a_run_within_whose_manifest_is_damaged(copy: Path, searched: Path, damage: Callable[[str], str], problem: str):
    path = shutil.copytree(searched, copy / "study/arms/a") / "manifest.json"
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    result = verify_run(copy)
    [found] = result.problems
    assert found.path == "study/arms/a/manifest.json" and problem in found.sentence
    assert result.notes == ()


def test_the_manifest_of_another_tool_is_none(copy: Path):
    (copy / "page").mkdir()
    (copy / "page/manifest.json").write_text('{"name": "page"}', encoding="utf-8")
    found = verify_run(copy)
    assert found.is_sound and [own.path for own in found.notes] == ["page/manifest.json"]


def test_a_file_that_the_disk_does_not_give(copy: Path):
    (copy / PART).unlink()
    (copy / PART).symlink_to("/proc/self/mem")
    [found] = verify_run(copy).problems
    assert found.path == PART and "cannot be read (input/output error)" in found.sentence


def test_what_is_no_run(tmp_path: Path):
    assert rocktokens("verify", tmp_path).stderr.startswith(f"rocktokens: {tmp_path} is not a run directory")


@pytest.mark.parametrize("content", [None, "{}", '{"evaluations": []}'], ids=["gone", "empty", "another file"])
def test_a_run_within_without_its_manifest(copy: Path, searched: Path, content: str | None):
    manifest = shutil.copytree(searched, copy / "study/arms/a") / "manifest.json"
    manifest.unlink()
    if content is not None:
        manifest.write_text(content, encoding="utf-8")
    result = verify_run(copy)
    [found] = result.problems
    assert found.path == "study/arms/a/manifest.json" and str(manifest) in found.sentence
    assert result.notes == ()


# Beside a command that writes


@pytest.mark.parametrize("change", ["dropped", "replaced"])
@pytest.mark.parametrize("name", [PART, "rocks.json"])
def test_a_file_that_is_dropped_or_replaced_meanwhile_is_no_problem(
    copy: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: str
):
    """Between the look at the manifest and the look at the file."""
    run, files, content = RunDir(copy), RunDir.files, (copy / name).read_bytes()
    changed_already = False

    def files_then_change(self: RunDir, prefix: str = "") -> list[FileEntry]:
        nonlocal changed_already
        found = files(self, prefix)
        if not prefix and not changed_already:
            changed_already = True
            rows = run.listed(name).rows
            run.drop([name])
            if change == "replaced":
                run.commit(name, lambda path: path.write_bytes(content), rows=rows)
        return found

    monkeypatch.setattr(RunDir, "files", files_then_change)
    assert verify_run(copy).problems == () and changed_already
