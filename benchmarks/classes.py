"""How well candidate classes name the choices that the pebbles' task leaves open, and what finding them costs.

1. The truth is wordmath's own table of choices: heading, marker, delimiter, line break, closer, emphasis. Each option
   is written after the same words; the options stand for each other at the first token where they differ.
2. Precision and recall are those of pairs of types: candidates are pairs in one class, true are pairs of options.
3. The margin says how far the bar is from both sides: the weakest link of a true pair, the strongest of another pair.
4. The cost is measured on the run and, with ``--rows``, on a synthetic trace with the eight likeliest tokens of both
   models, in a process of its own.

``python benchmarks/classes.py runs/demo`` takes seconds, ``--rows 1e6`` some more.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path

from tokenizers import Tokenizer

from printing import machine, print_table, whole
from rocktokens.rocks.classes import candidate_links, find_classes
from rocktokens.tasks.wordmath import BREAKS, CLOSERS, DELIMITERS, EMPHASES, HEADINGS, MARKERS
from rocktokens.traces.store import TraceStore
from synthetic_trace import write_trace

PACKAGES = ("rocktokens", "duckdb", "pyarrow", "numpy")
CHOICES = {
    "heading": [heading.format(i=1) for heading in HEADINGS],
    "marker": [f"Step 1\n{marker}, " for marker in MARKERS],
    "delimiter": [f"So, {opening}12+30" for opening, _ in DELIMITERS],
    "line break": [f"=42$.{line_break}Thus" for line_break in BREAKS],
    "closer": [f"\n{closer}, the answer" for closer in CLOSERS],
    "emphasis": [f"the answer is ${emphasis.format(answer=42)}$." for emphasis in EMPHASES],
}
"""What may be written after the same words, by choice."""
FAINT = 0.001
"""Links down to this strength are looked at to see the margin."""
TOP_K = 8
Pairs = set[tuple[int, int]]


def main() -> None:
    """Print what is found in a run, and what it costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=whole, default=0, help="of a synthetic trace, all at one checkpoint")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return print_cost(arguments.run, arguments.threads)
    print(machine(PACKAGES, arguments.threads))
    report(arguments.run, arguments.threads)
    if arguments.rows:
        with tempfile.TemporaryDirectory() as folder:
            write_trace(folder, 2 * arguments.rows, TOP_K)  # at two checkpoints, of which one is read
            report_cost(f"a synthetic trace of {arguments.rows:,} rows", folder, arguments.threads)
    return None


def report(run: Path, threads: int) -> None:
    """Compare the classes of a run with the choices of its task."""
    store = TraceStore(run, threads=threads)
    tokenizer = Tokenizer.from_file(str(run / "tokenizer" / "tokenizer.json"))
    options = {name: options_of(tokenizer, texts) for name, texts in CHOICES.items()}
    true = {pair for ids in options.values() for pair in combinations(ids, 2)}
    classes = find_classes(store)
    found = {pair for ids in classes.groups for pair in combinations(ids, 2)}
    print(f"\n# {run}: checkpoint {classes.criterion['reference']}, {classes.source['n_prompts']} prompts\n")
    header = ("choice", "options", "pairs found", "in one class")
    print_table(header, [row(store, name, ids, found, classes.groups) for name, ids in options.items()])
    precision, recall = (len(found & true) / max(len(pairs), 1) for pairs in (found, true))
    print(f"of pairs: precision {precision:.3f}, recall {recall:.3f}")
    report_margin(store, true)
    report_cost(str(run), run, threads)


def options_of(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    """Return the tokens by which texts differ first, ascending."""
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return next(sorted(set(ids)) for ids in zip(*encoded, strict=False) if len(set(ids)) == len(texts))


def row(store: TraceStore, name: str, ids: list[int], found: Pairs, groups: list[tuple[int, ...]]) -> tuple[str, ...]:
    """Say how much of one choice was found."""
    pairs = set(combinations(ids, 2))
    texts = " ".join(f"`{text!r}`" for text in store.token_texts(ids))
    return name, texts, f"{len(pairs & found)} of {len(pairs)}", "yes" if tuple(ids) in groups else "no"


def report_margin(store: TraceStore, true: Pairs) -> None:
    """Name the weakest true pair and the strongest other one."""
    links = candidate_links(find_classes(store, share=FAINT))
    ends = {"weakest of a true pair": min(true, key=lambda pair: links.get(pair, 0.0))}
    if others := links.keys() - true:
        ends["strongest of another pair"] = max(others, key=lambda pair: links[pair])
    for name, pair in ends.items():
        print(f"{name}: {links.get(pair, 0.0):.3f}, {' and '.join(map(repr, store.token_texts(pair)))}")


def report_cost(name: str, run: str | Path, threads: int) -> None:
    """Find the classes in a process of its own."""
    command = [sys.executable, __file__, str(run), "--threads", str(threads), "--child"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    print(f"{name}: {done.stdout}", end="", flush=True)


def print_cost(run: Path, threads: int) -> None:
    """Find the classes and say what that took in this process."""
    began, cpu = time.perf_counter(), time.process_time()
    number = len(find_classes(TraceStore(run, threads=threads)))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    unit = 1 if sys.platform == "darwin" else 1 << 10
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / (1 << 20)
    print(f"{seconds:.1f} s, {cpu:.1f} CPU s, peak {mib:,.0f} MiB, {number} classes")


if __name__ == "__main__":
    main()
