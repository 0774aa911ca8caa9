"""Comparisons of arms: every number against plain loops, and what must not change them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_curves import N_PROMPTS, PROMPT_IDS, STEPS, make_curve, make_study
from scipy.stats import chi2, nct
from scipy.stats import t as student

from rocktokens.errors import RocktokensError
from rocktokens.inference.crossed import crossed_mean
from rocktokens.studies.comparison import compare
from rocktokens.studies.curves import Axis, correct_at, steps_to
from rocktokens.studies.records import KINDS, Comparison, Curve, StudyResult

PAIRS = [("freeze", "uniform"), ("control", "uniform")]


def compare_all(curves: list[Curve], **changes: object) -> StudyResult:
    return compare(curves, **{"pairs": PAIRS, "baseline": "uniform", **changes})


def naive_correct(curve: Curve, axis: str, value: float, prompt_id: str) -> float:
    """A prompt's share of right answers, read off the line between two checkpoints."""
    spent = getattr(curve, axis).tolist()
    correct = curve.correct_EP[:, curve.prompt_ids.index(prompt_id)].tolist()
    for place in range(len(spent) - 1):
        if spent[place] <= value <= spent[place + 1]:
            along = (value - spent[place]) / (spent[place + 1] - spent[place])
            return correct[place] + along * (correct[place + 1] - correct[place])
    return correct[-1]


def naive_steps(curve: Curve, target: float, prompts: list[int]) -> float | None:
    accuracy = [sum(row[prompt] for prompt in prompts) / len(prompts) for row in curve.correct_EP.tolist()]
    if accuracy[0] >= target:
        return 0.0
    for place in range(1, len(accuracy)):
        if accuracy[place] >= target:
            share = (target - accuracy[place - 1]) / (accuracy[place] - accuracy[place - 1])
            return float(curve.steps[place - 1] + share * (curve.steps[place] - curve.steps[place - 1]))
    return None


def number(value: float | None) -> float:
    """A number of a comparison that has one."""
    assert value is not None
    return value


def width(own: Comparison) -> float:
    assert own.interval is not None
    return own.interval[1] - own.interval[0]


def runs_of(curves: list[Curve], arm: str, seed: int) -> list[Curve]:
    return [curve for curve in curves if (curve.arm, curve.seed) == (arm, seed)]


def naive_table(curves: list[Curve], pair: tuple[str, str], axis: str) -> tuple[list[float], np.ndarray]:
    """Where each seed is read, and the differences by seed and prompt."""
    budgets, rows = [], []
    for seed in sorted({curve.seed for curve in curves}):
        both = [runs_of(curves, arm, seed) for arm in pair]
        budget = min(getattr(curve, axis).tolist()[-1] for runs in both for curve in runs)
        row = []
        for prompt_id in PROMPT_IDS:
            first, second = (
                sum(naive_correct(curve, axis, budget, prompt_id) for curve in runs) / len(runs) for runs in both
            )
            row.append(first - second)
        budgets.append(budget)
        rows.append(row)
    return budgets, np.array(rows)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    ("kind", "axis"), [("equal_steps", "steps"), ("equal_tokens", "tokens"), ("equal_seconds", "seconds")]
)
def test_differences_of_accuracy_are_those_of_plain_loops(pair: tuple[str, str], kind: str, axis: str):
    curves = make_study()
    (own,) = [own for own in compare_all(curves).comparisons if (own.kind, own.first) == (kind, pair[0])]
    budgets, table_SP = naive_table(curves, pair, axis)
    expected = crossed_mean(table_SP)
    assert own.at == pytest.approx(np.mean(budgets))
    assert (own.difference, own.standard_error, own.degrees_of_freedom) == pytest.approx(expected)
    freedom, error = expected.degrees_of_freedom, expected.standard_error
    half = student.ppf(1 - 0.05 / 2 / len(PAIRS), freedom) * error
    assert own.interval == pytest.approx((expected.mean - half, expected.mean + half))
    assert own.p == pytest.approx(2 * student.sf(abs(expected.mean) / error, freedom))
    # What is detected four times in five if the true error is at either end of its own 97 % interval.
    assert own.detectable is not None
    for effect, share in zip(own.detectable, (0.985, 0.015), strict=True):
        true_error = error * np.sqrt(freedom / chi2.ppf(share, freedom))
        power = nct.sf(student.ppf(1 - 0.05 / 2 / len(PAIRS), freedom), freedom, effect / true_error)
        assert power == pytest.approx(0.8)
    assert own.never == (0, 0)


def test_steps_to_accuracy_are_those_of_plain_loops():
    curves = make_study()
    result = compare_all(curves)
    start, end = (
        np.mean([curve.correct_EP[place].mean() for curve in curves if curve.arm == "uniform"]) for place in (0, -1)
    )
    assert result.target_accuracy == pytest.approx(start + 0.9 * (end - start))
    for own in result.of_kind("steps_to_accuracy"):
        differences, by_arm, never = [], [], {own.first: 0, own.second: 0}
        for seed in range(3):
            means = []
            for arm in (own.first, own.second):
                steps = [naive_steps(curve, own.at, list(range(N_PROMPTS))) for curve in runs_of(curves, arm, seed)]
                never[arm] += steps.count(None)
                means.append(np.mean([40.0 if at is None else at for at in steps]))
            differences.append(means[0] - means[1])
            by_arm.append(means)
        assert own.mean_steps == pytest.approx(np.mean(by_arm, axis=0)) and own.within == 40
        if never[own.first] == 3:
            assert own.first == "freeze" and own.verdict == "unreached" and own.difference is None
            continue
        assert own.difference == pytest.approx(np.mean(differences))
        assert own.never == (never[own.first], never[own.second])
        assert own.standard_error >= np.std(differences, ddof=1) / np.sqrt(3) - 1e-9
    assert any(own.never[0] for own in result.of_kind("steps_to_accuracy"))
    # A pair that cannot be judged is one of the two all the same.
    [judged] = [own for own in result.of_kind("steps_to_accuracy") if own.verdict != "unreached"]
    assert judged.p_holm == pytest.approx(min(1, 2 * number(judged.p))) and number(judged.p) < 1


def test_the_spread_of_steps_is_that_of_resampled_prompts():
    # One seed: the standard error is that of an independent bootstrap over prompts, written out.
    curves = make_study(n_seeds=1, draws=1)
    own = compare_all(curves, target_accuracy=0.6).of_kind("steps_to_accuracy")[0]
    rng = np.random.default_rng(9)
    resampled = []
    for _ in range(1500):
        prompts = rng.integers(0, N_PROMPTS, N_PROMPTS).tolist()
        first, second = (naive_steps(runs_of(curves, arm, 0)[0], 0.6, prompts) for arm in ("freeze", "uniform"))
        resampled.append((40.0 if first is None else first) - (40.0 if second is None else second))
    assert own.standard_error == pytest.approx(np.std(resampled), rel=0.08)


def test_holm_and_bonferroni_count_the_pairs_of_a_kind():
    curves = make_study()
    both = compare_all(curves).of_kind("equal_steps")
    (low, low_holm), (high, high_holm) = sorted((number(own.p), number(own.p_holm)) for own in both)
    assert low_holm == pytest.approx(min(1, 2 * low))
    assert high_holm == pytest.approx(min(1, max(2 * low, high)))
    (alone,) = compare_all(curves, pairs=PAIRS[:1]).of_kind("equal_steps")
    assert alone.p == alone.p_holm == pytest.approx(both[0].p)
    assert width(alone) < width(both[0])


def test_the_other_way_round_is_the_negative():
    forth, back = (
        compare_all(make_study(), pairs=[pair, ("control", "freeze")])
        for pair in (("freeze", "uniform"), ("uniform", "freeze"))
    )
    opposite = {"better": "worse", "worse": "better", "undecided": "undecided", "unreached": "unreached"}
    for own, other in zip(forth.comparisons[:4], back.comparisons[:4], strict=True):
        if own.difference is not None and own.interval is not None:
            assert other.difference == -own.difference
            assert other.interval == (-own.interval[1], -own.interval[0])
        assert other.cut == own.cut[::-1]
        assert (other.p, other.detectable, other.at) == (own.p, own.detectable, own.at)
        assert other.never == own.never[::-1]
        assert other.verdict == opposite[own.verdict]


def test_nothing_depends_on_the_order_of_prompts_and_runs():
    curves = make_study()
    rng = np.random.default_rng(3)
    shuffled = []
    for curve in curves:
        order = rng.permutation(N_PROMPTS)
        shuffled.append(
            replace(
                curve, correct_EP=curve.correct_EP[:, order], prompt_ids=[curve.prompt_ids[place] for place in order]
            )
        )
    others = [curve for curve in shuffled if curve.arm != "uniform"]
    shuffled = [curve for curve in shuffled if curve.arm == "uniform"] + others[::-1]
    expected, result = compare_all(curves), compare_all(shuffled)
    assert result.comparisons == expected.comparisons
    assert {arm.name: arm for arm in result.arms} == {
        arm.name: replace(arm, runs=sorted(arm.runs, key=lambda run: (run.seed, run.draw))) for arm in expected.arms
    }


def test_arms_that_answer_alike_do_not_differ():
    curves = [make_curve("uniform", seed) for seed in range(3)]
    curves += [replace(curve, arm="freeze") for curve in curves]
    for own in compare_all(curves, pairs=PAIRS[:1]).comparisons:
        assert (own.difference, own.interval, own.standard_error) == (0.0, (0.0, 0.0), 0.0)
        assert (own.verdict, own.p, own.detectable) == ("undecided", 1.0, (0.0, 0.0))


def test_one_seed_is_judged_over_prompts():
    result = compare_all(make_study(n_seeds=1, draws=1))
    own = result.of_kind("equal_steps")[0]
    freeze, uniform = (make_curve("freeze", 0, gain=0.3), make_curve("uniform", 0))
    difference_P = freeze.correct_EP[-1] - uniform.correct_EP[-1]
    assert own.standard_error == pytest.approx(difference_P.std(ddof=1) / np.sqrt(N_PROMPTS))
    assert own.degrees_of_freedom == N_PROMPTS - 1
    assert any("one seed" in note for note in result.notes)


def test_draws_are_averaged_within_a_seed():
    curves = make_study()
    merged = [curve for curve in curves if curve.arm != "control"]
    for seed in range(3):
        first, second = runs_of(curves, "control", seed)
        merged.append(replace(first, correct_EP=(first.correct_EP + second.correct_EP) / 2))
    (by_draw,) = compare_all(curves, pairs=PAIRS[1:]).of_kind("equal_steps")
    (at_once,) = compare_all(merged, pairs=PAIRS[1:]).of_kind("equal_steps")
    assert by_draw == at_once
    arm = compare_all(curves).arm("control")
    assert len(arm.runs) == 6 and arm.facts == {"head_compute_saved": pytest.approx(0.05)}


def test_arms_have_their_accuracy_with_its_interval_at_every_common_step():
    curves = make_study()
    arm = compare_all(curves).arm("control")
    assert [point.step for point in arm.points] == STEPS.tolist()
    for place, point in enumerate(arm.points):
        table_SP = np.array(
            [
                np.mean([curve.correct_EP[place] for curve in runs_of(curves, "control", seed)], axis=0)
                for seed in range(3)
            ]
        )
        estimate = crossed_mean(table_SP)
        assert point.accuracy == pytest.approx(estimate.mean)
        low, high = estimate.interval(0.05)
        assert point.interval == pytest.approx((max(low, 0), min(high, 1)))
        own = [curve for curve in curves if curve.arm == "control"]
        assert point.tokens == pytest.approx(np.mean([curve.tokens[place] for curve in own]))
        assert point.seconds == pytest.approx(np.mean([curve.seconds[place] for curve in own]))
    runs = {(run.seed, run.draw): run for run in arm.runs}
    for curve in (curve for curve in curves if curve.arm == "control"):
        run = runs[curve.seed, curve.draw]
        assert run.accuracy == pytest.approx(curve.correct_EP.mean(axis=1).tolist())
        assert (run.steps, run.tokens) == (curve.steps.tolist(), curve.tokens.tolist())


@pytest.mark.parametrize("axis", ["steps", "tokens", "seconds"])
def test_reading_between_checkpoints_is_exact_at_them(axis: Axis):
    curve = make_curve("uniform", 0)
    spent = getattr(curve, axis)
    for place, value in enumerate(spent):
        assert np.array_equal(correct_at(curve, axis, value), curve.correct_EP[place])
    middle = correct_at(curve, axis, (spent[1] + spent[2]) / 2)
    assert middle == pytest.approx((curve.correct_EP[1] + curve.correct_EP[2]) / 2)
    assert np.array_equal(correct_at(curve, axis, spent[-1] + 1), curve.correct_EP[-1])


def test_the_first_crossing_counts_after_a_dip_too():
    steps_E = np.array([0, 10, 20, 30])
    accuracy_BE = np.array([[0.5, 0.3, 0.7, 0.2], [0.5, 0.3, 0.4, 0.6], [0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1]])
    assert steps_to(0.6, steps_E, accuracy_BE) == pytest.approx([17.5, 30.0, 0.0, np.nan], nan_ok=True)


def test_longer_runs_are_compared_within_the_steps_they_share():
    curves = [make_curve("uniform", seed) for seed in range(2)]
    longer = [make_curve("freeze", seed, gain=-2.0, steps=np.array([0, 10, 20, 40, 80])) for seed in range(2)]
    for curve in longer:
        curve.correct_EP[-1] = 1.0
    result = compare_all([*curves, *longer], pairs=PAIRS[:1])
    by_kind = {own.kind: own for own in result.comparisons}
    assert by_kind["equal_steps"].at == 40
    own = by_kind["steps_to_accuracy"]
    reached = [naive_steps(curve, own.at, list(range(N_PROMPTS))) for curve in curves]
    assert own.never == (2, reached.count(None)) and own.within == 40
    assert own.mean_steps == pytest.approx((40, np.mean([40.0 if at is None else at for at in reached])))
    assert result.arm("freeze").end.step == 80


def test_no_interval_says_more_than_is_possible():
    # Two seeds that disagree completely have an interval that knows nothing.
    curves = [make_curve(arm, seed) for arm in ("uniform", "freeze") for seed in range(2)]
    for curve in curves:
        curve.correct_EP[1:] = (curve.arm == "freeze") == (curve.seed == 0)
    result = compare_all(curves, pairs=PAIRS[:1], target_accuracy=0.9)
    assert all(arm.end.interval == (0.0, 1.0) for arm in result.arms)
    for own in result.comparisons:
        largest = 40.0 if own.kind == "steps_to_accuracy" else 1.0
        assert (own.interval, own.cut) == ((-largest, largest), (True, True))
        assert not own.could_be_called and own.standard_error is not None and own.standard_error > 0


def test_a_baseline_that_gains_nothing_leaves_no_accuracy_to_reach():
    curves = [make_curve(arm, seed, gain=gain) for seed in range(3) for arm, gain in (("uniform", -3), ("freeze", 1))]
    result = compare_all(curves, pairs=PAIRS[:1])
    assert result.target_accuracy is None and not result.of_kind("steps_to_accuracy")
    assert [own.kind for own in result.comparisons] == ["equal_steps", "equal_tokens", "equal_seconds"]
    assert any("study.target_accuracy" in note for note in result.notes)
    assert compare_all(curves, pairs=PAIRS[:1], target_accuracy=0.5).of_kind("steps_to_accuracy")


def test_a_clear_difference_is_called_in_every_way():
    curves = [make_curve(arm, seed, gain=gain) for seed in range(5) for arm, gain in (("uniform", 0.5), ("freeze", -3))]
    result = compare_all(curves, pairs=PAIRS[:1])
    assert {own.verdict for own in result.comparisons if own.kind != "steps_to_accuracy"} == {"worse"}
    ends = [own.interval and own.interval[1] for own in result.comparisons if own.kind != "steps_to_accuracy"]
    assert all(number(end) < 0 for end in ends)


REFUSED: dict[str, tuple[Callable[[list[Curve]], list[Curve]], str]] = {
    "no runs": (lambda _: [], "no runs"),
    "a seed is missing": (lambda curves: curves[:-2], "run every arm"),
    "a draw is missing": (lambda curves: curves[:-1], "run every draw"),
    "a run twice": (lambda curves: [*curves, curves[-1]], "run every draw"),
    "another prompt": (
        lambda curves: [*curves[:-1], replace(curves[-1], prompt_ids=[*PROMPT_IDS[:-1], "other"])],
        "answered other prompts",
    ),
    "a prompt twice": (
        lambda curves: [replace(curve, prompt_ids=[PROMPT_IDS[0], *PROMPT_IDS[:-1]]) for curve in curves],
        "answered other prompts",
    ),
    "one prompt": (
        lambda curves: [replace(own, correct_EP=own.correct_EP[:, :1], prompt_ids=PROMPT_IDS[:1]) for own in curves],
        "evaluation.num_prompts",
    ),
    "no step 0": (lambda curves: [replace(curve, steps=STEPS + 1) for curve in curves], "evaluate step 0"),
    "steps out of order": (lambda curves: [replace(own, steps=np.array([0, 20, 10, 40])) for own in curves], "ascend"),
    "too few tokens": (lambda curves: [replace(own, tokens=own.tokens[1:]) for own in curves], "differ in length"),
    "no common step": (
        lambda curves: [replace(own, steps=STEPS * (7 if own.arm == "freeze" else 3) + (STEPS > 0)) for own in curves],
        "share no step after 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_runs_that_do_not_match_are_refused_in_one_sentence(case: str):
    change, sentence = REFUSED[case]
    with pytest.raises(RocktokensError, match=sentence) as refusal:
        compare_all(change(make_study()))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"baseline": "other"}, "no runs of arm 'other'"),
        ({"pairs": [("rocks", "uniform")]}, "no runs of arm 'rocks'"),
        ({"pairs": [("uniform", "uniform")]}, "compared with itself"),
        ({"primary": [("control", "freeze")]}, "not among the pairs"),
        ({"primary": [*PAIRS, *PAIRS]}, "4 pairs are named as primary: name 3 at most"),
    ],
)
def test_arms_that_do_not_exist_are_refused(changes: dict[str, object], sentence: str):
    with pytest.raises(RocktokensError, match=sentence):
        compare_all(make_study(), **changes)


@settings(deadline=None, max_examples=20)
@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([0.01, 0.05, 0.3]),
    st.sampled_from([None, 0.02]),
    st.sampled_from([None, 0.0, 0.55, 1.0]),
    st.booleans(),
)
def test_the_record_reads_back_as_the_result(
    tmp_path_factory: pytest.TempPathFactory,
    n_seeds: int,
    draws: int,
    alpha: float,
    margin: float | None,
    target: float | None,
    compared: bool,
):
    pairs = PAIRS if compared else []
    result = compare_all(make_study(n_seeds, draws), pairs=pairs, alpha=alpha, margin=margin, target_accuracy=target)
    text = json.dumps(result.to_record(), allow_nan=False)
    path = tmp_path_factory.mktemp("study") / "study.json"
    result.save(path)
    assert StudyResult.load(path) == result
    assert len(text) < 20_000  # no answers prompt by prompt


def test_a_damaged_or_newer_study_json_is_refused(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("study") / "study.json"
    record = compare_all(make_study()).to_record()
    for change, sentence in (
        ({"schema_version": 3}, "schema_version 3"),
        ({"arms": [{"name": "uniform"}]}, r"is no study\.json \(arms\.0\.points: field required\): write it again"),
        ({"extra": 1}, r"is no study\.json \(extra:"),
        (
            {"comparisons": [{**record["comparisons"][0], "interval": [1.0]}]},
            r"is no study\.json \(comparisons\.0\.interval",
        ),
    ):
        path.write_text(json.dumps({**record, **change}))
        with pytest.raises(RocktokensError, match=sentence):
            StudyResult.load(path)


@pytest.mark.parametrize("comparisons", [None, "x", [1]])
def test_a_damaged_study_json_of_schema_1_is_refused_too(tmp_path: Path, comparisons: object):
    path, record = tmp_path / "study.json", compare_all(make_study()).to_record()
    path.write_text(json.dumps({**record, "schema_version": 1, "comparisons": comparisons}))
    with pytest.raises(RocktokensError, match=r"is no study\.json \(comparisons"):
        StudyResult.load(path)


def test_a_study_json_of_schema_1_is_read_with_its_collapsed_runs_counted(tmp_path: Path):
    result, path = compare_all(with_collapse(make_study())), tmp_path / "study.json"
    record = {**result.to_record(), "schema_version": 1}
    del record["n_primary"]
    for arm in record["arms"]:
        del arm["collapsed"]
    for own in record["comparisons"]:
        del own["role"], own["unreliable"]
        own["detectable"] = 0.1
    path.write_text(json.dumps(record))
    found = StudyResult.load(path)
    assert found.arms == result.arms and found.schema_version == result.schema_version
    unknown = [replace(own, detectable=None, role=None) for own in result.comparisons]
    assert found == replace(result, comparisons=unknown, n_primary=None) and found.n_together(None) == 2


def with_collapse(curves: list[Curve]) -> list[Curve]:
    """The same runs, but the freeze ends below its start in one seed, after a rise."""
    broken_EP = np.repeat([[0.5], [0.9], [0.9], [0.4]], N_PROMPTS, axis=1)
    return [replace(own, correct_EP=broken_EP) if (own.arm, own.seed) == ("freeze", 1) else own for own in curves]


def test_a_run_that_ends_below_its_start_is_counted_and_marks_the_means():
    curves = [*with_collapse(make_study()), *(make_curve("flat", seed, gain=0.0) for seed in range(3))]
    flat = [replace(own, correct_EP=np.tile(own.correct_EP[0], (4, 1))) if own.arm == "flat" else own for own in curves]
    result = compare_all(flat, pairs=[*PAIRS, ("flat", "uniform")])
    assert [(arm.name, arm.collapsed and arm.collapsed.count, len(arm.runs)) for arm in result.arms] == [
        ("uniform", 0, 3), ("freeze", 1, 3), ("control", 0, 6), ("flat", 0, 3)
    ]  # fmt: skip
    own = result.arm("freeze").collapsed
    assert own is not None and own.interval == pytest.approx((1 - 0.975 ** (1 / 3), 0.905701), abs=1e-6)
    assert {(own.first, own.unreliable) for own in result.comparisons} == {
        ("freeze", True), ("control", False), ("flat", False)
    }  # fmt: skip


def test_primary_pairs_are_corrected_together_and_the_others_apart():
    pairs = [*PAIRS, ("control", "freeze")]
    result = compare_all(make_study(), pairs=pairs, primary=[pairs[2]])
    assert (result.n_primary, result.n_together("primary"), result.n_together("exploratory")) == (1, 1, 2)
    alone, both = compare_all(make_study(), pairs=pairs[2:]), compare_all(make_study(), pairs=PAIRS)
    for kind in KINDS:
        first, *others = result.of_kind(kind)
        assert [first] == alone.of_kind(kind) and first.role == "primary"
        assert others == [replace(own, role="exploratory") for own in both.of_kind(kind)]


def test_the_first_three_pairs_are_primary_unless_named():
    arms = [replace(own, arm=arm) for arm in ("a", "b", "c", "d") for own in make_study() if own.arm == "freeze"]
    pairs = [(arm, "uniform") for arm in ("a", "b", "c", "d")]
    result = compare_all([*make_study(), *arms], pairs=pairs)
    assert [own.role for own in result.of_kind("equal_steps")] == ["primary"] * 3 + ["exploratory"]
    assert any("name yours in study.primary" in note for note in result.notes)
    named = compare_all([*make_study(), *arms], pairs=pairs, primary=pairs[:1])
    assert not any("name yours in study.primary" in note for note in named.notes)


def test_comparisons_come_pair_after_pair():
    found: list[Comparison] = compare_all(make_study()).comparisons
    assert [(own.first, own.kind) for own in found] == [
        (first, kind)
        for first, _ in PAIRS
        for kind in ("equal_steps", "equal_tokens", "equal_seconds", "steps_to_accuracy")
    ]
