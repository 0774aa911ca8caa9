"""Hashes that say whether two things were made with the same vocabulary or the same weights. No torch."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rocktokens.errors import RocktokensError, TokenizerMismatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise RocktokensError(f"{path} has no *.safetensors file: give the directory of a saved model")
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def same_tokenizer(student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase") -> None:
    """Refuse two tokenizers that differ in their vocabulary, or in how they split or join the samples."""
    vocabularies = student.get_vocab(), teacher.get_vocab()
    if vocabulary_sha256(vocabularies[0]) != vocabulary_sha256(vocabularies[1]):
        raise TokenizerMismatchError(
            f"student and teacher have different vocabularies, first {_first_difference(*vocabularies)}: "
            "distillation by token needs two models of one tokenizer"
        )
    for text in SAMPLES:
        ids = [tokenizer.encode(text, add_special_tokens=False) for tokenizer in (student, teacher)]
        if ids[0] != ids[1]:
            raise TokenizerMismatchError(
                f"student and teacher split {text!r} differently, as {ids[0]} and {ids[1]}: "
                "distillation by token needs two models of one tokenizer"
            )
        texts = [tokenizer.decode(ids[0]) for tokenizer in (student, teacher)]
        if texts[0] != texts[1]:
            raise TokenizerMismatchError(
                f"student and teacher decode the same ids differently, as {texts[0]!r} and {texts[1]!r}: "
                "distillation by token needs two models of one tokenizer"
            )


def _first_difference(student: Mapping[str, int], teacher: Mapping[str, int]) -> str:
    """The lowest id that does not stand for the same pieces in both."""
    differing = min(set(student.items()) ^ set(teacher.items()), key=lambda entry: (entry[1], entry[0]))[1]
    pieces = [[piece for piece, index in vocab.items() if index == differing] for vocab in (student, teacher)]
    return f"at id {differing} ({_named(pieces[0])} against {_named(pieces[1])})"


def _named(pieces: list[str]) -> str:
    return " and ".join(map(repr, sorted(pieces))) or "nothing"
