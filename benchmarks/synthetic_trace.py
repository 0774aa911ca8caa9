"""Traces of any size whose statistics look like those of a distilled student, to measure costs on.

1. Two checkpoints scored the same rollouts of 500 tokens, one rollout a prompt.
2. Tokens follow Zipf's law over 32,000 types. Half of the text is drawn token by token, half comes from a book of 1,000
   phrases, themselves by Zipf's law: some types stand in the same contexts again and again, most do not.
3. The kl of most tokens is near 0. A tenth of the types are hard at three of four occurrences, at both checkpoints
   alike; the others at one of five, and training takes most of that away.
4. With ``top_k``, both models have likeliest tokens: the written one, its twin (2n and 2n + 1 are twins), and others by
   Zipf's law.

Part by part, so that memory does not grow with the rows. What ``find`` does not read is noise, which does not compress:
the parts are as large as those of a run.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from rocktokens.traces.writer import TraceWriter

SEED = 7
TYPES = 32_000
ZIPF = 1.1
LENGTH = 500
PHRASE = 25
PHRASES = 1000
ROLLOUTS_PER_PART = 2000
CHECKPOINTS = (0, 100)
UNREAD = ("logp_student", "logp_teacher", "entropy_student", "entropy_teacher")


def write_trace(folder: str | Path, rows: int, top_k: int = 0) -> None:
    """Write a run of about so many rows, both checkpoints together."""
    rollouts = max(rows // (len(CHECKPOINTS) * LENGTH), 2)
    for checkpoint in CHECKPOINTS:
        with TraceWriter(folder, checkpoint=checkpoint) as writer:
            for first in range(0, rollouts, ROLLOUTS_PER_PART):
                writer.append(_part(first, min(ROLLOUTS_PER_PART, rollouts - first), checkpoint, top_k))


def _part(first: int, rollouts: int, checkpoint: int, top_k: int) -> pa.Table:
    """The rows of consecutive rollouts."""
    text, noise = np.random.default_rng([SEED, first]), np.random.default_rng([SEED, first, checkpoint])
    count = rollouts * LENGTH
    token_ids = tokens(text, count)
    kl = _kl(token_ids, text, noise, trained=checkpoint == CHECKPOINTS[-1])
    prompts = pa.array([f"prompt-{number}" for number in range(first, first + rollouts)])
    of_rollout = np.repeat(np.arange(rollouts, dtype=np.int32), LENGTH)
    tops = {name: _tops(token_ids, noise, top_k) for name in ("student_top", "teacher_top") if top_k}
    return pa.table(
        {
            "rollout_id": first + of_rollout.astype(np.int64),
            "prompt_id": pa.DictionaryArray.from_arrays(pa.array(of_rollout), prompts),
            "position": np.tile(np.arange(LENGTH, dtype=np.int32), rollouts),
            "token_id": token_ids,
            "kl": kl.astype(np.float32),
            **{name: -noise.standard_exponential(count, dtype=np.float32) for name in UNREAD},
            "grad_norm": (kl / 2).astype(np.float32),
            "policy_step": np.zeros(count, dtype=np.int32),
            "weight": np.ones(count, dtype=np.float32),
            **tops,
        }
    )


def _tops(token_ids: np.ndarray, rng: np.random.Generator, top_k: int) -> pa.Array:
    """Ids and log-probabilities of ``top_k`` tokens beside every written one."""
    ids_TK = _zipf(rng, TYPES, (len(token_ids), top_k))
    ids_TK[:, :2] = np.stack([token_ids, token_ids ^ 1], axis=1)[:, :top_k]
    logp_TK = -np.sort(rng.exponential(2.0, ids_TK.shape).astype(np.float32))
    entries = pa.StructArray.from_arrays([ids_TK.ravel(), logp_TK.ravel()], names=["id", "logp"])
    return pa.ListArray.from_arrays(np.arange(len(ids_TK) + 1, dtype=np.int32) * top_k, entries)


def tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    """int32 (count,): runs of ``PHRASE`` tokens, drawn one by one or from the book."""
    book = _zipf(np.random.default_rng(SEED), TYPES, (PHRASES, PHRASE))
    runs = _zipf(rng, TYPES, (count // PHRASE, PHRASE))
    quoted = rng.random(len(runs)) < 0.5
    runs[quoted] = book[_zipf(rng, PHRASES, (int(quoted.sum()),))]
    return runs.ravel()


def _zipf(rng: np.random.Generator, types: int, shape: tuple[int, ...]) -> np.ndarray:
    """int32: ranks 0 … types − 1 with probabilities proportional to (rank + 1)^−ZIPF."""
    upto = np.cumsum(np.arange(1, types + 1) ** -ZIPF)
    return np.searchsorted(upto, rng.random(shape) * upto[-1], side="right").astype(np.int32)


def _kl(token_ids: np.ndarray, text: np.random.Generator, noise: np.random.Generator, trained: bool) -> np.ndarray:
    """How hard an occurrence is belongs to the text; how the checkpoint scores it, to the checkpoint."""
    count, stays = len(token_ids), token_ids % 10 == 3
    hard = text.random(count) < np.where(stays, 0.75, 0.2)
    height = hard * text.exponential(1.0, count) * noise.uniform(0.5, 1.5, count)
    return np.where(stays | (not trained), height, 0.3 * height) + noise.exponential(1e-3, count)
