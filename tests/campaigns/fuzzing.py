"""Read inputs that are broken in every way: what comes back is a value, or a refusal in one sentence.

1. For every format there is a valid input, taken from a finished run (``attacked_run``) or written here, and what reads
   it in the package.
2. A case breaks the input: in structure (a value of another type, a key that is missing or new, nesting, numbers
   without end) where it is JSON or TOML, else, and in every third case, in its bytes.
3. Reading must give a value or raise a ``RocktokensError`` of one line. Anything else, a crash or a hang breaks it. A
   record that could be read must be written and read again with the same content.
"""

import json
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
from attacked_run import finished
from frame import BrokenPromiseError, Campaign, Judge, chance
from mutations import as_json, edited, mutated
from peft import LoraConfig, get_peft_model

from rocktokens.classes import TokenClasses
from rocktokens.config import JsonlTask, dump_config, load_config, parse_config
from rocktokens.errors import RocktokensError
from rocktokens.evaluation.records import Ledger
from rocktokens.gradients.records import GradientsRecord
from rocktokens.integrity import verify_run
from rocktokens.knockout.class_records import ClassSweep
from rocktokens.knockout.journal import DECODED
from rocktokens.knockout.records import KnockoutSweep
from rocktokens.models.load import load_model, load_tokenizer
from rocktokens.report.views.live import live
from rocktokens.report.views.log_tail import LogTail
from rocktokens.report.views.run_view import RunView
from rocktokens.rocks.records import FindRecord
from rocktokens.rollouts.store import read_rollouts
from rocktokens.run_dir import RunDir, file_sha256
from rocktokens.studies.config import load_study
from rocktokens.studies.records import StudyResult
from rocktokens.tasks.jsonl import load_jsonl
from rocktokens.traces.store import TraceStore
from rocktokens.training.log import cut_log
from rocktokens.types import RockSet

NAME = "fuzzing"
LONGEST = 4000
"""Characters of a refusal."""
TASK = [
    {"question": "What is 1 + 1?", "answer": "2"},
    {"question": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2"}], "answer": 4},
    {"question": [{"from": "human", "value": "3 + 3"}, {"from": "gpt", "value": "6"}]},
    {"question": "What is 4 + 4?", "answer": ["8", "eight"]},
]


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of input: the file that is broken, how, and who reads it."""

    file: Path
    broken: Callable[[random.Random, bytes], bytes]
    read: Callable[[Path], Any]


# Breaking


def broken_json(rng: random.Random, content: bytes) -> bytes:
    """JSON with other values, or other bytes."""
    return edited(rng, content) if rng.random() < 1 / 3 else as_json(mutated(rng, json.loads(content)))


def broken_lines(rng: random.Random, content: bytes) -> bytes:
    """JSON lines, one of them with other values; or other bytes."""
    if rng.random() < 1 / 3:
        return edited(rng, content)
    lines = content.splitlines()
    place = rng.randrange(len(lines))
    lines[place] = as_json(mutated(rng, json.loads(lines[place])))
    return b"\n".join(lines) + b"\n"


def broken_toml(rng: random.Random, content: bytes) -> bytes:
    """TOML with other values, where TOML can hold them; else other bytes."""
    if rng.random() < 2 / 3:
        try:
            return tomli_w.dumps(mutated(rng, tomllib.loads(content.decode()))).encode()
        except (TypeError, ValueError, AttributeError, RecursionError):
            pass  # TOML has no null, no surrogates and only tables at its top
    return edited(rng, content)


# Reading


def reread(load: Callable[[Path], Any], path: Path) -> None:
    """Read a record, write it, and read it again."""
    record = load(path)
    copy = path.with_name("again")
    record.save(copy)
    first, second = copy.read_bytes(), load(copy)
    second.save(copy)
    if copy.read_bytes() != first:
        raise BrokenPromiseError(f"{path.name} is another record when it is read again")


def read_config(path: Path) -> None:
    """Read a config, and what it dumps."""
    text = dump_config(load_config(path))
    if dump_config(parse_config(text)) != text:
        raise BrokenPromiseError("a config is another one when it is read again")


def read_task(path: Path) -> None:
    """Read a task and grade an answer to every prompt."""
    task = load_jsonl(JsonlTask(name="jsonl", path=str(path)))
    for prompt in task.items:
        if task.can_grade(prompt):
            task.grade(prompt, "The answer is 2.")


def relisted(run: Path, path: Path) -> RunDir:
    """The run, whose manifest lists a file as it is now."""
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"][path.relative_to(run).as_posix()]["sha256"] = file_sha256(path)
    (run / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return RunDir(run)


def read_trace(run: Path, path: Path) -> None:
    """Read all columns of the traces of a checkpoint."""
    TraceStore(relisted(run, path), threads=1).table(4).to_pyarrow()


def read_probe(run: Path, path: Path) -> None:
    """Read the rollouts that are replayed."""
    read_rollouts(relisted(run, path), path.relative_to(run).as_posix())


def read_bans(run: Path, path: Path) -> None:
    """Read what was decoded under bans."""
    DECODED.read(relisted(run, path), path.relative_to(run).as_posix())


def read_token_texts(run: Path, path: Path) -> None:
    """Read a run's tokenizer and what its tokens say."""
    TraceStore(relisted(run, path), threads=1).token_texts(range(0, 260, 37))


def read_manifest(path: Path) -> None:
    """Read a manifest as commands do; now and then verify all that it lists."""
    run = RunDir(path.parent)
    run.files()
    run.checkpoints()
    TraceStore(run, threads=1)
    if path.stat().st_size % 50 == 0:
        verify_run(run.path)


def read_log(view: RunView, path: Path) -> None:
    """Show a log as the explorer does, and cut it as training does that goes on."""
    view._log = LogTail(path)
    live(view)
    cut_log(RunDir(path.parent), 3)


def write_adapter(model: Path, folder: Path) -> None:
    """Write a LoRA adapter of a model."""
    base = load_model(str(model), device="cpu").model
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")).save_pretrained(
        folder
    )


def read_model(path: Path) -> None:
    """Load the model in whose folder a file is."""
    load_model(str(path.parent), device="cpu")


FULL = {
    "config": 20_000,
    "study": 8_000,
    "task": 15_000,
    "rocks": 10_000,
    "classes": 8_000,
    "find": 3_000,
    "gradients": 2_000,
    "knockout": 4_000,
    "class-bans": 2_000,
    "evaluations": 6_000,
    "study-result": 3_000,
    "manifest": 5_000,
    "log": 5_000,
    "trace": 3_500,
    "rollouts": 2_000,
    "bans": 2_000,
    "tokenizer": 1_500,
    "model-config": 1_500,
    "adapter-config": 1_000,
    "tokenizer-config": 1_000,
}


def formats(folder: Path) -> dict[str, Format]:
    """Every format, with a copy of its valid input in a folder."""
    source, pair = finished(folder), folder / "pair"
    place = folder / "inputs"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place)
    run, study = place / "run", place / "study"
    shutil.copytree(pair / "student", place / "student")
    write_adapter(pair / "student", place / "adapter")
    (place / "task.jsonl").write_text("".join(json.dumps(own) + "\n" for own in TASK), encoding="utf-8")
    # Beside the run: within it, a record is refused for its hash before it is read.
    outside = place / "records"
    outside.mkdir()
    for path in (*run.glob("*.json"), study / "study.json"):
        shutil.copy(path, outside / path.name)
    (outside / "manifest.json").unlink()
    records = {
        "rocks": (outside / "rocks.json", RockSet.load),
        "classes": (outside / "classes.json", TokenClasses.load),
        "find": (outside / "find.json", FindRecord.load),
        "gradients": (outside / "gradients.json", GradientsRecord.load),
        "knockout": (outside / "knockout.json", KnockoutSweep.load),
        "class-bans": (outside / "knockout-classes.json", ClassSweep.load),
        "evaluations": (outside / "evaluations.json", Ledger.load),
        "study-result": (outside / "study.json", StudyResult.load),
    }
    [free] = run.glob("knockout/*/part-00000.parquet")
    return {
        "config": Format(place / "run.toml", broken_toml, read_config),
        "study": Format(place / "study.toml", broken_toml, load_study),
        "task": Format(place / "task.jsonl", broken_lines, read_task),
        **{name: Format(path, broken_json, partial(reread, load)) for name, (path, load) in records.items()},
        "manifest": Format(run / "manifest.json", broken_json, read_manifest),
        "log": Format(run / "logs.jsonl", broken_lines, partial(read_log, RunView.open(run))),
        "trace": Format(run / "traces/checkpoint=4/part-00000.parquet", edited, partial(read_trace, run)),
        "rollouts": Format(run / "rollouts/probe/checkpoint=4.parquet", edited, partial(read_probe, run)),
        "bans": Format(free, edited, partial(read_bans, run)),
        "tokenizer": Format(run / "tokenizer/tokenizer.json", broken_json, partial(read_token_texts, run)),
        "model-config": Format(place / "student/config.json", broken_json, read_model),
        "adapter-config": Format(place / "adapter/adapter_config.json", broken_json, read_model),
        "tokenizer-config": Format(
            place / "student/tokenizer_config.json", broken_json, lambda path: load_tokenizer(str(path.parent))
        ),
    }


@contextmanager
def opened(folder: Path) -> Iterator[Judge]:
    """Judge cases on files that are put back after each."""
    known = formats(folder)
    valid = {kind: own.file.read_bytes() for kind, own in known.items()}
    for own in known.values():
        own.read(own.file)  # what is not broken can be read

    def judge(kind: str, number: int) -> str:
        own = known[kind]
        own.file.write_bytes(own.broken(chance(NAME, kind, number), valid[kind]))
        try:
            own.read(own.file)
        except RocktokensError as error:
            _require_sentence(str(error))
            return "refused"
        finally:
            own.file.write_bytes(valid[kind])
        return "read"

    yield judge


def _require_sentence(said: str) -> None:
    if not said or len(said.splitlines()) != 1 or len(said) > LONGEST:
        raise BrokenPromiseError(
            f"no sentence ({len(said)} characters, {len(said.splitlines())} lines): {said[:600]!r}"
        )


CAMPAIGN = Campaign(NAME, FULL, dict.fromkeys(FULL, 2), limit=30.0, opened=opened)
