"""Check every file of a run: against its hash, against its schema, and against the rest of the run. Changes nothing.

1. Every listed file must be there, with the bytes that the manifest lists.
2. It must be what its name says: a part of the schema's columns and ranges, a record with every field in its type, a
   config, a tokenizer, tensors that lie within their file.
3. Records must be of the run they lie in: of its traces, its tokenizer, its rocks. Replayed rows must be tokens of the
   probe, and a checkpoint of the step it is filed under.
4. A file that is there and not listed is a problem where a command would have read it; any other is a note.
5. Runs within the run, such as the arms of a study, are checked alike; one whose manifest is damaged is a problem.

What is wrong is a sentence, with the command that makes the file again where there is one.
"""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from rocktokens.classes import TokenClasses
from rocktokens.config import load_config, read_toml
from rocktokens.errors import RocktokensError, RunDirError
from rocktokens.evaluation.records import Ledger
from rocktokens.gradients.records import GradientsRecord
from rocktokens.knockout.class_records import ClassSweep
from rocktokens.knockout.journal import DECODED
from rocktokens.knockout.records import KnockoutSweep
from rocktokens.models.fingerprints import vocabulary_sha256
from rocktokens.parsing import parse_json
from rocktokens.parts import read_parquet, whole_table
from rocktokens.progress import SILENT, Progress
from rocktokens.rocks.records import FindRecord
from rocktokens.rollouts.store import ROLLOUTS, read_rollouts
from rocktokens.run_dir import MAKERS, TRAINER_STATE, FileEntry, RunDir, file_sha256
from rocktokens.studies.records import StudyResult
from rocktokens.traces.schema import require_readable, validate_table
from rocktokens.traces.store import TOKENIZER, TraceStore
from rocktokens.types import ControlSet, RockSet

RECORDS: dict[str, Callable[[Path], Any]] = {
    "config.toml": load_config,
    "rocks.json": RockSet.load,
    "find.json": FindRecord.load,
    "classes.json": TokenClasses.load,
    "gradients.json": GradientsRecord.load,
    "knockout.json": KnockoutSweep.load,
    "knockout-classes.json": ClassSweep.load,
    "evaluations.json": Ledger.load,
    "study.json": StudyResult.load,
    "controls.json": ControlSet.load,
    "type_sets.json": ControlSet.load,
}
"""Records at the top of a run, by name, each with what reads it strictly."""
OWN = ("rocks.json", "find.json", "classes.json", "gradients.json", "knockout.json")
"""Records that name the traces or the tokenizer they were made with."""
GROWING = (".lock", "manifest.json", "logs.jsonl")
"""Files at the top of a run that no manifest lists."""
NAMED = 3
"""Files that a note names."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about one file of a run, or about several that are not listed."""

    path: str
    """Relative to the run that was checked."""
    sentence: str
    command: str | None
    """What makes the file again; None where only a copy brings it back, or nothing has to be done."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What a check found."""

    run: str
    n_files: int
    """Listed files, those of runs within included."""
    n_bytes: int
    problems: tuple[Finding, ...]
    """What is damaged, missing or foreign, in the order of paths."""
    notes: tuple[Finding, ...]
    """What is odd and harms no result."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged, missing or foreign."""
        return not self.problems

    @property
    def commands(self) -> tuple[str, ...]:
        """What makes the damaged files again, each once, in the order to run them in."""
        commands = {own.command for own in self.problems if own.command}
        # A search with classes makes all that one without makes, which refuses damaged classes.
        commands -= {own for own in commands if own.split()[1] == "find" and f"{own} --classes" in commands}
        return tuple(sorted(commands, key=lambda own: (_VERBS.index(own.split()[1]), own)))

    def to_record(self) -> dict[str, Any]:
        """Return plain values, as ``rocktokens verify --json`` prints them."""
        return {"is_sound": self.is_sound, **asdict(self), "commands": self.commands}


_VERBS = ("trace", "find", "gradients", "knockout", "evaluate", "study", "report")
Problem = tuple[str, str]
"""Path and sentence."""


def verify_run(path: str | Path, progress: Progress = SILENT) -> Verification:
    """Check every file of a run and of the runs within it.

    Example: ``verify_run("runs/demo").is_sound``.
    """
    top = RunDir(path).require()
    within, problems = _runs_within(top)
    runs = [top, *within]
    entries = [(run, entry) for run in runs for entry in run.files()]
    sizes = [_size(run.path / entry.path) for run, entry in entries]
    checked: dict[Path, list[tuple[FileEntry, Any, str]]] = {run.path: [] for run in runs}
    with progress.bar("verifying (MiB)", -(-sum(sizes) // MIB)) as advance, ThreadPoolExecutor() as pool:
        done = shown = 0
        found = pool.map(lambda own: _check_file(*own), entries)
        for (run, entry), size, (record, problem) in zip(entries, sizes, found, strict=True):
            checked[run.path].append((entry, record, problem))
            done += size
            advance(-(-done // MIB) - shown)
            shown = -(-done // MIB)
    notes: list[Finding] = []
    with progress.status("comparing"):
        for run in runs:
            wrong = [(entry.path, problem) for entry, _, problem in checked[run.path] if problem]
            sound = {entry.path: record for entry, record, problem in checked[run.path] if not problem}
            wrong += [*_foreign(run, sound), *_unlisted_problems(run)]
            problems += [_finding(top, run, *own) for own in wrong]
            notes += [Finding(_shown(top, run, own), sentence, None) for own, sentence in _notes(run, sound)]
    ordered = (tuple(sorted(own, key=lambda finding: finding.path)) for own in (problems, notes))
    return Verification(str(top.path), len(entries), sum(sizes), *ordered)


# Files


def _check_file(run: RunDir, entry: FileEntry) -> tuple[Any, str]:
    """Return the content of a record, and what is wrong with a listed file; "" where nothing is.

    A command that writes meanwhile may have dropped the file, or listed another in its place, which is checked then.
    """
    record, problem = _check_entry(run, entry)
    if not problem or entry in (now := run.files(entry.path)):
        return record, problem
    others = [own for own in now if own.path == entry.path]
    return _check_file(run, others[0]) if others else (None, "")


def _check_entry(run: RunDir, entry: FileEntry) -> tuple[Any, str]:
    path = run.path / entry.path
    try:
        if file_sha256(path) != entry.sha256:
            path = run.verify(entry)  # says so, unless a writer keeps the listed content beside it
        return _read(run, entry, path), ""
    except FileNotFoundError:
        try:
            run.verify(entry)
        except RocktokensError as error:
            return None, str(error)
        return None, ""
    except RocktokensError as error:
        return None, str(error)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return None, str(run.damaged(entry.path, f"cannot be read ({reason})"))
    except ValueError as error:
        return None, str(run.damaged(entry.path, f"is not what its name says ({error})"))


def _read(run: RunDir, entry: FileEntry, path: Path) -> Any:
    """Read a file as what its name says; None where its bytes say all there is to say."""
    folder, name = entry.path.split("/")[0], path.name
    if entry.path in RECORDS:
        return RECORDS[entry.path](path)
    if path.suffix == ".parquet":
        return _read_part(run, entry, path)
    if path.suffix == ".safetensors":
        return _require_tensors(run, entry, path)
    if name == "tokenizer.json":
        return _read_tokenizer(run, entry, path)
    if path.suffix == ".json":
        content = parse_json(path.read_bytes())
        if folder == "checkpoints" and name == TRAINER_STATE and _step_of(content) != entry.path.split("/")[1]:
            raise run.damaged(entry.path, f"is of {_step_of(content)}")
    elif path.suffix == ".toml":
        read_toml(path)
    return None


def _read_part(run: RunDir, entry: FileEntry, path: Path) -> None:
    if entry.path.startswith("traces/"):
        table = read_parquet(run, entry.path, path, whole_table)
        require_readable(table.schema, path)
        if table.num_rows != entry.rows:
            raise run.damaged(entry.path, f"has {table.num_rows} rows, its manifest lists {entry.rows}")
        try:
            validate_table(table)
        except RocktokensError as error:
            raise run.damaged(entry.path, f"is no trace ({error})") from None
    elif entry.path.startswith("knockout/") and path.name != "free.parquet":
        list(DECODED.read_listed(run, [entry]))
    else:
        list(ROLLOUTS.read_listed(run, [entry]))


def _require_tensors(run: RunDir, entry: FileEntry, path: Path) -> None:
    """Refuse a file whose header does not fit it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as tensors:
            tensors.keys()
    except SafetensorError as error:
        raise run.damaged(entry.path, f"holds no tensors ({error})") from None


def _read_tokenizer(run: RunDir, entry: FileEntry, path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no other
        raise run.damaged(entry.path, f"is no tokenizer ({error})") from None


def _step_of(trainer_state: Any) -> str:
    return f"step-{trainer_state.get('step')}" if isinstance(trainer_state, dict) else "no step"


# The rest of the run


def _foreign(run: RunDir, sound: dict[str, Any]) -> Iterator[Problem]:
    """Yield the records and rows that are of another run, as far as they could be read."""
    store, expected = TraceStore(run), run.manifest().get("tokenizer_sha256")
    if (tokenizer := sound.get(TOKENIZER)) and expected and vocabulary_sha256(tokenizer.get_vocab()) != expected:
        yield TOKENIZER, str(run.damaged(TOKENIZER, "has another vocabulary than the run's tokenizer_sha256"))
    for name in OWN:
        if sound.get(name) is not None:
            try:
                store.require_own(name, sound[name])
            except RocktokensError as error:
                yield name, str(error)
    try:
        _ = store.replay
    except RocktokensError as error:
        yield "manifest.json", str(error)
    yield from _foreign_rows(run, sound)
    yield from _foreign_rocks(run, store, sound)


def _foreign_rows(run: RunDir, sound: dict[str, Any]) -> Iterator[Problem]:
    """Yield replayed parts with rows that are no tokens of the probe."""
    probes = [own for own in sound if own.startswith("rollouts/probe/")]
    if "replay" not in run.manifest() or not probes:
        return
    try:
        rollouts = {own.rollout_id: own.token_ids for probe in probes for own in read_rollouts(run, probe)}
    except RocktokensError:  # dropped meanwhile
        return
    rollouts[-1] = np.array([], dtype=np.int64)  # no rollout's id: a probe without rows can be looked up in, too
    ids = np.array(sorted(rollouts), dtype=np.int64)
    lengths = np.array([len(rollouts[own]) for own in ids.tolist()], dtype=np.int64)
    starts, tokens = np.cumsum(lengths) - lengths, np.concatenate([rollouts[own] for own in ids.tolist()])
    for name in [own for own in sound if own.startswith("traces/checkpoint=")]:
        try:
            table = pq.read_table(run.path / name, columns=["rollout_id", "position", "token_id"])
        except FileNotFoundError:  # dropped meanwhile
            continue
        rollout, position, token = (table[column].to_numpy() for column in table.column_names)
        place = np.minimum(np.searchsorted(ids, rollout), len(ids) - 1)
        known = (ids[place] == rollout) & (position >= 0) & (position < lengths[place])
        if not known.all() or not np.array_equal(tokens[starts[place] + position], token):
            yield name, str(run.damaged(name, "has rows that are no tokens of the probe"))


def _foreign_rocks(run: RunDir, store: TraceStore, sound: dict[str, Any]) -> Iterator[Problem]:
    """Yield rocks.json where one of its rocks is in none of the traces it says it was found in."""
    rocks = sound.get("rocks.json")
    if rocks is None or store.manifest_sha256 != rocks.source.get("manifest_sha256"):
        return
    folder = f"traces/checkpoint={rocks.criterion.get('reference')}/"
    listed = [own.path for own in run.files(folder)]
    if any(own not in sound for own in listed):
        return
    seen: set[int] = set()
    for name in listed:
        try:
            tokens = pq.read_table(run.path / name, columns=["token_id"])["token_id"]
        except FileNotFoundError:  # dropped meanwhile
            return
        seen |= set(pc.unique(tokens).to_pylist())  # pyright: ignore[reportAttributeAccessIssue]
    if strangers := [token.id for token in rocks.tokens if token.id not in seen]:
        yield "rocks.json", str(run.damaged("rocks.json", f"has the rock {strangers[0]}, which is nowhere in {folder}"))


def _unlisted_problems(run: RunDir) -> Iterator[Problem]:
    """Yield files that are not listed and that commands refuse to read, or would read as part of a checkpoint."""
    for name in _refused(run):
        try:
            run.listed(name)
        except RocktokensError as error:
            yield name, str(error)
    for step in run.checkpoints():
        try:
            run.require_only_listed(step)
        except RocktokensError as error:
            yield f"checkpoints/step-{step}", str(error)


def _refused(run: RunDir) -> list[str]:
    """Files that are not listed and that commands refuse to read.

    Anyone may put a file of another name beside them, and a tokenizer into a folder that records none, as does a
    process that was killed before it listed its own.
    """
    names = [name for name in RECORDS if name in MAKERS or name == run.config.name]
    names += [TOKENIZER] if "tokenizer_sha256" in run.manifest() else []
    return [name for name in names if run.holds_unlisted(name)]


def _notes(run: RunDir, sound: dict[str, Any]) -> Iterator[Problem]:
    """Yield what is odd about a run, and harms no result."""
    listed = {entry.path for entry in run.files()}
    others = sorted(_files_of(run) - listed - set(_refused(run)) - set(GROWING))
    if others:
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        named = f"{', '.join(others[:NAMED])}{more}"
        yield others[0], f"{run.path} has files that its manifest does not list, so they are not checked: {named}"
    damaged = sum(not _is_object(line) for line in _log_lines(run))
    if damaged:
        yield run.logs.name, f"{run.logs} has {damaged} damaged lines, which readers leave out"
    rocks, gradients = sound.get("rocks.json"), sound.get("gradients.json")
    if rocks and gradients and not gradients.is_of(rocks):
        yield "gradients.json", f"{run.gradients} is of other rocks than rocks.json has now: run `rocktokens gradients`"


def _log_lines(run: RunDir) -> list[bytes]:
    """The finished lines of the log; none where there is no log."""
    content = run.logs.read_bytes() if run.logs.exists() else b""
    return content[: content.rfind(b"\n") + 1].splitlines()


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _files_of(run: RunDir) -> set[str]:
    """Every file below a run that is not below another run, relative to it."""
    found: set[str] = set()
    for folder, below, names in os.walk(run.path):
        inside = Path(folder)
        below[:] = [name for name in below if not _is_within(inside / name)]
        found |= {(inside / name).relative_to(run.path).as_posix() for name in names}
    return found


def _runs_within(top: RunDir) -> tuple[list[RunDir], list[Finding]]:
    """The runs below a run, and those whose manifest cannot be read, is another file or is gone."""
    runs, damaged = [], []
    manifests = set(filter(_is_manifest, top.path.glob("*/**/manifest.json")))
    manifests |= {path.with_name("manifest.json") for path in top.path.glob("*/**/config.toml") if _is_of_a_run(path)}
    for path in sorted(manifests):
        run = RunDir(path.parent)
        try:
            run.manifest()
            if path.exists():
                runs.append(run)
                continue
            problem = f"{path} is missing, and beside it are files of a run: restore it from a copy of the run"
        except RunDirError as error:
            problem = str(error)
        damaged.append(Finding(_shown(top, run, path.name), problem, None))
    return runs, damaged


def _is_of_a_run(config: Path) -> bool:
    """Whether a config lies where a run was written, with or without its manifest."""
    return any((config.parent / name).is_dir() for name in ("checkpoints", "rollouts", "traces"))


def _is_within(folder: Path) -> bool:
    """Whether a folder below a run is a run of its own."""
    config = folder / "config.toml"
    return _is_manifest(folder / "manifest.json") or (config.exists() and _is_of_a_run(config))


def _is_manifest(path: Path) -> bool:
    """Whether there is a run's manifest, damaged or not; other tools have a manifest.json too."""
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return isinstance(content, dict) and "manifest_version" in content


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _shown(top: RunDir, run: RunDir, path: str) -> str:
    return (run.path / path).relative_to(top.path).as_posix()


def _finding(top: RunDir, run: RunDir, path: str, sentence: str) -> Finding:
    maker = run.maker(path)
    if maker is None:
        return Finding(_shown(top, run, path), sentence, None)
    program, verb, *options = maker.split()
    target = {"trace": run.config, "study": run.path / "study.toml"}.get(verb, run.path)
    return Finding(
        _shown(top, run, path), sentence, " ".join([program, verb, json.dumps(str(target)).strip('"'), *options])
    )
