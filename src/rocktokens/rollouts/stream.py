"""Decoding a stream of rollouts in one batch that is refilled as they end.

1. A rollout enters a free row with the states of its prompt (one padded forward for several prompts together, equal
   ones once) or, for a branch, with those of the rollout it leaves, up to where it leaves it. Nothing that is shared is
   computed again.
2. Steps advance all rows (see ``rows``): raw logits (float32) → log-softmax for the record → banned ids to −∞ →
   argmax(logits / τ + Gumbel noise), or plain argmax when τ = 0 (see ``noise``). A ban with alternatives acts where one
   of them is likely. A row that retraces a known rollout takes that rollout's next token instead. On a GPU several
   steps are taken between looks at which rows have ended.
3. A row ends with the first end token it samples, at ``max_new_tokens``, or when it has the length it was to have. The
   next rollout takes its place; when none is left, the last row does, so that the rows in use are always the first.

A row does not depend on the others in its batch. Its noise is its own, so only rounding could differ, where two tokens
tie to within it. Shapes are chosen so that rounding does not differ either: prompts end at a multiple of
``WIDTH_BLOCK`` slots and widths are multiples of it, so that vectorised sums over keys group the same terms whatever
the padding; rows are multiples of ``ROW_BLOCK``, which all take the same matrix kernel; and the last token of a prompt
is fed by a step, like all that follow, so that no number depends on where a rollout entered. With MKL in float32 on one
CPU thread, results are the same bit for bit in any batch, branches included. On more threads the rounding of attention
depends on which thread has the row, and results are the same up to such ties; on a GPU it depends on the shape that is
replayed.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from rocktokens.rollouts.decoding import (
    ROW_BLOCK,
    WIDTH_BLOCK,
    DecodingSettings,
    Ended,
    StreamRequest,
    left_padded,
    require_logprobs,
    round_up,
)
from rocktokens.rollouts.rows import DecodingRows
from rocktokens.rollouts.slots import States, one_token_attention

PREFILL_SHARE = 4
"""New prompts wait until one row in this many is free, so that several are read together."""
GPU_WIDTH_BLOCK = 64
GPU_CHECK_STEPS = 8
"""Steps between looks at which rows are finished: each look waits for the GPU to catch up."""


@dataclass(slots=True)
class _Trunk:
    """What a retraced request left for its branches."""

    states: States
    slots: int
    waiting: int


def stream_rows(
    model: Any, settings: DecodingSettings, requests: list[StreamRequest], kept: DecodingRows | None
) -> DecodingRows:
    """Rows with room for the longest of the requests: those of an earlier call if they serve, else new ones."""
    limit = round_up(min(settings.batch_size, sum(max(1, len(request.branches)) for request in requests)), ROW_BLOCK)
    capacity = needed_slots(requests, settings)
    written = [own for request in requests for own in request.branches or (request,)]
    needs = {
        "bans": any(own.banned for own in written),
        "alternatives": max(len(own.alternatives) for own in written),
        "retraces": any(request.branches for request in requests),
    }
    if kept is not None and kept.serves(settings, limit, capacity, **needs):
        return kept
    return DecodingRows(model, settings, limit, capacity, **needs)


def needed_slots(requests: list[StreamRequest], settings: DecodingSettings) -> int:
    """Return the slots of a row that can hold any of the requests."""
    return round_up(max(request.base for request in requests) + settings.max_new_tokens, WIDTH_BLOCK)


class Stream:
    """The batch: which request is in which row, and when to look at them."""

    def __init__(self, rows: DecodingRows, requests: list[StreamRequest], memory: int) -> None:
        """Begin with empty ``rows``, those of ``stream_rows`` for these requests.

        ``memory`` is in bytes, for the states of retraced requests: the next waits until there is room, or no other is
        open.
        """
        self.rows, self.model, self.settings = rows, rows.model, rows.settings
        self.on_gpu = rows.state_FR.is_cuda
        self.limit = len(rows.rows_R)
        self.widest = needed_slots(requests, rows.settings)
        self.in_rows: list[StreamRequest] = []
        self.bases, self.ends, self.steps = self.counters = np.zeros((3, self.limit), np.int64)
        """Of each row: the slot of its first response token, the step it ends before, and the step it is at."""
        self.requests = deque(requests)
        self.branches: deque[tuple[_Trunk, StreamRequest]] = deque()
        self.memory = memory
        self.held_slots = 0

    def run(self) -> Iterator[Ended]:
        """Lines and branches as they end."""
        while self.requests or self.branches or self.in_rows:
            self._refill()
            if self.in_rows:
                yield from self._end(self._advance())

    # Entering

    def _refill(self) -> None:
        free = self.limit - len(self.in_rows)
        entering = [self.branches.popleft() for _ in range(min(free, len(self.branches)))]
        if entering:
            self._enter_branches(entering)
            free -= len(entering)
        worth_reading = not self.in_rows or free * PREFILL_SHARE >= self.limit
        if worth_reading and (requests := self._next_requests(free)):
            self._enter_prompts(requests)

    def _next_requests(self, free: int) -> list[StreamRequest]:
        """As many as there are rows, and memory for the states that their branches will need."""
        entering: list[StreamRequest] = []
        slot_bytes = self.rows.cache.slot_bytes
        while self.requests and len(entering) < free:
            slots = self.requests[0].base + len(self.requests[0].known) if self.requests[0].branches else 0
            if slots and self.held_slots and (self.held_slots + slots) * slot_bytes > self.memory:
                break
            self.held_slots += slots
            entering.append(self.requests.popleft())
            if slots and not slot_bytes:
                break
        return entering

    def _enter_prompts(self, requests: list[StreamRequest]) -> None:
        prompts = {request.prompt.tobytes(): request.prompt for request in requests}
        places = {key: place for place, key in enumerate(prompts)}
        states = prefill(self.model, list(prompts.values()), self.settings.pad_id)
        width = states[0][0].shape[2]
        for base, group in groupby(zip(self._enter(requests), requests, strict=True), key=lambda pair: pair[1].base):
            pairs = list(group)
            rows_n = self._index([row for row, _ in pairs])
            sources_n = self._index([places[request.prompt.tobytes()] for _, request in pairs])
            own = [[part[sources_n, :, width - base :] for part in layer] for layer in states]
            self.rows.cache.load(rows_n, own)

    def _enter_branches(self, entering: list[tuple[_Trunk, StreamRequest]]) -> None:
        numbered = zip(self._enter([request for _, request in entering]), entering, strict=True)
        for _, group in groupby(numbered, key=lambda pair: id(pair[1][0])):
            pairs = list(group)
            trunk = pairs[0][1][0]
            self.rows.cache.load(self._index([row for row, _ in pairs]), trunk.states)
            trunk.waiting -= len(pairs)
            if trunk.waiting == 0:
                self.held_slots -= trunk.slots

    def _enter(self, requests: list[StreamRequest]) -> range:
        """The next rows, now those of these requests."""
        rows = range(len(self.in_rows), len(self.in_rows) + len(requests))
        self.rows.enter(rows, requests)
        counters = [(request.base, request.end(self.settings.max_new_tokens), request.start) for request in requests]
        self.counters[:, rows.start : rows.stop] = np.array(counters).T
        self.in_rows.extend(requests)
        return rows

    def _index(self, rows: list[int]) -> torch.Tensor:
        return torch.tensor(rows, device=self.model.device)

    # Stepping

    def _advance(self) -> list[int]:
        """Take steps up to the next look; returns the rows that have ended."""
        count = len(self.in_rows)
        left = int((self.ends - self.steps)[:count].max())
        steps = min(GPU_CHECK_STEPS, left) if self.on_gpu else 1
        rows, width = self._shape(count, self._filled() + steps)
        with one_token_attention(self.model):
            self.rows.advance(steps, rows, width)
        live_A, self.steps[:count] = self.rows.look(count)
        return np.flatnonzero(~live_A).tolist()

    def _filled(self) -> int:
        """The most slots that a row has filled."""
        return int((self.bases + self.steps)[: len(self.in_rows)].max()) - 1

    def _shape(self, rows: int, slots: int) -> tuple[int, int]:
        """Rows and slots of the next steps; few different ones on a GPU, where each is captured."""
        if not self.on_gpu:
            return round_up(rows, ROW_BLOCK), round_up(slots, WIDTH_BLOCK)
        halved = self.limit
        while halved % (2 * ROW_BLOCK) == 0 and halved // 2 >= rows:
            halved //= 2
        block = max(GPU_WIDTH_BLOCK, 1 << (slots.bit_length() - 3))
        return halved, min(round_up(slots, block), self.widest)

    # Leaving

    def _end(self, ended: list[int]) -> Iterator[Ended]:
        if not ended:
            return
        tokens_nT, logprobs_nT = self.rows.written(ended)
        for row, tokens_T, logprobs_T in zip(ended, tokens_nT, logprobs_nT, strict=True):
            request, step = self.in_rows[row], int(self.steps[row])
            if request.branches:
                slots = request.base + step - 1
                trunk = _Trunk(self.rows.cache.save(row, slots), slots, len(request.branches))
                self.branches.extend((trunk, branch) for branch in request.branches)
            else:
                here = slice(request.start, step)
                require_logprobs(request.name, request.start, logprobs_T[here])
                finished = int(tokens_T[step - 1]) in self.settings.eos_ids
                yield request.index, tokens_T[here].copy(), logprobs_T[here].copy(), finished
        self._leave(ended)

    def _leave(self, ended: list[int]) -> None:
        """Put the last rows in the places of those that have ended."""
        staying = sorted(set(range(len(self.in_rows))) - set(ended))
        targets = [row for row in ended if row < len(staying)]
        if targets:
            sources = staying[-len(targets) :]
            self.rows.move(sources, targets, self._filled())
            self.counters[:, targets] = self.counters[:, sources]
            for source, target in zip(sources, targets, strict=True):
                self.in_rows[target] = self.in_rows[source]
        self.rows.vacate(range(len(staying), len(self.in_rows)))
        del self.in_rows[len(staying) :]


def prefill(model: Any, prompts: list[np.ndarray], pad_id: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (rows, heads, padded width, width) of left-padded prompts, layer by layer."""
    idle = [prompts[0]] * (round_up(len(prompts), ROW_BLOCK) - len(prompts))
    input_ids_RL, attention_mask_RL = left_padded([*prompts, *idle], pad_id)
    cache: Any = DynamicCache(config=model.config)
    model(
        input_ids=input_ids_RL.to(model.device),
        attention_mask=attention_mask_RL.to(model.device),
        position_ids=(attention_mask_RL.cumsum(1) - 1).clamp_(min=0).to(model.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return [(layer.keys, layer.values) for layer in cache.layers]
