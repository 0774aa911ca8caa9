"""A sample of every campaign, and the frame itself: what dies or hangs is a failure, and a journal goes on."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import frame
import pytest
from mutations import DAMAGES
from run_campaigns import CAMPAIGNS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all campaigns: they share the finished run."""
    return tmp_path_factory.mktemp("campaigns")


@pytest.mark.slow
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_sample(name: str, folder: Path, tmp_path: Path):
    campaign = CAMPAIGNS[name]
    results = frame.run_campaign(campaign, campaign.sample, folder, tmp_path / "journal.jsonl", budget=600)
    assert len(results) == sum(campaign.sample.values())
    assert not any(own.failure for own in results), frame.table_of(campaign, campaign.sample, results)


def test_full_counts_are_those_that_are_promised():
    counts = {name: sum(own.full.values()) for name, own in CAMPAIGNS.items()}
    assert counts["corruption"] >= 2000 and counts["fuzzing"] >= 100_000 and counts["families"] >= 35
    assert counts["failing-calls"] >= 300 and counts["kills"] >= 200
    assert len(CAMPAIGNS["kills"].full) == 7 and len(CAMPAIGNS["hostile"].full) == 10
    for own in CAMPAIGNS.values():
        assert own.sample.keys() <= own.full.keys() and own.sample


# The frame


@contextmanager
def odd(_folder: Path) -> Iterator[frame.Judge]:
    def judge(kind: str, number: int) -> str:
        if kind == "dies" and number == 1:
            os._exit(3)
        if kind == "hangs" and number == 1:
            time.sleep(60)
        if kind == "raises" and number == 1:
            raise frame.BrokenPromiseError("as it should not be")
        return "fine"

    yield judge


ODD = frame.Campaign("odd", {"dies": 3, "hangs": 2, "raises": 2}, {}, limit=1.0, opened=odd)


def test_what_dies_hangs_or_raises_is_one_failure_and_the_others_are_tried(tmp_path: Path):
    journal = tmp_path / "journal.jsonl"
    results = frame.run_campaign(ODD, ODD.full, tmp_path, journal, budget=120)
    failed = {own.case: own.failure for own in results if own.failure}
    assert failed == {
        "odd/dies/1": "ended the process",
        "odd/hangs/1": "hangs",
        "odd/raises/1": "as it should not be",
    }
    assert len(results) == 7
    table = frame.table_of(ODD, ODD.full, results)
    assert "FAILED odd/raises/1: as it should not be" in table and "0 cases left" in table


def test_a_journal_goes_on_and_judges_again_what_failed(tmp_path: Path):
    journal = tmp_path / "journal.jsonl"
    before = frame.Result("odd/dies/0", "kept", source="earlier")
    torn = json.dumps({"case": "odd/raises/0", "outcome": "fine"})[:-5]
    failed = json.dumps({"case": "odd/dies/2", "outcome": "failed", "failure": "then"})
    journal.write_text(f"{json.dumps({'case': before.case, 'outcome': 'kept', 'source': 'earlier'})}\n{failed}\n{torn}")
    counts = {"dies": 1, "raises": 1}
    results = frame.run_campaign(ODD, counts, tmp_path, journal, budget=60)
    assert [own.outcome for own in results] == ["kept", "fine"]
    assert "1 judged on other sources" in frame.table_of(ODD, counts, results)
    known = frame.known_results(journal)
    assert known["odd/dies/0"] == before and known["odd/raises/0"].outcome == "fine"


def test_a_campaign_stops_at_its_budget_and_says_what_is_left(tmp_path: Path):
    results = frame.run_campaign(replace(ODD, limit=0.1), ODD.full, tmp_path, tmp_path / "journal.jsonl", budget=0)
    assert results == [] and "7 cases left" in frame.table_of(ODD, ODD.full, results)


def test_cases_are_taken_in_turns_and_made_again_from_their_id():
    assert frame.cases_of({"a": 2, "b": 1}) == [("a", 0), ("b", 0), ("a", 1)]
    first, again, other = (frame.chance("x", "y", number).random() for number in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_changes_bytes(damage):
    for number in range(50):
        for content in (b"a", b"\x00" * 9, bytes(range(256)) * 4):
            assert damage(frame.chance("damage", damage.__name__, number), content) != content
