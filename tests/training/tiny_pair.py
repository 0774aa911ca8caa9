"""A student, a teacher, a byte-level tokenizer and a task, small enough to distil in a second."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rocktokens.config import Config, parse_config

EOS, PAD = 256, 257
END_IDS = [EOS, *range(32)]
"""So many ends that random models stop now and then."""


def write_pair(directory: Path, **settings: object) -> None:
    """Write ``student/``, ``teacher/`` and ``task.jsonl``; the same bytes every time for the same model settings."""
    tokenizer = byte_tokenizer()
    for name, width, layers, seed in (("student", 16, 1, 1), ("teacher", 24, 2, 2)):
        model = tiny_llama(width, layers, seed, **settings)
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    lines = [json.dumps({"question": f"What is {n} + {n % 5}?", "answer": str(n + n % 5)}) for n in range(40)]
    (directory / "task.jsonl").write_text("\n".join(lines) + "\n")


def tiny_llama(width: int, layers: int, seed: int, vocab_size: int = 258, **settings: object) -> LlamaForCausalLM:
    """A llama whose random weights are large enough for its distributions to differ from token to token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
        **settings,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = END_IDS
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def tiny_config(pair: Path, run: Path, *overrides: str) -> Config:
    """Six steps of eight rollouts, a checkpoint every two."""
    return parse_config(tiny_toml(pair, run), list(overrides))


def tiny_toml(pair: Path, run: Path) -> str:
    """The text of that config."""
    return f"""
[run]
directory = "{run}"
seed = 3
[models]
student = "{pair}/student"
teacher = "{pair}/teacher"
device = "cpu"
[task]
name = "jsonl"
path = "{pair}/task.jsonl"
[rollouts]
max_completion_length = 10
num_generations = 2
[training]
max_steps = 6
per_device_train_batch_size = 4
gradient_accumulation_steps = 2
learning_rate = 0.01
warmup_steps = 2
save_steps = 2
max_truncated_share = 1.0
"""
