"""Decoding a stream of rollouts in one batch that is refilled as they end.

1. A rollout enters a free row with the states of its prompt (one padded forward for several prompts together) or, for a
   branch, with those of the rollout it leaves, up to where it leaves it. Nothing of the shared part is computed again.
2. One step feeds every row the last token it has and takes the next: raw logits (float32) → log-softmax for the record
   → banned ids to −∞ → argmax(logits / τ + Gumbel noise), or plain argmax when τ = 0 (see ``noise``). A row that
   retraces a known rollout takes that rollout's next token instead.
3. A row ends with the first end token it samples, at ``max_new_tokens``, or when it has retraced what it had to. The
   next rollout takes its place; when none is left, the last row does, so that the rows in use are always the first.

A row does not depend on its batch mates. Its noise is its own, so only rounding could differ, where two tokens tie to
within it. Shapes are chosen so that rounding does not differ either: prompts end at a multiple of ``WIDTH_BLOCK`` slots
and widths are multiples of it, so that vectorised sums over keys group the same terms whatever the padding; rows are
multiples of ``ROW_BLOCK``, which all take the same matrix kernel; and the last token of a prompt is fed by a step, like
all that follow, so that no number depends on where a rollout entered. With MKL in float32 on one CPU thread, results
are the same bit for bit in any batch, branches included. On more threads the rounding of attention depends on which
thread has the row, and results are the same up to such ties.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from rocktokens.errors import NonFiniteLossError
from rocktokens.rollouts.decoding import ROW_BLOCK, WIDTH_BLOCK, DecodingSettings, choose, round_up
from rocktokens.rollouts.slots import SlotCache, States

Ended = tuple[int, np.ndarray, np.ndarray, bool]
"""Index of a line, its token ids (int32) and their log-probabilities (float32), and whether it finished."""
PREFILL_SHARE = 4
"""New prompts wait until one in so many rows is free, so that several are read together."""


@dataclass(frozen=True, slots=True)
class Line:
    """A rollout to write, or to retrace."""

    index: int
    """What the caller knows it by."""
    name: str
    """What errors call it."""
    prompt: np.ndarray
    stream_key: int
    banned: frozenset[int] = frozenset()
    known: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """Response tokens it begins with."""
    branches: tuple["Line", ...] = ()
    """Rollouts that leave this one at most one token behind ``known``; with any, the line only retraces that."""

    @property
    def base(self) -> int:
        """The slot of the first response token."""
        return round_up(len(self.prompt), WIDTH_BLOCK)


@dataclass(slots=True)
class _Trunk:
    """What a retraced line left for its branches."""

    states: States
    slots: int
    waiting: int


@dataclass(slots=True)
class _Row:
    line: Line
    tokens: list[int] = field(default_factory=list)
    """Written so far, from the end of ``line.known`` on."""
    logprobs: list[float] = field(default_factory=list)


class Stream:
    """The batch: which line is in which row, and what the model needs to know about each row."""

    def __init__(self, model: Any, settings: DecodingSettings, lines: list[Line], memory: int) -> None:
        """Make room for the longest of the lines.

        Args:
            model: a causal LM whose cache ``slots.fits``.
            settings: what all lines share.
            lines: what to write, in order; branches come when their line has been retraced.
            memory: bytes for the states of retraced lines: the next waits until there is room, or no other is open.
        """
        self.model, self.settings = model, settings
        self.longest_base = max(line.base for line in lines)
        capacity = round_up(self.longest_base + settings.max_new_tokens, WIDTH_BLOCK)
        limit = round_up(min(settings.batch_size, sum(max(1, len(line.branches)) for line in lines)), ROW_BLOCK)
        self.limit = limit
        self.cache = SlotCache(model.config, limit, capacity)
        self.mask_RL = torch.full((limit, capacity), -torch.inf, dtype=model.dtype, device=model.device)
        any_bans = any(line.banned or any(branch.banned for branch in line.branches) for line in lines)
        self.banned_RV = (
            torch.zeros(limit, settings.vocab_size, dtype=torch.bool, device=model.device) if any_bans else None
        )
        self.last_ids, self.slots, self.positions, self.steps, self.stream_keys = np.zeros((5, limit), np.int64)
        self.rows: list[_Row] = []
        self.lines = deque(lines)
        self.branches: deque[tuple[_Trunk, Line]] = deque()
        self.memory = memory
        self.held_slots = 0

    def run(self) -> Iterator[Ended]:
        """Lines and branches as they end."""
        while self.lines or self.branches or self.rows:
            self._refill()
            if self.rows:
                yield from self._end(self._step())

    # Entering

    def _refill(self) -> None:
        while self.branches and len(self.rows) < self.limit:
            self._enter_branch(*self.branches.popleft())
        free = self.limit - len(self.rows)
        worth_reading = not self.rows or free * PREFILL_SHARE >= self.limit
        if worth_reading and (entering := self._next_lines(free)):
            self._enter_prompts(entering)

    def _next_lines(self, free: int) -> list[Line]:
        """As many as there are rows, and memory for the states that their branches will need."""
        entering: list[Line] = []
        while self.lines and len(entering) < free:
            slots = self.lines[0].base + len(self.lines[0].known) if self.lines[0].branches else 0
            if slots and self.held_slots and (self.held_slots + slots) * self.cache.slot_bytes > self.memory:
                break
            self.held_slots += slots
            entering.append(self.lines.popleft())
            if slots and not self.cache.slot_bytes:
                break
        return entering

    def _enter_prompts(self, lines: list[Line]) -> None:
        states = prefill(self.model, [line.prompt for line in lines], self.settings.pad_id)
        for number, line in enumerate(lines):
            row = self._enter(line, len(line.prompt) - 1, int(line.prompt[-1]), 0)
            width = states[0][0].shape[2]
            own = [[part[number, :, width - line.base :] for part in layer] for layer in states]
            self.cache.load(row, own, line.base)

    def _enter_branch(self, trunk: _Trunk, line: Line) -> None:
        start = len(line.known)
        last = int(line.known[-1] if start else line.prompt[-1])
        row = self._enter(line, len(line.prompt) + start - 1, last, start)
        self.cache.load(row, trunk.states, line.base + start - 1)
        trunk.waiting -= 1
        if trunk.waiting == 0:
            self.held_slots -= trunk.slots

    def _enter(self, line: Line, position: int, last_id: int, step: int) -> int:
        """Take the next row for a line that is about to be fed ``last_id``, to get response position ``step``."""
        row = len(self.rows)
        self.rows.append(_Row(line))
        slot = line.base + step - 1
        state = last_id, slot, position, step, line.stream_key
        for array, value in zip(self._arrays(), state, strict=True):
            array[row] = value
        self.mask_RL[row] = -torch.inf
        self.mask_RL[row, slot - position : slot] = 0
        if self.banned_RV is not None:
            self.banned_RV[row] = False
            self.banned_RV[row, list(line.banned)] = True
        return row

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.last_ids, self.slots, self.positions, self.steps, self.stream_keys

    # Going on

    def _step(self) -> list[int]:
        """Feed every row its last token; returns the rows that have come to their end."""
        count = round_up(len(self.rows), ROW_BLOCK)
        device = self.model.device
        last_ids_A, slots_A, positions_A, steps_A, keys_A = (
            torch.from_numpy(array[:count].copy()).to(device) for array in self._arrays()
        )
        width = round_up(int(self.slots[:count].max()) + 1, WIDTH_BLOCK)
        self.mask_RL[torch.arange(count, device=device), slots_A] = 0
        self.cache.place(slots_A, width)
        output = self.model(
            input_ids=last_ids_A[:, None],
            attention_mask=self.mask_RL[:count, None, None, :width],
            position_ids=positions_A[:, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_AV = output.logits[:, -1, : self.settings.vocab_size].float()
        banned_AV = None if self.banned_RV is None else self.banned_RV[:count]
        chosen_A, logprobs_A = choose(logits_AV, banned_AV, keys_A, steps_A, self.settings.temperature)
        ended = [
            number
            for number, (token, logprob) in enumerate(
                zip(chosen_A[: len(self.rows)].tolist(), logprobs_A[: len(self.rows)].tolist(), strict=True)
            )
            if self._take(number, token, logprob)
        ]
        for array in (self.slots, self.positions, self.steps):
            array[: len(self.rows)] += 1
        return ended

    def _take(self, number: int, token: int, logprob: float) -> bool:
        """Append a token to a row; whether that was its last."""
        row, step = self.rows[number], int(self.steps[number])
        if row.line.branches:
            retraced = step == len(row.line.known)
            self.last_ids[number] = 0 if retraced else row.line.known[step]
            return retraced
        if not np.isfinite(logprob):
            raise NonFiniteLossError(
                f"prompt {row.line.name!r}: at position {step} of its response the model's logits are NaN or infinite, "
                "or leave no id that is not banned: go back to an earlier checkpoint, or ban less"
            )
        row.tokens.append(token)
        row.logprobs.append(logprob)
        self.last_ids[number] = token
        return token in self.settings.eos_ids or step + 1 == self.settings.max_new_tokens

    # Leaving

    def _end(self, ended: list[int]) -> Iterator[Ended]:
        for number in reversed(ended):
            row = self.rows[number]
            if row.line.branches:
                slots = int(self.slots[number])
                trunk = _Trunk(self.cache.save(number, slots), slots, len(row.line.branches))
                self.branches.extend((trunk, branch) for branch in row.line.branches)
            else:
                finished = row.tokens[-1] in self.settings.eos_ids
                yield row.line.index, np.array(row.tokens, np.int32), np.array(row.logprobs, np.float32), finished
            self._leave(number)

    def _leave(self, number: int) -> None:
        """Put the last row in the place of one that has ended."""
        last = len(self.rows) - 1
        if number != last:
            self.cache.move(last, number, int(self.slots[last]))
            self.mask_RL[number] = self.mask_RL[last]
            if self.banned_RV is not None:
                self.banned_RV[number] = self.banned_RV[last]
            for array in self._arrays():
                array[number] = array[last]
            self.rows[number] = self.rows[last]
        self.rows.pop()


def prefill(model: Any, prompts: list[np.ndarray], pad_id: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (rows, heads, padded width, width) of left-padded prompts, layer by layer."""
    count, width = round_up(len(prompts), ROW_BLOCK), round_up(max(map(len, prompts)) + 1, WIDTH_BLOCK)
    input_ids_RL = torch.full((count, width), pad_id)
    attention_mask_RL = torch.zeros(count, width, dtype=torch.long)
    for row in range(count):
        prompt = prompts[row if row < len(prompts) else 0]
        input_ids_RL[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask_RL[row, width - len(prompt) :] = 1
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
