"""A run directory: one writer, many readers, and nothing that is half written ever counts.

1. A file is written under a temporary name, flushed to the disk, and renamed.
2. Only then is it listed, with its row count and SHA-256, in ``manifest.json``, which is itself replaced atomically.
3. A file that the manifest does not list does not exist; whatever a killed process left behind is overwritten.
4. A file that replaces a listed one leaves that one beside it until the new one is listed: at any moment, whoever is
   killed, the content that the manifest lists can be read. A reader gets a copy of it, since its writer removes it.
5. Whoever reads a listed file asks for it here (``verified``, ``verify_all``): on first read in a process its bytes
   must have the SHA-256 that the manifest lists. What has been verified is remembered until the file changes.
6. The process that writes holds an advisory lock on ``.lock``, which the kernel releases when it dies, however it dies.
   All writers of one process share it. Where the folder, the lock or the manifest is removed or replaced under the
   writer, it stops at its next write (``require_held``): what it would list no longer belongs to what is there.
7. A folder that holds files of a run and no manifest is no place for a new run (``require_new``).
"""

import atexit
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rocktokens.errors import RunDirError
from rocktokens.parsing import parse_json
from rocktokens.provenance import source_commit

MANIFEST_VERSION = 1
ENTRY_KEYS = {"rows", "sha256"}
FACTS: dict[str, type] = {
    "choice_added": dict,
    "figures": dict,
    "knockout_inputs": dict,
    "lengths": dict,
    "max_steps": int,
    "num_processes": int,
    "policy_files": dict,
    "searched": list,
    "served_teachers": dict,
    "tokenizer_sha256": str,
    "took": dict,
}
"""Entries of a manifest that stages look things up in, by type; ``replay`` is a record of its own."""
TRAINER_STATE = "trainer_state.json"
"""The file that makes a folder of weights a checkpoint of a run."""
OPTIMIZER_FILE = "optimizer.safetensors"
"""The file of a checkpoint that only training and gradients read."""
MAKERS = {
    "rocks.json": "rocktokens find",
    "find.json": "rocktokens find",
    "classes.json": "rocktokens find --classes",
    "gradients.json": "rocktokens gradients",
    "knockout.json": "rocktokens knockout",
    "knockout-classes.json": "rocktokens knockout --classes",
    "evaluations.json": "rocktokens evaluate",
    "study.json": "rocktokens study",
    "traces/checkpoint=": "rocktokens trace --restart",
    "rollouts/probe/": "rocktokens trace --restart",
    "figures/gradient_": "rocktokens gradients",
    "figures/": "rocktokens find",
    "report.html": "rocktokens report",
}
"""The command that makes a file again, by how its path begins."""
CONTENT = frozenset(
    {"config.toml", "checkpoints", "traces", "rollouts", "tokenizer", "knockout", "figures", "logs.jsonl"}
    | {"arms", "scout"}
    | {name for name in MAKERS if "/" not in name}
)
"""What a run or a study has at its top."""
SETTLED_NS = 2 * 10**9
"""A file whose last change is younger may change again without another time stamp: it is not remembered."""
LONGEST_NAME = 255
"""Bytes of the name of a file or folder."""
RECORDED_PACKAGES = ("rocktokens", "torch", "transformers", "accelerate", "peft", "pyarrow", "duckdb", "numpy")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One committed file: its path relative to the run, rows (0 where rows mean nothing) and SHA-256."""

    path: str
    rows: int
    sha256: str


@dataclass(slots=True)
class HeldLock:
    """The lock of one run that this process holds, how many of its writers do, and the manifest as they left it."""

    descriptor: int
    manifest: tuple[int, ...] | None
    writers: int = 0


_held: dict[tuple[int, str], HeldLock] = {}
"""By process and real path: a forked process finds nothing here and is refused like any other."""
_guard = threading.Lock()
_STEP = re.compile(r"step-(\d+)")
_verified: set[tuple[str, tuple[int, ...]]] = set()
"""SHA-256 and identity of the files that this process has found to be as listed."""
_one_change = threading.RLock()
_copying = threading.Lock()


class RunDir:
    """Paths, manifest and lock of one run. Reading never takes the lock; every change of the manifest needs it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        """The config the run was started with, defaults written out."""
        self.rocks = self.path / "rocks.json"
        """The rocks found."""
        self.classes = self.path / "classes.json"
        """Classes of interchangeable tokens: candidates, and what bans have shown of them."""
        self.evaluations = self.path / "evaluations.json"
        """Accuracies measured so far."""
        self.knockout = self.path / "knockout.json"
        """What bans did to accuracy, in the last sweep."""
        self.knockout_classes = self.path / "knockout-classes.json"
        """What bans within classes of tokens did."""
        self.gradients = self.path / "gradients.json"
        """Where the gradient goes, in logit and in parameter space."""
        self.report = self.path / "report.html"
        """The page with the answers."""
        self.logs = self.path / "logs.jsonl"
        """One JSON object per training step."""

    def checkpoint(self, step: int) -> Path:
        """The directory of the student at a training step, loadable by ``from_pretrained``."""
        return self.path / "checkpoints" / f"step-{step}"

    # Manifest

    def manifest(self) -> dict[str, Any]:
        """The manifest as it is on disk now; an empty one if the run has none yet."""
        path = self.path / "manifest.json"
        try:
            manifest = parse_json(path.read_bytes())
        except FileNotFoundError:
            return {"manifest_version": MANIFEST_VERSION, "files": {}}
        except NotADirectoryError:
            raise self._no_folder() from None
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise RunDirError(f"{path} cannot be read ({reason}): restore it from a copy of the run") from None
        except ValueError as error:
            raise RunDirError(f"{path} is not valid JSON ({error}): restore it from a copy of the run") from None
        if not isinstance(manifest, dict):
            raise RunDirError(f"{path} is not a JSON object: restore it from a copy of the run")
        version = manifest.get("manifest_version")
        if version != MANIFEST_VERSION:
            raise RunDirError(f"{path} has manifest_version {version!r}, this rocktokens reads {MANIFEST_VERSION}")
        if problem := _manifest_problem(manifest):
            raise RunDirError(f"{path} {problem}: restore it from a copy of the run")
        return manifest

    def exists(self) -> bool:
        """Whether anything was ever committed here."""
        return (self.path / "manifest.json").exists()

    def require(self) -> "RunDir":
        """This run, or a clear refusal when there is none."""
        if not self.exists():
            raise RunDirError(f"{self.path} is not a run directory (it has no manifest.json): give the folder of a run")
        return self

    def files(self, prefix: str = "") -> list[FileEntry]:
        """Committed files whose relative path starts with ``prefix``, sorted by path."""
        listed = self.manifest()["files"]
        return [FileEntry(path, **listed[path]) for path in sorted(listed) if path.startswith(prefix)]

    def checkpoints(self) -> list[int]:
        """Steps of all committed checkpoints, oldest first."""
        paths = (Path(entry.path) for entry in self.files("checkpoints/step-"))
        steps = (_STEP.fullmatch(path.parent.name) for path in paths if path.name == TRAINER_STATE)
        return sorted(int(step.group(1)) for step in steps if step)

    def lists(self, relative: str) -> bool:
        """Whether a file is part of the run."""
        return relative in self.manifest()["files"]

    def holds_unlisted(self, relative: str) -> bool:
        """Whether there is a file that is no part of the run, other than one whose writer was killed before listing it.

        Such a file does not exist for a reader: an empty file in the place of former content says that there was none.
        """
        path = self.path / relative
        # In this order: a first file has something beside it from before it is there until it is listed.
        return path.exists() and not _former(path).exists() and not self.lists(relative)

    def listed(self, relative: str) -> FileEntry:
        """What the manifest lists of a file of the run; refused where it is not listed."""
        path, listed = self.path / relative, self.manifest()["files"].get(relative)
        if listed is not None:
            return FileEntry(relative, **listed)
        maker = self.maker(relative)
        if self.holds_unlisted(relative):
            remedy = f"remove it and run `{maker}`" if maker else "remove it, or restore the manifest that lists it"
            raise RunDirError(
                f"{path} is not listed in {self.path / 'manifest.json'}, so it is no file of this run: {remedy}"
            )
        raise RunDirError(f"{path} does not exist: {f'run `{maker}` first' if maker else 'restore it from a copy'}")

    def verified(self, relative: str) -> Path:
        """The path of a file of the run, once its bytes are as the manifest says; refused where it is not listed."""
        return self.verified_entry(relative)[0]

    def verified_entry(self, relative: str) -> tuple[Path, FileEntry]:
        """As ``verified``, with what the manifest lists of the file."""
        entry = self.listed(relative)
        while True:
            try:
                return self.verify(entry), entry
            except RunDirError:
                before, entry = entry, self.listed(relative)
                if entry == before:  # else it was replaced between the two looks
                    raise

    def verified_checkpoint(self, step: int, *, optimizer: bool = True) -> Path:
        """The directory of a committed checkpoint, once its files (the optimizer's if asked for) are as listed."""
        entries = self.files(f"checkpoints/step-{step}/")
        if not entries:
            raise RunDirError(f"{self.path} has no checkpoint of step {step}: there are {self.checkpoints()}")
        self.verify_all([entry for entry in entries if optimizer or Path(entry.path).name != OPTIMIZER_FILE])
        self.require_only_listed(step)
        return self.checkpoint(step)

    def require_only_listed(self, step: int) -> None:
        """Refuse weights in the folder of a checkpoint that the manifest does not list."""
        # A process killed while it dropped the optimizer's state may have left that.
        known = {OPTIMIZER_FILE, *(Path(entry.path).name for entry in self.files(f"checkpoints/step-{step}/"))}
        folder = self.checkpoint(step)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name not in known and (path.suffix == ".safetensors" or path.name == "adapter_config.json"):
                manifest = self.path / "manifest.json"
                raise RunDirError(f"{path} is not listed in {manifest}, so it is no part of that checkpoint: remove it")

    def update_manifest(self, **changes: Any) -> None:
        """Replace top-level entries of the manifest."""
        with self._change() as manifest:
            manifest.update(changes)

    def record_start(self, command: str, **facts: Any) -> None:
        """Note who wrote here, with which code, versions and seeds."""
        started = datetime.now(UTC).isoformat(timespec="seconds")
        machine = {"system": platform.system(), "machine": platform.machine(), "cpus": os.cpu_count()}
        made_by = {"commit": source_commit(), "versions": package_versions()}
        self.update_manifest(command=command, started=started, machine=machine, **made_by, **facts)

    def commit(self, relative: str, write: Callable[[Path], Any], rows: int = 0) -> FileEntry:
        """Let ``write`` fill a temporary file, then make it part of the run, or leave no trace of the attempt."""
        target = self.path / relative
        with self.lock(), _one_change:
            self.require_held()
            listed = self.manifest()["files"].get(relative) if target.exists() else None
            with _kept(target, listed, lambda: self.manifest()["files"].get(relative)), self._change() as manifest:
                write_atomically(target, write)
                entry = FileEntry(relative, rows, file_sha256(target))
                manifest["files"][relative] = {"rows": rows, "sha256": entry.sha256}
        return entry

    def commit_text(self, relative: str, text: str) -> FileEntry:
        """Make a text file part of the run."""
        return self.commit(relative, lambda path: path.write_text(text, encoding="utf-8"))

    def adopt(self, relatives: list[str]) -> None:
        """List files that are already complete on disk, all in one replacement of the manifest."""
        self.require_held()
        self.list_files([FileEntry(relative, 0, file_sha256(self.path / relative)) for relative in relatives])

    def list_files(self, entries: Sequence[FileEntry]) -> None:
        """List files that are already complete on disk and whose hashes are known, in one replacement."""
        with self._change() as manifest:
            manifest["files"].update({own.path: {"rows": own.rows, "sha256": own.sha256} for own in entries})

    def drop(self, relatives: list[str]) -> None:
        """Forget files, then delete them."""
        if not relatives:
            return
        with self.lock():
            with self._change() as manifest:
                for relative in relatives:
                    manifest["files"].pop(relative, None)
            for relative in relatives:
                (self.path / relative).unlink(missing_ok=True)

    def verify(self, entry: FileEntry) -> Path:
        """The path of a committed file whose bytes are what the manifest says, hashed on first read in the process."""
        path = self.path / entry.path
        absent = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
        with suppress(*absent):
            if _has_sha256(path, entry.sha256):
                return path
        with suppress(*absent):
            if _has_sha256(_former(path), entry.sha256):
                return _copied(_former(path), path.name, entry.sha256)
        if entry not in self.files(entry.path):
            raise RunDirError(
                f"{path} was replaced by another command after this one opened the run: start this one again"
            )
        maker = self.maker(entry.path)
        if not path.exists():
            again = f", or run `{maker}` again" if maker else ""
            raise RunDirError(f"{path} is listed in the manifest but missing: restore it from a copy of the run{again}")
        if path.is_dir():
            raise self.damaged(entry.path, "is a folder, where the manifest lists a file")
        raise self.damaged(entry.path, f"is not the file that {self.path / 'manifest.json'} lists (SHA-256 differs)")

    def damaged(self, relative: str, problem: str) -> RunDirError:
        """The refusal of a file of the run, with what brings it back."""
        maker = self.maker(relative)
        again = f", or remove it and run `{maker}` again" if maker else ""
        return RunDirError(f"{self.path / relative} {problem}: restore it from a copy of the run{again}")

    def verify_all(self, entries: Sequence[FileEntry], threads: int | None = None) -> list[Path]:
        """The paths of committed files, verified several at a time; the first that is not as listed is named."""
        with ThreadPoolExecutor(threads or os.cpu_count(), thread_name_prefix="verify") as pool:
            return list(pool.map(self.verify, entries))

    def maker(self, relative: str) -> str | None:
        """The command that makes a file again, None where only a copy brings it back."""
        manifest = self.manifest()
        shared = (self.rocks.name, self.classes.name)
        is_given = relative in shared and not self.files("traces/")  # to a study, whose arms may have used it
        is_brought = relative.startswith(("traces/", "rollouts/")) and "replay" not in manifest
        makers = (maker for start, maker in MAKERS.items() if relative.startswith(start))
        return None if is_given or is_brought else next(makers, None)

    def _no_folder(self) -> RunDirError:
        return RunDirError(f"{self.path} is a file, not a folder: give run.directory another name")

    @contextmanager
    def _change(self) -> Iterator[dict[str, Any]]:
        """The manifest as it is now, for the block to change; replaced at its end. One thread at a time."""
        with self.lock(), _one_change:
            self.require_held()
            manifest = self.manifest()
            yield manifest
            self.require_held()
            # Lines by a separator: ``indent`` leaves json's fast encoder, and a long run lists thousands of files.
            text = json.dumps(manifest, separators=(",\n", ": "), sort_keys=True, ensure_ascii=False)
            target = self.path / "manifest.json"
            with _guard:  # another thread would take the new manifest for one of another process
                write_atomically(target, lambda path: path.write_text(text + "\n", encoding="utf-8"))
                _held[os.getpid(), os.path.realpath(self.path)].manifest = _identity(target)

    # Lock

    @contextmanager
    def lock(self) -> Iterator["RunDir"]:
        """Be the one process that writes; shared by its writers, refused at once if another process holds it."""
        key = (os.getpid(), os.path.realpath(self.path))
        with _guard:
            held = _held.get(key) or HeldLock(self._acquire(), _identity(self.path / "manifest.json"))
            _held[key] = held
            held.writers += 1
        try:
            yield self
        finally:
            with _guard:
                held.writers -= 1
                if held.writers == 0:
                    del _held[key]
                    os.close(held.descriptor)

    def require_held(self) -> None:
        """Refuse to write on where the folder, its lock or its manifest is no longer what this process holds."""
        lock = self.path / ".lock"
        with _guard:
            held = _held.get((os.getpid(), os.path.realpath(self.path)))
            if held is None:
                return
            if not lock.exists() or not os.path.samestat(lock.stat(), os.fstat(held.descriptor)):
                what = f"{lock} was removed or replaced"
            elif _identity(self.path / "manifest.json") != held.manifest:
                what = f"{self.path / 'manifest.json'} was removed or replaced by another"
            else:
                return
        raise RunDirError(
            f"{what} while this process was writing to the run: it stops here; restore the run from a copy, or give "
            "another run.directory"
        )

    def require_new(self, beside: Collection[str] = ()) -> None:
        """Refuse to begin a run where files of another lie without its manifest, but for those named ``beside``."""
        if self.exists() or not self.path.is_dir():
            return
        there = sorted(own.name for own in self.path.iterdir() if own.name in CONTENT and own.name not in beside)
        # What a process left that was killed at its first commit does not exist.
        if names := [name for name in there if not _former(self.path / name).exists()]:
            raise RunDirError(
                f"{self.path} has files of a run ({', '.join(names)}) and no manifest.json, so it is not known what "
                "they are: restore the manifest from a copy, or give another run.directory"
            )

    def _acquire(self) -> int:
        """The descriptor whose closing lets go of the lock."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except (FileExistsError, NotADirectoryError):
            raise self._no_folder() from None
        except OSError as error:
            raise RunDirError(
                f"{self.path} cannot be created or written ({(error.strerror or str(error)).lower()}): fix that, or "
                "give another run.directory"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
            os.close(descriptor)
            raise RunDirError(
                f"{self.path} is in use by another process (pid {holder}): wait for it, or give another run.directory"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor


def write_atomically(target: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a temporary file beside ``target``, flush it to the disk, and rename it into place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        write(temporary)
        fsync(temporary)
        temporary.replace(target)
        fsync(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def file_sha256(path: Path) -> str:
    """Return the hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run_at(folder: Path) -> RunDir | None:
    """The run in a folder; None where there is none, even if something else left a manifest.json there."""
    run = RunDir(folder)
    with suppress(RunDirError):
        return run if run.exists() and run.manifest() else None
    return None


def as_listed(path: str | Path) -> Path:
    """A path that someone gave: where a run lists the file, only once its bytes are as listed.

    A file of a name that commands write (``MAKERS``) is refused in a run that does not list it: its origin is
    unknown. Other files may stand there.
    """
    path = Path(path)
    run = run_at(path.parent)
    if run is None or not (run.lists(path.name) or (path.name in MAKERS and path.exists())):
        return path
    return run.verified(path.name)


def require_as_listed(folder: str | Path, *, optimizer: bool = False) -> None:
    """Refuse the folder of a run's checkpoint whose files are not those that the run lists; other folders are fine.

    A folder of traces alone, which lists no checkpoints, may hold students of its own.
    """
    folder = Path(folder).absolute()
    if folder.parent.name == "checkpoints" and (step := _STEP.fullmatch(folder.name)):
        run = run_at(folder.parent.parent)
        if run is not None and run.checkpoints():
            run.verified_checkpoint(int(step.group(1)), optimizer=optimizer)


def _manifest_problem(manifest: dict[str, Any]) -> str:
    """Say what is wrong with the content of a manifest; "" where nothing is."""
    files = manifest.get("files")
    if not isinstance(files, dict):
        return "lists no files"
    for path, entry in files.items():
        if type(entry) is not dict or entry.keys() != ENTRY_KEYS:
            return f"lists {path!r} without its rows and SHA-256"
        if type(entry["rows"]) is not int or not isinstance(entry["sha256"], str):
            return f"lists {path!r} with rows {entry['rows']!r} and SHA-256 {entry['sha256']!r}"
        if path.startswith("/") or ".." in path.split("/"):
            return f"lists {path!r}, which is outside the run"
        if not _is_name(path):
            return f"lists {path!r}, which cannot be the name of a file"
    wrong = (name for name, kind in FACTS.items() if name in manifest and type(manifest[name]) is not kind)
    return next((f"has {name} = {manifest[name]!r}, which is no {FACTS[name].__name__}" for name in wrong), "")


def _is_name(path: str) -> bool:
    """Whether a file system can have a file of this name."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return bool(encoded) and b"\0" not in encoded and max(map(len, encoded.split(b"/"))) <= LONGEST_NAME


def _identity(path: Path) -> tuple[int, ...] | None:
    """What tells a file from one that takes its place, even under the same inode; None where there is none."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (status.st_dev, status.st_ino, status.st_mtime_ns)


def _has_sha256(path: Path, sha256: str) -> bool:
    """Whether a file has this hash. Any change of a file gives it another identity, so that it is hashed again."""
    status = path.stat()
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if (sha256, identity) in _verified:
        return True
    if file_sha256(path) != sha256:
        return False
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > SETTLED_NS:
        _verified.add((sha256, identity))
    return True


@cache
def _copies() -> Path:
    """A folder of this process that goes with it."""
    folder = tempfile.mkdtemp(prefix="rocktokens-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _copied(former: Path, name: str, sha256: str) -> Path:
    """A copy of what a writer may remove at any moment; it stays as long as this process, which makes one of each.

    Raises:
        FileNotFoundError: it has been removed, or replaced, meanwhile.
    """

    def write(path: Path) -> None:
        shutil.copyfile(former, path)
        if file_sha256(path) != sha256:
            raise FileNotFoundError(former)

    with _copying:
        copy = _copies() / sha256 / name
        if not copy.exists():
            write_atomically(copy, write)
    return copy


def _former(target: Path) -> Path:
    """Where the listed content of a file is kept while another takes its place."""
    return target.with_name(f".{target.name}.former")


@contextmanager
def _kept(
    target: Path, listed: dict[str, Any] | None, listed_now: Callable[[], dict[str, Any] | None]
) -> Iterator[None]:
    """Keep the listed content of a file until the block has listed another; put it back where the block fails to."""
    former, is_first = _former(target), not target.exists()
    if listed is None:
        former.parent.mkdir(parents=True, exist_ok=True)
        former.touch()  # there was none: see holds_unlisted
    # A killed process may have left the listed content, and only that, under this name.
    if listed is not None and not (former.exists() and _has_sha256(former, listed["sha256"])):
        former.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            try:
                os.link(target, former)
            except OSError:  # a file system without hard links
                shutil.copy2(target, former)
    try:
        yield
    except BaseException:
        with suppress(RunDirError):  # where it is not known what is listed, both stay
            if listed_now() == listed:  # else the new content is listed, and only what came after has failed
                _put_back(former, target, listed is not None, is_first)
            former.unlink(missing_ok=True)  # a replacement by another name of the same file leaves both
        raise
    former.unlink(missing_ok=True)


def _put_back(former: Path, target: Path, is_listed: bool, is_first: bool) -> None:
    """Have a file as it is listed again; where even that fails, its content stays beside it, for readers to find."""
    if is_listed:
        with suppress(FileNotFoundError):
            former.replace(target)
    elif is_first:
        target.unlink(missing_ok=True)


def derive_seed(seed: int, *labels: str | int) -> int:
    """Derive a 63-bit seed for one use of the run's seed, so that no two uses share random numbers."""
    message = json.dumps([seed, *labels]).encode()
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "big") >> 1


def fsync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def package_versions(packages: Iterable[str] = RECORDED_PACKAGES) -> dict[str, str]:
    """Return Python's version and those of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
