"""Traces with top tokens, at random or with planted classes among decoys, and METHOD 10's links by a loop over rows."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from trace_oracle import random_trace, rescored, with_column, write_trace

from rocktokens.classes import TokenClasses
from rocktokens.rocks.sums import fixed_probability
from rocktokens.traces.schema import OPTIONAL_FIELDS, trace_table, validate_table, with_choice
from rocktokens.traces.store import TraceStore
from rocktokens.types import STANDARD_COLUMNS, Rollout, TokenScores

TOPS = ("student_top", "teacher_top")
TOP = {field.name: field.type for field in OPTIONAL_FIELDS}
K = 8
SIZES = (2, 3, 4, 5, 6)
PLANTED = [tuple(range(first, last)) for first, last in pairwise(np.cumsum([0, *SIZES]).tolist())]
"""Classes of two to six members."""
RARE, COMMON = 20, 21
"""Where the rare one is written the common one is likely, but not the other way round."""
GUEST = 22
"""Competes with the first member of the largest class, less than the others do, and with no other."""
DIGITS = range(30, 40)
"""Each has some mass where its neighbours are written, below the bar."""
FILLER = range(40, 60)
LOGPS = np.concatenate([-np.geomspace(1e-9, 60, 400), [0.0, 1e-7, -np.inf], np.log(np.arange(1, 40) / 40)])
CLASSES = TokenClasses([[1, 2], [3, 4]])

Distribution = dict[int, float]


def with_tops(table: pa.Table, seed: int, vocabulary: int, k: int = 4) -> pa.Table:
    """Random top tokens beside the rows of a trace; the written token is in some of the lists."""
    rng = np.random.default_rng(seed)
    for name in TOPS:
        ids = np.argsort(rng.random((table.num_rows, vocabulary)), axis=1)[:, :k]
        logp = -np.sort(rng.exponential(1.5, ids.shape))
        rows = [
            [{"id": i, "logp": p} for i, p in zip(*row, strict=True)]
            for row in zip(ids.tolist(), logp.tolist(), strict=True)
        ]
        table = table.append_column(name, pa.array(rows, TOP[name]))
    return validate_table(table)


def random_tops(seed: int, vocabulary: int = 16) -> pa.Table:
    """A random trace with random top tokens."""
    return with_tops(random_trace(seed, vocabulary=vocabulary), seed, vocabulary)


def planted_trace(seed: int, rollouts: int = 60, length: int = 100) -> pa.Table:
    """One rollout per prompt; every position is a place of some class, decoy, digit or filler."""
    rng = np.random.default_rng(seed)
    written, tops = [], {name: ([], []) for name in TOPS}
    logps: dict[str, list[float]] = {"logp_student": [], "logp_teacher": []}
    for _ in range(rollouts * length):
        p, q = _place(rng)
        token = int(rng.choice(list(p), p=np.array(list(p.values())) / sum(p.values())))
        written.append(token)
        for name, logp, own in zip(TOPS, logps.values(), (p, q), strict=True):
            likeliest = sorted(own, key=lambda v: -own[v])[:K]
            tops[name][0].append(likeliest)
            tops[name][1].append([np.log(own[v]) for v in likeliest])
            logp.append(float(np.log(own[token])))
    tokens = np.array(written, np.int32).reshape(rollouts, length)
    scores = {name: rng.exponential(0.1, len(written)).astype(np.float32) for name in STANDARD_COLUMNS}
    scores |= {name: np.array(values, np.float32) for name, values in logps.items()}
    arrays = {name: (np.array(ids, np.int32), np.array(logp, np.float32)) for name, (ids, logp) in tops.items()}
    return trace_table([_rollout(i, ids) for i, ids in enumerate(tokens)], TokenScores(**scores), tops=arrays)


def rolled_tops(table: pa.Table) -> pa.Table:
    """The same trace with top tokens that are off by one row."""
    order = np.roll(np.arange(table.num_rows), 1)
    for name in TOPS:
        table = with_column(table, name, table[name].take(pa.array(order)).combine_chunks())
    return table


def naive_links(
    table: pa.Table, share: float = 0.1, min_freq: int = 2, min_prompts: int = 5
) -> dict[tuple[int, int], float]:
    """Links of METHOD 10, row by row in float64."""
    own: dict[int, float] = {}
    mass: dict[tuple[int, int], float] = {}
    prompts: dict[int, list[str]] = {}
    for row in table.to_pylist():
        if row["kl"] is None:
            continue
        a = row["token_id"]
        prompts.setdefault(a, []).append(row["prompt_id"])
        own[a] = own.get(a, 0.0) + np.exp(row["logp_student"]) + np.exp(row["logp_teacher"])
        for entry in [*row["student_top"], *row["teacher_top"]]:
            mass[a, entry["id"]] = mass.get((a, entry["id"]), 0.0) + np.exp(entry["logp"])
    often = {a for a in own if len(prompts[a]) >= min_freq and len(set(prompts[a])) >= min_prompts}
    m = {(a, b): mass.get((a, b), 0.0) / own[a] for a in often for b in often if a != b}
    return {(a, b): min(m[a, b], m[b, a]) for a, b in m if a < b and min(m[a, b], m[b, a]) >= share}


def _rollout(number: int, token_ids: np.ndarray) -> Rollout:
    nothing = np.zeros(0, np.int32)
    return Rollout(number, f"p{number}", 0, nothing, token_ids, np.zeros(len(token_ids), np.float32), 0, True)


def _place(rng: np.random.Generator) -> tuple[Distribution, Distribution]:
    """What the student and the teacher expect at one place."""
    kind = rng.random()
    if kind < 0.5:
        return _choice(rng, PLANTED[rng.integers(len(PLANTED))])
    if kind < 0.6:
        both = {RARE: 0.3, COMMON: 0.6} if rng.random() < 0.2 else {COMMON: 0.9}
        return _noisy(rng, both), _noisy(rng, both)
    if kind < 0.604:
        pair = {GUEST: 0.45, PLANTED[-1][0]: 0.45}
        return _noisy(rng, pair), _noisy(rng, pair)
    if kind < 0.9:
        digit = int(rng.choice(DIGITS))
        near = {digit: 0.85, **{other: 0.02 for other in (digit - 1, digit + 1) if other in DIGITS}}
        return _noisy(rng, near), _noisy(rng, near)
    alone = {int(rng.choice(FILLER)): 0.9}
    return _noisy(rng, alone), _noisy(rng, alone)


def _choice(rng: np.random.Generator, members: tuple[int, ...]) -> tuple[Distribution, Distribution]:
    """The student guesses which member comes; the teacher is nearly sure."""
    student = dict(zip(members, 0.9 * rng.dirichlet(np.full(len(members), 4.0)), strict=True))
    sure = members[rng.integers(len(members))]
    teacher = {member: 0.8 if member == sure else 0.1 / (len(members) - 1) for member in members}
    return _noisy(rng, student), _noisy(rng, teacher)


def _noisy(rng: np.random.Generator, known: Mapping[int, float]) -> Distribution:
    """The rest of the mass is spread over fillers."""
    others = [v for v in FILLER if v not in known]
    spread = (1 - sum(known.values())) * rng.dirichlet(np.ones(len(others)))
    return {**known, **dict(zip(others, spread.tolist(), strict=True))}


def probability_trace(run: Path) -> Path:
    """Write one with the log-probabilities of ``LOGPS``, and some that are not known."""
    table = random_trace(3, prompts=60)
    logp = np.resize(LOGPS, table.num_rows).astype(np.float32)
    return write_trace(run, {0: with_column(table, "logp_student", pa.array(logp, mask=logp == 0))})


def probabilities(store: TraceStore) -> pa.Table:
    """Every row's fixed-point probability, in order."""
    rows = store.table(0)
    keys = ("rollout_id", "position", "logp_student")
    return rows.select(*keys, p=fixed_probability(rows.logp_student)).order_by("rollout_id", "position").to_pyarrow()


def split_trace(seed: int) -> dict[int, pa.Table]:
    """Two checkpoints; at the last, a share of every kl that depends on the token is choice."""
    now = random_trace(seed, prompts=40, vocabulary=9)
    before = rescored(now, seed + 1)
    kl = now["kl"].to_numpy(zero_copy_only=False)
    part = np.random.default_rng(seed).random(len(kl)) * (now["token_id"].to_numpy() % 3) / 2
    return {0: before, 8: with_choice(now, kl * part, CLASSES)}
