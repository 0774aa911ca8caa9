"""Whether answers were right, found out again from what a run recorded: no model, no network.

1. What was recorded of a replay or a knock-out (task, number of prompts, seed) makes the same prompts again: the first
   of them, and the rest when one is asked for, because a page of a large run should not wait for all.
2. A prompt whose text is no longer in what the model was given (a file of prompts that was changed) is not graded.
3. Where the prompts cannot be made again, or have no answer, nothing is known: None. Nor is it where the task has a
   grader of its own: looking at a run, perhaps somebody else's, must not run code that it names.
"""

from functools import cached_property

from pydantic import TypeAdapter, ValidationError

from rocktokens.config import HubTask, JsonlTask, TaskSection
from rocktokens.errors import RocktokensError
from rocktokens.knockout.records import Conditions
from rocktokens.run_dir import derive_seed
from rocktokens.tasks import make_task
from rocktokens.tasks.base import Task
from rocktokens.types import Prompt, ReplayRecord

FIRST_PROMPTS = 256


class Grades:
    """Grades of the answers to the prompts of a replay or a knock-out.

    Args:
        recorded: has the task, the number of prompts and the seed; None where the run did not record them.
        seed_label: which use of the run's seed the prompts were drawn with.
        gradable: whether only prompts with an answer were drawn.
    """

    def __init__(self, recorded: ReplayRecord | Conditions | None, seed_label: str, *, gradable: bool = False) -> None:
        self._recorded, self._seed_label, self._gradable = recorded, seed_label, gradable

    def is_right(self, prompt_id: str, prompt_text: str, response_text: str) -> bool | None:
        """Tell whether a response is right; None where that is not known."""
        prompt = self._first_prompts.get(prompt_id) or self._prompts.get(prompt_id)
        if not self._task or not prompt or prompt.answer is None or prompt.text not in prompt_text:
            return None
        return self._task.grade(prompt, response_text)

    @cached_property
    def unknown_because(self) -> str:
        """Why no answer can be graded, as far as the record of the task tells; empty where they can."""
        match self._section:
            case HubTask():
                return "the prompts are a dataset of the Hub, which a page does not load"
            case JsonlTask(grader=grader) if grader is not None:
                return "the task has a grader of its own, and a page does not run code that a run names"
            case JsonlTask(answer_field=""):
                return "the prompts have no answers"
        return ""

    @cached_property
    def _section(self) -> TaskSection | None:
        if self._recorded is None:
            return None
        try:
            return TypeAdapter(TaskSection).validate_python(self._recorded.task)
        except ValidationError:
            return None

    @cached_property
    def _task(self) -> Task | None:
        if self._section is None or self.unknown_because:
            return None
        try:
            return make_task(self._section)
        except RocktokensError:
            return None

    @cached_property
    def _first_prompts(self) -> dict[str, Prompt]:
        return self._make(FIRST_PROMPTS)

    @cached_property
    def _prompts(self) -> dict[str, Prompt]:
        return self._make(None)

    def _make(self, at_most: int | None) -> dict[str, Prompt]:
        """Make the first prompts, by id: tasks draw them in an order that does not depend on their number."""
        if not self._task or not self._recorded:
            return {}
        try:
            count, seed = self._recorded.num_prompts, derive_seed(self._recorded.seed, self._seed_label)
            drawn = count if at_most is None else min(count, at_most)
            prompts = self._task.prompts(drawn, seed, gradable=self._gradable)
        except RocktokensError:
            return {}
        return {prompt.id: prompt for prompt in prompts}
