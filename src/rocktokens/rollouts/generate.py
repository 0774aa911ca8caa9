"""Decoding batch by batch with ``model.generate``, for models whose cache cannot be refilled row by row.

Those have sliding windows, recurrent states or ALiBi; see ``stream`` for all others.

1. What a row begins with, its prompt and as much of the response as is known, is left-padded; ``generate`` makes the
   position ids and attention masks that hide the padding.
2. At every step a logits processor chooses each row's next token from the raw logits (``decoding.choose``), keeps its
   log-probability, and leaves ``generate`` no other token to take.
3. A row ends with the first end token it samples, at ``max_new_tokens``, or when it has the length it was to have.

A row does not depend on the others in its batch. Its noise is its own, so only rounding could differ, where two tokens
tie to within it. Padded widths are multiples of ``WIDTH_BLOCK`` and rows of ``ROW_BLOCK``, so that rounding hardly
differs either.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from rocktokens.errors import RocktokensError
from rocktokens.models.head import causal_lm
from rocktokens.rollouts.decoding import (
    ROW_BLOCK,
    DecodingSettings,
    Ended,
    StreamRequest,
    alternative_ids,
    choose,
    left_padded,
    require_logprobs,
    round_up,
)

PROBE_TOKENS = 4
"""Of a text, and of padding before it, that show whether a model sees the padding."""


def generate_batches(model: Any, requests: Sequence[StreamRequest], settings: DecodingSettings) -> Iterator[Ended]:
    """Decode batch after batch; branches read again what they share with the rollout they leave."""
    single = [single for request in requests for single in request.branches or (request,)]
    for start in range(0, len(single), settings.batch_size):
        yield from _generate_batch(model, single[start : start + settings.batch_size], settings)


def require_hidden_padding(model: Any, pad_id: int) -> None:
    """Refuse a model that reads padding as text, as recurrent ones without a mask do: its rows would depend on it."""
    ids_L = torch.arange(1, 1 + PROBE_TOKENS, device=model.device)
    padding_L = torch.full((PROBE_TOKENS,), pad_id, device=model.device)

    def next_logits(input_ids_L: torch.Tensor, hidden: int) -> torch.Tensor:
        mask_L = (torch.arange(len(input_ids_L), device=model.device) >= hidden).long()
        config = GenerationConfig(
            max_new_tokens=1, pad_token_id=pad_id, output_logits=True, return_dict_in_generate=True
        )
        output: Any = _generate(model, config, input_ids=input_ids_L[None], attention_mask=mask_L[None])
        return output.logits[0][0]

    alone_V, padded_V = next_logits(ids_L, 0), next_logits(torch.cat([padding_L, ids_L]), PROBE_TOKENS)
    tolerance = max(1e-3, 8 * torch.finfo(alone_V.dtype).eps) * max(1.0, alone_V.abs().max().item())
    difference = (alone_V - padded_V).abs().max().item()
    if not difference <= tolerance:
        raise RocktokensError(
            f"{type(causal_lm(model)).__name__} reads padding as text (logits differ by {difference:.3g}), so that "
            "answers in a batch would be wrong: use a student of another architecture"
        )


def _generate_batch(model: Any, requests: Sequence[StreamRequest], settings: DecodingSettings) -> Iterator[Ended]:
    device, count = model.device, len(requests)
    row_count = round_up(count, ROW_BLOCK) if device.type == "cpu" else settings.batch_size
    rows = [*requests, *[requests[0]] * (row_count - count)]
    beginnings = [np.concatenate([request.prompt, request.known]) for request in rows]
    input_ids_RL, attention_mask_RL = left_padded(beginnings, settings.pad_id)
    width = input_ids_RL.shape[1]
    processor = _ChooseToken(rows, settings, width, device)
    output_RL = _generate(
        model,
        GenerationConfig(
            max_new_tokens=max(own.end(settings.max_new_tokens) - len(own.known) for own in requests),
            eos_token_id=sorted(settings.eos_ids) or None,
            pad_token_id=settings.pad_id,
        ),
        input_ids=input_ids_RL.to(device),
        attention_mask=attention_mask_RL.to(device),
        logits_processor=LogitsProcessorList([processor]),
        stopping_criteria=StoppingCriteriaList([_EndRows(processor, count)]),
    )
    token_ids_RT = output_RL[:, width:].to("cpu", torch.int32).numpy()
    logprobs_RT = torch.stack(processor.logprobs, dim=1).cpu().numpy()
    for request, token_ids_T, logprobs_T in zip(requests, token_ids_RT, logprobs_RT, strict=False):
        room = request.end(settings.max_new_tokens) - len(request.known)
        ends = np.flatnonzero(np.isin(token_ids_T[:room], list(settings.eos_ids)))
        length = int(ends[0]) + 1 if len(ends) else room
        require_logprobs(request.name, len(request.known), logprobs_T[:length])
        yield request.index, token_ids_T[:length].copy(), logprobs_T[:length].copy(), bool(len(ends))


def _generate(model: Any, config: GenerationConfig, **inputs: Any) -> torch.Tensor:
    """Generate without the model's own generation config, which would fill in whatever ``config`` leaves open."""
    bare: Any = causal_lm(model)
    own, bare.generation_config = bare.generation_config, GenerationConfig()
    try:
        return bare.generate(generation_config=config, **inputs)
    finally:
        bare.generation_config = own


class _ChooseToken(LogitsProcessor):
    """Leaves each row the one token that is chosen for it, and keeps the log-probabilities."""

    def __init__(
        self, rows: Sequence[StreamRequest], settings: DecodingSettings, width: int, device: torch.device
    ) -> None:
        self.settings, self.width = settings, width
        self.starts_R = torch.tensor([len(request.known) for request in rows], device=device)
        self.ends_R = torch.tensor([request.end(settings.max_new_tokens) for request in rows], device=device)
        self.stream_keys_R = torch.tensor([request.stream_key for request in rows], device=device)
        self.banned_RV: torch.Tensor | None = None
        most = max(len(request.alternatives) for request in rows)
        self.alternatives_RA = alternative_ids(rows, most).to(device) if most else None
        self.logprobs: list[torch.Tensor] = []
        pairs = [(row, token) for row, request in enumerate(rows) for token in request.banned]
        if pairs:
            banned_RV = torch.zeros(len(rows), settings.vocab_size, dtype=torch.bool)
            banned_RV[tuple(torch.tensor(pairs).T)] = True
            self.banned_RV = banned_RV.to(device)

    def positions(self, input_ids_RL: torch.Tensor) -> torch.Tensor:
        """Return the response position that each row gets next."""
        return self.starts_R + (input_ids_RL.shape[1] - self.width)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        logits_RV = scores[:, : self.settings.vocab_size]
        positions_R = self.positions(input_ids)
        chosen_R, logprobs_R = choose(
            logits_RV,
            self.banned_RV,
            self.alternatives_RA,
            self.stream_keys_R,
            positions_R,
            self.settings.temperature,
        )
        self.logprobs.append(logprobs_R)
        return cast(torch.FloatTensor, torch.full_like(scores, -torch.inf).scatter_(1, chosen_R[:, None], 0.0))


class _EndRows(StoppingCriteria):
    """Ends rows that have the length they were to have, and at once those that only fill the batch."""

    def __init__(self, processor: _ChooseToken, count: int) -> None:
        self.processor = processor
        self.idle_R = torch.arange(len(processor.starts_R), device=processor.starts_R.device) >= count

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        is_full_R = self.processor.positions(input_ids) >= self.processor.ends_R
        return cast(torch.BoolTensor, self.idle_R | is_full_R)
