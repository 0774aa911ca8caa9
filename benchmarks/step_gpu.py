"""One training step on a GPU, ours against TRL's DistillationTrainer with its in-process generation.

Both train a student of the shape of SmolLM2-135M (random weights; the teacher is the student with noise on them) on 64
prompts × 4 answers of 256 tokens a step. The student's weights are float32 and its arithmetic bfloat16 by autocast, the
teacher is bfloat16; TRL's AdamW and ours are fused. ``steps_common.py`` says how sides take turns and how ratios are
taken.

Every answer runs to the length limit: the end token's id is the first one that the heads do not have. (Where answers
end by themselves, TRL decodes the whole batch until its longest has ended; that advantage of ours is not in these
figures.) The tokenizer is that of the pebbles with unused pieces up to the vocabulary's size.

``python benchmarks/step_gpu.py`` takes about three minutes. ``--tiny`` runs it on tiny models on the CPU, to see that
it works: its figures mean nothing.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from endless import endless_tokenizer
from printing import machine
from steps_common import VERSIONS, Setting, be_quiet, print_result, run_rounds

LEARNING_RATE = 1e-5
TARGET_STEP = 0.6
NOISE = 0.1
"""Of the teacher's weights, as a share of their own spread."""
SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
TINY: dict[str, Any] = {
    "vocab_size": 1400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write_pair(sizes: dict[str, Any], folder: Path) -> tuple[str, str]:
    """Directories of a student and its noisy copy, over one tokenizer."""
    tokenizer = endless_tokenizer(sizes["vocab_size"], folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            **sizes,
            max_position_embeddings=2048,
            initializer_range=1 / 24,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=sizes["vocab_size"],
        )
    )
    paths = folder / "student", folder / "teacher"
    for path in paths:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.add_(torch.randn_like(parameter) * parameter.std(), alpha=NOISE)
    return str(paths[0]), str(paths[1])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64, help="of one step")
    parser.add_argument("--generations", type=int, default=4, help="answers to one prompt")
    parser.add_argument("--micro-batch", type=int, default=64, help="answers of one forward and backward")
    parser.add_argument("--length", type=int, default=256, help="tokens of every answer")
    parser.add_argument("--steps", type=int, default=1, help="timed ones of one turn")
    parser.add_argument("--rounds", type=int, default=3, help="timed turns of each side")
    parser.add_argument("--tiny", action="store_true", help="tiny models, few and short answers, on the CPU")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if not given.tiny and not torch.cuda.is_available():
        print("this benchmark needs a CUDA device; --tiny shows on a CPU that it works")
        return
    be_quiet()
    print(machine(VERSIONS), flush=True)
    if not given.tiny:
        print(torch.cuda.get_device_name(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        student, teacher = write_pair(TINY if given.tiny else SMOLLM2_135M, folder)
        setting = Setting(
            student=student,
            teacher=teacher,
            device="cpu" if given.tiny else "cuda",
            prompts=4 if given.tiny else given.prompts,
            generations=2 if given.tiny else given.generations,
            micro_batch=4 if given.tiny else given.micro_batch,
            length=8 if given.tiny else given.length,
            steps=1 + given.steps,
            learning_rate=LEARNING_RATE,
        )
        rounds = run_rounds(setting, folder, given.rounds)
    print_result(rounds, TARGET_STEP)


if __name__ == "__main__":
    main()
