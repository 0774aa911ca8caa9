"""Which code made a result and what that took, in a checkout, beside one and without any."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rocktokens import provenance
from rocktokens.provenance import TOOK, Meter, metered
from rocktokens.run_dir import RunDir

ASK = "import runpy; print(runpy.run_path({path!r})['source_commit']())"


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=someone", "-c", "user.email=someone@example.com"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A repository with a package that holds the module."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    shutil.copy(provenance.__file__, folder)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return folder


def asked(package: Path, **environment: str) -> str:
    code = ASK.format(path=str(package / "provenance.py"))
    command = [sys.executable, "-c", code]
    given = {"PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=given).stdout.strip()


def test_a_checkout_is_named_by_its_commit_and_says_when_it_was_changed(package: Path):
    head = git(package, "rev-parse", "HEAD")
    assert asked(package, ROCKTOKENS_COMMIT="another") == head
    (package.parent / "notes.txt").touch()
    assert asked(package) == head
    (package / "__init__.py").write_text("changed = True")
    assert asked(package) == f"{head}+changes"


def test_an_environment_inside_another_repository_does_not_take_its_commit(package: Path):
    git(package, "rm", "--quiet", "--cached", "-r", ".")
    git(package, "commit", "--quiet", "--message", "the package is ignored now")
    assert asked(package, ROCKTOKENS_COMMIT="of the image") == "of the image"
    assert asked(package) == "None"


def test_a_run_keeps_what_each_stage_took(tmp_path: Path):
    run = RunDir(tmp_path)
    for stage in ("find", "report", "find"):
        Meter().keep(run, stage)
    took = run.manifest()[TOOK]
    assert list(took) == ["find", "report"]
    assert took["find"].keys() == {"seconds", "finished", "commit"}
    assert took["find"]["finished"] >= took["report"]["finished"]
    assert took["find"]["commit"] == provenance.source_commit()


def test_a_stage_with_nothing_left_to_do_keeps_what_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, now = RunDir(tmp_path), iter([0.0, 3600.0, 4000.0, 5000.0, 5060.0])
    monkeypatch.setattr(provenance.time, "perf_counter", lambda: next(now))
    for content in ("first", "first", "second"):
        with metered(run, "distill"):
            run.commit_text("model", content)
        if content == "first":
            assert run.manifest()[TOOK]["distill"]["seconds"] == 3600.0
    assert run.manifest()[TOOK]["distill"]["seconds"] == 60.0


def test_a_meter_counts_from_when_it_is_made(monkeypatch: pytest.MonkeyPatch):
    now = iter([100.0, 107.25])
    monkeypatch.setattr(provenance.time, "perf_counter", lambda: next(now))
    assert Meter().read()["seconds"] == pytest.approx(7.2, abs=0.051)


class Cuda:
    """A GPU as torch knows one."""

    def is_initialized(self) -> bool:
        return True

    def reset_peak_memory_stats(self) -> None: ...

    def get_device_name(self) -> str:
        return "a GPU"

    def max_memory_allocated(self) -> int:
        return 7

    def max_memory_reserved(self) -> int:
        return 8


def test_memory_is_counted_where_this_process_does_the_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Cuda()))
    counted = Meter().read()
    assert (counted["gpu"], counted["peak_allocated"], counted["peak_reserved"]) == ("a GPU", 7, 8)
    assert Meter(by_others=True).read().keys() == {"seconds", "finished", "commit"}
