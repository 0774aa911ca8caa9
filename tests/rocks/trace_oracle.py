"""Random traces, and the naive statistics of them: METHOD 4 in loops over rows, with whole numbers and fractions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rocktokens.config import ETA, GAMMA
from rocktokens.traces.schema import validate_table
from rocktokens.traces.writer import TraceWriter

ANY = {"require": "any", "min_prompts": 1}
"""Every type may be ranked, as by the paper's code: what the default leaves out has tests of its own (test_ranking)."""
CONTEXT = {"stage": "context", **ANY}


def random_trace(seed: int, prompts: int = 12, samples: int = 2, vocabulary: int = 9, length: int = 30) -> pa.Table:
    """Rollouts of varying length, an uneven vocabulary, and a tenth of the rows unscored."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length, size=prompts * samples)
    rows = int(lengths.sum())
    rollout = np.repeat(np.arange(len(lengths)), lengths)
    return _table(rng, rollout, lengths, samples, rng.integers(0, vocabulary, rows) * rng.integers(0, 2, rows), 0.1)


def rescored(table: pa.Table, seed: int) -> pa.Table:
    """The same occurrences as another checkpoint scores them."""
    rng = np.random.default_rng(seed)
    kl = rng.exponential(0.5, table.num_rows)
    return with_column(table, "kl", pa.array(kl, pa.float32(), mask=table["kl"].is_null().to_numpy()))


def with_levels(table: pa.Table, seed: int, levels: list[float]) -> pa.Table:
    """The same occurrences with a kl out of a few values, so that scores tie and quantiles are reached."""
    kl = np.random.default_rng(seed).choice(levels, table.num_rows)
    return with_column(table, "kl", pa.array(kl, pa.float32(), mask=table["kl"].is_null().to_numpy()))


def shuffled(table: pa.Table, seed: int) -> pa.Table:
    """The same rows in another order."""
    return table.take(np.random.default_rng(seed).permutation(table.num_rows))


def random_embeddings(seed: int, vocabulary: int, width: int = 4) -> np.ndarray:
    """Normal float32 (V, D); a small width spreads the cosines."""
    return np.random.default_rng([seed, vocabulary]).standard_normal((vocabulary, width)).astype(np.float32)


def large_trace(seed: int, rollouts: int = 4000, length: int = 100) -> pa.Table:
    """400,000 rows: several of the 122,880-row groups that DuckDB hands to its threads."""
    rng = np.random.default_rng(seed)
    rollout = np.repeat(np.arange(rollouts), length)
    tokens = np.minimum(rng.zipf(1.3, rollouts * length), 5000)
    return _table(rng, rollout, np.full(rollouts, length), 2, tokens, 0.0)


def token_trace(sequences: list[list[int]], seed: int = 0) -> pa.Table:
    """Rollouts of exactly these tokens, a third of them unscored."""
    lengths = np.array([len(tokens) for tokens in sequences])
    rollout = np.repeat(np.arange(len(sequences)), lengths)
    return _table(np.random.default_rng(seed), rollout, lengths, 1, np.concatenate(sequences), 0.3)


def _table(
    rng: np.random.Generator,
    rollout: np.ndarray,
    lengths: np.ndarray,
    samples: int,
    tokens: np.ndarray,
    unscored: float,
) -> pa.Table:
    rows = len(rollout)
    missing = rng.random(rows) < unscored
    score = {name: rng.exponential(1.0, rows) for name in ("kl", "entropy_student", "entropy_teacher", "grad_norm")}
    score |= {name: -rng.exponential(1.0, rows) for name in ("logp_student", "logp_teacher")}
    columns = {
        "rollout_id": pa.array(rollout, pa.int64()),
        "prompt_id": pa.array([f"p{index // samples}" for index in rollout]),
        "position": pa.array(np.concatenate([np.arange(length) for length in lengths]), pa.int32()),
        "token_id": pa.array(tokens, pa.int32()),
        **{name: pa.array(values, pa.float32(), mask=missing) for name, values in score.items()},
        "policy_step": pa.array(np.zeros(rows), pa.int32()),
        "weight": pa.array(np.ones(rows), pa.float32()),
    }
    return validate_table(pa.table(columns))


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    """The table with other values in one column."""
    field = table.schema.field(name)
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))


def with_kl(table: pa.Table, kl: np.ndarray) -> pa.Table:
    """The table with another kl; NaN stands for a token that was not scored."""
    return with_column(table, "kl", pa.array(kl, pa.float32(), mask=np.isnan(kl)))


def write_trace(run: Path, tables: dict[int, pa.Table], rows_per_part: int = 1_000_000) -> Path:
    """A run whose replay traces are the given tables by checkpoint."""
    for checkpoint, table in tables.items():
        with TraceWriter(run, checkpoint=checkpoint, rows_per_part=rows_per_part) as writer:
            writer.append(table)
    return run


def fixed(value: float) -> int:
    """One score as the int64 that is summed."""
    return int(np.floor(float(np.float32(value)) * 2**24 + 0.5))


def occurrences_of(table: pa.Table, prompts: set[str] | None = None) -> list[dict]:
    """Scored rows, one dict each."""
    return [
        row for row in table.to_pylist() if row["kl"] is not None and (prompts is None or row["prompt_id"] in prompts)
    ]


def summed(rows: list[dict], column: str = "kl") -> dict[int, int]:
    """Fixed-point sum by type."""
    sums: dict[int, int] = {}
    for row in rows:
        sums[row["token_id"]] = sums.get(row["token_id"], 0) + fixed(row[column])
    return sums


def counted(rows: list[dict]) -> dict[int, int]:
    """Occurrences by type."""
    counts: dict[int, int] = {}
    for row in rows:
        counts[row["token_id"]] = counts.get(row["token_id"], 0) + 1
    return counts


def rollouts_of(rows: list[dict]) -> dict[int, list[dict]]:
    """Rows by rollout, in order of rollout id."""
    found: dict[int, list[dict]] = {}
    for row in sorted(rows, key=lambda row: (row["rollout_id"], row["position"])):
        found.setdefault(row["rollout_id"], []).append(row)
    return found


# The search of METHOD 4

Place = tuple[int, int]
"""Rollout and position."""


@dataclass(frozen=True)
class NaiveSearch:
    """What METHOD 4 says of a trace before anything is cut off; scores are exact."""

    selection: list[str]
    measuring: list[str]
    """All prompts again when they are not split."""
    rows: list[dict]
    """Occurrences of the selection half at the reference."""
    rows_before: list[dict]
    freq: dict[int, int]
    score: dict[int, Fraction]
    """R(v), or the smaller of the two."""
    thresholds: tuple[float, float]
    persistent: dict[int, list[Place]]
    windows: dict[Place, list[int]]
    """−1 where the response has no token."""
    similar: dict[int, dict[Place, int]]
    """By type: how many other persistent occurrences have a similar context."""
    kept: dict[int, list[Place]]
    ranks_by: dict[int, Fraction]
    """R(v) or R_ctx(v)."""
    ranking: list[int]
    """All types that may be ranked, best first."""
    least_doubt: float
    """How close a cosine comes to gamma: below 1e-9 an oracle in floats cannot say which side it is on."""

    def ccr(self, token_id: int) -> Fraction:
        return Fraction(len(self.kept.get(token_id, [])), self.freq[token_id])


def naive_search(
    tables: dict[int, pa.Table],
    embeddings: np.ndarray,
    reference: int | None = None,
    baseline: int | None = None,
    stage: str = "context",
    min_freq: int = 2,
    exclude_top_freq: int = 0,
    joint: bool = False,
    window: int = 5,
    tau: float = 0.8,
    gamma: float = GAMMA,
    eta: float = ETA,
    split: float | None = 0.5,
    seed: int = 0,
    tau_nats: tuple[float, float] | None = None,
    min_score: float | None = 0.0,
    require: str = "any",
    min_prompts: int = 1,
) -> NaiveSearch:
    """Rank by score or contexts as METHOD 4 does, every type allowed; parameters as ``find_rocks`` has them."""
    assert (require, min_prompts) == ("any", 1), "NaiveMovement in test_ranking has the rest"
    reference = max(tables) if reference is None else reference
    baseline = min(tables) if baseline is None else baseline
    selection, measuring = naive_split(tables[reference], split, seed)
    now, before = (occurrences_of(tables[step], set(selection)) for step in (reference, baseline))
    freq, score = counted(now), naive_score(now, before if joint else None)
    pre, post = tau_nats or tuple(naive_quantile(rows, tau) for rows in (before, now))
    persistent = naive_persistent(now, before, pre, post)
    windows = naive_windows(tables[reference], [place for places in persistent.values() for place in places], window)
    similar, least_doubt = _similar_contexts(persistent, windows, embeddings, gamma)
    kept = {v: [place for place in counts if counts[place] / (len(counts) - 1) >= eta] for v, counts in similar.items()}
    ranks_by = score if stage == "score" else naive_context_score(now, score, kept)
    return NaiveSearch(
        selection=selection,
        measuring=measuring,
        rows=now,
        rows_before=before,
        freq=freq,
        score=score,
        thresholds=(pre, post),
        persistent=persistent,
        windows=windows,
        similar=similar,
        kept=kept,
        ranks_by=ranks_by,
        ranking=naive_ranking(ranks_by, freq, min_freq, exclude_top_freq, min_score),
        least_doubt=least_doubt,
    )


def naive_score(now: list[dict], before: list[dict] | None = None) -> dict[int, Fraction]:
    """R(v) over some occurrences, or the smaller of that and R(v) at the baseline."""
    score = {v: Fraction(total, 2**24) for v, total in summed(now).items()}
    if before is None:
        return score
    return {v: min(score[v], Fraction(summed(before).get(v, 0), 2**24)) for v in score}


def naive_context_score(
    now: list[dict], score: dict[int, Fraction], kept: dict[int, list[Place]]
) -> dict[int, Fraction]:
    """R_ctx(v) over some occurrences, of which those at the given places were kept."""
    freq = counted(now)
    places = {place for some in kept.values() for place in some}
    number = counted([row for row in now if (row["rollout_id"], row["position"]) in places])
    return {v: score[v] * Fraction(number.get(v, 0), freq[v]) for v in score}


def naive_split(table: pa.Table, split: float | None, seed: int) -> tuple[list[str], list[str]]:
    """The prompts that select and the prompts that measure, each sorted."""
    prompts = sorted({row["prompt_id"] for row in occurrences_of(table)})
    if split is None or split == 1:
        return prompts, prompts
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(prompts))
    cut = min(max(int(split * len(prompts) + 0.5), 1), len(prompts) - 1)
    first, second = ({prompts[index] for index in half} for half in (order[:cut], order[cut:]))
    return sorted(first), sorted(second)


def naive_quantile(rows: list[dict], share: float) -> float:
    return float(np.quantile(np.array([row["kl"] for row in rows], dtype=np.float64), share))


def naive_persistent(now: list[dict], before: list[dict], pre: float, post: float) -> dict[int, list[Place]]:
    """Places of the occurrences that were hard at both checkpoints, by type."""
    was_hard = {(row["rollout_id"], row["position"]) for row in before if row["kl"] >= pre}
    found: dict[int, list[Place]] = {}
    for row in now:
        place = row["rollout_id"], row["position"]
        if row["kl"] >= post and place in was_hard:
            found.setdefault(row["token_id"], []).append(place)
    return {v: sorted(places) for v, places in found.items()}


def naive_windows(table: pa.Table, places: list[Place], window: int) -> dict[Place, list[int]]:
    """The tokens around each place, scored or not, without its own."""
    token_at = {(row["rollout_id"], row["position"]): row["token_id"] for row in table.to_pylist()}
    offsets = [offset for offset in range(-window, window + 1) if offset]
    return {(r, t): [token_at.get((r, t + offset), -1) for offset in offsets] for r, t in places}


def naive_vector(tokens: list[int], embeddings: np.ndarray) -> np.ndarray:
    """The mean embedding of the tokens there are, at length 1, in float64; 0 where there are none."""
    known = [embeddings[token].astype(np.float64) for token in tokens if token >= 0]
    mean = np.mean(known, axis=0) if known else np.zeros(embeddings.shape[1])
    return mean / np.linalg.norm(mean) if mean.any() else mean


def naive_ranking(
    score: dict[int, Any],
    freq: dict[int, int],
    min_freq: int = 2,
    exclude_top_freq: int = 0,
    min_score: float | None = 0.0,
) -> list[int]:
    """Types that may be ranked, best first, ties by id; with ``min_score`` None, those from 0."""
    frequent = sorted(freq, key=lambda v: (-freq[v], v))[:exclude_top_freq]
    ranked = [v for v in freq if freq[v] >= min_freq and v not in frequent]
    return sorted((v for v in ranked if score[v] >= (min_score or 0)), key=lambda v: (-score[v], v))


def naive_coverage(ranking: list[int], rows: list[dict]) -> Iterator[float]:
    """The share of the kl of all rows in the first K types, for K = 1, 2, …; NaN of no kl."""
    sums = summed(rows)
    total = sum(sums.values())
    for k in range(1, len(ranking) + 1):
        yield float(Fraction(sum(sums.get(v, 0) for v in ranking[:k]), total)) if total else math.nan


def _similar_contexts(
    persistent: dict[int, list[Place]], windows: dict[Place, list[int]], embeddings: np.ndarray, gamma: float
) -> tuple[dict[int, dict[Place, int]], float]:
    """Similar contexts of every persistent occurrence of a type that has two, and the least distance to gamma."""
    similar, least_doubt = {}, np.inf
    for v, places in persistent.items():
        if len(places) < 2:
            continue
        vectors = {place: naive_vector(windows[place], embeddings) for place in places}
        similar[v] = dict.fromkeys(places, 0)
        for one, two in combinations(places, 2):
            cosine = float(np.dot(vectors[one], vectors[two]))
            least_doubt = min(least_doubt, abs(cosine - gamma))
            if cosine >= gamma:
                similar[v][one] += 1
                similar[v][two] += 1
    return similar, least_doubt
