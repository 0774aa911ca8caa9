"""Accuracy of a model on a task, with intervals.

1. Every prompt is answered ``num_samples`` times. The noise is keyed by (seed, prompt, sample), so two models, or one
   model with and without a ban, evaluated with the same seed share their random numbers.
2. The task grades each answer; accuracy is the share of right ones.
3. The Wilson interval treats answers as independent, which they are for one sample per prompt. With more, the answers
   to one prompt belong together, and a bootstrap that draws whole prompts gives a second interval.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rocktokens.evaluation.records import Accuracy
from rocktokens.inference.proportions import bootstrap_interval, wilson_interval
from rocktokens.rollouts.encode import Sampling, make_rollouts
from rocktokens.rollouts.sampler import Sampler
from rocktokens.tasks.base import Task, require_answers
from rocktokens.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def measure_accuracy(
    sampler: Sampler,
    tokenizer: "PreTrainedTokenizerBase",
    task: Task,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    num_samples: int,
    on_done: Callable[[int], None] | None = None,
) -> Accuracy:
    """Answer every prompt ``num_samples`` times and grade; the other arguments are those of ``make_rollouts``."""
    require_answers(task, prompts)
    rollouts = make_rollouts(sampler, tokenizer, prompts, sampling, num_generations=num_samples, on_done=on_done)
    texts = tokenizer.batch_decode([rollout.token_ids.tolist() for rollout in rollouts], skip_special_tokens=True)
    texts_of = [texts[start : start + num_samples] for start in range(0, len(texts), num_samples)]
    correct = [sum(task.grade(prompt, text) for text in own) for prompt, own in zip(prompts, texts_of, strict=True)]
    return Accuracy(
        task=task.name,
        accuracy=sum(correct) / len(texts),
        n_prompts=len(prompts),
        num_samples=num_samples,
        n_samples=len(texts),
        wilson_interval=wilson_interval(sum(correct), len(texts)),
        bootstrap_interval=bootstrap_interval(correct, num_samples, sampling.seed) if num_samples > 1 else None,
        mean_response_length=float(np.mean([len(rollout.token_ids) for rollout in rollouts])),
        truncated_share=float(np.mean([not rollout.finished for rollout in rollouts])),
        temperature=sampling.temperature,
        seed=sampling.seed,
        prompt_ids=[prompt.id for prompt in prompts],
        correct=correct,
        answers=[[task.answer(text) for text in own] for own in texts_of],
    )
