"""A tokenizer for models with random weights whose answers must run to the length limit."""

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rocktokens.models import pebbles


def endless_tokenizer(vocab_size: int, folder: Path) -> PreTrainedTokenizerFast:
    """The pebbles' with as many ids as a head is wide, and one more that ends an answer."""
    record = json.loads((pebbles.directory("student") / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = record["model"]["vocab"]
    vocab |= {f"unused{index}": index for index in range(len(vocab), vocab_size)}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    own = AutoTokenizer.from_pretrained(pebbles.directory("student"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), pad_token=own.pad_token, eos_token="<|never|>")
    tokenizer.chat_template = own.chat_template
    if tokenizer.eos_token_id != vocab_size:
        raise SystemExit(f"the end token has id {tokenizer.eos_token_id}, which the {vocab_size} logits can name")
    return tokenizer
