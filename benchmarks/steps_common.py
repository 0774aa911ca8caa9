"""What the benchmarks of a training step share: a turn of ours, a turn of TRL's, rounds of them, and their ratios.

1. Both sides train the same student towards the same teacher on the same prompts in the same order: as many rollouts a
   step in micro-batches of one size, AdamW with the same settings, reverse KL over the whole vocabulary at temperature
   1, weights in float32. TRL generates in its own process, as we do.
2. A round is a turn of each: TRL, ours, ours without traces, and each begins as often as the others. A turn makes a
   step that is not timed and some that are. A step of ours with traces is charged its share of writing them out, which
   otherwise happens at a checkpoint.
3. A ratio is taken within each round, so that what slows the machine for minutes slows both sides of it. The figure is
   the median over rounds, printed with the middle half and the range. Where the middle half has the target inside it,
   the figure is undecided.

Sampling is from prompts to token ids; the update is all the rest of the step: forward of both models, loss, backward,
clipping, optimiser, and our log line. Where a time is taken, a GPU has finished.
"""

import gc
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

from printing import print_table
from rocktokens.config import Config
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.tasks import make_task
from rocktokens.traces.writer import TraceWriter
from rocktokens.training.loop import distill

OURS, UNTRACED, TRL = "ours", "ours, no traces", "TRL"
VERSIONS = ("rocktokens", "torch", "transformers", "trl", "accelerate")
TARGET_TRACE = 1.03


@dataclass(frozen=True, slots=True)
class Setting:
    """What both sides do."""

    student: str
    teacher: str
    device: Literal["cpu", "cuda"]
    prompts: int
    """Of one step."""
    generations: int
    """Rollouts of one prompt."""
    micro_batch: int
    """Rollouts of one forward and backward."""
    length: int
    """Tokens of every answer."""
    steps: int
    """Of one turn, the first of which is not timed."""
    learning_rate: float

    @property
    def rollouts(self) -> int:
        """Of one step."""
        return self.prompts * self.generations

    @property
    def half(self) -> bool:
        """Whether arithmetic is bfloat16, and the teacher's weights too."""
        return self.device == "cuda"


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


Rounds = Sequence[dict[str, list[Step]]]


def now() -> float:
    """The clock, when a GPU has done what was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def our_config(setting: Setting, folder: Path, trace: bool) -> Config:
    return Config.model_validate(
        {
            "run": {"directory": str(folder), "seed": 0},
            "models": {
                "student": setting.student,
                "teacher": setting.teacher,
                "device": setting.device,
                "dtype": "bfloat16" if setting.half else "float32",
            },
            "rollouts": {
                "max_completion_length": setting.length,
                "num_generations": setting.generations,
                "batch_size": setting.rollouts,
            },
            "training": {
                "max_steps": setting.steps,
                "per_device_train_batch_size": setting.micro_batch,
                "gradient_accumulation_steps": setting.rollouts // setting.micro_batch,
                "learning_rate": setting.learning_rate,
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
        ends.append(now())
        records.append(record)

    distill(our_config(setting, folder, trace), on_step=progress)
    written = writing_out(folder) / setting.steps if trace else 0.0
    shutil.rmtree(folder)
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
        began = now()
        batch = super()._generate_and_score_completions(inputs)
        self.sampled.append(now() - began)
        return batch


class StepEnds(TrainerCallback):
    """When every step of TRL ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by TRL."""
        self.ends.append(now())


def same_prompts(setting: Setting) -> Dataset:
    """The prompts that our loop takes, step after step, each as often as it is answered."""
    config = our_config(setting, Path("unused"), trace=False)
    task, seed = make_task(config.task), derive_seed(config.run.seed, "prompts")
    texts = [prompt.text for step in range(setting.steps) for prompt in task.batch(step, setting.prompts, seed)]
    messages = [[{"role": "user", "content": text}] for text in texts for _ in range(setting.generations)]
    return Dataset.from_dict({"prompt": messages})


def trl_turn(setting: Setting, folder: Path) -> list[Step]:
    args = DistillationConfig(
        output_dir=str(folder),
        max_steps=setting.steps,
        per_device_train_batch_size=setting.micro_batch,
        gradient_accumulation_steps=setting.rollouts // setting.micro_batch,
        max_completion_length=setting.length,
        learning_rate=setting.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.99,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=setting.half,
        use_cpu=setting.device == "cpu",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
    )
    ends = StepEnds()
    teacher_dtype = torch.bfloat16 if setting.half else torch.float32
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(setting.student, dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(setting.teacher, dtype=teacher_dtype),
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


def one_round(setting: Setting, folder: Path, index: int) -> dict[str, list[Step]]:
    """A turn of each side; whose is first, second and third goes round."""
    turns = {
        OURS: partial(our_turn, setting, folder / f"ours-{index}", trace=True),
        UNTRACED: partial(our_turn, setting, folder / f"untraced-{index}", trace=False),
        TRL: partial(trl_turn, setting, folder / f"trl-{index}"),
    }
    sides = list(turns)
    first = index % len(sides)
    steps = {}
    for side in sides[first:] + sides[:first]:
        steps[side] = turns[side]()
        gc.collect()  # the models of the turn, so that the next side has the memory to itself
        torch.cuda.empty_cache()
    return {side: steps[side] for side in sides}


def run_rounds(setting: Setting, folder: Path, rounds: int) -> list[dict[str, list[Step]]]:
    """The timed rounds, after one step of each side; refuses answers of unequal lengths."""
    one_round(replace(setting, steps=1), folder, 0)
    found = [one_round(setting, folder, index) for index in range(1, 1 + rounds)]
    lengths = {step.tokens for turns in found for steps in turns.values() for step in steps}
    print(f"{setting.rollouts} rollouts a step; tokens of a step: {sorted(lengths)}\n")
    if len(lengths) > 1:
        raise SystemExit("the answers were not all of one length: the figures do not compare")
    return found


def be_quiet() -> None:
    """Keep the libraries' progress and warnings out of the table."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)


def median(steps: Sequence[Step], what: str) -> float:
    return statistics.median(getattr(step, what) for step in steps)


def ratios(rounds: Rounds, side: str, other: str) -> list[float]:
    """One of each round."""
    return [median(turns[side], "total") / median(turns[other], "total") for turns in rounds]


def verdict(name: str, found: Sequence[float], target: float) -> str:
    low, middle, high = np.quantile(found, (0.25, 0.5, 0.75))
    word = "met" if high <= target else "missed" if low > target else "undecided"
    return (
        f"{name}: {middle:.3f} ×, middle half {low:.3f}–{high:.3f}, range {min(found):.3f}–{max(found):.3f} "
        f"over {len(found)} rounds (target ≤ {target} ×: {word})"
    )


def print_result(rounds: Rounds, target_step: float) -> None:
    kinds = ("total", "sample", "update")
    sides = {side: [step for turns in rounds for step in turns[side]] for side in rounds[0]}
    compared = [f"{name}, × TRL" for name in ("step", "sampling", "update")]
    print_table(
        ["", "step, s", "sampling, s", "update, s", "tokens/s", *compared, "steps"],
        [
            [
                side,
                *(f"{median(steps, what):.3f}" for what in kinds),
                f"{steps[0].tokens / median(steps, 'total'):,.0f}",
                *(f"{median(steps, what) / median(sides[TRL], what):.2f}" for what in kinds),
                str(len(steps)),
            ]
            for side, steps in sides.items()
        ],
    )
    print(verdict("our step / TRL's step", ratios(rounds, OURS, TRL), target_step))
    print(verdict("traces on / traces off", ratios(rounds, OURS, UNTRACED), TARGET_TRACE))
