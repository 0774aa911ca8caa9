"""The five sentences: their numbers are those of the records, and what was not run is said."""

from dataclasses import replace
from pathlib import Path

import pytest
from explorer_run import make_run
from report_run import make_ban, make_find, make_knockout, make_report_run, make_rocks, make_study

from rocktokens.report.answers import five_answers, gain, matter, moved, sure, which
from rocktokens.report.runs import RunView


def test_which_names_the_first_rocks_and_gives_shares_with_intervals():
    sentence = which(make_rocks(("###", " So")))
    assert sentence == (
        "2 of the 50 token types used at checkpoint 10 are rocks (“###” and “·So”): 25.0 % [20.0, 30.0] of the tokens, "
        "which hold 87.5 % [75.0, 93.8] of the loss that is left (held-out half, 90 prompts, 95 % intervals)."
    )
    assert "“f” and 3 more" in which(make_rocks(tuple("abcdefghi")))


def test_no_rocks_is_an_answer():
    assert which(make_rocks(())) == "No token type is a rock at checkpoint 10: none passes the criterion."


def test_how_sure_counts_resamples_and_names_the_setting_that_matters_most():
    assert sure(make_rocks(("a", "b", "c")), make_find()) == (
        "2 of the 3 stay rocks in at least 95 % of resamples of the prompts; random halves of the prompts agree with "
        "the set to 0.90 [0.80, 1.00] (Jaccard); of all settings, moved one at a time, tau = 0.9 changes the set most "
        "(0.50)."
    )
    bare = make_rocks(("a",))
    unsampled = replace(bare, tokens=[replace(bare.tokens[0], p_in_top_k=None)])
    assert sure(unsampled, None).startswith("Not known")


def test_whether_training_moved_them_is_paired_and_counts_who_kept():
    sentence = moved(make_rocks(("a", "b", "c")))
    assert "of the rocks changed by −50.0 % [−62.5, −37.5] to 0.700" in sentence
    assert "others by −25.0 % [−50.0, −12.5] to 0.050; 2 of the 3 rocks kept more than 75 %" in sentence
    assert moved(make_rocks(("a",), kl_change_rocks=None)).startswith("Not known")


def test_whether_they_matter_says_who_is_a_pillar_and_what_placebos_did():
    bans = [make_ban("\n"), make_ban("b", verdict="neutral", delta=0.0), make_ban("c", "matched")]
    assert matter(make_knockout(bans)) == (
        "Of 2 bans while decoding, 1 cost accuracy (points: “⏎” −25.0 [−37.5, −12.5]) and 1 change it by less than 3 "
        "points either way, where 87.5 % [75.0, 93.8] of 90 answers are right without a ban; of 1 other type as "
        "frequent, 1 cost accuracy."
    )
    assert "no other type as frequent was banned" in matter(make_knockout(bans[:2]))
    curtailed = [make_ban("x", delta=None)]
    assert "1 cost accuracy, where" in matter(make_knockout(curtailed))


def test_the_gain_is_against_the_baseline_with_what_could_have_been_seen():
    study = make_study()
    sentence = gain(study)
    assert sentence.startswith("No sure gain: against uniform, which reaches 75.0 % [62.5, 87.5] after 16 steps, rock ")
    assert "rock freeze −12.5 [−37.5, +12.5], undecided" in sentence
    assert "undecided, ±31.2 could have been seen, with 25.0 % of the head's work saved" in sentence
    study["comparisons"][0]["verdict"] = "better"
    assert gain(study).startswith("A gain with rock freeze: against uniform")
    assert gain({**study, "comparisons": []}).startswith("Not known")


def test_parts_that_were_not_run_are_named_with_their_command(tmp_path: Path):
    traced = make_run(tmp_path / "traced")
    for name in ("rocks.json", "knockout.json"):
        (traced / name).unlink()
    answers = five_answers(RunView.open(traced))
    assert [own.known for own in answers] == [False] * 5
    assert [own.sentence.split("rocktokens ")[1] for own in answers] == [
        "find).",
        "find).",
        "find).",
        "knockout).",
        "study).",
    ]


def test_a_whole_run_answers_all_and_names_its_sources(tmp_path: Path):
    answers = five_answers(RunView.open(make_report_run(tmp_path / "run")))
    files = [("rocks.json",), ("rocks.json", "find.json"), ("rocks.json",), ("knockout.json",), ("study.json",)]
    assert [own.sources for own in answers] == files


@pytest.mark.parametrize("text", ["\x1b[31m", "\u202e", "\ud800", "x" * 1_000_000])
def test_a_token_cannot_act_on_its_sentence(text: str):
    sentence = which(make_rocks((text,)))
    assert sentence.isprintable() and len(sentence) < 400
