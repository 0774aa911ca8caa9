"""Accuracy of a model on a task, with intervals.

1. Every prompt is answered ``num_samples`` times. The noise is keyed by (seed, prompt, sample), so two models, or one
   model with and without a ban, evaluated with the same seed share their random numbers.
2. The task grades each answer; accuracy is the share of right ones.
3. The Wilson interval treats answers as independent, which they are for one sample a prompt. With more, the answers
   to one prompt belong together, and a bootstrap that draws whole prompts gives a second interval.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rocktokens.errors import RocktokensError
from rocktokens.inference.proportions import bootstrap_interval, wilson_interval
from rocktokens.rollouts.encode import make_rollouts
from rocktokens.rollouts.sampler import Sampler
from rocktokens.tasks.base import Task
from rocktokens.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How a model did on a list of prompts."""

    task: str
    accuracy: float
    n_prompts: int
    num_samples: int
    """Answers per prompt."""
    n_samples: int
    """Answers in all."""
    wilson_interval: tuple[float, float]
    bootstrap_interval: tuple[float, float] | None
    """Over prompts; None with one answer per prompt, where the Wilson interval is the right one."""
    mean_response_length: float
    truncated_share: float
    temperature: float
    seed: int
    prompt_ids: list[str]
    correct: list[int]
    """Right answers per prompt, in the order of ``prompt_ids``."""
    answers: list[list[str | None]]
    """The final answers per prompt, as the task reads them; None where there was none."""

    def to_record(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, for JSON."""
        return asdict(self)


def evaluate(
    sampler: Sampler,
    tokenizer: "PreTrainedTokenizerBase",
    task: Task,
    prompts: Sequence[Prompt],
    *,
    num_samples: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    chat_template: bool,
    max_prompt_length: int,
    on_done: Callable[[int], None] | None = None,
) -> Evaluation:
    """Answer every prompt ``num_samples`` times and grade; the other arguments are those of ``make_rollouts``."""
    require_answers(task, prompts)
    rollouts = make_rollouts(
        sampler,
        tokenizer,
        prompts,
        num_generations=num_samples,
        policy_step=0,
        first_rollout_id=0,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        chat_template=chat_template,
        max_prompt_length=max_prompt_length,
        on_done=on_done,
    )
    texts = tokenizer.batch_decode([rollout.token_ids.tolist() for rollout in rollouts], skip_special_tokens=True)
    texts_of = [texts[start : start + num_samples] for start in range(0, len(texts), num_samples)]
    correct = [sum(task.grade(prompt, text) for text in own) for prompt, own in zip(prompts, texts_of, strict=True)]
    return Evaluation(
        task=task.name,
        accuracy=sum(correct) / len(texts),
        n_prompts=len(prompts),
        num_samples=num_samples,
        n_samples=len(texts),
        wilson_interval=wilson_interval(sum(correct), len(texts)),
        bootstrap_interval=bootstrap_interval(correct, num_samples, seed) if num_samples > 1 else None,
        mean_response_length=float(np.mean([len(rollout.token_ids) for rollout in rollouts])),
        truncated_share=float(np.mean([not rollout.finished for rollout in rollouts])),
        temperature=temperature,
        seed=seed,
        prompt_ids=[prompt.id for prompt in prompts],
        correct=correct,
        answers=[[task.answer(text) for text in own] for own in texts_of],
    )


def require_answers(task: Task, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that cannot be graded, or none at all."""
    if not prompts:
        raise RocktokensError(f"task {task.name!r} has no prompts to evaluate: raise evaluation.num_prompts")
    for prompt in prompts:
        if prompt.answer is None:
            raise RocktokensError(
                f"task {task.name!r}: prompt {prompt.id!r} has no answer, so nothing can be graded: "
                "set evaluation.task.answer_field to the field that holds it"
            )
