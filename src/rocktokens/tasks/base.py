"""What a task is: prompts in a reproducible order, and a verdict on an answer.

``DatasetTask`` is a task over a finite list of prompts, the common part of every dataset on disk:

1. Evaluation takes the first ``count`` of a seeded shuffle, each prompt at most once.
2. Training walks through epochs, each a seeded permutation of its own; the prompts of a step are a pure function of
   (step, size, seed), so there is no position to save and nothing to restore.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol

import numpy as np

from rocktokens.errors import RocktokensError
from rocktokens.run_dir import derive_seed
from rocktokens.tasks.graders import Grader
from rocktokens.tasks.grading import extract_answer, is_correct
from rocktokens.types import Prompt


class Task(Protocol):
    """Prompts with verifiable answers."""

    @property
    def name(self) -> str:
        """How tables and messages call the task."""
        ...

    @property
    def size(self) -> int | None:
        """How many prompts there are; None where they are made without end."""
        ...

    @property
    def revision(self) -> str | None:
        """The commit of the Hub that the prompts come from, which a run notes; None where they come from elsewhere."""
        ...

    def prompts(self, count: int, seed: int = 0, *, gradable: bool = False) -> list[Prompt]:
        """Return distinct prompts for a probe or an evaluation: ``count`` of them, or all if there are fewer.

        An evaluation asks for those that are ``gradable``; the order is the same.
        """
        ...

    def batch(self, step: int, size: int, seed: int) -> list[Prompt]:
        """Return the ``size`` prompts of one training step, the same for the same arguments."""
        ...

    def answer(self, text: str) -> str | None:
        """Return the final answer that a response gives, which ``grade`` looks at; None if it gives none."""
        ...

    def can_grade(self, prompt: Prompt) -> bool:
        """Return whether a response to the prompt can be graded: it has an answer, or the grader needs none."""
        ...

    def require_grader(self) -> None:
        """Refuse a grader that cannot be used, before anything is answered."""
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
    grader: Grader | None = None
    """Grades in the place of ``grading``, with or without answers."""
    revision: str | None = None
    """The commit of the Hub that the prompts come from."""

    @property
    def size(self) -> int:
        """How many prompts there are: those of one epoch."""
        return len(self.items)

    def prompts(self, count: int, seed: int = 0, *, gradable: bool = False) -> list[Prompt]:
        """Return the first ``count`` of a seeded shuffle; all of them, once, if there are fewer."""
        shuffled = (self.items[index] for index in self._epoch(0, seed))
        return list(islice((own for own in shuffled if not gradable or self.can_grade(own)), count))

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
        """Return the final answer in ``text``, as ``is_correct`` extracts it; None where a grader reads all of it."""
        return extract_answer(text) if self.grader is None else None

    def can_grade(self, prompt: Prompt) -> bool:
        """Return whether there is an answer to compare with, or a grader that decides for itself."""
        return prompt.answer is not None or self.grader is not None

    def require_grader(self) -> None:
        """Import or look for the task's own grader, if it has one."""
        if self.grader is not None:
            self.grader.require()

    def grade(self, prompt: Prompt, text: str) -> bool:
        """Return whether the grader says so, else whether the final answer in ``text`` is one of the prompt's."""
        if self.grader is not None:
            return self.grader.grade(prompt, text)
        if prompt.answer is None:
            raise RocktokensError(f"prompt {prompt.id!r} has no answer to grade against: set the task's answer_field")
        return any(is_correct(text, answer, self.grading) for answer in prompt.answers)

    def _epoch(self, epoch: int, seed: int) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "epoch", epoch)))
        return generator.permutation(len(self.items))


def prompts_to_grade(task: Task, count: int, seed: int = 0) -> list[Prompt]:
    """Return the prompts of an evaluation; refused, before a model is loaded, where none could be graded."""
    task.require_grader()
    prompts = task.prompts(count, seed, gradable=True)
    if not prompts:
        raise RocktokensError(
            f"task {task.name!r}: its data has no answer, so nothing can be graded: set evaluation.task.answer_field "
            "to the field that holds them, or evaluation.task.grader to a grader that needs none"
        )
    return prompts


def ungraded_note(task: Task) -> str:
    """Say how many prompts of a dataset have no answer and are no part of an evaluation; nothing where all have one."""
    items: Sequence[Prompt] = getattr(task, "items", ())
    left_out = sum(not task.can_grade(prompt) for prompt in items)
    if not left_out:
        return ""
    return f"{left_out:,} of {len(items):,} prompts of {task.name} have no answer: accuracy is that on the others"


def require_answers(task: Task, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that cannot be graded, or none at all."""
    if not prompts:
        raise RocktokensError(f"task {task.name!r} has no prompts to evaluate: raise evaluation.num_prompts")
    for prompt in prompts:
        if not task.can_grade(prompt):
            raise RocktokensError(
                f"task {task.name!r}: prompt {prompt.id!r} has no answer, so nothing can be graded: "
                "set evaluation.task.answer_field to the field that holds it"
            )
