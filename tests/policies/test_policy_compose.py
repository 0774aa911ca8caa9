"""A whole weighs, needs, probes, observes and remembers what its parts do."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from policy_oracle import CONTROLS, RULE, Rows, make, rock_set, rows_of, weigh
from transformers import AutoTokenizer

from rocktokens.classes import TokenClass, TokenClasses
from rocktokens.config import parse_config
from rocktokens.errors import ConfigError, RocktokensError, RunDirError, TokenizerMismatchError
from rocktokens.models import pebbles
from rocktokens.policies import WeightPolicy, make_policy, policy_from_section
from rocktokens.policies.base import Coarse, UpdateTokens, like
from rocktokens.policies.compose import ProductPolicy, ProtectedPolicy, SchedulePolicy
from rocktokens.run_dir import RunDir

ROWS = rows_of([4, 3], [3, 5, 0, 3, 7, 3, 1], {"entropy_student": [0.5, 1, 1.5, 0.25, 2, 0.75, 0.125]})


class Counting(WeightPolicy):
    """Weight 0 on one type, probed at another; counts what it has seen."""

    name = "counting"

    def __init__(self, frozen: int, probed: int, **attributes: Any) -> None:
        self.frozen, self.probed, self.seen = frozen, probed, 0
        self.__dict__.update(attributes)

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        return np.where(tokens.token_ids == self.frozen, 0.0, 2.0)

    def probe(self, weights_T: Any, token_ids_T: Any, positions_T: Any, rollout_ids_T: Any, step: int) -> Any:
        return like((np.asarray(token_ids_T) == self.probed) & (np.asarray(weights_T) == 0), weights_T)

    def observe(self, scores: Any, token_ids_T: np.ndarray, step: int) -> dict[str, Any]:
        self.seen += len(token_ids_T)
        return {f"seen_{self.frozen}": self.seen}

    def state(self) -> dict[str, np.ndarray]:
        return {"seen": np.array(self.seen)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self.seen = int(state["seen"])


def probed(policy: WeightPolicy, rows: Rows, step: int) -> list[int]:
    weights = weigh(policy, rows, step)
    return np.flatnonzero(policy.probe(weights, rows.token_ids, rows.positions, rows.rollout_ids, step)).tolist()


# Product


def test_a_product_multiplies():
    policy = make_policy("product", policies=[{"name": "rocks", "rocks": [3], "lam": 0.5}, {"name": "first_n", "n": 2}])
    assert weigh(policy, ROWS).tolist() == [0.5, 1, 0, 0, 1, 0.5, 0]
    assert policy.needs == frozenset()


def test_parts_of_a_product_draw_their_own_positions():
    both = make_policy("product", policies=[{"name": "random_positions", "rho": 0.5}] * 2)
    rows = rows_of([400], [0] * 400, {})
    assert 60 < weigh(both, rows).sum() < 140  # 100 expected; 200 if both drew the same


def test_a_whole_passes_everything_on():
    policy = ProductPolicy([Counting(3, 3), Counting(5, 3, needs=frozenset({"kl"}), term="asymmetric"), make("tip")])
    assert policy.needs == {"kl", "entropy_student"} and policy.term == "asymmetric"
    assert probed(policy, ROWS, 0) == [0, 3, 5]
    assert policy.observe(None, ROWS.token_ids, 0) == {"seen_3": 7, "seen_5": 7}
    policy.parts[0].observe(None, ROWS.token_ids, 1)
    assert {key: int(value) for key, value in policy.state().items()} == {"0.seen": 14, "1.seen": 7}
    other = ProductPolicy([Counting(3, 3), Counting(5, 3), make("tip")])
    other.restore(policy.state())
    assert [part.seen for part in other.parts[:2]] == [14, 7]


def test_the_state_of_ten_parts_is_not_mixed_up():
    policy = ProductPolicy([Counting(index, 0) for index in range(12)])
    for index, part in enumerate(policy.parts):
        part.seen = index
    other = ProductPolicy([Counting(index, 0) for index in range(12)])
    other.restore(policy.state())
    assert [part.seen for part in other.parts] == list(range(12))


# Schedule


def test_a_schedule_changes_at_its_steps_and_is_uniform_before():
    policy = make_policy(
        "schedule", steps=[2, 5], policies=[{"name": "rocks", "rocks": [3]}, {"name": "first_n", "n": 1}]
    )
    rocks, first = [0, 1, 1, 0, 1, 0, 1], [1, 0, 0, 0, 1, 0, 0]
    weights = [weigh(policy, ROWS, step).tolist() for step in range(7)]
    assert weights == [[1] * 7] * 2 + [rocks] * 3 + [first] * 2


def test_only_the_active_part_probes_but_all_observe():
    policy = SchedulePolicy([Counting(3, probed=9), Counting(3, probed=3), Counting(5, probed=9)], [1, 2, 3])
    assert [probed(policy, ROWS, step) for step in range(4)] == [[], [], [0, 3, 5], []]
    logged = [policy.observe(None, ROWS.token_ids, step) for step in range(4)]
    assert [part.seen for part in policy.parts] == [28, 28, 28]
    assert logged == [{}, {"seen_3": 14}, {"seen_3": 21}, {"seen_5": 28}]


def test_a_schedule_minimises_one_divergence():
    asymmetric = {"name": "asymmetric"}
    assert make_policy("schedule", steps=[0, 3], policies=[asymmetric, asymmetric]).term == "asymmetric"
    for steps, policies in (([0, 3], [asymmetric, {"name": "tip"}]), ([1], [asymmetric])):
        with pytest.raises(
            ConfigError, match="asymmetric in part, and a run minimises one divergence: make all of them"
        ):
            make_policy("schedule", steps=steps, policies=policies)


# Choice and decision

TWINS = TokenClasses([[3, 5], [7, 1, 0]])
COARSE = {"name": "coarse", "classes": TWINS, "lam": 0.25}


def test_a_product_keeps_the_choice_and_multiplies_weights():
    policy = make_policy("product", policies=[COARSE, {"name": "first_n", "n": 2}])
    assert policy.term == policy.term_at(0) == Coarse(TWINS, 0.25)
    assert weigh(policy, ROWS).tolist() == [1, 1, 0, 0, 1, 1, 0]


@pytest.mark.parametrize(
    "others", [[{"name": "asymmetric"}], [COARSE], [{"name": "coarse", "classes": [[1, 2]]}, {"name": "tip"}]]
)
def test_a_product_of_two_terms_is_refused(others):
    with pytest.raises(ConfigError, match=r"hold .*coarse, and one loss is minimised: keep one of them"):
        make_policy("product", policies=[COARSE, *others])


def test_a_schedule_changes_how_much_of_the_choice_counts():
    steps = {"steps": [2, 5, 7], "policies": [COARSE, {"name": "first_n", "n": 1}, COARSE | {"lam": 0.0}]}
    for policy in (
        make_policy("schedule", **steps),
        make_policy("product", policies=[{"name": "uniform"}, {"name": "schedule", **steps}]),
    ):
        terms = [policy.term_at(step) for step in range(9)]
        assert terms == [Coarse(TWINS, lam) for lam in (1, 1, 0.25, 0.25, 0.25, 1, 1, 0, 0)]
        assert policy.term is not None


def test_a_schedule_has_one_choice_to_leave_out():
    other = {"name": "coarse", "classes": [[3, 7]]}
    with pytest.raises(ConfigError, match=r"have different classes.*: give all coarse ones the same classes"):
        make_policy("schedule", steps=[0, 3], policies=[COARSE, other])
    with pytest.raises(ConfigError, match="asymmetric in part"):
        make_policy("schedule", steps=[0, 3], policies=[COARSE, {"name": "asymmetric"}])


def test_protected_types_are_in_no_class():
    policy = make_policy(**COARSE, protect=TESTED)
    assert policy.term == Coarse(TokenClasses([[7, 1, 0]]), 0.25)
    inner = make_policy("product", policies=[COARSE, {"name": "uniform"}], protect=TESTED)
    assert inner.term_at(4) == policy.term


def test_a_config_whose_classes_are_all_protected_is_refused(tmp_path):
    TESTED.save(tmp_path / "rocks.json")
    given = ("policy.name=coarse", "policy.classes=[[3, 4]]")
    assert policy_from_section(section_of(*given)).term == Coarse(TokenClasses([[3, 4]]), 0.0)
    with pytest.raises(ConfigError, match="no class of two tokens that may be used and are not protected"):
        policy_from_section(section_of(*given, f"policy.protect={tmp_path}/rocks.json"))


def test_classes_come_from_files_lists_or_records(tmp_path):
    path = tmp_path / "classes.json"
    ids = ((1, 2), (3, 4), (5, 6))
    classes = [TokenClass(own, safe=safe) for own, safe in zip(ids, (True, None, False), strict=True)]
    found = TokenClasses(classes, tokenizer_sha256="a" * 64)
    found.save(path)
    for given, more, groups in (
        (str(path), {}, [(1, 2)]),
        (str(path), {"untested": True}, [(1, 2), (3, 4)]),
        (found, {}, [(1, 2), (3, 4)]),
        ([[5, 6], [9]], {}, [(5, 6)]),
    ):
        policy = make_policy("coarse", classes=given, **more)
        assert policy.term.classes.groups == groups and policy.term.lam == 0.0
    section = section_of("policy.name=coarse", f"policy.classes={path}")
    policy_from_section(section, "a" * 64)
    with pytest.raises(TokenizerMismatchError, match="made with tokenizer aaaaaaaaaaaa, this model's is bbbbbbbbbbbb"):
        policy_from_section(section, "b" * 64)


def test_texts_need_the_tokenizer_and_a_config_needs_classes(tmp_path):
    section = section_of("policy.name=coarse", 'policy.classes=[["a", "b"]]')
    with pytest.raises(ConfigError, match=r"holds texts, and there is no tokenizer here.*TokenClasses\.from_texts"):
        policy_from_section(section)
    with pytest.raises(ConfigError, match="holds texts"):
        make_policy("coarse", classes=[["a", "b"]])
    tokenizer = AutoTokenizer.from_pretrained(pebbles.directory("student"))
    twins = section_of("policy.name=coarse", 'policy.classes=[["###", "**"]]')
    [group] = policy_from_section(twins, tokenizer=tokenizer).term.classes.groups
    assert {tokenizer.decode([token_id]) for token_id in group} == {"###", "**"}
    TokenClasses([[1, 2]]).save(tmp_path / "classes.json")
    for classes in (f"{tmp_path}/classes.json", "[]", "[[7]]"):
        with pytest.raises(ConfigError, match=r"has no class of two tokens that may be used.*or choose uniform"):
            policy_from_section(section_of("policy.name=coarse", f"policy.classes={classes}"))


def test_classes_in_a_run_must_be_listed_there(tmp_path):
    """A study that keeps a copy lists it; one that merely lies in a run may be anybody's."""
    run, classes = RunDir(tmp_path), TokenClasses([TokenClass((1, 2), safe=True)])
    run.commit_text("config.toml", "")
    classes.save(run.classes)
    with pytest.raises(RunDirError, match=r"classes\.json is not listed in"):
        make_policy("coarse", classes=str(run.classes))
    run.commit("classes.json", classes.save)
    assert make_policy("coarse", classes=str(run.classes)).term.classes == classes


# Protected types

TESTED = rock_set(3, 5, 1, verdict=["pillar", "neutral", "undecided"])


def test_pillars_never_weigh_less_than_one():
    policy = make_policy("rocks", rocks=TESTED, lam=0.25, protect=TESTED)
    assert weigh(policy, ROWS).tolist() == [1, 0.25, 1, 1, 1, 1, 0.25]
    heavier = ProtectedPolicy(Counting(3, 3), np.array([3, 5]))
    assert weigh(heavier, ROWS).tolist() == [1, 2, 2, 1, 2, 1, 2]
    selected = make_policy("high_entropy", rho=0.3, protect=TESTED)
    assert weigh(selected, ROWS).tolist() == [1, 0, 1, 1, 1, 1, 0]


TESTED_WINDOWS = rock_set(3, 7, windows=RULE, verdict=["pillar", "neutral"])


@pytest.mark.parametrize(
    ("ids", "kl", "weights"),
    [
        ([5, 3, 6, 0, 7, 0], [0.9, 0.9, 0.9, 0.1, 0.1, 0.1], [1, 1, 1, 1, 0, 1]),  # the pillar's window is none
        ([5, 3, 6, 7, 0, 0], [0.9, 0.9, 0.9, 0.9, 0.9, 0.1], [1, 1, 0, 0, 0, 1]),  # nor is it part of another's
    ],
)
def test_with_windows_too_protection_means_rocks_minus_pillars(ids, kl, weights):
    rows = rows_of([6], ids, {"kl": kl})
    params = {"rocks": TESTED_WINDOWS, "window": True}
    assert weigh(make_policy("rocks", protect=TESTED_WINDOWS, **params), rows).tolist() == weights
    inner = [{"name": "rocks", **params}, {"name": "uniform"}]
    assert weigh(make_policy("product", policies=inner, protect=TESTED_WINDOWS), rows).tolist() == weights


@pytest.mark.parametrize("window", [False, True])
def test_a_protected_control_is_matched_to_protected_rocks(window):
    """As many tokens of every response, in runs as long once pillars are left out, and none of them a pillar."""
    rng = np.random.default_rng(3)
    ids, kl = rng.integers(0, 9, 90), 0.3 + rng.random(90)
    rows = rows_of([40, 30, 20], ids.tolist(), {"kl": kl.tolist()})
    params = {"rocks": TESTED_WINDOWS, "window": window, "protect": TESTED_WINDOWS}
    frozen = weigh(make_policy("rocks", **params), rows)
    assert frozen[ids == 3].all() and ((frozen == 0).sum() > (ids == 7).sum()) == window
    for draw in range(20):
        moved = weigh(make_policy("occurrence_control", draw=draw, **params), rows)
        assert moved[ids == 3].all() and not np.array_equal(moved, frozen)
        for rollout in range(3):
            free = (rows.rollout_ids == rollout) & (ids != 3)
            assert run_lengths(moved[free]) == run_lengths(frozen[free])


def run_lengths(weights: np.ndarray) -> list[int]:
    """Of the runs of weight 0."""
    return sorted(len(run) for run in "".join("#" if weight == 0 else "." for weight in weights).split(".") if run)


def test_protection_passes_everything_on():
    policy = ProtectedPolicy(Counting(3, 3, needs=frozenset({"kl"}), term="asymmetric"), np.array([5]))
    assert (policy.needs, policy.term) == ({"kl"}, "asymmetric")
    assert policy.observe(None, ROWS.token_ids, 0) == {"seen_3": 7}
    other = ProtectedPolicy(Counting(3, 3), np.array([5]))
    other.restore(policy.state())
    assert other.parts[0].seen == 7 and probed(other, ROWS, 0) == [0, 3, 5]


def test_online_rocks_know_what_is_protected():
    policy = make_policy("product", policies=[{"name": "online_rocks"}, {"name": "uniform"}], protect=TESTED)
    assert policy.parts[0].parts[0].tracker.protected.tolist() == [3]


def test_protection_needs_verdicts(tmp_path):
    rock_set(3, 5).save(tmp_path / "rocks.json")
    with pytest.raises(ConfigError, match="rocks without a single verdict: run `rocktokens knockout` on them first"):
        make_policy("uniform", protect=tmp_path / "rocks.json")
    with pytest.raises(RocktokensError, match="does not exist"):
        make_policy("uniform", protect=tmp_path / "none.json")


# From a config


def section_of(*overrides: str):
    models = ["models.student=pebbles-student", "models.teacher=pebbles-teacher"]
    return parse_config('[run]\ndirectory = "a"\n', [*models, *overrides]).policy


def test_files_of_another_tokenizer_are_refused(tmp_path):
    rocks = replace(rock_set(3, verdict=["pillar"]), tokenizer_sha256="a" * 64)
    rocks.save(tmp_path / "rocks.json")
    for name, key in (("rocks", "rocks"), ("occurrence_control", "rocks"), ("uniform", "protect")):
        section = section_of(f"policy.name={name}", f"policy.{key}={tmp_path}/rocks.json")
        for same in ("a" * 64, ""):
            policy_from_section(section, same)
        with pytest.raises(
            TokenizerMismatchError, match="found with tokenizer aaaaaaaaaaaa, this model's is bbbbbbbbbbbb"
        ):
            policy_from_section(section, "b" * 64)


def test_controls_of_another_tokenizer_are_refused(tmp_path):
    replace(CONTROLS, tokenizer_sha256="a" * 64).save(tmp_path / "controls.json")
    section = section_of("policy.name=type_control", f"policy.controls={tmp_path}/controls.json")
    policy_from_section(section, "a" * 64)
    with pytest.raises(
        TokenizerMismatchError, match="matched with tokenizer aaaaaaaaaaaa, this model's is bbbbbbbbbbbb"
    ):
        policy_from_section(section, "b" * 64)


def test_the_seed_of_the_run_fills_in():
    def kept(seed: int, *overrides: str) -> bytes:
        section = section_of("policy.name=random_positions", "policy.rho=0.5", *overrides)
        return weigh(policy_from_section(section, seed=seed), rows_of([50], [0] * 50, {})).tobytes()

    assert kept(1) != kept(2)
    assert kept(1, "policy.seed=2") == kept(2)
