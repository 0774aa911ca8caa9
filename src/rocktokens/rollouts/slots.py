"""A key-value cache whose rows are independent: each has its own length and can be saved and loaded.

The cache is allocated once, ``rows`` × ``capacity`` positions per layer. A step writes one token per row, each at its
own slot, and attends to the first ``width`` slots of every row; a mask hides those that a row has not filled. What a
row holds can be copied out, and copied back into any row: a rollout continues from there with the very same numbers.
On a GPU one kernel writes the keys and the values (``slot_kernels.py``), and in half precision another attends to the
slots that each row has filled, without the mask (``attention.py``).

transformers calls ``update`` layer by layer and takes a four-dimensional mask as it is, which only layers of plain
attention understand (``fits``): sliding windows, recurrent states and ALiBi are left to ``generate``.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

from rocktokens.models.head import causal_lm
from rocktokens.models.kernels import has_triton, on_gpu, power_of_2
from rocktokens.models.layers import HALF
from rocktokens.rollouts.attention import attend_to_slots, suits

States = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values (heads, tokens, width) of one row, layer by layer."""
ATTENTION = ("sdpa", "eager")
GROUPED_ATTENTION = "rocktokens_grouped"
OWN_BIAS = ("bloom", "mpt")
"""Models that read positions off a two-dimensional mask."""
HEADS_AT_ONCE = 8
"""That a program of the kernel copies."""


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
            for buffer, source in zip(layer.buffers_for(*own), own, strict=True):
                buffer[rows_n, :, : source.shape[-2]] = source

    def move(self, sources_n: torch.Tensor, targets_n: torch.Tensor, length: int) -> None:
        """Copy the first ``length`` slots of rows to others."""
        for layer in self.layers:
            for buffer in layer.buffers:
                buffer[targets_n, :, :length] = buffer[sources_n, :, :length]


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, (rows, heads, capacity, width) each; latent attention has two widths."""

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self.shape = rows, capacity
        self.buffers: tuple[torch.Tensor, ...] = ()
        self.rows_A = self.slots_A = torch.empty(0, dtype=torch.long)
        self.width = 0

    def buffers_for(self, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Both buffers, made to fit (…, heads, tokens, width); zeros, as what is hidden is still multiplied by 0."""
        if not self.buffers:
            rows, capacity = self.shape
            self.buffers = tuple(own.new_zeros(rows, own.shape[-3], capacity, own.shape[-1]) for own in states)
        return self.buffers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token (A, heads, 1, width) per row at its slot; returns what the rows look at."""
        keys, values = self.buffers_for(key_states, value_states)
        if _takes(keys, key_states, value_states):
            write_tokens(key_states, value_states, keys, values, self.rows_A, self.slots_A)
        else:
            keys[self.rows_A, :, self.slots_A] = key_states[:, :, 0]
            values[self.rows_A, :, self.slots_A] = value_states[:, :, 0]
        return keys[: len(self.rows_A), :, : self.width], values[: len(self.rows_A), :, : self.width]

    def get_seq_length(self) -> int:
        """Slots in use."""
        return self.width


def _takes(keys: torch.Tensor, k_AG1d: torch.Tensor, v_AG1d: torch.Tensor) -> bool:
    """Whether the kernel is for these keys and values of one token, and a buffer for the keys."""
    return (
        on_gpu(keys)
        and has_triton()
        and k_AG1d.shape == v_AG1d.shape
        and k_AG1d.dtype == v_AG1d.dtype == keys.dtype
        and k_AG1d.stride(-1) == v_AG1d.stride(-1) == 1
    )


def write_tokens(
    k_AG1d: torch.Tensor,
    v_AG1d: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows_A: torch.Tensor,
    slots_A: torch.Tensor,
) -> None:
    """Write row i of k and v, whose heads have their numbers side by side, to slot ``slots_A[i]`` of ``rows_A[i]``.

    The contiguous buffers (rows, heads, capacity, width) have one shape, and all the numbers one dtype.
    """
    from rocktokens.rollouts import slot_kernels

    n_rows, heads, _, width = k_AG1d.shape
    sizes = {"HEADS": heads, "WIDTH": width, "AT_ONCE": min(HEADS_AT_ONCE, power_of_2(heads))}
    kernel: Any = slot_kernels.write_tokens
    with torch.cuda.device_of(keys):
        kernel[(n_rows,)](
            *(k_AG1d, k_AG1d.stride(0), k_AG1d.stride(1)),
            *(v_AG1d, v_AG1d.stride(0), v_AG1d.stride(1)),
            *(keys, values, *keys.stride()[:3], rows_A, slots_A),
            **sizes,
            BLOCK=power_of_2(width),
        )


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    row_slots: torch.Tensor | None = None,
    row_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token (A, heads, 1, width) over fewer key heads, which are not copied first.

    Where ``row_slots`` says what each row looks at (see ``attend_to_slots``), a kernel of ours reads that and nothing
    else, if the mask is still ``row_mask``, which says the same: some layers hide more, or add a bias per head (Doge).
    Otherwise the attention is torch's own. The query heads that share a key head see the same slots, so they are
    laid out as query positions. Torch's kernels put the heads of a position side by side, which would then have to be
    copied to their order. With one mask (A, G, 1, slots) per key head, each key head is a row of its own with one head,
    and nothing is copied.
    """
    assert attention_mask is not None
    is_own = row_mask is not None and attention_mask.data_ptr() == row_mask.data_ptr()
    if row_slots is not None and is_own and suits(query, key, value, attention_mask, row_slots, **kwargs):
        return attend_to_slots(query, key, value, row_slots, scaling), None
    rows, heads, _, _ = query.shape
    if attention_mask.shape[1] == heads != key.shape[1]:  # a mask per query head
        mask = attention_mask.reshape(rows, key.shape[1], -1, attention_mask.shape[-1])
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.reshape(*mask.shape[:3], -1), key, value, attn_mask=mask, scale=scaling
        )
        return attended.reshape(rows, 1, heads, value.shape[-1]), None
    copies = attention_mask.shape[1] if attention_mask.shape[1] == key.shape[1] else 1
    layout = rows * copies, key.shape[1] // copies
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(*layout, heads // key.shape[1], query.shape[-1]),
        key.reshape(*layout, *key.shape[2:]),
        value.reshape(*layout, *value.shape[2:]),
        attn_mask=attention_mask[:, :copies].reshape(rows * copies, 1, *attention_mask.shape[2:]),
        scale=scaling,
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
    return attending(config, GROUPED_ATTENTION if _is_grouped(model) else config._attn_implementation)


def mask_copies(model: Any) -> int:
    """How many masks a row has in ``one_token_attention``: one per key head where query heads share these, or one."""
    config = model.config.get_text_config()
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    attends_as_told = _is_grouped(model) and causal_lm(model).is_backend_compatible()
    return key_heads if attends_as_told and key_heads < config.num_attention_heads else 1


def takes_row_slots(model: Any) -> bool:
    """Whether the model's layers pass ``row_slots`` on to ``grouped_attention``, which can make use of it."""
    return _is_grouped(model) and has_triton() and model.dtype in HALF and causal_lm(model).is_backend_compatible()


def _is_grouped(model: Any) -> bool:
    return on_gpu(model) and model.config.get_text_config()._attn_implementation == "sdpa"
