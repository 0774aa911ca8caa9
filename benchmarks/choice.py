"""The choice of the next token on a GPU: the kernel beside PyTorch and the floor.

1. Rows of random bf16 logits, as a head gives them, at temperature 1 and greedily, and at temperature 1 with bans that
   depend on one alternative. A line each, the same rows for both sides.
2. The floor is the time to read the logits once, and a byte an id of the bans where there are any, at the bandwidth of
   a large copy on the same machine.
3. Sides take turns in a CUDA graph, as in the sampler's step, so that launches do not count; medians by CUDA events.
   Logits are other ones in every turn, so that none is left in the cache from the turn before.
4. Ids of both sides are compared; log-probabilities are to agree to 1e-5.

``python benchmarks/choice.py`` takes less than 20 seconds on an H200.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import torch

from printing import machine, print_table
from rocktokens.rollouts import decoding
from rocktokens.rollouts.decoding import choose
from sampler import bandwidth

Choice = tuple[torch.Tensor, torch.Tensor]
ROWS, WIDTHS = (64, 128, 512), (49_152, 151_936)
COLD_BYTES = 128 << 20
"""Logits of all turns together take more than this, which is more than the cache has."""
ROUNDS = 15


@dataclass(frozen=True)
class Problem:
    """Rows whose next ids are chosen."""

    logits_RV: torch.Tensor
    stream_keys_R: torch.Tensor
    temperature: float
    banned_RV: torch.Tensor | None = None
    alternatives_RA: torch.Tensor | None = None

    def choose(self) -> Choice:
        """Choose in the way that ``decoding`` takes."""
        bans = self.banned_RV, self.alternatives_RA
        return choose(self.logits_RV, *bans, self.stream_keys_R, self.stream_keys_R, self.temperature)

    @property
    def bytes(self) -> int:
        """What has to be read."""
        banned = 0 if self.banned_RV is None else self.banned_RV.nbytes
        return self.logits_RV.nbytes + banned


def choose_in_torch(problem: Problem) -> Choice:
    """Choose as where there is no Triton."""
    own, decoding.has_triton = decoding.has_triton, lambda: False
    try:
        return problem.choose()
    finally:
        decoding.has_triton = own


def make_problems(rows: int, width: int) -> dict[str, Problem]:
    """By name."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits_RV = (3 * torch.randn(rows, width, generator=generator, device="cuda")).bfloat16()
    keys_R = torch.randint(1 << 62, (rows,), generator=generator, device="cuda")
    sampled = Problem(logits_RV, keys_R, 1.0)
    banned_RV = torch.rand(rows, width, generator=generator, device="cuda") < 1e-3
    conditional = replace(sampled, banned_RV=banned_RV, alternatives_RA=logits_RV.argmax(1)[:, None])
    return {"sampled": sampled, "greedy": replace(sampled, temperature=0.0), "with bans": conditional}


def captured(problem: Problem, work: Callable[[Problem], Choice]) -> tuple[list[torch.cuda.CUDAGraph], list[Choice]]:
    """One graph per copy of the logits, and where each puts its result."""
    copies = -(-COLD_BYTES // problem.logits_RV.nbytes)
    own = [problem, *(replace(problem, logits_RV=problem.logits_RV.clone()) for _ in range(copies))]
    work(problem)
    torch.cuda.synchronize()
    graphs, results = [], []
    for each in own:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(work(each))
        graphs.append(graph)
    return graphs, results


def milliseconds(graphs: list[torch.cuda.CUDAGraph]) -> float:
    """Of one graph, from those that run one after the other."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for graph in graphs:
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / len(graphs)


def line(name: str, problem: Problem, rate: float, rounds: int) -> list[str]:
    """Measure one row of the table."""
    sides = [captured(problem, work) for work in (Problem.choose, choose_in_torch)]
    times: list[list[float]] = [[], []]
    for _ in range(rounds + 1):  # the first turn wakes the GPU up
        for own, (graphs, _) in zip(times, sides, strict=True):
            own.append(milliseconds(graphs))
    ours, torch_ms = (statistics.median(own[1:]) for own in times)
    (ids_R, logprobs_R), (wanted_R, wanted_logprobs_R) = (results[0] for _, results in sides)
    is_same_R = ids_R == wanted_R
    torch.testing.assert_close(logprobs_R[is_same_R], wanted_logprobs_R[is_same_R], rtol=1e-5, atol=1e-5)
    floor = problem.bytes / rate * 1e3
    rows, width = problem.logits_RV.shape
    figures = [f"{value * 1e3:.1f}" for value in (floor, ours, torch_ms)]
    ratios = [f"{ours / floor:.1f}", f"{torch_ms / ours:.1f}"]
    return [name, f"{rows} × {width}", *figures, *ratios, f"{int(is_same_R.sum())} of {rows}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each side")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/choice.py needs a CUDA device: nothing was measured")
        return
    print(machine(("rocktokens", "torch", "triton")), torch.cuda.get_device_name(), flush=True)
    if not decoding.has_triton():
        print("benchmarks/choice.py needs Triton: nothing was measured")
        return
    rate = bandwidth()
    print(f"{rate / 1e12:.2f} TB/s, reads and writes of a copy counted; {given.rounds} rounds\n")
    lines = [
        line(name, problem, rate, given.rounds)
        for width, rows in product(WIDTHS, ROWS)
        for name, problem in make_problems(rows, width).items()
    ]
    print_table(["", "rows × ids", "floor µs", "kernel µs", "PyTorch µs", "× floor", "× PyTorch", "same ids"], lines)


if __name__ == "__main__":
    main()
