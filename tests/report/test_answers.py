"""The five sentences: their numbers are those of the records, and what was not run is said."""

from dataclasses import replace
from pathlib import Path

import pytest
from explorer_run import make_run
from report_run import make_ban, make_find, make_knockout, make_report_run, make_rocks, make_study, rock_id

from rocktokens.report.page.answers import five_answers, gain, matter, moved, sure, which
from rocktokens.report.views.run_view import RunView
from rocktokens.rocks.records import Crossing
from rocktokens.run_dir import RunDir
from rocktokens.studies.records import Comparison, StudyResult, StudyVerdict


def test_which_names_the_first_rocks_and_gives_shares_with_intervals():
    sentence = which(make_rocks(("###", " So")))
    assert sentence == (
        "2 of 50 token types are rocks at checkpoint 10: “###” and “·So”. They make up 25.0 % [20.0, 30.0] of the "
        "tokens and hold 87.5 % [75.0, 93.8] of the loss that is left (held-out half, 90 prompts, 95 % intervals)."
    )
    assert "“f” and 3 more" in which(make_rocks(tuple("abcdefghi")))
    assert which(make_rocks(("a",))).startswith("1 of 50 token types is a rock at checkpoint 10: “a”. It makes up")


def test_no_rocks_is_an_answer():
    none = make_rocks(())
    asked = {**none.criterion, "require": "stuck", "min_prompts": 5}
    start, more = "No token type is a rock at checkpoint 10: ", "trace more prompts (trace.num_prompts)."
    passes = "passes find.require = stuck and find.min_prompts = 5"
    assert which(replace(none, criterion=asked)) == f"{start}no type with a loss {passes}: {more}"
    high = replace(none, criterion={**asked, "min_score": 7.5})
    assert which(high).endswith("find.min_prompts = 5 and find.min_score = 7.5: lower find.min_score.")
    silent = replace(none, summary={**none.summary, "kl_share": None})
    assert which(silent).endswith("there is no kl to rank: on these tokens the student and the teacher are the same.")


FEW = {"n_prompts": 6, "n_prompts_selection": 6}
TOO_FEW = "12 prompts are too few to find rocks: trace at least 40 (trace.num_prompts)."


def test_too_few_prompts_are_said_first_and_nothing_of_single_rocks():
    assert which(make_rocks((), **FEW)) == f"No token type is a rock at checkpoint 10: {TOO_FEW}"
    some = make_rocks(("a", "b"), **FEW)
    assert which(some).startswith(f"{TOO_FEW} What follows may be chance. 2 of 50 token types are rocks")
    assert moved(some).startswith("No evidence that rocks moved less") and "never moved" not in moved(some)


def test_how_sure_counts_resamples_and_names_the_setting_that_matters_most():
    assert sure(make_rocks(("a", "b", "c")), make_find()) == (
        "2 of 3 rocks are stable: in at least 95 % of resamples of the prompts. Random halves of the prompts that "
        "selected them agree with the set to 0.90 (Jaccard; 90 % of halves between 0.80 and 1.00). The setting that "
        "changes the set most is tau = 0.9 (Jaccard 0.50)."
    )
    bare = make_rocks(("a",))
    unsampled = replace(bare, tokens=[replace(bare.tokens[0], p_in_top_k=None)])
    assert sure(unsampled, None).startswith("Not known")


@pytest.mark.parametrize(
    ("k", "crossed", "is_said"),
    [("auto", False, True), ("auto", True, False), (3, False, False), ("auto", None, False)],
)
def test_that_no_cut_off_was_found_is_said_where_one_was_sought(k: int | str, crossed: bool | None, is_said: bool):
    rocks, found = make_rocks(("a", "b", "c")), make_find()
    auto = None if crossed is None else Crossing(3, 0.5, 0.9, crossed)
    found = replace(found, cutoff=replace(found.cutoff, auto=auto))
    sentence = sure(replace(rocks, criterion={**rocks.criterion, "k": k}), found)
    assert ("No cut-off was found: K is all types with a score" in sentence) == is_said


def test_whether_training_moved_them_is_paired_and_counts_who_is_stuck_on_both_halves():
    rocks = make_rocks(("a", "b", "c"))
    sentence = moved(rocks)
    assert sentence.startswith(
        "Training never moved 2 of 3 rocks (stuck on both halves of the prompts) and 1 is residual (the loss fell "
        "early and then stopped falling). No evidence that rocks moved less than other tokens. From checkpoint 0 "
    )
    assert "of rocks changed by −50.0 % [−62.5, −37.5] to 0.700 nats per token" in sentence
    assert "other tokens by −25.0 % [−50.0, −12.5] to 0.050." in sentence
    doubtful = [replace(rocks.tokens[0], held_out_label="unclear"), *rocks.tokens[1:]]
    assert moved(replace(rocks, tokens=doubtful)).startswith(
        "Training never moved 1 of 3 rocks (stuck on both halves of the prompts), 1 is unclear (the prompts cannot "
    )
    assert moved(make_rocks(("a",), kl_change_rocks=None)).startswith("Not known")


@pytest.mark.parametrize(
    ("rocks", "rest", "verdict"),
    [
        ([-0.1, 0.0], [-0.5, -0.2], "prompts). Rocks moved less than other tokens. "),
        ([-0.5, -0.2], [-0.1, 0.0], "prompts). Rocks moved more than other tokens; the table shows each one. "),
        ([-0.3, -0.1], [-0.1, 0.0], "prompts). No evidence that rocks moved less than other tokens. "),
        (None, [-0.1, 0.0], "prompts). From checkpoint 0 to 10"),
    ],
)
def test_the_set_has_a_verdict_by_its_intervals(rocks: list[float] | None, rest: list[float], verdict: str):
    intervals = {"kl_change_rocks": rocks, "kl_change_rest": rest}
    assert verdict in moved(make_rocks(("a",), intervals=intervals))


def test_rocks_of_an_older_file_have_no_labels():
    rocks = make_rocks(("a", "b", "c"))
    older = [replace(token, label=None, held_out_label=None) for token in rocks.tokens]
    sentence = moved(replace(rocks, tokens=older))
    assert sentence.startswith("No evidence") and "never moved" not in sentence
    assert sentence.endswith(" Single rocks have no labels: run `rocktokens find` again.")


def test_whether_they_matter_says_who_is_a_pillar_and_what_placebos_did():
    bans = [
        make_ban("\n", ids=[rock_id(0)]),
        make_ban("b", verdict="neutral", delta=0.0, ids=[rock_id(1)]),
        make_ban("c", "matched", ids=[99]),
    ]
    rocks = make_rocks(("\n", "b", "x"))
    assert matter(make_knockout(bans), rocks) == (
        "Of 2 rocks banned one at a time, 1 costs accuracy (pillar; 1 after correction for the number of bans; points, "
        "95 % intervals: “⏎” −25.0 [−37.5, −12.5]). 1 is neutral: banning changes accuracy by less than 3 points "
        "either way. Of 1 placebo as frequent, 1 costs accuracy (1 after correction). Without a ban, 87.5 % [75.0, "
        "93.8] of 90 answers are right (95 % interval). 2 of 3 rocks were banned."
    )
    assert "No other type as frequent was banned" in matter(make_knockout(bans[:2]), rocks)
    curtailed = [replace(make_ban("x", delta=None), q=None)]
    assert "1 costs accuracy (pillar; not corrected for the number of bans)." in matter(make_knockout(curtailed), rocks)


def test_only_bans_of_rocks_count_and_placebos_as_frequent_as_those():
    rocks = make_rocks(("a", "b"))
    other, beside = make_ban("the", ids=[999]), make_ban("p", "matched", ids=[998], beside=999)
    own = make_ban("a", ids=[rock_id(0)])
    assert matter(make_knockout([other, beside, own]), rocks) == matter(make_knockout([own]), rocks)
    assert matter(make_knockout([other, beside]), rocks) == ("Not known: none of 2 rocks was banned, only other types.")


def test_an_effect_that_correction_does_not_leave_is_not_counted_after_it():
    bans = [replace(make_ban("a", ids=[rock_id(0)]), q=0.05), replace(make_ban("b", ids=[rock_id(1)]), q=0.06)]
    assert "2 cost accuracy (pillar; 1 after correction for the number of bans;" in matter(
        make_knockout(bans), make_rocks(("a", "b"))
    )


def test_sets_stand_by_themselves_and_the_level_is_that_of_the_sweep():
    both = [rock_id(0), rock_id(1)]
    bans = [make_ban("2 rocks", ids=both), make_ban("controls of 2 rocks", "matched", "neutral", 0.0, ids=[98, 99])]
    assert matter(make_knockout(bans, alpha=0.1), make_rocks(("a", "b"))) == (
        "No rock was banned by itself. Banned together (points, 90 % intervals): 2 rocks −25.0 [−37.5, −12.5], pillar; "
        "controls of 2 rocks 0.0 [−12.5, +12.5], neutral. Without a ban, 87.5 % [75.0, 93.8] of 90 answers are right "
        "(95 % interval)."
    )


def test_without_rocks_there_is_nothing_to_doubt_to_follow_or_to_ban():
    none = make_rocks((), kl_change_rocks=None)
    sentences = (sure(none, make_find()), moved(none), matter(make_knockout(), none))
    assert all(own.startswith("There are no rocks ") for own in sentences)


def test_the_gain_is_against_the_baseline_with_what_could_have_been_seen():
    study = make_study()
    sentence = gain(study)
    assert sentence.startswith(
        "No arm is shown to be better than uniform at equal steps. uniform reaches 75.0 % [62.5, "
    )
    assert "rock freeze: −12.5 points [−37.5, +12.5], undecided, 25.0 % of the LM head's work saved." in sentence
    assert "Smallest effect this study could detect: 12.5 to 31.2 points." in sentence
    assert gain(with_verdict(study, "better")).startswith("rock freeze is better than uniform at equal steps. ")
    assert gain(replace(study, comparisons=[])).startswith("Not known")


def test_collapsed_runs_are_said_first_and_mark_every_mean():
    study = with_verdict(make_study(), "better")
    uniform, freeze, other = study.arms
    first, *others = freeze.runs
    freeze = replace(freeze, runs=[replace(first, accuracy=[0.5, 0.25]), *others])
    sentence = gain(replace(study, arms=[uniform, freeze, other]).mark_collapsed())
    assert sentence.startswith(
        "1 of 2 runs of rock freeze collapsed (50.0 % [1.3, 98.7] ended below their start): its mean is unreliable. "
        "rock freeze (unreliable mean) is better than uniform"
    )
    assert "rock freeze (unreliable mean): −12.5 points" in sentence and "uniform reaches 75.0 % [" in sentence
    exploratory = replace(study, comparisons=[replace(own, role="exploratory") for own in study.comparisons])
    assert gain(exploratory).startswith("rock freeze (exploratory) is better than uniform")


def with_verdict(study: StudyResult, verdict: StudyVerdict) -> StudyResult:
    """The study with this verdict on its first pair."""
    return replace(study, comparisons=[replace(study.comparisons[0], verdict=verdict), *study.comparisons[1:]])


def turned(pair: Comparison) -> Comparison:
    """The same comparison the other way round."""
    assert pair.interval is not None and pair.difference is not None
    turned: dict[StudyVerdict, StudyVerdict] = {"better": "worse", "worse": "better"}
    return replace(
        pair,
        first=pair.second,
        second=pair.first,
        verdict=turned.get(pair.verdict, pair.verdict),
        difference=-pair.difference,
        interval=(-pair.interval[1], -pair.interval[0]),
    )


def test_a_pair_says_the_same_whichever_way_round_it_was_compared():
    verdicts: tuple[StudyVerdict, ...] = ("better", "worse", "undecided")
    for verdict in verdicts:
        study = with_verdict(make_study(), verdict)
        other_way = replace(study, comparisons=[turned(own) for own in study.comparisons])
        assert gain(other_way) == gain(study)
    apart = replace(make_study().comparisons[0], second="another arm")
    assert gain(replace(make_study(), comparisons=[apart])).startswith("Not known")


def test_parts_that_were_not_run_are_named_with_their_command(tmp_path: Path):
    traced = make_run(tmp_path / "traced")
    RunDir(traced).drop(["rocks.json", "knockout.json"])
    answers = five_answers(RunView.open(traced))
    assert [own.known for own in answers] == [False] * 5
    verbs = [own.sentence.split("rocktokens ")[1] for own in answers]
    assert verbs == ["find`.", "find`.", "find`.", "knockout`.", "study`."]


def test_a_whole_run_answers_all_and_names_its_sources(tmp_path: Path):
    answers = five_answers(RunView.open(make_report_run(tmp_path / "run")))
    files = [
        *(("rocks.json",), ("rocks.json", "find.json"), ("rocks.json",)),
        *(("knockout.json", "rocks.json"), ("study.json",)),
    ]
    assert [own.sources for own in answers] == files


def test_bans_without_rocks_say_what_is_missing(tmp_path: Path):
    path = make_report_run(tmp_path / "run")
    RunDir(path).drop(["rocks.json"])
    assert five_answers(RunView.open(path))[3].sentence.endswith("run `rocktokens find`.")


@pytest.mark.parametrize("text", ["\x1b[31m", "\u202e", "\ud800", "x" * 1_000_000])
def test_a_token_cannot_act_on_its_sentence(text: str):
    sentence = which(make_rocks((text,)))
    assert sentence.isprintable() and len(sentence) < 400
