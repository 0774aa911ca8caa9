"""What comparisons are called, and how they read."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sample_curves import make_curve, make_study

from rocktokens.display.numbers import signed
from rocktokens.studies.comparison import compare
from rocktokens.studies.decisions import DecisionRule, StudySize, decide, few_seeds, study_notes, verdict_lines
from rocktokens.studies.records import Arm, CollapsedRuns, Comparison, Kind, StudyResult, StudyVerdict

OPEN = DecisionRule(alpha=0.025, margin=None, n_prompts=500)
WITH_MARGIN = DecisionRule(alpha=0.025, margin=0.02, n_prompts=500)


@pytest.mark.parametrize(
    ("kind", "interval", "rule", "verdict"),
    [
        ("equal_steps", (0.001, 0.02), OPEN, "better"),
        ("equal_tokens", (-0.02, -0.001), OPEN, "worse"),
        ("equal_seconds", (-0.02, 0.001), OPEN, "undecided"),
        ("equal_steps", (0.0, 0.02), OPEN, "undecided"),
        ("equal_steps", (0.0, 0.0), OPEN, "undecided"),
        ("steps_to_accuracy", (-9.0, -1.0), OPEN, "better"),
        ("steps_to_accuracy", (1.0, 9.0), OPEN, "worse"),
        ("steps_to_accuracy", (-0.01, 0.01), WITH_MARGIN, "undecided"),
        ("equal_steps", (-0.01, 0.02), WITH_MARGIN, "equivalent"),
        ("equal_steps", (-0.01, 0.021), WITH_MARGIN, "undecided"),
        ("equal_steps", (0.001, 0.01), WITH_MARGIN, "better"),
        # 100 prompts of which none differs say less than ±2 points: (1 − 0.02)^100 = 0.13.
        ("equal_steps", (0.0, 0.0), DecisionRule(0.025, 0.02, 100), "undecided"),
        ("equal_steps", (0.0, 0.0), DecisionRule(0.025, 0.02, 185), "equivalent"),
    ],
)
def test_verdicts_are_read_off_the_interval(
    kind: Kind, interval: tuple[float, float], rule: DecisionRule, verdict: StudyVerdict
):
    assert decide(kind, interval, rule) == verdict


def study_of(*comparisons: Comparison, **changes: object) -> StudyResult:
    arms = compare(make_study(), [], baseline="uniform").arms
    result = StudyResult("uniform", 0.05, None, 0.7, 1, [0, 1, 2], 500, arms, list(comparisons))
    return replace(result, **changes)


def comparison(kind: Kind = "equal_steps", **changes: object) -> Comparison:
    own = Comparison(
        first="freeze",
        second="uniform",
        kind=kind,
        at=64.0,
        difference=-0.012,
        interval=(-0.029, 0.004),
        standard_error=0.006,
        degrees_of_freedom=9.0,
        p=0.06,
        p_holm=0.12,
        detectable=(0.0112, 0.0298),
        verdict="undecided",
    )
    return replace(own, **changes)


def unreached(never: tuple[int, int], mean_steps: tuple[float, float]) -> Comparison:
    numbers = ("difference", "interval", "standard_error", "degrees_of_freedom", "p", "p_holm", "detectable")
    own = comparison("steps_to_accuracy", **dict.fromkeys(numbers), verdict="unreached", at=0.71)
    return replace(own, never=never, mean_steps=mean_steps, within=40)


STEPS = {"difference": -12.4, "interval": (-30.2, 5.1), "detectable": (14.0, 37.1), "within": 40, "at": 0.71}


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (
            comparison(),
            "freeze vs uniform: −1.2 points [−2.9, +0.4] at equal steps; undecided; "
            "smallest effect this study could detect: 1.1 to 3.0 points",
        ),
        (
            comparison(difference=0.021, interval=(0.004, 0.038), verdict="better"),
            "freeze vs uniform: +2.1 points [+0.4, +3.8] at equal steps; better",
        ),
        (
            comparison("equal_tokens", at=123456.4),
            "  −1.2 points [−2.9, +0.4] at equal tokens (123,456); undecided; "
            "smallest effect this study could detect: 1.1 to 3.0 points",
        ),
        (
            comparison("equal_seconds", at=170.2, verdict="worse", interval=(-0.03, -0.001)),
            "  −1.2 points [−3.0, −0.1] in equal time (170 s); worse",
        ),
        (
            comparison("steps_to_accuracy", **STEPS),
            "  −12 steps [−30, +5] to 71.0 % accuracy; undecided; "
            "smallest effect this study could detect: 14 to 37 steps",
        ),
        (
            comparison("steps_to_accuracy", **STEPS, never=(1, 2)),
            "  −12 steps [−30, +5] to 71.0 % accuracy; undecided; "
            "smallest effect this study could detect: 14 to 37 steps; not reached by 1 of 3 "
            "runs of freeze and 2 of 3 runs of uniform, which count with the last step: a lower bound for either arm",
        ),
        (
            comparison("steps_to_accuracy", **{**STEPS, "interval": (1.2, 26.0)}, verdict="worse", never=(1, 0)),
            "  −12 steps [+1, +26] to 71.0 % accuracy; worse; not reached by 1 of 3 runs of freeze, which count with "
            "the last step: a lower bound for that arm",
        ),
        (
            unreached((3, 0), (40.0, 31.4)),
            "  steps to 71.0 %: reached by none of 3 runs of freeze within 40 steps; by uniform after 31 on average",
        ),
        (
            unreached((1, 3), (40.0, 40.0)),
            "  steps to 71.0 %: reached by none of 3 runs of uniform within 40 steps; by 2 of 3 runs of freeze",
        ),
        (
            unreached((3, 3), (40.0, 40.0)),
            "  steps to 71.0 %: reached by none of 3 runs of freeze and none of 3 runs of uniform within 40 steps",
        ),
        (
            comparison(interval=(-1.0, 0.872), cut=(True, False), detectable=(1.0, 7.0)),
            "freeze vs uniform: −1.2 points [≤ −100.0, +87.2] at equal steps; undecided: with 3 seeds and one pair no "
            "difference could have been called",
        ),
        (
            comparison(difference=-0.0001, interval=(-0.0004, 1.0), cut=(False, True), detectable=(0.6, 1.2)),
            "freeze vs uniform: 0.0 points [0.0, ≥ +100.0] at equal steps; undecided; "
            "smallest effect this study could detect: 60.0 points or more",
        ),
        (
            comparison(difference=0.0, interval=(0.0, 0.0), standard_error=0.0, detectable=(0.0, 0.0)),
            "freeze vs uniform: 0.0 points [0.0, 0.0] at equal steps; undecided: no answer is right in one arm "
            "and wrong in the other",
        ),
    ],
)
def test_a_comparison_reads_as_one_line(own: Comparison, line: str):
    assert verdict_lines(study_of(own)) == [line]


def collapsed_arms(**counts: int) -> list[Arm]:
    """The arms of a study, with this many of three runs collapsed."""
    arms = compare(make_study(draws=1), [], baseline="uniform").arms
    return [replace(arm, collapsed=CollapsedRuns(counts.get(arm.name, 0), 3, (0.0, 1.0))) for arm in arms]


@pytest.mark.parametrize("verdict", ["better", "worse", "equivalent", "undecided"])
@pytest.mark.parametrize("kind", ["equal_steps", "equal_tokens", "equal_seconds", "steps_to_accuracy"])
def test_no_mean_of_collapsed_runs_is_judged_without_the_mark(kind: Kind, verdict: StudyVerdict):
    own = comparison(kind, verdict=verdict, unreliable=True)
    (line,) = verdict_lines(study_of(own, arms=collapsed_arms(freeze=2), margin=0.03))
    assert line.index("; unreliable mean, 2 of 3 runs of freeze collapsed; ") < line.index(f"; {verdict}")
    (line,) = verdict_lines(study_of(own, arms=collapsed_arms(freeze=2, uniform=1)))
    assert "2 of 3 runs of freeze and 1 of 3 runs of uniform collapsed" in line


def test_exploratory_pairs_say_so_and_older_files_do_not_say_what_was_detectable():
    (line,) = verdict_lines(study_of(comparison(role="exploratory")))
    assert line.startswith("freeze vs uniform (exploratory): −1.2 points")
    (line,) = verdict_lines(study_of(comparison(detectable=None)))
    assert line.endswith("at equal steps; undecided")


def test_fewer_than_six_seeds_are_a_warning_in_one_sentence():
    assert [few_seeds(n_seeds) is None for n_seeds in (1, 5, 6, 20)] == [False, False, True, True]
    assert few_seeds(5) == (
        "5 seeds cannot decide which arm is better: exact tests over seeds need at least 6 (study.seeds)"
    )
    assert str(few_seeds(1)).startswith("one seed cannot")


def test_equivalence_names_its_margin_and_one_seed_is_said():
    own = comparison(verdict="equivalent")
    (line,) = verdict_lines(study_of(own, margin=0.03, seeds=[7]))
    assert line.endswith("; equivalent within ±3.0; one seed: over prompts only")


def test_every_pair_has_a_line_with_its_name_and_three_below():
    result = compare(make_study(), [("freeze", "uniform"), ("control", "uniform")], baseline="uniform")
    lines = verdict_lines(result)
    assert len(lines) == 8
    assert [place for place, line in enumerate(lines) if " vs uniform: " in line] == [0, 4]
    assert all(line.startswith("  ") for place, line in enumerate(lines) if place % 4)


def test_a_margin_given_in_advance_can_make_arms_equivalent():
    curves = [make_curve("uniform", seed) for seed in range(3)]
    curves += [replace(curve, arm="freeze") for curve in curves]
    wide, narrow = (
        compare(curves, [("freeze", "uniform")], baseline="uniform", margin=margin) for margin in (0.2, 0.05)
    )
    assert wide.comparisons[0].verdict == "equivalent"
    # With 30 prompts a difference on 5 % of all prompts may well show in none.
    assert narrow.comparisons[0].verdict == "undecided"
    assert wide.of_kind("steps_to_accuracy")[0].verdict == "undecided"


def test_notes_say_what_the_study_cannot():
    assert study_notes(StudySize(5, 3, 0.05)) == study_notes(StudySize(20, 20, 0.05)) == []
    (note,) = study_notes(StudySize(3, 20, 0.05))
    assert note.startswith("with 3 seeds and 20 pairs an interval is up to ± 20 standard errors (± 3 with many seeds)")
    assert "with 5 seeds and 20 pairs an interval is up to ± 6.8" in study_notes(StudySize(5, 20, 0.05))[0]
    assert "other seeds" in study_notes(StudySize(1, 20, 0.05))[0]
    (note,) = study_notes(StudySize(5, 1, 0.05), no_target="plain")
    assert note.startswith("plain gained nothing") and "study.target_accuracy" in note
    assert "equal time is an indication only" in study_notes(StudySize(5, 1, 0.05), is_retimed=True)[0]


def test_the_note_on_seeds_is_in_the_result():
    pairs = [("freeze", "uniform"), ("control", "uniform")]
    (note,) = compare(make_study(), pairs, baseline="uniform").notes
    assert note.startswith("with 3 seeds and 2 pairs an interval is up to ± 6.2 standard errors")
    curves = [replace(curve, is_retimed=curve.seed == 1) for curve in make_study(n_seeds=9)]
    assert compare(curves, pairs, baseline="uniform").notes == [
        "some runs were interrupted, so equal time is an indication only"
    ]


@given(st.floats(-1e6, 1e6), st.integers(0, 2))
@example(-0.0, 1)
@example(-0.04, 1)
def test_signed_numbers_read_back(value: float, digits: int):
    text = signed(value, digits)
    assert float(text.replace("−", "-").replace(",", "")) == pytest.approx(value, abs=0.5 * 10**-digits * 1.001)
    assert "-" not in text
    assert np.sign(round(value, digits)) == {"+": 1, "−": -1}.get(text[0], 0)
