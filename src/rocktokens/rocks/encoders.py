"""Contexts as vectors (docs/method.md, section 4.4): by the student's input embeddings, or by its hidden states.

1. The context of an occurrence is the ``window`` tokens before it and as many after it, in the same response; the
   occurrence itself is not part of it. Tokens are fetched from the trace by one equality join on (rollout, position).
2. Its vector is the mean of the embedding rows of those tokens, scaled to length 1. A context without tokens, or whose
   rows cancel, is the vector 0: its cosine with any other is 0.
3. The embeddings are those of the student that was traced under the checkpoint, if it still is that one. Of its weights
   only this matrix is read, found by the names that language models give it. A LoRA checkpoint holds an adapter only,
   which does not touch the embeddings, so those of its base model are read. A student with a hub or embedded id is
   loaded.
4. Encoder "hidden" loads the student and takes its last state before the occurrence (rocktokens.scoring.hidden).

Models are imported where they are needed and nowhere else in this package.

Shape legend: N occurrences, W = 2 · window tokens, K keys of a join, V vocabulary, D width.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa

from rocktokens.errors import RocktokensError, RunDirError
from rocktokens.run_dir import require_as_listed
from rocktokens.traces.store import TraceStore

OCCURRENCES_PER_JOIN = 200_000
"""Bounds the memory of a join: at a window of 5 its two million keys take 40 MB, and a few times that in the engine."""
WINDOWS_PER_SUM = 256
"""Windows whose embedding rows are in memory at once: a few MB, so that they are added up in the cache."""
NO_TOKEN = -1
EMBEDDING_NAMES = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "embeddings")
"""Llama and most others; GPT-2; GPT-NeoX; Bloom and Falcon; InternLM; Mamba."""
ADAPTER = "adapter_config.json"
INDEX = "model.safetensors.index.json"


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


def context_encoder(
    store: TraceStore, checkpoint: int, kind: str | Encoder, window: int, embeddings_VD: np.ndarray | None = None
) -> Encoder:
    """Make what turns the contexts of a checkpoint into vectors.

    ``kind`` is "embeddings", "hidden", or an encoder of one's own. Embeddings are by default those of the student that
    was traced.
    """
    if not isinstance(kind, str):
        return kind
    if kind == "hidden":
        return _hidden_encoder(store, checkpoint)
    if kind != "embeddings":
        raise RocktokensError(
            f"encoder = {kind!r} is not known: use 'embeddings' or 'hidden', or give hidden_encoder(student, rollouts)"
        )
    vectors_VD = traced_embeddings(store, checkpoint) if embeddings_VD is None else embeddings_VD
    return embedding_encoder(store.table(checkpoint), vectors_VD, window)


def embedding_encoder(rows: ir.Table, embeddings_VD: np.ndarray, window: int) -> EmbeddingEncoder:
    """Make the default encoder; ``rows`` are all of the reference checkpoint, scored or not: every token is context."""
    embeddings_VD = np.asarray(embeddings_VD)
    shape, dtype = embeddings_VD.shape, embeddings_VD.dtype
    if len(shape) != 2 or not embeddings_VD.size or dtype.kind != "f":
        raise RocktokensError(f"embeddings are {dtype} of shape {shape}: give floats of shape (vocabulary, width)")
    if not np.isfinite([embeddings_VD.min(), embeddings_VD.max()]).all():
        raise RocktokensError(f"embeddings of shape {shape} hold NaN or infinity: give those of a sound student")
    return EmbeddingEncoder(rows, embeddings_VD, window)


def context_windows(rows: ir.Table, rollout_ids_N: np.ndarray, positions_N: np.ndarray, window: int) -> np.ndarray:
    """Fetch the response tokens around each occurrence, without the occurrence itself, given in any order.

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
    """Return float64 (N, D): the mean embedding of each window at length 1; 0 where it is empty or its rows cancel."""
    sums_ND = np.empty((len(tokens_NW), embeddings_VD.shape[1]))
    for start in range(0, len(tokens_NW), WINDOWS_PER_SUM):
        some = slice(start, start + WINDOWS_PER_SUM)
        rows_NWD = embeddings_VD[tokens_NW[some]]
        rows_NWD[tokens_NW[some] == NO_TOKEN] = 0
        rows_NWD.sum(axis=1, dtype=np.float64, out=sums_ND[some])
    lengths_N1 = np.sqrt(np.einsum("nd,nd->n", sums_ND, sums_ND))[:, None]  # linalg.norm would square into a copy
    return np.divide(sums_ND, lengths_N1, out=sums_ND, where=lengths_N1 > 0)


def traced_embeddings(store: TraceStore, checkpoint: int) -> np.ndarray:
    """Read float32 (V, D), the input embeddings of the student that was traced, from its files or from the model."""
    try:
        name = _traced_student(store, checkpoint)
    except RunDirError as error:
        raise RocktokensError(
            f"the input embeddings of the student cannot be read: {error}; or give embeddings=, an array (vocabulary, "
            "width), or stage='score' (on the command line --set find.stage=score)"
        ) from error
    if Path(name).exists() or name == str(store.run.checkpoint(checkpoint)):
        return read_embeddings(Path(name))
    from rocktokens.models.load import load_model

    return load_model(name, device="cpu").model.get_input_embeddings().weight.detach().float().numpy()


def read_embeddings(folder: Path) -> np.ndarray:
    """Read float32 (V, D), the input-embedding matrix of the model in a folder; of an adapter, its base model's."""
    from safetensors import SafetensorError

    try:
        if (folder / ADAPTER).is_file():  # its base model holds them, if the adapter left them as they are
            changed = [name for file in folder.glob("adapter_model*.safetensors") for name in _tensor_names(file)]
            if any(map(_is_embedding, changed)):
                raise ValueError("its adapter changes them")
            folder = Path(json.loads((folder / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"])
            require_as_listed(folder)
        return _embeddings_in(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise RocktokensError(
            f"the input embeddings of the student cannot be read from {folder} ({error}): give embeddings=, an array "
            "(vocabulary, width), or stage='score' (on the command line --set find.stage=score)"
        ) from error


def _traced_student(store: TraceStore, checkpoint: int) -> str:
    """Name the student of the traces, once the files that a model is read from are as its run lists them."""
    from rocktokens.models.fingerprints import traced_student

    remedy = "use find.stage = 'score', or find_rocks(embeddings=…) with the embeddings of the one that was traced"
    return traced_student(store.run, store.replay, checkpoint, optimizer=False, remedy=remedy)


def _hidden_encoder(store: TraceStore, checkpoint: int) -> Encoder:
    from rocktokens.models.load import load_model
    from rocktokens.rollouts.store import read_rollouts
    from rocktokens.scoring.hidden import hidden_encoder

    probes = [entry.path for entry in store.run.files("rollouts/probe/")]
    if not probes:
        raise RocktokensError(
            f"find.encoder = 'hidden' needs the probe rollouts, {store.run.path} has none: use 'embeddings'"
        )
    student = load_model(_traced_student(store, checkpoint))
    return hidden_encoder(student, [rollout for probe in probes for rollout in read_rollouts(store.run, probe)])


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


def _embeddings_in(folder: Path) -> np.ndarray:
    """The matrix from a directory that ``save_pretrained`` wrote; ValueError says what is wrong with it."""
    from safetensors import safe_open

    file_of = _tensor_files(folder)
    found = [name for name in file_of if name.endswith(".weight") and _is_embedding(name)]
    if not found:
        raise ValueError(f"none of its tensors is called {', '.join(f'{name}.weight' for name in EMBEDDING_NAMES)}")
    # Layers that predict further tokens bring a copy of their own; the model's is the least deeply nested.
    name = min(found, key=lambda name: (name.count("."), name))
    with safe_open(file_of[name], framework="pt") as tensors:
        matrix_VD = tensors.get_tensor(name)
    if matrix_VD.ndim != 2 or not matrix_VD.is_floating_point():
        raise ValueError(f"{name} is {matrix_VD.dtype} of shape {tuple(matrix_VD.shape)}, not a matrix of floats")
    return matrix_VD.float().numpy()


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Where each tensor of a model lies, whether in one file or in shards."""
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ValueError("it has no model*.safetensors" if folder.is_dir() else "it is not a directory")
    return {name: file for file in files for name in _tensor_names(file)}


def _is_embedding(name: str) -> bool:
    """Whether a tensor belongs to the embedding of tokens: by module, and not in the vision part of a model."""
    return "vision" not in name and any(module in EMBEDDING_NAMES for module in name.split("."))


def _tensor_names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())
