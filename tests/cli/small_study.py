"""A study small enough for seconds: two arms on the embedded pair, two steps of four rollouts, six prompts."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rocktokens.models import pebbles
from rocktokens.types import RockSet, RockToken


def write_study(folder: Path, name: str, *, rocks: Path | None = None) -> Path:
    """Write ``folder/name.toml`` for the study ``folder/name``, and digits as its rocks; the path of the file."""
    rocks = rocks or write_rocks(folder / "digits.json", "0123456789")
    text = f"""
[study]
directory = "{folder / name}"
rocks = "{rocks}"
seeds = [0, 1]
evaluate_every = 1
processes = 2
target_accuracy = 0.5
[base.models]
student = "pebbles-student"
teacher = "pebbles-teacher"
device = "cpu"
[base.rollouts]
max_completion_length = 48
[base.training]
max_steps = 2
per_device_train_batch_size = 4
learning_rate = 1e-2
warmup_steps = 0
max_truncated_share = 1.0
trace = false
[base.evaluation]
num_prompts = 6
num_samples = 2
[[arm]]
name = "uniform"
policy = {{ name = "uniform" }}
[[arm]]
name = "rock freeze"
policy = {{ name = "rocks", rocks = "@rocks", lam = 0.0 }}
"""
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def write_rocks(path: Path, texts: str) -> Path:
    """A rocks.json of the types with these texts."""
    vocabulary = Tokenizer.from_file(str(pebbles.directory("student") / "tokenizer.json")).get_vocab()
    tokens = [
        RockToken(vocabulary[text], text, rank, 9, 1.0, 9.0, None, None, "digit") for rank, text in enumerate(texts, 1)
    ]
    RockSet(tokenizer_sha256="", criterion={}, source={}, summary={}, tokens=tokens).save(path)
    return path


def without_seconds(study: Path) -> dict[str, Any]:
    """study.json but for what was timed, and the note that it was timed with interruptions."""
    record = json.loads((study / "study.json").read_text(encoding="utf-8"))
    record["notes"] = [note for note in record["notes"] if "interrupted" not in note]
    record["comparisons"] = [own for own in record["comparisons"] if own["kind"] != "equal_seconds"]
    for arm in record["arms"]:
        for timed in (*arm["points"], *arm["runs"]):
            del timed["seconds"]
    return record
