"""Train the decision and leave out the choice (docs/method.md, section 10): the policy for interchangeable tokens.

1. Every token weighs 1: which of two twins comes, and whether one of them comes, is learned at the same position, so
   no weight can tell them apart.
2. What is weighed is another loss, ``Coarse``: the divergence between classes, and λ times that within them.
3. Protected types are in no class: their choice is trained in full.
"""

from collections.abc import Sequence

import numpy as np

from rocktokens.classes import TokenClasses
from rocktokens.policies.base import Coarse, UpdateTokens, WeightPolicy


class CoarsePolicy(WeightPolicy):
    """Weight 1 on the decision, ``lam`` on the choice within classes; ``protected`` types are taken out of them."""

    name = "coarse"

    def __init__(self, classes: TokenClasses, lam: float = 0.0, protected: Sequence[int] | np.ndarray = ()) -> None:
        self.term = Coarse(classes.without(protected), lam)

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """1 everywhere."""
        return np.ones(len(tokens.token_ids))
