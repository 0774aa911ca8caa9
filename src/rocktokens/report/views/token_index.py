"""The tokens of one replayed checkpoint in memory, rollout after rollout: what a browser of rollouts filters and sorts.

Twelve bytes a token, so that any filter over a million of them is a few passes over arrays. Everything else of a row
stays on disk and is read for the rollouts that are looked at.

Shape legend: R rollouts, T tokens.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rocktokens.errors import RocktokensError
from rocktokens.traces.store import TraceStore


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """The tokens of a checkpoint, ordered by rollout and position."""

    checkpoint: int
    rollout_ids_R: np.ndarray
    """int64, ascending."""
    prompt_ids_R: list[str]
    starts_R: np.ndarray
    """int64: where the tokens of each rollout begin."""
    positions_T: np.ndarray
    """int32."""
    token_ids_T: np.ndarray
    """int32."""
    kl_T: np.ndarray
    """float32; NaN where a token was not scored."""
    is_rock_T: np.ndarray
    """bool."""
    lengths_R: np.ndarray
    """int64: response tokens."""
    mean_kl_R: np.ndarray
    """float64: over the scored tokens; NaN where there are none, as the next."""
    max_kl_R: np.ndarray
    """float32."""
    n_rocks_R: np.ndarray
    """int64: occurrences of rocks."""

    @classmethod
    def read(cls, store: TraceStore, checkpoint: int, rock_ids: np.ndarray) -> "TokenIndex":
        """Read all tokens of a checkpoint; ``rock_ids`` are the types called rocks."""
        rows = store.table(checkpoint)
        tokens = rows.select("rollout_id", "position", "token_id", "kl").order_by("rollout_id", "position").to_pyarrow()
        prompts = rows.group_by("rollout_id").agg(prompt_id=rows.prompt_id.min()).order_by("rollout_id").to_pyarrow()
        rollout_ids_R, starts_R = np.unique(tokens["rollout_id"].to_numpy(), return_index=True)
        token_ids_T, kl_T = tokens["token_id"].to_numpy(), tokens["kl"].to_numpy()
        is_rock_T = np.isin(token_ids_T, rock_ids)
        scored_R = _counts(~np.isnan(kl_T), starts_R)
        sums_R = np.add.reduceat(np.nan_to_num(kl_T), starts_R, dtype=np.float64)
        return cls(
            checkpoint,
            rollout_ids_R,
            prompts["prompt_id"].to_pylist(),
            starts_R,
            tokens["position"].to_numpy(),
            token_ids_T,
            kl_T,
            is_rock_T,
            lengths_R=np.diff(starts_R, append=len(token_ids_T)),
            mean_kl_R=np.divide(sums_R, scored_R, out=np.full(len(sums_R), np.nan), where=scored_R > 0),
            max_kl_R=np.fmax.reduceat(kl_T, starts_R),
            n_rocks_R=_counts(is_rock_T, starts_R),
        )

    @cached_property
    def types(self) -> list[int]:
        """The types that occur, ascending."""
        return np.unique(self.token_ids_T).tolist()

    def count(self, chosen_T: np.ndarray) -> np.ndarray:
        """Count the chosen tokens of each rollout, int64 (R,)."""
        return _counts(chosen_T, self.starts_R)

    def place(self, rollout_id: int) -> int:
        """Find the place of a rollout."""
        place = int(np.searchsorted(self.rollout_ids_R, rollout_id))
        if place == len(self.rollout_ids_R) or self.rollout_ids_R[place] != rollout_id:
            raise RocktokensError(f"rollout {rollout_id} is not in the traces of checkpoint {self.checkpoint}")
        return place

    def tokens(self, place: int) -> np.ndarray:
        """Return the response of a rollout, int32."""
        start = self.starts_R[place]
        return self.token_ids_T[start : start + self.lengths_R[place]]


def _counts(chosen_T: np.ndarray, starts_R: np.ndarray) -> np.ndarray:
    return np.add.reduceat(chosen_T, starts_R, dtype=np.int64)
