"""One writer, atomic commits, and nothing a killed process leaves behind counts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disk_order import recorded
from rocktokens import run_dir
from rocktokens.errors import RunDirError
from rocktokens.run_dir import RunDir, as_listed, derive_seed, file_sha256, write_atomically
from rocktokens.training.log import append_log


def text(content: str):
    return lambda path: path.write_text(content)


# Commit


def test_a_committed_file_is_listed_with_rows_and_sha(tmp_path):
    run = RunDir(tmp_path)
    entry = run.commit("a/b.txt", text("hello"), rows=3)
    assert run.files() == [entry]
    assert (entry.path, entry.rows, entry.sha256) == ("a/b.txt", 3, file_sha256(tmp_path / "a" / "b.txt"))
    assert entry.sha256 == "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    assert run.verify(entry).read_text() == "hello"


def test_files_are_chosen_by_prefix_and_sorted(tmp_path):
    run = RunDir(tmp_path)
    for name in ("t/b", "s/a", "t/a"):
        run.commit(name, text(name))
    assert [entry.path for entry in run.files("t/")] == ["t/a", "t/b"]


def test_a_failed_commit_leaves_no_trace_and_the_old_file(tmp_path):
    run = RunDir(tmp_path)
    run.commit("a", text("old"))

    def half(path: Path) -> None:
        path.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run.commit("a", half)
    with pytest.raises(OSError, match="disk full"):
        run.commit("b", half)
    assert [entry.path for entry in run.files()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a", "manifest.json"]


def test_leftovers_of_a_killed_process_do_not_exist_and_are_overwritten(tmp_path):
    run = RunDir(tmp_path)
    run.update_manifest()
    (tmp_path / ".a.tmp").write_text("half")
    (tmp_path / "a").write_text("renamed but never listed")
    assert run.files() == []
    run.commit("a", text("whole"))
    assert (tmp_path / "a").read_text() == "whole"
    assert not (tmp_path / ".a.tmp").exists()


def test_verify_names_what_is_missing_or_changed(tmp_path):
    run = RunDir(tmp_path)
    entry = run.commit("a", text("one"))
    (tmp_path / "a").write_text("two")
    with pytest.raises(RunDirError, match=r"is not the file that .*manifest\.json lists \(SHA-256 differs\)"):
        run.verify(entry)
    (tmp_path / "a").unlink()
    with pytest.raises(RunDirError, match="is listed in the manifest but missing"):
        run.verify(entry)


def test_a_folder_for_a_file_and_a_file_for_a_folder_are_refused(tmp_path):
    run = RunDir(tmp_path)
    entry, below = run.commit("rocks.json", text("one")), run.commit("traces/a", text("two"))
    (tmp_path / "rocks.json").unlink()
    (tmp_path / "rocks.json").mkdir()
    with pytest.raises(RunDirError, match=r"rocks\.json is a folder, .*: restore .*, or remove it and run `rocktokens"):
        run.verify(entry)
    shutil.rmtree(tmp_path / "traces")
    (tmp_path / "traces").write_text("no folder")
    with pytest.raises(RunDirError, match="traces/a is listed in the manifest but missing"):
        run.verify(below)


def test_adopt_lists_and_drop_forgets(tmp_path):
    run = RunDir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    run.adopt(["a", "b"])
    assert [entry.path for entry in run.files()] == ["a", "b"]
    run.drop(["a", "never there"])
    assert [entry.path for entry in run.files()] == ["b"]
    assert not (tmp_path / "a").exists()


def test_a_file_is_there_until_the_manifest_has_forgotten_it(tmp_path, monkeypatch):
    """A kill in between leaves a file that is not listed, never a listed file that is gone."""
    run, whole, seen = RunDir(tmp_path), run_dir.write_atomically, []
    run.commit("a", text("one"))

    def look(target: Path, write) -> None:
        seen.append((target.name, (tmp_path / "a").exists()))
        whole(target, write)

    monkeypatch.setattr(run_dir, "write_atomically", look)
    run.drop(["a"])
    assert seen == [("manifest.json", True)] and not (tmp_path / "a").exists()


def test_a_file_and_its_folder_are_flushed_around_every_rename(tmp_path, monkeypatch):
    with recorded(monkeypatch) as order:
        RunDir(tmp_path).commit("parts/a", text("one"))
    assert order.renamed == [tmp_path / "parts/a", tmp_path / "manifest.json"]
    assert not order.unflushed and not order.waiting


def test_write_atomically_never_shows_half_a_file(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")
    seen = []

    def write(path: Path) -> None:
        path.write_text("new")
        seen.append(target.read_text())

    write_atomically(target, write)
    assert seen == ["old"]
    assert target.read_text() == "new"


# Reading


KILLED_BEFORE_LISTING = """
import os, sys
from pathlib import Path
from rocktokens import run_dir

whole = run_dir.write_atomically
def die_at_the_manifest(target, write):
    if target.name == "manifest.json":
        os._exit(9)
    whole(target, write)

run = run_dir.RunDir(sys.argv[1])
run_dir.write_atomically = die_at_the_manifest
run.commit_text("a", "new, and longer")
"""


def test_a_kill_between_a_file_and_its_listing_leaves_what_is_listed(tmp_path):
    run = RunDir(tmp_path)
    run.commit("a", text("old"))
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", KILLED_BEFORE_LISTING, str(tmp_path)], check=False)
        assert (ended.returncode, (tmp_path / "a").read_text()) == (9, "new, and longer")
        assert run.verified("a").read_text() == "old"
    run.commit("a", text("newest"))
    assert run.verified("a") == tmp_path / "a" and (tmp_path / "a").read_text() == "newest"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a", "manifest.json"]


def test_a_first_file_that_a_kill_left_unlisted_is_not_there_and_any_other_is_refused(tmp_path):
    run = RunDir(tmp_path)
    ended = subprocess.run([sys.executable, "-c", KILLED_BEFORE_LISTING, str(tmp_path)], check=False)
    assert (ended.returncode, (tmp_path / "a").read_text()) == (9, "new, and longer")
    (tmp_path / "b").write_text("from elsewhere")
    assert (run.holds_unlisted("a"), run.holds_unlisted("b"), run.holds_unlisted("c")) == (False, True, False)
    with pytest.raises(RunDirError, match=r"/a does not exist"):
        run.verified("a")
    with pytest.raises(RunDirError, match=r"/b is not listed in"):
        run.verified("b")
    run.commit("a", text("newest"))
    assert run.verified("a").read_text() == "newest"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a", "b", "manifest.json"]


def test_a_first_file_that_is_listed_while_it_is_looked_for_is_no_stranger(tmp_path, monkeypatch):
    run, lists = RunDir(tmp_path), RunDir.lists

    def lists_late(self: RunDir, relative: str) -> bool:
        found = lists(self, relative)
        self.commit(relative, text("new"))
        return found

    monkeypatch.setattr(RunDir, "lists", lists_late)
    assert not run.holds_unlisted("a")


def test_a_first_file_that_cannot_be_listed_is_taken_back(tmp_path, monkeypatch):
    whole = run_dir.write_atomically

    def full(target: Path, write) -> None:
        if target.name == "manifest.json":
            raise OSError("disk full")
        whole(target, write)

    monkeypatch.setattr(run_dir, "write_atomically", full)
    (tmp_path / "b").write_text("from elsewhere")
    for name in ("a", "b"):
        with pytest.raises(OSError, match="disk full"):
            RunDir(tmp_path).commit(name, text("new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "b"]


def test_what_a_reader_was_given_outlives_the_commit_that_replaces_it(tmp_path, monkeypatch):
    """However long a writer takes to list what it wrote, a reader waits for nothing and loses nothing."""
    run, whole, given = RunDir(tmp_path), run_dir.write_atomically, []
    run.commit("a", text("old"))

    def between(target: Path, write) -> None:
        if target == tmp_path / "manifest.json":
            given.extend(run.verified("a") for _ in range(2))
        whole(target, write)

    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "write_atomically", between)
        run.commit("a", text("new"))
    assert given[0] == given[1] and (given[0].name, given[0].read_text()) == ("a", "old")
    assert run.verified("a") == tmp_path / "a" and (tmp_path / "a").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a", "manifest.json"]


def test_former_content_that_goes_while_it_is_read_is_looked_for_again(tmp_path, monkeypatch):
    """A writer lists what it wrote after a reader has read the manifest, and before that reader has its copy."""
    run, whole, copy, once = RunDir(tmp_path), run_dir.write_atomically, run_dir.shutil.copyfile, iter([None])
    run.commit("a", text("never copied"))
    given = []

    def between(target: Path, write) -> None:
        if target != tmp_path / "manifest.json" or next(once, "again") is not None:
            return whole(target, write)

        def late(source: Path, destination: Path) -> None:
            whole(target, write)
            Path(source).unlink()
            copy(source, destination)

        patch.setattr(run_dir.shutil, "copyfile", late)
        given.append(run.verified("a"))
        return None

    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "write_atomically", between)
        run.commit("a", text("new"))
    assert given == [tmp_path / "a"] and given[0].read_text() == "new"


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_commit_that_is_interrupted_anywhere_leaves_the_old_or_the_new_file(tmp_path, monkeypatch, fails_at, error):
    run, whole, calls = RunDir(tmp_path), run_dir.fsync, iter(range(1, 100))
    run.commit("a", text("old"))

    def failing(path: Path) -> None:
        whole(path)
        if next(calls) == fails_at:
            raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(run_dir, "fsync", failing)
        run.commit("a", text("new"))
    assert run.verified("a").read_text() == ("new" if fails_at == 4 else "old")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a", "manifest.json"]


def test_a_manifest_that_cannot_be_written_brings_the_old_file_back(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.commit("a", text("old"))
    whole = run_dir.write_atomically

    def full(target: Path, write) -> None:
        if target.name == "manifest.json":
            raise OSError("disk full")
        whole(target, write)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(run_dir, "write_atomically", full)
        run.commit("a", text("new"))
    assert run.verified("a").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a", "manifest.json"]


def test_a_writer_that_is_refused_leaves_the_holder_alone(tmp_path):
    """While one process replaces a file, another that may not write changes nothing of it."""
    run = RunDir(tmp_path)
    run.commit("a", text("old"))
    other = "import sys; from rocktokens.run_dir import RunDir; RunDir(sys.argv[1]).commit_text('a', 'theirs')"

    def write(path: Path) -> None:
        path.write_text("new")
        ended = subprocess.run([sys.executable, "-c", other, str(tmp_path)], capture_output=True, check=False)
        assert b"in use by another process" in ended.stderr
        assert run.verified("a").read_text() == "old"

    run.commit("a", write)
    assert run.verified("a").read_text() == "new"


def test_readers_beside_a_writer_never_see_what_is_not_listed(tmp_path):
    """A reader gets one of the contents that were committed, however its looks fall between the writer's steps."""
    run, contents = RunDir(tmp_path), {str(number) * 9 for number in range(40)}
    run.commit("a", text("0" * 9))

    def write() -> None:
        for content in sorted(contents):
            run.commit("a", text(content))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not writing.done():
            assert RunDir(tmp_path).verified("a").read_text() in contents
        writing.result()


@pytest.mark.parametrize("change", [lambda run: run.commit("a", text("new")), lambda run: run.drop(["a"])])
def test_a_file_that_was_replaced_since_it_was_looked_up_is_not_called_damaged(tmp_path, change):
    """A reader that opened the run before, such as the explorer, has to open it again; nothing is to be restored."""
    run = RunDir(tmp_path)
    entry = run.commit("a", text("old"))
    run.commit("ab", text("another"))
    change(run)
    with pytest.raises(
        RunDirError, match=r"/a was replaced by another command after this one .*: start this one again"
    ):
        run.verify(entry)


def test_a_file_is_hashed_once_and_again_when_it_changes(tmp_path, monkeypatch):
    run, hashed = RunDir(tmp_path), []
    whole = run_dir.file_sha256
    run.commit("a", text("one"))
    monkeypatch.setattr(run_dir, "SETTLED_NS", 0)
    monkeypatch.setattr(run_dir, "file_sha256", lambda path: hashed.append(path.name) or whole(path))
    for _ in range(3):
        assert RunDir(tmp_path).verified("a").read_text() == "one"
    assert hashed == ["a"]
    stamps = (tmp_path / "a").stat()
    (tmp_path / "a").write_text("two")
    os.utime(tmp_path / "a", ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    with pytest.raises(RunDirError, match="SHA-256 differs"):
        run.verified("a")


def test_a_young_file_is_hashed_every_time(tmp_path, monkeypatch):
    """However long a test takes: all files are young where that is said of a century."""
    run, hashed, whole = RunDir(tmp_path), [], run_dir.file_sha256
    run.commit("a", text("one"))
    monkeypatch.setattr(run_dir, "SETTLED_NS", 10**18 * 3)
    monkeypatch.setattr(run_dir, "file_sha256", lambda path: hashed.append(path.name) or whole(path))
    for _ in range(2):
        assert run.verified("a").read_text() == "one"
    assert hashed == ["a", "a"]


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path):
    """Its next change may bear the same time stamp."""
    run = RunDir(tmp_path)
    for number in range(40):
        run.commit("a", text(f"{number:03d}"))
        run.verified("a")
        with (tmp_path / "a").open("r+") as file:
            file.write("new")
        with pytest.raises(RunDirError, match="SHA-256 differs"):
            run.verified("a")


def test_several_files_are_verified_at_a_time_and_the_first_damaged_one_is_named(tmp_path):
    run = RunDir(tmp_path)
    entries = [run.commit(f"part-{number}", text(str(number))) for number in range(9)]
    assert run.verify_all(entries, threads=3) == [tmp_path / f"part-{number}" for number in range(9)]
    for number in (7, 4):
        (tmp_path / f"part-{number}").write_text("x")
    with pytest.raises(RunDirError, match="part-4 is not the file"):
        run.verify_all(entries)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("find.json", "or remove it and run `rocktokens find` again"),
        ("evaluations.json", "or remove it and run `rocktokens evaluate` again"),
        ("config.toml", "restore it from a copy of the run"),
        ("rocks.json", "restore it from a copy of the run"),
        ("traces/checkpoint=0/part-00000.parquet", "restore it from a copy of the run"),
    ],
)
def test_the_remedy_is_a_command_that_can_make_the_file(tmp_path, name, remedy):
    """Without traces rocks were given, and traces without a replay were brought: no command makes those."""
    run = RunDir(tmp_path)
    run.commit(name, text("one"))
    (tmp_path / name).write_text("two")
    with pytest.raises(RunDirError) as refused:
        run.verified(name)
    assert str(refused.value).endswith(remedy)


def test_a_path_that_was_given_is_verified_where_a_run_lists_it(tmp_path):
    run = RunDir(tmp_path / "run")
    run.commit("a", text("one"))
    (tmp_path / "run/own").write_text("not the run's")
    (tmp_path / "alone").write_text("no run at all")
    for name in ("run/a", "run/own", "alone", "nowhere"):
        assert as_listed(tmp_path / name) == tmp_path / name
    (tmp_path / "run/a").write_text("two")
    with pytest.raises(RunDirError, match="SHA-256 differs"):
        as_listed(tmp_path / "run/a")
    (tmp_path / "run/manifest.json").write_text('{"manifest_version": 3, "name": "an extension of a browser"}')
    assert as_listed(tmp_path / "run/a") == tmp_path / "run/a"


def test_what_a_command_would_write_must_be_listed_where_there_is_a_run(tmp_path):
    """Elsewhere the name is free; what a killed writer left before listing it does not exist."""
    run = RunDir(tmp_path / "run")
    run.commit("a", text("one"))
    for folder in (tmp_path, run.path):
        (folder / "classes.json").write_text("by hand")
    assert as_listed(tmp_path / "classes.json") == tmp_path / "classes.json"
    with pytest.raises(
        RunDirError, match=r"classes\.json is not listed in .*, so it is no file of this run: remove it"
    ):
        as_listed(run.classes)
    (run.path / ".classes.json.former").touch()
    with pytest.raises(RunDirError, match=r"classes\.json does not exist"):
        as_listed(run.classes)
    run.commit("classes.json", text("made"))
    assert as_listed(run.classes) == run.classes


# Manifest


def test_manifest_keeps_facts_beside_files(tmp_path):
    run = RunDir(tmp_path)
    assert not run.exists()
    run.commit("a", text("one"))
    run.record_start("distill", seed=7)
    run.update_manifest(tokenizer_sha256="abc")
    manifest = RunDir(tmp_path).manifest()
    assert (manifest["command"], manifest["seed"], manifest["tokenizer_sha256"]) == ("distill", 7, "abc")
    assert manifest["versions"]["pyarrow"]
    assert list(manifest["files"]) == ["a"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"manifest_version": 2, "files": {}}', "has manifest_version 2, this rocktokens reads 1"),
        ('{"files": {}}', "has manifest_version None, this rocktokens reads 1"),
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ('{"manifest_version": 1}', "lists no files"),
    ],
)
def test_a_manifest_of_another_version_or_damaged_is_refused(tmp_path, content, sentence):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(RunDirError, match=sentence):
        RunDir(tmp_path).files()


def test_a_folder_without_a_manifest_is_not_a_run(tmp_path):
    with pytest.raises(RunDirError, match=r"is not a run directory \(it has no manifest.json\)"):
        RunDir(tmp_path).require()


# Lock


def test_the_writers_of_a_process_share_the_lock_until_the_last_lets_go(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    holder, other = RunDir(tmp_path / "run"), RunDir(tmp_path / "link")
    with holder.lock():
        with other.lock(), holder.lock():
            other.commit("a", text("one"))
        holder.commit("b", text("two"))
        assert "is in use by another process" in try_to_write(tmp_path / "run")
        assert "is in use by another process" in try_to_write(tmp_path / "link")
    assert try_to_write(tmp_path / "run") == ""
    assert [entry.path for entry in other.files()] == ["a", "b"]


def try_to_write(run: Path) -> str:
    """What another process is told."""
    program = "import sys; from rocktokens.run_dir import RunDir; RunDir(sys.argv[1]).update_manifest()"
    return subprocess.run([sys.executable, "-c", program, run], capture_output=True, text=True, check=False).stderr


def test_a_forked_process_does_not_inherit_the_lock(tmp_path):
    with RunDir(tmp_path).lock():
        child = os.fork()
        if child == 0:
            try:
                RunDir(tmp_path).update_manifest()
                os._exit(0)
            except RunDirError:
                os._exit(3)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert not RunDir(tmp_path).exists()


def test_a_thread_is_not_refused_while_another_replaces_the_manifest(tmp_path, monkeypatch):
    """Between the rename of the new one and the note of its identity, another writer would take it for foreign."""
    run, whole = RunDir(tmp_path), run_dir.write_atomically

    def slowly(target: Path, write) -> None:
        whole(target, write)
        time.sleep(0.2)

    with run.lock():
        run.update_manifest()
        monkeypatch.setattr(run_dir, "write_atomically", slowly)
        with ThreadPoolExecutor(1) as pool:
            replacing = pool.submit(run.update_manifest, seed=1)
            while not replacing.done():
                run.require_held()
            replacing.result()


def test_threads_do_not_lose_each_others_files(tmp_path):
    names = [f"part-{number}" for number in range(10, 40)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: RunDir(tmp_path).commit(name, text(name)), names))
    assert [entry.path for entry in RunDir(tmp_path).files()] == names


HOLD_THE_LOCK = """
import sys, time
from rocktokens.run_dir import RunDir
with RunDir(sys.argv[1]).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_holder_lets_go_and_is_named_while_it_lives(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(RunDirError, match=rf"pid {process.pid}\)"):
            RunDir(tmp_path).update_manifest()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    RunDir(tmp_path).update_manifest()


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunDirError, match="is a file, not a folder"):
        RunDir(tmp_path / "run").update_manifest()


def test_a_folder_that_cannot_be_made_or_written_is_named(tmp_path):
    with pytest.raises(RunDirError, match=r"^/proc/x/y cannot be created or written \(no such file or directory\)"):
        RunDir("/proc/x/y").update_manifest()
    (tmp_path / ".lock").mkdir()
    with pytest.raises(RunDirError, match=r"cannot be created or written \(is a directory\): .*run.directory"):
        RunDir(tmp_path).update_manifest()


COMMIT_FOREVER = """
import sys
from itertools import count
from rocktokens.run_dir import RunDir
run = RunDir(sys.argv[1])
for index in count():
    run.commit(f"part-{index}", lambda path: path.write_text(str(index) * 10_000), rows=index)
"""


def test_a_kill_at_any_moment_leaves_a_whole_manifest_of_whole_files(tmp_path):
    for delay in (0.0, 0.011, 0.023):
        run = RunDir(tmp_path / str(delay))
        process = subprocess.Popen([sys.executable, "-c", COMMIT_FOREVER, str(run.path)])
        try:
            deadline = time.monotonic() + 60
            while not run.files() and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(delay)
        finally:
            process.kill()
            process.wait()
        files = run.files()
        assert {entry.rows for entry in files} == set(range(len(files)))
        assert files
        for entry in files:
            assert run.verify(entry).read_text() == str(entry.rows) * 10_000
        json.loads((run.path / "manifest.json").read_text())


# Seeds


labels = st.lists(st.integers() | st.text(), max_size=3)


@given(st.integers(0, 2**63 - 1), labels, labels)
def test_derived_seeds_are_63_bit_repeatable_and_differ_by_use(seed, one, other):
    assert 0 <= derive_seed(seed, *one) < 2**63
    assert derive_seed(seed, *one) == derive_seed(seed, *one)
    assert (derive_seed(seed, *one) == derive_seed(seed, *other)) == (one == other)


def test_derived_seeds_do_not_move_between_versions():
    assert derive_seed(0, "split") == 4881780577946778530
    assert derive_seed(1, "2") != derive_seed(1, 2)


# What happens to the folder under its writer


@pytest.mark.parametrize("what", ["folder", ".lock", "manifest.json", "another manifest"])
def test_a_writer_stops_where_its_run_is_removed_or_replaced(tmp_path, what):
    run = RunDir(tmp_path / "run")
    run.commit("a", text("one"))
    with run.lock():
        run.commit("b", text("two"))
        if what == "folder":
            shutil.rmtree(run.path)
        elif what == "another manifest":
            write_atomically(run.path / "manifest.json", text('{"manifest_version": 1, "files": {}}'))
        else:
            (run.path / what).unlink()
        before = sorted(tmp_path.rglob("*"))
        writes = (run.update_manifest, lambda: run.commit("c", text("three")), lambda: run.adopt(["a"]))
        for write in (*writes, lambda: append_log(run, {"step": 0})):
            with pytest.raises(RunDirError, match=r"was removed or replaced .*while this process was writing"):
                write()
        assert sorted(tmp_path.rglob("*")) == before


def test_the_first_writer_stops_where_a_removed_lock_let_a_second_in(tmp_path):
    run = RunDir(tmp_path)
    run.update_manifest()
    with run.lock():
        (tmp_path / ".lock").unlink()
        assert try_to_write(tmp_path) == ""
        with pytest.raises(RunDirError, match=r"\.lock was removed or replaced"):
            run.commit("a", text("one"))
    assert run.files() == []
    run.commit("a", text("one"))


def test_files_of_a_run_without_its_manifest_are_not_written_over(tmp_path):
    run = RunDir(tmp_path / "run")
    run.require_new()
    run.path.mkdir()
    (run.path / "my notes.txt").touch()
    (run.path / ".config.toml.former").touch()
    (run.path / "config.toml").touch()  # a process was killed at its first commit
    run.require_new()
    (run.path / "checkpoints").mkdir()
    run.require_new(beside=("checkpoints",))
    with pytest.raises(RunDirError, match=r"has files of a run \(checkpoints\) and no manifest\.json"):
        run.require_new()
    run.update_manifest()
    run.require_new()


@pytest.mark.parametrize("failing", ["once", "from then on"])
def test_content_that_cannot_even_be_put_back_is_kept_beside_its_place(tmp_path, monkeypatch, failing):
    """A disk on which the manifest, and then every rename, fails: what is listed can still be read."""
    run, replace, failed = RunDir(tmp_path), os.replace, []
    run.commit("a", text("old"))

    def fail(source, target):
        if Path(target).name == "manifest.json" or (failed and failing == "from then on"):
            failed.append(target)
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output error"):
        run.commit("a", text("new"))
    monkeypatch.undo()
    assert run.verified("a").read_text() == "old"
    run.commit("a", text("newest"))
    assert run.verified("a") == tmp_path / "a" and (tmp_path / "a").read_text() == "newest"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a", "manifest.json"]


@pytest.mark.parametrize("name", ["", "a\0b", "9" * 256, "figures/" + "é" * 128, "\ud800"])
def test_a_manifest_that_lists_what_cannot_be_a_name_is_refused(tmp_path, name):
    run = RunDir(tmp_path)
    run.commit("9" * 200, text("a long name"))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["files"][name] = {"rows": 0, "sha256": "0" * 64}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunDirError, match="which cannot be the name of a file: restore it from a copy") as refused:
        run.files()
    assert len(str(refused.value).splitlines()) == 1
