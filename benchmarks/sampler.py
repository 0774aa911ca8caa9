"""Sampling on a GPU: ours against ``model.generate``, on a model of 135 M parameters in the shape of SmolLM2.

1. All answers of one length: 256 prompts of 64 to 128 tokens, 256 new tokens each, nothing ends earlier. Ours and
   transformers' ``generate`` with its default cache, in bfloat16, at temperature 1 over all tokens and greedily.
2. Answers that end by themselves: four times as many prompts, and one id in 128 is an end token, so that lengths are
   geometric. ``generate`` writes a batch until its longest answer has ended; ours puts the next prompt in a free row.
3. The same ids: greedy answers of both in float32, where only ties to within rounding could differ; in bfloat16, where
   rounding decides more often, how many answers agree.

Weights are random: what is timed does not depend on them. The floor is the time to read the weights once a step, and
the keys and values of every row, at the bandwidth of a large copy on the same machine. Sides alternate; the first turn
of each, which captures graphs, is printed apart. ``python benchmarks/sampler.py`` takes about two minutes on an H200.

``--shape qwen2.5-1.5b`` takes Qwen2.5-1.5B's shape instead, prompts of 80 to 160 tokens and answers of 300, and
``--rows`` another number of rows. ``--kernels`` asks instead what kernels of ours are worth: it counts the GPU kernels
of one decoding step, and times answers, with and without attention to each row's own slots (``attention_kernels.py``),
the choice of the next token (``choice_kernels.py``), the quick layers (``models/layers.py``) and the cache's kernel
(``slot_kernels.py``). ``--profile`` prints the GPU kernels of one replayed step, halfway through the answers, by time.
``--apart`` leaves every projection of a layer a product of its own.
"""

import argparse
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from transformers.utils import logging as transformers_logging

from printing import machine, print_table
from rocktokens.models.projections import lay_side_by_side
from rocktokens.rollouts import decoding, sampler, slots
from rocktokens.rollouts.rows import DecodingRows
from rocktokens.rollouts.sampler import SampleRequest, TransformersSampler

PAD = 0
END_SHARE = 128
TARGET = 3.0
MOST_KERNELS, MOST_LETTERS = 25, 80
"""Of the table of a profile, and of a name in it."""
Written = list[list[int]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's, and what it is asked."""

    config: type[LlamaConfig] | type[Qwen2Config]
    sizes: tuple[int, int, int, int, int, int]
    """Width, width between, layers, heads, key heads, vocabulary."""
    rows: int
    new_tokens: int
    prompts: tuple[int, int]
    """The shortest and the longest."""


TINY = Shape(LlamaConfig, (64, 128, 2, 4, 2, 512), 256, 256, (64, 128))
SHAPES = {
    "smollm2-135m": Shape(LlamaConfig, (576, 1536, 30, 9, 3, 49152), 256, 256, (64, 128)),
    "qwen2.5-1.5b": Shape(Qwen2Config, (1536, 8960, 28, 12, 2, 151936), 512, 300, (80, 160)),
}


def make_model(dtype: torch.dtype, device: str, shape: Shape) -> Any:
    """A model of this shape with random weights."""
    torch.manual_seed(0)
    hidden, between, layers, heads, key_heads, vocabulary = shape.sizes
    config = shape.config(
        hidden_size=hidden,
        intermediate_size=between,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PAD,
        initializer_range=0.04,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_requests(count: int, shape: Shape) -> list[SampleRequest]:
    rng, vocab_size = np.random.default_rng(0), shape.sizes[-1]
    shortest, longest = shape.prompts
    lengths = rng.integers(shortest, longest + 1, size=count)
    return [SampleRequest(f"p{i}", rng.integers(1, vocab_size, size=n).astype(np.int32)) for i, n in enumerate(lengths)]


def ours(sampler: TransformersSampler, requests: list[SampleRequest], new_tokens: int, temperature: float) -> Written:
    completions = sampler.sample(requests, temperature=temperature, max_new_tokens=new_tokens, seed=0)
    return [completion.token_ids.tolist() for completion in completions]


def generated(
    model: Any, requests: list[SampleRequest], new_tokens: int, temperature: float, ends: list[int], batch: int
) -> Written:
    """What transformers writes, batch after batch, shortest prompts first as ours."""
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
    written: dict[int, list[int]] = {}
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    for first in range(0, len(order), batch):
        own = order[first : first + batch]
        width = max(len(requests[index].prompt_ids) for index in own)
        input_ids = torch.full((len(own), width), PAD)
        mask = torch.zeros_like(input_ids)
        for row, index in enumerate(own):
            prompt = torch.from_numpy(requests[index].prompt_ids)
            input_ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
        rows = model.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=new_tokens,
            eos_token_id=ends or None,
            **sampling,
        )
        for index, row in zip(own, rows[:, width:].tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(row) if token in set(ends)), len(row))
            written[index] = row[:end]
    return [written[index] for index in range(len(requests))]


def seconds(work: Callable[[], Written], device: str) -> tuple[float, Written]:
    began = time.perf_counter()
    written = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, written


def bandwidth() -> float:
    """Bytes a second of a large copy, read and write counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * (1 << 30) / statistics.median(times)


def floor_seconds(model: Any, requests: list[SampleRequest], lengths: list[int], batch: int) -> float:
    """Weights once a step of a full batch, and all keys and values that a token looks at."""
    config, width = model.config, model.dtype.itemsize
    weight_bytes = sum(parameter.numel() * width for parameter in model.parameters())
    head_width = config.hidden_size // config.num_attention_heads
    slot_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_width * width
    prompts = [len(request.prompt_ids) for request in requests]
    looked_at = sum(n * prompt + n * (n + 1) // 2 for prompt, n in zip(prompts, lengths, strict=True))
    steps = sum(lengths) / batch
    return (steps * weight_bytes + looked_at * slot_bytes) / bandwidth()


def compare(title: str, sides: dict[str, Callable[[], Written]], rounds: int, device: str) -> dict[str, float]:
    """Medians of the turns after the first; prints first turns and tokens a second."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    tokens: dict[str, int] = {}
    for _ in range(1 + rounds):
        for name, work in sides.items():
            spent, written = seconds(work, device)
            times[name].append(spent)
            tokens[name] = sum(map(len, written))
    medians = {name: statistics.median(spent[1:]) for name, spent in times.items()}
    last = medians[list(sides)[-1]]
    print(f"{title}\n")
    print_table(
        ["", "s", "first turn, s", "tokens", "tokens/s", f"× {list(sides)[-1]}"],
        [
            [
                name,
                f"{medians[name]:.2f}",
                f"{times[name][0]:.2f}",
                f"{tokens[name]:,}",
                f"{tokens[name] / medians[name]:,.0f}",
                f"{last * tokens[name] / tokens[list(sides)[-1]] / medians[name]:.2f}",
            ]
            for name in sides
        ],
    )
    return medians


@contextmanager
def by_kernel(attention: bool, choice: bool, layers: bool, cache: bool) -> Iterator[None]:
    """Leave what is not wanted by a kernel of ours to PyTorch and transformers."""
    with ExitStack() as patches:
        if not attention:
            patches.enter_context(patch("rocktokens.rollouts.rows.takes_row_slots", lambda _: False))
        if not choice:
            patches.enter_context(patch.object(decoding, "has_triton", lambda: False))
        if not layers:
            patches.enter_context(patch.object(sampler, "quick_layers", lambda _: nullcontext()))
        if not cache:
            patches.enter_context(patch.object(slots, "has_triton", lambda: False))
        yield


def kernels_of_a_step(model: Any, requests: list[SampleRequest]) -> int:
    """How many kernels, copies and fills the GPU runs in one step of a full batch, without a graph."""
    counts: list[int] = []

    def counted(rows: DecodingRows, steps: int, n_rows: int, width: int) -> None:
        for _ in range(steps):
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                rows._step(n_rows, width)
                torch.cuda.synchronize()
            kinds = (event.device_type for event in profiled.events() or [])
            counts.append(sum(kind == torch.autograd.DeviceType.CUDA for kind in kinds))

    with patch.object(DecodingRows, "advance", counted):
        ours(TransformersSampler(model, frozenset(), PAD, batch_size=len(requests)), requests, 8, 1.0)
    return counts[-1]


def compare_kernels(model: Any, requests: list[SampleRequest], new_tokens: int, rounds: int) -> None:
    """Count a step's kernels, and time whole answers, with more and more of it by kernels of ours."""
    sides = {
        "attention, choice, layers, cache": (True, True, True, True),
        "choice, layers, cache": (False, True, True, True),
        "layers, cache": (False, False, True, True),
        "cache": (False, False, False, True),
        "none": (False, False, False, False),
    }
    counts: dict[str, int] = {}
    works: dict[str, Callable[[], Written]] = {}
    for name, side in sides.items():
        with by_kernel(*side):
            counts[name] = kernels_of_a_step(model, requests)
        own = TransformersSampler(model, frozenset(), PAD, batch_size=len(requests))

        def work(own: TransformersSampler = own, side: tuple[bool, bool, bool, bool] = side) -> Written:
            with by_kernel(*side):
                return ours(own, requests, new_tokens, 1.0)

        works[name] = work
    print(f"GPU kernels of one decoding step of {len(requests)} rows\n")
    layers = model.config.num_hidden_layers
    rows = [[name, f"{count:,}", f"{count / layers:.1f}"] for name, count in counts.items()]
    print_table(["by kernels of ours", "kernels", "per layer, all counted"], rows)
    medians = compare(f"{len(requests)} answers of {new_tokens} tokens, temperature 1", works, rounds, "cuda")
    floor = floor_seconds(model, requests, [new_tokens] * len(requests), len(requests))
    print(f"floor {floor:.3f} s: all by kernels of ours is {next(iter(medians.values())) / floor:.1f} × that\n")


def profiled_steps(model: Any, requests: list[SampleRequest], new_tokens: int) -> list[dict[str, list[float]]]:
    """The µs of the kernels, copies and fills of one step in every few, by name; all are replayed."""
    own, advance = TransformersSampler(model, frozenset(), PAD, batch_size=len(requests)), DecodingRows.advance
    ours(own, requests, new_tokens, 1.0)
    steps_seen: list[dict[str, list[float]]] = []

    def profiling(rows: DecodingRows, steps: int, n_rows: int, width: int) -> None:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            advance(rows, 1, n_rows, width)
            torch.cuda.synchronize()
        spent: dict[str, list[float]] = defaultdict(list)
        for event in profiled.events() or []:
            if event.device_type == torch.autograd.DeviceType.CUDA:
                spent[event.name].append(event.time_range.elapsed_us())
        steps_seen.append(spent)
        advance(rows, steps - 1, n_rows, width)

    with patch.object(DecodingRows, "advance", profiling):
        ours(own, requests, new_tokens, 1.0)
    return steps_seen


def print_profile(model: Any, requests: list[SampleRequest], new_tokens: int) -> None:
    """What the GPU runs in the step halfway, that which takes longest first."""
    steps = profiled_steps(model, requests, new_tokens)
    spent = steps[len(steps) // 2]
    total = sum(map(sum, spent.values()))
    by_time = sorted(spent.items(), key=lambda item: -sum(item[1]))
    shown = [(re.sub(r"^void |at::native::|\(anonymous namespace\)::", "", name), times) for name, times in by_time]
    rest = [time for _, times in shown[MOST_KERNELS:] for time in times]
    print(f"GPU kernels of a replayed step of {len(requests)} rows, halfway to {new_tokens} tokens: {total:,.0f} µs\n")
    print_table(
        ["kernel", "calls", "µs", "share"],
        [
            [name[:MOST_LETTERS], f"{len(times):,}", f"{sum(times):,.0f}", f"{sum(times) / total:.1%}"]
            for name, times in [*shown[:MOST_KERNELS], ("others", rest)]
        ],
    )


def agreement(found: Written, expected: Written) -> str:
    same = sum(one == other for one, other in zip(found, expected, strict=True))
    return f"{same} of {len(expected)} answers the same"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--rows", type=int, help="answers written at once; default: as many as the shape has")
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--kernels", action="store_true", help="what kernels of ours are worth")
    parser.add_argument("--profile", action="store_true", help="the GPU kernels of one step, by time")
    parser.add_argument("--apart", action="store_true", help="do not join products of one input")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to try the script")
    given = parser.parse_args()
    if (given.kernels or given.profile) and given.tiny:
        parser.error("--kernels and --profile measure what a GPU runs: leave --tiny out")
    if not given.tiny and not torch.cuda.is_available():
        print("benchmarks/sampler.py needs a CUDA device, and there is none: --tiny tries it on the CPU")
        return
    device = "cpu" if given.tiny else "cuda"
    transformers_logging.set_verbosity_error()
    print(machine(("rocktokens", "torch", "transformers")), torch.cuda.get_device_name() if device == "cuda" else "")
    shape = TINY if given.tiny else SHAPES[given.shape]
    model = make_model(torch.float32 if given.tiny else torch.bfloat16, device, shape)
    if not given.apart:
        lay_side_by_side(model)
    count, new_tokens, vocab_size = given.rows or shape.rows, given.new_tokens or shape.new_tokens, shape.sizes[-1]
    requests = make_requests(4 * count, shape)
    if given.kernels:
        compare_kernels(model, requests[:count], new_tokens, given.rounds)
    if given.profile:
        print_profile(model, requests[:count], new_tokens)
    if given.kernels or given.profile:
        return
    same_length = TransformersSampler(model, frozenset(), PAD, batch_size=count)
    for name, temperature in (("temperature 1", 1.0), ("greedy", 0.0)):
        medians = compare(
            f"{count} answers of {new_tokens} tokens, {name}",
            {
                "ours": lambda t=temperature: ours(same_length, requests[:count], new_tokens, t),
                "generate": lambda t=temperature: generated(model, requests[:count], new_tokens, t, [], count),
            },
            given.rounds,
            device,
        )
        ratio = medians["generate"] / medians["ours"]
        print(f"{ratio:.2f} × generate (target ≥ {TARGET} ×: {'met' if ratio >= TARGET else 'missed'})")
        if device == "cuda":
            floor = floor_seconds(model, requests[:count], [new_tokens] * count, count)
            print(f"floor {floor:.3f} s: ours is {medians['ours'] / floor:.1f} × that\n")
    ends = np.random.default_rng(1).choice(np.arange(1, vocab_size), vocab_size // END_SHARE, replace=False).tolist()
    ending = TransformersSampler(model, frozenset(ends), PAD, batch_size=count)
    compare(
        f"{4 * count} answers that end by themselves, at most {new_tokens} tokens, temperature 1",
        {
            "ours": lambda: ours(ending, requests, new_tokens, 1.0),
            "generate": lambda: generated(model, requests, new_tokens, 1.0, ends, count),
        },
        1,
        device,
    )
    for dtype in (torch.float32,) if given.tiny else (torch.float32, torch.bfloat16):
        exact = make_model(dtype, device, shape)
        found = ours(TransformersSampler(exact, frozenset(), PAD, batch_size=count), requests[:count], new_tokens, 0.0)
        expected = generated(exact, requests[:count], new_tokens, 0.0, [], count)
        print(f"greedy in {str(dtype).removeprefix('torch.')}: {agreement(found, expected)}")


if __name__ == "__main__":
    main()
