"""What gradients by type cost: their memory beside a dense matrix, and their time beside a plain replay.

1. Memory: the sums for 20,000 types of a vocabulary of 151,936 and a student of width 1024, every row written, and then
   everything that is computed from them, in a process of its own; beside it a float32 matrix of types × vocabulary.
2. Time at that size, of the heads alone: synthetic states of both models are scored, with and without gradients by
   type, in turns. A whole replay also runs both trunks, which gradients do not touch: its ratio is lower.
3. Time of a whole replay of the embedded models, over three decades of tokens: cost must grow as the tokens do.

On a CPU, seconds are those of the processor, on a GPU those of the clock; the load is printed first and last.
``python benchmarks/gradients.py`` takes some five minutes on one core and 5 GB of memory; with
``--positions 128 --tokens 1e3 1e4`` one minute.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import psutil
import torch

from printing import machine, print_table, whole
from rocktokens.gradients.logit_space import GradientSums, logit_gradients
from rocktokens.gradients.type_gradients import describe_types, half_cosine
from rocktokens.models.head import LMHead
from rocktokens.models.load import load_model
from rocktokens.scoring.divergence import token_scores
from rocktokens.scoring.score import score_rollouts
from rocktokens.types import Rollout

SEED = 7
VOCAB, TYPES = 151_936, 20_000
STUDENT_WIDTH, TEACHER_WIDTH = 1024, 2048
ZIPF = 1.1
PROMPT, RESPONSE = 40, 100
MEMORY_AT_MOST, TIME_AT_MOST = 200e6, 1.3
PACKAGES = ("rocktokens", "torch", "transformers", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=512, help="of the heads that are timed at full size")
    parser.add_argument("--tokens", type=whole, nargs="+", default=[10**3, 10**4, 10**5], help="of whole replays")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="of the heads at full size")
    parser.add_argument("--memory-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_only:
        print(json.dumps(measure_memory()))
        return
    print(machine(PACKAGES, arguments.threads))
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", end="\n\n", flush=True)
    met = [
        report_memory(),
        report_heads(arguments.positions, arguments.repeats, arguments.device),
        report_replay(arguments.tokens, arguments.repeats),
    ]
    print(f"load at the end: {os.getloadavg()[0]:.1f}")
    sys.exit(0 if all(met) else 1)


def report_memory() -> bool:
    command = [sys.executable, __file__, "--memory-only"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"memory for {TYPES:,} types, V = {VOCAB:,}, student of width {STUDENT_WIDTH}, float32")
    dense = TYPES * VOCAB * 4
    rows = [
        ("sums, by their sizes", found["sums"]),
        ("sums, growth of the process", found["process"]),
        ("peak while everything is computed from them", found["peak"]),
        ("dense types × V, estimated", dense),
    ]
    print_table(("", "MB"), [(name, f"{size / 1e6:,.0f}") for name, size in rows])
    met = max(found["sums"], found["process"], found["peak"]) <= MEMORY_AT_MOST
    print(
        f"sketch of width {found['sketch_width']}, {found['split']:,} types with both halves; "
        f"at most {MEMORY_AT_MOST / 1e6:.0f} MB: {_verdict(met)}\n",
        flush=True,
    )
    return met


def measure_memory() -> dict[str, int]:
    """Bytes of the sums, by their sizes and by the growth of this process."""
    generator = np.random.default_rng(SEED)
    token_ids = np.repeat(np.sort(generator.choice(VOCAB, TYPES, replace=False)), 4)
    halves = generator.random(len(token_ids)) < 0.5
    head_VD = torch.empty(1, STUDENT_WIDTH).expand(VOCAB, -1)
    torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    process = psutil.Process()
    before = process.memory_info().rss
    sums = GradientSums.plan(token_ids, halves, vocab_size=VOCAB, like=head_VD, seed=SEED)
    for tensor in (*sums.vectors.values(), *sums.lengths.values(), sums.directions_2V):
        tensor.add_(1)  # pages that were never written would not count
    grown = process.memory_info().rss - before
    gradients = sums.finish()
    for space in ("hidden", "vocabulary"):
        describe_types(gradients, space)
        half_cosine(gradients, gradients, space)
    assert sums.sketch is not None
    return {
        "sums": sums.nbytes,
        "process": grown,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "sketch_width": sums.sketch.width,
        "split": sums.rows.n_rows - TYPES,
    }


def report_heads(positions: int, repeats: int, device: str) -> bool:
    generator = torch.Generator().manual_seed(SEED)
    sizes = ((positions, STUDENT_WIDTH), (VOCAB, STUDENT_WIDTH), (positions, TEACHER_WIDTH), (VOCAB, TEACHER_WIDTH))
    h_s, w_s, h_t, w_t = (torch.randn(size, generator=generator).to(device) for size in sizes)
    ids = _zipf(np.random.default_rng(SEED), VOCAB, positions)
    halves = np.arange(positions) % 2 == 1
    heads = LMHead(w_s / STUDENT_WIDTH**0.5), LMHead(w_t / TEACHER_WIDTH**0.5)
    states = (h_s, heads[0], h_t, heads[1], torch.from_numpy(ids).to(device))
    sums = GradientSums.plan(ids, halves, vocab_size=VOCAB, like=w_s, sketch_width=1024, seed=SEED)
    chunk = min(positions, 1024)
    plain, with_gradients = _in_turns(
        lambda: token_scores(*states, tokens_per_chunk=chunk),
        lambda: sums.add(states, halves, tokens_per_chunk=chunk),
        repeats,
        device,
    )
    ratio = with_gradients / plain
    print(f"heads alone, V = {VOCAB:,}, widths {STUDENT_WIDTH} and {TEACHER_WIDTH}, {positions:,} positions, {device}")
    cells = [f"{1e3 * seconds / positions:.2f}" for seconds in (plain, with_gradients)]
    print_table(("plain, ms/token", "with gradients, ms/token", "ratio"), [(*cells, f"{ratio:.2f}")])
    print(f"at most {TIME_AT_MOST}: {_verdict(ratio <= TIME_AT_MOST)}\n", flush=True)
    return ratio <= TIME_AT_MOST


def report_replay(sizes: Sequence[int], repeats: int) -> bool:
    student, teacher = (load_model(f"pebbles-{role}", device="cpu") for role in ("student", "teacher"))
    print("whole replay of the embedded models, exact in both spaces")
    rows, ratios = [], []
    for tokens in sizes:
        rollouts = _rollouts(tokens, student.model.config.vocab_size)
        plain, with_gradients = _in_turns(
            lambda rollouts=rollouts: score_rollouts(student, teacher, rollouts),
            lambda rollouts=rollouts: logit_gradients(student, teacher, rollouts),
            repeats if tokens < 10**5 else 1,
            "cpu",
        )
        ratios.append(with_gradients / plain)
        each = [f"{1e6 * seconds / tokens:.0f}" for seconds in (plain, with_gradients)]
        rows.append((f"{tokens:,}", *each, f"{ratios[-1]:.2f}"))
    print_table(("response tokens", "plain, µs/token", "with gradients, µs/token", "ratio"), rows)
    met = max(ratios[1:] or ratios) <= TIME_AT_MOST
    print(f"at most {TIME_AT_MOST} from the second size on: {_verdict(met)}\n", flush=True)
    return met


def _in_turns(
    plain: Callable[[], object], other: Callable[[], object], repeats: int, device: str
) -> tuple[float, float]:
    """Median seconds of each, after a first run of both that does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for work, seconds in zip((plain, other), times, strict=True):
            took = _seconds(work, device)
            if turn:
                seconds.append(took)
    return statistics.median(times[0]), statistics.median(times[1])


def _seconds(work: Callable[[], object], device: str) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - began


def _rollouts(tokens: int, vocab_size: int) -> list[Rollout]:
    generator = np.random.default_rng(SEED)
    rollouts = []
    for index in range(tokens // RESPONSE):
        ids = _zipf(generator, vocab_size, PROMPT + RESPONSE).astype(np.int32)
        zeros = np.zeros(RESPONSE, dtype=np.float32)
        rollouts.append(Rollout(index, f"prompt-{index}", 0, ids[:PROMPT], ids[PROMPT:], zeros, 0, finished=True))
    return rollouts


def _zipf(generator: np.random.Generator, types: int, count: int) -> np.ndarray:
    """int64: ranks 0 … types − 1 with probabilities proportional to (rank + 1)^−ZIPF."""
    upto = np.cumsum(np.arange(1, types + 1) ** -ZIPF)
    return np.searchsorted(upto, generator.random(count) * upto[-1], side="right")


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


if __name__ == "__main__":
    main()
