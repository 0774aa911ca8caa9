"""A copy of the student in the narrow dtype in which a GPU samples from it.

Training keeps the student in float32 and computes in bfloat16 by autocast, which would convert every weight at every
token of a rollout. The copy is converted once per step. Its tensors stay where they are, as captured CUDA graphs need.
Only the parameters are converted: the tables of rotary positions lose too much in bfloat16.
"""

import copy

import torch
from torch import nn


class SamplingCopy:
    """A model for sampling, whose weights follow those of another."""

    def __init__(self, source: nn.Module, dtype: torch.dtype) -> None:
        self.model = copy.deepcopy(source).requires_grad_(False)
        pairs = list(zip(self.model.parameters(), source.parameters(), strict=True))
        for own, _ in pairs:
            own.data = own.data.to(dtype)
        self._trained = [(own, given) for own, given in pairs if given.requires_grad]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights of the parameters that are trained."""
        for own, given in self._trained:
            own.copy_(given)
