"""One training step on a CPU, ours against TRL's DistillationTrainer, and ours with traces against ours without.

Both train the pebbles student in float32 on the same threads, in one micro-batch a step. Each has the AdamW kernel of
its defaults: TRL that of transformers, which is the fused one; ours is the plain one of PyTorch. ``steps_common.py``
says how sides take turns and how ratios are taken.

Both write answers of exactly the same length: the models are copies of the pebbles whose end token is one that is never
sampled, so that every answer runs to the length limit. (Where answers end by themselves, TRL decodes the whole batch
until its longest has ended; that advantage of ours is not in these figures.)

``python benchmarks/step.py`` takes three to four minutes on two cores; seconds mean something on a machine that does
nothing else: its load is printed first and last.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoTokenizer

from printing import machine
from rocktokens.models import pebbles
from steps_common import VERSIONS, Setting, be_quiet, print_result, run_rounds

LEARNING_RATE = 5e-4
NEVER_SAMPLED = "<|pad|>"
TARGET_STEP = 0.9


def endless_copy(side: Literal["student", "teacher"], folder: Path) -> str:
    """A copy of a pebbles model that nothing ends before the length limit."""
    target = folder / side
    shutil.copytree(pebbles.directory(side), target)
    never = AutoTokenizer.from_pretrained(target).convert_tokens_to_ids(NEVER_SAMPLED)
    ends = {"config": {"eos_token_id": never}, "generation_config": {"eos_token_id": never}}
    for name, end in {**ends, "tokenizer_config": {"eos_token": NEVER_SAMPLED}}.items():
        path = target / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **end}))
    return str(target)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=32, help="of one step")
    parser.add_argument("--length", type=int, default=128, help="tokens of every answer")
    parser.add_argument("--steps", type=int, default=2, help="timed ones of one turn")
    parser.add_argument("--rounds", type=int, default=9, help="timed turns of each side")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch, for all")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    be_quiet()
    print(machine(VERSIONS, given.threads), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setting = Setting(
            student=endless_copy("student", folder),
            teacher=endless_copy("teacher", folder),
            device="cpu",
            prompts=given.rollouts,
            generations=1,
            micro_batch=given.rollouts,
            length=given.length,
            steps=1 + given.steps,
            learning_rate=LEARNING_RATE,
        )
        rounds = run_rounds(setting, folder, given.rounds)
    print_result(rounds, TARGET_STEP)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
