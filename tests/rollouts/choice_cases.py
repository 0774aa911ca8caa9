"""The choice by kernel against that of PyTorch and float64; run by test_choosing.py.

On a GPU or, with TRITON_INTERPRET=1, on the CPU. The reference always runs on the CPU, where ``choose`` is PyTorch.
"""

import math

import pytest
import torch
import triton
import triton.language as tl

from kernel_device import DEVICE
from rocktokens.rollouts import choice_kernels
from rocktokens.rollouts.choosing import BLOCK, choose_by_kernel
from rocktokens.rollouts.decoding import LIKELY, NO_TOKEN, choose
from rocktokens.rollouts.noise import gumbel_noise, noise_bits, stream_key

V = 2 * BLOCK + 389
"""Three blocks, the last not full, and no multiple of anything."""
TEMPERATURES = (0.0, 0.7, 1.0, 1.7)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_device(array):
    return None if array is None else array.to(DEVICE)


def made(rows, width=V, dtype=torch.float32, seed=0, scale=3.0):
    """Logits, stream keys and positions of some rows."""
    generator = torch.Generator().manual_seed(seed)
    logits_RV = (scale * torch.randn(rows, width, generator=generator)).to(dtype)
    keys_R = torch.tensor([stream_key(seed, "p", sample) for sample in range(rows)])
    return logits_RV, keys_R, torch.randint(0, 9000, (rows,), generator=generator)


def banned(rows, width, share=0.3, seed=1):
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < share


def by_kernel(logits_RV, banned_RV, alternatives_RA, keys_R, positions_R, temperature):
    """Ids and log-probabilities, on the CPU."""
    arrays = [on_device(array) for array in (logits_RV, banned_RV, alternatives_RA, keys_R, positions_R)]
    ids_R, logprobs_R = choose_by_kernel(*arrays, temperature, math.log(LIKELY))
    assert (ids_R.dtype, logprobs_R.dtype) == (torch.int64, torch.float32)
    return ids_R.cpu(), logprobs_R.cpu()


def assert_like_torch(logits_RV, banned_RV, alternatives_RA, keys_R, positions_R, temperature):
    """The ids of the reference, and log-probabilities near those of float64."""
    arguments = (logits_RV, banned_RV, alternatives_RA, keys_R, positions_R, temperature)
    found_R, logprobs_R = by_kernel(*arguments)
    assert found_R.tolist() == choose(*arguments)[0].tolist()
    wanted_R = logits_RV.double().log_softmax(-1).gather(1, found_R[:, None])[:, 0]
    error_R = (logprobs_R.double() - wanted_R).abs()
    assert (error_R <= 1e-6 * wanted_R.abs().clamp(min=1)).all()
    return found_R


# Noise


@triton.jit
def bits_of(stream_keys, positions, out, width: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, width)
    bits = choice_kernels.noise_bits(tl.load(stream_keys + row), tl.load(positions + row), columns)
    tl.store(out + row * width + columns, bits.to(tl.int64))


@triton.jit
def scores_of(logits, stream_keys, positions, out, width: tl.constexpr, INVERSE_TEMPERATURE: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, width)
    here = row * width + columns
    scores = choice_kernels.scored(
        tl.load(logits + here), tl.load(stream_keys + row), tl.load(positions + row), columns, INVERSE_TEMPERATURE
    )
    tl.store(out + here, scores)


def test_the_bits_of_the_noise_are_those_of_the_reference():
    keys_R = torch.tensor([-(2**63), -1, 0, 1, 2**63 - 1, *(stream_key(s, "p", s) for s in range(11))])
    positions_R = torch.tensor([0, 1, 2, 2**31, 8191, *range(11)])
    found_RV = torch.zeros(16, 4096, dtype=torch.long, device=DEVICE)
    bits_of[(16,)](on_device(keys_R), on_device(positions_R), found_RV, width=4096)
    assert torch.equal(found_RV.cpu(), noise_bits(keys_R, positions_R, 4096))
    assert not torch.equal(found_RV.cpu(), noise_bits(keys_R, positions_R + 1, 4096))
    assert not (found_RV.cpu()[:, 1:] == noise_bits(keys_R, positions_R, 4096)[:, :-1]).any()


@pytest.mark.parametrize("temperature", TEMPERATURES[1:])
def test_scores_are_those_of_the_reference(temperature):
    """To one rounding: the logarithms of two libraries may differ in their last bit."""
    logits_RV, keys_R, positions_R = made(8, 2048)
    arrays = [on_device(array) for array in (logits_RV, keys_R, positions_R)]
    found_RV = torch.zeros(8, 2048, dtype=torch.float64, device=DEVICE)
    scores_of[(8,)](*arrays, found_RV, width=2048, INVERSE_TEMPERATURE=1 / temperature, enable_fp_fusion=False)
    wanted_RV = gumbel_noise(*arrays[1:], 2048).add_(arrays[0], alpha=1 / temperature)
    torch.testing.assert_close(found_RV, wanted_RV, rtol=4e-16, atol=2e-15)
    assert (found_RV == wanted_RV).double().mean() >= 0.9


# Choices


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_without_bans(temperature, dtype):
    logits_RV, keys_R, positions_R = made(24, dtype=dtype)
    found_R = assert_like_torch(logits_RV, None, None, keys_R, positions_R, temperature)
    assert len({int(token) // BLOCK for token in found_R}) > 1


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_flat_logits_are_decided_by_the_noise(temperature):
    logits_RV, keys_R, positions_R = made(24, scale=1e-3)
    assert_like_torch(logits_RV, None, None, keys_R, positions_R, temperature)


def test_other_noise_chooses_other_ids():
    """So the cases above would fail if a key, a position or an id were counted from another number."""
    logits_RV, keys_R, positions_R = made(24)
    found_R, _ = by_kernel(logits_RV, None, None, keys_R, positions_R, 1.0)
    for keys, positions in ((keys_R + 1, positions_R), (keys_R, positions_R + 1)):
        other_R, _ = by_kernel(logits_RV, None, None, keys, positions, 1.0)
        assert (other_R != found_R).double().mean() > 0.8
    noise_RV = gumbel_noise(keys_R, positions_R, V + 1)[:, 1:]
    assert ((noise_RV + logits_RV).argmax(1) != found_R).double().mean() > 0.8


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_bans_that_act_everywhere(temperature, dtype):
    logits_RV, keys_R, positions_R = made(24, dtype=dtype)
    free_R, _ = by_kernel(logits_RV, None, None, keys_R, positions_R, temperature)
    banned_RV = banned(24, V)
    banned_RV[::2].scatter_(1, free_R[::2, None], True)
    found_R = assert_like_torch(logits_RV, banned_RV, None, keys_R, positions_R, temperature)
    assert not banned_RV.gather(1, found_R[:, None]).any()
    assert (found_R[::2] != free_R[::2]).all() and (found_R == free_R).any()


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_bans_that_depend_on_alternatives(temperature, dtype):
    """By row: one alternative is likely, none is, there are none, and those with one or two more that are unlikely."""
    logits_RV, keys_R, positions_R = made(24, dtype=dtype)
    free_R, _ = by_kernel(logits_RV, None, None, keys_R, positions_R, temperature)
    banned_RV = banned(24, V).scatter_(1, free_R[:, None], True)
    kinds_R = torch.arange(24) % 4
    alternatives_RA = torch.full((24, 3), NO_TOKEN)
    alternatives_RA[kinds_R == 0, 1] = logits_RV.float().argmax(1)[kinds_R == 0]
    alternatives_RA[kinds_R == 1, 0] = alternatives_RA[kinds_R == 3, 2] = logits_RV.float().argmin(1)[:6]
    alternatives_RA[kinds_R == 3, 0] = V - 1
    logits_RV.scatter_(1, logits_RV.float().argmax(1)[:, None], logits_RV.new_full((24, 1), 16.0))
    for width in (3, 1):
        own_RA = alternatives_RA[:, :width]
        found_R = assert_like_torch(logits_RV, banned_RV, own_RA, keys_R, positions_R, temperature)
        acts_R = ~banned_RV.gather(1, found_R[:, None])[:, 0]
        assert acts_R.any() and not acts_R.all()


@pytest.mark.parametrize(("share", "chosen"), [(LIKELY * 1.001, 1), (LIKELY * 0.999, 0)])
def test_an_alternative_is_likely_from_five_percent_on(share, chosen):
    probabilities_V = torch.tensor([0.6, 0.4 - share, share])
    banned_RV = torch.tensor([[True, False, False], [True, False, False], [False, False, False]])
    alternatives_RA = torch.tensor([[2, -1], [-1, -1], [-1, -1]])
    zeros_R = torch.zeros(3, dtype=torch.long)
    logits_RV = probabilities_V.log().repeat(3, 1) + 4.0
    ids_R, logprobs_R = by_kernel(logits_RV, banned_RV, alternatives_RA, zeros_R, zeros_R, 0.0)
    assert ids_R.tolist() == [chosen, 1, 0]
    assert torch.allclose(logprobs_R.exp(), probabilities_V[ids_R])


@pytest.mark.parametrize("width", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_vocabularies_about_a_block_and_smaller(temperature, width):
    logits_RV, keys_R, positions_R = made(8, width)
    banned_RV = banned(8, width, share=0.3) & (torch.arange(width) > 0)
    alternatives_RA = torch.zeros(8, 1, dtype=torch.long)
    assert_like_torch(logits_RV, None, None, keys_R, positions_R, temperature)
    assert_like_torch(logits_RV, banned_RV, None, keys_R, positions_R, temperature)
    assert_like_torch(logits_RV, banned_RV, alternatives_RA, keys_R, positions_R, temperature)


def test_nothing_beside_a_row_is_read():
    """Rows of a padded head and of several positions, rows of longer bans and of longer alternatives."""
    logits_RV, keys_R, positions_R = made(4)
    padded_RLW = torch.full((4, 3, V + 77), 1e4)
    padded_RLW[:, -1, :V] = logits_RV
    longer_RW = torch.ones(9, V + 5, dtype=torch.bool)
    longer_RW[:4, :V] = banned_RV = banned(4, V)
    most_RA = torch.zeros(4, 6, dtype=torch.long)
    most_RA[:, :2] = alternatives_RA = logits_RV.topk(2).indices
    wanted = by_kernel(logits_RV, banned_RV, alternatives_RA, keys_R, positions_R, 1.0)
    arrays = [on_device(array) for array in (padded_RLW, longer_RW, most_RA, keys_R, positions_R)]
    views = arrays[0][:, -1, :V], arrays[1][:4, :V], arrays[2][:, :2]
    found = choose_by_kernel(*views, *arrays[3:], 1.0, math.log(LIKELY))
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("places", [(3, 7), (BLOCK - 1, BLOCK), (17, V - 1), (0, 1)])
def test_greedy_takes_the_lowest_of_equal_logits(places):
    logits_RV, keys_R, positions_R = made(4)
    logits_RV[:, places] = 40.0
    found_R = assert_like_torch(logits_RV, None, None, keys_R, positions_R, 0.0)
    assert (found_R == places[0]).all()
    bans_RV = torch.zeros(4, V, dtype=torch.bool)
    bans_RV[:, places[0]] = True
    assert (assert_like_torch(logits_RV, bans_RV, None, keys_R, positions_R, 0.0) == places[1]).all()


# Rows that are not finite


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_score_have_no_log_probability(temperature):
    """All banned, all minus infinity, one NaN, one infinity, a NaN that is banned; the last is sound."""
    logits_RV, keys_R, positions_R = made(6)
    banned_RV = torch.zeros(6, V, dtype=torch.bool)
    banned_RV[0] = True
    logits_RV[1] = -torch.inf
    logits_RV[2, BLOCK + 5] = torch.nan
    logits_RV[3, 9] = torch.inf
    logits_RV[4, V - 1], banned_RV[4, V - 1] = torch.nan, True
    for alternatives_RA in (None, torch.full((6, 2), NO_TOKEN)):
        arguments = (logits_RV, banned_RV, alternatives_RA, keys_R, positions_R, temperature)
        ids_R, logprobs_R = by_kernel(*arguments)
        wanted_R, wanted_logprobs_R = choose(*arguments)
        assert ids_R.tolist() == wanted_R.tolist() and ids_R[:3].tolist() == [0, 0, BLOCK + 5]
        assert logprobs_R.isnan().tolist() == wanted_logprobs_R.isnan().tolist() == [True] * 5 + [False]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_logits_of_minus_infinity_are_never_chosen(temperature):
    """A whole block of them, most of another, and all but one."""
    logits_RV, keys_R, positions_R = made(8)
    logits_RV[:4, :BLOCK] = -torch.inf
    logits_RV[:2, BLOCK + 9 :] = -torch.inf
    logits_RV[4:6] = -torch.inf
    logits_RV[4:6, V - 2] = torch.tensor([-1e4, 1e4])
    found_R = assert_like_torch(logits_RV, None, None, keys_R, positions_R, temperature)
    assert logits_RV.gather(1, found_R[:, None]).isfinite().all() and (found_R[4:6] == V - 2).all()


@pytest.mark.parametrize("shift", [-1e4, -300.0, 300.0, 1e4])
def test_log_probabilities_do_not_depend_on_a_constant(shift):
    logits_RV, keys_R, positions_R = made(8)
    assert_like_torch(logits_RV + shift, None, None, keys_R, positions_R, 1.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_alone_is_the_row_in_a_batch(temperature):
    logits_RV, keys_R, positions_R = made(9, dtype=torch.bfloat16)
    banned_RV = banned(9, V)
    alternatives_RA = logits_RV.float().topk(2).indices
    arrays = (logits_RV, banned_RV, alternatives_RA, keys_R, positions_R)
    ids_R, logprobs_R = by_kernel(*arrays, temperature)
    for row in range(9):
        found = by_kernel(*(array[row : row + 1] for array in arrays), temperature)
        assert found[0].tolist() == [ids_R[row]] and torch.equal(found[1], logprobs_R[row : row + 1])


def test_what_the_compiler_may_not_fuse(monkeypatch):
    """A sum that is rounded otherwise would show on a GPU only, and there rarely."""
    noted = []

    class Launches:
        def __getitem__(self, grid):
            return lambda *_, **options: noted.append((grid, options["enable_fp_fusion"]))

    for name in ("read_rows", "finish_rows"):
        monkeypatch.setattr(choice_kernels, name, Launches())
    logits_RV, keys_R, positions_R = made(4)
    by_kernel(logits_RV, None, None, keys_R, positions_R, 1.0)
    assert noted == [((3, 4), False), ((4,), False)]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_graph_that_was_captured_chooses_again():
    """And ``choose`` on a GPU is the kernel: a graph could not capture what asks the GPU."""
    logits_RV, keys_R, positions_R = (on_device(array) for array in made(8))
    banned_RV, alternatives_RA = banned(8, V).cuda(), logits_RV.topk(2).indices
    arguments = (logits_RV, banned_RV, alternatives_RA, keys_R, positions_R, 1.0)
    choose(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids_R, logprobs_R = choose(*arguments)
    for _ in range(3):
        positions_R += 1
        graph.replay()
        wanted = by_kernel(*arguments)
        assert torch.equal(ids_R.cpu(), wanted[0]) and torch.equal(logprobs_R.cpu(), wanted[1])
