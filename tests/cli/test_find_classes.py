"""``find --classes``: what it writes, prints and refuses, on traces with planted classes."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from class_traces import PLANTED, TOPS, planted_trace
from command_line import refuse, require_sound, snapshot, succeed
from trace_oracle import write_trace

from rocktokens.classes import TokenClasses
from rocktokens.cli.find_tables import print_classes
from rocktokens.rocks.classes import find_classes, summarise_classes
from rocktokens.traces.store import TraceStore
from rocktokens.types import RockSet


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("planted") / "run", {0: planted_trace(2)})


def test_classes_are_written_beside_rocks_and_both_are_printed(planted: Path, capsys: pytest.CaptureFixture[str]):
    record = succeed("find", planted, "--classes", "--json").record
    require_sound(planted)
    assert record["classes"] == json.loads((planted / "classes.json").read_text(encoding="utf-8"))
    store, rocks = TraceStore(planted), RockSet.load(planted / "rocks.json")
    classes = TokenClasses.load(planted / "classes.json")
    summaries = summarise_classes(store, classes, rocks)
    assert classes == find_classes(store) and classes.groups == PLANTED
    assert record["class_summaries"] == json.loads(json.dumps([asdict(own) for own in summaries]))
    assert record["tokens"][0]["id"] == rocks.tokens[0].id

    print_classes(classes, summaries, show=2)
    shown = " ".join(capsys.readouterr().out.split())
    loss, first = 100 * sum(own.kl_share for own in summaries), summaries[0]
    assert f"5 classes hold {loss:.1f} % of the loss that is left, with " in shown
    assert "These are candidates: `rocktokens knockout RUN --classes` tests them." in shown
    assert f"{' '.join(first.texts)} {first.weakest:.2f} to {first.strongest:.2f}" in shown
    assert f"{100 * first.kl_share:.1f} % {first.n_rocks} of {len(first.ids)}" in shown
    assert " ".join(summaries[2].texts) not in shown, "of five classes two are shown"
    print_classes(TokenClasses([], source=classes.source, criterion={**classes.criterion, "tested": {}}), [], show=2)
    assert "No classes: bans refuted every link." in capsys.readouterr().out


def test_classes_add_ten_lines_at_most(planted: Path):
    alone, both = (succeed("find", planted, *option).stdout.splitlines() for option in ((), ("--classes",)))
    assert len(alone) <= 40 and len(both) - len(alone) <= 10
    assert any(line.startswith("5 classes hold ") for line in both)


def test_too_few_prompts_are_named(tmp_path: Path):
    run = write_trace(tmp_path / "run", {0: planted_trace(2, rollouts=10, length=10)})
    shown = " ".join(succeed("find", run, "--classes", "--set", "find.min_prompts=10").stdout.split())
    assert "10 prompts are too few to find classes: trace at least 20 (trace.num_prompts). What follows" in shown
    assert "No classes: no two types have 10 % of each other's mass where they are written." in shown
    assert shown.count("classes.json") == 1


def test_what_cannot_be_searched_is_refused_and_nothing_written(planted: Path, tmp_path: Path):
    table = planted_trace(2, rollouts=10, length=10).drop_columns(list(TOPS))
    run = write_trace(tmp_path / "run", {0: table})
    before = snapshot(run)
    refuse("find", run, "--classes", naming=("no top tokens: set trace.top_k = 8", "`rocktokens trace --restart`"))
    refuse("find", run, planted, "--compare", "--classes", naming=("--classes looks at one run", "--compare"))
    assert snapshot(run) == before


def test_damaged_classes_are_named_before_the_search_and_made_again_by_it(planted: Path, tmp_path: Path):
    run = shutil.copytree(planted, tmp_path / "run")
    succeed("find", run, "--classes")
    (run / "classes.json").write_text("{")
    before = snapshot(run)
    refuse("find", run, "--k", "3", naming=("classes.json is not the file", "`rocktokens find --classes` again"))
    assert snapshot(run) == before
    succeed("find", run, "--classes")
    require_sound(run)
