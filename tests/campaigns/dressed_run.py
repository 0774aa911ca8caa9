"""A finished run whose tokens read whatever they are told to: tokenizer, records, arms, log and the folder's name."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from rocktokens.models.fingerprints import vocabulary_sha256
from rocktokens.run_dir import RunDir

WIDTH = 258
"""Tokens of the vocabulary."""
RECORDS = ("rocks.json", "find.json", "classes.json", "gradients.json", "knockout.json", "evaluations.json")
SAID = ("text", "texts", "warnings", "because")
"""Keys of records whose values are texts of tokens, or are said with them."""
NAME_LENGTH = 60
"""Characters of a text that name a folder."""


def dressed_run(source: Path, target: Path, texts: Sequence[str]) -> Path:
    """Copy a finished run and its study to a folder below ``target``, with these texts for all that has a text."""
    run = target / folder_name(texts[0])
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source / "run", run, copy_function=os.link)
    shutil.copytree(source / "study", run / "study", copy_function=os.link)
    for growing in ("manifest.json", "logs.jsonl", ".lock"):  # what is changed in place may share no bytes
        own = (run / growing).read_bytes()
        (run / growing).unlink()
        (run / growing).write_bytes(own)
    vocabulary = {text: token_id for token_id, text in enumerate(vocabulary_of(texts))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.decoder = decoders.Fuse()
    sha256, turn = vocabulary_sha256(vocabulary), cycle(texts)
    RunDir(run).commit("tokenizer/tokenizer.json", lambda path: tokenizer.save(str(path)))
    RunDir(run).update_manifest(tokenizer_sha256=sha256)
    for name in RECORDS:
        record = dressed(json.loads((run / name).read_text(encoding="utf-8")), turn)
        if "tokenizer_sha256" in record:
            record["tokenizer_sha256"] = sha256
        RunDir(run).commit_text(name, json.dumps(record))
    with (run / "logs.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps({"step": 4, "kl": 1.0, texts[0]: 1.0, "online_frozen": list(range(20))}) + "\n")
    return run


def dressed(record: Any, turn: "cycle[str]", key: str = "") -> Any:
    """A record in which texts of tokens, and what is said with them, are the next texts in turn."""
    if isinstance(record, dict):
        return {name: dressed(value, turn, name) for name, value in record.items()}
    if isinstance(record, list):
        return [dressed(value, turn, key) for value in record]
    return next(turn) if isinstance(record, str) and key in SAID else record


def vocabulary_of(texts: Sequence[str]) -> list[str]:
    """The texts and variants of them, each once, as many as there are tokens; lone surrogates cannot be among them."""
    encodable = [own.encode("utf-8", "replace").decode() for own in texts]
    made = list(dict.fromkeys([*encodable, *(f"{encodable[n % len(encodable)][:200]}{n}" for n in range(2 * WIDTH))]))
    return made[:WIDTH]


def folder_name(text: str) -> str:
    """What a file system takes of a text as the name of a folder."""
    name = re.sub(r"[/\x00]", "_", text.encode("utf-8", "replace").decode())[:NAME_LENGTH]
    return name if name.strip(". ") else f"run{name}"
