"""The tables of the report: whose numbers they show is said, and what is not known is a dash."""

from dataclasses import replace
from pathlib import Path

import pytest
from report_run import make_rocks

from replay_records import make_replay
from rocktokens.display.rocks import rock_table
from rocktokens.report.tables import runs_table
from rocktokens.report.views.run_view import RunView
from rocktokens.run_dir import RunDir
from rocktokens.types import Label, RockSet


def test_rocks_are_shown_on_the_prompts_that_selected_them_and_on_the_others():
    table = rock_table(make_rocks(("a",)))
    (row,) = table.rows
    shown = dict(zip(table.titles, row, strict=True))
    assert (shown["mean kl"].value, shown["held out"].value) == (1.5, 1.25)
    assert "All other columns are of the prompts that selected the rocks" in table.caption
    assert "Held out: mean kl on prompts that did not select the rocks" in table.caption


@pytest.mark.parametrize("split", [None, 1.0])
def test_without_a_split_no_column_is_called_held_out(split: float | None):
    rocks = make_rocks(("a",))
    table = rock_table(replace(rocks, criterion={**rocks.criterion, "split": split}))
    assert "held out" not in table.titles and "again" in table.titles
    assert "every number is of prompts that selected them" in table.caption


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("paper", "Verdicts by the paper's rule, which calls neutral whatever is inconclusive."),
        ("method", "Verdicts by our rule."),
    ],
)
def test_the_rule_of_the_verdicts_is_named(rule: str, said: str):
    rocks = make_rocks(("a",))
    assert rock_table(replace(rocks, source={"verdicts": {"rule": rule}})).caption.endswith(said)
    assert "Verdicts by" not in rock_table(rocks).caption


def test_a_run_without_rocks_stands_beside_others(tmp_path: Path):
    table = runs_table([_run(tmp_path / "some", make_rocks(("a", "b"))), _run(tmp_path / "none", make_rocks(()))])
    some, none = table.records
    assert (some["rocks"], some["stuck"], some["pillar"]) == (2, 1, 1)
    assert (none["rocks"], none["stuck"], none["pillar"], none["jaccard"]) == (0, 0, 0, 0.0)


def test_runs_of_one_name_keep_their_own_labels(tmp_path: Path):
    views = []
    for served in ("top-20 + tail", ""):
        run = RunDir(tmp_path / str(len(views)) / "run")
        with run.lock():
            run.update_manifest(replay=make_replay(served=served).to_manifest())
        views.append(RunView.open(run.path))
    assert runs_table(views).notes == runs_table(views[::-1]).notes
    assert runs_table(views).notes == (
        "run: teacher top-20 + tail.",
        "The kl of runs with different labels cannot be compared.",
    )


def test_a_rock_is_never_learned_only_where_both_halves_say_stuck():
    (token,) = make_rocks(("a",)).tokens
    labels: list[Label | None] = ["stuck", "residual", "moving", "moved", "unclear", None]
    never = {
        (own, held): replace(token, label=own, held_out_label=held).never_learned for own in labels for held in labels
    }
    assert [pair for pair, is_never in never.items() if is_never] == [("stuck", "stuck")]


def test_what_ranks_is_a_column_where_it_is_not_the_score():
    rocks = make_rocks(("a",))
    bound = replace(rocks, criterion={**rocks.criterion, "stage": "bound"})
    titles = [rock_table(own).titles for own in (rocks, bound)]
    assert "L" not in titles[0] and "L" in titles[1]
    assert "Ranked by L, a lower bound of R" in rock_table(bound).caption


def _run(path: Path, rocks: RockSet) -> RunView:
    RunDir(path).commit("rocks.json", rocks.save)
    return RunView.open(path)
