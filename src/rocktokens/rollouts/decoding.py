"""Decoding batch by batch, for models whose cache cannot be refilled row by row (see ``stream`` for all others).

1. What a row begins with is left-padded; position ids and attention masks make the padding invisible.
2. One step: raw logits (float32) → log-softmax for the record → banned ids to −∞ → argmax(logits / τ + Gumbel noise),
   or plain argmax when τ = 0. The noise is keyed by (seed, prompt, sample, position, token), see ``noise``.
3. A row ends with the first end token it samples, or at ``max_new_tokens``. On CPU, finished rows are dropped when
   enough of them have gathered; on a GPU, where a row costs next to nothing, the batch keeps its shape.

A row does not depend on its batch mates. Its noise is its own, so only rounding could differ, where two tokens tie to
within it. Padded widths are multiples of ``WIDTH_BLOCK`` and rows of ``ROW_BLOCK``, so that rounding hardly differs
either.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from rocktokens.errors import NonFiniteLossError
from rocktokens.rollouts.cache import preallocated_cache
from rocktokens.rollouts.noise import gumbel_noise

WIDTH_BLOCK = 16
ROW_BLOCK = 4
KEEP_SHARE = 0.75
"""Finished rows are dropped once at most this share of the rows is still being written."""
GPU_CHECK_STEPS = 8
"""Steps between looks at which rows are finished: each look waits for the GPU to catch up."""


@dataclass(frozen=True, slots=True)
class DecodingBatch:
    """What to decode together, one entry per request in each list."""

    names: list[str]
    prompts: list[np.ndarray]
    """What is read first: the prompt, and as much of the response as is there already."""
    stream_keys: list[int]
    banned: list[frozenset[int]]
    starts: list[int]
    """How many tokens of the response that is."""


@dataclass(frozen=True, slots=True)
class DecodingSettings:
    """What all batches of one call share."""

    eos_ids: frozenset[int]
    pad_id: int
    vocab_size: int
    batch_size: int
    temperature: float
    max_new_tokens: int


@dataclass(slots=True)
class _Rows:
    """The rows still in the batch; R shrinks when finished rows are dropped."""

    record_R: torch.Tensor
    """Where each row writes in the record of the batch."""
    input_ids_RQ: torch.Tensor
    """What the model has yet to read: the padded prompt, then the last token."""
    attention_mask_RL: torch.Tensor
    """Over prompt and response, as wide as they can get."""
    prompt_lengths_R: torch.Tensor
    starts_R: torch.Tensor
    stream_keys_R: torch.Tensor
    banned_RV: torch.Tensor | None
    live_R: torch.Tensor
    cache: DynamicCache

    def select(self, kept: torch.Tensor) -> None:
        """Keep only these rows."""
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), torch.Tensor):
                setattr(self, field.name, value[kept])
        self.cache.batch_select_indices(kept)


def decode_batch(
    model: Any, batch: DecodingBatch, settings: DecodingSettings
) -> list[tuple[np.ndarray, np.ndarray, bool]]:
    """Token ids (int32), log-probabilities (float32) and whether it finished, for every request of the batch."""
    rows = _start(model, batch, settings)
    on_cpu = model.device.type == "cpu"
    eos_ids_E = torch.tensor(sorted(settings.eos_ids), dtype=torch.long, device=model.device)
    token_ids_RT = torch.zeros(len(rows.live_R), settings.max_new_tokens, dtype=torch.long, device=model.device)
    logprobs_RT = torch.zeros_like(token_ids_RT, dtype=torch.float32)
    for step in range(settings.max_new_tokens - min(batch.starts)):
        logits_RV = _next_logits(model, rows, step)[:, : settings.vocab_size].float()
        positions_R = rows.starts_R + step
        chosen_R, logprobs_R = choose(logits_RV, rows.banned_RV, rows.stream_keys_R, positions_R, settings.temperature)
        token_ids_RT[rows.record_R, step] = chosen_R
        logprobs_RT[rows.record_R, step] = logprobs_R
        rows.live_R &= ~torch.isin(chosen_R, eos_ids_E) & (positions_R + 1 < settings.max_new_tokens)
        rows.input_ids_RQ = chosen_R[:, None]
        if on_cpu or step % GPU_CHECK_STEPS == 0:
            live = int(rows.live_R.sum())
            if live == 0:
                break
            if on_cpu and live <= KEEP_SHARE * len(rows.live_R):
                _drop_finished(rows, live)
    return _completions(batch, settings, token_ids_RT, logprobs_RT)


def _start(model: Any, batch: DecodingBatch, settings: DecodingSettings) -> _Rows:
    """Left-padded rows, and enough idle ones to fill the block: they repeat the first request."""
    device, count = model.device, len(batch.names)
    row_count = round_up(count, ROW_BLOCK) if device.type == "cpu" else settings.batch_size
    sources = [row if row < count else 0 for row in range(row_count)]
    width = round_up(max(map(len, batch.prompts)) + 1, WIDTH_BLOCK)
    input_ids_RL = torch.full((row_count, width), settings.pad_id)
    attention_mask_RL = torch.ones(row_count, width + settings.max_new_tokens, dtype=torch.long)
    for row, source in enumerate(sources):
        padding = width - len(batch.prompts[source])
        input_ids_RL[row, padding:] = torch.tensor(batch.prompts[source])
        attention_mask_RL[row, :padding] = 0
    return _Rows(
        record_R=torch.arange(row_count, device=device),
        input_ids_RQ=input_ids_RL.to(device),
        attention_mask_RL=attention_mask_RL.to(device),
        prompt_lengths_R=torch.tensor([len(batch.prompts[source]) for source in sources], device=device),
        starts_R=torch.tensor([batch.starts[source] for source in sources], device=device),
        stream_keys_R=torch.tensor([batch.stream_keys[source] for source in sources], device=device),
        banned_RV=_banned([batch.banned[source] for source in sources], settings.vocab_size, device),
        live_R=torch.arange(row_count, device=device) < count,
        cache=preallocated_cache(model.config, attention_mask_RL.shape[1]),
    )


def _banned(banned: list[frozenset[int]], vocab_size: int, device: torch.device) -> torch.Tensor | None:
    """Bool (R, V), or None when nothing is banned."""
    pairs = [(row, token) for row, tokens in enumerate(banned) for token in tokens]
    if not pairs:
        return None
    banned_RV = torch.zeros(len(banned), vocab_size, dtype=torch.bool)
    banned_RV[tuple(torch.tensor(pairs).T)] = True
    return banned_RV.to(device)


def _next_logits(model: Any, rows: _Rows, step: int) -> torch.Tensor:
    """Logits after the last token of every row, in the model's dtype, (R, head width)."""
    if step == 0:
        attention_mask_RL = rows.attention_mask_RL[:, : rows.input_ids_RQ.shape[1]]
        position_ids_RQ = (attention_mask_RL.cumsum(1) - 1).clamp_(min=0)
    else:
        attention_mask_RL = rows.attention_mask_RL[:, : rows.cache.get_seq_length() + 1]
        position_ids_RQ = rows.prompt_lengths_R[:, None] + (step - 1)
    output = model(
        input_ids=rows.input_ids_RQ,
        attention_mask=attention_mask_RL,
        position_ids=position_ids_RQ,
        past_key_values=rows.cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


def choose(
    logits_RV: torch.Tensor,
    banned_RV: torch.Tensor | None,
    stream_keys_R: torch.Tensor,
    positions_R: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next id of every row and its log-probability before any ban; NaN where no id has a finite score."""
    allowed_RV = logits_RV if banned_RV is None else logits_RV.masked_fill(banned_RV, -torch.inf)
    if temperature > 0:
        noise_RV = gumbel_noise(stream_keys_R, positions_R, logits_RV.shape[1])
        allowed_RV = noise_RV.add_(allowed_RV, alpha=1 / temperature)
    best_R, chosen_R = allowed_RV.max(dim=1)
    logprobs_R = logits_RV.gather(1, chosen_R[:, None])[:, 0] - logits_RV.logsumexp(dim=1)
    return chosen_R, logprobs_R.masked_fill(~best_R.isfinite(), torch.nan)


def _drop_finished(rows: _Rows, live: int) -> None:
    """Keep the rows being written, and as many finished ones as fill the block."""
    live_first = torch.argsort(rows.live_R, descending=True, stable=True)
    rows.select(live_first[: round_up(live, ROW_BLOCK)].sort().values)


def _completions(
    batch: DecodingBatch, settings: DecodingSettings, token_ids_RT: torch.Tensor, logprobs_RT: torch.Tensor
) -> list[tuple[np.ndarray, np.ndarray, bool]]:
    """Cut each row behind its first end token, which is part of the response."""
    token_ids = token_ids_RT.to("cpu", torch.int32).numpy()
    logprobs = logprobs_RT.cpu().numpy()
    ends = np.isin(token_ids, sorted(settings.eos_ids))
    completions = []
    for row, name in enumerate(batch.names):
        room = settings.max_new_tokens - batch.starts[row]
        finished = bool(ends[row, :room].any())
        length = int(ends[row].argmax()) + 1 if finished else room
        require_finite(name, batch.starts[row], logprobs[row, :length])
        completions.append((token_ids[row, :length].copy(), logprobs[row, :length].copy(), finished))
    return completions


def require_finite(name: str, start: int, logprobs_n: np.ndarray) -> None:
    """Refuse the response to a prompt, whose log-probabilities these are from position ``start`` on."""
    bad = np.flatnonzero(~np.isfinite(logprobs_n))
    if len(bad):
        raise NonFiniteLossError(
            f"prompt {name!r}: at position {start + bad[0]} of its response the model's logits are NaN or infinite, or "
            "leave no id that is not banned: go back to an earlier checkpoint, or ban less"
        )


def round_up(count: int, block: int) -> int:
    """The least multiple of ``block`` that is not below ``count``."""
    return -(-count // block) * block
