"""What every way of decoding shares: settings, requests, the choice of the next token, the padding of prompts.

One step: raw logits (float32) → log-softmax for the record → banned ids to −∞ → argmax(logits / τ + Gumbel noise), or
plain argmax when τ = 0. The noise is keyed by (seed, prompt, sample, position, token), see ``noise``. A ban with
alternatives acts only at positions where one of them is likely by that log-softmax (docs/method.md, section 10).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from rocktokens.errors import NonFiniteLossError
from rocktokens.models.kernels import has_triton
from rocktokens.rollouts.choosing import choose_by_kernel
from rocktokens.rollouts.noise import gumbel_noise

WIDTH_BLOCK = 16
ROW_BLOCK = 4
NOTHING = np.empty(0, np.int32)
NO_TOKEN = -1
LIKELY = 0.05
"""The least probability, at temperature 1 and before any ban, that an alternative is likely with."""
CACHED_SCORES = 1 << 18
"""Scores that a CPU computes at once: 2 MiB of each array that leads to them."""
Ended = tuple[int, np.ndarray, np.ndarray, bool]
"""Index of a request, its token ids (int32) and their log-probabilities (float32), and whether it finished."""


@dataclass(frozen=True, slots=True)
class DecodingSettings:
    """What all batches of one call share."""

    eos_ids: frozenset[int]
    pad_id: int
    vocab_size: int
    batch_size: int
    temperature: float
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A rollout to write, or to retrace.

    Example: a prompt of 20 tokens has its response from slot 32 on. A row that takes it with 3 known tokens is fed the
    last of them at slot 34, position 22, and gets response position 3.
    """

    index: int
    """What the caller knows it by."""
    name: str
    """What errors call it."""
    prompt: np.ndarray
    stream_key: int
    banned: frozenset[int] = frozenset()
    alternatives: frozenset[int] = frozenset()
    """The ban acts where one of these is likely; everywhere if there are none."""
    known: np.ndarray = field(default_factory=lambda: NOTHING)
    """Response tokens it begins with."""
    branches: tuple["StreamRequest", ...] = ()
    """Rollouts that leave this one at most one token behind ``known``; with any, the request only retraces that."""
    length: int | None = None
    """Tokens to write behind ``known`` at most; default: as many as a response may have."""

    @property
    def base(self) -> int:
        """The slot of the first response token."""
        return round_up(len(self.prompt), WIDTH_BLOCK)

    @property
    def start(self) -> int:
        """The first response position that the model is asked for."""
        return 0 if self.branches else len(self.known)

    def end(self, max_new_tokens: int) -> int:
        """The step before which it ends, if no end token does."""
        if self.branches:
            return len(self.known) + 1
        return max_new_tokens if self.length is None else min(len(self.known) + self.length, max_new_tokens)


def choose(
    logits_RV: torch.Tensor,
    banned_RV: torch.Tensor | None,
    alternatives_RA: torch.Tensor | None,
    stream_keys_R: torch.Tensor,
    positions_R: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the next id of every row; with its log-probability before any ban, NaN where no id has a finite score.

    On a GPU a kernel does it (``choosing``), if there is Triton; what follows here is the reference.

    Args:
        logits_RV: raw, of any floating dtype; computed with in float32.
        banned_RV: what each row may not write; None where no row has a ban.
        alternatives_RA: from ``alternative_ids``; None where every ban acts everywhere.
        stream_keys_R: of each row's noise.
        positions_R: the response positions that are chosen.
        temperature: 0 for the most probable id.
    """
    if logits_RV.is_cuda and has_triton():
        arrays = (logits_RV, banned_RV, alternatives_RA, stream_keys_R, positions_R)
        return choose_by_kernel(*arrays, temperature, math.log(LIKELY))
    logits_RV = logits_RV.float()
    totals_R = logits_RV.logsumexp(dim=1)
    if banned_RV is not None and alternatives_RA is not None:
        banned_RV = banned_RV & _acts(logits_RV, totals_R, alternatives_RA)[:, None]
    allowed_RV = logits_RV if banned_RV is None else logits_RV.masked_fill(banned_RV, -torch.inf)
    if temperature > 0:
        best_R, chosen_R = _draw(allowed_RV, stream_keys_R, positions_R, temperature)
    else:
        best_R, chosen_R = allowed_RV.max(dim=1)
    logprobs_R = logits_RV.gather(1, chosen_R[:, None])[:, 0] - totals_R
    return chosen_R, logprobs_R.masked_fill(~best_R.isfinite(), torch.nan)


def _draw(
    allowed_RV: torch.Tensor, stream_keys_R: torch.Tensor, positions_R: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's best score with noise, and its id; a CPU takes as many rows at once as stay in its caches."""
    rows, width = allowed_RV.shape
    at_once = rows if allowed_RV.is_cuda else max(1, CACHED_SCORES // width)
    split = [array.split(at_once) for array in (allowed_RV, stream_keys_R, positions_R)]
    parts = []
    for allowed_rV, stream_keys_r, positions_r in zip(*split, strict=True):
        noise_rV = gumbel_noise(stream_keys_r, positions_r, width)
        parts.append(noise_rV.add_(allowed_rV, alpha=1 / temperature).max(dim=1))
    bests, chosen = zip(*parts, strict=True)
    return torch.cat(bests), torch.cat(chosen)


def _acts(logits_RV: torch.Tensor, totals_R: torch.Tensor, alternatives_RA: torch.Tensor) -> torch.Tensor:
    """Whether the ban of each row acts: one of its alternatives is likely, or it has none."""
    is_one_RA = alternatives_RA != NO_TOKEN
    logprobs_RA = logits_RV.gather(1, alternatives_RA.clamp(min=0)) - totals_R[:, None]
    is_likely_RA = is_one_RA & (logprobs_RA >= math.log(LIKELY))
    return is_likely_RA.any(dim=1) | ~is_one_RA.any(dim=1)


class HasAlternatives(Protocol):
    """Whatever may have a ban that acts only where one of some ids is likely."""

    @property
    def alternatives(self) -> Collection[int]:
        """Return these ids; none where the ban acts everywhere."""
        ...


def alternative_ids(requests: Sequence[HasAlternatives], width: int) -> torch.Tensor:
    """Return int64 (R, A), on the CPU: the alternatives of each request, filled up with ``NO_TOKEN``."""
    rows = [sorted(request.alternatives) for request in requests]
    return torch.tensor([own + [NO_TOKEN] * (width - len(own)) for own in rows])


def left_padded(prompts: Sequence[np.ndarray], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and attention mask (R, L), on the CPU, padded to a multiple of ``WIDTH_BLOCK`` above the longest."""
    width = round_up(max(map(len, prompts)) + 1, WIDTH_BLOCK)
    input_ids_RL = torch.full((len(prompts), width), pad_id)
    attention_mask_RL = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        input_ids_RL[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask_RL[row, width - len(prompt) :] = 1
    return input_ids_RL, attention_mask_RL


def require_logprobs(name: str, start: int, logprobs_n: np.ndarray) -> None:
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
