"""Contexts as the student sees them: its last hidden state before an occurrence (docs/method.md, section 4.4).

1. Only the rollouts that are asked for are forced through the student, grouped by length as for scoring.
2. An occurrence at position t gets the state that *predicts* x_t, what the LM head received: it has seen the prompt and
   x_<t, but not x_t.
3. Its vector is that state scaled to length 1.

Has the shape of ``rocktokens.rocks.encoders.Encoder``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rocktokens.errors import RocktokensError
from rocktokens.models.head import lm_head
from rocktokens.scoring.batch import collate, response_states, split_by_tokens
from rocktokens.scoring.packed import packs
from rocktokens.scoring.teacher_pass import bare_model
from rocktokens.types import Rollout

STATES_BYTES = 1 << 30
"""Of the states that are looked up at once: every further look-up forces the rollouts through the student again."""


@dataclass(frozen=True, slots=True)
class HiddenEncoder:
    """Encodes an occurrence by the state its token was predicted from."""

    model: Any
    rollouts: dict[int, Rollout]
    tokens_per_batch: int

    @property
    def width(self) -> int:
        """Of the student, D."""
        return lm_head(self.model).weight_VD.shape[1]

    @property
    def at_once(self) -> int:
        """How many float32 states fit in ``STATES_BYTES``."""
        return max(1, STATES_BYTES // (4 * self.width))

    @torch.inference_mode()
    def look_up(self, rollout_ids_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
        """float32 (N, D): the states, in the order of the occurrences."""
        self._require_known(rollout_ids_N, positions_N)
        order_N = np.argsort(rollout_ids_N, kind="stable")
        wanted, starts = np.unique(rollout_ids_N[order_N], return_index=True)
        occurrences = np.split(order_N, starts[1:])
        rollouts = [self.rollouts[int(rollout_id)] for rollout_id in wanted]
        states_ND = np.empty((len(order_N), self.width), dtype=np.float32)
        for group in split_by_tokens(rollouts, self.tokens_per_batch, packed=packs(self.model)):
            batch = collate([rollouts[index] for index in group], pad_id=0, device=self.model.device)
            h_TD = response_states(self.model, batch)
            lengths = [len(rollouts[index].token_ids) for index in group]
            for index, own_TD in zip(group, h_TD.split(lengths), strict=True):
                rows_N = occurrences[index]
                states_ND[rows_N] = own_TD[positions_N[rows_N]].float().cpu().numpy()
        return states_ND

    def encode(self, found_N: np.ndarray) -> np.ndarray:
        """The states at length 1, float64."""
        states_ND = found_N.astype(np.float64)
        lengths_N1 = np.sqrt(np.einsum("nd,nd->n", states_ND, states_ND))[:, None]
        return np.divide(states_ND, lengths_N1, out=states_ND, where=lengths_N1 > 0)

    def _require_known(self, rollout_ids_N: np.ndarray, positions_N: np.ndarray) -> None:
        """Refuse an occurrence that is in none of the rollouts: they are not those the trace was made of."""
        ids, inverse_N = np.unique(rollout_ids_N, return_inverse=True)
        lengths = np.array([len(self.rollouts[i].token_ids) if i in self.rollouts else 0 for i in ids.tolist()])
        outside = np.flatnonzero(positions_N >= lengths[inverse_N]) if len(ids) else []
        if len(outside):
            rollout_id, position = rollout_ids_N[outside[0]], positions_N[outside[0]]
            raise RocktokensError(
                f"position {position} of rollout {rollout_id} is in the trace but not among the rollouts: give the "
                "probe rollouts that the trace was made of"
            )


def hidden_encoder(student: Any, rollouts: Sequence[Rollout], tokens_per_batch: int = 16384) -> HiddenEncoder:
    """Make an encoder from the reference checkpoint and the rollouts that the trace was made of.

    The student is a ``LoadedModel`` or a transformers causal LM; ``tokens_per_batch`` counts padding, if there is any.
    """
    return HiddenEncoder(bare_model(student), {rollout.rollout_id: rollout for rollout in rollouts}, tokens_per_batch)
