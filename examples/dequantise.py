"""Turn a GGUF file into a folder of safetensors: a model that can be trained, where no hub can be reached.

1. transformers reads config, tokenizer and weights from the file; every quantised tensor becomes a dense one.
2. A GGUF file names one end token. Where the chat template ends a turn with another, the model ends there too.
3. The folder is made under another name and renamed when it is whole.

Run ``python examples/dequantise.py qwen2.5-coder-1.5b-instruct-q4_k_m.gguf runs/qwen2.5-coder-1.5b-instruct``. The
weights are those that the file's format can hold, not those it was made from: say so where you report results. The
tokenizer is built again from its entries and the name of its splitting rule: compare it with the original if you can.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from make_teacher import DTYPES, MADE, is_made
from options import new_folder, one_of, run_main

from rocktokens.errors import RocktokensError
from rocktokens.models.gguf_file import CUT_SHORT, load_gguf
from rocktokens.models.load import CANNOT_LOAD, end_ids
from rocktokens.run_dir import file_sha256


def dequantise(file: Path, out: Path, dtype: str) -> None:
    """Write the model of a GGUF file into a new folder."""
    name = repr(str(file))
    try:
        model, tokenizer = load_gguf(file, getattr(torch, dtype), name)
    except (*CANNOT_LOAD, CUT_SHORT) as error:
        raise RocktokensError(f"{name} cannot be read ({error}): give a whole GGUF file of a causal LM") from error
    model.generation_config.eos_token_id = sorted(end_ids(model, tokenizer) | turn_end(tokenizer))
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    made = {"gguf": file_sha256(file), "dtype": dtype}
    (unfinished / MADE).write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    unfinished.replace(out)


def turn_end(tokenizer: Any) -> set[int]:
    """Return the first added token that the chat template writes after an answer, or none."""
    if not tokenizer.chat_template:
        return set()
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    _, _, after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("answer")
    written = tokenizer(after, add_special_tokens=False)["input_ids"]
    return set([token_id for token_id in written if token_id in tokenizer.added_tokens_decoder][:1])


def main() -> None:
    """Dequantise a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="a GGUF file")
    parser.add_argument("out", type=new_folder, help="folder of the finished model")
    parser.add_argument("--dtype", type=one_of("--dtype", DTYPES), default="bfloat16")
    arguments = parser.parse_args()
    if is_made(arguments.out):
        return
    if not arguments.file.is_file():
        raise RocktokensError(f"there is no file {str(arguments.file)!r}: give a GGUF file")
    dequantise(arguments.file, arguments.out, arguments.dtype)
    print(f"{arguments.out}: dense weights in {arguments.dtype}")


if __name__ == "__main__":
    run_main(main)
