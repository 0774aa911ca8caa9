"""From prompts to rollouts: encode each prompt once, sample, and number what came back.

1. A prompt becomes ids through the tokenizer's chat template (generation prompt included) or as plain text. A
   conversation needs the template, and one that has a place for all of its messages.
2. Every prompt is sampled ``num_generations`` times; sample s of a prompt has noise of its own. A prompt that comes
   again continues its sample numbers, so that no two rollouts share their noise.
3. Rollouts are numbered consecutively, prompt after prompt, sample after sample.
"""

import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from rocktokens.config import RolloutsSection
from rocktokens.errors import RocktokensError
from rocktokens.rollouts.sampler import Sampler, SampleRequest
from rocktokens.types import Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TEMPLATE_SECONDS = 20.0
"""Of computing, for one prompt: templates take milliseconds."""
OTHER_MESSAGES = "leave out task.system_prompt and such messages, or use models that take them"
CORRECT_TEMPLATE = (
    "correct chat_template.jinja beside the model, use other models, or set rollouts.chat_template = false"
)
TEMPLATE_FAILS = (TimeoutError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What the code of a template raises that is not about messages."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How prompts are encoded and answered: the same model gives the same answers under the same settings."""

    temperature: float
    """0 is greedy."""
    max_new_tokens: int
    """Longest response."""
    seed: int
    """Of the noise."""
    chat_template: bool = True
    """Whether prompts go through the tokenizer's chat template, if it has one."""
    max_prompt_length: int = 512
    """In tokens; a longer prompt is an error."""

    @classmethod
    def of(cls, section: RolloutsSection, seed: int, temperature: float | None = None) -> "Sampling":
        """Read the settings of a run's config, at another temperature if one is given."""
        return cls(
            temperature=section.temperature if temperature is None else temperature,
            max_new_tokens=section.max_completion_length,
            seed=seed,
            chat_template=section.chat_template,
            max_prompt_length=section.max_prompt_length,
        )


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase", prompt: Prompt, chat_template: bool, max_prompt_length: int
) -> np.ndarray:
    """Encode a prompt as the model sees it, int32 (P,); too long or empty is an error, never cut or padded."""
    if chat_template and tokenizer.chat_template:
        ids = _through_template(tokenizer, prompt)
    elif prompt.messages:
        why = "the tokenizer has none" if chat_template else "rollouts.chat_template is false"
        raise RocktokensError(
            f"prompt {prompt.id!r} is a conversation of {len(prompt.messages)} messages, the first of "
            f"{prompt.messages[0].role!r}, which only a chat template can render, and {why}: use models with one, or "
            "plain prompts without task.system_prompt"
        )
    else:
        ids = tokenizer(prompt.text)["input_ids"]
    ids_P = np.asarray(ids, dtype=np.int32)
    if ids_P.size == 0:
        raise RocktokensError(f"prompt {prompt.id!r} has no tokens (its text is {prompt.text!r}): remove it")
    if ids_P.size > max_prompt_length:
        raise RocktokensError(
            f"prompt {prompt.id!r} has {ids_P.size} tokens, rollouts.max_prompt_length is {max_prompt_length}: "
            "raise that or remove the prompt"
        )
    return ids_P


def encode_prompts(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Prompt], section: RolloutsSection
) -> list[np.ndarray]:
    """Encode prompts as ``encode_prompt`` does: what it refuses is refused before anything is written."""
    return [encode_prompt(tokenizer, own, section.chat_template, section.max_prompt_length) for own in prompts]


def _through_template(tokenizer: "PreTrainedTokenizerBase", prompt: Prompt) -> Any:
    """Encode a prompt by the tokenizer's template; refused where that has no place for one of the messages."""
    turns = [asdict(own) for own in prompt.messages] or [{"role": "user", "content": prompt.text}]
    remedy = OTHER_MESSAGES
    render: Callable[..., Any] = partial(tokenizer.apply_chat_template, add_generation_prompt=True)
    try:
        with _bounded(TEMPLATE_SECONDS):
            ids = render(turns, tokenize=True, return_dict=False)
            problem = _lost_system(render, turns) if turns[0]["role"] == "system" else ""
    except TemplateError as error:
        ids, problem = [], f"refuses the messages ({error})"
        # A template that refuses on purpose raises that very class; its own faults are of classes below.
        remedy = OTHER_MESSAGES if type(error) is TemplateError else CORRECT_TEMPLATE
    except TEMPLATE_FAILS as error:
        raise RocktokensError(
            f"the tokenizer's chat template fails on prompt {prompt.id!r} ({type(error).__name__}: {error}): "
            f"{CORRECT_TEMPLATE}"
        ) from None
    if problem:
        raise RocktokensError(f"the tokenizer's chat template {problem} in prompt {prompt.id!r}: {remedy}")
    return ids


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """End a block that computes for longer, which only the main thread can; what others compute does not count."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it does not end within {seconds:g} seconds")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _lost_system(render: Callable[..., Any], turns: list[dict[str, str]]) -> str:
    """Say what a template does with a system message that it does not know; nothing where it knows it."""
    text = render(turns, tokenize=False)
    if turns[0]["content"].strip() not in text:
        return "drops the system message"
    try:
        is_mistaken = render([{**turns[0], "role": "assistant"}, *turns[1:]], tokenize=False) == text
    except TemplateError:
        return ""
    return "takes the system message for the assistant's" if is_mistaken else ""


def make_rollouts(
    sampler: Sampler,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    num_generations: int = 1,
    policy_step: int = 0,
    first_rollout_id: int = 0,
    share: range | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[Rollout]:
    """Sample every prompt ``num_generations`` times; prompt-major, with rollout ids from ``first_rollout_id`` on.

    A prompt id given twice gets ``2 * num_generations`` different completions. ``policy_step`` is the training step of
    the sampler's weights; ``share`` are the places in ``prompts`` to make the rollouts of, numbered as in the whole
    list (default: all). ``on_done`` is called with the number of completions that have ended since the last call.
    """
    share = range(len(prompts)) if share is None else share
    numbers: defaultdict[str, count[int]] = defaultdict(count)
    earlier = [next(numbers[prompt.id]) for prompt in prompts]
    template, longest = sampling.chat_template, sampling.max_prompt_length
    encoded = {place: encode_prompt(tokenizer, prompts[place], template, longest) for place in share}
    requests = [
        SampleRequest(prompts[place].id, ids_P, earlier[place] * num_generations + generation)
        for place, ids_P in encoded.items()
        for generation in range(num_generations)
    ]
    completions = sampler.sample(
        requests,
        temperature=sampling.temperature,
        max_new_tokens=sampling.max_new_tokens,
        seed=sampling.seed,
        on_done=on_done,
    )
    return [
        Rollout(
            rollout_id=first_rollout_id + share.start * num_generations + index,
            prompt_id=request.prompt_id,
            sample=request.sample,
            prompt_ids=request.prompt_ids,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            policy_step=policy_step,
            finished=completion.finished,
        )
        for index, (request, completion) in enumerate(zip(requests, completions, strict=True))
    ]
