"""The first screen: a state follows from the numbers by its rule, and nothing is claimed that they do not show."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from explorer_run import make_run
from report_run import TEXTS, make_ban, make_find, make_knockout, make_report_run, make_rocks, make_study, rock_id

from rocktokens.display.text import visible
from rocktokens.report.page.answers import five_answers
from rocktokens.report.page.facts import headline
from rocktokens.report.page.tiles import (
    NAMED_ROCKS,
    State,
    five_tiles,
    gain_tile,
    matter_tile,
    moved_tile,
    named_rocks,
    sure_tile,
    terms_of,
    which_tile,
)
from rocktokens.report.views.run_view import RunView
from rocktokens.rocks.records import Crossing
from rocktokens.run_dir import RunDir
from rocktokens.studies.records import StudyResult
from rocktokens.types import Label, RockSet, Verdict

WORDS = 26
FEW = {"n_prompts": 6, "n_prompts_selection": 6}
THREE = ("a", "b", "c")


@pytest.mark.parametrize(
    ("kl", "tokens", "state"),
    [
        ([0.5, 0.9], [0.2, 0.3], "supported"),
        ([0.1, 0.19], [0.2, 0.3], "contradicted"),
        ([0.25, 0.9], [0.2, 0.3], "inconclusive"),
        (None, [0.2, 0.3], "inconclusive"),
    ],
)
def test_rocks_hold_much_only_where_the_intervals_say_so(kl: list[float] | None, tokens: list[float], state: State):
    tile = which_tile(make_rocks(("a", "b"), intervals={"kl_share": kl, "token_share": tokens}))
    assert (tile.state, tile.number, tile.unit) == (state, "2 of 50", "token types are rocks")
    assert tile.sentence.startswith("They hold 87.5 %") and tile.sentence.endswith("with 25.0 % of the tokens.")


def test_too_few_prompts_leave_everything_open():
    few = make_rocks(THREE, **FEW)
    assert {tile.state for tile in (which_tile(few), sure_tile(few, make_find()), moved_tile(few))} == {"inconclusive"}
    assert which_tile(few).sentence.startswith("Too few prompts, so perhaps by chance: ")
    assert "never" not in moved_tile(few).sentence
    assert which_tile(make_rocks((), **FEW)).state == "inconclusive"
    assert which_tile(make_rocks(())).state == "contradicted"


@pytest.mark.parametrize(("stable", "state"), [(3, "supported"), (2, "inconclusive"), (1, "contradicted")])
def test_stable_is_a_majority(stable: int, state: State):
    rocks = make_rocks(("a", "b", "c", "d"))
    tokens = [replace(own, p_in_top_k=0.95 if place < stable else 0.94) for place, own in enumerate(rocks.tokens)]
    tile = sure_tile(replace(rocks, tokens=tokens), make_find())
    assert (tile.state, tile.number) == (state, f"{stable} of 4")
    assert "random halves agree to 0.90 [0.80, 1.00]" in tile.sentence


def test_where_no_cut_off_was_found_nothing_is_stable():
    found = make_find()
    found = replace(found, cutoff=replace(found.cutoff, auto=Crossing(3, 0.5, 0.9, False)))
    tile = sure_tile(make_rocks(THREE), found)
    assert tile.state == "inconclusive" and tile.sentence.startswith("No cut-off was found")


def labelled(*halves: tuple[Label | None, Label | None]) -> RockSet:
    rocks = make_rocks(tuple(str(place) for place, _ in enumerate(halves)))
    tokens = [
        replace(own, label=first, held_out_label=second)
        for own, (first, second) in zip(rocks.tokens, halves, strict=True)
    ]
    return replace(rocks, tokens=tokens)


@pytest.mark.parametrize(
    ("halves", "state", "never"),
    [
        ([("stuck", "stuck")] * 2 + [("residual", "residual")], "supported", "2 of 3"),
        ([("stuck", "unclear")] * 3, "inconclusive", "0 of 3"),
        ([("stuck", "stuck"), ("stuck", "residual"), ("moving", "moving")], "inconclusive", "1 of 3"),
        ([("residual", "residual")] * 2 + [("stuck", "stuck")], "contradicted", "1 of 3"),
    ],
)
def test_never_moved_is_said_only_of_what_is_stuck_on_both_halves(
    halves: list[tuple[Label, Label]], state: State, never: str
):
    tile = moved_tile(labelled(*halves))
    assert (tile.state, tile.number) == (state, never)
    assert tile.sentence.endswith("set's loss changed by −50.0 % [−62.5, −37.5].")
    assert ("Each of these kept at least 75 %" in tile.sentence) == (never != "0 of 3")
    assert ("With the other 2," in tile.sentence) == (never == "1 of 3")


def test_without_labels_the_set_alone_is_spoken_of():
    tile = moved_tile(labelled((None, None), ("stuck", None)))
    assert (tile.state, tile.number) == ("inconclusive", "−50.0 %") and "never" not in tile.sentence
    assert moved_tile(make_rocks(("a",), kl_change_rocks=None)).sentence.startswith("Not known")


def bans(*verdicts: Verdict, **changes: Any) -> Any:
    return make_knockout(
        [
            replace(make_ban(THREE[place], verdict=verdict, ids=[rock_id(place)]), **changes)
            for place, verdict in enumerate(verdicts)
        ]
    )


@pytest.mark.parametrize(
    ("verdicts", "changes", "state"),
    [
        (("pillar", "neutral", "undecided"), {}, "supported"),
        (("stumbling", "neutral", "neutral"), {}, "supported"),
        (("pillar", "neutral", "neutral"), {"q": 0.06}, "inconclusive"),
        (("pillar", "neutral", "neutral"), {"q": None, "delta": None, "interval": None}, "inconclusive"),
        (("neutral", "neutral", "neutral"), {}, "contradicted"),
        (("neutral", "neutral", "undecided"), {}, "inconclusive"),
        (("neutral", "neutral"), {}, "inconclusive"),
    ],
)
def test_undecided_is_not_neutral_and_an_effect_must_survive_correction(
    verdicts: tuple[Verdict, ...], changes: dict[str, Any], state: State
):
    tile = matter_tile(bans(*verdicts, **changes), make_rocks(THREE))
    assert (tile.state, tile.number) == (state, f"{verdicts.count('pillar')} of {len(verdicts)}")
    if count := verdicts.count("undecided"):
        assert f"{count} undecided" in tile.sentence


def test_what_placebos_did_stands_beside_what_rocks_did():
    sweep = make_knockout([make_ban("\n", ids=[rock_id(0)]), make_ban("p", "matched", ids=[99])])
    assert matter_tile(sweep, make_rocks(THREE)).sentence == (
        "Banning one of these costs accuracy (“⏎”: −25.0 [−37.5, −12.5] points). Equally frequent non-rocks: 1 of 1 "
        "are pillars."
    )
    assert matter_tile(make_knockout([make_ban("x", ids=[9_999])]), make_rocks(THREE)).sentence.startswith("Not known")


def all_pairs(**changes: Any) -> Callable[[StudyResult], StudyResult]:
    return lambda study: replace(study, comparisons=[replace(own, **changes) for own in study.comparisons])


@pytest.mark.parametrize(
    ("change", "state", "said"),
    [
        (
            all_pairs(),
            "inconclusive",
            "No gain shown: rock freeze −12.5 [−37.5, +12.5] points, undecided on 2 seeds; it saves",
        ),
        (all_pairs(verdict="better"), "supported", "A gain: rock freeze −12.5 [−37.5, +12.5] points, better"),
        (all_pairs(verdict="better", unreliable=True), "inconclusive", "its mean unreliable"),
        (all_pairs(verdict="better", role="exploratory"), "inconclusive", "No gain shown"),
        (all_pairs(verdict="worse"), "contradicted", "No gain: rock freeze −12.5 [−37.5, +12.5] points, worse"),
        (all_pairs(verdict="worse", unreliable=True), "inconclusive", "its mean unreliable"),
        (all_pairs(second="another"), "inconclusive", "Not known"),
    ],
)
def test_a_gain_needs_a_primary_pair_with_a_reliable_mean(
    change: Callable[[StudyResult], StudyResult], state: State, said: str
):
    tile = gain_tile(change(make_study()))
    assert tile.state == state and said in tile.sentence
    assert tile.number.startswith("2 of 2") == (state == "supported")


def test_a_whole_run_has_five_short_tiles_and_its_first_rocks(tmp_path: Path):
    view = RunView.open(make_report_run(tmp_path / "run"))
    tiles, rocks = five_tiles(view, five_answers(view)), named_rocks(make_rocks())
    assert len(tiles) == 5 and "not run" not in {own.state for own in tiles}
    assert all(len(own.sentence.split()) <= WORDS and own.sentence.isprintable() for own in tiles)
    assert [own.text for own in rocks] == [visible(text) for text in TEXTS[:NAMED_ROCKS]]
    terms = terms_of(rocks)
    assert "stuck, at least 75 % of the loss is left" in terms and "undecided, too few prompts to tell" in terms
    assert set(headline(view)) == {"task", "steps"} and headline(view)["steps"].endswith("checkpoints)")


def test_what_was_not_run_says_so_and_how_to_run_it(tmp_path: Path):
    traced = make_run(tmp_path / "traced")
    RunDir(traced).drop(["rocks.json", "knockout.json"])
    view = RunView.open(traced)
    tiles = five_tiles(view, five_answers(view))
    assert {own.state for own in tiles} == {"not run"} and all("run `rocktokens" in own.sentence for own in tiles)
