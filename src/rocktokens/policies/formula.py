"""A policy that is a formula: a pure function of an update's arrays and the policy's parameters.

1. The positional parameters of the function name the arrays it takes: ``token_ids_T``, ``positions_T``,
   ``rollout_ids_T``, or a column of TokenScores with ``_T``. These columns are what the policy needs.
2. Its keyword parameters are those of the policy's section.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from rocktokens.policies.base import UpdateTokens, WeightPolicy

_ALWAYS_KNOWN = ("token_ids", "positions", "rollout_ids")


class FormulaPolicy(WeightPolicy):
    """Weights by a function.

    Args:
        formula: arrays and parameters in, weights (T,) out.
        term: what is weighed; None: the run's divergence.
        params: the function's keyword parameters.
    """

    def __init__(
        self, formula: Callable[..., np.ndarray], term: Literal["asymmetric"] | None = None, **params: Any
    ) -> None:
        self.name, self.term = formula.__name__, term
        self._formula, self._params = formula, params
        self._arrays = [
            parameter.name.removesuffix("_T")
            for parameter in inspect.signature(formula).parameters.values()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        self.needs = frozenset(self._arrays) - frozenset(_ALWAYS_KNOWN)

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """The formula's weights."""
        arrays = [tokens.scores[name] if name in self.needs else getattr(tokens, name) for name in self._arrays]
        return self._formula(*arrays, **self._params)
