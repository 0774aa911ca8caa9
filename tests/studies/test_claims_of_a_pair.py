"""How a pair is held against the claims: the side of an inequality an interval lies on, and what bans and arms say."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from docs_scripts import docs_script
from knockout_records import make_sweep
from rocktokens.knockout.records import Ban, BanChanges, Knockout
from rocktokens.run_dir import RunDir
from rocktokens.studies.records import Arm, CollapsedRuns, Comparison, RunAccuracy, StudyResult
from rocktokens.types import RockSet, RockToken

claims = docs_script("claims")
UNCHANGED = BanChanges(0, 0, None, None, None, None, [], [], [])


def ban(verdict: Any, q: float = 1.0, role: Any = "tested") -> Knockout:
    own = Ban((7,), "So", role)
    return Knockout(own, 0.0, (0.0, 0.0), q, q, verdict, "neutral", 0.04, (0.0, 0.0), 200, None, UNCHANGED)


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.51, 0.9), "supported"),
        ((0.1, 0.49), "contradicted"),
        ((0.5, 0.9), "inconclusive"),
        ((0.1, 0.5), "inconclusive"),
        ((0.2, 0.8), "inconclusive"),
        (None, "inconclusive"),
    ],
)
def test_only_a_whole_interval_decides(interval: Any, verdict: str) -> None:
    assert claims.side(interval, 0.5) == verdict


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["neutral"] * 9 + ["pillar"], "supported"),
        (["neutral"] * 8 + ["pillar"] * 2, "inconclusive"),  # [44, 97] %
        (["pillar"] * 8 + ["stumbling", "neutral"], "contradicted"),
        (["undecided"] * 10, "inconclusive"),
    ],
)
def test_most_rocks_must_be_neutral(verdicts: list[str], expected: str) -> None:
    assert claims.neutral(make_sweep([ban(own) for own in verdicts])).verdict == expected


def test_placebos_and_correction_are_counted_apart() -> None:
    sweep = make_sweep([ban("pillar", 0.01), ban("pillar", 0.2), ban("neutral"), ban("pillar", role="matched")])
    because = claims.neutral(sweep).because
    assert "of 3 rocks banned one by one 1 are neutral" in because
    assert "2 change the accuracy (1 of them after correction)" in because
    assert "of 1 equally frequent placebos 1 change it" in because


def test_every_rock_has_all_columns(tmp_path: Path) -> None:
    """A rock that was banned, and one that was not."""
    run = RunDir(tmp_path / "run")
    tokens = [RockToken(id_, "a", rank, 9, 1.5, 13.5, 0.5, 6.75, "operator") for rank, id_ in enumerate((7, 8), 1)]
    run.commit("rocks.json", RockSet("", {}, {}, {}, tokens).save)
    run.commit("knockout.json", make_sweep([ban("neutral")]).save)
    claims.write_rocks(run, tmp_path / "rocks.csv")
    with (tmp_path / "rocks.csv").open(newline="", encoding="utf-8") as file:
        banned, free = list(csv.DictReader(file))
    assert None not in free.values() and {free[name] for name in claims.BANNED} == {""}
    assert (banned["verdict"], banned["change"], free["token_id"]) == ("neutral", "0.0", "8")


def test_rocks_of_a_run_without_bans_are_written_too(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    token = RockToken(7, "a", 1, 9, 1.5, 13.5, 0.5, 6.75, "operator")
    run.commit("rocks.json", RockSet("", {}, {}, {}, [token]).save)
    claims.write_rocks(run, tmp_path / "rocks.csv")
    with (tmp_path / "rocks.csv").open(newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert (row["token_id"], row["category"]) == ("7", "operator")
    assert {row[name] for name in claims.BANNED} == {""}


STEPS = Comparison(
    "rock freeze", "uniform", "equal_steps", 32, -0.01, (-0.03, 0.01), 0.01, 4, 0.3, 0.3, (0.02, 0.05), "undecided"
)


def study(**changes: Any) -> StudyResult:
    """A study of two arms, one of whose runs collapsed."""
    runs = [RunAccuracy(seed, 0, [], [], [], []) for seed in range(5)]
    arms = [Arm(name, [], runs, {}, CollapsedRuns(1, 5, (0.0, 1.0))) for name in ("uniform", "rock freeze")]
    reached = replace(STEPS, kind="steps_to_accuracy", at=0.8, **changes)
    return StudyResult("uniform", 0.05, None, 0.8, 1, [0], 500, arms, [replace(STEPS, **changes), reached])


@pytest.mark.parametrize(
    ("verdict", "free", "faster"),
    [
        ("worse", "contradicted", "contradicted"),
        ("equivalent", "supported", "inconclusive"),
        ("better", "supported", "supported"),
        ("undecided", "inconclusive", "inconclusive"),
    ],
)
def test_the_verdicts_of_a_study_decide_about_freezing(verdict: Any, free: str, faster: str) -> None:
    judged = claims.study_claims(study(verdict=verdict))
    assert [own.verdict for own in judged] == [free, faster]
    assert "1 of 5 runs collapsed" in judged[0].because
    assert ("smallest effect detectable: [+2.0, +5.0] points" in judged[0].because) == (verdict == "undecided")


def test_a_study_without_frozen_rocks_says_nothing_of_them() -> None:
    assert claims.study_claims(study(first="tip")) == []


@pytest.mark.parametrize(
    ("never", "who", "verdict"),
    [
        ((5, 2), "rock freeze", "contradicted"),
        ((2, 5), "uniform", "inconclusive"),
        ((5, 5), "uniform", "inconclusive"),
    ],
)
def test_an_accuracy_that_the_baseline_never_reaches_decides_nothing(never: Any, who: str, verdict: str) -> None:
    result = study()
    unreached = replace(result.comparisons[1], difference=None, interval=None, verdict="unreached", never=never)
    own = claims.study_claims(replace(result, comparisons=[result.comparisons[0], unreached]))[1]
    assert (own.because, own.verdict) == (f"no run of {who} reaches 80.0 %", verdict)


def test_a_study_without_an_accuracy_to_reach_is_judged_without_it() -> None:
    result = study()
    judged = claims.study_claims(replace(result, comparisons=result.comparisons[:1]))
    assert [own.verdict for own in judged] == ["inconclusive", "inconclusive"]
    assert "no accuracy to reach" in judged[1].because
