"""What a knock-out sweep costs beside the plain way: one token at a time, every prompt from its start.

1. A hundred tokens of the pebbles and 200 prompts: the types of the run's trace by their share of the kl, and, since
   the pebbles write fewer than a hundred types, ids they never write. Shares are given for the written types alone too.
2. The plain sweep, ours in exact mode and ours with ``--sequential`` decode with the same sampler on one CPU thread.
   Ours runs before, between and after two halves of the plain sweep; its time is the median.
3. Every rollout of the plain sweep is compared with ours, and every verdict.

``python benchmarks/knockout.py runs/demo`` (after ``make demo``) takes about ten minutes; ``--greedy`` does not sample,
``--tokens 20 --prompts 50`` takes a minute. Seconds mean something on a machine that does nothing else: its load is
printed first and last.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from printing import machine
from rocktokens import TraceStore
from rocktokens.config import load_config
from rocktokens.knockout.journal import Journal
from rocktokens.knockout.records import KnockoutSweep
from rocktokens.knockout.sweep import Mode, SweepSettings, knockout_sweep
from rocktokens.knockout.verdicts import VerdictRule, paired_effects, verdict
from rocktokens.models.load import LoadedModel, load_model
from rocktokens.rocks.find import type_table
from rocktokens.rollouts.encode import Sampling, encode_prompt
from rocktokens.rollouts.sampler import SampleRequest, TransformersSampler
from rocktokens.tasks import make_task
from rocktokens.tasks.base import Task
from rocktokens.types import Prompt

SEED = 11
PACKAGES = ("rocktokens", "torch", "transformers", "numpy")
EXACT_AT_MOST, SEQUENTIAL_AT_MOST, AGREEMENT = (0.45, 0.35), 0.15, 0.98
DECIDED = ("pillar", "stumbling", "neutral")


@dataclass(frozen=True, slots=True)
class Bench:
    """One model, its prompts and how it samples."""

    loaded: LoadedModel
    sampler: TransformersSampler
    task: Task
    prompts: list[Prompt]
    temperature: float
    max_new_tokens: int

    def sweep(self, tokens: Sequence[int], mode: Mode, journal: Journal) -> tuple[KnockoutSweep, float]:
        """Ours, and its seconds."""
        began = time.perf_counter()
        found = knockout_sweep(
            self.sampler,
            self.loaded.tokenizer,
            self.task,
            self.prompts,
            list(tokens),
            sampling=Sampling(self.temperature, self.max_new_tokens, SEED),
            settings=SweepSettings(mode=mode, matched=0, never=0),
            journal=journal,
        )
        return found, time.perf_counter() - began

    def plain(self, banned: frozenset[int]) -> tuple[list[np.ndarray], np.ndarray, float]:
        """Rollouts, right answers and seconds of every prompt from its start."""
        began = time.perf_counter()
        requests = [
            SampleRequest(prompt.id, encode_prompt(self.loaded.tokenizer, prompt, True, 512), 0, banned)
            for prompt in self.prompts
        ]
        completions = self.sampler.sample(
            requests, temperature=self.temperature, max_new_tokens=self.max_new_tokens, seed=SEED
        )
        texts = [self.loaded.tokenizer.decode(own.token_ids.tolist(), skip_special_tokens=True) for own in completions]
        right = np.array([self.task.grade(prompt, text) for prompt, text in zip(self.prompts, texts, strict=True)])
        return [own.token_ids for own in completions], right, time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Plain:
    """The plain sweep of some tokens."""

    rollouts: dict[int, list[np.ndarray]]
    right: dict[int, np.ndarray]
    seconds: dict[int, float]

    def tokens_of(self, ids: Sequence[int]) -> int:
        """Tokens it decoded for these."""
        return sum(len(own) for token in ids for own in self.rollouts[token])


def main() -> None:
    """Measure, compare, print; exit 1 when a rollout or a verdict differs."""
    options = _options()
    console = Console(width=112)
    bench = _bench(options)
    tokens = _tokens(options.run, bench, options.tokens)
    console.print(machine(PACKAGES, cores=1), highlight=False)
    journals = [Journal() for _ in range(3)]
    exact = [bench.sweep(tokens, "exact", journals[0])]
    halves = [_plain(bench, tokens[: len(tokens) // 2])]
    exact.append(bench.sweep(tokens, "exact", journals[1]))
    halves.append(_plain(bench, tokens[len(tokens) // 2 :]))
    exact.append(bench.sweep(tokens, "exact", journals[2]))
    sequential = [bench.sweep(tokens, "sequential", Journal()) for _ in range(3)]
    plain = Plain(*({**a, **b} for a, b in zip(_fields(halves[0]), _fields(halves[1]), strict=True)))
    free, free_right, free_seconds = bench.plain(frozenset())
    differing = _differing(plain, journals[0], tokens)
    expected = _verdicts(plain, free_right, tokens)
    unequal = sum(own.verdict != known for own, known in zip(exact[0][0].knockouts, expected, strict=True))
    _report(console, bench, tokens, plain, (sum(map(len, free)), free_seconds), exact, sequential)
    console.print(f"rollouts that differ from the plain sweep's: {differing} of {len(tokens) * len(bench.prompts)}")
    console.print(f"verdicts that differ from the plain sweep's: {unequal} of {len(tokens)}")
    console.print(f"free rollouts that differ when decoded again: {exact[0][0].noise['differing']}")
    console.print(machine(PACKAGES, cores=1), highlight=False)
    sys.exit(1 if differing or unequal else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=Path("runs/demo"), help="a finished run")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64, help="rows decoded together, both ways")
    parser.add_argument("--greedy", action="store_true")
    options = parser.parse_args()
    if not (options.run / "manifest.json").exists():
        parser.error(f"{options.run} is not a run: make one with `make demo`, or name another")
    return options


def _bench(options: argparse.Namespace) -> Bench:
    config = load_config(options.run / "config.toml")
    last = max((options.run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    loaded = load_model(str(last), device="cpu")
    task = make_task(config.task.model_copy(update={"split": "test"}))
    return Bench(
        loaded=loaded,
        sampler=TransformersSampler(loaded.model, loaded.eos_ids, loaded.pad_id, options.batch_size, threads=1),
        task=task,
        prompts=task.prompts(options.prompts, SEED),
        temperature=0.0 if options.greedy else config.rollouts.temperature,
        max_new_tokens=config.rollouts.max_completion_length,
    )


def _tokens(run: Path, bench: Bench, count: int) -> list[int]:
    """The types with the most kl at the last checkpoint, then ids that are never written."""
    store = TraceStore(run)
    types = type_table(store, store.checkpoints[-1], store.checkpoints[0], None)
    written = [token for token in types["token_id"].tolist() if token not in bench.loaded.eos_ids]
    others = np.setdiff1d(np.arange(bench.sampler.vocab_size), [*written, *bench.loaded.eos_ids, bench.loaded.pad_id])
    return [*written, *np.random.Generator(np.random.PCG64(SEED)).permutation(others).tolist()][:count]


def _plain(bench: Bench, tokens: Sequence[int]) -> Plain:
    plain = Plain({}, {}, {})
    for token in tokens:
        plain.rollouts[token], plain.right[token], plain.seconds[token] = bench.plain(frozenset({token}))
    return plain


def _fields(plain: Plain) -> tuple[dict, dict, dict]:
    return plain.rollouts, plain.right, plain.seconds


def _differing(plain: Plain, journal: Journal, tokens: Sequence[int]) -> int:
    """Rollouts of the plain sweep that are not ours."""
    free = journal.free() or []
    count = 0
    for token in tokens:
        for place, whole in enumerate(plain.rollouts[token]):
            own = journal.finished.get(((token,), place))
            ours = free[place].token_ids
            ours = ours if own is None else np.concatenate([ours[: own.start], own.token_ids])
            count += not np.array_equal(ours, whole)
    return count


def _verdicts(plain: Plain, free_right: np.ndarray, tokens: Sequence[int]) -> list[str]:
    differences = np.array([plain.right[token].astype(int) - free_right for token in tokens])
    rule = VerdictRule(seed=SEED)
    return [verdict(own.delta, own.interval, rule) for own in paired_effects(differences, 1, rule)]


def _report(
    console: Console,
    bench: Bench,
    tokens: Sequence[int],
    plain: Plain,
    free: tuple[int, float],
    exact: list[tuple[KnockoutSweep, float]],
    sequential: list[tuple[KnockoutSweep, float]],
) -> None:
    written = [own.ban.ids[0] for own in exact[0][0].knockouts if own.changes.n_rollouts]
    sampled = "greedy" if bench.temperature == 0 else f"temperature {bench.temperature:g}"
    console.print(
        f"{len(tokens)} tokens × {len(bench.prompts)} prompts, {sampled}; {len(written)} of them are written at all; "
        f"free accuracy {100 * exact[0][0].baseline.accuracy:.1f} %"
    )
    table = Table(title="tokens that went through the model, and seconds", title_justify="left")
    for name in ("sweep", "tokens", "share", "target", "share, written types", "seconds", "share", "target"):
        table.add_column(name, justify="left" if name == "sweep" else "right")
    full, full_written = (plain.tokens_of(ids) + free[0] for ids in (tokens, written))
    seconds = sum(plain.seconds.values()) + free[1]
    table.add_row("plain", f"{full:,}", "1", "", "1", f"{seconds:.1f}", "1", "")
    for name, found, targets in (("exact", exact, EXACT_AT_MOST), ("sequential", sequential, (SEQUENTIAL_AT_MOST,))):
        cost, median = found[0][0].cost, statistics.median(own for _, own in found)
        through = cost.decoded_tokens + cost.retraced_tokens
        table.add_row(
            name,
            f"{through:,}",
            f"{through / full:.3f}",
            f"{targets[0]:.2f}",
            f"{through / full_written:.3f}",
            f"{median:.1f}",
            f"{median / seconds:.3f}",
            f"{targets[1]:.2f}" if len(targets) > 1 else "",
        )
    console.print(table)
    _print_agreement(console, exact[0][0], sequential[0][0], set(written))


def _print_agreement(console: Console, exact: KnockoutSweep, sequential: KnockoutSweep, written: set[int]) -> None:
    pairs = [
        (known.verdict, own.verdict, known.ban.ids[0] in written)
        for known, own in zip(exact.knockouts, sequential.knockouts, strict=True)
    ]
    for name, chosen in (("all", pairs), ("written types", [pair for pair in pairs if pair[2]])):
        by_sequential = [known == own for known, own, _ in chosen if own in DECIDED]
        by_exact = [known == own for known, own, _ in chosen if known in DECIDED]
        console.print(
            f"{name}: of {len(by_sequential)} verdicts --sequential decides {sum(by_sequential)} equal exact mode's "
            f"({sum(by_sequential) / max(1, len(by_sequential)):.3f}, target {AGREEMENT}); of the {len(by_exact)} that "
            f"exact mode decides it finds {sum(by_exact)}"
        )
    kinds = ("pillar", "stumbling", "neutral", "undecided")
    for name, sweep in (("exact", exact), ("sequential", sequential)):
        counts = [sum(own.verdict == kind for own in sweep.knockouts) for kind in kinds]
        console.print(f"{name}: " + ", ".join(f"{count} {kind}" for count, kind in zip(counts, kinds, strict=True)))


if __name__ == "__main__":
    main()
