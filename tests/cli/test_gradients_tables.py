"""What gradients read like: every outcome of every claim from numbers made by hand, and the tables of a record."""

import io
import re
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from rocktokens.cli import gradients_tables, tables
from rocktokens.cli.gradients_tables import (
    adam_table,
    block_table,
    category_table,
    control_sentence,
    group_table,
    parameter_table,
    print_gradients,
    type_table,
)
from rocktokens.cli.gradients_tables import test_table as mann_whitney_table
from rocktokens.gradients import claims
from rocktokens.gradients.claims import Claim, judge

HOLDS, DOES_NOT, UNKNOWN = "holds", "does not hold", "cannot be told here"
HOSTILE = "[bold]\x1b[31m\u202e:smile:"


def text_of(table: Table) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160, emoji=False).print(table)
    return stream.getvalue()


def row_of(table: Table, name: str) -> list[str]:
    """The cells of the row that begins with a name."""
    line = next(line for line in text_of(table).splitlines() if line.startswith(name))
    return re.split(r"\s{2,}", line.strip())


def over_batches(mean: float | None, half: float = 0.01, count: int = 4) -> dict[str, Any]:
    values = [mean] * count
    return {"mean": mean, "interval": None if mean is None else [mean - half, mean + half], "values": values}


def mann_whitney(superiority: float, p: float | None, largest: float = 0.3) -> dict[str, Any]:
    sizes = {"n_first": 18, "n_second": 30, "median_first": 0.4, "median_second": 0.1}
    return {**sizes, "superiority": superiority, "p": p, "largest": {"token_id": 7, "freq": 1, "share": largest}}


def change(relative: float | None, interval: Any) -> dict[str, Any]:
    return {"kl_before": 2.0, "kl_after": 1.5, "relative": relative, "relative_interval": interval}


def says(claim: Claim, verdict: str, *parts: str) -> None:
    """Check a verdict, that the sentence ends in it, and what else it says."""
    assert claim.verdict == verdict, claim.sentence
    assert claim.sentence.endswith(f": {verdict}")
    assert claim.sentence.startswith(claim.claim)
    assert [part for part in parts if part not in claim.sentence] == [], claim.sentence


# Claims


def rocks_of(count: int, directions: Any = None, **columns: Any) -> dict[str, Any]:
    """Rocks that each have a direction of their own unless told otherwise."""
    return {"token_id": list(range(count)), "direction": directions or list(range(count)), **columns}


def rare(interval: Any, ratio: float | None = 0.8, kl: float = 2.0) -> dict[str, Any]:
    return {"n_types": 9, "kl": kl, "rocks_kl": 1.5, "norm_ratio": {"ratio": ratio, "interval": interval}}


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [([0.5, 0.9], HOLDS), ([1.1, 2.0], DOES_NOT), ([0.5, 1.1], UNKNOWN), ([0.5, 1.0], UNKNOWN), (None, UNKNOWN)],
)
def test_small_means_smaller_than_rare_types(interval: Any, verdict: str):
    says(claims.small(rare(interval)), verdict, "0.80 ×")


@pytest.mark.parametrize("interval", [[0.5, 0.9], [1.1, 2.0]])
def test_small_cannot_be_told_beside_types_of_lower_kl(interval: Any):
    lower = claims.small(rare(interval, kl=1.25))
    says(lower, UNKNOWN, "no rare types of so high a kl recur: the 9 of the highest have 1.250 nats", "rocks 1.500")


def test_small_needs_rare_types():
    says(claims.small(rare(None, ratio=None)), UNKNOWN, "no rare high-kl type")


@pytest.mark.parametrize(
    ("interval", "verdict"), [([1.1, 2.0], HOLDS), ([0.5, 0.9], DOES_NOT), ([0.9, 1.2], UNKNOWN), (None, UNKNOWN)]
)
def test_the_total_is_measured_by_the_share_of_the_tokens(interval: Any, verdict: str):
    claim = claims.total({"ratio": 1.6, "interval": interval}, {"token_share": 0.25, "norm_share": 0.4})
    says(claim, verdict, "more of the total than their share of the tokens", "25.0 % of the tokens", "40.0 % of Σ‖g‖")


def test_the_total_needs_a_gradient():
    says(claims.total({"ratio": None, "interval": None}, {}), UNKNOWN, "no gradient")


@pytest.mark.parametrize(
    ("test", "cosines", "verdict"),
    [
        (mann_whitney(0.8, 0.01), [0.5] * 10, HOLDS),
        (mann_whitney(0.2, 0.01), [0.5] * 10, DOES_NOT),
        (mann_whitney(0.8, 0.01), [0.02] * 10, DOES_NOT),
        (mann_whitney(0.8, 0.06), [0.5] * 10, UNKNOWN),
        (mann_whitney(0.8, 0.01), [0.5] * 6 + [0.0] * 4 + [None], UNKNOWN),
        (mann_whitney(0.6, None), [0.5] * 10, UNKNOWN),
    ],
)
def test_a_direction_must_be_the_others_and_more_than_theirs(test: Any, cosines: Any, verdict: str):
    says(claims.direction(test, rocks_of(len(cosines), cos_others=cosines)), verdict)


@pytest.mark.parametrize("cosine", [0.5, 0.0])
def test_the_direction_of_one_type_is_not_global(cosine: float):
    found = claims.direction(mann_whitney(0.8, 0.01, largest=0.9), rocks_of(10, cos_others=[cosine] * 10))
    says(found, UNKNOWN, "90.0 % of that sum is one type (token 7, occurrences: 1)")


def test_rocks_of_one_direction_have_one_vote():
    """Ten rocks that all point along: told apart as ten directions, not as five."""
    pairs = [number // 2 for number in range(10)]
    for tested, needed in (
        (lambda rocks: claims.direction(mann_whitney(0.8, 0.01), rocks), {"cos_others": [0.5] * 10}),
        (lambda rocks: claims.cancels(rocks, 0.5), {"alignment": [0.1] * 10, "coherence": [0.1] * 10}),
        (lambda rocks: claims.persists([0.9] * 10, rocks), {}),
        (lambda rocks: claims.kept({"token_id": list(range(10)), "kept": [0.9] * 10}, rocks), {}),
    ):
        says(
            tested(rocks_of(10, **needed)), HOLDS, "10 of 10" if needed else "10", "10 rocks, 10 directions: 10 for it"
        )
        says(tested(rocks_of(10, pairs, **needed)), UNKNOWN, "10 rocks, 5 directions: 5 for it, 0 against")


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ([0.9] * 10, HOLDS),
        ([0.9, None, *[0.9] * 9], HOLDS),
        ([0.7] * 10, DOES_NOT),
        ([0.75] * 10, DOES_NOT),
        ([0.9] * 6 + [0.1] * 4, UNKNOWN),
        ([None], UNKNOWN),
    ],
)
def test_each_rock_keeps_three_quarters(shares: Any, verdict: str):
    says(claims.kept({"token_id": list(range(len(shares))), "kept": shares}, rocks_of(len(shares))), verdict)


def test_kept_shares_are_matched_to_rocks_by_token():
    """Rock 5 did not occur where directions were measured; 7 and 8 are one direction."""
    kept = {"token_id": [5, 7, 8, 9], "kept": [None, 0.9, 0.8, 0.1]}
    found = claims.kept(kept, {"token_id": [7, 8, 9], "direction": [0, 0, 1]})
    says(found, UNKNOWN, "2 of 3 rocks kept more than 75 %", "3 rocks, 2 directions: 1 for it, 1 against")


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [([-0.2, 0.1], HOLDS), ([-0.5, -0.3], DOES_NOT), ([-0.4, -0.1], UNKNOWN), (None, UNKNOWN)],
)
def test_unmoved_means_three_quarters_kept(interval: Any, verdict: str):
    says(claims.unmoved(change(-0.25, interval)), verdict, "as a set", "from 2.000 to 1.500 nats", "-25.0 %")


def test_movement_needs_the_same_tokens_twice():
    for nothing in (claims.unmoved(None), claims.unmoved(change(None, None)), claims.kept(None, rocks_of(3))):
        says(nothing, UNKNOWN, "no other checkpoint scored the same tokens")


@pytest.mark.parametrize(
    ("excess", "verdict"),
    [
        (over_batches(0.2), HOLDS),
        (over_batches(-0.2), DOES_NOT),
        (over_batches(0.2, half=0.3), UNKNOWN),
        (over_batches(0.2, count=3), UNKNOWN),
        (over_batches(None), UNKNOWN),
    ],
)
def test_parameters_are_judged_by_batches(excess: Any, verdict: str):
    claim = claims.parameters(excess, over_batches(0.4))
    says(claim, verdict, "more of the gradient in parameter space than their share of the tokens")


def effect(mean: float | None, verdict: str, below: int = 7) -> dict[str, Any]:
    return {"difference": over_batches(mean), "below": below, "above": 8 - below, "p": 0.07, "verdict": verdict}


@pytest.mark.parametrize(
    ("own", "verdict"),
    [
        (effect(-0.2, "suppresses"), HOLDS),
        (effect(0.2, "amplifies"), DOES_NOT),
        (effect(-0.2, "cannot be told"), UNKNOWN),
        (effect(None, "cannot be told"), UNKNOWN),
    ],
)
def test_adam_suppresses_what_has_less_of_the_step(own: Any, verdict: str):
    says(claims.adam({"rocks": own}), verdict)


def test_adam_is_said_with_its_batches_and_beside_the_control():
    own = effect(-0.2, "cannot be told")
    found = claims.adam({"rocks": own, "control": effect(0.1, "cannot be told")})
    says(
        found,
        UNKNOWN,
        "-20.0 points [-21.0, -19.0]",
        "in 7 of 8 batches (sign test p 0.070)",
        "control by +10.0 points",
    )
    says(claims.adam({"rocks": own}), UNKNOWN, "there is no control")


def test_adam_needs_its_state():
    says(claims.adam(None), UNKNOWN, "no optimizer state")


@pytest.mark.parametrize(
    ("alignment", "verdict"),
    [([0.4] * 10, HOLDS), ([0.6] * 10, DOES_NOT), ([0.4] * 5, UNKNOWN), ([0.4] * 6 + [0.6] * 6, UNKNOWN)],
)
def test_pushes_cancel_when_less_than_half_is_left(alignment: Any, verdict: str):
    rocks = rocks_of(len(alignment), alignment=alignment, coherence=[0.3] * len(alignment))
    says(claims.cancels(rocks, 0.5), verdict)


def test_a_rock_that_occurs_once_cannot_cancel():
    once = rocks_of(11, alignment=[0.4] * 10 + [1.0], coherence=[0.3] * 10 + [None])
    says(claims.cancels(once, 0.5), HOLDS, "10 of 10 rocks")
    says(claims.cancels(rocks_of(1, alignment=[1.0], coherence=[None]), 0.5), UNKNOWN, "no rock occurs twice")


def test_cancelling_is_said_beside_that_of_other_types():
    rocks = rocks_of(10, alignment=[0.4] * 10, coherence=[0.1] * 10)
    says(claims.cancels(rocks, 0.5), HOLDS, "10 of 10 rocks", "of a rock is 0.10, that of another type 0.50")
    says(claims.cancels(rocks, None), HOLDS, "another type not defined")


@pytest.mark.parametrize(
    ("corrected", "verdict"),
    [([0.8] * 10, HOLDS), ([0.6] * 10, DOES_NOT), ([0.8] * 4, UNKNOWN), ([None], UNKNOWN), (None, UNKNOWN)],
)
def test_a_direction_persists_within_45_degrees(corrected: Any, verdict: str):
    says(claims.persists(corrected, rocks_of(len(corrected or []))), verdict)


def test_rocks_without_a_direction_are_counted():
    found = claims.persists([0.9] * 6 + [None] * 3, rocks_of(9))
    says(found, HOLDS, "of the 6 of 9 rocks", "6 turned by less than 45°")


# Tables


def estimated(value: float | None, error: float = 0.0) -> dict[str, Any]:
    return {"value": value, "error": error}


def group(n_types: int, share: float) -> dict[str, Any]:
    return {
        "n_types": n_types,
        "n_occurrences": 100,
        "token_share": share,
        "norm_share": 2 * share,
        "mean_norm": 0.125,
        "cos_balanced": estimated(0.25, 0.03125),
        "cos_pooled": estimated(None),
        "signed_share": estimated(0.75, 0.0625),
        "medians": {"norm": 0.0625, "coherence": None},
    }


def geometry(share: float) -> dict[str, Any]:
    one = {"norm": over_batches(3.0), "cosine": over_batches(0.5), "share": over_batches(share), "rate": None}
    return {"energy": over_batches(0.3), "groups": {"rocks": one, "rest": {**one, "share": over_batches(1 - share)}}}


def shares(update: bool) -> dict[str, Any]:
    parts = {"blocks": {"layer 0 mlp": geometry(0.375)}, "cosines": {"rocks": {"rocks": over_batches(1.0)}}}
    pair = {"rocks": over_batches(1.0), "rest": over_batches(-0.125)}
    gradient = {**parts, "all": geometry(0.25), "cosines": {"rocks": pair, "rest": pair}}
    step = {**parts, "all": geometry(0.125)}
    for own in step["all"]["groups"].values():
        own["rate"] = over_batches(0.5)
    step["effects"] = {
        name: {"difference": over_batches(-0.125), "below": 8, "above": 0, "p": 0.01, "verdict": "suppresses"}
        for name in ("rocks", "rest")
    }
    step["step_shares"] = {"rocks": over_batches(0.0625), "momentum": over_batches(0.9375)}
    return {
        "groups": ["rocks", "rest"],
        "blocks": ["layer 0 mlp"],
        "n_batches": 4,
        "gradient": gradient,
        "update": step if update else None,
    }


def make_record(update: bool = True, sketch: Any = None) -> dict[str, Any]:
    found = {
        "sketch": sketch,
        "groups": {"rocks": group(18, 0.25), "rest": group(28, 0.375)},
        "categories": {"rocks": group(3, 0.25), "rest": group(4, 0.375)},
        "tests": [
            {"column": "mean_norm", "first": "rocks", "second": "rest", "median_first": 0.5, "median_second": 0.25}
            | {"p": 0.0001}
        ],
        "direction": mann_whitney(0.8, 0.01),
        "rocks": rocks_of(10, alignment=[0.4] * 10, coherence=[0.1] * 10, cos_others=[0.5] * 10),
        "others": {"coherence": 0.5},
        "types": {"token_id": [7, 9], "share": [0.25, 0.75]}
        | {
            name: [0.5, None]
            for name in ("mean_norm", "norm", "coherence", "cos_balanced", "cos_others", "cos_pooled", "contribution")
        },
    }
    traced = {"token_share": 0.25, "norm_share": 0.5, "norm_share_interval": (0.4, 0.6), "change": None}
    record: dict[str, Any] = {
        "settings": {"reference": 64, "baseline": 0, "n_tokens": 1234, "n_rollouts": 20, "n_prompts": 10}
        | {"measured_on": "held-out half"},
        "warnings": [],
        "control": {"kind": "none", "tolerance": 0.25},
        "trace": {
            "groups": {"rocks": traced, "rest": traced},
            "norm_ratios": {"all": {"ratio": 2.0, "interval": [1.5, 2.5]}},
            "rare_high_kl": rare([0.5, 0.9]),
            "rocks_kept": None,
            "types": {"token_id": [7, 9], "text": [" So", HOSTILE], "group": ["rocks", "rest"], "freq": [5, 6]}
            | {"category": ["discourse", "other"]},
        },
        "logit": {"reference": {"vocabulary": found, "hidden": found}, "baseline": None, "persistence": None},
        "parameter": {
            "shares": shares(update),
            "token_share": {"rocks": 0.25, "rest": 0.75},
            "excess": {"rocks": over_batches(0.0), "rest": over_batches(0.0)},
            "note": "" if update else "no optimizer state here",
        },
    }
    record["parameter"]["categories"] = {"shares": shares(update), "token_share": {}}
    record["claims"] = [claim.to_record() for claim in judge(record)]
    return record


def printed(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=112, emoji=False)
    for module in (gradients_tables, tables):
        monkeypatch.setattr(module, "output", console)
    print_gradients(record, show=20)
    return stream.getvalue()


def test_claims_come_first_and_each_ends_in_its_verdict(monkeypatch: pytest.MonkeyPatch):
    record = make_record()
    shown = " ".join(printed(record, monkeypatch).split())
    places = [shown.index(" ".join(claim["sentence"].split())) for claim in record["claims"]]
    assert places == sorted(places) and len(places) == 9
    assert places[-1] < shown.index("Logit space, over the vocabulary")
    assert "there is one checkpoint only" in shown


def test_without_an_optimizer_there_is_no_view_of_adams(monkeypatch: pytest.MonkeyPatch):
    shown = printed(make_record(update=False), monkeypatch)
    assert "no optimizer state here" in shown
    assert "Adam's view" not in shown and "of the step" not in shown
    assert "Adam's view" in printed(make_record(), monkeypatch)


def test_a_token_cannot_act_on_the_terminal(monkeypatch: pytest.MonkeyPatch):
    shown = printed(make_record(), monkeypatch)
    assert "[bold]\\u001b[31m" in shown
    assert "\x1b" not in shown and "\u202e" not in shown


def test_groups_show_shares_with_intervals_where_the_trace_has_them():
    record = make_record()
    cells = ["rocks", "18", "25.0 %", "50.0 %", "[40.0, 60.0]", "0.125", "0.062", "—", "0.250", "—", "0.750"]
    assert row_of(group_table(record, "reference", "vocabulary"), "rocks") == cells
    without = [cell for cell in cells if cell != "[40.0, 60.0]"]
    assert row_of(group_table(record, "reference", "hidden"), "rocks") == without


def test_sketched_numbers_have_errors():
    cells = row_of(group_table(make_record(sketch={"width": 64, "seed": 0}), "reference", "vocabulary"), "rocks")
    assert cells[-3] == "0.250 ± 0.031" and cells[-1] == "0.750 ± 0.062"


def test_tests_show_both_medians_and_p():
    assert row_of(mann_whitney_table(make_record(), "vocabulary"), "mean") == ["mean ‖g‖", "0.500", "0.250, < 0.001"]


def test_parameter_space_in_percent():
    parameter = make_record()["parameter"]
    assert row_of(parameter_table(parameter), "rocks") == (
        ["rocks", "25.0 %", "3", "0.50", "25.0 %", "[24.0, 26.0]", "+0.0", "[-1.0, 1.0]"]
    )
    step = ["rocks", "12.5 %", "[11.5, 13.5]", "-12.5", "[-13.5, -11.5]", "suppresses", "0.50"]
    assert row_of(adam_table(parameter["shares"]["update"]), "rocks") == step
    blocks = ["layer 0 mlp", "30.0 %", "37.5 %", "[36.5, 38.5]", "37.5 %", "[36.5, 38.5]"]
    assert row_of(block_table(parameter["shares"]), "layer") == blocks


def test_categories_set_the_spaces_side_by_side():
    cells = ["rocks", "3", "25.0 %", "50.0 %", "25.0 %", "[24.0, 26.0]", "12.5 %", "[11.5, 13.5]"]
    assert row_of(category_table(make_record()), "rocks") == cells


def test_types_are_ordered_by_share_and_cut():
    shown = text_of(type_table(make_record(), show=1, width=160))
    assert "75.0 %" in shown and "25.0 %" not in shown
    assert "contrib" in shown and "contrib" not in text_of(type_table(make_record(), show=1, width=80))


def test_partners_for_all_that_miss_the_total_are_a_loose_match():
    control = dict.fromkeys(("n_matched", "n_rocks", "occurrences", "rock_occurrences", "matched_rock_occurrences"), 9)
    assert "a loose match" in control_sentence({**control, "kind": "partial", "tolerance": 0.25, "n_rare_high_kl": 0})


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("matched", ("every rock has a partner within ±10 %", "18 of 18 rocks")),
        (
            "partial",
            ("a partial match", "11 of 18 rocks", "600 occurrences beside 1,000", "(590 of those", "; 3 of them"),
        ),
        ("none", ("control: none",)),
    ],
)
def test_a_control_says_how_well_it_matches(kind: str, parts: tuple[str, ...]):
    control = {
        "kind": kind,
        "tolerance": 0.1,
        "n_matched": 11 if kind == "partial" else 18,
        "n_rocks": 18,
        "occurrences": 600,
        "rock_occurrences": 1000,
        "matched_rock_occurrences": 590,
        "n_rare_high_kl": 3 if kind == "partial" else 0,
    }
    sentence = control_sentence(control)
    assert [part for part in parts if part not in sentence] == [], sentence
    assert ("would be rare" in sentence) == (kind == "partial")
