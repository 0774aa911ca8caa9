"""Parts of a run as they are read: columns whose names are no text, and a manifest of many parts."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rocktokens.errors import RunDirError
from rocktokens.knockout.journal import Decoded, RunJournal
from rocktokens.knockout.records import BanKey
from rocktokens.parts import PartKind
from rocktokens.run_dir import RunDir

KIND = PartKind("counts", pa.schema([("count", pa.int64())]), b"version", ("1",))


def write(run: RunDir, name: str, column: str) -> None:
    table = pa.table({column: [1, 2]}).replace_schema_metadata({b"version": b"1"})
    run.commit(name, lambda path: pq.write_table(table, path), rows=2)


def test_a_column_whose_name_is_no_text_is_one_sentence(tmp_path: Path):
    run = RunDir(tmp_path)
    write(run, "whole.parquet", "count")
    assert KIND.read(run, "whole.parquet")["count"].to_pylist() == [1, 2]
    sound = (tmp_path / "whole.parquet").read_bytes()
    assert sound.count(b"count") >= 2
    run.commit("odd.parquet", lambda path: path.write_bytes(sound.replace(b"count", b"co\xe9nt")), rows=2)
    for read in (lambda: KIND.read(run, "odd.parquet"), lambda: list(KIND.read_listed(run, run.files("odd")))):
        with pytest.raises(
            RunDirError, match=r"odd\.parquet (cannot be read as Parquet|has not the columns)"
        ) as refused:
            read()
        assert len(str(refused.value).splitlines()) == 1


def test_a_part_that_is_replaced_after_it_was_looked_up_is_refused(tmp_path: Path):
    run = RunDir(tmp_path)
    write(run, "a.parquet", "count")
    entries = run.files()
    run.commit("a.parquet", lambda path: pq.write_table(pa.table({"count": [3]}), path), rows=1)
    with pytest.raises(RunDirError, match="was replaced by another command"):
        list(KIND.read_listed(run, entries))


def test_many_parts_take_one_look_at_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = RunDir(tmp_path)
    journal = RunJournal(run, "conditions")
    for place in range(20):
        journal.add((BanKey((3,)), place), Decoded(place, np.array([place], np.int32), True))
        journal.flush()
    looks, manifest = [], RunDir.manifest
    monkeypatch.setattr(RunDir, "manifest", lambda self: (looks.append(1), manifest(self))[1])
    assert RunJournal(run, "conditions").finished.keys() == journal.finished.keys()
    assert len(looks) == 1
