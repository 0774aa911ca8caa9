"""One training step, ours against TRL's DistillationTrainer, and ours with traces against ours without.

1. Both train the pebbles student on the same prompts in the same order: as many rollouts a step in one micro-batch,
   AdamW with the same settings, reverse KL over the whole vocabulary at temperature 1, float32 on the same threads. TRL
   generates in its own process, as we do. Each has the AdamW kernel of its defaults: TRL that of transformers, which is
   the fused one; ours is the plain one of PyTorch.
2. Both write answers of exactly the same length: the models are copies of the pebbles whose end token is one that is
   never sampled, so that every answer runs to the length limit. (Where answers end by themselves, TRL decodes the
   whole batch until its longest has ended; that advantage of ours is not in these figures.)
3. A round is a turn of each: TRL, ours, ours without traces, and each begins as often as the others. A turn makes a
   step that is not timed and two that are; before the first round each side makes one step. A step of ours with traces
   is charged its share of writing them out, which otherwise happens at a checkpoint.
4. A ratio is taken within each round, so that what slows the machine for minutes slows both sides of it. The figure is
   the median over rounds, printed with the middle half and the range. Where the middle half has the target inside it,
   the figure is undecided.

Sampling is from prompts to token ids; the update is all the rest of the step: forward of both models, loss, backward,
clipping, optimiser, and our log line. ``python benchmarks/step.py`` takes three to four minutes on two cores;
seconds mean something on a machine that does nothing else: its load is printed first and last.
"""

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import DistillationConfig, DistillationTrainer

from printing import machine, print_table
from rocktokens.config import Config
from rocktokens.models import pebbles
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.tasks import make_task
from rocktokens.traces.writer import TraceWriter
from rocktokens.training.loop import distill

LEARNING_RATE = 5e-4
NEVER_SAMPLED = "<|pad|>"
OURS, UNTRACED, TRL = "ours", "ours, no traces", "TRL"
TARGET_STEP, TARGET_TRACE = 0.9, 1.03


@dataclass(frozen=True, slots=True)
class Setting:
    """What both sides do."""

    rollouts: int
    length: int
    steps: int
    """Of one turn, the first of which is not timed."""
    student: str
    teacher: str


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one step."""

    total: float
    sample: float
    tokens: int

    @property
    def update(self) -> float:
        """All but sampling."""
        return self.total - self.sample


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


def our_config(setting: Setting, folder: Path, trace: bool) -> Config:
    return Config.model_validate(
        {
            "run": {"directory": str(folder), "seed": 0},
            "models": {"student": setting.student, "teacher": setting.teacher, "device": "cpu"},
            "rollouts": {"max_completion_length": setting.length, "batch_size": setting.rollouts},
            "training": {
                "max_steps": setting.steps,
                "per_device_train_batch_size": setting.rollouts,
                "learning_rate": LEARNING_RATE,
                "lr_scheduler_type": "constant",
                "warmup_steps": 0,
                "save_steps": setting.steps,
                "max_truncated_share": 1.0,
                "trace": trace,
            },
        }
    )


def our_turn(setting: Setting, folder: Path, trace: bool) -> list[Step]:
    ends: list[float] = []
    records: list[dict[str, Any]] = []

    def progress(_done: int, _total: int, record: dict[str, Any]) -> None:
        ends.append(time.perf_counter())
        records.append(record)

    distill(our_config(setting, folder, trace), progress=progress)
    written = writing_out(folder) / setting.steps if trace else 0.0
    return [
        Step(end - begin + written, record["seconds_sample"], round(record["response_length"] * setting.rollouts))
        for begin, end, record in zip(ends, ends[1:], records[1:], strict=False)
    ]


def writing_out(run: Path) -> float:
    """Seconds to commit the training traces of a run once more, elsewhere."""
    tables = [pq.read_table(run / part.path) for part in RunDir(run).files("traces/training/")]
    with tempfile.TemporaryDirectory() as folder, TraceWriter(folder, source="training") as writer:
        for table in tables:
            writer.append(table)
        began = time.perf_counter()
        writer.flush()
        return time.perf_counter() - began


class TimedTrainer(DistillationTrainer):
    """TRL's trainer, with the seconds of its generation noted."""

    sampled: list[float]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        began = time.perf_counter()
        batch = super()._generate_and_score_completions(inputs)
        self.sampled.append(time.perf_counter() - began)
        return batch


class StepEnds(TrainerCallback):
    """When every step of TRL ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by TRL."""
        self.ends.append(time.perf_counter())


def same_prompts(setting: Setting) -> Dataset:
    """The prompts that our loop takes, step after step."""
    config = our_config(setting, Path("unused"), trace=False)
    task, seed = make_task(config.task), derive_seed(config.run.seed, "prompts")
    texts = [prompt.text for step in range(setting.steps) for prompt in task.batch(step, setting.rollouts, seed)]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts]})


def trl_turn(setting: Setting, folder: Path) -> list[Step]:
    args = DistillationConfig(
        output_dir=str(folder),
        max_steps=setting.steps,
        per_device_train_batch_size=setting.rollouts,
        max_completion_length=setting.length,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.99,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
    )
    ends = StepEnds()
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(setting.student, dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(setting.teacher, dtype=torch.float32),
        args=args,
        train_dataset=same_prompts(setting),
        processing_class=AutoTokenizer.from_pretrained(setting.student, padding_side="left"),
        callbacks=[ends],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.sampled = []
    trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]
    timed = zip(ends.ends, ends.ends[1:], trainer.sampled[1:], lengths[1:], strict=False)
    return [Step(end - begin, sampled, round(length * setting.rollouts)) for begin, end, sampled, length in timed]


def median(steps: Sequence[Step], what: str) -> float:
    return statistics.median(getattr(step, what) for step in steps)


def ratios(rounds: Sequence[dict[str, list[Step]]], side: str, other: str) -> list[float]:
    """One of each round."""
    return [median(turns[side], "total") / median(turns[other], "total") for turns in rounds]


def verdict(name: str, found: Sequence[float], target: float) -> str:
    low, middle, high = np.quantile(found, (0.25, 0.5, 0.75))
    word = "met" if high <= target else "missed" if low > target else "undecided"
    return (
        f"{name}: {middle:.3f} ×, middle half {low:.3f}–{high:.3f}, range {min(found):.3f}–{max(found):.3f} "
        f"over {len(found)} rounds (target ≤ {target} ×: {word})"
    )


def print_result(rounds: Sequence[dict[str, list[Step]]]) -> None:
    kinds = ("total", "sample", "update")
    sides = {side: [step for turns in rounds for step in turns[side]] for side in rounds[0]}
    print_table(
        ["", "step, s", "sampling, s", "update, s", "step, × TRL", "sampling, × TRL", "update, × TRL", "steps"],
        [
            [
                side,
                *(f"{median(steps, what):.3f}" for what in kinds),
                *(f"{median(steps, what) / median(sides[TRL], what):.2f}" for what in kinds),
                str(len(steps)),
            ]
            for side, steps in sides.items()
        ],
    )
    print(verdict("our step / TRL's step", ratios(rounds, OURS, TRL), TARGET_STEP))
    print(verdict("traces on / traces off", ratios(rounds, OURS, UNTRACED), TARGET_TRACE))


def one_round(setting: Setting, folder: Path, index: int) -> dict[str, list[Step]]:
    """A turn of each side; whose is first, second and third goes round."""
    turns = {
        OURS: partial(our_turn, setting, folder / f"ours-{index}", trace=True),
        UNTRACED: partial(our_turn, setting, folder / f"untraced-{index}", trace=False),
        TRL: partial(trl_turn, setting, folder / f"trl-{index}"),
    }
    sides = list(turns)
    first = index % len(sides)
    steps = {side: turns[side]() for side in sides[first:] + sides[:first]}
    return {side: steps[side] for side in sides}


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
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    print(machine(("rocktokens", "torch", "transformers", "trl", "accelerate"), given.threads), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copies = endless_copy("student", folder), endless_copy("teacher", folder)
        setting = Setting(given.rollouts, given.length, 1 + given.steps, *copies)
        one_round(replace(setting, steps=1), folder, 0)
        rounds = [one_round(setting, folder, index) for index in range(1, 1 + given.rounds)]
    lengths = {step.tokens for turns in rounds for steps in turns.values() for step in steps}
    print(f"{given.rollouts} rollouts a step; tokens of a step: {sorted(lengths)}\n")
    if len(lengths) > 1:
        raise SystemExit("the answers were not all of one length: the figures do not compare")
    print_result(rounds)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
