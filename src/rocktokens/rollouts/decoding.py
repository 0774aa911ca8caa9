"""What every way of decoding shares: settings, requests, the choice of the next token, the padding of prompts.

One step: raw logits (float32) → log-softmax for the record → banned ids to −∞ → argmax(logits / τ + Gumbel noise), or
plain argmax when τ = 0. The noise is keyed by (seed, prompt, sample, position, token), see ``noise``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rocktokens.errors import NonFiniteLossError
from rocktokens.rollouts.noise import gumbel_noise

WIDTH_BLOCK = 16
ROW_BLOCK = 4
NOTHING = np.empty(0, np.int32)
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
    known: np.ndarray = field(default_factory=lambda: NOTHING)
    """Response tokens it begins with."""
    branches: tuple["StreamRequest", ...] = ()
    """Rollouts that leave this one at most one token behind ``known``; with any, the request only retraces that."""

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
        return len(self.known) + 1 if self.branches else max_new_tokens


def choose(
    logits_RV: torch.Tensor,
    banned_RV: torch.Tensor | None,
    stream_keys_R: torch.Tensor,
    positions_R: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the next id of every row; with its log-probability before any ban, NaN where no id has a finite score."""
    allowed_RV = logits_RV if banned_RV is None else logits_RV.masked_fill(banned_RV, -torch.inf)
    if temperature > 0:
        noise_RV = gumbel_noise(stream_keys_R, positions_R, logits_RV.shape[1])
        allowed_RV = noise_RV.add_(allowed_RV, alpha=1 / temperature)
    best_R, chosen_R = allowed_RV.max(dim=1)
    logprobs_R = logits_RV.gather(1, chosen_R[:, None])[:, 0] - logits_RV.logsumexp(dim=1)
    return chosen_R, logprobs_R.masked_fill(~best_R.isfinite(), torch.nan)


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
