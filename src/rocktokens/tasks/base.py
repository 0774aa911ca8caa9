"""What a task is: prompts in a reproducible order, and a verdict on an answer.

``DatasetTask`` is a task over a finite list of prompts, the common part of every dataset on disk:

1. Evaluation takes the first ``count`` of a seeded shuffle, each prompt at most once.
2. Training walks through epochs, each a seeded permutation of its own; the prompts of a step are a pure function of
   (step, size, seed), so there is no position to save and nothing to restore.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from rocktokens.errors import RocktokensError
from rocktokens.run_dir import derive_seed
from rocktokens.tasks.grading import extract_answer, is_correct
from rocktokens.types import Prompt


class Task(Protocol):
    """Prompts with verifiable answers."""

    @property
    def name(self) -> str:
        """How tables and messages call the task."""
        ...

    def prompts(self, count: int, seed: int = 0) -> list[Prompt]:
        """Return distinct prompts for an evaluation or a probe: ``count`` of them, or all if there are fewer."""
        ...

    def batch(self, step: int, size: int, seed: int) -> list[Prompt]:
        """Return the ``size`` prompts of one training step, the same for the same arguments."""
        ...

    def answer(self, text: str) -> str | None:
        """Return the final answer that a response gives, which ``grade`` looks at; None if it gives none."""
        ...

    def grade(self, prompt: Prompt, text: str) -> bool:
        """Return whether a response to the prompt ends in the right answer."""
        ...


@dataclass(frozen=True, slots=True)
class DatasetTask:
    """A task over a finite list of prompts."""

    name: str
    items: list[Prompt]
    grading: Literal["math", "exact"]

    def prompts(self, count: int, seed: int = 0) -> list[Prompt]:
        """Return the first ``count`` of a seeded shuffle; all of them, once, if there are fewer."""
        return [self.items[index] for index in self._epoch(0, seed)[:count]]

    def batch(self, step: int, size: int, seed: int) -> list[Prompt]:
        """Return prompts ``step·size … (step+1)·size − 1`` of an endless walk through seeded permutations."""
        epochs: dict[int, np.ndarray] = {}
        batch = []
        for index in range(step * size, (step + 1) * size):
            epoch, offset = divmod(index, len(self.items))
            if epoch not in epochs:
                epochs[epoch] = self._epoch(epoch, seed)
            batch.append(self.items[epochs[epoch][offset]])
        return batch

    def answer(self, text: str) -> str | None:
        """Return the final answer in ``text``, as ``is_correct`` extracts it."""
        return extract_answer(text)

    def grade(self, prompt: Prompt, text: str) -> bool:
        """Return whether the final answer in ``text`` is the prompt's."""
        if prompt.answer is None:
            raise RocktokensError(f"prompt {prompt.id!r} has no answer to grade against: set the task's answer_field")
        return is_correct(text, prompt.answer, self.grading)

    def _epoch(self, epoch: int, seed: int) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "epoch", epoch)))
        return generator.permutation(len(self.items))
