"""Contexts as vectors (METHOD 4.3): the response tokens around an occurrence, by the student's input embeddings.

1. The context is the ``window`` tokens before the occurrence and as many after it, in the same response; the occurrence
   itself is not part of it. Tokens are fetched from the trace by one equality join on (rollout, position).
2. Its vector is the mean of the embedding rows of those tokens, scaled to length 1. A context without tokens, or whose
   rows cancel, is the vector 0: its cosine with any other is 0.

Shape legend: N occurrences, W = 2 · window tokens, K keys of a join, V vocabulary, D width.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa

from rocktokens.errors import RocktokensError

OCCURRENCES_PER_JOIN = 200_000
"""Bounds the memory of a join: at a window of 5 its two million keys take 40 MB, and a few times that in the engine."""
WINDOWS_PER_SUM = 256
"""Windows whose embedding rows are in memory at once: a few MB, so that they are added up in the cache."""
NO_TOKEN = -1


class Encoder(Protocol):
    """Turns occurrences into vectors in two steps: one pass over the data for many, then cheaply a few at a time."""

    @property
    def at_once(self) -> int:
        """How many occurrences to look up together: what is looked up is held in memory."""
        ...

    def look_up(self, rollout_ids_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
        """Whatever the vectors are made of, one row per occurrence."""
        ...

    def encode(self, found_N: np.ndarray) -> np.ndarray:
        """float64 (N, D): rows of length 1, or 0 where there is no context."""
        ...


@dataclass(frozen=True, slots=True)
class EmbeddingEncoder:
    """Encodes the tokens around an occurrence by the embeddings of the student."""

    rows: ir.Table
    embeddings_VD: np.ndarray
    window: int
    at_once: int = 4_000_000
    """As windows of 10 tokens, 160 MB."""

    def look_up(self, rollout_ids_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
        """The windows, int32 (N, W)."""
        tokens_NW = context_windows(self.rows, rollout_ids_N, positions_N, self.window)
        largest = tokens_NW.max(initial=NO_TOKEN)
        if largest >= len(self.embeddings_VD):
            raise RocktokensError(
                f"embeddings of shape {self.embeddings_VD.shape} have no row for token id {largest} of the trace: give "
                "those of the student that wrote it"
            )
        return tokens_NW

    def encode(self, found_N: np.ndarray) -> np.ndarray:
        """The windows as vectors."""
        return encode_windows(found_N, self.embeddings_VD)


def embedding_encoder(rows: ir.Table, embeddings_VD: np.ndarray, window: int) -> EmbeddingEncoder:
    """The default encoder; ``rows`` are all rows of the reference checkpoint, scored or not: every token is context."""
    embeddings_VD = np.asarray(embeddings_VD)
    shape, dtype = embeddings_VD.shape, embeddings_VD.dtype
    if len(shape) != 2 or not embeddings_VD.size or dtype.kind != "f":
        raise RocktokensError(f"embeddings are {dtype} of shape {shape}: give floats of shape (vocabulary, width)")
    if not np.isfinite([embeddings_VD.min(), embeddings_VD.max()]).all():
        raise RocktokensError(f"embeddings of shape {shape} hold NaN or infinity: give those of a sound student")
    return EmbeddingEncoder(rows, embeddings_VD, window)


def context_windows(rows: ir.Table, rollout_ids_N: np.ndarray, positions_N: np.ndarray, window: int) -> np.ndarray:
    """The response tokens around each occurrence, without the occurrence itself.

    Args:
        rows: all rows of the checkpoint.
        rollout_ids_N: rollouts of the occurrences, in any order.
        positions_N: their positions in the response.
        window: tokens on each side.

    Returns:
        int32 (N, W): ids at t − window … t + window, −1 before the start and after the end of the response.
    """
    if window < 1:
        raise RocktokensError(f"window = {window} is not valid: give a whole number of at least 1")
    tokens_NW = np.full((len(rollout_ids_N), 2 * window), NO_TOKEN, dtype=np.int32)
    order_N = np.argsort(rollout_ids_N, kind="stable")  # each join then only reads the parts that hold its rollouts
    for start in range(0, len(order_N), OCCURRENCES_PER_JOIN):
        some = order_N[start : start + OCCURRENCES_PER_JOIN]
        tokens_NW[some] = _join_windows(rows, rollout_ids_N[some], positions_N[some], window)
    return tokens_NW


def encode_windows(tokens_NW: np.ndarray, embeddings_VD: np.ndarray) -> np.ndarray:
    """float64 (N, D): the mean embedding of each window's tokens at length 1; 0 where there are none or they cancel."""
    sums_ND = np.empty((len(tokens_NW), embeddings_VD.shape[1]))
    for start in range(0, len(tokens_NW), WINDOWS_PER_SUM):
        some = slice(start, start + WINDOWS_PER_SUM)
        rows_NWD = embeddings_VD[tokens_NW[some]]
        rows_NWD[tokens_NW[some] == NO_TOKEN] = 0
        rows_NWD.sum(axis=1, dtype=np.float64, out=sums_ND[some])
    lengths_N1 = np.sqrt(np.einsum("nd,nd->n", sums_ND, sums_ND))[:, None]  # linalg.norm would square into a copy
    return np.divide(sums_ND, lengths_N1, out=sums_ND, where=lengths_N1 > 0)


def _join_windows(rows: ir.Table, rollout_ids_N: np.ndarray, positions_N: np.ndarray, window: int) -> np.ndarray:
    offsets_W = np.delete(np.arange(-window, window + 1), window)
    positions_NW = positions_N.astype(np.int64)[:, None] + offsets_W
    slots_K = np.flatnonzero(positions_NW >= 0)
    keys = pa.table(
        {
            "slot": pa.array(slots_K, pa.int64()),
            "rollout_id": pa.array(rollout_ids_N[slots_K // len(offsets_W)], pa.int64()),
            "position": pa.array(positions_NW.ravel()[slots_K], pa.int32()),
        }
    )
    rollout: Any = rows.rollout_id
    near = rows.filter(rollout.between(int(rollout_ids_N.min()), int(rollout_ids_N.max())))
    found = near.join(ibis.memtable(keys), ["rollout_id", "position"]).select("slot", "token_id").to_pyarrow()
    tokens_NW = np.full(positions_NW.shape, NO_TOKEN, dtype=np.int32)
    tokens_NW.ravel()[found["slot"].to_numpy()] = found["token_id"].to_numpy()
    return tokens_NW
