"""The classes of a run on its pages: shares by loops over rows, verdicts as recorded, nothing of another run."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from explorer_run import CHECKPOINTS, CLASS_IDS, ROCK_IDS, make_run
from report_run import make_find

from hostile_texts import HOSTILE
from replay_records import make_replay
from rocktokens.classes import TokenClass, TokenClasses
from rocktokens.display.text import visible
from rocktokens.errors import RocktokensError, RunDirError
from rocktokens.report.page.answers import choice, five_answers
from rocktokens.report.page.render import report_html
from rocktokens.report.page.sections import sections
from rocktokens.report.page.tiles import five_tiles
from rocktokens.report.tables import class_table
from rocktokens.report.views.classes import class_views
from rocktokens.report.views.run_view import RunView
from rocktokens.report.views.strips import rollout_strip
from rocktokens.report.views.type_card import type_card
from rocktokens.run_dir import RunDir
from rocktokens.traces.store import TraceStore


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    """Without rocks: what the page shows of those is tested elsewhere."""
    path = make_run(tmp_path_factory.mktemp("run"))
    RunDir(path).drop(["rocks.json", "knockout.json"])
    return RunView.open(path)


def with_classes(run: RunView, folder: Path, classes: TokenClasses) -> Path:
    """A copy of a run with other classes."""
    path = shutil.copytree(run.path, folder / "run")
    RunDir(path).commit("classes.json", classes.save)
    return path


def test_shares_are_those_of_loops_over_rows(run: RunView):
    rows = TraceStore(run.path).table(CHECKPOINTS[-1]).to_pyarrow().to_pylist()
    for ids, own in zip(CLASS_IDS, class_views(run), strict=True):
        inside = [row for row in rows if row["token_id"] in ids]
        assert own.ids == ids and inside
        assert own.token_share == len(inside) / len(rows)
        kl, all_kl, part = (
            math.fsum(row[name] for row in some) for some, name in ((inside, "kl"), (rows, "kl"), (inside, "kl_choice"))
        )
        assert own.kl_share == pytest.approx(kl / all_kl, abs=1e-6)
        assert own.choice_share == pytest.approx(part / kl, abs=1e-6)


def test_a_card_has_the_class_of_its_type_and_the_split_of_its_loss(run: RunView):
    card = type_card(run, CLASS_IDS[0][1])
    assert card.token_class == class_views(run)[0]
    rows = TraceStore(run.path).table(CHECKPOINTS[-1])
    own = rows.filter(rows.token_id == CLASS_IDS[0][1]).to_pyarrow()
    assert card.mean_choice == pytest.approx(own["kl_choice"].to_numpy().mean(dtype=np.float64), abs=1e-6)
    alone = type_card(run, 0)
    assert alone.token_class is None and alone.mean_choice == pytest.approx(alone.losses[-1][1] / 4, abs=1e-6)


def test_a_strip_has_the_choice_where_the_trace_has_it(run: RunView):
    before, after = (rollout_strip(run, 3, step).tokens for step in CHECKPOINTS)
    assert {token.kl_choice for token in before} == {None}
    for token in after:
        assert token.kl_choice == pytest.approx(token.kl / 4, rel=1e-6)


def test_the_table_shows_verdicts_by_member_and_texts_that_cannot_act(run: RunView):
    table = class_table(class_views(run))
    first, second = ([cell.text for cell in row] for row in table.rows)
    assert first[1:6] == ["### So", "interchangeable", "neutral", "neutral", "pillar"]
    assert (
        second[2] == "not interchangeable"
        and second[3].count("neutral") == 3
        and "pillar" in second[3]
        and second[5] == "stumbling"
    )
    assert first[8] == second[8] == "25.0 %"
    assert second[1].startswith(f"{visible(HOSTILE[2])} {visible(HOSTILE[3])} ")
    assert "<svg" not in table.to_html() and "&lt;svg" in table.to_html()


def test_the_section_starts_with_its_conclusion(run: RunView, tmp_path: Path):
    def conclusion(view: RunView) -> str:
        answers = five_answers(view)
        made = sections(view, answers, five_tiles(view, answers))
        return next(section.conclusion for section in made if section.key == "choice")

    said = "Of 2 classes, 1 is interchangeable and 1 is not interchangeable. "
    assert conclusion(run).startswith(f"{said}Run `rocktokens find` to see what share of the loss is choice.")
    run.find = make_find()
    assert conclusion(run).startswith(f"{said}25.0 % [12.5, 37.5] of the remaining loss is choice: ")
    run.find = None
    others = TokenClasses([TokenClass((1, 5)), TokenClass((6, 7), banned=("undecided", "neutral"))])
    view = RunView.open(with_classes(run, tmp_path, others))
    assert conclusion(view).startswith("Of 2 classes, 1 is undecided and 1 is untested. The traces do not ")
    assert [own.choice_share for own in class_views(view)] == [None, None]
    assert type_card(view, 5).mean_choice is None
    assert class_views(view)[0].texts == ("###", "So")  # of the run's vocabulary, where the file has none
    assert choice(view, class_views(view)[:1]).startswith("The only class is untested. ")


def test_shares_of_the_kl_say_what_the_teacher_gave(run: RunView, tmp_path: Path):
    for served, count in (("states float32", 0), ("top-20 + tail", 1)):
        path = with_classes(run, tmp_path / served, TokenClasses(CLASS_IDS))
        with RunDir(path).lock():
            RunDir(path).update_manifest(replay=make_replay(served=served).to_manifest())
        view = RunView.open(path)
        answers = five_answers(view)
        [shown] = [own for own in sections(view, answers, five_tiles(view, answers)) if own.key == "choice"]
        assert shown.tables[0].caption.count("Teacher: top-20 + tail.") == count


def test_where_bans_refuted_every_class_no_choice_is_shown(run: RunView, tmp_path: Path):
    """The traces and find.json still have that of the classes before."""
    refuted = TokenClasses([TokenClass(ids, safe=False) for ids in CLASS_IDS])
    view = RunView.open(with_classes(run, tmp_path, refuted))
    view.find = make_find()
    expected = "Of 2 classes, 2 are not interchangeable. So there is no choice that could be left out."
    assert choice(view, class_views(view)) == expected
    assert [own.choice_share for own in class_views(view)] == [None, None] and type_card(view, 5).mean_choice is None


def test_without_classes_there_is_no_section_and_with_none_it_says_so(run: RunView, tmp_path: Path):
    empty = with_classes(run, tmp_path, TokenClasses([]))
    assert "No tokens were found that may stand for each other." in report_html([RunView.open(empty)])
    RunDir(empty).drop(["classes.json"])
    assert "Choice and decision" not in report_html([RunView.open(empty)])
    assert type_card(RunView.open(empty), ROCK_IDS[0]).token_class is None


def test_classes_of_another_run_are_refused(run: RunView, tmp_path: Path):
    path = with_classes(run, tmp_path, TokenClasses(CLASS_IDS, tokenizer_sha256="ab" * 32))
    with RunDir(path).lock():
        RunDir(path).update_manifest(tokenizer_sha256="cd" * 32)
    with pytest.raises(RocktokensError, match="made with tokenizer abababababab"):
        RunView.open(path)
    with RunDir(path).lock():
        RunDir(path).update_manifest(searched=["ef" * 32])
    RunDir(path).commit("classes.json", TokenClasses(CLASS_IDS, source={"manifest_sha256": "ab" * 32}).save)
    with pytest.raises(RunDirError, match=r"classes\.json was made from traces that this run never had"):
        RunView.open(path)
    (path / "classes.json").write_text("{}")
    with pytest.raises(RunDirError, match="SHA-256 differs"):
        RunView.open(path)
