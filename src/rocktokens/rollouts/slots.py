"""A key-value cache whose rows are independent: each has its own length and can be saved and loaded.

The cache is allocated once, ``rows`` × ``capacity`` positions per layer. A step writes one token per row, each at its
own slot, and attends to the first ``width`` slots of every row; a mask hides those that a row has not filled. What a
row holds can be copied out, and copied back into any row: a rollout continues from there with the very same numbers.

transformers calls ``update`` layer by layer and takes a four-dimensional mask as it is, which only layers of plain
attention understand (``fits``): sliding windows, recurrent states and ALiBi are left to ``generate``.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

States = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values (heads, tokens, width) of one row, layer by layer."""
ATTENTION = ("sdpa", "eager")
GROUPED_ATTENTION = "rocktokens_grouped"
OWN_BIAS = ("bloom", "mpt")
"""Models that read positions off a two-dimensional mask."""


def fits(model: Any) -> bool:
    """Whether every layer of the model is plain attention under a mask that can be given to it."""
    config = model.config.get_text_config()
    plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
    alibi = getattr(config, "alibi", False) or config.model_type in OWN_BIAS
    attends = hasattr(config, "num_attention_heads")  # what is recurrent throughout has other states
    return plain and attends and not alibi and config._attn_implementation in ATTENTION


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

    def place(self, rows_A: torch.Tensor, slots_A: torch.Tensor, width: int) -> None:
        """Where the first A rows write their next token, and how many slots they then look at."""
        for layer in self.layers:
            layer.rows_A, layer.slots_A, layer.width = rows_A, slots_A, width

    def save(self, row: int, length: int) -> States:
        """A copy of the first ``length`` slots of a row."""
        return [tuple(buffer[row, :, :length].clone() for buffer in layer.buffers) for layer in self.layers]  # pyright: ignore[reportReturnType]

    def load(self, rows_n: torch.Tensor, states: Sequence[Sequence[torch.Tensor]]) -> None:
        """Fill the first slots of rows from states (n, heads, tokens, width), or from those of one row."""
        for layer, own in zip(self.layers, states, strict=True):
            for buffer, source in zip(layer.buffers_for(own[0]), own, strict=True):
                buffer[rows_n, :, : source.shape[-2]] = source

    def move(self, sources_n: torch.Tensor, targets_n: torch.Tensor, length: int) -> None:
        """Copy the first ``length`` slots of rows to others."""
        for layer in self.layers:
            for buffer in layer.buffers:
                buffer[targets_n, :, :length] = buffer[sources_n, :, :length]


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, (rows, heads, capacity, width) each."""

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self.shape = rows, capacity
        self.buffers: tuple[torch.Tensor, ...] = ()
        self.rows_A = self.slots_A = torch.empty(0, dtype=torch.long)
        self.width = 0

    def buffers_for(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Both buffers, made to fit (…, heads, tokens, width); zeros, as what is hidden is still multiplied by 0."""
        if not self.buffers:
            rows, capacity = self.shape
            shape = rows, states.shape[-3], capacity, states.shape[-1]
            self.buffers = states.new_zeros(shape), states.new_zeros(shape)
        return self.buffers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token (A, heads, 1, width) per row at its slot; returns what the rows look at."""
        keys, values = self.buffers_for(key_states)
        keys[self.rows_A, :, self.slots_A] = key_states[:, :, 0]
        values[self.rows_A, :, self.slots_A] = value_states[:, :, 0]
        return keys[: len(self.rows_A), :, : self.width], values[: len(self.rows_A), :, : self.width]

    def get_seq_length(self) -> int:
        """Slots in use."""
        return self.width


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention, torch's own, of one new token (A, heads, 1, width) over fewer key heads, which are not copied first.

    The query heads that share a key head see the same slots, so they are laid out as query positions.
    """
    rows, heads, _, _ = query.shape
    shared = query.reshape(rows, key.shape[1], heads // key.shape[1], query.shape[-1])
    attended = torch.nn.functional.scaled_dot_product_attention(
        shared, key, value, attn_mask=attention_mask, scale=scaling
    )
    return attended.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)


@contextmanager
def attending(config: Any, implementation: str) -> Iterator[None]:
    """Let the layers that hold ``config`` attend by another implementation."""
    own, config._attn_implementation = config._attn_implementation, implementation
    try:
        yield
    finally:
        config._attn_implementation = own


def one_token_attention(model: Any) -> AbstractContextManager[None]:
    """On a GPU, ``grouped_attention`` instead of the copies that transformers makes under a mask; elsewhere no change.

    On a CPU torch's kernel is slower over a few query positions than over one, by more than the copies cost.
    """
    config = model.config.get_text_config()
    own = config._attn_implementation
    return attending(config, GROUPED_ATTENTION if model.device.type == "cuda" and own == "sdpa" else own)
