"""A key-value cache that is allocated once: transformers' dynamic one copies all it holds for every new token.

Only plain attention layers are replaced; sliding windows and the like keep the layer transformers gives them.
"""

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def preallocated_cache(config: Any, capacity: int) -> DynamicCache:
    """The cache a model of this config needs, with room for ``capacity`` tokens a row."""
    cache = DynamicCache(config=config)
    cache.layers = [PreallocatedLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class PreallocatedLayer(DynamicLayer):
    """``keys`` and ``values`` are the filled part of two larger buffers."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate both buffers in the shape, dtype and place of the first states."""
        super().lazy_initialization(key_states, value_states)
        self._key_buffer, self._value_buffer = (
            states.new_empty(*states.shape[:-2], self.capacity, states.shape[-1])
            for states in (key_states, value_states)
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states behind those that are there; returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        self._key_buffer[..., start:end, :] = key_states
        self._value_buffer[..., start:end, :] = value_states
        return self._fill(end)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows; a layer that reads another's states has none of its own."""
        if not self.is_initialized:
            return
        self._key_buffer, self._value_buffer = self._key_buffer[indices], self._value_buffer[indices]
        self._fill(self.get_seq_length())

    def _fill(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = self._key_buffer[..., :length, :], self._value_buffer[..., :length, :]
        return self.keys, self.values
