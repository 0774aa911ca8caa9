"""``find`` is the same wherever a run lies and refuses half a replay; what it says of rocks is of other prompts."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import FinishedRun, refuse, rocktokens, succeed

from rocktokens.cli.demo import KEPT, _print_answer, measure_movement, movement_table
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.stats.rocks import split_prompts
from rocktokens.traces.store import TraceStore
from rocktokens.types import RockSet


@pytest.fixture
def copy(finished: FinishedRun, tmp_path: Path) -> Path:
    return shutil.copytree(finished.path, tmp_path / "another name")


def test_rocks_do_not_depend_on_where_the_run_lies(finished: FinishedRun, copy: Path):
    (copy / "rocks.json").unlink()
    succeed("find", copy)
    assert (copy / "rocks.json").read_bytes() == (finished.path / "rocks.json").read_bytes()


def test_the_prompts_are_split_by_the_seed_of_the_run(finished: FinishedRun, copy: Path):
    assert finished.outcomes["find"].record["criterion"]["seed"] == derive_seed(1, "split")
    RunDir(copy).drop(["config.toml"])
    assert succeed("find", copy, "--json").record["criterion"]["seed"] == 0


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
    assert "top 3 rocks (freq, mean kl, score: selection half)" in succeed("find", finished.path, "--show", "3").stdout


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
    unmoved = frame[(frame["kept"] > KEPT) & np.isin(frame.index, rocks.ids)]
    assert movement["unmoved_rocks"] == len(unmoved) > 0
    assert movement["unmoved_token_share"] == pytest.approx(unmoved["freq"].sum() / frame["freq"].sum())
    assert movement["unmoved_kl_share"] == pytest.approx(unmoved["kl"].sum() / frame["kl"].sum(), rel=1e-5)
    assert types["freq"].sum() == frame["freq"].sum() < kept_by_type(store, everyone)["freq"].sum()
    assert str(movement_table(types, 3, movement["prompts"]).title).endswith("held-out prompts")


def test_movement_without_held_out_prompts_says_so(copy: Path):
    succeed("find", copy, "--set", "find.split=1")
    movement, types = measure_movement(RunDir(copy), RockSet.load(copy / "rocks.json"))
    assert movement["prompts"] == "all prompts"
    assert types["freq"].sum() == TraceStore(copy).rows(4)


def test_the_answer_names_its_prompts_and_does_not_take_a_fall_for_granted(capsys: pytest.CaptureFixture[str]):
    shares = dict.fromkeys(("unmoved_token_share", "unmoved_kl_share", "unmoved_digit_token_share"), 0.5)
    movement = {"on_policy_kl_first": 0.5, "on_policy_kl_last": 0.6, "prompts": "held-out prompts", "unmoved_rocks": 3}
    _print_answer([{"accuracy": share} for share in (0.9, 0.4, 0.5)], movement | shares, RunDir("runs/rising"))
    answer = " ".join(capsys.readouterr().out.split())
    assert "its on-policy kl went from 0.500 to 0.600 (+20 %)" in answer
    assert "held-out prompts: 3 of the rocks kept more than 75 % of their kl" in answer
