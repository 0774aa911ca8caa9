"""``trace.classes``: the choice within classes stands beside the scores, at once or added to a finished replay."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from command_line import FinishedRun, changed, refuse, require_sound, rocktokens, snapshot, succeed

from killed_writer import add_choice_and_die
from rocktokens.classes import TokenClass, TokenClasses
from rocktokens.config import load_config
from rocktokens.models.load import load_model
from rocktokens.pipeline import _classes, _is_found
from rocktokens.progress import Silent
from rocktokens.replay import replay as replaying
from rocktokens.replay.replay import is_replayed
from rocktokens.rocks.records import FindRecord
from rocktokens.rollouts.store import read_rollouts
from rocktokens.run_dir import RunDir
from rocktokens.traces.store import TraceStore
from rocktokens.traces.writer import write_parquet
from rocktokens.types import RockSet

LAST = "traces/checkpoint=4/"
KEPT = ("traces/", "rollouts/", "rocks.json", "find.json", "checkpoints/")


class Notes(Silent):
    """Keeps what a stage says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def kept_files(run: Path) -> dict[str, str]:
    return {path: sha for path, sha in snapshot(run).items() if path.startswith(KEPT)}


@pytest.fixture(scope="module")
def groups(finished: FinishedRun) -> list[list[int]]:
    """Two classes of tokens that are often written, or could be."""
    rows = TraceStore(finished.path).table(4).to_pyarrow()
    ids, counts = np.unique(rows["token_id"].to_numpy(), return_counts=True)
    common = ids[np.argsort(-counts, kind="stable")].tolist()
    return [common[:3], common[3:8]]


@pytest.fixture(scope="module")
def added(finished: FinishedRun, groups: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished run whose last checkpoint was given the column afterwards."""
    run = shutil.copytree(finished.path, tmp_path_factory.mktemp("classes") / "run")
    with RunDir(run).lock():
        RunDir(run).commit("classes.json", TokenClasses(groups).save)
    succeed("trace", run / "config.toml", *changed(f"run.directory={run}"), "--classes")
    return run


def test_only_the_last_checkpoint_is_written_again_and_only_a_column_is_new(finished: FinishedRun, added: Path):
    old, new = kept_files(finished.path), kept_files(added)
    assert old.keys() == new.keys()
    assert {path for path in old if old[path] != new[path]} == {path for path in old if path.startswith(LAST)}
    for part in RunDir(added).files(LAST):
        rows = pq.ParquetFile(added / part.path).read()
        before = pq.ParquetFile(finished.path / part.path).read()
        assert {*rows.column_names} - {*before.column_names} == {"kl_choice"}
        assert rows.drop(["kl_choice"]).equals(before)
    require_sound(added)


def test_rocks_are_still_those_of_the_traces_and_find_says_how_much_is_choice(added: Path, tmp_path: Path):
    store = TraceStore(added)
    assert store.made(RockSet.load(added / "rocks.json").source, "rocks.json")
    run = shutil.copytree(added, tmp_path / "run")
    config = load_config(run / "config.toml", [f"run.directory={run}"])
    assert not _is_found(RunDir(run), config)  # find.json does not have the share yet
    said = " ".join(succeed("find", run).stdout.split())
    assert _is_found(RunDir(run), config)
    choice = FindRecord.load(run / "find.json").choice
    assert choice is not None and choice.share is not None and choice.share_interval is not None
    assert choice.classes_sha256 == TokenClasses.load(added / "classes.json").sha256
    assert choice.share_interval[0] < choice.share < choice.share_interval[1]
    assert choice.sentence in said and f"{100 * choice.share:.1f} % [" in choice.sentence
    assert RockSet.load(run / "rocks.json") == RockSet.load(added / "rocks.json")


def test_the_choice_is_that_of_the_models_own_logits(added: Path, groups: list[list[int]]):
    """Naively, in float64, at the state before each token; of the token before or after it is another number."""
    student = load_model(str(added / "checkpoints/step-4"), "float32", "cpu").model.double()
    teacher = load_model("pebbles-teacher", "float32", "cpu").model.double()
    rows = TraceStore(added).table(4)
    for rollout in read_rollouts(RunDir(added), "rollouts/probe/checkpoint=4.parquet")[:3]:
        own = rows.filter(rows.rollout_id == rollout.rollout_id).order_by("position").to_pyarrow()
        ids = torch.tensor([[*rollout.prompt_ids.tolist(), *rollout.token_ids.tolist()]])
        with torch.no_grad():
            width = min(model(ids[:, :1]).logits.shape[-1] for model in (student, teacher))
            p_TV, q_TV = (torch.softmax(model(ids).logits[0, :, :width], -1) for model in (student, teacher))
        places = range(len(rollout.prompt_ids) - 1, ids.shape[1] - 1)
        expected = [sum(naive_choice(p_TV[t], q_TV[t], group) for group in groups) for t in places]
        found = own["kl_choice"].to_numpy()
        np.testing.assert_allclose(found, expected, atol=2e-5)
        assert (found <= own["kl"].to_numpy() + 1e-6).all()
        for shift in (1, -1):
            assert np.abs(np.roll(found, shift) - expected).max() > 1e-2


def naive_choice(p: torch.Tensor, q: torch.Tensor, group: list[int]) -> float:
    whole_p, whole_q = (sum(float(x[v]) for v in group) for x in (p, q))
    return sum(float(p[v]) * np.log(float(p[v]) / whole_p * whole_q / float(q[v])) for v in group)


def test_a_replay_with_classes_from_the_start_ends_with_the_same_bytes(
    finished: FinishedRun, added: Path, tmp_path: Path
):
    """At the last checkpoint; the others have the column too. Without them the scores are the same bits."""
    run = tmp_path / "run"
    students = json.dumps([str(finished.path / f"checkpoints/step-{step}") for step in (0, 2, 4)])
    own = changed(f"run.directory={run}", f"trace.checkpoints={students}", f"trace.classes={added / 'classes.json'}")
    succeed("trace", finished.config, *own)
    assert {path: sha for path, sha in snapshot(run).items() if path.startswith(LAST)} == {
        path: sha for path, sha in snapshot(added).items() if path.startswith(LAST)
    }
    sha256 = TokenClasses.load(added / "classes.json").sha256
    assert [TraceStore(run).classes_sha256(step) for step in (0, 2, 4)] == [sha256] * 3
    assert RunDir(run).manifest()["replay"]["classes"] == sha256
    assert TraceStore(run).manifest_sha256 == TraceStore(finished.path).manifest_sha256
    # Unfinished it goes on with these classes alone; finished, others take their place.
    TokenClasses([[1, 2, 3]]).save(tmp_path / "others.json")
    other = changed(*own[1:4:2], f"trace.classes={tmp_path / 'others.json'}")
    part = RunDir(run).files(LAST)[-1].path
    succeed("trace", finished.config, *other)
    assert TraceStore(run).classes_sha256(4) == TokenClasses([[1, 2, 3]]).sha256
    assert TraceStore(run).classes_sha256(0) == sha256
    succeed("trace", finished.config, *own)
    RunDir(run).drop([part])
    refuse("trace", finished.config, *other, naming=("not finished", "finish it with the classes it began with first"))
    succeed("trace", finished.config, *own)
    assert {path: sha for path, sha in snapshot(run).items() if path.startswith(LAST)} == {
        path: sha for path, sha in snapshot(added).items() if path.startswith(LAST)
    }


def test_classes_are_added_to_no_replay_that_is_unfinished(
    finished: FinishedRun, groups: list[list[int]], tmp_path: Path
):
    run = RunDir(shutil.copytree(finished.path, tmp_path / "run"))
    run.commit("classes.json", TokenClasses(groups).save)
    run.drop([run.files(LAST)[-1].path])
    command = ("trace", run.config, *changed(f"run.directory={run.path}"))
    before = snapshot(run.path)
    refuse(*command, "--classes", naming=("not finished", "finish it without --classes and trace.classes first"))
    assert snapshot(run.path) == before


def test_what_bans_refuted_is_no_choice(added: Path, groups: list[list[int]], tmp_path: Path):
    """The class that is left has its choice; where none is, the refusal says so and nothing changes."""
    run = RunDir(shutil.copytree(added, tmp_path / "run"))
    kept, refuted = (TokenClass(tuple(own), safe=safe) for own, safe in zip(groups, (None, False), strict=True))
    run.commit("classes.json", TokenClasses([kept, refuted]).save)
    config = load_config(run.config, [f"run.directory={run.path}", f"trace.classes={run.classes}"])
    assert not is_replayed(config)
    command = ("trace", run.config, *changed(f"run.directory={run.path}"), "--classes")
    succeed(*command)
    assert is_replayed(config) and TraceStore(run).classes_sha256(4) == TokenClasses(groups[:1]).sha256
    run.commit("classes.json", TokenClasses([refuted]).save)
    before = snapshot(run.path)
    refuse(*command, naming=("trace.classes", "only classes that bans have refuted", "give other classes"))
    notes = Notes()
    assert _classes(run, load_config(run.config, [f"run.directory={run.path}"]), notes) is False
    assert notes.lines == ["bans refuted every class: what the traces have of the choice is of earlier classes"]
    assert snapshot(run.path) == before


def test_classes_that_the_run_does_not_list_are_refused(finished: FinishedRun, groups: list[list[int]], tmp_path: Path):
    run = RunDir(shutil.copytree(finished.path, tmp_path / "run"))
    TokenClasses(groups).save(run.classes)
    before = snapshot(run.path)
    command = ("trace", run.config, *changed(f"run.directory={run.path}"), "--classes")
    refuse(*command, naming=("classes.json is not listed in", "remove it and run `rocktokens find --classes`"))
    assert snapshot(run.path) == before


def test_an_interrupted_addition_goes_on_where_it_was(
    finished: FinishedRun, added: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One of two parts has the column: then no reader is told of it, and the same command adds the other alone."""
    run = shutil.copytree(finished.path, tmp_path / "run")
    command = ("trace", run / "config.toml", *changed(f"run.directory={run}", f"trace.classes={added}/classes.json"))
    add, calls = replaying.add_choice, []

    def full(*arguments: object) -> None:
        calls.append(arguments[1])
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        add(*arguments)

    monkeypatch.setattr(replaying, "add_choice", full)
    outcome = rocktokens(*command)
    assert outcome.code == 2 and "no space left on device" in outcome.stderr.lower()
    assert TraceStore(run).classes_sha256(4) is None
    succeed(*command)
    assert calls[2:] == calls[1:2] and len(calls) == 3
    succeed(*command)
    assert len(calls) == 3
    own, unlike = f"trace.classes={added}/classes.json", f"trace.classes={tmp_path}/unlike.json"
    TokenClasses([[1, 2]]).save(tmp_path / "unlike.json")
    for setting, is_done in ((own, True), (unlike, False), ("trace.num_prompts=8", True)):
        assert is_replayed(load_config(run / "config.toml", [f"run.directory={run}", setting])) == is_done
    assert kept_files(run) == kept_files(added)
    require_sound(run)


def test_a_kill_before_the_listing_of_a_part_loses_nothing_and_the_command_finishes(
    finished: FinishedRun, added: Path, tmp_path: Path
):
    run = RunDir(shutil.copytree(finished.path, tmp_path / "run"))
    run.commit("classes.json", TokenClasses.load(added / "classes.json").save)
    part = run.files(LAST)[0]
    add_choice_and_die(run, part.path, np.zeros(part.rows), TokenClasses.load(run.classes))
    assert run.files(LAST)[0] == part and TraceStore(run).classes_sha256(4) is None
    before, after = (TraceStore(own).table(4).order_by("rollout_id", "position") for own in (finished.path, run.path))
    assert after.to_pyarrow().equals(before.to_pyarrow())
    succeed("trace", run.config, *changed(f"run.directory={run.path}"), "--classes")
    assert kept_files(run.path) == kept_files(added)
    require_sound(run.path)


def test_a_replay_that_scores_otherwise_now_is_named_as_the_cause(finished: FinishedRun, added: Path, tmp_path: Path):
    run = RunDir(shutil.copytree(finished.path, tmp_path / "run"))
    run.commit("classes.json", TokenClasses.load(added / "classes.json").save)
    part = run.files(LAST)[0]
    rows = pq.ParquetFile(run.path / part.path).read()
    place, kl = rows.column_names.index("kl"), rows.column("kl").to_numpy() / 100
    other = rows.set_column(place, rows.schema.field("kl"), pa.array(kl))
    run.commit(part.path, lambda path: write_parquet(other, path), rows=part.rows)
    outcome = rocktokens("trace", run.config, *changed(f"run.directory={run.path}"), "--classes")
    naming = (part.path, "the choice is a part of the kl", "another device or with other versions", "--restart")
    assert outcome.code == 2 and [own for own in naming if own not in outcome.stderr] == [], outcome.stderr
    assert pq.ParquetFile(run.path / part.path).read().equals(other)


def test_what_cannot_be_scored_is_refused_before_anything_changes(finished: FinishedRun, tmp_path: Path):
    before = snapshot(finished.path)
    TokenClasses([[3]]).save(tmp_path / "alone.json")
    TokenClasses([[3, 10**6]]).save(tmp_path / "wide.json")
    TokenClasses([[3, 4]], tokenizer_sha256="ab" * 32).save(tmp_path / "foreign.json")
    for name, naming in {
        "alone.json": ("trace.classes", "no class of two tokens", "leave it out"),
        "wide.json": ("token id 1000000", "outside"),
        "foreign.json": ("tokenizer abababababab", "make classes"),
        "absent.json": ("absent.json does not exist", "rocktokens find --classes"),
    }.items():
        refuse("trace", finished.config, *changed(f"trace.classes={tmp_path / name}"), naming=naming)
    refuse("trace", finished.config, "--classes", naming=("classes.json does not exist",))
    assert snapshot(finished.path) == before
