"""Reasons to stop a run: a loss or gradient that is not finite, answers that no longer end, nothing left to train on.

Each stops the run with a named error before the weights are touched, so the last checkpoint stays a good one.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rocktokens.errors import LengthExplosionError, NonFiniteLossError, TrainingStoppedError
from rocktokens.types import TokenWeights

LENGTH_PATIENCE = 3


@contextmanager
def naming_step(step: int) -> Iterator[None]:
    """Add the training step to a non-finite error that comes from below, where steps are not known."""
    try:
        yield
    except NonFiniteLossError as error:
        raise NonFiniteLossError(f"step {step}: {error} (the last checkpoint is untouched)") from error


def require_finite(step: int, loss: float, grad_norm: float) -> None:
    """Refuse to update the weights with a loss or gradient that is NaN or infinite."""
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            raise NonFiniteLossError(
                f"step {step}: the {name} is {value}; the last checkpoint is untouched: start a new run from it "
                "(models.student = its directory) with a lower training.learning_rate"
            )


def require_weight(step: int, weights: TokenWeights) -> None:
    """Refuse an update in which the policy keeps no token at all."""
    if not float(weights.weights.sum()) > 0:
        raise TrainingStoppedError(
            f"step {step}: the policy gives weight 0 to all {len(weights.weights)} response tokens of the update, so "
            "there is nothing to learn from: freeze fewer tokens, or raise policy.lam, policy.rho or policy.fraction"
        )


@dataclass(slots=True)
class LengthWatch:
    """Counts consecutive steps in which more than ``limit`` of the rollouts hit the length limit."""

    limit: float
    streak: int = 0

    def observe(self, step: int, truncated_share: float) -> None:
        """Take in one step; the third bad one in a row stops the run."""
        self.streak = self.streak + 1 if truncated_share > self.limit else 0
        if self.streak >= LENGTH_PATIENCE:
            raise LengthExplosionError(
                f"step {step}: {truncated_share:.0%} of the rollouts hit rollouts.max_completion_length, "
                f"{LENGTH_PATIENCE} steps running (training.max_truncated_share = {self.limit}): raise "
                "max_completion_length if the answers are just long, otherwise lower training.learning_rate"
            )
