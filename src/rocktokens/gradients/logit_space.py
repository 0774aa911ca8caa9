"""One replay that sums the gradient of every type, in two spaces that are never mixed (docs/method.md, section 5).

Position i, which predicts token x_i, has the gradient g_i = ∂kl_i/∂z over the V columns that both heads have.

1. The types of the rollouts, and how often each occurs, are known before any forward: every type gets a row, in order
   of token id (``TypeRows``).
2. Both models are forced through the rollouts as for scoring, a few positions at a time.
3. ``hidden``: Wᵀ g_i, the gradient with respect to the student's last hidden state, is added to the row of x_i; exact.
4. ``vocabulary``: g_i itself is added where types × V fits in memory, else its count-sketch.
5. By type, exact in both spaces: Σ‖g_i‖ and Σ‖g_i‖². Over all positions, exact and in full width: G = Σ_i g_i and
   G_bal = Σ_v ḡ_v.
6. Prompts are dealt into two random halves. The types that both halves have most of get a second row, after all first
   rows, for their occurrences in the second half: that shows how alike two means are when only the sample differs.

What the sums mean is computed in rocktokens.gradients.type_gradients. Paper: https://arxiv.org/abs/2605.09253
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rocktokens.config import Divergence
from rocktokens.errors import RocktokensError
from rocktokens.gradients.sketch import CountSketch, count_sketch
from rocktokens.gradients.type_gradients import SpaceSums, TypeGradients
from rocktokens.models.head import lm_head
from rocktokens.models.load import LoadedModel
from rocktokens.run_dir import derive_seed
from rocktokens.scoring.divergence import ScoredChunk, scored_chunks
from rocktokens.scoring.score import States, replayed
from rocktokens.scoring.teacher_pass import TeacherPass
from rocktokens.types import Rollout

MEMORY = 180_000_000
"""Bytes of all sums: with what is computed from them, a process grows by less than 200 MB."""
SKETCH_WIDTH = 1024
LEAST_SPLIT = 1024
"""This many types keep both halves even where memory is short."""


def logit_gradients(
    student: Any,
    teacher: Any,
    rollouts: Sequence[Rollout],
    *,
    divergence: Divergence = "reverse",
    temperature: float = 1.0,
    tokens_per_chunk: int = 1024,
    tokens_per_batch: int = 16384,
    sketch_width: int | None = None,
    memory: int = MEMORY,
    seed: int = 0,
    on_done: Callable[[int], None] | None = None,
) -> TypeGradients:
    """Sum the gradients of every type over ``rollouts``, one forward of each model.

    Args:
        student: A ``LoadedModel`` or a transformers causal LM; for another checkpoint, call again with that.
        teacher: Likewise, over the same vocabulary and on the same device.
        rollouts: What the student wrote.
        divergence: Whose gradient it is.
        temperature: Of both softmaxes.
        tokens_per_chunk: Positions whose logits are in memory at once.
        tokens_per_batch: Tokens of one forward, with its padding if it has any.
        sketch_width: Of the vocabulary's sums; default none, exact sums, where they fit in ``memory``, else 1024.
        memory: Bytes for all sums. The hidden sums are exact even where they alone need more.
        seed: Of the sketch and of the halves; results of one seed and the same rollouts can be compared.
        on_done: Called after each batch with the number of rollouts it took in.

    Returns:
        The sums, in numpy, of the types that occur.
    """
    if not rollouts:
        raise RocktokensError("there are no rollouts to take gradients of: sample some with `rocktokens trace` first")
    in_second_half = second_half(rollouts, seed)
    halves = [np.full(len(own.token_ids), own.prompt_id in in_second_half) for own in rollouts]
    heads = [lm_head(model.model if isinstance(model, LoadedModel) else model) for model in (student, teacher)]
    sums = GradientSums.plan(
        np.concatenate([rollout.token_ids for rollout in rollouts]),
        np.concatenate(halves),
        vocab_size=min(head.width for head in heads),
        like=heads[0].weight_VD,
        sketch_width=sketch_width,
        memory=memory,
        seed=seed,
    )
    for group, states in replayed(student, TeacherPass(teacher, rollouts, tokens_per_batch)):
        sums.add(states, np.concatenate([halves[index] for index in group]), divergence, temperature, tokens_per_chunk)
        if on_done is not None:
            on_done(len(group))
    return sums.finish(_digest(rollouts))


@dataclass(frozen=True, slots=True)
class TypeRows:
    """Which row of the sums an occurrence belongs to: one per type, and a second one for some types' second half."""

    token_ids_U: np.ndarray
    freq_U: np.ndarray
    second_row_U: np.ndarray
    """−1 where both halves share the first row."""

    @classmethod
    def of(cls, token_ids_T: np.ndarray, halves_T: np.ndarray, max_split: int) -> "TypeRows":
        """Assign rows to these occurrences; of the types in both halves, split the ``max_split`` best covered."""
        token_ids_U, type_T = np.unique(token_ids_T, return_inverse=True)
        freq_U = np.bincount(type_T)
        second_U = np.bincount(type_T[halves_T], minlength=len(freq_U))
        covered_U = np.minimum(second_U, freq_U - second_U)
        by_cover = np.argsort(-covered_U, kind="stable")
        split = np.sort(by_cover[covered_U[by_cover] > 0][:max_split])
        second_row_U = np.full(len(token_ids_U), -1)
        second_row_U[split] = len(token_ids_U) + np.arange(len(split))
        return cls(token_ids_U.astype(np.int64), freq_U, second_row_U)

    @property
    def n_rows(self) -> int:
        """Of the sums."""
        return len(self.token_ids_U) + int((self.second_row_U >= 0).sum())

    def locate(self, token_ids_T: np.ndarray, halves_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the type and the row (T,) of each occurrence."""
        type_T = np.searchsorted(self.token_ids_U, token_ids_T)
        if not np.array_equal(self.token_ids_U.take(type_T, mode="clip"), token_ids_T):
            raise ValueError("token_ids_T holds a type that no row was made for")
        second_T = self.second_row_U[type_T]
        return type_T, np.where(halves_T & (second_T >= 0), second_T, type_T)


def second_half(rollouts: Sequence[Rollout], seed: int) -> set[str]:
    """Draw the ids of the prompts of the second of two random halves."""
    prompt_ids = sorted({rollout.prompt_id for rollout in rollouts})
    generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "gradient-halves")))
    order = generator.permutation(len(prompt_ids))
    return {prompt_ids[index] for index in order[len(prompt_ids) // 2 :]} if len(prompt_ids) > 1 else set()


class GradientSums:
    """The sums of a pass over positions, in whatever portions they come."""

    def __init__(self, rows: TypeRows, vocab_size: int, like: torch.Tensor, sketch: CountSketch | None) -> None:
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.rows, self.sketch = rows, sketch
        self.device = like.device
        self._weight_U = torch.from_numpy(1 / rows.freq_U).to(self.device, dtype)
        vectors = {"hidden": like.shape[1], "vocabulary": sketch.width if sketch else vocab_size}
        self.vectors = {
            space: torch.zeros(rows.n_rows, width, dtype=dtype, device=self.device) for space, width in vectors.items()
        }
        self.lengths = {space: self._zeros(2, len(rows.freq_U)) for space in vectors}
        """Σ‖g‖ and Σ‖g‖² by type."""
        self.directions_2V = self._zeros(2, vocab_size)
        """G and G_bal."""

    @classmethod
    def plan(
        cls,
        token_ids_T: np.ndarray,
        halves_T: np.ndarray,
        *,
        vocab_size: int,
        like: torch.Tensor,
        sketch_width: int | None = None,
        memory: int = MEMORY,
        seed: int = 0,
    ) -> "GradientSums":
        """Allocate sums for all the occurrences that will be added, within ``memory``.

        Args:
            token_ids_T: The predicted tokens of all positions.
            halves_T: Which of them are of the second half.
            vocab_size: V, the columns that both heads have.
            like: The student's head (V', D): its width, device and dtype.
            sketch_width: None for exact sums where they fit, else 1024.
            memory: Bytes.
            seed: Of the sketch.
        """
        rows = TypeRows.of(token_ids_T, halves_T, max_split=len(token_ids_T))
        itemsize = torch.promote_types(like.dtype, torch.float32).itemsize
        most_rows = _rows_within(memory, vocab_size, (vocab_size + like.shape[1]) * itemsize)
        if sketch_width is None and rows.n_rows <= most_rows:
            return cls(rows, vocab_size, like, None)
        sketch = count_sketch(vocab_size, SKETCH_WIDTH if sketch_width is None else sketch_width, seed, like.device)
        most_rows = _rows_within(memory, vocab_size, (sketch.width + like.shape[1]) * itemsize)
        max_split = max(LEAST_SPLIT, most_rows - len(rows.token_ids_U))
        return cls(TypeRows.of(token_ids_T, halves_T, max_split), vocab_size, like, sketch)

    @property
    def nbytes(self) -> int:
        """Of all sums."""
        tensors = [*self.vectors.values(), *self.lengths.values(), self.directions_2V]
        return sum(tensor.nbytes for tensor in tensors)

    @torch.inference_mode()
    def add(
        self,
        states: States,
        halves_T: np.ndarray,
        divergence: Divergence = "reverse",
        temperature: float = 1.0,
        tokens_per_chunk: int = 1024,
    ) -> None:
        """Add the gradients of some positions.

        Args:
            states: The first arguments of ``token_scores``: the student's states and head, the teacher's, the tokens.
            halves_T: Which positions are of the second half.
            divergence: Whose gradient it is.
            temperature: Of both softmaxes.
            tokens_per_chunk: Positions whose logits are in memory at once; the result does not depend on it.
        """
        located = self.rows.locate(states[-1].cpu().numpy(), halves_T)
        types_T, rows_T = (torch.from_numpy(array).to(self.device) for array in located)
        for chunk in scored_chunks(*states, divergence, temperature, tokens_per_chunk):
            self._add_chunk(chunk, types_T[chunk.rows], rows_T[chunk.rows])
            del chunk  # before the next one is made: two of them are never in memory

    def finish(self, rollouts_sha256: str = "") -> TypeGradients:
        """Return the sums as they are now, in numpy; ``rollouts_sha256`` names what they were taken over."""
        sketches = {"hidden": None, "vocabulary": self.sketch and (self.sketch.width, self.sketch.seed)}
        spaces = {
            space: SpaceSums(self.vectors[space].cpu().numpy(), *self.lengths[space].cpu().numpy(), sketch=sketch)
            for space, sketch in sketches.items()
        }
        pooled_V, balanced_V = self.directions_2V.cpu().numpy()
        return TypeGradients(
            token_ids=self.rows.token_ids_U,
            freq=self.rows.freq_U,
            second_row=self.rows.second_row_U,
            **spaces,
            pooled_V=pooled_V,
            balanced_V=balanced_V,
            rollouts_sha256=rollouts_sha256,
        )

    def _add_chunk(self, chunk: ScoredChunk, types_n: torch.Tensor, rows_n: torch.Tensor) -> None:
        gradient_nV, hidden_nD = chunk.gradient_nV, chunk.state_gradient()
        weights_n = self._weight_U[types_n]
        self.directions_2V += torch.stack([torch.ones_like(weights_n), weights_n]) @ gradient_nV
        vocabulary_nW = self.sketch(gradient_nV) if self.sketch else gradient_nV
        self._add_vectors("hidden", hidden_nD, hidden_nD.norm(dim=-1), types_n, rows_n)
        self._add_vectors("vocabulary", vocabulary_nW, chunk.columns[-1], types_n, rows_n)

    def _add_vectors(
        self, space: str, vectors_nW: torch.Tensor, norm_n: torch.Tensor, types_n: torch.Tensor, rows_n: torch.Tensor
    ) -> None:
        """Sum the chunk on its own first: a frequent type then adds few numbers to a large one, not many."""
        present, place_n = torch.unique(rows_n, return_inverse=True)
        sums_uW = vectors_nW.new_zeros(len(present), vectors_nW.shape[1]).index_add_(0, place_n, vectors_nW)
        self.vectors[space].index_add_(0, present, sums_uW)
        lengths_2n = torch.stack([norm_n.double(), norm_n.double() ** 2])
        self.lengths[space].index_add_(1, types_n, lengths_2n)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=self.device)


def _rows_within(memory: int, vocab_size: int, row_bytes: int) -> int:
    """Return how many rows of sums fit beside what is kept once for every vocabulary id: G, G_bal, bucket and sign."""
    return (memory - (8 + 8 + 8 + 4) * vocab_size) // row_bytes


def _digest(rollouts: Sequence[Rollout]) -> str:
    """Name the rollouts, whatever their order."""
    digest = hashlib.sha256()
    for rollout in sorted(rollouts, key=lambda rollout: rollout.rollout_id):
        for part in (np.array([rollout.rollout_id]), rollout.prompt_ids, rollout.token_ids):
            digest.update(np.ascontiguousarray(part, dtype=np.int64).tobytes())
    return digest.hexdigest()
