"""The policy that finds its classes while training: what it leaves out and when, in runs whose twins are known."""

import inspect

import numpy as np
import pytest
import torch
from class_tracker_oracle import changing_updates
from planted_run import PlantedRun, types_of
from policy_oracle import EXAMPLE, rock_set, weigh

from rocktokens.classes import TokenClasses
from rocktokens.config.policies import OnlineCoarseSection
from rocktokens.errors import ConfigError
from rocktokens.policies import Coarse, make_policy, policy_from_section
from rocktokens.policies.class_tracker import ClassTracker
from rocktokens.policies.online_coarse import OnlineCoarsePolicy

HASTY = {"window_steps": 3, "patience": 1, "min_freq": 3}


def pairs_of(*kinds: str) -> list[tuple[int, int]]:
    """The two types of every slot of these kinds."""
    return [(token, token + 1) for token in sorted(types_of(*kinds)) if token % 2 == 0]


def observed(policy, updates) -> list[dict]:
    return [policy.observe_likely(likely, step) for step, likely in enumerate(updates)]


# Planted twins


def left_out(seed: int, start: int) -> list[tuple[int, ...]]:
    """The classes after 96 steps."""
    run = PlantedRun(seed, OnlineCoarsePolicy(start=start, share=0.2))
    run.train(96)
    return run.policy.tracker.classes


@pytest.mark.parametrize("seed", [0, 1])
def test_twins_become_classes_and_what_is_being_learned_does_not(seed: int) -> None:
    """Every slot has two types, and a student that has learned nothing finds all of them interchangeable."""
    assert left_out(seed, start=80) == pairs_of("blind", "noise")


def test_what_is_left_out_too_early_is_never_learned() -> None:
    """Slow types would have been told apart by step 96; a loss without their choice confirms itself."""
    found = left_out(0, start=0)
    assert set(found) == set(pairs_of("blind", "noise", "slow"))


def test_lambda_one_trains_as_uniform_to_the_bit() -> None:
    online, uniform = PlantedRun(2, OnlineCoarsePolicy(lam=1.0)), PlantedRun(2, make_policy("uniform"))
    for run in (online, uniform):
        run.train(24)
    assert online.log[-1]["online_classes"] > 0 and online.policy.term_at(24).lam == 1.0
    assert torch.equal(online.head_VD, uniform.head_VD)


def test_a_resumed_run_is_the_whole_run_bit_for_bit() -> None:
    """Head and policy restored in the middle of a window, with classes in use."""
    whole, first = (PlantedRun(1, OnlineCoarsePolicy(window_steps=6, share=0.2)) for _ in range(2))
    whole.train(32)
    first.train(21)
    assert first.policy.term_at(21) is not None
    second = first.resumed(OnlineCoarsePolicy(window_steps=6, share=0.2))
    second.train(11)
    second.require_same(whole)


# Term and log


def test_the_classes_of_the_last_window_are_left_out_from_start_on() -> None:
    policy = OnlineCoarsePolicy(lam=0.25, start=9, **HASTY)
    assert policy.term_at(50) is None
    observed(policy, changing_updates(0, 9))
    assert policy.tracker.classes
    assert policy.term_at(8) is None and policy.term_at(9) == Coarse(TokenClasses(policy.tracker.classes), 0.25)
    np.testing.assert_array_equal(weigh(policy, EXAMPLE), np.ones(len(EXAMPLE.token_ids)))


def test_the_log_tells_which_classes_are_in_use() -> None:
    policy, known = OnlineCoarsePolicy(**HASTY), []
    for likely, step in zip(changing_updates(4, 60), range(60), strict=True):
        entries = policy.observe_likely(likely, step)
        assert all(ids in known for ids in entries.get("online_dissolved", []))
        known = [ids for ids in known if ids not in entries.get("online_dissolved", [])]
        known += entries.get("online_formed", [])
        assert sorted(known) == [list(ids) for ids in policy.tracker.classes]
        assert entries["online_classes"] == len(known)


def test_the_section_has_the_defaults_of_the_tracker() -> None:
    section = OnlineCoarseSection(name="online_coarse")
    for parameters in (inspect.signature(ClassTracker).parameters, inspect.signature(OnlineCoarsePolicy).parameters):
        for name, parameter in parameters.items():
            if name not in ("protected", "tracker"):
                assert getattr(section, name) == parameter.default, name


# Composition


def test_a_product_keeps_the_loss_and_takes_the_weights_of_the_others() -> None:
    parts = [{"name": "online_coarse", **HASTY}, {"name": "first_n", "n": 1}]
    product, alone = make_policy("product", policies=parts), OnlineCoarsePolicy(**HASTY)
    assert product.sees_likely and not make_policy("product", policies=parts[1:]).sees_likely
    assert observed(product, changing_updates(0, 9)) == observed(alone, changing_updates(0, 9))
    assert product.term_at(9) == alone.term_at(9) == Coarse(TokenClasses(alone.tracker.classes), 0.0)
    np.testing.assert_array_equal(weigh(product, EXAMPLE), weigh(make_policy("first_n", n=1), EXAMPLE))
    other = make_policy("product", policies=parts)
    other.restore(product.state())
    assert other.term_at(9) == product.term_at(9)


def test_a_schedule_watches_from_the_first_step_and_leaves_out_in_its_turn() -> None:
    parts = [{"name": "uniform"}, {"name": "online_coarse", **HASTY}]
    schedule = make_policy("schedule", policies=parts, steps=[0, 6])
    logged = observed(schedule, changing_updates(0, 9))
    assert [bool(entries) for entries in logged] == [False] * 6 + [True] * 3
    assert schedule.term_at(5) == Coarse(TokenClasses([]), 1.0)
    assert schedule.term_at(9).lam == 0.0 and schedule.term_at(9).classes.groups


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"name": "asymmetric"}, "hold asymmetric and coarse, and one loss is minimised"),
        ({"name": "coarse", "classes": [[1, 2]]}, "hold coarse and coarse, and one loss is minimised"),
        ({"name": "online_coarse"}, "policies hold online_coarse more than once, and the log tells of one: keep one"),
    ],
)
def test_two_losses_are_refused(other: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_policy("product", policies=[{"name": "online_coarse"}, other])


def test_pillars_and_ends_are_in_no_class(tmp_path) -> None:
    rock_set(3, 5, verdict=["pillar", "neutral"]).save(tmp_path / "rocks.json")
    section = OnlineCoarseSection(name="online_coarse", protect=str(tmp_path / "rocks.json"), **HASTY)
    policy = policy_from_section(section, end_ids={8, 2})
    free = OnlineCoarsePolicy(**HASTY)
    members = [set(), set()]
    for likely, step in zip(changing_updates(1, 60), range(60), strict=True):
        for found, each in zip(members, (policy, free), strict=True):
            each.observe_likely(likely, step)
            found.update(*([] if each.term_at(step) is None else each.term_at(step).classes.groups))
    assert members[1] == set(range(9)) and members[0] == members[1] - {2, 3, 8}
