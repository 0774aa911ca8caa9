"""A probe set replayed through checkpoints: ours, a naive replay, and the least time the arithmetic can take.

1. Student and teacher have random weights in the shapes of Qwen3-0.6B and Qwen3-1.7B (``--small``: SmolLM2-135M and
   360M), in bfloat16. The checkpoints are perturbed copies of the student, saved as safetensors in a temporary folder.
   The rollouts are made up: random ids, answers of 512 tokens on average, a few of them long.
2. The floor is the time of the models' forward passes at the rate of an 8192³ bfloat16 product in the same run: the
   trunks' matrix products and causal attention at every token, the LM heads at response tokens alone, no padding. The
   target is for both models' passes for every checkpoint. What has to be computed is less: the teacher's trunk once,
   its head and the whole student for every checkpoint. Both are printed, and judged.
3. Ours is what ``rocktokens trace`` does once the probe is written and the teacher loaded: load the first student, swap
   the others in, score, and write the traces. The share of the floor is of all that, the first load included. A batch
   may have 65,536 tokens (``scoring.tokens_per_batch``).
4. The naive replay loads every checkpoint with ``from_pretrained`` and forces padded batches, in the order given,
   through both models; kl, log-probabilities and entropies come from float32 log-softmaxes of all logits. It is timed
   on a quarter of the rollouts under one checkpoint, and multiplied (the loading by checkpoints alone).

5. ``--layers`` measures something else: ours with and without the kernels of norms, rotations and gates
   (``models/layers.py``), in turns, at the largest number of checkpoints.

The weight files are on the disk and in the page cache: else writing them out would hold up the traces. ``python
benchmarks/replay.py`` needs CUDA and should take less than three minutes on an H200; ``--tiny`` runs all of it
anywhere, on models too small to mean anything.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config
from transformers.utils import logging as transformers_logging

from printing import machine, print_table
from rocktokens.config import Config
from rocktokens.models.load import LoadedModel
from rocktokens.replay.replay import Checkpoint, Probe, ReplaySession, open_students, score_probes
from rocktokens.rollouts.store import write_rollouts
from rocktokens.run_dir import RunDir
from rocktokens.scoring import packed
from rocktokens.traces.schema import trace_table
from rocktokens.traces.writer import TraceWriter
from rocktokens.types import Rollout, TokenScores

TARGET = 0.6
TOKENS_PER_BATCH = 65_536
NAIVE_SHARE = 4
NAIVE_BATCH = 4
"""Rollouts: more of the longest do not leave room for a dozen float32 copies of their logits."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is measured, and on what."""

    student: Any
    teacher: Any
    dtype: str
    device: str
    product: int
    """Width of the square matrices whose product gives the rate."""
    response: int
    """Mean tokens of a response."""
    rollouts: int
    counts: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of checkpoints."""


def qwen3(width: int, inner: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )


def llama(vocabulary: int, width: int, inner: int, layers: int, heads: int, key_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


LARGE = Shape(qwen3(1024, 3072), qwen3(2048, 6144), "bfloat16", "cuda", 8192, response=512, rollouts=768)
SMALL = Shape(
    llama(49_152, 576, 1536, 30, 9, 3),
    llama(49_152, 960, 2560, 32, 15, 5),
    "bfloat16",
    "cuda",
    8192,
    response=512,
    rollouts=1536,
)
TINY = Shape(llama(512, 32, 64, 2, 2, 1), llama(512, 64, 128, 2, 2, 1), "float32", "cpu", 256, response=24, rollouts=40)


# What both sides are given


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """As many words as the models have logits; nothing is ever tokenised."""
    words = models.WordLevel({f"word-{index}": index for index in range(vocabulary)}, unk_token="word-0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="word-0")


def make_model(shape: Shape, config: Any) -> Any:
    with torch.device(shape.device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.dtype)).eval()


@torch.no_grad()
def save_checkpoints(shape: Shape, folder: Path) -> list[Checkpoint]:
    """Perturbed copies of one student."""
    student, tokenizer = make_model(shape, shape.student), make_tokenizer(shape.student.vocab_size)
    checkpoints = []
    for step in range(max(shape.counts)):
        for parameter in student.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        student.save_pretrained(folder / f"step-{step}")
        tokenizer.save_pretrained(folder / f"step-{step}")
        checkpoints.append(Checkpoint(step, str(folder / f"step-{step}")))
    return checkpoints


def make_rollouts(shape: Shape) -> list[Rollout]:
    """Prompts of an eighth of the mean response on average; log-normal responses of up to four times the mean."""
    generator = np.random.default_rng(0)
    means = generator.lognormal(0, 0.7, shape.rollouts)
    responses = np.clip(shape.response * means / means.mean(), 1, 4 * shape.response).astype(int)
    prompts = generator.integers(1, max(2, shape.response // 4), shape.rollouts)

    def ids(count: int) -> np.ndarray:
        return generator.integers(shape.student.vocab_size, size=count).astype(np.int32)

    return [
        Rollout(number, f"p{number}", 0, ids(prompt), ids(response), np.zeros(response, np.float32), 0, finished=True)
        for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]


# The floor


def product_rate(shape: Shape) -> float:
    """FLOP/s of a square product: the median of seven rounds of ten, after one that does not count."""
    size = (shape.product, shape.product)
    a, b = (torch.randn(size, device=shape.device).to(getattr(torch, shape.dtype)) for _ in range(2))
    seconds = []
    for _ in range(8):
        wait(shape)
        began = time.perf_counter()
        for _ in range(10):
            torch.mm(a, b)
        wait(shape)
        seconds.append((time.perf_counter() - began) / 10)
    return 2 * shape.product**3 / statistics.median(seconds[1:])


def forward_flops(config: Any, rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """Of the trunk and of the head in one pass over the rollouts, two for each multiplication.

    Every token meets the trunk's matrices, and in attention half of its sequence twice: as keys and as values.
    """
    with torch.device("meta"):
        trunk = AutoModelForCausalLM.from_config(config).base_model
    lengths = np.array([len(rollout.prompt_ids) + len(rollout.token_ids) for rollout in rollouts], dtype=float)
    linear = sum(layer.weight.numel() for layer in trunk.modules() if isinstance(layer, torch.nn.Linear))
    attended = config.num_hidden_layers * config.num_attention_heads * config.head_dim * (lengths**2).sum()
    head = config.vocab_size * config.hidden_size * sum(len(rollout.token_ids) for rollout in rollouts)
    return 2 * (linear * lengths.sum() + attended), 2 * head


def wait(shape: Shape) -> None:
    if shape.device == "cuda":
        torch.cuda.synchronize()


# The two sides


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one replay."""

    total: float
    loading: float
    """Of which until the first student was there."""


def our_replay(
    shape: Shape, run: RunDir, checkpoints: list[Checkpoint], teacher: LoadedModel, rollouts: list[Rollout]
) -> Seconds:
    config = Config.model_validate(
        {
            "run": {"directory": str(run.path)},
            "models": {"student": "none", "teacher": "none", "dtype": shape.dtype, "device": shape.device},
            "scoring": {"tokens_per_batch": TOKENS_PER_BATCH},
        }
    )
    write_rollouts(run, Probe(checkpoints[-1], checkpoints).file, rollouts)
    began = time.perf_counter()
    with open_students(config, teacher) as students:
        students.get(checkpoints[0].model)
        loaded = time.perf_counter()
        score_probes(ReplaySession(run, config, checkpoints, teacher, students))
    return Seconds(time.perf_counter() - began, loaded - began)


@torch.inference_mode()
def naive_replay(
    shape: Shape, run: RunDir, checkpoint: Checkpoint, teacher: LoadedModel, rollouts: list[Rollout]
) -> Seconds:
    began = time.perf_counter()
    student = AutoModelForCausalLM.from_pretrained(checkpoint.model, dtype=getattr(torch, shape.dtype))
    student = student.to(shape.device).eval()
    loaded = time.perf_counter()
    batches = [rollouts[first : first + NAIVE_BATCH] for first in range(0, len(rollouts), NAIVE_BATCH)]
    columns = [naive_scores(student, teacher.model, batch) for batch in batches]
    kl_T, logp_s_T, logp_t_T, h_s_T, h_t_T = map(np.concatenate, zip(*columns, strict=True))
    scores = TokenScores(kl_T, logp_s_T, logp_t_T, h_s_T, h_t_T, np.full_like(kl_T, np.nan))
    with TraceWriter(run, checkpoint=checkpoint.step) as writer:
        writer.append(trace_table(rollouts, scores))
    return Seconds(time.perf_counter() - began, loaded - began)


def naive_scores(student: Any, teacher: Any, rollouts: list[Rollout]) -> tuple[np.ndarray, ...]:
    """kl, both log-probabilities and both entropies of a padded batch."""
    sequences = [torch.from_numpy(np.concatenate([r.prompt_ids, r.token_ids])).long() for r in rollouts]
    ids_RL = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(student.device)
    lengths_R = torch.tensor([len(sequence) for sequence in sequences], device=student.device)
    mask_RL = (torch.arange(ids_RL.shape[1], device=student.device) < lengths_R[:, None]).long()
    log_p, log_q = (
        torch.log_softmax(model(input_ids=ids_RL, attention_mask=mask_RL).logits[:, :-1].float(), dim=-1)
        for model in (student, teacher)
    )
    p, q = log_p.exp(), log_q.exp()
    kl_RL, h_s_RL, h_t_RL = (p * (log_p - log_q)).sum(-1), -(p * log_p).sum(-1), -(q * log_q).sum(-1)
    logps = [log.gather(-1, ids_RL[:, 1:, None]).squeeze(-1) for log in (log_p, log_q)]
    spans = [slice(len(r.prompt_ids) - 1, len(r.prompt_ids) + len(r.token_ids) - 1) for r in rollouts]
    return tuple(
        np.concatenate([row_L[span] for row_L, span in zip(column_RL.cpu().numpy(), spans, strict=True)])
        for column_RL in (kl_RL, *logps, h_s_RL, h_t_RL)
    )


def mean_kl(run: RunDir, step: int, rollouts: int) -> float:
    """Over the first so many rollouts."""
    columns = ["rollout_id", "kl"]
    parts = [pq.read_table(run.path / part.path, columns=columns) for part in run.files(f"traces/checkpoint={step}/")]
    kept = [part.filter(pc.field("rollout_id") < rollouts).column("kl").to_numpy() for part in parts]
    return float(np.concatenate(kept).astype(np.float64).mean())


# The table


@dataclass(frozen=True, slots=True)
class Floors:
    """Seconds of one pass over the rollouts."""

    student: float
    teacher_trunk: float
    teacher_head: float

    def needed(self, checkpoints: int) -> float:
        """Of what has to be computed."""
        return self.teacher_trunk + checkpoints * (self.student + self.teacher_head)

    def plain(self, checkpoints: int) -> float:
        """With the whole teacher for every checkpoint."""
        return checkpoints * (self.student + self.teacher_trunk + self.teacher_head)


def print_result(floors: Floors, ours: dict[int, Seconds], naive_seconds: float, tokens: int) -> None:
    rows = []
    for count, seconds in ours.items():
        needed, plain = floors.needed(count), floors.plain(count)
        rows.append(
            [
                str(count),
                f"{plain:.2f}",
                f"{needed:.2f}",
                f"{seconds.total:.2f}",
                f"{seconds.loading:.2f}",
                f"{100 * plain / seconds.total:.0f} %",
                f"{100 * needed / seconds.total:.0f} %",
                f"{100 * needed / (seconds.total - seconds.loading):.0f} %",
                f"{count * tokens / seconds.total:,.0f}",
                f"{count * naive_seconds:.1f}",
                f"{count * naive_seconds / seconds.total:.1f}",
            ]
        )
    print_table(
        [
            "checkpoints",
            "both forwards, s",
            "has to be computed, s",
            "ours, s",
            "of which first load, s",
            "share of both forwards",
            "of what has to be computed",
            "the same without first load",
            "tokens/s",
            f"naive, s (from 1/{NAIVE_SHARE} of the rollouts)",
            "naive / ours",
        ],
        rows,
    )


def verdict(floors: Floors, ours: dict[int, Seconds]) -> str:
    most = max(ours)
    floor_of = {
        "both models' forward passes for every checkpoint": floors.plain(most),
        "what has to be computed": floors.needed(most),
    }
    shares = {name: floor / ours[most].total for name, floor in floor_of.items()}
    return "\n".join(
        f"{most} checkpoints: {100 * share:.0f} % of {name} (target ≥ {100 * TARGET:.0f} %: "
        f"{'met' if share >= TARGET else 'missed'})"
        for name, share in shares.items()
    )


def measure(shape: Shape, folder: Path) -> None:
    checkpoints, rollouts = save_checkpoints(shape, folder / "checkpoints"), make_rollouts(shape)
    os.sync()
    teacher = LoadedModel(
        make_model(shape, shape.teacher), make_tokenizer(shape.teacher.vocab_size), "teacher", frozenset()
    )
    few = rollouts[: 2 * NAIVE_BATCH]
    our_replay(shape, RunDir(folder / "warm-up"), checkpoints[:2], teacher, few)
    naive_replay(shape, RunDir(folder / "warm-up-naive"), checkpoints[0], teacher, few)

    rate = product_rate(shape)
    runs = {count: RunDir(folder / f"ours-{count}") for count in shape.counts}
    ours = {count: our_replay(shape, run, checkpoints[:count], teacher, rollouts) for count, run in runs.items()}
    naive_run = RunDir(folder / "naive")
    some = rollouts[: len(rollouts) // NAIVE_SHARE]
    naive = naive_replay(shape, naive_run, checkpoints[0], teacher, some)

    tokens, responses = (sum(len(getattr(r, ids)) for r in rollouts) for ids in ("prompt_ids", "token_ids"))
    tokens += responses
    student_flops, teacher_flops = (forward_flops(config, rollouts) for config in (shape.student, shape.teacher))
    states = responses * shape.teacher.hidden_size * getattr(torch, shape.dtype).itemsize / 2**30
    print(
        f"{len(rollouts)} rollouts, {tokens:,} tokens, {responses:,} of them in responses; forward pass: student "
        f"{sum(student_flops) / 1e12:,.1f}, teacher {sum(teacher_flops) / 1e12:,.1f} TFLOP; {rate / 1e12:,.1f} TFLOP/s "
        f"in a {shape.product}³ product; the teacher's states: {states:.2f} GiB; batches of {TOKENS_PER_BATCH:,} "
        "tokens\n"
    )
    floors = Floors(sum(student_flops) / rate, *(flops / rate for flops in teacher_flops))
    naive_seconds = naive.loading + NAIVE_SHARE * (naive.total - naive.loading)
    print_result(floors, ours, naive_seconds, tokens)
    if shape.device == "cuda":
        print(verdict(floors, ours))
    found = [mean_kl(run, step=0, rollouts=len(some)) for run in (runs[max(runs)], naive_run)]
    print(f"mean kl of the first checkpoint, same rollouts: ours {found[0]:.6f}, naive {found[1]:.6f}")


LAYER_ROUNDS = 3


def compare_layers(shape: Shape, folder: Path) -> None:
    """Print the seconds of our replay with the layer kernels and with transformers' own layers, in turns."""
    checkpoints, rollouts = save_checkpoints(shape, folder / "checkpoints"), make_rollouts(shape)
    os.sync()
    teacher = LoadedModel(
        make_model(shape, shape.teacher), make_tokenizer(shape.teacher.vocab_size), "teacher", frozenset()
    )
    kernels = packed.quick_layers
    seconds: dict[str, list[float]] = {"kernels": [], "transformers": []}
    for turn in range(-1, LAYER_ROUNDS):  # the first turn warms up
        for name in sorted(seconds, reverse=turn % 2 == 1):
            packed.quick_layers = kernels if name == "kernels" else lambda _model: nullcontext()
            some = rollouts if turn >= 0 else rollouts[: 2 * NAIVE_BATCH]
            took = our_replay(shape, RunDir(folder / f"{name}-{turn}"), checkpoints, teacher, some)
            if turn >= 0:
                seconds[name].append(took.total)
    packed.quick_layers = kernels
    medians = {name: statistics.median(rounds) for name, rounds in seconds.items()}
    rows = [[name, *(f"{own:.2f}" for own in rounds), f"{medians[name]:.2f}"] for name, rounds in seconds.items()]
    print_table(["layers", *(f"round {number + 1}, s" for number in range(LAYER_ROUNDS)), "median, s"], rows)
    print(f"the kernels save {100 * (1 - medians['kernels'] / medians['transformers']):.0f} % of the replay")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="the shape of SmolLM2-135M, taught by that of the 360M")
    size.add_argument("--tiny", action="store_true", help="on the CPU, to see that it runs")
    parser.add_argument("--layers", action="store_true", help="ours with and without the layer kernels, in turns")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if not (given.tiny or torch.cuda.is_available()):
        print("benchmarks/replay.py measures a GPU and torch sees none: give --tiny to see it run on the CPU")
        return
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    shape = TINY if given.tiny else SMALL if given.small else LARGE
    device = torch.cuda.get_device_name() if shape.device == "cuda" else "CPU"
    print(f"{machine(('rocktokens', 'torch', 'triton', 'transformers', 'safetensors'))}\n{device}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        (compare_layers if given.layers else measure)(shape, Path(folder))


if __name__ == "__main__":
    main()
