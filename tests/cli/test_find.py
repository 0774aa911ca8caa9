"""``find`` is the same wherever a run lies and refuses half a replay; what it says of rocks is of other prompts."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import FinishedRun, changed, refuse, rocktokens, snapshot, succeed

from rocktokens.cli.demo import movement_table, print_answer
from rocktokens.demo import Movement, measure_movement
from rocktokens.evaluation.records import EvaluationRecord
from rocktokens.rocks.find import find_rocks
from rocktokens.rocks.sums import split_prompts
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.traces.store import TraceStore
from rocktokens.types import KEPT, RockSet


@pytest.fixture
def copy(finished: FinishedRun, tmp_path: Path) -> Path:
    return shutil.copytree(finished.path, tmp_path / "another name")


def test_rocks_do_not_depend_on_where_the_run_lies(finished: FinishedRun, copy: Path):
    (copy / "rocks.json").unlink()
    succeed("find", copy)
    assert (copy / "rocks.json").read_bytes() == (finished.path / "rocks.json").read_bytes()


ACTING = "\x1b[2J\u202e\x9b31m[bold]"
"""A name that clears the screen, turns the line round and is markup."""


def test_a_name_acts_on_no_terminal(finished: FinishedRun, tmp_path: Path):
    run = shutil.copytree(finished.path, tmp_path / f"run{ACTING}")
    outcomes = [succeed("find", run), rocktokens("find", f"{run}-none")]
    outcomes += [rocktokens("find", run, "--set", setting) for setting in (f"find.{ACTING}=1", f"find.k={ACTING}")]
    assert [outcome.code for outcome in outcomes] == [0, 2, 2, 2]
    for outcome in outcomes:
        said = outcome.stdout + outcome.stderr
        assert not set(ACTING[:1] + "\u202e\x9b") & set(said)
        assert "\\u001b[2J\\u202e\\u009b31m[bold]" in said.replace("\\x1b", "\\u001b").replace("\\x9b", "\\u009b")


def test_the_prompts_are_split_by_the_seed_of_the_run(finished: FinishedRun, copy: Path):
    assert finished.outcomes["find"].record["criterion"]["seed"] == derive_seed(1, "split")
    RunDir(copy).drop(["config.toml"])
    assert succeed("find", copy, "--json").record["criterion"]["seed"] == 0


def test_the_library_call_gives_the_same_bytes(finished: FinishedRun, copy: Path, tmp_path: Path):
    find_rocks(TraceStore(copy)).save(tmp_path / "rocks.json")
    assert (tmp_path / "rocks.json").read_bytes() == (finished.path / "rocks.json").read_bytes()
    text = (copy / "config.toml").read_text(encoding="utf-8")
    RunDir(copy).commit_text("config.toml", re.sub(r"(\[find\]\n(?:.*\n)*?)k = .*\n", r'\1k = "auto"\n', text))
    succeed("find", copy)
    find_rocks(TraceStore(finished.path), k="auto").save(tmp_path / "rocks.json")
    assert (tmp_path / "rocks.json").read_bytes() == (copy / "rocks.json").read_bytes()
    find_rocks(TraceStore(copy), k="auto", gamma=0.9).save(tmp_path / "rocks.json")
    succeed("find", copy, "--k", "auto", "--set", "find.gamma=0.9")
    assert (tmp_path / "rocks.json").read_bytes() == (copy / "rocks.json").read_bytes()


def test_a_replay_that_was_interrupted_is_refused(copy: Path):
    run = RunDir(copy)
    parts = [entry.path for entry in run.files("traces/checkpoint=2/")]
    run.drop(parts[-1:])
    refuse(
        "find", copy, naming=("the replay is not finished (checkpoint 2 of 0, 2, 4 has ", "`rocktokens trace` again")
    )
    run.drop(parts[:-1])
    refuse("find", copy, naming=("(checkpoint 2 of 0, 2, 4 has no traces)", "`rocktokens trace` again"))
    assert succeed("find", copy, "--reference", "4", "--baseline", "0", "--json").record["criterion"]["reference"] == 4


@pytest.mark.parametrize("option", ["--threads", "--show"])
def test_counts_are_at_least_one(finished: FinishedRun, option: str):
    outcome = rocktokens("find", finished.path, option, "0")
    assert outcome.code == 2 and f"Invalid value for '{option}'" in outcome.stderr


def test_the_table_says_which_prompts_its_numbers_are_of(finished: FinishedRun):
    shown = succeed("find", finished.path, "--show", "3", "--verbose").stdout
    assert "Held out: mean kl on prompts that did not select the rocks." in " ".join(shown.split())
    assert "measured on the held-out half (4 prompts), with 95 % intervals over prompts" in " ".join(shown.split())


def kept_by_type(store: TraceStore, prompts: list[str]) -> pd.DataFrame:
    """Frequency, kl and the share of it that is left, by type, over the rows of some prompts."""
    rows = (store.table(step).to_pandas() for step in (4, 0))
    now, before = (frame[frame["prompt_id"].isin(prompts)] for frame in rows)
    frame = pd.DataFrame({"freq": now.groupby("token_id").size(), "kl": now.groupby("token_id")["kl"].sum()})
    return frame.assign(kept=frame["kl"] / before.groupby("token_id")["kl"].sum())


def test_movement_is_measured_on_prompts_that_did_not_choose_the_rocks(finished: FinishedRun):
    run, rocks = RunDir(finished.path), RockSet.load(finished.path / "rocks.json")
    movement, types = measure_movement(run, rocks)
    store = TraceStore(run)
    everyone = sorted(store.table(4).to_pandas()["prompt_id"].unique())
    held_out = split_prompts(everyone, 0.5, derive_seed(1, "split")).measuring
    assert held_out is not None and len(held_out) == 4
    frame = kept_by_type(store, held_out)
    never = [token.id for token in rocks.tokens if token.label == "stuck" and token.held_out_label == "stuck"]
    unmoved = frame[np.isin(frame.index, never)]
    assert movement.unmoved_rocks == len(unmoved) == len(never) > 0 and (unmoved["kept"] > KEPT).all()
    assert movement.unmoved_token_share == pytest.approx(unmoved["freq"].sum() / frame["freq"].sum())
    assert movement.unmoved_kl_share == pytest.approx(unmoved["kl"].sum() / frame["kl"].sum(), rel=1e-5)
    assert types["freq"].sum() == frame["freq"].sum() < kept_by_type(store, everyone)["freq"].sum()
    assert str(movement_table(types, 3, movement.prompts).title).endswith("held-out prompts")


def test_movement_without_held_out_prompts_says_so(copy: Path):
    succeed("find", copy, "--set", "find.split=1")
    movement, types = measure_movement(RunDir(copy), RockSet.load(copy / "rocks.json"))
    assert movement.prompts == "all prompts"
    assert types["freq"].sum() == TraceStore(copy).rows(4)


def measured(accuracy: float) -> EvaluationRecord:
    return EvaluationRecord(
        *("wordmath", accuracy, 10, 1, 10, (0.0, 1.0), None, 3.0, 0.0, 1.0, 0, [], [], []), name="step", settings={}
    )


def test_the_answer_names_its_prompts_and_does_not_take_a_fall_for_granted(capsys: pytest.CaptureFixture[str]):
    movement = Movement(0.5, 0.6, "held-out prompts", 3, 0.5, 0.5, 0.5)
    print_answer([measured(share) for share in (0.9, 0.4, 0.5)], movement, Path("runs/rising"))
    answer = " ".join(capsys.readouterr().out.split())
    assert "its on-policy kl went from 0.500 to 0.600 (+20 %)" in answer
    assert "held-out prompts: training never moved 3 of the rocks (stuck on both halves of the prompts)" in answer


# One screen


def test_one_screen_says_what_it_comes_to(finished: FinishedRun, copy: Path):
    shown, summary = succeed("find", copy).stdout, finished.outcomes["find"].record["summary"]
    told = " ".join(shown.split())
    assert len(shown.splitlines()) <= 40 and told.startswith("8 prompts are too few to find rocks: trace at least 40")
    for name, words in (("token_share", "of the tokens and hold"), ("kl_share", "of the loss that is left")):
        low, high = summary["intervals"][name]
        assert f"{100 * summary[name]:.1f} % [{100 * low:.1f}, {100 * high:.1f}] {words}" in told
    assert f"--set 'run.directory=\"{copy}\"' --restart --set trace.num_prompts=40" in shown
    assert (
        "Did training move them?" not in shown
        and "The first 2 of 10 rocks" in succeed("find", copy, "--show", "2").stdout
    )


# The analysis


def test_json_has_everything_that_is_printed(finished: FinishedRun):
    record = finished.outcomes["find"].record
    analysis = record["analysis"]
    assert analysis == json.loads((finished.path / "find.json").read_text(encoding="utf-8"))
    parts = {"funnel", "persistence", "trajectory", "cutoff", "sample_size", "selectors", "sensitivity"}
    described = {"categories", "positions", "controls", "schema_version", "criterion", "source"}
    assert parts | described == analysis.keys()
    assert (analysis["criterion"], analysis["source"]) == (record["criterion"], record["source"])
    assert set(record["summary"]["intervals"]) >= {"token_share", "kl_share", "grad_share", "token_share_median"}
    shares = {name: record["summary"][name] for name in ("token_share", "kl_share", "grad_share")}
    assert all(low <= shares[name] <= high for name in shares for low, high in [record["summary"]["intervals"][name]])
    assert {row["parameter"] for row in analysis["sensitivity"]} == {
        *("stage", "require", "min_prompts", "joint", "exclude_top_freq")
    }
    assert {(row["checkpoint"], row["half"]) for row in analysis["trajectory"]} == {
        (step, half) for step in (0, 2, 4) for half in ("selection half", "held-out half")
    }
    rocks = {
        i
        for i, group in zip(analysis["funnel"]["token_id"], analysis["funnel"]["group"], strict=True)
        if group == "rock"
    }
    assert rocks == {token["id"] for token in record["tokens"]}


def test_the_terminal_answers_in_words(finished: FinishedRun):
    shown = " ".join(succeed("find", finished.path, "--verbose").stdout.split())
    for words in (
        "of the loss that is left (held-out half, 4 prompts, 95 % intervals)",
        "Rocks are the token types that hold the most loss (kl to the teacher, in nats) at checkpoint",
        "P(K): how often the type is among the first K when prompts are resampled",
        "mean kl (nats)",
        "occurrences (log scale)",
        "Did training move them?",
        "regression to the mean",
        "Coverage: share of all kl that the top K hold",
        "1.00 means the same rocks",
        "Is there anything to compare them with?",
    ):
        assert words in shown


def test_figures_are_part_of_the_run(finished: FinishedRun):
    for name in ("funnel", "cutoff", "loss", "sensitivity"):
        assert (finished.path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_k_can_be_left_to_the_data(copy: Path):
    record = succeed("find", copy, "--k", "auto", "--json").record
    assert record["criterion"]["k"] == "auto"
    assert len(record["tokens"]) == record["summary"]["k"] == record["analysis"]["cutoff"]["auto"]["k"]
    refuse("find", copy, "--k", "many", naming=("find.k", "many"))


def test_the_score_stage_needs_no_contexts(copy: Path):
    record = succeed("find", copy, "--set", "find.stage=score", "--json").record
    assert {token["ccr"] for token in record["tokens"]} == {None}
    assert "P(K)" in succeed("find", copy, "--set", "find.stage=score").stdout


def test_contexts_can_be_the_students_states(copy: Path):
    alike = changed("find.gamma=0.95", "find.stage=context")
    by_state = succeed("find", copy, *alike, "--set", "find.encoder=hidden", "--json").record
    assert by_state["criterion"]["encoder"] == "hidden"
    assert "window" not in {row["parameter"] for row in by_state["analysis"]["sensitivity"]}
    by_words = succeed("find", copy, *alike, "--json").record
    number = {token["id"]: token["n_persistent"] for token in by_words["tokens"]}
    assert all(number[token["id"]] == token["n_persistent"] for token in by_state["tokens"] if token["id"] in number)
    assert [t["ccr"] for t in by_state["tokens"]] != [t["ccr"] for t in by_words["tokens"]]
    run = RunDir(copy)
    run.drop([entry.path for entry in run.files("rollouts/probe/")])
    refuse("find", copy, *alike, "--set", "find.encoder=hidden", naming=("find.encoder = 'hidden'", "use 'embeddings'"))


def test_a_student_that_is_no_folder_lends_its_embeddings(finished: FinishedRun, tmp_path: Path):
    run = tmp_path / "by id"
    students = f'["pebbles-student", "{finished.path}/checkpoints/step-4"]'
    options = changed(f"run.directory={json.dumps(str(run))}", f"trace.checkpoints={students}")
    succeed("trace", finished.config, *options)
    assert succeed("find", run, "--reference", "0", "--json").record["criterion"]["reference"] == 0


def test_another_student_of_the_same_number_is_not_taken(copy: Path):
    other = shutil.copytree(copy / "checkpoints/step-2", copy.parent / "students/step-4")
    students = f'["{copy}/checkpoints/step-0", "{other}"]'
    options = changed(f"run.directory={json.dumps(str(copy))}", f"trace.checkpoints={students}")
    succeed("trace", copy / "config.toml", "--restart", *options)
    by_context = ("find", copy, "--set", "find.stage=context")
    refuse(*by_context, naming=("checkpoint 4 was traced with another student", "find.stage = 'score'"))
    succeed("find", copy)


def test_without_a_student_the_sentence_says_what_to_do(copy: Path):
    shutil.rmtree(copy / "checkpoints")
    refuse("find", copy, "--set", "find.stage=context", naming=("input embeddings of the student", "stage='score'"))
    succeed("find", copy)


# Two runs


def test_two_checkpoints_side_by_side(copy: Path):
    before = snapshot(copy)
    record = succeed("find", f"{copy}@2", copy, "--compare", "--json").record
    assert (record["a"], record["b"]) == (f"{copy}@2", str(copy))
    assert 0 <= record["jaccard"] <= 1 and record["n_rocks"] == [10, 10]
    same = succeed("find", copy, copy, "--compare", "--json").record
    assert same["jaccard"] == 1 and same["only_a"] == []
    shown = " ".join(succeed("find", f"{copy}@2", copy, "--compare", "--show", "3").stdout.split())
    assert "Jaccard of the rocks" in shown and "by chance" in shown and "what moved most of" in shown
    assert snapshot(copy) == before


def test_comparing_needs_two_runs_of_one_vocabulary(copy: Path, tmp_path: Path):
    refuse("find", copy, "--compare", naming=("--compare takes two runs, 1 given",))
    refuse("find", copy, copy, naming=("find takes one run, 2 were given", "--compare"))
    refuse("find", f"{copy}@late", copy, "--compare", naming=("checkpoint 'late'", "give a step"))
    refuse("find", f"{copy}@3", copy, "--compare", naming=("reference = 3", "0, 2, 4"))
    refuse("find", copy, tmp_path / "nowhere", "--compare", naming=("nowhere", "not a run directory"))
    other = shutil.copytree(copy, tmp_path / "other")
    RunDir(other).update_manifest(tokenizer_sha256="0" * 64)
    refuse("find", copy, other, "--compare", naming=("different tokenizers", "one vocabulary"))
