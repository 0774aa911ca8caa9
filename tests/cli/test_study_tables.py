"""What a study reads like: the numbers of the record, hostile names harmless, a dash for what is not known."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from rocktokens.cli import study_tables, tables
from rocktokens.cli.study_tables import print_study
from rocktokens.report.tables import comparison_table
from rocktokens.studies.decisions import verdict_lines
from rocktokens.studies.records import Arm, Comparison, CurvePoint, RunAccuracy, StudyResult

HOSTILE = ["[bold]", "[/]", "\\[", "[red]x", ":smile:", "\x1b[31m", "\u202e"]


def make_arm(name: str, end: float, facts: dict[str, float]) -> Arm:
    points = [CurvePoint(0, 0.0, 0.0, 0.55, (0.5, 0.6)), CurvePoint(64, 184320.0, 171.4, end, (end - 0.03, end + 0.04))]
    runs = [RunAccuracy(seed, 0, [0, 64], [0, 184320], [0.0, 171.4], [0.55, end]) for seed in range(3)]
    return Arm(name, points, runs, facts)


def make_result(first: str = "rock freeze") -> StudyResult:
    facts = {"head_compute_saved": 0.213, "weight_dropped_share": 0.18, "mean_response_length": 60.4}
    numbers = (64.0, -0.012, (-0.029, 0.004), 0.006, 9.0, 0.06, 0.06, (0.0112, 0.0298))
    comparison = Comparison(first, "uniform", "equal_steps", *numbers, verdict="undecided")
    return StudyResult(
        baseline="uniform",
        alpha=0.05,
        margin=None,
        target_accuracy=0.7,
        n_pairs=1,
        seeds=[0, 1, 2],
        n_prompts=500,
        arms=[make_arm("uniform", 0.722, {}), make_arm(first, 0.71, facts)],
        comparisons=[comparison],
        notes=["a note on [limits]"],
    )


def printed(result: StudyResult, monkeypatch: pytest.MonkeyPatch, width: int = 112) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, emoji=False, force_terminal=True, color_system=None)
    for module in (study_tables, tables):
        monkeypatch.setattr(module, "output", console)
    print_study(result)
    return file.getvalue()


def row_of(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ") and " vs " not in line]
    return line.removeprefix(name).replace(" %", "%").replace(", ", ",").split()


def test_arms_show_what_they_reached_and_cost(monkeypatch: pytest.MonkeyPatch):
    text = printed(make_result(), monkeypatch)
    known = ["3", "55.0%", "71.0%", "[68.0,75.0]", "184,320", "171", "60", "18.0%", "21.3%"]
    assert row_of(text, "rock freeze") == known
    assert row_of(text, "uniform") == ["3", "55.0%", "72.2%", "[69.2,76.2]", "184,320", "171", "—", "—", "—"]
    assert "Accuracy after 64 steps on 500 prompts, means over 3 seeds with 95 % intervals." in " ".join(text.split())


def test_a_narrow_screen_keeps_what_matters(monkeypatch: pytest.MonkeyPatch):
    text = printed(make_result(), monkeypatch, width=80)
    assert row_of(text, "rock freeze") == ["55.0%", "71.0%", "[68.0,75.0]", "184,320", "171", "21.3%"]


def test_verdicts_and_notes_stay_on_one_line_each(monkeypatch: pytest.MonkeyPatch):
    result = make_result()
    lines = printed(result, monkeypatch, width=60).splitlines()
    assert verdict_lines(result)[0] in lines
    assert "a note on [limits]" in lines


def test_the_level_is_that_of_all_pairs(monkeypatch: pytest.MonkeyPatch):
    assert "95 % intervals for one pair, within each way to compare; denominator all" in printed(
        make_result(), monkeypatch
    )
    several = replace(make_result(), n_pairs=4, alpha=0.1, seeds=[3], denominator="kept")
    text = " ".join(printed(several, monkeypatch).split())
    assert text.count("enominator kept") + text.count("Denominator: kept") == 2
    assert "90 % intervals for the 4 pairs together" in text and "means over 1 seed with" in text


def with_collapse(result: StudyResult) -> StudyResult:
    """The same study; two of three runs of the first arm of its pair end below their start."""
    baseline, arm = result.arms
    runs = [replace(run, accuracy=[0.55, 0.1]) if run.seed else run for run in arm.runs]
    return replace(result, arms=[baseline, replace(arm, runs=runs)]).mark_collapsed()


def test_collapsed_runs_come_first_and_their_means_are_marked(monkeypatch: pytest.MonkeyPatch):
    text = printed(with_collapse(make_result()), monkeypatch)
    assert text.startswith("2 of 3 runs of rock freeze collapsed (66.7 % [9.4, 99.2] ended below their start)")
    first, second = text.split("Verdicts: ")
    assert row_of(first, "rock freeze") == ["3", "2", "66.7%", "[9.4,99.2]"]
    assert row_of(first, "uniform") == ["3", "0", "0.0%", "[0.0,70.8]"]
    assert row_of(second, "rock freeze")[:3] == ["55.0%", "71.0%", "(unreliable)"] and "…" not in text
    assert row_of(second, "uniform")[:3] == ["55.0%", "72.2%", "[69.2,76.2]"]
    narrow = printed(with_collapse(make_result()), monkeypatch, width=80).split("Verdicts: ")[1]
    assert row_of(narrow, "rock freeze") == ["55.0%", "71.0%", "(unreliable)", "[68.0,75.0]", "171", "21.3%"]
    assert "unreliable mean, 2 of 3 runs of rock freeze collapsed; undecided" in text
    assert "unreliable" not in printed(make_result(), monkeypatch)


def test_the_comparisons_of_collapsed_runs_are_marked():
    table = comparison_table(with_collapse(make_result()))
    assert table.rows[0][2].text == "−1.2 [−2.9, +0.4] (unreliable)"
    assert table.records[0]["unreliable"] is True and "where a run collapsed" in " ".join(table.notes)


def test_roles_are_said_where_some_pairs_are_exploratory(monkeypatch: pytest.MonkeyPatch):
    own = make_result().comparisons[0]
    pairs = [replace(own, role="primary"), replace(own, first="uniform", second="rock freeze", role="exploratory")]
    text = " ".join(printed(replace(make_result(), comparisons=pairs, n_pairs=4, n_primary=1), monkeypatch).split())
    assert "95 % intervals for the primary pair, and for the 3 exploratory pairs together, within" in text
    assert "uniform vs rock freeze (exploratory): " in text


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_of_an_arm_is_taken_for_markup(name: str, monkeypatch: pytest.MonkeyPatch):
    text = printed(make_result(name), monkeypatch)
    shown = {"\x1b[31m": "\\u001b[31m", "\u202e": "\\u202e"}.get(name, name)
    assert f"{shown} vs uniform: −1.2 points" in text
    assert row_of(text, shown)[1] == "55.0%"
    assert "\x1b[31m" not in text and "\u202e" not in text


def test_controls_show_what_they_marked_and_how_well_that_matches(monkeypatch: pytest.MonkeyPatch):
    assert "How well the controls match" not in printed(make_result(), monkeypatch)
    marked = {"control_token_share": 0.3, "control_rock_overlap": 0.31}
    matched = {"control_token_share": 0.52, "control_rock_overlap": 0.4, "control_kl_ratio": 1.01}
    arms = [make_arm("by number", 0.7, marked), make_arm("by kl", 0.7, {**matched, "control_grad_norm_ratio": 0.6})]
    result = replace(make_result(), teacher="top-20 + tail")
    table = printed(replace(result, arms=[*result.arms, *arms]), monkeypatch).split("How well the controls match")[1]
    assert "Teacher: top-20 + tail." in table
    assert row_of(table, "by number") == ["30.0%", "31.0%", "—", "—"]
    assert row_of(table, "by kl") == ["52.0%", "40.0%", "101.0%", "60.0%"]
    assert "rock freeze " not in table and "uniform" not in table
