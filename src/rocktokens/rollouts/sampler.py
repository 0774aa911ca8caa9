"""Sampling completions: the request, the completion, and the sampler over a transformers model in memory.

Requests are checked, sorted by prompt length so that batches need little padding, decoded together (see ``stream``; see
``generate`` for models whose cache cannot be refilled), and returned in the order they came. What a request gets does
not depend on the others in its batch. A branch leaves a rollout that was sampled before, at the first id that is now
banned: it has the noise of that rollout, and only what follows is decoded.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from rocktokens.config import Config
from rocktokens.errors import ConfigError, RocktokensError
from rocktokens.models.head import output_head, refusing_strangers
from rocktokens.models.layers import quick_layers
from rocktokens.models.load import LoadedModel
from rocktokens.models.projections import lay_side_by_side
from rocktokens.models.shards import gathered
from rocktokens.rollouts.decoding import DecodingSettings, Ended, StreamRequest
from rocktokens.rollouts.generate import generate_batches, require_hidden_padding
from rocktokens.rollouts.noise import stream_key
from rocktokens.rollouts.probe import require_scored_as_sampled
from rocktokens.rollouts.rows import DecodingRows
from rocktokens.rollouts.slots import fits
from rocktokens.rollouts.stream import Stream, stream_rows
from rocktokens.types import Rollout

TRUNK_MEMORY = 1 << 30
"""Bytes for the states that branches wait for."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to write; prompt id and sample number name its noise."""

    prompt_id: str
    prompt_ids: np.ndarray
    """int (P,): the prompt as the model sees it."""
    sample: int = 0
    banned: frozenset[int] = frozenset()
    """Ids that may not be written; never an end token."""
    alternatives: frozenset[int] = frozenset()
    """The ban acts only where the model gives one of these at least ``decoding.LIKELY``, at temperature 1 and before
    any ban; everywhere if there are none."""


@dataclass(frozen=True, slots=True)
class Branch:
    """What a rollout would have been with some ids banned: the same up to the first of them, then decoded again."""

    trunk: int
    """Index of the rollout in the list of trunks."""
    start: int
    """Response tokens that both have in common."""
    banned: frozenset[int]
    alternatives: frozenset[int] = frozenset()
    """As in ``SampleRequest``."""
    length: int | None = None
    """Tokens to decode at most; default: as many as a response may have."""


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
    """Completes prompts."""

    eos_ids: frozenset[int]
    """Every id that ends a response."""
    vocab_size: int
    """Ids below this can be written."""

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_new_tokens: int,
        seed: int,
        on_done: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Complete the requests, in their order.

        A ``temperature`` of 0 is greedy, the lowest id winning a tie; ``seed`` is that of the noise. ``on_done`` is
        called now and then with the number of completions that have ended since the last call.
        """
        ...

    def branch(
        self,
        trunks: Sequence[Rollout],
        branches: Sequence[Branch],
        *,
        temperature: float,
        max_new_tokens: int,
        seed: int,
        on_done: Callable[[int, Completion], None],
    ) -> None:
        """Write how rollouts would have gone on under a ban.

        A server does it with the prompt and the first ``start`` tokens as its prompt, and the ban as ``logit_bias``;
        one that does not know our noise can do it for greedy rollouts. A ban with alternatives needs an engine that
        looks at every step's distribution.

        The trunks are rollouts of this sampler with the same temperature and seed; ``max_new_tokens`` counts the shared
        part. ``on_done`` is called with the place of a branch and its tokens from ``start`` on, as soon as it ends.
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
        threads: int | None = None,
        refresh: Callable[[], None] | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: a transformers causal LM, or one that PEFT wraps.
            eos_ids: every id that ends a response.
            pad_id: any valid id; padding is masked.
            batch_size: sequences decoded together.
            vocab_size: head columns from here on are padding and are never sampled; default: the head has none.
            max_length: prompt and response tokens that the teacher, who reads them next, can see; default: any number.
            threads: of the CPU while sampling; on one, float32 rollouts are the same bit for bit in any batch.
            refresh: brings the weights of ``model`` up to date; called before every use.
        """
        text_config = model.config.get_text_config()
        self.model, self.refresh = model, refresh
        self.eos_ids, self.pad_id = eos_ids, pad_id
        self.batch_size, self.threads = batch_size, threads
        self._rows: DecodingRows | None = None
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
            self.require_possible(request, max_new_tokens)
        completions: dict[int, Completion] = {}

        def done(index: int, completion: Completion) -> None:
            completions[index] = completion
            if on_done:
                on_done(1)

        by_length = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
        self._decode(
            [_stream_request(index, requests[index], seed) for index in by_length], temperature, max_new_tokens, done
        )
        return [completions[index] for index in range(len(requests))]

    def branch(
        self,
        trunks: Sequence[Rollout],
        branches: Sequence[Branch],
        *,
        temperature: float,
        max_new_tokens: int,
        seed: int,
        on_done: Callable[[int, Completion], None],
    ) -> None:
        """Write how rollouts would have gone on under a ban; see ``Sampler``."""
        leaving: dict[int, list[StreamRequest]] = {}
        for index, branch in enumerate(branches):
            trunk = trunks[branch.trunk]
            request = SampleRequest(trunk.prompt_id, trunk.prompt_ids, trunk.sample, branch.banned, branch.alternatives)
            self.require_possible(request, max_new_tokens)
            if not 0 <= branch.start < min(len(trunk.token_ids), max_new_tokens):
                raise RocktokensError(
                    f"prompt {trunk.prompt_id!r}: a branch leaves it at token {branch.start} of "
                    f"{len(trunk.token_ids)}, and at most {max_new_tokens} may be written: give the position of a "
                    "token it has"
                )
            known = trunk.token_ids[: branch.start]
            own = replace(_stream_request(index, request, seed), known=known, length=branch.length)
            leaving.setdefault(branch.trunk, []).append(own)
        retraced = []
        for own in leaving.values():  # as far as any needs: each branch feeds the last token it shares itself
            longest = max(own, key=lambda request: len(request.known))
            shared = replace(longest, index=-1, banned=frozenset(), known=longest.known[:-1], branches=tuple(own))
            retraced.append(shared)
        self._decode(retraced, temperature, max_new_tokens, on_done)

    def _decode(
        self,
        requests: list[StreamRequest],
        temperature: float,
        max_new_tokens: int,
        on_done: Callable[[int, Completion], None],
    ) -> None:
        if self.refresh:  # also without requests: other processes may have some, and gather with this one
            self.refresh()
        if not requests:
            return
        settings = self._settings(temperature, max_new_tokens)
        with torch.no_grad(), evaluation_mode(self.model), quick_layers(self.model), cpu_threads(self.threads):
            decode = self._stream if fits(self.model) else partial(generate_batches, self.model)
            for index, token_ids, logprobs, finished in decode(requests, settings):
                on_done(index, Completion(token_ids, logprobs, finished))

    def _settings(self, temperature: float, max_new_tokens: int) -> DecodingSettings:
        return DecodingSettings(
            self.eos_ids, self.pad_id, self.vocab_size, self.batch_size, temperature, max_new_tokens
        )

    def _stream(self, requests: list[StreamRequest], settings: DecodingSettings) -> Iterator[Ended]:
        """In one refilled batch; on a GPU its rows stay for the next call, with what was captured for them."""
        rows, self._rows = stream_rows(self.model, settings, requests, self._rows), None
        yield from Stream(rows, requests, TRUNK_MEMORY).run()
        if self.model.device.type == "cuda":
            self._rows = rows

    def require_possible(self, request: SampleRequest, max_new_tokens: int) -> None:
        """Refuse a request that leads out of a context or of the vocabulary, or that could not end."""
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
        for what, ids in (("banned", request.banned), ("alternative", request.alternatives)):
            if outside := {token for token in ids if not 0 <= token < self.vocab_size}:
                raise RocktokensError(
                    f"{name}: {what} id {min(outside)} is outside the vocabulary of {self.vocab_size}: remove it"
                )
        if len(request.banned) >= self.vocab_size:
            raise RocktokensError(f"{name}: all {self.vocab_size} ids are banned: leave at least one")


class SamplingCopy:
    """A whole copy of a model, on the device and in the dtype to sample from, whose weights follow the original's.

    Training keeps the student in float32 and computes in bfloat16 by autocast, which would convert every weight at
    every token of a rollout; or it keeps the student in shards, which would be gathered at every token. The copy is
    brought up to date once per step. Its tensors stay where they are, as captured CUDA graphs need. Only the parameters
    are converted: the tables of rotary positions lose too much in bfloat16. It is made while the original is whole.
    """

    def __init__(self, source: torch.nn.Module, dtype: torch.dtype, device: torch.device | str | None = None) -> None:
        self._source = source
        self.model = copy.deepcopy(source).requires_grad_(False)
        for own in self.model.parameters():
            own.data = own.data.to(dtype)
        self.model.to(device)
        lay_side_by_side(self.model)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights of the parameters that are trained; every process takes part where these are shards.

        Sharding replaces the parameters of the original, so they are looked up each time.
        """
        for own, given in zip(self.model.parameters(), self._source.parameters(), strict=True):
            if given.requires_grad:
                own.copy_(gathered(given))


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


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Use this many threads for torch's operators on the CPU, None for as many as now; afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _stream_request(index: int, request: SampleRequest, seed: int) -> StreamRequest:
    key = stream_key(seed, request.prompt_id, request.sample)
    return StreamRequest(index, request.prompt_id, request.prompt_ids, key, request.banned, request.alternatives)


def make_sampler(
    config: Config,
    student: LoadedModel,
    teacher: LoadedModel | None = None,
    *,
    threads: int | None = None,
    copied: SamplingCopy | None = None,
) -> TransformersSampler:
    """Make the student's sampler; columns that only one of the two heads has are never sampled.

    It samples from ``copied``, if that is given, which follows the student as it is trained. The teacher is who reads
    the completions next, if one does; ``threads`` are those of the CPU while sampling.
    """
    of_student: dict[str, Any] = {
        "model": copied.model if copied else student.model,
        "eos_ids": student.eos_ids,
        "pad_id": student.pad_id,
        "batch_size": config.rollouts.batch_size,
        "vocab_size": min(output_head(loaded.model).width for loaded in (student, teacher) if loaded is not None),
        "max_length": None if teacher is None else teacher.context_length,
        "threads": threads,
        "refresh": copied.refresh if copied else None,
    }
    if config.rollouts.engine == "transformers":
        if not fits(student.model):
            with evaluation_mode(student.model), torch.inference_mode(), refusing_strangers(student.model):
                require_hidden_padding(student.model, student.pad_id)
        sampler = TransformersSampler(**of_student)
        require_scored_as_sampled(sampler)
        return sampler
    try:
        from rocktokens.rollouts.vllm import make_vllm_sampler
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'rollouts.engine = "vllm" needs {error.name}, which is not installed: pip install "rocktokens[vllm]"'
        ) from None
    return make_vllm_sampler(config, of_student)
