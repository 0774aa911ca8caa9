"""The figures of a study: valid Vega-Lite that holds the numbers of the record, and says what it shows."""

from dataclasses import replace
from typing import Any

import pytest

from rocktokens.report.charts.save import chart_bytes
from rocktokens.report.charts.study_charts import (
    comparison_records,
    comparisons_chart,
    curve_records,
    curves_chart,
    study_charts,
)
from rocktokens.studies.records import Arm, Comparison, CurvePoint, Kind, RunAccuracy, StudyResult, StudyVerdict

PNG = b"\x89PNG\r\n\x1a\n"


def make_arm(name: str, accuracy: list[float], draws: int = 1) -> Arm:
    steps = [8 * place for place in range(len(accuracy))]
    points = [
        CurvePoint(step, 0.0, 0.0, mean, (mean - 0.1, mean + 0.2)) for step, mean in zip(steps, accuracy, strict=True)
    ]
    runs = [
        RunAccuracy(seed, draw, steps, [0] * len(steps), [0.0] * len(steps), [mean + 0.01 * seed for mean in accuracy])
        for seed in (0, 1)
        for draw in range(draws)
    ]
    return Arm(name, points, runs, {})


def make_comparison(kind: Kind, difference: float, verdict: StudyVerdict, first: str = "freeze") -> Comparison:
    interval = (difference - 0.5, difference + 0.25)
    return Comparison(first, "uniform", kind, 16.0, difference, interval, 0.1, 2.0, 0.5, 0.5, (0.1, 0.25), verdict)


def make_study() -> StudyResult:
    return StudyResult(
        baseline="uniform",
        alpha=0.1,
        margin=None,
        target_accuracy=None,
        n_pairs=2,
        seeds=[0, 1],
        n_prompts=500,
        denominator="kept",
        arms=[make_arm("freeze", [0.5, 0.6]), make_arm("uniform", [0.5, 0.7]), make_arm("a\x1bb", [0.5, 0.4], 2)],
        comparisons=[
            make_comparison("equal_steps", 0.75, "better"),
            make_comparison("equal_tokens", -0.75, "worse"),
            make_comparison("equal_seconds", 0.0, "equivalent"),
            make_comparison("steps_to_accuracy", 12.0, "worse"),
            make_comparison("equal_steps", 0.0, "undecided", first="a\x1bb"),
        ],
    )


def test_ends_that_were_cut_have_no_end_and_what_was_not_reached_no_row():
    study = make_study()
    cut, unreached = replace(study.comparisons[0], cut=(True, False)), replace(study.comparisons[3], interval=None)
    (own,) = comparison_records(replace(study, comparisons=[cut, unreached]))
    assert (own["low"], own["low_end"], own["high"], own["high_end"]) == (25.0, None, 100.0, 100.0)
    chart = comparisons_chart([own])
    assert chart_bytes(chart, "svg").count(b'aria-roledescription="tick"') == 1
    assert "beyond what is possible" in subtitle(chart)


def test_means_of_collapsed_runs_and_exploratory_pairs_are_marked():
    study = make_study()
    study = replace(study, comparisons=[replace(own, role="exploratory") for own in study.comparisons]).mark_collapsed()
    means, _ = curve_records(study)
    records = comparison_records(study)
    assert {point["panel"] for point in means} == {"freeze", "a\\u001bb (unreliable)"}
    assert {own["pair"] for own in records} == {
        "freeze vs uniform (exploratory)", "a\\u001bb vs uniform (exploratory) (unreliable)"
    }  # fmt: skip
    assert "where a run collapsed" in subtitle(comparisons_chart(records))
    assert "where a run collapsed" not in subtitle(comparisons_chart(records[:1]))


def data_of(chart: Any) -> list[dict[str, Any]]:
    """The records a chart of panels is drawn from; altair checks the spec against the schema."""
    spec = chart.to_dict()
    return spec["datasets"][spec["data"]["name"]]


def subtitle(chart: Any) -> str:
    return "\n".join(chart.to_dict()["title"]["subtitle"])


def test_every_figure_can_be_drawn_and_says_what_it_is_of():
    charts = {name: figure.chart for name, figure in study_charts(make_study(), "studies/paper").items()}
    assert list(charts) == ["study_curves", "study_comparisons"]
    for chart in charts.values():
        assert subtitle(chart).startswith("studies/paper, 2 seeds, 500 prompts, denominator kept")
        assert "90 % intervals" in subtitle(chart)
        assert chart_bytes(chart, "png").startswith(PNG)
        assert chart_bytes(chart, "svg") == chart_bytes(chart, "svg")
    assert "the baseline is uniform" in subtitle(charts["study_curves"])


def test_every_arm_has_a_panel_with_the_baseline_in_it():
    means, runs = curve_records(make_study())
    shown = data_of(curves_chart(means, runs))
    of_means = [point for point in shown if point["run"] is None]
    assert [(point["panel"], point["line"], point["step"], point["accuracy"]) for point in of_means] == [
        ("freeze", "baseline", 0, 0.5),
        ("freeze", "baseline", 8, 0.7),
        ("freeze", "this arm", 0, 0.5),
        ("freeze", "this arm", 8, 0.6),
        ("a\\u001bb", "baseline", 0, 0.5),
        ("a\\u001bb", "baseline", 8, 0.7),
        ("a\\u001bb", "this arm", 0, 0.5),
        ("a\\u001bb", "this arm", 8, 0.4),
    ]
    assert (of_means[1]["low"], of_means[1]["high"]) == pytest.approx((0.6, 0.9))
    of_runs = [point for point in shown if point["run"] is not None]
    assert len({point["run"] for point in of_runs if point["panel"] == "a\\u001bb"}) == 2 + 4
    freeze = [point["accuracy"] for point in of_runs if (point["panel"], point["line"]) == ("freeze", "this arm")]
    assert freeze == pytest.approx([0.5, 0.6, 0.51, 0.61])


def test_a_study_of_the_baseline_alone_has_its_panel():
    study = make_study()
    means, _ = curve_records(replace(study, arms=study.arms[1:2]))
    assert {(point["panel"], point["line"]) for point in means} == {("uniform", "baseline")}


def test_differences_are_in_points_and_in_steps():
    records = comparison_records(make_study())
    assert data_of(comparisons_chart(records)) == records
    assert [(own["pair"], own["panel"], own["difference"], own["low"], own["high"]) for own in records] == [
        ("freeze vs uniform", "equal steps (points)", 75.0, 25.0, 100.0),
        ("freeze vs uniform", "equal tokens (points)", -75.0, -125.0, -50.0),
        ("freeze vs uniform", "equal time (points)", 0.0, -50.0, 25.0),
        ("freeze vs uniform", "steps to an accuracy (steps)", 12.0, 11.5, 12.25),
        ("a\\u001bb vs uniform", "equal steps (points)", 0.0, -50.0, 25.0),
    ]


@pytest.mark.parametrize("chart", [curves_chart([], [], "study X"), comparisons_chart([], "study X")])
def test_without_data_a_figure_is_one_sentence(chart: Any):
    assert "study X" in subtitle(chart)
    assert chart_bytes(chart, "png").startswith(PNG)
