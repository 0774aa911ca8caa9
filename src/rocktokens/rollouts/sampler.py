"""Sampling completions: the request, the completion, and the sampler over a transformers model in memory.

Requests are checked, sorted by prompt length so that batches need little padding, decoded batch by batch
(see ``decoding``), and given back in the order they came. What a request gets does not depend on its batch mates.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rocktokens.errors import RocktokensError
from rocktokens.rollouts.decoding import DecodingBatch, DecodingSettings, decode_batch
from rocktokens.rollouts.noise import stream_key


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to write; prompt id and sample number name its noise."""

    prompt_id: str
    prompt_ids: np.ndarray
    """int (P,): the prompt as the model sees it."""
    sample: int = 0
    banned: frozenset[int] = frozenset()
    """Ids that may not be written; never an end token."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled.

    Example: two tokens and the end token have ``token_ids.shape == (3,)`` and ``finished == True``.
    """

    token_ids: np.ndarray
    """int32 (T,): the end token included when it was sampled."""
    logprobs: np.ndarray
    """float32 (T,): at temperature 1, before any ban."""
    finished: bool
    """True when it ended with an end token, False when it ran into the length limit."""


class Sampler(Protocol):
    """Anything that can complete prompts."""

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_new_tokens: int,
        seed: int,
        on_done: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the requests.

        Args:
            requests: what to complete.
            temperature: of the sampling; 0 is greedy, the lowest id winning a tie.
            max_new_tokens: longest response.
            seed: of the noise.
            on_done: called now and then with the number of completions that have ended since the last call.
        """
        ...


class TransformersSampler:
    """Samples from a causal language model in memory."""

    def __init__(
        self,
        model: Any,
        eos_ids: frozenset[int],
        pad_id: int,
        batch_size: int = 64,
        vocab_size: int | None = None,
        max_length: int | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: a transformers causal LM, or one that PEFT wraps.
            eos_ids: every id that ends a response.
            pad_id: any valid id; padding is masked.
            batch_size: sequences decoded together.
            vocab_size: head columns from here on are padding and are never sampled; default: the head has none.
            max_length: prompt and response tokens that the teacher, who reads them next, can see; default: any number.
        """
        text_config = model.config.get_text_config()
        self.model = model
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self.batch_size = batch_size
        self.vocab_size: int = min(vocab_size or text_config.vocab_size, text_config.vocab_size)
        self.context_lengths: dict[str, int | None] = {
            "model": getattr(text_config, "max_position_embeddings", None),
            "teacher": max_length,
        }

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_new_tokens: int,
        seed: int,
        on_done: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the requests; see ``Sampler``."""
        for request in requests:
            self._check(request, max_new_tokens)
        settings = DecodingSettings(
            self.eos_ids, self.pad_id, self.vocab_size, self.batch_size, temperature, max_new_tokens
        )
        by_length = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
        completions: dict[int, Completion] = {}
        with torch.no_grad(), evaluation_mode(self.model):
            for start in range(0, len(requests), self.batch_size):
                indices = by_length[start : start + self.batch_size]
                batch = _batch([requests[index] for index in indices], seed)
                decoded = decode_batch(self.model, batch, settings, on_done)
                completions |= {index: Completion(*row) for index, row in zip(indices, decoded, strict=True)}
        return [completions[index] for index in range(len(requests))]

    def _check(self, request: SampleRequest, max_new_tokens: int) -> None:
        name, length = f"prompt {request.prompt_id!r}", len(request.prompt_ids)
        if length == 0:
            raise RocktokensError(f"{name} has no tokens: give it at least one")
        for reader, context in self.context_lengths.items():
            if context is not None and length + max_new_tokens > context:
                raise RocktokensError(
                    f"{name} has {length} tokens and may be answered by {max_new_tokens} more, but the {reader} sees "
                    f"only {context}: lower rollouts.max_completion_length or shorten the prompt"
                )
        if ends := request.banned & self.eos_ids:
            raise RocktokensError(f"{name}: end token {min(ends)} is banned, so no response could end: unban it")
        if outside := {token for token in request.banned if not 0 <= token < self.vocab_size}:
            raise RocktokensError(
                f"{name}: banned id {min(outside)} is outside the vocabulary of {self.vocab_size}: remove it"
            )
        if len(request.banned) >= self.vocab_size:
            raise RocktokensError(f"{name}: all {self.vocab_size} ids are banned: leave at least one")


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """The model without dropout; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _batch(requests: list[SampleRequest], seed: int) -> DecodingBatch:
    return DecodingBatch(
        names=[request.prompt_id for request in requests],
        prompts=[request.prompt_ids for request in requests],
        stream_keys=[stream_key(seed, request.prompt_id, request.sample) for request in requests],
        banned=[request.banned for request in requests],
    )
