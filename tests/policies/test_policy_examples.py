"""Each formula on numbers worked out by hand, and what it does at its edges."""

from fractions import Fraction

import numpy as np
import pytest
from policy_oracle import CONTROLS, EXAMPLE, ROCKS, rows_of, weigh

from rocktokens.errors import ConfigError
from rocktokens.policies import make_policy
from rocktokens.types import TokenScores


def weights_of(name: str, lengths: list[int], columns: dict[str, list[float]], ids=None, **params) -> list[float]:
    rows = rows_of(lengths, ids if ids is not None else [0] * sum(lengths), columns)
    return weigh(make_policy(name, **params), rows).tolist()


# Selecting over the update


def test_high_entropy_keeps_a_fifth():
    entropy = [0.1, 0.9, 0.3, 0.2, 0.8, 0.5, 0.4, 0.0, 0.6, 0.7]
    assert weights_of("high_entropy", [4, 6], {"entropy_student": entropy}) == [0, 1, 0, 0, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("length", "kept"), [(1, 0), (3, 2), (5, 2), (7, 4), (2, 1)])
def test_halves_round_to_the_even_number(length, kept):
    entropy = [float(value) for value in range(length)]
    weights = weights_of("high_entropy", [length], {"entropy_student": entropy}, rho=0.5)
    assert weights == [0.0] * (length - kept) + [1.0] * kept


def test_of_equal_scores_the_first_rollout_and_position_are_kept():
    rows = rows_of([2, 2], [0] * 4, {"entropy_student": [1, 1, 1, 1]}).take(np.array([3, 1, 2, 0]))
    assert weigh(make_policy("high_entropy", rho=0.75), rows).tolist() == [0, 1, 1, 1]


def test_tip_takes_the_unsure_and_the_distant():
    # ĥ = 0, 1, .5, .5; δ̂ = 1, 0, .25, .5: s = 1, 1, .625, .75
    columns = {"entropy_student": [1, 3, 2, 2], "kl": [4, 0, 1, 2]}
    assert weights_of("tip", [4], columns) == [1, 1, 0, 0]
    assert weights_of("tip", [4], columns, rho=0.75) == [1, 1, 0, 1]
    assert weights_of("tip", [4], columns, rho=0.25) == [1, 0, 0, 0]
    # ĥ = 0, 1, .6; δ̂ = 1, 0, .6: s = 1, 1, .84, though the last has the largest sum
    assert weights_of("tip", [3], {"entropy_student": [0, 5, 3], "kl": [5, 0, 3]}, rho=2 / 3) == [1, 1, 0]


def test_a_constant_column_says_nothing():
    assert weights_of("tip", [4], {"entropy_student": [2, 2, 2, 2], "kl": [0, 1, 3, 2]}) == [0, 0, 1, 1]


def test_teachable_is_a_product_of_clipped_scores():
    # 21 values 0..20: the 5 % and 95 % quantiles are 1 and 19, so 19 and 20 tie at the top, 0 and 1 at the bottom.
    kl, mass = [float(value) for value in range(21)], [1.0] * 20 + [0.0]
    # mass: its 5 % quantile is 1.0, so after clipping it is constant and every product is 0: the first is kept
    assert weights_of("teachable", [21], {"kl": kl, "teacher_mass_top16": mass}) == [1.0] + [0.0] * 20
    mass = [0.0, 0.0] + [1.0] * 19
    kept = weights_of("teachable", [21], {"kl": kl, "teacher_mass_top16": mass}, rho=2 / 21)
    assert np.flatnonzero(kept).tolist() == [19, 20]
    one = weights_of("teachable", [21], {"kl": kl, "teacher_mass_top16": mass})
    assert np.flatnonzero(one).tolist() == [19]  # a tie with 20, by clipping alone


def test_selectkd_keeps_where_the_choices_agree():
    assert weights_of("selectkd", [3], {"student_top1_in_teacher_top5": [1, 0, 1]}) == [1, pytest.approx(0.01), 1]


# Types that stand out in the update


def test_top_types_by_count_mean_loss_and_gradient():
    ids = [4, 4, 4, 2, 2, 7, 1]
    columns = {"kl": [1, 2, 3, 3, 3, 2, 0.5], "grad_norm": [0, 0, 0, 0.5, 0.5, 1, 0.75]}

    def weighed(name, k):
        weights = weights_of(name, [3, 4], columns, ids, k=k, lam=0.5)
        return {token_id for token_id, weight in zip(ids, weights, strict=True) if weight == 0.5}

    assert [weighed("top_frequency", k) for k in (1, 2, 3)] == [{4}, {4, 2}, {4, 2, 1}]  # 1 and 7 tie: the smaller id
    assert [weighed("top_mean_loss", k) for k in (1, 2, 9)] == [{2}, {2, 4}, {2, 4, 7, 1}]  # 4 and 7 tie at 2
    assert [weighed("top_grad_norm", k) for k in (1, 2, 3)] == [{7}, {7, 1}, {7, 1, 2}]


@pytest.mark.parametrize(("name", "column"), [("top_mean_loss", "kl"), ("top_grad_norm", "grad_norm")])
def test_equal_means_tie_whatever_rounding_makes_of_them(name, column):
    """0.1 once and 0.1 three times have the same mean, and in float64 they do not."""
    rng, differ = np.random.default_rng(0), 0
    for _ in range(300):
        ids, values = rng.integers(0, 6, 24), np.round(rng.random(24), 1)
        scores = TokenScores(**{**dict.fromkeys([c for c, _ in EXAMPLE.scores.items()]), column: values})
        weights = make_policy(name, k=2)(scores, ids, np.arange(24), np.zeros(24, np.int64), 0)
        means = {t: sum(map(Fraction, values[ids == t].tolist())) / int((ids == t).sum()) for t in set(ids.tolist())}
        assert set(ids[weights == 0].tolist()) == set(sorted(means, key=lambda t: (-means[t], t))[:2])
        rounded = {t: sum(values[ids == t].tolist()) / (ids == t).sum() for t in means}
        differ += set(sorted(rounded, key=lambda t: (-rounded[t], t))[:2]) != set(ids[weights == 0].tolist())
    assert differ > 0  # means in floating point would choose other types


# Along the response


@pytest.mark.parametrize(("length", "kept"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 2), (10, 5)])
def test_prefix_keeps_the_rounded_first_part_of_each_response(length, kept):
    expected = [1.0] * kept + [0.0] * (length - kept)
    assert weights_of("prefix", [length, length], {}, fraction=0.5) == expected * 2


def test_first_n():
    assert weights_of("first_n", [3, 1, 2], {}, n=2) == [1, 1, 0, 1, 1, 1]


def test_prefix_importance_falls_with_the_disagreement_behind():
    columns = {"logp_teacher": [-1, -3, -1, -2], "logp_student": [-2, -1, -2, -2]}
    # |a| = 1, 2, 1, 0: behind 0, 1/4, 3/4, 1
    assert weights_of("prefix_importance", [4], columns) == [1.5, 1.375, 1.125, 1.0]
    assert weights_of("prefix_importance", [2, 2], columns, w_max=4) == [4, 3, 4, 1]


def test_a_response_without_disagreement_weighs_w_max():
    columns = {"logp_teacher": [-1, -1, -1], "logp_student": [-1, -1, -2]}
    assert weights_of("prefix_importance", [2, 1], columns) == [1.5, 1.5, 1.5]
    assert weights_of("prefix_importance", [3], columns) == [1.5, 1.5, 1.5]  # all of it lies at the last token


# Entropies of both


def test_entropy_mix_has_mean_one():
    columns = {"entropy_teacher": [0, 2, 1, 2], "entropy_student": [1, 0, 2, 2]}
    # (1 + α(1, 0, ½, 0))(1 + β(½, 0, 1, 1)) with α = 1, β = 2: 4, 1, 4.5, 3; mean 3.125
    expected = [1.28, 0.32, 1.44, 0.96]
    assert weights_of("entropy_mix", [4], columns, alpha=1, beta=2) == pytest.approx(expected)


def test_models_that_are_sure_everywhere_weigh_evenly():
    assert weights_of("entropy_mix", [3], {}, alpha=3.0, beta=0.7) == [1, 1, 1]
    student = {"entropy_student": [1, 0, 1]}
    assert weights_of("entropy_mix", [3], student, alpha=3.0, beta=1.0) == pytest.approx([1.2, 0.6, 1.2])


def test_asymmetric_weighs_one_and_changes_the_term():
    policy = make_policy("asymmetric")
    assert policy.term == "asymmetric" and policy.needs == frozenset()
    assert make_policy("uniform").term is None


# Controls


def test_random_positions_keep_exactly_their_share_and_differ_by_seed_and_step():
    rows = rows_of([30, 21], [0] * 51, {}, first_rollout=10**12)
    kept = {
        (seed, step): weigh(make_policy("random_positions", rho=0.3, seed=seed), rows, step)
        for seed in range(4)
        for step in range(50)
    }
    assert {weights.sum() for weights in kept.values()} == {15}  # round(15.3)
    assert len({weights.tobytes() for weights in kept.values()}) == len(kept)
    share = np.mean(list(kept.values()), axis=0)  # of 200 draws, standard error 0.032
    assert np.abs(share - 15 / 51).max() < 4 * 0.033


def test_type_control_weighs_the_types_of_its_draw():
    ids = [4, 0, 2, 5, 3, 1]
    assert weights_of("type_control", [6], {}, ids, controls=CONTROLS) == [0, 0, 1, 1, 1, 1]
    assert weights_of("type_control", [6], {}, ids, controls=CONTROLS, draw=1, lam=0.5) == [1, 1, 0.5, 0.5, 1, 1]
    with pytest.raises(ConfigError, match=r"policy\.draw = 2 is not valid: the controls have draws 0 to 1"):
        make_policy("type_control", controls=CONTROLS, draw=2)


def runs_by_rollout(weights: np.ndarray, lengths: list[int]) -> list[list[int]]:
    """The lengths of the runs of weight 0 in every response, sorted."""
    marks = ["".join("#" if weight == 0 else "." for weight in part) for part in np.split(weights, np.cumsum(lengths))]
    return [sorted(len(run) for run in part.split(".") if run) for part in marks]


@pytest.mark.parametrize("window", [False, True])
def test_occurrence_control_freezes_as_much_elsewhere(window):
    rng = np.random.default_rng(0)
    lengths = [40, 25, 7]
    rows = rows_of(lengths, rng.integers(0, 12, 72).tolist(), {"kl": (0.3 + rng.random(72)).tolist()}, first_rollout=5)
    frozen = weigh(make_policy("rocks", rocks=ROCKS, window=window), rows)
    assert (frozen == 0).sum() == (32 if window else 9)
    moved = [
        weigh(make_policy("occurrence_control", rocks=ROCKS, window=window, seed=seed, draw=draw), rows, step)
        for seed, draw, step in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    ]
    for weights in moved:
        assert runs_by_rollout(weights, lengths) == runs_by_rollout(frozen, lengths)
    assert len({weights.tobytes() for weights in [frozen, *moved]}) == 5
    assert make_policy("occurrence_control", rocks=ROCKS, window=window).needs == ({"kl"} if window else set())


def test_occurrence_control_of_some_of_the_rocks():
    rows = rows_of([6], [3, 1, 1, 5, 5, 5], {})
    assert weigh(make_policy("occurrence_control", rocks=ROCKS, k=1), rows).sum() == 5
    assert weigh(make_policy("occurrence_control", rocks=ROCKS), rows).sum() == 3
