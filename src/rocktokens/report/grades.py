"""Whether answers were right, found out again from what a run recorded: no model, no network.

1. What was recorded of a replay or a knock-out (task, number of prompts, seed) makes the same prompts again.
2. A prompt whose text is no longer in what the model was given (a file of prompts that was changed) is not graded.
3. Where the prompts cannot be made again, or have no answer, nothing is known: None.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from rocktokens.config import HubTask, TaskSection
from rocktokens.errors import RocktokensError
from rocktokens.run_dir import derive_seed
from rocktokens.tasks import make_task
from rocktokens.tasks.base import Task
from rocktokens.types import Prompt


class _Questions(NamedTuple):
    task: Task
    prompts: dict[str, Prompt]


class Grades:
    """Grades of the answers to the prompts of a replay or a knock-out.

    Args:
        recorded: ``task``, ``num_prompts`` and ``seed``, as the run recorded them; empty where it did not.
        seed_label: which use of the run's seed the prompts were drawn with.
    """

    def __init__(self, recorded: Mapping[str, Any], seed_label: str) -> None:
        self._recorded, self._seed_label = recorded, seed_label

    def is_right(self, prompt_id: str, prompt_text: str, response_text: str) -> bool | None:
        """Whether a response is right; None where that is not known."""
        prompt = self._questions.prompts.get(prompt_id) if self._questions else None
        if not self._questions or not prompt or prompt.answer is None or prompt.text not in prompt_text:
            return None
        return self._questions.task.grade(prompt, response_text)

    @cached_property
    def _questions(self) -> _Questions | None:
        try:
            section = TypeAdapter(TaskSection).validate_python(self._recorded["task"])
            if isinstance(section, HubTask):
                return None
            task = make_task(section)
            seed = derive_seed(self._recorded["seed"], self._seed_label)
            prompts = task.prompts(self._recorded["num_prompts"], seed)
        except (KeyError, ValidationError, RocktokensError):
            return None
        return _Questions(task, {prompt.id: prompt for prompt in prompts})
