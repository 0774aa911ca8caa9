"""Attention over the slots of each row by kernel against float64; run by test_quick_decoding.py.

On a GPU or, with TRITON_INTERPRET=1, on the CPU. The interpreter multiplies in float32 too, where nothing is rounded to
half precision and sums show what they are.
"""

import pytest
import torch

from kernel_device import DEVICE, INTERPRETED, round_to_bfloat16
from rocktokens.rollouts import attention
from rocktokens.rollouts.attention import attend_to_slots

CAPACITY, WIDTH = 208, 192
FIRSTS_A = [0, 0, 5, 64, 63, 100, 187, 191]
NEWEST_A = [0, 191, 5, 127, 128, 190, 191, 191]
"""Rows of one slot, full ones, and prompts with padding to their left, about the bounds of blocks."""
ROW_SLOTS_2A = torch.tensor([NEWEST_A, [newest - first for newest, first in zip(NEWEST_A, FIRSTS_A, strict=True)]])
DTYPES = (torch.bfloat16, torch.float16, *((torch.float32,) if INTERPRETED else ()))
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}
"""Of a weight and of a result together, relative to the largest value."""
SHAPES = [(1, 1, 64), (2, 2, 80), (9, 3, 64), (10, 2, 96), (12, 2, 128), (16, 1, 96), (20, 1, 24), (2, 1, 256)]
"""Query heads, key heads, width."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    if INTERPRETED:
        round_to_bfloat16(monkeypatch)


def made(heads, key_heads, width, dtype=torch.float32, hidden=torch.nan, seed=0):
    """Queries as a projection leaves them, keys and values of more rows and slots; all outside of a range is hidden."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    rows = len(FIRSTS_A)
    query = 2 * randn(rows, 1, heads, width).transpose(1, 2)
    states = randn(rows + 2, key_heads, CAPACITY, width), randn(rows + 2, key_heads, CAPACITY, width)
    for buffer in states:
        for row, (first, newest) in enumerate(zip(FIRSTS_A, NEWEST_A, strict=True)):
            buffer[row, :, :first] = buffer[row, :, newest + 1 :] = hidden
        buffer[rows:] = hidden
    return query, *(buffer[:rows, :, :WIDTH] for buffer in states)


def naive(query, key, value, scale=None):
    """Row by row and head by head, (A, 1, H, d) in float64."""
    query, key, value = (states.double().cpu() for states in (query, key, value))
    rows, heads, _, width = query.shape
    out = torch.empty(rows, 1, heads, width, dtype=torch.float64)
    for row, (first, newest) in enumerate(zip(FIRSTS_A, NEWEST_A, strict=True)):
        for head in range(heads):
            own = row, head * key.shape[1] // heads, slice(first, newest + 1)
            weights = (key[own] @ query[row, head, 0] * (scale or width**-0.5)).softmax(0)
            out[row, 0, head] = weights @ value[own]
    return out


def by_kernel(*states, **options):
    return attend_to_slots(*states, ROW_SLOTS_2A.to(DEVICE), **options)


def assert_near(found, wanted, dtype):
    assert (found.dtype, found.shape) == (dtype, wanted.shape)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=4 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_row_attends_to_its_own_slots(shape, dtype):
    """And what is NaN beside them is not read."""
    states = made(*shape, dtype)
    for parts in (1, 4):
        assert_near(by_kernel(*states, parts=parts), naive(*states), dtype)


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_products_are_scaled_as_told(scale):
    states = made(4, 2, 64, torch.float16)
    assert_near(by_kernel(*states, scale=scale), naive(*states, scale), torch.float16)


@pytest.mark.parametrize("parts", [2, 8, 32])
def test_the_number_of_parts_changes_rounding_only(parts):
    """With more parts than most rows have blocks."""
    dtype = DTYPES[-1]
    states = made(6, 2, 80, dtype)
    whole = by_kernel(*states, parts=1)
    torch.testing.assert_close(by_kernel(*states, parts=parts), whole, rtol=0, atol=ROUNDING[dtype])
    by_a_part = attend_to_slots(*states, torch.stack([ROW_SLOTS_2A[0], ROW_SLOTS_2A[1] // 2]).to(DEVICE), parts=1)
    assert (by_a_part - whole).abs().max() > 0.1


@pytest.mark.parametrize("parts", [1, 4])
def test_a_row_alone_is_the_row_in_a_batch(parts):
    states = made(6, 2, 64, torch.float16)
    together = by_kernel(*states, parts=parts)
    for row in range(len(together)):
        own = slice(row, row + 1)
        alone = attend_to_slots(*(part[own] for part in states), ROW_SLOTS_2A.to(DEVICE)[:, own], parts=parts)
        assert torch.equal(alone, together[own])


@pytest.mark.parametrize("parts", [1, 4])
def test_rows_left_beyond_the_width_read_no_slot_from_there_on(parts):
    query, key, value = made(6, 2, 64, torch.float16, hidden=0.0)
    key, value = (states.as_strided((8, 2, CAPACITY, 64), states.stride()).clone() for states in (key, value))
    key[:, :, WIDTH:] = value[:, :, WIDTH:] = torch.nan
    beyond_2A = torch.tensor([[CAPACITY - 1, WIDTH, CAPACITY - 1, *[WIDTH] * 5], [3, WIDTH, 150, *[0] * 5]])
    found = attend_to_slots(query, key[:, :, :WIDTH], value[:, :, :WIDTH], beyond_2A.to(DEVICE), parts=parts)
    assert found.isfinite().all()


def test_large_scores_do_not_overflow():
    query, key, value = made(4, 2, 64, torch.bfloat16)
    states = 100 * query, key, value
    assert_near(by_kernel(*states), naive(*states), torch.bfloat16)


def test_few_rows_of_many_slots_are_split_and_combined(monkeypatch):
    chosen = []
    parts_of = attention.parts_of
    monkeypatch.setattr(attention, "parts_of", lambda *shape: chosen.append(shape) or parts_of(*shape))
    monkeypatch.setattr(attention, "FEWEST_SLOTS", 48)
    states = made(4, 2, 64, torch.float16)
    assert torch.equal(by_kernel(*states), by_kernel(*states, parts=4))
    assert chosen == [(16, WIDTH)] and not torch.equal(by_kernel(*states), by_kernel(*states, parts=1))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("parts", [1, 4])
def test_a_graph_that_was_captured_reads_the_slots_of_the_moment(parts):
    states, row_slots_2A = made(6, 2, 128, torch.bfloat16), ROW_SLOTS_2A.to(DEVICE)
    attend_to_slots(*states, row_slots_2A, parts=parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend_to_slots(*states, row_slots_2A, parts=parts)
    for _ in range(3):
        row_slots_2A[1] //= 2
        graph.replay()
        assert torch.equal(found, attend_to_slots(*states, row_slots_2A, parts=parts))
