"""Controls that match the rocks' loss or gradient norm: what they mark, and what the log says of it."""

import numpy as np
import pytest
from policy_oracle import CONTROLS, Rows, rock_set, rows_of, weigh

from rocktokens.policies import WeightPolicy, make_policy
from rocktokens.policies.controls import draw_until

LENGTHS = [60, 45, 30, 2]
ROCKS = rock_set(0, 1)


def heavy_tailed() -> Rows:
    """Responses whose kl is spread over decades, a fifth of the tokens rocks; the last response has none."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 10, sum(LENGTHS))
    ids[-2:] = 5
    kl, norm = np.exp(rng.normal(-2, 1.5, (2, len(ids)))) * (1 + 2 * (ids < 2))
    return rows_of(LENGTHS, ids.tolist(), {"kl": kl.tolist(), "grad_norm": norm.tolist()}, first_rollout=9)


def log_of(policy: WeightPolicy, rows: Rows, step: int = 7) -> tuple[np.ndarray, dict[str, float]]:
    weights = weigh(policy, rows, step)
    return weights, policy.observe(rows.scores, rows.token_ids, step)


@pytest.mark.parametrize("by", ["kl", "grad_norm"])
def test_the_marked_sum_is_that_of_the_rocks_up_to_one_position_and_right_on_average(by: str):
    rows = heavy_tailed()
    values, is_rock = getattr(rows.scores, by).astype(np.float64), np.isin(rows.token_ids, ROCKS.ids)
    spans = np.split(np.arange(len(rows)), np.cumsum(LENGTHS)[:-1])
    wanted = np.array([values[span][is_rock[span]].sum() for span in spans])
    sums = []
    for step in range(400):
        marked = weigh(make_policy("loss_control", rocks=ROCKS, by=by, seed=2), rows, step) == 0
        sums.append([values[span][marked[span]].sum() for span in spans])
    off = np.array(sums) - wanted
    largest = np.array([values[span].max() for span in spans])
    assert (np.abs(off) < largest + 1e-6).all() and not off[:, 3].any()
    assert (off > 0.1).any() and (off < -0.1).any()
    error = off.std(axis=0) / np.sqrt(len(off))
    assert (np.abs(off.mean(axis=0)) <= 4 * error).all(), off.mean(axis=0) / error


def test_positions_are_those_of_a_plain_loop():
    """In the order of their numbers until the sum is reached, the last one by chance; in whole units of 2^-24."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        lengths = rng.integers(1, 12, 5)
        rollouts = np.repeat(np.arange(5), lengths)
        values = rng.exponential(1.0, len(rollouts)) * (rng.random(len(rollouts)) < 0.8)
        rocks, (order, last) = rng.random(len(rollouts)) < 0.3, rng.random((2, len(rollouts)))
        units = [round(value * 2**24) for value in values]
        expected = set()
        for rollout in range(5):
            rows = [row for row in range(len(rollouts)) if rollouts[row] == rollout]
            missing = sum(units[row] for row in rows if rocks[row])
            for row in sorted(rows, key=lambda row: order[row]):
                if missing > 0 and last[row] * units[row] < missing:
                    expected.add(row)
                missing -= units[row]
        assert set(np.flatnonzero(draw_until(values, rocks, rollouts, order, last))) == expected


def test_stopping_when_the_sum_is_reached_would_take_too_much():
    """Taking the last position always is the rule that the probability replaces: far more than one standard error."""
    rows = heavy_tailed()
    kl, is_rock = rows.scores.kl[:60].astype(np.float64), np.isin(rows.token_ids[:60], ROCKS.ids)
    rng, wanted = np.random.default_rng(0), kl[is_rock].sum()
    overshoot = [
        np.cumsum(order)[np.searchsorted(np.cumsum(order), wanted)] - wanted
        for order in rng.permuted([kl] * 400, axis=1)
    ]
    assert np.mean(overshoot) > 0.03 * wanted


def test_draws_seeds_and_steps_differ_and_repeat():
    rows = heavy_tailed()
    made = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0)]
    weights = [
        weigh(make_policy("loss_control", rocks=ROCKS, seed=seed, draw=draw), rows, step).tobytes()
        for seed, draw, step in made
    ]
    assert len(set(weights)) == 4 and weights[0] == weights[-1]


@pytest.mark.parametrize("lam", [0.0, 0.5, 2.0])
def test_one_weight_leaves_as_much_gradient_norm_as_the_rocks_would(lam: float):
    rows = heavy_tailed()
    norm = rows.scores.grad_norm.astype(np.float64)
    weights, log = log_of(make_policy("weight_control", rocks=ROCKS, lam=lam), rows)
    of_rocks = weigh(make_policy("rocks", rocks=ROCKS, lam=lam), rows)
    assert len(set(weights.tolist())) == 1
    assert weights.astype(np.float64) @ norm == pytest.approx(of_rocks.astype(np.float64) @ norm, rel=1e-6)
    assert log["control_token_share"] == 1 and log["control_grad_norm_ratio"] == pytest.approx(1)


def test_pillars_keep_their_weight_and_the_match_holds_without_them():
    rows, protect = heavy_tailed(), rock_set(0, 5, verdict=["pillar", "pillar"])
    pillar, norm = np.isin(rows.token_ids, [0, 5]), rows.scores.grad_norm.astype(np.float64)
    for name in ("loss_control", "weight_control"):
        weights = weigh(make_policy(name, rocks=ROCKS, protect=protect), rows)
        assert (weights[pillar] == 1).all() and (weights[~pillar] < 1).any()
    one = weigh(make_policy("weight_control", rocks=ROCKS, protect=protect), rows).astype(np.float64)
    of_rocks = weigh(make_policy("rocks", rocks=ROCKS, protect=protect), rows).astype(np.float64)
    assert one @ norm == pytest.approx(of_rocks @ norm, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("occurrence_control", {"rocks": ROCKS}),
        ("loss_control", {"rocks": ROCKS, "by": "grad_norm"}),
        ("weight_control", {"rocks": ROCKS}),
        ("type_control", {"controls": CONTROLS, "draw": 1}),
    ],
)
def test_the_log_says_what_was_marked(name: str, params: dict):
    rows, lam = heavy_tailed(), 0.25
    rock_ids = CONTROLS.rock_ids if name == "type_control" else ROCKS.ids
    policy = make_policy(name, lam=lam, **params)
    weights, log = log_of(policy, rows)
    marked = [row for row in range(len(rows)) if weights[row] != 1]
    rocks = [row for row in range(len(rows)) if rows.token_ids[row] in rock_ids]
    assert log["control_token_share"] == pytest.approx(len(marked) / len(rows))
    assert log["control_rock_overlap"] == pytest.approx(len(set(marked) & set(rocks)) / len(marked))
    ratios = {key.removeprefix("control_").removesuffix("_ratio") for key in log if key.endswith("_ratio")}
    assert ratios == policy.needs
    for column in ratios:
        taken = sum((1 - float(weights[row])) * rows.column(column)[row] for row in marked)
        wanted = sum((1 - lam) * rows.column(column)[row] for row in rocks)
        assert log[f"control_{column}_ratio"] == pytest.approx(taken / wanted, rel=1e-5)


def test_an_update_without_rocks_is_left_alone():
    rows = rows_of([3, 2], [5] * 5, {"kl": [1.0] * 5, "grad_norm": [1.0] * 5})
    for name in ("loss_control", "weight_control"):
        weights, log = log_of(make_policy(name, rocks=ROCKS), rows)
        assert weights.tolist() == [1.0] * 5 and log["control_kl_ratio"] == log["control_grad_norm_ratio"] == 1.0


def test_rocks_that_are_everything_are_matched_by_everything():
    rows = rows_of([4], [0, 1, 1, 0], {"kl": [0.1, 0.2, 0.3, 0.7], "grad_norm": [0.3] * 4})
    assert weigh(make_policy("loss_control", rocks=ROCKS), rows).tolist() == [0.0] * 4
