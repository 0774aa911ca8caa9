"""The fused per-token reverse KL on a GPU, forward and backward, beside its floor and its peers.

1. The floor is the time of the matrix products alone (two forward, two backward) at the rate that a product of three
   8192 × 8192 bf16 matrices has. A GPU that has rested is faster than one at work, so each side has two figures,
   medians over rounds: one turn after a rest, and three turns in a row, as the micro-batches of a training step are.
   After each, and another rest, the reference product runs for as long, and the multiple of the floor is that of this
   round. Whoever rests waits awake: a processor that has slept queues work more slowly than the GPU does it.
2. Ours is ``weighted_kl`` and the gradients of states and head, with the logits in memory in float32 and in the
   operands' dtype; the same with 30 % of the positions frozen; and ``token_scores``, which is the forward pass alone.
   How many rows have to be read again depends on the models, so there is a pair that agrees beside one that does not.
3. Peers: the formula in PyTorch with both logits in float32, chunks of 1024; liger-kernel's LigerFusedLinearJSD and its
   chunked loss; TRL's chunked divergence. Why one was not measured is said in its line.
4. Extra memory is the most that PyTorch had allocated during a turn, less what there was before; and the same less the
   gradients that are returned.
5. Accuracy: ours at some positions against float64 on the same logits. The error of ∂h is relative to its largest
   entry; and entry by entry to what it costs to round the gradient of the logits to bf16, and then the entry.

The tokens are sampled from the student, as in use. ``python benchmarks/kernel.py`` takes about three minutes on one
H200; ``--curves`` adds the cost over positions and vocabulary, ``--classes`` ours with 64 classes of 8 tokens, whose
choice is left out, beside ours without.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from printing import machine, print_table, whole
from rocktokens.classes import TokenClasses
from rocktokens.models.head import LMHead
from rocktokens.scoring import fused
from rocktokens.scoring.divergence import token_scores, weighted_kl

Gradients = Sequence[torch.Tensor]
Turn = Callable[[], Gradients]
GIB = 1 << 30
REFERENCE = 8192
IN_A_ROW = 3
FROZEN = 0.3
ROUNDING = 2.0**-8
"""The most that rounding to bf16 changes a number by, relative to it."""
SHARPER, UNSEEN = 2.4, 0.05
"""The student's head of an agreeing pair as a multiple of the other's; and likewise what the teacher does not see."""
AGREEING = ", models that agree"
ROUNDED = {"float32 logits": False, "bf16 logits": True}
CLASSES, MEMBERS = 64, 8
WITH_CLASSES = f", {CLASSES} classes of {MEMBERS}"
HEADER = ["", "ms", "× floor", "in a row: ms", "in a row: × floor", "extra GiB", "less gradients"]


@dataclass(frozen=True, slots=True)
class Problem:
    """States, heads and tokens; the student's states and head want gradients."""

    h_s_ND: torch.Tensor
    w_s_VD: torch.Tensor
    h_t_NE: torch.Tensor
    w_t_VE: torch.Tensor
    token_ids_N: torch.Tensor
    weights_N: torch.Tensor
    """On the CPU."""

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What gets gradients."""
        return self.h_s_ND, self.w_s_VD

    @property
    def states(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first arguments of ``token_scores``."""
        return self.h_s_ND, self.w_s_VD, self.h_t_NE, self.w_t_VE

    def flops(self, backward: bool, share: float = 1.0) -> float:
        """Of the matrix products, for a share of the positions."""
        d, e = self.h_s_ND.shape[1], self.h_t_NE.shape[1]
        return 2.0 * share * len(self.h_s_ND) * len(self.w_s_VD) * (d + e + (2 * d if backward else 0))


def make_problem(n: int, width: int, student: int, teacher: int) -> Problem:
    """Random, with logits of the student that spread by about 2.5."""
    generator = torch.Generator("cuda").manual_seed(0)
    randn = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
    h_s, w_s = randn(n, student), randn(width, student) * (2.5 / student**0.5)
    h_t, w_t = randn(n, teacher), randn(width, teacher) * (2.5 / teacher**0.5)
    return sampled(h_s, w_s, h_t, w_t, generator)


def make_agreeing(problem: Problem) -> Problem:
    """Models that are surer and nearly agree: the teacher lacks some of the student's states, which count little."""
    e = problem.h_t_NE.shape[1]
    h_s, w_s = problem.h_s_ND.detach().clone(), problem.w_s_VD.detach() * SHARPER
    h_s[:, e:] *= UNSEEN
    h_t, w_t = h_s[:, :e].contiguous(), w_s[:, :e].contiguous()
    return sampled(h_s, w_s, h_t, w_t, torch.Generator("cuda").manual_seed(2))


def sampled(
    h_s: torch.Tensor, w_s: torch.Tensor, h_t: torch.Tensor, w_t: torch.Tensor, generator: torch.Generator
) -> Problem:
    logits = (torch.mm(h, w_s.T, out_dtype=torch.float32) for h in h_s.split(1024))
    ids = [torch.multinomial(torch.softmax(z, -1), 1, generator=generator).flatten() for z in logits]
    return Problem(h_s.requires_grad_(), w_s.requires_grad_(), h_t, w_t, torch.cat(ids), torch.ones(len(h_s)))


def frozen_weights(n: int) -> torch.Tensor:
    weights_N = torch.ones(n)
    weights_N[torch.randperm(n, generator=torch.Generator().manual_seed(1))[: round(FROZEN * n)]] = 0.0
    return weights_N


def random_classes(width: int, classes: int = CLASSES, members: int = MEMBERS) -> TokenClasses:
    """Of ids from all over the vocabulary, whose logits lie far apart in memory."""
    ids = torch.randperm(width, generator=torch.Generator().manual_seed(3))[: classes * members]
    return TokenClasses(ids.view(classes, members).tolist())


# Turns: each makes one pass and returns the gradients


def ours(
    problem: Problem, weights_N: torch.Tensor, round_logits: bool, classes: TokenClasses | None = None
) -> Gradients:
    arrays = (*problem.states, problem.token_ids_N, weights_N)
    options = {"classes": classes, "round_logits": round_logits, "defer_checks": True}
    loss, _ = weighted_kl(*arrays, float(len(weights_N)), **options)
    return torch.autograd.grad(loss, problem.leaves)


def ours_forward(problem: Problem, round_logits: bool, classes: TokenClasses | None = None) -> Gradients:
    token_scores(*problem.states, problem.token_ids_N, classes=classes, round_logits=round_logits)
    return ()


def eager(problem: Problem) -> Gradients:
    h_grads, w_grad = [], torch.zeros_like(problem.w_s_VD)
    for h_s, h_t in zip(problem.h_s_ND.detach().split(1024), problem.h_t_NE.split(1024), strict=True):
        h_s.requires_grad_()
        log_p = torch.log_softmax((h_s @ problem.w_s_VD.T).float(), -1)
        with torch.no_grad():
            log_q = torch.log_softmax((h_t @ problem.w_t_VE.T).float(), -1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        h_grad, part = torch.autograd.grad(kl.sum() / len(problem.h_s_ND), (h_s, problem.w_s_VD))
        h_grads.append(h_grad)
        w_grad += part
    return torch.cat(h_grads), w_grad


def liger_fused(problem: Problem) -> Turn:
    loss = importlib.import_module("liger_kernel.transformers.fused_linear_jsd").LigerFusedLinearJSD(jsd_beta=1.0)
    return lambda: torch.autograd.grad(loss(*problem.states, None), problem.leaves)


def liger_chunked(problem: Problem) -> Turn:
    jsd_loss: Any = importlib.import_module("liger_kernel.chunked_loss.jsd_loss")
    loss = jsd_loss.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, chunk_size=1024)
    return lambda: torch.autograd.grad(loss(*problem.states, problem.token_ids_N), problem.leaves)


def trl_divergence(problem: Problem) -> Callable[[], torch.Tensor]:
    function = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    h_s, w_s, h_t, w_t = problem.states
    return lambda: function.apply(h_s, w_s, None, h_t, w_t, None, 1.0)[0]


def trl(problem: Problem) -> Turn:
    divergence = trl_divergence(problem)
    return lambda: torch.autograd.grad(divergence().mean(), problem.leaves)


def trl_forward(problem: Problem) -> Turn:
    divergence = torch.no_grad()(trl_divergence(problem))

    def turn() -> Gradients:
        divergence()
        return ()

    return turn


@dataclass(frozen=True, slots=True)
class Side:
    """One line of the table."""

    name: str
    make: Callable[[], Turn]
    flops: float
    is_peer: bool = False


def our_sides(problem: Problem) -> list[Side]:
    frozen_N = frozen_weights(len(problem.weights_N))
    both, forward = problem.flops(backward=True), problem.flops(backward=False)
    sides = []
    for name, rounded in ROUNDED.items():
        turns = {
            f"ours, {name}": (partial(ours, problem, problem.weights_N, rounded), both),
            f"ours, {name}, 30 % frozen": (partial(ours, problem, frozen_N, rounded), both * (1 - FROZEN)),
            f"ours, {name}, forward only": (partial(ours_forward, problem, rounded), forward),
        }
        sides += [Side(label, lambda turn=turn: turn, flops) for label, (turn, flops) in turns.items()]
    return sides


def class_sides(problem: Problem) -> list[Side]:
    """Ours with the choice within random classes left out."""
    classes = random_classes(len(problem.w_s_VD))
    both, forward = problem.flops(backward=True), problem.flops(backward=False)
    sides = []
    for name, rounded in ROUNDED.items():
        turn = partial(ours, problem, problem.weights_N, rounded, classes)
        forward_turn = partial(ours_forward, problem, rounded, classes)
        sides += [
            Side(f"ours, {name}{WITH_CLASSES}", lambda turn=turn: turn, both),
            Side(f"ours, {name}, forward only{WITH_CLASSES}", lambda turn=forward_turn: turn, forward),
        ]
    return sides


def agreeing_sides(agreeing: Problem) -> list[Side]:
    return [replace(side, name=side.name + AGREEING) for side in our_sides(agreeing)]


def peers(problem: Problem) -> list[Side]:
    both = problem.flops(backward=True)
    forward = problem.flops(backward=False)
    return [
        Side("eager, float32 logits, chunks of 1024", lambda: partial(eager, problem), both, is_peer=True),
        Side("liger LigerFusedLinearJSD", partial(liger_fused, problem), both, is_peer=True),
        Side("liger chunked, compiled", partial(liger_chunked, problem), both, is_peer=True),
        Side("TRL chunked divergence", partial(trl, problem), both, is_peer=True),
        Side("TRL chunked divergence, forward only", partial(trl_forward, problem), forward, is_peer=True),
    ]


# Measuring


def milliseconds(turn: Callable[[], Any], times: int = 1) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        turn()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


class Rate:
    """FLOP a millisecond of the reference product, as it is now."""

    def __init__(self) -> None:
        a, b = (torch.randn(REFERENCE, REFERENCE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        self.product = partial(torch.mm, a, b, out=out)
        milliseconds(self.product, 20)

    def now(self, for_ms: float) -> float:
        """Measured for about so long."""
        flops = 2.0 * REFERENCE**3
        return flops / milliseconds(self.product, max(3, round(for_ms * 7e11 / flops)))


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians over rounds; bytes."""

    ms: float
    """Of one turn after a rest."""
    floors: float
    row_ms: float
    """Of one of several turns in a row."""
    row_floors: float
    extra: int
    beyond_gradients: int

    def row(self, name: str) -> list[str]:
        """A line of the table."""
        times = (f"{figure:.2f}" for figure in (self.ms, self.floors, self.row_ms, self.row_floors))
        sizes = (f"{size / GIB:.2f}" for size in (self.extra, self.beyond_gradients))
        return [name, *times, *sizes]


def rested(seconds: float) -> None:
    """Return after so long, awake."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def timed(turn: Turn, in_a_row: int, flops: float, rate: Rate, rest: float) -> tuple[float, float]:
    """Milliseconds of a turn, and how many times its floor that is."""
    rested(rest)
    ms = milliseconds(turn, in_a_row)
    rested(rest)
    return ms, ms * rate.now(for_ms=ms * in_a_row) / flops


def memory(turn: Turn) -> tuple[int, int]:
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = turn()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    return extra, extra - sum(gradient.nbytes for gradient in gradients)


def measure(sides: Sequence[Side], rounds: int, rest: float) -> dict[str, Measured | str]:
    """Of every side, or why not."""
    turns: dict[str, Turn] = {}
    failures: dict[str, Measured | str] = {}
    for side in sides:
        try:
            turns[side.name] = side.make()
            turns[side.name]()
        except Exception as error:
            if not side.is_peer:
                raise
            turns.pop(side.name, None)
            failures[side.name] = "not installed" if isinstance(error, ImportError) else f"failed: {error}"
    extra = {name: memory(turn) for name, turn in turns.items()}
    rate, flops = Rate(), {side.name: side.flops for side in sides}
    figures: dict[str, list[tuple[float, ...]]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            one, several = (timed(turn, in_a_row, flops[name], rate, rest) for in_a_row in (1, IN_A_ROW))
            figures[name].append((*one, *several))
    found: dict[str, Measured | str] = {}
    for name, rows in figures.items():
        ms, floors, row_ms, row_floors = map(statistics.median, zip(*rows, strict=True))
        found[name] = Measured(ms, floors, row_ms, row_floors, *extra[name])
    return found | failures


def accuracy(problem: Problem, round_logits: bool, rows: int = 64) -> dict[str, float]:
    """The largest relative error of kl and grad_norm, with and without gradient, and of ∂h in two ways."""
    heads = LMHead(problem.w_s_VD.detach()), LMHead(problem.w_t_VE)
    h_s, h_t, ids = problem.h_s_ND[:rows].detach().requires_grad_(), problem.h_t_NE[:rows], problem.token_ids_N[:rows]
    arrays = (heads[0].weight_VD, None, heads[0], h_t, heads[1], ids, torch.ones(rows, device="cuda"))
    total, table_CN = fused.weighted_sum(h_s, *arrays, "reverse", 1.0, round_logits=round_logits)
    alone_CN = fused.scored(h_s, heads[0], h_t, heads[1], ids, "reverse", 1.0, round_logits=round_logits)
    (h_grad,) = torch.autograd.grad(total, h_s)
    options: dict[str, Any] = {} if round_logits else {"out_dtype": torch.float32}
    with torch.no_grad():
        z_s, z_t = (
            torch.mm(h, head.weight_VD.T, **options).double() for h, head in zip((h_s, h_t), heads, strict=True)
        )
        log_p, log_q = torch.log_softmax(z_s, -1), torch.log_softmax(z_t, -1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        gradient = log_p.exp() * (log_p - log_q - kl[:, None])
        weight_VD = heads[0].weight_VD.double()
        expected_h = gradient @ weight_VD
        allowed_h = ROUNDING * (gradient.abs() @ weight_VD.abs() + expected_h.abs())
    norm = gradient.norm(dim=-1)
    return {
        "kl": max(((table[0] - kl) / kl).abs().max().item() for table in (table_CN, alone_CN)),
        "grad_norm": max(((table[5] - norm) / norm).abs().max().item() for table in (table_CN, alone_CN)),
        "∂h": ((h_grad - expected_h).abs().max() / expected_h.abs().max()).item(),
        "entry of ∂h": ((h_grad - expected_h).abs() / allowed_h).max().item(),
    }


def rounding_of_logits(problem: Problem, rows: int = 1024) -> str:
    """What rounding logits to the operands' dtype does to kl: medians."""
    heads = LMHead(problem.w_s_VD.detach()), LMHead(problem.w_t_VE)
    h_s, h_t = problem.h_s_ND[:rows].detach(), problem.h_t_NE[:rows]
    arrays = (h_s, heads[0], h_t, heads[1], problem.token_ids_N[:rows], "reverse", 1.0)
    wide, narrow = (fused.scored(*arrays, round_logits=rounded) for rounded in (False, True))
    change = ((narrow[0] - wide[0]) / wide[0]).abs().median().item()
    kl, entropy = (wide[column].median().item() for column in (0, 3))
    return f"kl {kl:.2g}, entropy {entropy:.2g}; kl changes by {change:.1e} (relative) when logits are rounded to bf16"


# Printing


def verdict(what: str, value: float, target: float, unit: str) -> None:
    print(f"{what}: {value:.3g}{unit} (target ≤ {target:g}{unit}: {'met' if value <= target else 'missed'})")


def print_verdicts(found: dict[str, Measured | str]) -> None:
    for name, models in product(ROUNDED, ("", AGREEING)):
        sides = (found[f"ours, {name}{what}{models}"] for what in ("", ", 30 % frozen", ", forward only"))
        whole_pass, frozen, forward = sides
        assert isinstance(whole_pass, Measured) and isinstance(frozen, Measured) and isinstance(forward, Measured)
        print(f"\n{name}{models}")
        verdict("forward and backward", whole_pass.ms, 38, " ms")
        verdict("forward and backward", whole_pass.floors, 1.25, " × floor")
        verdict("forward and backward, in a row", whole_pass.row_floors, 1.25, " × floor")
        verdict("extra memory less the gradients returned", whole_pass.beyond_gradients / GIB, 1.5, " GiB")
        verdict("30 % frozen", frozen.ms, 28, " ms")
        verdict("forward only", forward.ms, 17.5, " ms")
        verdict("forward only", forward.floors, 1.2, " × floor")
        verdict("forward only, in a row", forward.row_floors, 1.2, " × floor")
        verdict("forward only, extra memory", forward.extra / GIB, 1, " GiB")


def print_class_verdicts(found: dict[str, Measured | str]) -> None:
    """What classes add to the same pass without them."""
    for name, models, what in product(ROUNDED, ("", AGREEING), ("", ", forward only")):
        plain, split = (found[f"ours, {name}{what}{classes}{models}"] for classes in ("", WITH_CLASSES))
        assert isinstance(plain, Measured) and isinstance(split, Measured)
        print(f"\n{name}{what}{WITH_CLASSES}{models}")
        verdict("over none", 100 * (split.ms / plain.ms - 1), 3, " %")
        verdict("over none, in a row", 100 * (split.row_ms / plain.row_ms - 1), 3, " %")
        verdict("extra memory over none", (split.extra - plain.extra) / (1 << 20), 64, " MiB")


def print_accuracy(problem: Problem, models: str) -> None:
    for name, rounded in ROUNDED.items():
        errors = accuracy(problem, rounded)
        print(f"\naccuracy, {name}, {models}")
        verdict("kl, relative", errors["kl"], 1e-5, "")
        verdict("grad_norm, relative", errors["grad_norm"], 1e-5, "")
        verdict("∂h, of its largest entry", errors["∂h"], ROUNDING, "")
        verdict("∂h, entry by entry, of what rounding to bf16 allows", errors["entry of ∂h"], 1, "")
    print(f"medians of {models}: {rounding_of_logits(problem)}")


def print_curves(given: argparse.Namespace) -> None:
    positions = [(n, given.vocabulary) for n in (1024, 2048, 4096, 8192, 16384, 32768)]
    widths = [(given.positions, width) for width in (32_000, 49_152, 100_277, 128_256, 262_144)]
    rows = []
    for n, width in (*positions, *widths):
        problem = make_problem(n, width, given.student, given.teacher)
        sides = [side for side in our_sides(problem) if "frozen" not in side.name]
        for name, measured in measure(sides, rounds=3, rest=given.rest).items():
            assert isinstance(measured, Measured)
            rows.append([str(n), str(width), *measured.row(name)])
        del problem, sides
        torch.cuda.empty_cache()
    print_table(["positions", "vocabulary", *HEADER], rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=whole, default=8192)
    parser.add_argument("--vocabulary", type=whole, default=151_936)
    parser.add_argument("--student", type=whole, default=2560, help="width of the student's states")
    parser.add_argument("--teacher", type=whole, default=2048, help="width of the teacher's states")
    parser.add_argument("--rounds", type=int, default=7, help="of turns of each side")
    parser.add_argument("--rest", type=float, default=0.2, help="seconds")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--classes", action="store_true", help="with classes of tokens as well")
    parser.add_argument("--curves", action="store_true", help="the cost over positions and vocabulary as well")
    given = parser.parse_args()
    if given.teacher >= given.student:
        parser.error("--teacher must be less than --student: the teacher that agrees sees part of its states")
    return given


def main() -> None:
    given = arguments()
    if not torch.cuda.is_available():
        print("benchmarks/kernel.py needs a CUDA device: nothing was measured")
        return
    print(machine(("rocktokens", "torch", "triton", "liger-kernel", "trl", "transformers")))
    print(torch.cuda.get_device_name(), flush=True)
    problem = make_problem(given.positions, given.vocabulary, given.student, given.teacher)
    agreeing = make_agreeing(problem)
    sides = our_sides(problem) + agreeing_sides(agreeing) + ([] if given.no_peers else peers(problem))
    if given.classes:
        sides += class_sides(problem) + [replace(s, name=s.name + AGREEING) for s in class_sides(agreeing)]
    found = measure(sides, given.rounds, given.rest)
    rate = Rate()
    rested(given.rest)
    after_rest = rate.now(for_ms=40)
    floors = (problem.flops(backward) / after_rest for backward in (True, False))
    print(
        f"{given.positions} positions, vocabulary {given.vocabulary}, widths {given.student}, {given.teacher}, bf16\n"
        f"reference product after a rest {after_rest / 1e9:.0f} TFLOP/s: floor {next(floors):.1f} ms, forward only "
        f"{next(floors):.1f} ms\n"
    )
    rows = [m.row(name) if isinstance(m, Measured) else [name, m, *[""] * 5] for name, m in found.items()]
    print_table(HEADER, rows)
    print_verdicts(found)
    if given.classes:
        print_class_verdicts(found)
    print_accuracy(problem, "models that do not agree")
    print_accuracy(agreeing, "models that agree")
    if given.curves:
        del problem, agreeing, sides
        torch.cuda.empty_cache()
        print()
        print_curves(given)


if __name__ == "__main__":
    main()
