"""Hashes that say whether two things were made with the same vocabulary or the same weights. No torch."""

import hashlib
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from rocktokens.config import student_name
from rocktokens.errors import RocktokensError, TokenizerMismatchError
from rocktokens.run_dir import RunDir, file_sha256, require_as_listed
from rocktokens.types import ReplayRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors", "adapter_config.json")
"""What a model's output depends on: weights, and for an adapter also its scale and base; not an optimizer's moments."""
SAMPLES = (
    "So, 3 + 4 = 7.\n\nTherefore, the answer is \\(7\\).",
    "  Two spaces,\ttabs\tand\r\nline ends  ",
    "\\boxed{\\frac{12}{345}} **bold** `code` #### 12,000",
    "naïve café, Ελληνικά, 日本語, 🙂, e\u0301",
)


def vocabulary_sha256(vocab: Mapping[str, int]) -> str:
    """Hex SHA-256 of a vocabulary: its (id, piece) pairs in order of id, then piece."""
    pairs = sorted((index, piece) for piece, index in vocab.items())
    return hashlib.sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()


def directory_fingerprint(path: str | Path) -> str:
    """Hex SHA-256 over the names and bytes of a model directory's weight files."""
    files = [file for file in Path(path).iterdir() if _is_weights(file.name)]
    if not files:
        raise RocktokensError(f"{path} has no model*.safetensors file: give the directory of a saved model")
    return _fingerprint({file.name: file_sha256(file) for file in files})


def model_identity(name: str, run: RunDir) -> str:
    """What results of a model are filed under: the fingerprint of a directory, wherever it lies, else the name.

    Checkpoints of ``run`` are known by what its manifest lists, so that they need not be read, nor kept.
    """
    from rocktokens.models.load import EMBEDDED

    directory = Path(name)
    if directory.parent == run.checkpoint(0).parent:
        entries = run.files(f"{directory.relative_to(run.path).as_posix()}/")
        listed = {Path(entry.path).name: entry.sha256 for entry in entries if _is_weights(Path(entry.path).name)}
        if listed:
            return _fingerprint(listed)
    return directory_fingerprint(directory) if name not in EMBEDDED and directory.is_dir() else name


def traced_student(
    run: RunDir,
    replay: ReplayRecord | None,
    step: int,
    *,
    optimizer: bool = True,
    remedy: str = "run `rocktokens trace` again",
) -> str:
    """Return what to load for a checkpoint, refused if it is no longer the student that was traced.

    Args:
        run: the run that was traced.
        replay: what ``rocktokens trace`` recorded (``TraceStore.replay``); without it nothing can be compared.
        step: the checkpoint.
        optimizer: whether its state will be read too, so that a damaged one is refused.
        remedy: what to do if it is another student.
    """
    name = student_name(run, step)
    require_as_listed(name, optimizer=optimizer)
    traced = replay.checkpoints.get(step) if replay else None
    if traced is not None and model_identity(name, run) != traced:
        raise RocktokensError(f"checkpoint {step} was traced with another student than {name} is now: {remedy}")
    return name


def _is_weights(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in WEIGHTS)


def _fingerprint(sha256_of: Mapping[str, str]) -> str:
    lines = "".join(f"{name} {sha256_of[name]}\n" for name in sorted(sha256_of))
    return hashlib.sha256(lines.encode()).hexdigest()


def same_tokenizer(student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase") -> None:
    """Refuse two tokenizers that differ in their vocabulary, or in how they split or join the samples."""

    def mismatch(difference: str) -> TokenizerMismatchError:
        remedy = "distillation by token needs two models of one tokenizer"
        return TokenizerMismatchError(f"student and teacher {difference}: {remedy}")

    vocabularies = student.get_vocab(), teacher.get_vocab()
    if vocabularies[0] != vocabularies[1]:
        raise mismatch(f"have different vocabularies, first {_first_difference(*vocabularies)}")
    for text in SAMPLES:
        ids = [tokenizer.encode(text, add_special_tokens=False) for tokenizer in (student, teacher)]
        if ids[0] != ids[1]:
            raise mismatch(f"split {text!r} differently, as {ids[0]} and {ids[1]}")
        texts = [tokenizer.decode(ids[0]) for tokenizer in (student, teacher)]
        if texts[0] != texts[1]:
            raise mismatch(f"decode the same ids differently, as {texts[0]!r} and {texts[1]!r}")


def _first_difference(student: Mapping[str, int], teacher: Mapping[str, int]) -> str:
    """The lowest id that does not stand for the same pieces in both."""
    differing = min(set(student.items()) ^ set(teacher.items()), key=lambda entry: (entry[1], entry[0]))[1]
    pieces = [[piece for piece, index in vocab.items() if index == differing] for vocab in (student, teacher)]
    return f"at id {differing} ({_named(pieces[0])} against {_named(pieces[1])})"


def _named(pieces: list[str]) -> str:
    return " and ".join(map(repr, sorted(pieces))) or "nothing"
