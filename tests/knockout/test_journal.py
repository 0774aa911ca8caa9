"""What was decoded comes back as it was, is written as it grows, and is graded by whoever asks."""

import itertools
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocktokens.config import WordmathTask
from rocktokens.errors import RunDirError
from rocktokens.knockout import journal as journal_module
from rocktokens.knockout.journal import (
    LEAST_TOKENS,
    SHARE_PER_PART,
    Decoded,
    Journal,
    Key,
    RunJournal,
)
from rocktokens.knockout.records import BanKey, KnockoutSweep
from rocktokens.knockout.sweep import SweepSettings, knockout_sweep
from rocktokens.models.load import load_model
from rocktokens.rollouts.encode import Sampling
from rocktokens.rollouts.sampler import TransformersSampler
from rocktokens.run_dir import RunDir
from rocktokens.tasks import make_task
from rocktokens.tasks.base import Task
from rocktokens.types import Prompt, Rollout

IDS = st.integers(0, 2**31 - 1)
ID_SETS = st.lists(IDS, max_size=4).map(lambda ids: tuple(sorted(set(ids))))
KEYS = st.tuples(st.builds(BanKey, ID_SETS, ID_SETS), st.integers(0, 2**40))
DECODED = st.tuples(st.integers(0, 2**31 - 1), st.lists(IDS, min_size=1, max_size=6), st.booleans())


def same(left: Decoded, right: Decoded) -> bool:
    as_before = (left.start, left.finished, left.token_ids.dtype) == (right.start, right.finished, np.int32)
    return as_before and np.array_equal(left.token_ids, right.token_ids)


def require_equal(found: Journal, expected: dict[Key, Decoded]) -> None:
    assert found.finished.keys() == expected.keys()
    assert all(same(found.finished[key], own) for key, own in expected.items())


def some(count: int) -> dict[Key, Decoded]:
    """Three bans, each everywhere and where id 7 is likely."""
    keys = [(BanKey((place % 3,), (7,) * (place % 2)), place) for place in range(count)]
    return {key: Decoded(key[1], np.arange(1 + key[1] % 4, dtype=np.int32), True) for key in keys}


# Round trips


@given(st.lists(st.tuples(KEYS, DECODED, st.booleans()), max_size=12))
@settings(max_examples=25, deadline=None)
def test_entries_come_back_however_they_were_divided_into_parts(entries):
    """The last of two entries with one key stays."""
    expected: dict[Key, Decoded] = {}
    with tempfile.TemporaryDirectory() as folder, RunDir(folder).lock() as run:
        journal = RunJournal(run, "here")
        for key, (start, token_ids, finished), ends_part in entries:
            expected[key] = Decoded(start, np.array(token_ids, np.int32), finished)
            journal.add(key, expected[key])
            if ends_part:
                journal.flush()
        require_equal(journal, expected)
        journal.flush()
        require_equal(RunJournal(run, "here"), expected)


def test_free_rollouts_come_back(tmp_path: Path):
    ids = np.array([4, 1], np.int32)
    rollouts = [
        Rollout(place, f"p{place}", 0, ids, ids + place, np.array([-0.5, -1.5], np.float32), 0, place > 0)
        for place in range(3)
    ]
    with RunDir(tmp_path).lock() as run:
        assert RunJournal(run, "here").free() is None
        RunJournal(run, "here").keep_free(rollouts)
        again = RunJournal(run, "here").free()
    assert again is not None
    for own, before in zip(again, rollouts, strict=True):
        assert (own.prompt_id, own.sample, own.finished) == (before.prompt_id, before.sample, before.finished)
        for name in ("prompt_ids", "token_ids", "logprobs"):
            assert np.array_equal(getattr(own, name), getattr(before, name))


def test_different_conditions_never_share(tmp_path: Path):
    """Not even where the name of one begins with that of the other."""
    with RunDir(tmp_path).lock() as run:
        for conditions, count in (("a", 3), ("ab", 5)):
            journal = RunJournal(run, conditions)
            for key, own in some(count).items():
                journal.add(key, own)
            journal.flush()
        RunJournal(run, "ab").keep_free([])
        require_equal(RunJournal(run, "a"), some(3))
        require_equal(RunJournal(run, "ab"), some(5))
        assert RunJournal(run, "a").free() is None
        require_equal(RunJournal(run, "b"), {})


def written(run: RunDir) -> Path:
    journal = RunJournal(run, "here")
    for key, own in some(9).items():
        journal.add(key, own)
    journal.flush()
    [part] = (run.path / "knockout" / "here").iterdir()
    return part


def test_a_part_that_is_not_whole_is_refused(tmp_path: Path):
    with RunDir(tmp_path).lock() as run:
        part = written(run)
        part.write_bytes(part.read_bytes()[:-9])
        with pytest.raises(RunDirError, match=f"{part.name} is not the file that"):
            RunJournal(run, "here")


def test_a_part_of_another_version_is_refused(tmp_path: Path):
    with RunDir(tmp_path).lock() as run:
        table = pq.read_table(written(run))
        newer = table.replace_schema_metadata({journal_module._VERSION_KEY: b"3"})
        run.commit("knockout/here/part-00001.parquet", lambda target: pq.write_table(newer, target))
        with pytest.raises(RunDirError, match="schema version 3, this rocktokens reads 2"):
            RunJournal(run, "here")


def test_in_a_part_of_version_1_every_ban_acts_everywhere(tmp_path: Path):
    with RunDir(tmp_path).lock() as run:
        path = written(run)
        older = pq.read_table(path).drop_columns(["alternatives"])
        older = older.replace_schema_metadata({journal_module._VERSION_KEY: b"1"})
        expected = {(BanKey(ban.ids), place): own for (ban, place), own in RunJournal(run, "here").finished.items()}
        run.commit(f"knockout/here/{path.name}", lambda target: pq.write_table(older, target), older.num_rows)
        require_equal(RunJournal(run, "here"), expected)


# Parts


def work(journal: RunJournal, run: RunDir, tokens: int, per_entry: int) -> list[int]:
    """Entries of a length until this number of tokens is decoded; how many were by the time each part was written."""
    moments, parts = [], len(run.files("knockout/"))
    for number in range(tokens // per_entry):
        journal.add((BanKey((1,)), number), Decoded(0, np.full(per_entry, 7, np.int32), True))
        if len(run.files("knockout/")) > parts:
            parts += 1
            moments.append((number + 1) * per_entry)
    return moments


def test_at_first_parts_are_written_as_often_as_is_worth_it(tmp_path: Path):
    with RunDir(tmp_path).lock() as run:
        journal = RunJournal(run, "here")
        moments = work(journal, run, tokens=40_000, per_entry=60)
        assert np.diff([0, *moments]).tolist() == [math.ceil(LEAST_TOKENS / 60) * 60] * len(moments)
        assert len(journal.finished) > len(RunJournal(run, "here").finished) > 0.9 * len(journal.finished)


def test_later_at_most_a_fiftieth_of_the_work_is_lost_and_parts_are_few(tmp_path: Path):
    """A part ends when it has 2 % of all tokens so far: the end of each is 1 / 0.98 times that of the one before."""
    with RunDir(tmp_path).lock() as run:
        journal, size = RunJournal(run, "here"), 2000
        moments = np.array(work(journal, run, tokens=1_600_000, per_entry=size))
        since = np.diff(np.concatenate([[0], moments]))
        assert (since <= np.maximum(LEAST_TOKENS, SHARE_PER_PART * moments) + size).all()
        late = moments > 400_000
        assert (since[late] >= SHARE_PER_PART * moments[late]).all()
        counts = [np.count_nonzero((moments > end / 2) & (moments <= end)) for end in (800_000, 1_600_000)]
        doubling = math.log(2) / -math.log(1 - SHARE_PER_PART)
        assert all(0.6 * doubling <= count <= doubling + 1 for count in counts)
        assert len(RunJournal(run, "here").finished) >= 0.97 * len(journal.finished)


def test_parts_do_not_depend_on_the_clock(tmp_path: Path, monkeypatch):
    """On a machine where every look at the clock is an hour later, the same parts of the same bytes."""
    found = []
    for name in ("quick", "slow"):
        if name == "slow":
            monkeypatch.setattr("time.monotonic", itertools.count(0, 3600).__next__)
        with RunDir(tmp_path / name).lock() as run:
            work(RunJournal(run, "here"), run, tokens=10_000, per_entry=100)
            found.append(run.files("knockout/"))
    assert found[0] == found[1] and len(found[0]) == 4


def test_a_resumed_journal_adds_parts_and_counts_what_is_there(tmp_path: Path):
    with RunDir(tmp_path).lock() as run:
        work(RunJournal(run, "here"), run, tokens=2 * LEAST_TOKENS, per_entry=LEAST_TOKENS)
        before = run.files("knockout/")
        resumed = RunJournal(run, "here")
        resumed.add((BanKey((2,)), 0), Decoded(0, np.array([7], np.int32), True))
        resumed.flush()
        assert run.files("knockout/")[:2] == before and len(run.files("knockout/")) == 3
        require_equal(RunJournal(run, "here"), resumed.finished)


def test_what_is_flushed_is_not_written_twice(tmp_path: Path):
    with RunDir(tmp_path).lock() as run:
        journal = RunJournal(run, "here")
        journal.flush()
        assert not run.files("knockout/")
        work(journal, run, tokens=2, per_entry=1)
        journal.flush()
        journal.flush()
        assert [entry.rows for entry in run.files("knockout/")] == [2]


# Grades


@dataclass(frozen=True)
class OtherGrader:
    """A task whose answers are right if they are of a certain length."""

    task: Task

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def grade(self, prompt: Prompt, text: str) -> bool:
        return len(text) % 3 > 0


def test_a_grader_that_changes_grades_everything_again(tmp_path: Path):
    student, task = load_model("pebbles-student", device="cpu"), make_task(WordmathTask(split="test"))
    sampler = TransformersSampler(student.model, student.eos_ids, student.pad_id, threads=1)
    the, answer = (student.tokenizer.encode(text, add_special_tokens=False)[0] for text in (" the", " answer"))

    def sweep(grader: Task, journal: Journal) -> KnockoutSweep:
        return knockout_sweep(
            sampler, student.tokenizer, grader, task.prompts(10, 5), [the, answer], sampling=Sampling(1.0, 60, 3),
            settings=SweepSettings(matched=1, never=2), journal=journal,
        )  # fmt: skip

    other: Any = OtherGrader(task)
    with RunDir(tmp_path).lock() as run:
        before = sweep(task, RunJournal(run, "here"))
        files = run.files("knockout/")
        regraded = sweep(other, RunJournal(run, "here"))
        assert run.files("knockout/") == files
        assert sweep(task, RunJournal(run, "here")) == before
    assert regraded == sweep(other, Journal())
    assert regraded.baseline.accuracy != before.baseline.accuracy
    assert [own.delta for own in regraded.knockouts] != [own.delta for own in before.knockouts]
    assert any(own.changes.lost or own.changes.gained for own in regraded.knockouts)
