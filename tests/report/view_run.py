"""A run with everything the pages look at, made without a model: word problems answered right and wrong."""

import json
import random
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from knockout_records import CONDITIONS, SETTINGS, make_sweep
from replay_records import make_replay
from rocktokens.knockout.journal import Decoded, RunJournal
from rocktokens.knockout.records import Ban, BanChanges, Knockout
from rocktokens.rollouts.store import write_rollouts
from rocktokens.run_dir import RunDir, derive_seed
from rocktokens.tasks.wordmath import Wordmath, make_problem, write_solution
from rocktokens.traces.schema import trace_table
from rocktokens.traces.writer import TraceWriter
from rocktokens.types import STANDARD_COLUMNS, RockSet, RockToken, Rollout, TokenScores

TOKENIZER = resources.files("rocktokens.models.pebbles").joinpath("student/tokenizer.json").read_text(encoding="utf-8")
END = 1
CHECKPOINTS = (10, 20)
N_PROMPTS, SEED, TOP_K = 8, 3, 4
TASK = {"name": "wordmath", "split": "train", "max_steps": 4}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(TOKENIZER)


@cache
def probe_rollouts(seed_label: str = "probe prompts") -> list[Rollout]:
    """Every prompt answered twice: rightly with an even id, wrongly with an odd one."""
    seed, encode = derive_seed(SEED, seed_label), tokenizer().encode
    rollouts = []
    for index, prompt in enumerate(Wordmath(max_steps=4).prompts(N_PROMPTS, seed)):
        problem, rng = make_problem("train", seed, index), random.Random(index)
        right = write_solution(problem, "rich", "random", rng)
        for sample, text in enumerate((right, f"So, the answer is {problem.answer + 1}.")):
            ids = np.array([*encode(text).ids, END], np.int32)
            prompt_ids = np.array([2, *encode(prompt.text).ids, 3], np.int32)
            logprobs = np.zeros(len(ids), np.float32)
            rollouts.append(Rollout(2 * index + sample, prompt.id, sample, prompt_ids, ids, logprobs, 20, sample == 0))
    return rollouts


def scores(count: int, checkpoint: int) -> TokenScores:
    values = np.random.default_rng(checkpoint).exponential(1.0, (len(STANDARD_COLUMNS), count)).astype(np.float32)
    return TokenScores(**dict(zip(STANDARD_COLUMNS, values, strict=True)))


def tops(count: int, checkpoint: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(checkpoint + 1)
    return {
        name: (
            rng.integers(4, 300, (count, TOP_K)).astype(np.int32),
            -np.sort(rng.exponential(1.0, (count, TOP_K)).astype(np.float32), axis=1),
        )
        for name in ("student_top", "teacher_top")
    }


@cache
def rock_ids() -> list[int]:
    """So, a line break, and the digit 7."""
    vocabulary = tokenizer()
    return [vocabulary.encode(text).ids[0] for text in ("So", "\n", "7")]


def rock_set() -> RockSet:
    tokens = [
        RockToken(token_id, text, rank, 9, 1.5, 13.5, 0.5, 6.75, category, verdict="neutral", delta=0.0)
        for rank, (token_id, text, category) in enumerate(
            zip(rock_ids(), ("So", "\n", "7"), ("discourse", "markdown_whitespace", "digit"), strict=True), 1
        )
    ]
    return RockSet("", {"reference": 20, "baseline": 10}, {}, {"n_occurrences": 1}, tokens)


def write_traced(path: Path) -> RunDir:
    """Traces and the manifest, nothing else: no tokenizer, no rollouts."""
    run, rollouts = RunDir(path), probe_rollouts()
    count = sum(len(rollout.token_ids) for rollout in rollouts)
    for checkpoint in CHECKPOINTS:
        with TraceWriter(run, checkpoint=checkpoint) as writer:
            found = tops(count, checkpoint) if checkpoint == CHECKPOINTS[-1] else None
            writer.append(trace_table(rollouts, scores(count, checkpoint), tops=found))
    return run


def write_whole(path: Path) -> RunDir:
    """Traces, rollouts, tokenizer, record of the replay, rocks, a knock-out with its answers, and a log."""
    run = write_traced(path)
    with run.lock():
        run.commit_text("tokenizer/tokenizer.json", TOKENIZER)
        write_rollouts(run, f"rollouts/probe/checkpoint={CHECKPOINTS[-1]}.parquet", probe_rollouts())
        run.update_manifest(replay=make_replay(task=TASK, num_prompts=N_PROMPTS, seed=SEED).to_manifest())
        run.commit("rocks.json", rock_set().save)
        run.commit_text("config.toml", 'models = { student = "s", teacher = "t" }\n[training]\nmax_steps = 40\n')
        write_knockout(run)
    run.logs.write_text("".join(log_line(step, kl=1 / (step + 1)) for step in range(3)), encoding="utf-8")
    return run


def write_knockout(run: RunDir) -> None:
    """Banning "So" turns each even answer, which was right, into the odd one, and leaves the odd ones as they were."""
    ban = Ban((rock_ids()[0],), "So", category="discourse")
    free = probe_rollouts("evaluation prompts")
    holders = [place for place, rollout in enumerate(free) if ban.ids[0] in rollout.token_ids]
    conditions = replace(CONDITIONS, task=TASK, num_prompts=N_PROMPTS, seed=SEED)
    journal = RunJournal(run, conditions.digest)
    journal.keep_free(free)
    for place in holders:
        journal.add((ban.key, place), under_ban(free, place, ban.ids[0]))
    journal.flush()
    lost = [(free[place].prompt_id, 0) for place in holders if place % 2 == 0]
    changes = BanChanges(len(holders), len(holders), 0.0, 0.0, 1.0, 0.1, [], lost, [])
    result = Knockout(ban, -0.5, (-0.6, -0.4), 0.01, 0.02, "pillar", "pillar", 0.1, (-1.0, 1.0), 8, None, changes)
    sweep = make_sweep([result], settings=replace(SETTINGS, conditions=conditions))
    run.commit("knockout.json", sweep.save)


def under_ban(free: list[Rollout], place: int, banned: int) -> Decoded:
    """From the first banned token on, the wrong answer without its first word."""
    start = int(np.flatnonzero(free[place].token_ids == banned)[0])
    wrong = free[place - place % 2 + 1].token_ids[1:]
    return Decoded(start, wrong, finished=True)


def log_line(step: int, **values: Any) -> str:
    return json.dumps({"step": step, **values}) + "\n"
