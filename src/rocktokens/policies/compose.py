"""Policies made of policies: their product, one after the other, and one with protected types.

A whole needs what any of its parts needs, and passes on what the trainer tells it and asks of it. It has the term of
the one part that has any; a schedule may change how much of the choice within its classes counts.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from rocktokens.errors import ConfigError
from rocktokens.policies.base import Coarse, Term, UpdateTokens, WeightPolicy
from rocktokens.types import LikelyTokens


class CompositePolicy(WeightPolicy):
    """What is common to all: parts observe every update, active or not, and their states are kept side by side."""

    def __init__(self, parts: Sequence[WeightPolicy]) -> None:
        self.parts = list(parts)
        self.needs = frozenset().union(*(part.needs for part in self.parts))
        self.sees_likely = any(part.sees_likely for part in self.parts)
        self.term = self._whole_term([part.term for part in self.parts if part.term])

    def _whole_term(self, terms: list[Term]) -> Term | None:
        """The term of all parts that have one; two different ones are refused."""
        if len(set(terms)) > 1 or sum(isinstance(term, Coarse) for term in terms) > 1:
            names = " and ".join(sorted("coarse" if isinstance(term, Coarse) else term for term in terms))
            raise ConfigError(f"policy.policies of a product hold {names}, and one loss is minimised: keep one of them")
        return terms[0] if terms else None

    def term_at(self, step: int) -> Term | None:
        """The term of the active part that has one."""
        return next((part.term_at(step) for part in self.active(step) if part.term), None)

    def active(self, step: int) -> Sequence[WeightPolicy]:
        """The parts that have a say at a step."""
        return self.parts

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """Π of the active parts' weights."""
        return reduce(
            np.multiply, (part.weigh(tokens) for part in self.active(tokens.step)), np.ones(len(tokens.token_ids))
        )

    def probe(self, weights_T: Any, token_ids_T: Any, positions_T: Any, rollout_ids_T: Any, step: int) -> Any:
        """What any active part wants to see."""
        wanted_T = super().probe(weights_T, token_ids_T, positions_T, rollout_ids_T, step)
        for part in self.active(step):
            wanted_T = wanted_T | part.probe(weights_T, token_ids_T, positions_T, rollout_ids_T, step)
        return wanted_T

    def observe(self, scores: Any, token_ids_T: np.ndarray, step: int) -> dict[str, Any]:
        """All parts observe; the entries are those of the active ones."""
        return self._told(step, lambda part: part.observe(scores, token_ids_T, step))

    def observe_likely(self, likely: LikelyTokens, step: int) -> dict[str, Any]:
        """All parts observe; the entries are those of the active ones."""
        return self._told(step, lambda part: part.observe_likely(likely, step))

    def _told(self, step: int, tell: Callable[[WeightPolicy], dict[str, Any]]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for part in self.parts:
            of_part = tell(part)
            entries |= of_part if part in self.active(step) else {}
        return entries

    def state(self) -> dict[str, np.ndarray]:
        """The states of all parts, keys prefixed by the part's number."""
        return {f"{index}.{key}": value for index, part in enumerate(self.parts) for key, value in part.state().items()}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Each part from its own keys."""
        for index, part in enumerate(self.parts):
            prefix = f"{index}."
            part.restore({key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)})


class ProductPolicy(CompositePolicy):
    """The product of the parts' weights."""

    name = "product"


class SchedulePolicy(CompositePolicy):
    """Part i from step ``steps[i]`` until the next one's, in ascending order; before the first, weight 1."""

    name = "schedule"

    def __init__(self, parts: Sequence[WeightPolicy], steps: Sequence[int]) -> None:
        self.steps = list(steps)
        super().__init__(parts)

    def _whole_term(self, terms: list[Term]) -> Term | None:
        """Asymmetric throughout, or the classes that some parts have, whose choice counts 1 where no part says less."""
        all_along = len(terms) == len(self.parts) and self.steps[0] == 0
        if "asymmetric" in terms and not (all_along and set(terms) == {"asymmetric"}):
            raise ConfigError(
                "policy.policies of a schedule are asymmetric in part, and a run minimises one divergence: "
                "make all of them asymmetric from step 0, or none"
            )
        classes = {term.classes for term in terms if isinstance(term, Coarse)}
        if len(classes) > 1:
            raise ConfigError(
                "policy.policies of a schedule have different classes, and a run has one choice to leave out: give all "
                "coarse ones the same classes"
            )
        return Coarse(classes.pop(), 1.0) if classes else next(iter(terms), None)

    def term_at(self, step: int) -> Term | None:
        """The term of the active part, or that of the schedule."""
        return super().term_at(step) or self.term

    def active(self, step: int) -> Sequence[WeightPolicy]:
        """The last part whose step has come."""
        begun = sum(first <= step for first in self.steps)
        return self.parts[max(begun - 1, 0) : begun]


class ProtectedPolicy(CompositePolicy):
    """A policy whose weight on some types, the protected ones, is never less than 1."""

    name = "protected"

    def __init__(self, part: WeightPolicy, type_ids: np.ndarray) -> None:
        super().__init__([part])
        self.type_ids = type_ids

    def weigh(self, tokens: UpdateTokens) -> np.ndarray:
        """max(weight, 1) on the protected types."""
        weights_T = super().weigh(tokens)
        is_protected_T = np.isin(tokens.token_ids, self.type_ids)
        return np.where(is_protected_T, np.maximum(weights_T, 1.0), weights_T)
