"""A plug-in of a vLLM server: the next token is chosen as ``rollouts.decoding.choose`` does, with our noise.

1. Start the server with ``--logits-processors rocktokens.integrations.vllm_noise:RockNoise``; it needs this package on
   its path (``pip install --no-deps``), and nothing that the package needs besides torch and numpy.
2. A request says in ``vllm_xargs`` what it wants (``NoisyChoice``), and asks for temperature 0. Its row of logits
   becomes 0 at the token that is chosen and −∞ elsewhere. Requests that say nothing are left alone.
3. The noise depends on seed, prompt, sample, position and token only: rollouts are those of the sampler in memory, up
   to rounding of the logits, and rollouts with and without a ban share their random numbers.

This is the interface of vLLM's first model runner: ``VLLM_USE_V2_MODEL_RUNNER=0`` where Triton is installed.
https://docs.vllm.ai/en/latest/features/custom_logitsprocs.html
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.sample.logits_processor import (  # pyright: ignore[reportMissingImports]
    LogitsProcessor,
    MoveDirectionality,
)

from rocktokens.rollouts.decoding import alternative_ids, choose
from rocktokens.rollouts.noisy_choice import XARG, NoisyChoice


@dataclass(frozen=True, slots=True)
class _Row:
    wanted: NoisyChoice
    written: Sequence[int]
    """Ids that were written so far; vLLM appends to it."""


class RockNoise(LogitsProcessor):
    """Chooses the next token of every request that asks for it."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request that says what cannot be read; vLLM answers it with 400."""
        if said := (sampling_params.extra_args or {}).get(XARG):
            NoisyChoice.parse(said)

    def is_argmax_invariant(self) -> bool:
        """Say that greedy requests need it too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the requests as they enter, leave and change places."""
        if not batch_update:
            return
        for index, params, _, written in batch_update.added:
            self._rows.pop(index, None)
            if said := (params.extra_args or {}).get(XARG):
                self._rows[index] = _Row(NoisyChoice.parse(said), written)
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if direction == MoveDirectionality.SWAP and replaced is not None:
                self._rows[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave each row the token that is chosen for it; rows of one temperature together."""
        for temperature in {row.wanted.temperature for row in self._rows.values()}:
            places = [place for place, row in self._rows.items() if row.wanted.temperature == temperature]
            self._choose(logits, places, temperature)
        return logits

    def _choose(self, logits: torch.Tensor, places: list[int], temperature: float) -> None:
        device, rows = logits.device, [self._rows[place] for place in places]
        places_R = torch.tensor(places, device=device)
        logits_RV = logits[places_R]
        banned_RV = torch.zeros_like(logits_RV, dtype=torch.bool)
        for place, row in enumerate(rows):
            banned_RV[place, list(row.wanted.banned)] = True
        most = max(len(row.wanted.alternatives) for row in rows)
        chosen_R, _ = choose(
            logits_RV,
            banned_RV,
            alternative_ids([row.wanted for row in rows], most).to(device) if most else None,
            torch.tensor([row.wanted.key for row in rows], device=device),
            torch.tensor([row.wanted.start + len(row.written) for row in rows], device=device),
            temperature,
        )
        logits[places_R] = -torch.inf
        logits[places_R, chosen_R] = 0.0
