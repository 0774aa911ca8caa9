"""What ``rocktokens gradients`` prints: the tables of a record made by hand."""

import io
import re

import pytest
from rich.console import Console

from gradient_records import make_control
from gradient_records import make_gradients as make_gradients_record
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
from rocktokens.display.table import Table
from rocktokens.gradients.records import GradientsRecord, SketchSettings

HOSTILE = "[bold]\x1b[31m\u202e:smile:"


def text_of(table: Table, width: int = 160) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160, emoji=False).print(table.to_rich(width))
    return stream.getvalue()


def row_of(table: Table, name: str) -> list[str]:
    """The cells of the row that begins with a name."""
    line = next(line for line in text_of(table).splitlines() if line.startswith(name))
    return re.split(r"\s{2,}", line.strip())


def make_record(update: bool = True, sketch: SketchSettings | None = None) -> GradientsRecord:
    return make_gradients_record(update=update, sketch=sketch, texts=(" So", HOSTILE))


def printed(record: GradientsRecord, monkeypatch: pytest.MonkeyPatch) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=112, emoji=False)
    for module in (gradients_tables, tables):
        monkeypatch.setattr(module, "output", console)
    print_gradients(record, show=20)
    return stream.getvalue()


def test_claims_come_first_and_each_ends_in_its_verdict(monkeypatch: pytest.MonkeyPatch):
    record = make_record()
    shown = " ".join(printed(record, monkeypatch).split())
    places = [shown.index(" ".join(claim.sentence.split())) for claim in record.claims]
    assert places == sorted(places) and len(places) == 9
    assert places[-1] < shown.index("Logit space, over the vocabulary")
    assert "there is only one checkpoint" in shown


def test_a_baseline_has_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch):
    shown = printed(make_gradients_record(paired=True), monkeypatch)
    assert "Logit space, over the vocabulary, checkpoint 0" in shown


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
    cells = row_of(group_table(make_record(sketch=SketchSettings(64, 0)), "reference", "vocabulary"), "rocks")
    assert cells[-3] == "0.250 ± 0.031" and cells[-1] == "0.750 ± 0.062"


def test_tests_show_both_medians_and_p():
    assert row_of(mann_whitney_table(make_record(), "vocabulary"), "mean") == ["mean ‖g‖", "0.500", "0.250, < 0.001"]


def test_parameter_space_in_percent():
    parameter = make_record().parameter
    assert row_of(parameter_table(parameter), "rocks") == (
        ["rocks", "25.0 %", "3.00", "0.50", "25.0 %", "[24.0, 26.0]", "0.0", "[−1.0, +1.0]"]
    )
    step = ["rocks", "12.5 %", "[11.5, 13.5]", "−12.5", "[−13.5, −11.5]", "suppresses", "0.50"]
    assert row_of(adam_table(parameter.shares.update), "rocks") == step
    blocks = ["layer 0 mlp", "30.0 %", "37.5 %", "[36.5, 38.5]", "37.5 %", "[36.5, 38.5]"]
    assert row_of(block_table(parameter.shares), "layer") == blocks


def test_categories_set_the_spaces_side_by_side():
    cells = ["rocks", "3", "25.0 %", "50.0 %", "25.0 %", "[24.0, 26.0]", "12.5 %", "[11.5, 13.5]"]
    assert row_of(category_table(make_record()), "rocks") == cells


def test_types_are_ordered_by_share_and_cut():
    shown = text_of(type_table(make_record(), show=1))
    assert "75.0 %" in shown and "25.0 %" not in shown
    assert "contrib" in shown and "contrib" not in text_of(type_table(make_record(), show=1), width=80)


def test_partners_for_all_that_miss_the_total_are_a_loose_match():
    assert "a loose match" in control_sentence(make_control("partial", tolerance=0.25))


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("matched", ("every rock has a partner within ±10 %", "18 of 18 rocks")),
        (
            "partial",
            ("a partial match", "11 of 18 rocks", "600 occurrences beside 1,000", "(590 of those", "; 3 of them"),
        ),
        ("none", ("Control: none",)),
    ],
)
def test_a_control_says_how_well_it_matches(kind: str, parts: tuple[str, ...]):
    is_partial = kind == "partial"
    control = make_control(kind, n_matched=11 if is_partial else 18, n_high_mean_kl=3 if is_partial else 0)
    sentence = control_sentence(control)
    assert [part for part in parts if part not in sentence] == [], sentence
    assert ("would be high-mean-kl" in sentence) == (kind == "partial")
