"""What a sweep reads like: the numbers of the record, in points, with a dash for what is not known."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from knockout_records import EXACT, make_sweep
from rocktokens.cli import tables
from rocktokens.cli.knockout_tables import (
    ban_table,
    conclusion,
    delta_table,
    detectable_sentence,
    most_changing,
    orthogonality_sentence,
    print_bans,
    print_sweep,
)
from rocktokens.display.numbers import points
from rocktokens.display.table import Table
from rocktokens.display.text import visible
from rocktokens.knockout.records import (
    Ban,
    BanChanges,
    Correlation,
    DetectableLoss,
    Knockout,
    KnockoutSweep,
    NeutralPrompts,
    Role,
    VerdictCounts,
)
from rocktokens.report.knockout_notes import gold_sentences, neutral_sentence, undecided_sentence
from rocktokens.report.tables import verdict_table
from rocktokens.types import Interval, Verdict

HOSTILE = ["[bold]", "[/]", "\\[", "[red]x", ":smile:", "\x1b[31m", "\r", "\u202e", "a[b]c\\"]
UNTOUCHED = BanChanges(0, 0, None, None, None, None, [], [], [])
TOUCHED = BanChanges(31, 30, -2.5, 0.0, 12.0, 0.4, [(9, " Thus", 0.75), (4, "\n", 0.25)], [("p1", 0)], [])


def ban(
    token_id: int,
    name: str,
    delta: float | None = 0.0,
    verdict: Verdict = "neutral",
    role: Role = "tested",
    changes: BanChanges = TOUCHED,
) -> Knockout:
    known = delta is not None
    return Knockout(
        ban=Ban((token_id,), name, role, "discourse"),
        delta=delta,
        interval=(delta - 0.02, delta + 0.02) if known else None,
        p=0.0004 if known else None,
        q=0.012 if known else None,
        verdict=verdict,
        paper_verdict="neutral" if verdict == "undecided" else verdict,
        detectable=0.05,
        bounds=(-0.3, 0.1),
        n_looked=200,
        stopped=None if known else "curtailed",
        changes=changes,
    )


def counts(pillar: int, undecided: int) -> VerdictCounts:
    ours: dict[Verdict, int] = {"pillar": pillar, "stumbling": 0, "neutral": 7, "undecided": undecided}
    return VerdictCounts(
        method=ours,
        paper={**ours, "neutral": 7 + undecided, "undecided": 0},
        corrected={**ours, "pillar": 0, "undecided": undecided + pillar},
    )


def correlation(name: str, interval: Interval | None, n: int = 40) -> Correlation:
    rho = None if interval is None else sum(interval) / 2
    return Correlation(name, rho, interval, p=None if interval is None else 0.4, n=n)


def sweep_of(*knockouts: Knockout, **changes: object) -> KnockoutSweep:
    own = {
        "counts": {"tested": counts(3, 2), "matched": counts(1, 4), "never": counts(0, 0)},
        "correlations": [correlation(name, (-0.3, 0.2)) for name in ("entropy", "log_freq", "kl")],
    }
    return make_sweep(knockouts, **{**own, **changes})


def rendered(table: Table, width: int = 120) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, color_system="truecolor", emoji=False).print(
        table.to_rich(width)
    )
    return [line.rstrip() for line in file.getvalue().splitlines()]


def printed(sweep: KnockoutSweep, monkeypatch: pytest.MonkeyPatch, brief: bool = False) -> str:
    """What the command would print, on one line per sentence."""
    console = Console(file=io.StringIO(), width=400, emoji=False)
    monkeypatch.setattr(tables, "output", console)
    (print_bans if brief else print_sweep)(sweep, "method", 30)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# The table of bans


def test_a_row_has_the_numbers_of_the_record():
    row = rendered(ban_table(sweep_of(ban(325, " So", -0.05, "pillar")), "method", 30))[3]
    assert row.split() == [
        "·So", "325", "discourse", "31", "−5.0", "[−7.0,", "−3.0]", "<", "0.001", "0.012", "pillar", "·Thus", "75",
        "%", "−2.5",
    ]  # fmt: skip


def test_what_is_not_known_is_a_dash():
    lines = rendered(ban_table(sweep_of(ban(5, "x", None, "pillar", changes=UNTOUCHED)), "method", 30))
    assert lines[3].split() == ["x", "5", "discourse", "0", "—", "—", "—", "—", "pillar", "*", "—", "—"]


def test_a_set_is_called_by_its_name():
    both = replace(ban(0, "", -0.1, "pillar"), ban=Ban((3, 9), "2 rocks of category digit", category="digit"))
    row = rendered(ban_table(sweep_of(both), "method", 30))[3]
    assert row.startswith("2 rocks of category digit  ") and " — " in row


def test_the_rule_decides_which_verdict_is_shown():
    sweep = sweep_of(ban(5, "x", 0.0, "undecided"))
    shown = [rendered(ban_table(sweep, rule, 30))[3] for rule in ("method", "paper")]
    assert ["undecided" in row for row in shown] == [True, False] and "neutral" in shown[1]


def test_a_narrow_screen_shows_what_matters():
    table = ban_table(sweep_of(ban(325, "So", -0.05, "pillar")), "method", 30).to_rich(80)
    assert [column.header for column in table.columns] == [
        "banned", "in", "Δ", "95 %", "q", "verdict", "replaced by",
    ]  # fmt: skip


def test_no_token_text_is_taken_for_markup():
    plain = rendered(ban_table(sweep_of(*(ban(i, "x") for i in range(len(HOSTILE)))), "method", 30))
    hostile = [
        replace(ban(i, text), changes=replace(TOUCHED, replacements=[(1, text, 1.0)])) for i, text in enumerate(HOSTILE)
    ]
    lines = rendered(ban_table(sweep_of(*hostile), "method", 30))
    assert len(lines) == len(plain)
    for text, line in zip(HOSTILE, lines[3:], strict=True):
        shown = visible(text)
        assert line.startswith(f"{shown} ") and f" {shown} 100 %" in line and "\x1b" not in line


def test_the_strongest_are_shown_in_order_of_the_change():
    bans = [
        ban(0, "a", -0.02, "undecided"), ban(1, "b", 0.04, "stumbling"), ban(2, "c"), ban(3, "d", -0.03, "undecided"),
        ban(4, "e", -0.01, "pillar"), ban(5, "f", None, "pillar"), ban(6, "g", None, "neutral"),
    ]  # fmt: skip

    def shown(count: int) -> str:
        return "".join(own.ban.name for own in most_changing(bans, count))

    assert [shown(count) for count in (2, 4, 7)] == ["eb", "fdeb", "fdaecgb"]


def test_a_wide_screen_says_what_undecided_bans_need_and_what_pillars_lost():
    bans = [
        replace(ban(1, "7", -0.2, "pillar"), lost_in_gold=1),
        replace(ban(2, "x", -0.01, "undecided"), neutral_prompts=941),
        replace(ban(3, "y"), neutral_prompts=125, lost_in_gold=1),
    ]
    table = ban_table(sweep_of(*bans), "method", 30)
    columns = [table.titles.index(title) for title in ("neutral at", "in gold")]
    assert [[row[at].text for at in columns] for row in table.rows] == [
        ["—", "1 of 1 lost prompt"], ["941", ""], ["—", ""],
    ]  # fmt: skip


# Beside placebos


def test_counts_stand_by_kind_and_rule():
    sweep = sweep_of(ban(1, "a"), ban(2, "b", role="matched"))
    rows = [line.split() for line in rendered(verdict_table(sweep))[3:]]
    assert rows == [
        ["tested", "ours", "3", "0", "7", "2"],
        ["tested", "ours,", "corrected", "0", "0", "7", "5"],
        ["tested", "the", "paper's", "3", "0", "9", "0"],
        ["placebo,", "as", "frequent", "ours", "1", "0", "7", "4"],
        ["placebo,", "as", "frequent", "ours,", "corrected", "0", "0", "7", "5"],
        ["placebo,", "as", "frequent", "the", "paper's", "1", "0", "11", "0"],
    ]


def test_what_was_not_corrected_is_not_counted_as_if():
    bans = [ban(1, "a"), ban(2, "b", None, "pillar"), ban(3, "c", role="matched")]
    tested = replace(counts(3, 2), corrected=None)
    sweep = sweep_of(*bans, counts={"tested": tested, "matched": counts(1, 4), "never": counts(0, 0)})
    rows = [line.split() for line in rendered(verdict_table(sweep))[3:]]
    assert rows[1] == ["tested", "ours,", "corrected", "—", "—", "—", "—"]
    assert rows[2] == ["tested", "the", "paper's", "3", "0", "9", "0"]
    assert rows[4] == ["placebo,", "as", "frequent", "ours,", "corrected", "0", "0", "7", "5"]


def test_the_spread_of_the_changes_is_over_those_that_are_known(monkeypatch: pytest.MonkeyPatch):
    sweep = sweep_of(
        ban(1, "a", -0.06, "pillar"), ban(2, "b", -0.02), ban(3, "c", 0.01), ban(4, "d", None, "pillar"),
        ban(5, "e", -0.03, role="matched"), ban(6, "f", 0.005, role="matched"), ban(7, "g", role="never"),
    )  # fmt: skip
    rows = [line.split() for line in rendered(delta_table(sweep))[2:]]
    assert [row[-5:] for row in rows] == [
        ["4", "3", "−2.0", "−6.0", "+1.0"],
        ["2", "2", "−1.2", "−3.0", "+0.5"],
        ["1", "1", "0.0", "0.0", "0.0"],
    ]
    beyond = "Of 3 tested bans, 1 has a lower Δ than all 2 placebos as frequent, and 1 a higher one."
    assert beyond in printed(sweep, monkeypatch)


# Sentences


def test_the_conditions_of_the_sweep_come_first(monkeypatch: pytest.MonkeyPatch):
    found, first, cost, noise = printed(sweep_of(ban(1, "a")), monkeypatch).splitlines()[:4]
    assert found == (
        "Of 1 ban, 0 cost accuracy (pillar), 0 improve it (stumbling), 1 are neutral and 0 are undecided "
        "(by the paper's rule 0, 0, 1 and 0)."
    )
    assert first.startswith("Without a ban, 71.5 % [64.9, 77.3] of the answers are right: ")
    assert first.endswith(": step 4 at temperature 1 on wordmath, 200 prompts × 1.")
    assert cost == "Decoded 81,203 tokens and retraced 1,200: 0.31 of the 262,114 of a full sweep."
    assert noise == "Decoded again without a ban, 0 of 200 rollouts differ."


def test_the_conclusion_counts_by_both_rules_and_names_the_one_that_is_not_shown():
    sweep = sweep_of(*(ban(n, "x", 0.0, kind) for n, kind in enumerate(("pillar", "undecided", "undecided"))))
    assert conclusion(sweep, "method").endswith(
        "0 are neutral and 2 are undecided (by the paper's rule 1, 0, 2 and 0)."
    )
    assert conclusion(sweep, "paper").endswith("2 are neutral and 0 are undecided (by our rule 1, 0, 0 and 2).")


def test_by_default_the_conclusion_and_the_bans_are_printed(monkeypatch: pytest.MonkeyPatch):
    undecided = replace(ban(1, "a", 0.0, "undecided"), neutral_prompts=941)
    sweep = sweep_of(undecided, ban(2, "b", -0.1, "pillar", role="matched"), warnings=["w"])
    whole, brief = printed(sweep, monkeypatch), printed(sweep, monkeypatch, brief=True)
    found, first, warning = brief.splitlines()[:3]
    assert found == f"{conclusion(sweep, 'method')} Of 1 placebo as frequent, 1 costs accuracy (1 after correction)."
    assert first.startswith("Without a ban, 71.5 %") and warning == "warning: w"
    assert "about 950 prompts would be needed" in brief and "replaced by" in brief
    for words in ("of a full sweep", "Smallest effect", "Spearman", "Corrected: for the number", "lower Δ than all"):
        assert words in whole and words not in brief


def test_an_engine_that_is_not_exact_says_by_how_much(monkeypatch: pytest.MonkeyPatch):
    noise = replace(EXACT, differing=3, flips=2, delta=-0.01, interval=(-0.025, 0.0))
    shown = printed(sweep_of(ban(1, "a"), noise=noise, warnings=["3 of 200 [b]differ[/b]"]), monkeypatch)
    assert "warning: 3 of 200 [b]differ[/b]\n" in shown
    assert "without a ban changes accuracy by −1.0 points [−2.5, 0.0]." in shown and "0 of 200" not in shown


def test_what_stopped_early_and_what_never_occurs_is_said(monkeypatch: pytest.MonkeyPatch):
    bans = [ban(1, "a", None, "pillar"), ban(2, "b", changes=UNTOUCHED), ban(3, "c")]
    sweep = sweep_of(*bans)
    shown = printed(sweep, monkeypatch)
    assert "* 1 stopped" in shown and "1 of 3 occur in no answer" in shown
    assert "there is nothing to compare these changes with" in shown
    curtailed = printed(replace(sweep, settings=replace(sweep.settings, mode="curtailed")), monkeypatch)
    assert "their Δ is not known" in curtailed and "forecasts" in shown


def test_undecided_bans_say_how_many_prompts_would_be_needed(monkeypatch: pytest.MonkeyPatch):
    needing = [replace(ban(n, f"t{n}", 0.0, "undecided"), neutral_prompts=120 * n + 101) for n in range(6)]
    assert undecided_sentence(sweep_of(needing[5])) == (
        "Undecided: about 710 prompts would be needed to call “t5” neutral."
    )
    sentence = (
        "Undecided: about this many prompts would be needed to call each neutral: “t0” 110, “t1” 230, “t2” 350, "
        "“t3” 470, 2 more up to 710."
    )
    shown = printed(sweep_of(*reversed(needing), ban(9, "z")), monkeypatch)
    assert sentence in shown
    assert (
        "A neutral verdict needs 125 prompts even if no answer changes, and about 450 (80 % power) where as many "
        "answers change as under the median ban."
    ) in shown
    assert undecided_sentence(sweep_of(ban(1, "a", 0.0, "undecided"), ban(2, "b"))) == ""
    assert neutral_sentence(sweep_of(neutral=None)) == ""
    assert neutral_sentence(sweep_of(neutral=NeutralPrompts(125, 125))).endswith("even if no answer changes.")


def test_pillars_say_how_many_lost_prompts_have_them_in_the_gold_answer(monkeypatch: pytest.MonkeyPatch):
    lost = [("p1", 0), ("p1", 1), ("p2", 0), ("p3", 0)]
    digit = ban(7, "7", -0.2, "pillar", changes=replace(TOUCHED, lost=lost))
    sentence = "“7”: 2 of 3 lost prompts have it in the gold answer, which the ban may make unwritable."
    assert sentence in printed(sweep_of(replace(digit, lost_in_gold=2)), monkeypatch)
    none = replace(digit, lost_in_gold=0)
    assert gold_sentences(sweep_of(none, replace(digit, lost_in_gold=2, verdict="undecided"))) == []
    of_digit = replace(none, ban=replace(none.ban, category="digit"))
    assert gold_sentences(sweep_of(of_digit)) == [sentence.replace("2 of 3", "0 of 3")]
    assert gold_sentences(sweep_of(digit)) == []


@pytest.mark.parametrize(
    ("single", "corrected", "sentence"),
    [
        (0.0412, 0.0931, r"4\.1 points, .*; corrected for 2 bans: 9\.3 points"),
        (0.0412, 1.0, r"4\.1 points, .*; corrected for 2 bans: none"),
        (1.0, 1.0, r"None: with 200 prompts no loss would be called a pillar"),
    ],
)
def test_what_could_have_been_seen(single: float, corrected: float, sentence: str):
    sweep = sweep_of(ban(1, "a"), ban(2, "b"), detectable=DetectableLoss(single, corrected))
    assert re.match(sentence, detectable_sentence(sweep))


@pytest.mark.parametrize(
    ("intervals", "sentence"),
    [
        ([(-0.3, 0.2), (0.1, 0.5), (-0.1, 0.1)], "Δ is related to log frequency: the paper's claim"),
        ([(-0.6, -0.1), (0.1, 0.5), None], "Δ is related to student entropy and log frequency: the paper's claim"),
        ([(-0.3, 0.2), (-0.55, 0.1), (-0.1, 0.1)], "Every interval includes 0, and the widest reaches |ρ| = 0.55"),
        ([(-0.2, 0.1), (-0.05, 0.1), (-0.1, 0.2)], "Every ρ is within ±0.2"),
        ([(-0.1, 0.1), None, (-0.1, 0.1)], "Too few different values"),
    ],
)
def test_whether_the_claim_of_no_relation_can_be_told(intervals: list[tuple[float, float] | None], sentence: str):
    records = [correlation(name, own) for name, own in zip(("entropy", "log_freq", "kl"), intervals, strict=True)]
    assert orthogonality_sentence(records).startswith(sentence)


def test_too_few_types_are_not_correlated(monkeypatch: pytest.MonkeyPatch):
    assert "Spearman" in printed(sweep_of(ban(1, "a")), monkeypatch)
    few = [correlation(name, None, n=3) for name in ("entropy", "log_freq", "kl")]
    assert "Spearman" not in printed(sweep_of(ban(1, "a"), correlations=few), monkeypatch)


def test_points_are_signed_hundredths():
    assert [points(delta) for delta in (-0.05, 0.015, 0.0, -0.0, None)] == ["−5.0", "+1.5", "0.0", "0.0", "—"]
