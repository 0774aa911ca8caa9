"""What ``rocktokens check --plan`` says of one GPU's memory, beside what a run takes there.

A student of the shape of Qwen2.5-0.5B learns from a teacher of the shape of Qwen2.5-1.5B, both with random weights. All
prompts are equally long and answers never end (``endless.py``), so that every sequence has the length that the
plan counts with. The plan's sum is its items and the cache of the rollouts that are sampled at once; measured is the
most that torch has allocated over two steps of ``distill``, each in a process of its own.

``python benchmarks/plan.py`` takes a few minutes on a GPU. ``--plan-only`` prints the plan of the same runs anywhere,
from the models' configs; ``--tiny`` does so of tiny models.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from endless import endless_tokenizer
from printing import machine, print_table
from rocktokens.config import Config, validate
from rocktokens.preflight.plan import plan_run
from rocktokens.rollouts.encode import encode_prompt
from rocktokens.types import Prompt

VERSIONS = ("rocktokens", "torch", "transformers")
VOCABULARY = 151_936
SHAPES: dict[str, dict[str, Any]] = {
    "student": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "teacher": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
QUESTION = (
    "How many apples are left when half of them have been eaten, if there were sixty-four at the start of the day?"
)
TARGET = 0.15
VARIANTS = {
    "16 at a time": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
    "32 at a time": {"per_device_train_batch_size": 32},
    "32 at a time, gradient checkpointing": {"per_device_train_batch_size": 32, "gradient_checkpointing": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan-only", action="store_true", help="nothing is measured, and no GPU is needed")
    parser.add_argument("--tiny", action="store_true", help="tiny models; nothing is measured")
    parser.add_argument("--length", type=int, default=512, help="tokens of every answer")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if given.measure:
        return print(json.dumps(measured(validate(Config, json.loads(given.measure.read_text()), "plan"))))
    given.plan_only |= given.tiny
    if not given.plan_only and not torch.cuda.is_available():
        return print("this benchmark needs a CUDA device; --plan-only prints what would be compared")
    print(machine(VERSIONS), "" if given.plan_only else torch.cuda.get_device_name(), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pair(folder, is_tiny=given.tiny, has_weights=not given.plan_only)
        rows = [row(folder, variant, given) for variant in VARIANTS]
    header = (
        "run",
        "plan, GB",
        "of which activations",
        "of which cache",
        "allocated, GB",
        "reserved, GB",
        "plan / run",
    )
    print_table(header, rows)


def write_pair(folder: Path, *, is_tiny: bool, has_weights: bool) -> None:
    """Save both models, or their configs alone, with one tokenizer whose end token no head can name."""
    vocabulary = 1400 if is_tiny else VOCABULARY
    tokenizer = endless_tokenizer(vocabulary, folder)
    for name, shape in SHAPES.items():
        config = Qwen2Config(
            vocab_size=vocabulary,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=vocabulary,
            **(TINY if is_tiny else shape),
        )
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        if has_weights:
            with torch.device("cuda"):
                model = Qwen2ForCausalLM(config)
            model.bfloat16().cpu().save_pretrained(folder / name)
            del model
            torch.cuda.empty_cache()
    records = [{"question": QUESTION, "answer": "#### 32"}] * 64
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prompt = Prompt("0", QUESTION, "32")
    (folder / "length").write_text(str(len(encode_prompt(tokenizer, prompt, True, 10_000))))


def row(folder: Path, variant: str, given: argparse.Namespace) -> list[str]:
    """Plan and run one variant."""
    record = {
        "run": {"directory": str(folder / variant.replace(" ", "-"))},
        "models": {"student": str(folder / "student"), "teacher": str(folder / "teacher"), "dtype": "bfloat16"},
        "task": {"name": "jsonl", "path": str(folder / "prompts.jsonl")},
        "rollouts": {
            "max_prompt_length": int((folder / "length").read_text()),
            "max_completion_length": given.length,
            "batch_size": 32,
        },
        "training": {"max_steps": 2, "save_steps": 10, "trace": False, "max_truncated_share": 1.0, **VARIANTS[variant]},
    }
    planned = plan_run(validate(Config, record, variant), 80 if given.plan_only else None)
    memory, cache = planned.layouts[0].memory, 32 * planned.cache_per_rollout
    total = memory.total + cache
    sizes = [f"{size / 1e9:.2f}" for size in (total, memory.activations, cache)]
    if given.plan_only:
        return [variant, *sizes, "–", "–", "–"]
    settings = folder / "settings.json"
    settings.write_text(json.dumps(record))
    command = [sys.executable, __file__, "--measure", str(settings)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    allocated, reserved = json.loads(shown.splitlines()[-1])
    verdict = "" if abs(total / allocated - 1) <= TARGET else f" (more than {TARGET:.0%} off)"
    return [variant, *sizes, f"{allocated / 1e9:.2f}", f"{reserved / 1e9:.2f}", f"{total / allocated:.2f}{verdict}"]


def measured(config: Config) -> tuple[int, int]:
    """Train, and return the most bytes that torch allocated and reserved."""
    from rocktokens.training.loop import distill

    distill(config)
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


if __name__ == "__main__":
    main()
