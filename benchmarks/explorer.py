"""How fast the explorer is on a run of a million tokens: seconds to the first paint, milliseconds to the answer.

1. A run is written: worked solutions of wordmath problems, one in four of another problem and so wrong, tokenised as
   the embedded student does, scored at two checkpoints with random numbers and the likeliest tokens of both models, and
   its rocks found.
2. The explorer starts as a process of its own, and headless Chromium opens its link at once: what was read ahead by
   then, and what was not, is part of the time.
   The same is done with as many tokens in a thousand parts, which is how a long run, or one on a slow disk, looks.
3. In the page, every action is timed from the event to the frame after its result is there. What is typed includes the
   rest of 120 ms that the explorer waits for more.

Explorer, browser and this script share two cores. ``python benchmarks/explorer.py`` takes little more than a minute
and 200 MB of disk.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, Page, sync_playwright
from tokenizers import Tokenizer

from printing import machine, print_table, whole
from rocktokens.knockout.records import (
    Ban,
    BanChanges,
    DetectableLoss,
    EngineNoise,
    FreeAnswers,
    Knockout,
    KnockoutSettings,
    KnockoutSweep,
    SweepCost,
    VerdictCounts,
)
from rocktokens.models import pebbles
from rocktokens.rocks.find import find_rocks
from rocktokens.rollouts.store import write_rollouts
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.tasks.wordmath import Problem, make_problem, write_solution
from rocktokens.traces.schema import trace_table
from rocktokens.traces.store import TraceStore
from rocktokens.traces.writer import TraceWriter
from rocktokens.types import ReplayRecord, RockSet, Rollout, TokenScores

PACKAGES = ("rocktokens", "starlette", "uvicorn", "duckdb", "numpy", "playwright")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
"""What people use goes first, then what ``make test`` installs."""
CORES = 2
CHECKPOINTS = (0, 100)
SEED, MAX_STEPS, TOP_K, ROCKS = 7, 4, 8, 50
ROLLOUTS_PER_PART = 2000
VOCABULARY = 1024
PAINT, ANSWER, MANY_PARTS_PAINT = 1500.0, 300.0, 2000.0
"""Milliseconds at most: for a page to be there, for an answer, and for the page of a run of many parts."""

FILTERS = {
    "with rocks": ("rock", "true"),
    "without rocks": ("rock", "false"),
    "correct": ("correct", "true"),
    "wrong": ("correct", "false"),
    "category": ("category", "digit"),
    "with banned types": ("banned", "true"),
    "order": ("sort", "-mean_kl"),
    "kl from (typed)": ("kl_low", "1.5"),
    "text (typed)": ("text", "therefore"),
}
"""What is done to which field of the form."""
FIRST_SEARCH = "wait"
REST = 200
"""Milliseconds between two actions."""
MOMENTS = {
    "first contentful paint": "performance.getEntriesByName('first-contentful-paint')[0].startTime",
    "rows listed": "listed",
    "rollout shown": "shown",
}
STOPWATCH = """
const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))));
window.firstSeen = (selector) => new Promise((done) => {
  const observer = new MutationObserver(() => {
    if (!document.querySelector(selector)) return;
    observer.disconnect();
    painted().then(done);
  });
  observer.observe(document, {childList: true, subtree: true});
});
window.listed = firstSeen(".row");
window.shown = firstSeen(".strip-token");

window.timed = (act, watched) => new Promise((done) => {
  const began = performance.now();
  const observer = new MutationObserver(() => {
    observer.disconnect();
    painted().then((now) => done(now - began));
  });
  observer.observe(document.querySelector(watched), {childList: true});
  act();
});
window.fill = (name, value) => timed(() => {
  const field = document.getElementById("filters").elements[name];
  field.value = value;
  field.dispatchEvent(new Event(field.matches("select") ? "change" : "input", {bubbles: true}));
}, ".list-inner");
window.openRow = (place) => timed(() => document.getElementById(`row-${place}`).click(), "#rollout");
window.scrollFar = async (share) => {
  const [list, began] = [document.getElementById("list"), performance.now()];
  list.scrollTop = share * list.scrollHeight;
  let now = began;
  do now = await painted(); while (!(list.querySelector(".row")?.ariaPosInSet > 100));
  list.scrollTop = 0;
  return now - began;
};
"""
"""Runs in the page before its own scripts: when things were first seen, and how long what is done takes to be seen."""

Times = dict[str, list[float]]
Top = tuple[np.ndarray, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=whole, default=10**6, help="response tokens, each scored at two checkpoints")
    parser.add_argument("--parts", type=whole, default=1000, help="trace parts of the run of many parts")
    parser.add_argument("--rounds", type=int, default=5, help="times that everything is tried, each in a new explorer")
    arguments = parser.parse_args()
    if CHROMIUM is None:
        print("The explorer is not measured: there is no Chromium.")
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    print(machine(PACKAGES, CORES), flush=True)
    with tempfile.TemporaryDirectory(prefix="rocktokens-explorer-") as folder, sync_playwright() as playwright:
        few, many = Path(folder, "few"), Path(folder, "many")
        print(write_run(few, arguments.tokens), end="\n\n", flush=True)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        report(opening(browser, few, arguments.rounds), PAINT, "from the start of the navigation")
        report(answering(browser, few, arguments.rounds), ANSWER, "from the event")
        print(write_run(many, arguments.tokens, arguments.parts), end="\n\n", flush=True)
        report(opening(browser, many, arguments.rounds), MANY_PARTS_PAINT, "from the start of the navigation")
        browser.close()
    print(f"load at the end: {os.getloadavg()[0]:.1f}")


def report(times: Times, at_most: float, since: str) -> None:
    print_table(
        (f"ms {since}", "median", "worst", f"at most {at_most:.0f}"),
        [
            (name, f"{statistics.median(own):.0f}", f"{max(own):.0f}", _verdict(statistics.median(own), at_most))
            for name, own in times.items()
        ],
    )


# What is timed


def opening(browser: Browser, run: Path, starts: int) -> Times:
    """A new explorer each time, whose page is opened as soon as it prints its link."""
    times: Times = defaultdict(list)
    for _ in range(starts):
        with explorer(run) as url, opened(browser, url) as page:
            for name, moment in MOMENTS.items():
                times[name].append(page.evaluate(moment))
    return times


def answering(browser: Browser, run: Path, rounds: int) -> Times:
    """The first search of a page just opened, then every filter in turn, a rollout opened, and a far scroll."""
    times: Times = defaultdict(list)
    for number in range(rounds):
        with explorer(run) as url, opened(browser, url) as page:
            times["first search (typed)"].append(_fill(page, "text", FIRST_SEARCH))
            _fill(page, "text", "")
            for name, (field, value) in FILTERS.items():
                times[name].append(_fill(page, field, value))
                _fill(page, field, page.evaluate("field => Explorer.DEFAULTS[field]", field))
            times["open a rollout"].append(page.evaluate("openRow(2)"))
            times["scroll far"].append(page.evaluate("scrollFar", (number + 1) / (rounds + 1)))
    return times


def _fill(page: Page, field: str, value: str) -> float:
    """Milliseconds to the list; then a rest, in which its first rollout is shown."""
    milliseconds = page.evaluate("([field, value]) => fill(field, value)", [field, value])
    page.wait_for_timeout(REST)
    return milliseconds


@contextmanager
def explorer(run: Path) -> Iterator[str]:
    """The link of an explorer that was just started."""
    command = [sys.executable, "-m", "rocktokens.cli.main", "explore", str(run), "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    """The page, when a rollout is shown; a new context each time, so that nothing is cached."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.add_init_script(STOPWATCH)
    page = context.new_page()
    page.goto(url)
    page.evaluate("shown")
    yield page
    context.close()


def _verdict(milliseconds: float, at_most: float) -> str:
    return "met" if milliseconds <= at_most else "missed"


# The run


def write_run(path: Path, n_tokens: int, n_parts: int | None = None) -> str:
    """Write a run with about this many response tokens and trace parts; what was written, in words."""
    run, tokenizer = RunDir(path), Tokenizer.from_file(str(pebbles.directory("student") / "tokenizer.json"))
    rollouts = _rollouts(tokenizer, n_tokens)
    size = ROLLOUTS_PER_PART if n_parts is None else max(1, len(rollouts) * len(CHECKPOINTS) // n_parts)
    for checkpoint in CHECKPOINTS:
        with TraceWriter(run, checkpoint=checkpoint) as writer:
            rng = np.random.default_rng([SEED, checkpoint])
            for first in range(0, len(rollouts), size):
                some = rollouts[first : first + size]
                writer.append(trace_table(some, *_scored(some, rng)))
                writer.flush()
    run.commit("tokenizer/tokenizer.json", lambda file: tokenizer.save(str(file)))
    task = {"name": "wordmath", "split": "train", "max_steps": MAX_STEPS}
    with run.lock():
        write_rollouts(run, f"rollouts/probe/checkpoint={CHECKPOINTS[-1]}.parquet", rollouts)
        run.update_manifest(replay=_replay(task, len(rollouts)).to_manifest())
        rocks = find_rocks(TraceStore(run), k=ROCKS, stage="score")
        run.commit("rocks.json", rocks.save)
        run.commit("knockout.json", _knockouts(rocks).save)
    rows = len(CHECKPOINTS) * sum(len(own.token_ids) for own in rollouts)
    parts = len(run.files("traces/"))
    return f"{len(rollouts):,} rollouts, {rows:,} rows in {parts:,} parts at {len(CHECKPOINTS)} checkpoints"


def _rollouts(tokenizer: Tokenizer, n_tokens: int) -> list[Rollout]:
    rollouts: list[Rollout] = []
    left = n_tokens
    while left > 0:
        rollouts.append(_rollout(tokenizer, len(rollouts)))
        left -= len(rollouts[-1].token_ids)
    return rollouts


def _rollout(tokenizer: Tokenizer, number: int) -> Rollout:
    """A problem and its solution; every fourth time the solution of another problem."""
    problem, rng = _problem(number), random.Random(number)
    solved = _problem(number + 1) if number % 4 == 3 else problem
    solution = write_solution(solved, "rich", "random", rng)
    prompt_ids, token_ids = (np.array(tokenizer.encode(text).ids, np.int32) for text in (problem.text, solution))
    logprobs = np.full(len(token_ids), -1, np.float32)
    return Rollout(number, problem.id, 0, prompt_ids, token_ids, logprobs, CHECKPOINTS[-1], finished=True)


def _problem(number: int) -> Problem:
    """Of the prompts that the run says it was replayed on."""
    return make_problem("train", derive_seed(SEED, "probe prompts"), number, MAX_STEPS)


def _scored(rollouts: list[Rollout], rng: np.random.Generator) -> tuple[TokenScores, None, dict[str, Top]]:
    """Scores, no weights, and tops: the token itself, and its neighbours in the vocabulary."""
    token_ids_T = np.concatenate([own.token_ids for own in rollouts])
    columns = rng.gamma(0.5, 0.5, (6, len(token_ids_T))).astype(np.float32)
    columns[0] *= np.where(token_ids_T % 10 == 3, 4, 1)
    scores = TokenScores(columns[0], -columns[1], -columns[2], *columns[3:])
    ids_TK = (token_ids_T[:, None] + np.arange(TOP_K, dtype=np.int32)) % VOCABULARY
    logp_TK = -np.cumsum(rng.gamma(1.0, 1.0, ids_TK.shape), axis=1).astype(np.float32)
    return scores, None, dict.fromkeys(("student_top", "teacher_top"), (ids_TK, logp_TK))


def _replay(task: dict[str, Any], n_prompts: int) -> ReplayRecord:
    """What ``rocktokens trace`` would have recorded, as far as it matters for grading answers."""
    students: dict[int, str] = dict.fromkeys(CHECKPOINTS, "")
    return ReplayRecord(
        students, "last", n_prompts, 1, ROLLOUTS_PER_PART, "", "float32", SEED, task, {}, {}, top_k=TOP_K
    )


def _knockouts(rocks: RockSet) -> KnockoutSweep:
    """A record of bans that changed nothing, for the filter on banned types."""
    nothing, none = (0.0, 0.0), VerdictCounts(method={}, paper={}, corrected=None)
    changes = BanChanges(0, 0, None, None, None, None, [], [], [])
    bans = [Ban((own.id,), own.text, "tested", own.category) for own in rocks.tokens[::2]]
    return KnockoutSweep(
        tokenizer_sha256="",
        settings=KnockoutSettings(
            n_prompts=1,
            task="wordmath",
            temperature=1.0,
            max_new_tokens=160,
            seed=SEED,
            num_samples=1,
            mode="exact",
            matched=0,
            never=0,
            tolerance=0.25,
            alpha=0.05,
            epsilon=0.01,
            margin=0.03,
        ),
        baseline=FreeAnswers(0.75, nothing, n_prompts=1, num_samples=1, mean_length=60.0, truncated_share=0.0),
        noise=EngineNoise(rollouts=0, tokens=0, differing=0, flips=0, delta=0.0, interval=nothing),
        cost=SweepCost(0, 0, 0, 0, 0, 0.0),
        counts={"tested": none, "matched": none, "never": none},
        detectable=DetectableLoss(single=0.1, corrected=0.1),
        correlations=[],
        warnings=[],
        knockouts=[
            Knockout(ban, 0.0, nothing, 1.0, 1.0, "neutral", "neutral", 0.1, nothing, 1, None, changes) for ban in bans
        ],
    )


if __name__ == "__main__":
    main()
