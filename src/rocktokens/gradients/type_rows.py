"""Which row of the sums an occurrence belongs to, by its type and by the half its prompt was dealt into. No torch.

1. The types that occur get a row each, in order of token id.
2. Prompts are dealt into two halves at random.
3. The types that both halves have most of get a second row, after all first rows: their occurrences in the second half.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rocktokens.run_dir import derive_seed
from rocktokens.types import Rollout


@dataclass(frozen=True, slots=True)
class TypeRows:
    """Which row of the sums an occurrence belongs to: a row a type, and a second one for some types' second half."""

    token_ids_U: np.ndarray
    freq_U: np.ndarray
    second_row_U: np.ndarray
    """−1 where both halves share the first row."""

    @classmethod
    def of(cls, token_ids_T: np.ndarray, halves_T: np.ndarray, max_split: int) -> "TypeRows":
        """Rows for these occurrences; of the types in both halves, the ``max_split`` best covered are split."""
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
        """The type and the row (T,) of each occurrence."""
        type_T = np.searchsorted(self.token_ids_U, token_ids_T)
        if not np.array_equal(self.token_ids_U.take(type_T, mode="clip"), token_ids_T):
            raise ValueError("token_ids_T holds a type that no row was made for")
        second_T = self.second_row_U[type_T]
        return type_T, np.where(halves_T & (second_T >= 0), second_T, type_T)


def second_half(rollouts: Sequence[Rollout], seed: int) -> set[str]:
    """Ids of the prompts of the second of two random halves."""
    prompt_ids = sorted({rollout.prompt_id for rollout in rollouts})
    generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "gradient-halves")))
    order = generator.permutation(len(prompt_ids))
    return {prompt_ids[index] for index in order[len(prompt_ids) // 2 :]} if len(prompt_ids) > 1 else set()


def halves(rollout: Rollout, in_second_half: set[str]) -> np.ndarray:
    """Bool (T,): whether the tokens of a rollout are of the second half."""
    return np.full(len(rollout.token_ids), rollout.prompt_id in in_second_half)
