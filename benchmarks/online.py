"""What finding rocks while training costs on the CPU: weights, the draw of probes and bookkeeping, beside a step.

1. The embedded pair is distilled with the settings of the demo and uniform weights; what the policy does before and
   after a step is timed on the tokens and scores of each step of that very run.
2. The same for updates of 65,536 tokens from a vocabulary of 151,936, drawn by Zipf's law, a tenth of the types lying
   still. Beside it the LM heads alone (both forward, the student's backward, widths 1024 and 2048) on the chosen
   device, timed on a few tokens and scaled: a whole step also runs two models and samples.

Scoring the probes is not in these figures: it is work of the heads, one row of each per probe, and in the log it counts
against ``head_compute_saved``. First calls, the slowest, are in the means as they are in a run.

The last column is the shortest step that the policy adds at most 1 % to. ``python benchmarks/online.py`` takes some two
minutes on one core. ``--compare RUN`` times nothing: it plays the training trace of a finished run with uniform weights
to the tracker and compares what it calls with RUN/rocks.json, by the defaults and with one setting changed at a time.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from printing import machine, print_table, whole
from rocktokens.config import parse_config
from rocktokens.policies.online_rocks import OnlineRocksPolicy
from rocktokens.policies.tracker import RockTracker, StepSums
from rocktokens.recipes import shipped
from rocktokens.scoring.divergence import weighted_kl
from rocktokens.traces.store import TraceStore
from rocktokens.training.loop import distill
from rocktokens.types import RockSet, TokenScores

SEED = 7
VOCAB, STUDENT_WIDTH, TEACHER_WIDTH = 151_936, 1024, 2048
ROLLOUT = 512
ZIPF = 1.1
SHARE_AT_MOST = 0.01
OTHER_SETTINGS = {
    "window_steps": (4, 12, 16),
    "decay": (0.6, 0.7, 0.9),
    "min_share": (0.0005, 0.02),
    "tolerance": (0.02, 0.03, 0.1),
    "patience": (1, 3),
}
HEADER = (
    *("update", "tokens", "types", "weights and draw ms", "observe ms", "worst step ms", "state MB", "step s", "share"),
    f"{SHARE_AT_MOST:.0%} of s",
)
PACKAGES = ("rocktokens", "torch", "numpy", "scipy")
Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="of the demo's training and of the large updates")
    parser.add_argument("--tokens", type=whole, default=65_536, help="of a large update")
    parser.add_argument("--positions", type=int, default=256, help="on which the heads are timed")
    parser.add_argument("--device", default="cpu", help="of the heads")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compare", type=Path, metavar="RUN", help="a finished run with rocks.json; times nothing")
    arguments = parser.parse_args()
    if arguments.compare:
        compare_with_offline(arguments.compare)
        return
    torch.set_num_threads(arguments.threads)
    print(machine(PACKAGES, arguments.threads), end="\n\n", flush=True)
    scale = arguments.tokens / arguments.positions
    heads = scale * head_seconds(arguments.positions, torch.device(arguments.device))
    rows = [
        demo_row(arguments.steps),
        table_row("large, heads alone", list(large_steps(arguments.steps, arguments.tokens)), heads),
    ]
    print_table(HEADER, rows)
    print(f"target: a share of at most {SHARE_AT_MOST:.0%}")


def demo_row(steps: int) -> list[str]:
    """The policy beside the steps of a run."""
    with tempfile.TemporaryDirectory() as folder:
        text = shipped("demo")
        changes = [f"run.directory={json.dumps(folder)}", f"training.max_steps={steps}"]
        distill(parse_config(text, changes, name="demo"))
        lines = [json.loads(line) for line in (Path(folder) / "logs.jsonl").read_text(encoding="utf-8").splitlines()]
        step_seconds = statistics.mean(line["seconds_sample"] + line["seconds_update"] for line in lines)
        return table_row("the demo's", list(traced_steps(Path(folder))), step_seconds)


def traced_steps(run: Path) -> Iterator[Rows]:
    """The tokens, positions, rollouts and kl of each step."""
    rows = TraceStore(run, source="training").table().to_pandas()
    for _, step in rows.groupby("policy_step"):
        yield tuple(step[name].to_numpy() for name in ("token_id", "position", "rollout_id", "kl"))  # pyright: ignore


def large_steps(steps: int, tokens: int) -> Iterator[Rows]:
    """Zipf's law over the vocabulary; every tenth type lies still, the others fall."""
    rng = np.random.default_rng(SEED)
    upto = np.cumsum(np.arange(1, VOCAB + 1) ** -ZIPF)
    rollouts, places = np.divmod(np.arange(tokens), ROLLOUT)
    for step in range(steps):
        ids = np.searchsorted(upto, rng.random(tokens) * upto[-1]).astype(np.int64)
        kl = np.where(ids % 10 == 3, 1.0, 0.98**step) * rng.gamma(4.0, 0.25, tokens)
        yield ids, places, rollouts + step * (tokens // ROLLOUT), kl.astype(np.float32)


def head_seconds(positions: int, device: torch.device) -> float:
    """One forward and backward of the loss on so many tokens, the best of three."""
    torch.manual_seed(SEED)
    student, teacher = (
        (torch.randn(positions, width, device=device), torch.randn(VOCAB, width, device=device) / width**0.5)
        for width in (STUDENT_WIDTH, TEACHER_WIDTH)
    )
    ids_T, weights_T = torch.randint(VOCAB, (positions,), device=device), torch.ones(positions, device=device)
    for tensor in student:
        tensor.requires_grad_()
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        loss, _ = weighted_kl(*student, *teacher, ids_T, weights_T, float(positions))
        loss.backward()
        float(student[0].grad.sum())  # waits for a GPU  # pyright: ignore[reportOptionalMemberAccess]
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def table_row(name: str, steps: list[Rows], step_seconds: float) -> list[str]:
    """What the policy costs in these updates."""
    policy, before, after = OnlineRocksPolicy(), [], []
    for step, (ids, positions, rollouts, kl) in enumerate(steps):
        began = time.perf_counter()
        weights = policy(None, ids, positions, rollouts, step)
        probed = policy.probe(weights, ids, positions, rollouts, step)
        between = time.perf_counter()
        known = TokenScores(np.where((weights > 0) | probed, kl, np.nan), *[np.empty(0)] * 5)
        resumed = time.perf_counter()
        policy.observe(known, ids, step)
        before.append(between - began)
        after.append(time.perf_counter() - resumed)
    cost = [first + second for first, second in zip(before, after, strict=True)]
    size, mean = sum(column.nbytes for column in policy.state().values()), statistics.mean(cost)
    counts = [f"{len(steps[-1][0]):,}", f"{len(policy.state()['ids']):,}"]
    milliseconds = [f"{1000 * value:.2f}" for value in (statistics.mean(before), statistics.mean(after), max(cost))]
    shares = [f"{mean / step_seconds:.3%}", f"{mean / SHARE_AT_MOST:.2f}"]
    return [name, *counts, *milliseconds, f"{size / 1e6:.1f}", f"{step_seconds:.2f}", *shares]


def compare_with_offline(run: Path) -> None:
    """Which of the rocks that `find` named the tracker calls on the training trace of the same run, and when."""
    steps, offline = list(traced_steps(run)), RockSet.load(run / "rocks.json")
    text = {token.id: repr(token.text) for token in offline.tokens}
    rows = []
    for change in ({}, *({name: value} for name, values in OTHER_SETTINGS.items() for value in values)):
        tracker, called = RockTracker(**change), {}
        for step, (ids, _, _, kl) in enumerate(steps):
            called.update(dict.fromkeys(tracker.observe(StepSums.of(kl, ids), step).called.tolist(), step))
        online = set(tracker.rocks.tolist())
        if not change:
            print("\n".join(f"step {step}: {text.get(token, token)}" for token, step in called.items()), end="\n\n")
        both, others = len(online & text.keys()), ", ".join(str(token) for token in sorted(online - text.keys()))
        missed = " ".join(text[token] for token in text if token not in online)
        median = f"{statistics.median(called.values()):.0f}" if called else ""
        setting = ", ".join(f"{name} {value}" for name, value in change.items()) or "defaults"
        rows.append([setting, f"{both} of {len(text)}", others, missed, median])
    print_table(("setting", "called", "others called", "not called", "median step"), rows)


if __name__ == "__main__":
    main()
