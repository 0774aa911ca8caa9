"""What a trainer asks of a weight policy, and how arrays pass between the two (docs/method.md, section 7).

1. Arrays come as numpy or torch, on any device, their rows in any order. They become numpy once, here; scores become
   float64. Gradients stop here: weights are detached.
2. Rows are ordered by rollout and position. So no weight depends on the order rows came in, "ties in order of position"
   is a stable sort, and a response is a run of rows.
3. The policy weighs the ordered rows; its weights return to the caller's order, kind and device as float32.

The arrays of a call hold whole rollouts of the whole update: what a policy ranks or normalises, it does over these.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rocktokens.classes import TokenClasses
from rocktokens.errors import RocktokensError
from rocktokens.types import LikelyTokens


@dataclass(frozen=True, slots=True)
class UpdateTokens:
    """The response tokens of one update in order of rollout and position, all arrays (T,)."""

    token_ids: np.ndarray
    """int: the predicted tokens."""
    positions: np.ndarray
    """int: 0-based in the response."""
    rollout_ids: np.ndarray
    step: int
    scores: Mapping[str, np.ndarray]
    """float64 columns of TokenScores, those the policy needs."""


@dataclass(frozen=True, slots=True)
class Coarse:
    """A loss in which the choice within classes of tokens counts ``lam`` and the decision between them 1."""

    classes: TokenClasses
    lam: float


Term = Literal["asymmetric"] | Coarse
"""What is minimised in the place of the run's divergence."""


class WeightPolicy(ABC):
    """The weight of every response token of an update; it knows nothing of the trainer."""

    name: str
    needs: frozenset[str] = frozenset()
    """TokenScores columns that must be known before weighing; none: weights are known before either model runs."""
    term: Term | None = None
    """What is weighed: None, the run's divergence; asymmetric, reverse or forward KL, chosen at every token;
    ``Coarse``, the run's divergence with less of the choice within classes, or none."""
    sees_likely: bool = False
    """Whether ``observe_likely`` is to be told what both models could have written."""

    @abstractmethod
    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """Weights (T,) of ordered tokens."""

    def __call__(self, scores: Any, token_ids_T: Any, positions_T: Any, rollout_ids_T: Any, step: int) -> Any:
        """The weight of every response token.

        Args:
            scores: TokenScores with the columns of ``needs``; may be None where there are none.
            token_ids_T: the predicted tokens.
            positions_T: 0-based in the response.
            rollout_ids_T: of each token.
            step: of training.

        Returns:
            float32 (T,), detached, numpy or torch as ``token_ids_T`` is and on its device.
        """
        ids_T, positions, rollouts = as_numpy(token_ids_T), as_numpy(positions_T), as_numpy(rollout_ids_T)
        order_T = np.lexsort((positions, rollouts))
        columns = {column: self._column(scores, column)[order_T] for column in self.needs}
        weights_T = np.empty(len(ids_T), dtype=np.float32)
        weights_T[order_T] = self.weigh(
            UpdateTokens(ids_T[order_T], positions[order_T], rollouts[order_T], int(step), columns)
        )
        return like(weights_T, token_ids_T)

    def term_at(self, step: int) -> Term | None:
        """What is weighed at a step of training."""
        return self.term

    def probe(self, weights_T: Any, token_ids_T: Any, positions_T: Any, rollout_ids_T: Any, step: int) -> Any:
        """Rows of weight 0 to score all the same, without gradient: bool (T,) of the kind of ``weights_T``."""
        return like(np.zeros(len(weights_T), dtype=bool), weights_T)

    def observe(self, scores: Any, token_ids_T: np.ndarray, step: int) -> dict[str, Any]:
        """Learn from the scores of an update, NaN where a row was not scored; returns entries of the log line."""
        return {}

    def observe_likely(self, likely: LikelyTokens, step: int) -> dict[str, Any]:
        """Learn from what both models could have written in an update; returns entries of the log line."""
        return {}

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps of the policy."""
        return {}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from what ``state`` gave; a policy that keeps nothing refuses what is not its own."""
        if state:
            raise RocktokensError(
                f"policy {self.name} keeps no state and the checkpoint holds {', '.join(sorted(state))}: "
                "resume with the policy that wrote it"
            )

    def _column(self, scores: Any, name: str) -> np.ndarray:
        column = getattr(scores, name, None)
        if column is None:
            raise RocktokensError(f"policy {self.name} needs the {name} of every token: score before weighing")
        values_T = as_numpy(column).astype(np.float64)
        if not np.isfinite(values_T).all():
            raise RocktokensError(f"policy {self.name} needs the {name} of every token and some are not finite numbers")
        return values_T


def term_arguments(term: Term | None) -> dict[str, Any]:
    """What ``weighted_kl`` is told of a term."""
    return {"classes": term.classes, "lam": term.lam} if isinstance(term, Coarse) else {"term": term}


def term_classes(term: Term | None) -> TokenClasses | None:
    """The classes whose choice a term tells from the decision; None where it has none."""
    return term.classes if isinstance(term, Coarse) else None


def as_numpy(array: Any) -> np.ndarray:
    """A numpy or torch array as numpy, without its gradient; torch floats as float64, for bfloat16 has no numpy."""
    if isinstance(array, np.ndarray):
        return array
    array = array.detach().cpu()
    return (array.double() if array.is_floating_point() else array).numpy()


def like(array: np.ndarray, model: Any) -> Any:
    """A numpy array in the kind of ``model``, numpy or torch, and on its device."""
    if isinstance(model, np.ndarray):
        return array
    import torch

    return torch.as_tensor(array, device=model.device)
