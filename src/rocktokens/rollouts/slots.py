"""Rows of a key-value cache that come and go on their own: each has a length of its own and can be saved and loaded.

The cache is allocated once, ``rows`` × ``capacity`` positions a layer. A step writes one token per row, each at its own
slot, and attends to the first ``width`` slots of every row; a mask hides those that a row has not filled. What a row
holds can be copied out, and copied back into any row: a rollout continues from there with the very same numbers.

transformers calls ``update`` layer by layer and takes a four-dimensional mask as it is, which only layers of plain
attention understand (``fits``): sliding windows, recurrent states and ALiBi are left to ``decoding.decode_batch``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

States = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values (heads, tokens, width) of one row, layer by layer."""
ATTENTION = ("sdpa", "eager")
OWN_BIAS = ("bloom", "mpt")
"""Models that read positions off a two-dimensional mask."""


def fits(model: Any) -> bool:
    """Whether every layer of the model is plain attention under a mask that can be given to it."""
    config = model.config.get_text_config()
    plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
    alibi = getattr(config, "alibi", False) or config.model_type in OWN_BIAS
    return plain and not alibi and config._attn_implementation in ATTENTION


class SlotCache(DynamicCache):
    """One layer of slots per layer of the model."""

    def __init__(self, config: Any, rows: int, capacity: int) -> None:
        super().__init__(config=config)
        self.layers: list[Any] = [SlotLayer(rows, capacity) for _ in self.layers]

    @property
    def slot_bytes(self) -> int:
        """Bytes that one token of one row takes; 0 before the first row is loaded."""
        buffers = [buffer for layer in self.layers for buffer in layer.buffers]
        return sum(buffer[0, :, 0].numel() * buffer.element_size() for buffer in buffers)

    def place(self, slots_A: torch.Tensor, width: int) -> None:
        """Where the first A rows write their next token, and how many slots they then look at."""
        rows_A = torch.arange(len(slots_A), device=slots_A.device)
        for layer in self.layers:
            layer.rows_A, layer.slots_A, layer.width = rows_A, slots_A, width

    def save(self, row: int, length: int) -> States:
        """A copy of the first ``length`` slots of a row."""
        return [tuple(buffer[row, :, :length].clone() for buffer in layer.buffers) for layer in self.layers]  # pyright: ignore[reportReturnType]

    def load(self, row: int, states: Sequence[Sequence[torch.Tensor]], length: int) -> None:
        """Fill the first ``length`` slots of a row from states at least as long."""
        for layer, own in zip(self.layers, states, strict=True):
            for buffer, source in zip(layer.buffers_for(own[0]), own, strict=True):
                buffer[row, :, :length] = source[:, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` slots of one row to another."""
        for layer in self.layers:
            for buffer in layer.buffers:
                buffer[target, :, :length] = buffer[source, :, :length]


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, (rows, heads, capacity, width) each."""

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self.shape = rows, capacity
        self.buffers: tuple[torch.Tensor, ...] = ()
        self.rows_A = self.slots_A = torch.empty(0, dtype=torch.long)
        self.width = 0

    def buffers_for(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Both buffers, made to fit (heads, tokens, width); zeros, as what is hidden is still multiplied by 0."""
        if not self.buffers:
            rows, capacity = self.shape
            shape = rows, states.shape[0], capacity, states.shape[-1]
            self.buffers = states.new_zeros(shape), states.new_zeros(shape)
        return self.buffers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token (A, heads, 1, width) per row at its slot; returns what the rows look at."""
        keys, values = self.buffers_for(key_states[0])
        keys[self.rows_A, :, self.slots_A] = key_states[:, :, 0]
        values[self.rows_A, :, self.slots_A] = value_states[:, :, 0]
        return keys[: len(self.rows_A), :, : self.width], values[: len(self.rows_A), :, : self.width]

    def get_seq_length(self) -> int:
        """Slots in use."""
        return self.width
