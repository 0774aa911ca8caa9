"""The fused path around its kernels, on a GPU or, with TRITON_INTERPRET=1, on the CPU; run by test_fused.py."""

import math
from dataclasses import replace

import pytest
import torch
from pair_oracle import DIVERGENCES, D, T, V, example, heads, oracle_divergence, oracle_logits
from row_cases import DEVICE, HALVES
from torch.utils._python_dispatch import TorchDispatchMode

from rocktokens.errors import NonFiniteLossError, RocktokensError
from rocktokens.models.head import LMHead
from rocktokens.scoring import fused
from rocktokens.scoring.checks import require_sound_scores
from rocktokens.scoring.divergence import token_scores, weighted_kl
from rocktokens.types import TokenScores

on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.fixture
def fused_path(monkeypatch):
    """The public functions take the fused path on the CPU too; a GPU does by itself."""
    if DEVICE == "cpu":
        monkeypatch.setattr(fused, "takes", lambda *_: True)


def chunks_of(monkeypatch, rows, width, bytes_per_logit=8):
    """Scratch for so many rows of both models' logits."""
    stride = math.ceil(width / fused.BLOCK) * fused.BLOCK
    for name in ("SCRATCH_BYTES", "SCORING_BYTES"):
        monkeypatch.setattr(fused, name, rows * stride * bytes_per_logit)


# The public functions, against themselves in float64 on the CPU


def on_device(pair, dtype=torch.float32):
    """The pair on the device, and the same numbers in float64 on the CPU."""
    narrow = [x.to(DEVICE, dtype) if x.is_floating_point() else x.to(DEVICE) for x in pair]
    wide = [x.double().cpu() if x.is_floating_point() else x.cpu() for x in narrow]
    return narrow, wide


def loss_and_gradients(h_s, head, h_t, teacher, ids, weights, *settings, **options):
    leaves = [x.detach().clone().requires_grad_() for x in (h_s, head.weight_VD, head.bias_V)]
    student = replace(head, weight_VD=leaves[1], bias_V=leaves[2])
    loss, scores = weighted_kl(leaves[0], student, h_t, teacher, ids, weights, 11.0, *settings, **options)
    gradients = torch.autograd.grad(3.0 * loss, leaves)
    return [loss, *gradients, *(column for _, column in scores.items())]


def assert_all_close(ours, theirs, rtol, atol):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double().cpu(), b.double().cpu(), rtol=rtol, atol=atol, equal_nan=True)


def test_scores_alone_are_those_of_the_sum():
    (h_s, w_s, h_t, w_t, ids), _ = on_device(example())
    heads_ = LMHead(w_s), LMHead(w_t)
    for divergence in DIVERGENCES:
        alone = fused.scored(h_s, heads_[0], h_t, heads_[1], ids, divergence, 1.3)
        arrays = (h_s, w_s.requires_grad_(), None, heads_[0], h_t, heads_[1], ids, torch.ones(T, device=DEVICE))
        _, table = fused.weighted_sum(*arrays, divergence, 1.3)
        assert torch.equal(alone, table)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(
    ("widths", "term"), [((V, V), None), ((V, V), "asymmetric"), ((V, V + 6), "asymmetric"), ((V + 6, V), None)]
)
def test_the_public_functions_agree_with_the_torch_path(fused_path, monkeypatch, divergence, term, widths):
    pair, wide = on_device(example(v_student=widths[0], v_teacher=widths[1]))
    weights = torch.linspace(0, 2, T).where(torch.arange(T) % 3 > 0, 0.0)
    chunks_of(monkeypatch, 4, V)
    head_s, head_t = heads(pair[1], pair[3])
    head_s, head_t = (replace(head, bias_V=head.bias_V.to(DEVICE)) for head in (head_s, head_t))
    doubled = [
        replace(h, weight_VD=h.weight_VD.double().cpu(), bias_V=h.bias_V.double().cpu()) for h in (head_s, head_t)
    ]
    ours = loss_and_gradients(pair[0], head_s, pair[2], head_t, pair[4], weights, divergence, 1.7, term=term)
    alone = token_scores(pair[0], head_s, pair[2], head_t, pair[4], divergence, 1.7)
    monkeypatch.setattr(fused, "takes", lambda *_: False)
    theirs = loss_and_gradients(wide[0], doubled[0], wide[2], doubled[1], wide[4], weights, divergence, 1.7, term=term)
    assert_all_close(ours, theirs, rtol=2e-5, atol=2e-6)
    reference = token_scores(wide[0], doubled[0], wide[2], doubled[1], wide[4], divergence, 1.7)
    assert_all_close((c for _, c in alone.items()), (c for _, c in reference.items()), rtol=2e-5, atol=2e-6)


def test_ids_that_lie_apart_are_the_ids_that_are_meant(fused_path):
    pair, _ = on_device(example())
    apart = torch.stack([pair[4], pair[4].roll(1)], dim=1)[:, 0]
    assert not apart.is_contiguous()
    together, found = (token_scores(*pair[:4], ids) for ids in (pair[4], apart))
    assert_all_close((c for _, c in found.items()), (c for _, c in together.items()), rtol=0, atol=0)


def test_results_do_not_depend_on_the_chunks(fused_path, monkeypatch):
    pair, _ = on_device(example())
    head = LMHead(pair[1], torch.zeros(V, device=DEVICE))
    results = []
    for rows in (1, 4, 6, 12, 1000):
        chunks_of(monkeypatch, rows, V)
        results.append(loss_and_gradients(pair[0], head, *pair[2:], torch.ones(T), "jsd", 1.2))
    for other in results[1:]:
        assert_all_close(results[0], other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("n_rows", [1, 7, 500, 8192, 10_000])
@pytest.mark.parametrize("room", [6000, 60_000])
@pytest.mark.parametrize(("span_bytes", "chunk_bytes"), [(0, 4), (2, 2), (2, 8), (4, 4)])
def test_chunks_and_spans_fit_the_scratch_and_are_few(n_rows, room, span_bytes, chunk_bytes):
    span, chunk = fused._sizes(n_rows, span_bytes, chunk_bytes, room)
    assert 1 <= chunk <= span <= n_rows and span * span_bytes + chunk * chunk_bytes <= room
    if chunk < n_rows:
        largest = room // (span_bytes * fused.CHUNKS_PER_SPAN + chunk_bytes)
        assert chunk % fused.TILE == 0 or chunk & (chunk - 1) == 0
        assert chunk <= largest and 2 * math.ceil(n_rows / largest) >= n_rows // chunk
    if span < n_rows:
        one_chunk_more = (span + chunk) * span_bytes + chunk * chunk_bytes
        assert span >= fused.CHUNKS_PER_SPAN * chunk
        assert one_chunk_more > room or math.ceil(n_rows / (span + chunk)) == math.ceil(n_rows / span)


def test_the_sizes_that_the_documentation_names():
    stride, (scratch, scoring) = 149 * fused.BLOCK, (fused.SCRATCH_BYTES, fused.SCORING_BYTES)
    assert fused._sizes(8192, 2 * stride, 2 * stride, scratch) == (2048, 512)
    assert fused._sizes(8192, 2 * stride, 8 * stride, scratch) == (1536, 256)
    assert fused._sizes(8192, 0, 4 * stride, scoring) == (8192, 1536)
    assert fused._sizes(8192, 0, 8 * stride, scoring) == (8192, 768)


def test_gradients_are_the_slopes_of_the_loss(fused_path):
    pair, _ = on_device(example(seed=4))
    weights, generator = torch.rand(T), torch.Generator().manual_seed(1)
    leaves = [x.clone().requires_grad_() for x in pair[:2]]

    def loss_of(h, weight):
        return weighted_kl(h, weight, *pair[2:], weights, 3.0, "reverse", 1.3)[0]

    gradients = torch.autograd.grad(loss_of(*leaves), leaves)
    for index, gradient in enumerate(gradients):
        step = torch.randn(gradient.shape, generator=generator).to(DEVICE) * 2e-3
        ends = [loss_of(*(x + sign * step if i == index else x for i, x in enumerate(leaves))) for sign in (1, -1)]
        torch.testing.assert_close((gradient * step).sum(), (ends[0] - ends[1]).detach() / 2, rtol=5e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("round_logits", [True, False])
def test_gradients_have_the_dtype_of_what_they_belong_to(dtype, round_logits, monkeypatch):
    (h_s, w_s, h_t, w_t, ids), wide = on_device(example(), dtype)
    bias = torch.zeros(V, device=DEVICE, requires_grad=True)
    h_s, w_s = h_s.requires_grad_(), w_s.requires_grad_()
    student = LMHead(w_s, bias)
    chunks_of(monkeypatch, 5, V)
    arrays = (h_s, w_s, bias, student, h_t, LMHead(w_t), ids, torch.ones(T, device=DEVICE))
    total, _ = fused.weighted_sum(*arrays, "reverse", 1.0, round_logits=round_logits)
    found = torch.autograd.grad(total / 7, (h_s, w_s, bias))
    leaves = [wide[0].requires_grad_(), wide[1].requires_grad_(), bias.detach().double().cpu().requires_grad_()]
    z_s, z_t = oracle_logits(leaves[0], LMHead(*leaves[1:])), oracle_logits(wide[2], wide[3])
    naive = oracle_divergence(z_s, z_t, "reverse", 1.0).sum() / 7
    # logits rounded to half width are off by half a unit of their size
    rounding = torch.finfo(dtype).eps * (z_s.abs().max().item() if round_logits else 1)
    for ours, theirs, leaf in zip(found, torch.autograd.grad(naive, leaves), (h_s, w_s, bias), strict=True):
        assert ours.dtype == leaf.dtype
        assert (ours.double().cpu() - theirs).abs().max() <= (4 * rounding + 1e-6) * theirs.abs().max()


def test_states_wider_than_their_head_and_the_reverse():
    (h_s, w_s, h_t, w_t, ids), _ = on_device(example())
    ones = torch.ones(T, device=DEVICE)
    for h_dtype, dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        h, w = h_s.to(h_dtype).requires_grad_(), w_s.to(dtype).requires_grad_()
        total, _ = fused.weighted_sum(h, w, None, LMHead(w), h_t, LMHead(w_t), ids, ones, "reverse", 1.0)
        gradients = torch.autograd.grad(total, (h, w))
        assert [g.dtype for g in gradients] == [h_dtype, dtype]


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_needed_are_made(fused_path, wanted):
    pair, _ = on_device(example())
    leaves = [x.clone().requires_grad_(needed) for x, needed in zip(pair[:2], wanted, strict=True)]
    whole = [x.clone().requires_grad_() for x in pair[:2]]
    loss, _ = weighted_kl(*leaves, *pair[2:], torch.ones(T), 2.0)
    reference, _ = weighted_kl(*whole, *pair[2:], torch.ones(T), 2.0)
    torch.testing.assert_close(loss, reference)
    assert loss.requires_grad == any(wanted)
    expected_gradients = torch.autograd.grad(reference, whole)
    if any(wanted):
        loss.backward()
    for leaf, needed, gradient in zip(leaves, wanted, expected_gradients, strict=True):
        assert (leaf.grad is not None) == needed
        if needed:
            torch.testing.assert_close(leaf.grad, gradient)


@pytest.mark.parametrize("n", [0, T])
def test_without_a_position_the_loss_is_a_zero_that_still_has_gradients(fused_path, n):
    pair, _ = on_device(example(n=n))
    leaves = [x.clone().requires_grad_() for x in pair[:2]]
    loss, scores = weighted_kl(*leaves, *pair[2:], torch.zeros(n), 7.0)
    loss.backward()
    assert loss.item() == 0.0 and all(leaf.grad is not None and (leaf.grad == 0).all() for leaf in leaves)
    assert scores.kl.shape == (n,) and scores.kl.isnan().all()
    assert n or token_scores(*pair).kl.shape == (0,)


def test_rows_of_weight_zero_never_reach_a_head(fused_path):
    pair, _ = on_device(example())
    pair[0][4], pair[2][5] = torch.nan, torch.nan
    weights = torch.ones(T)
    weights[4:6] = 0
    h = pair[0].requires_grad_()
    loss, scores = weighted_kl(h, *pair[1:], weights, 2.0)
    loss.backward()
    assert loss.isfinite() and (h.grad[4:6] == 0).all() and scores.kl[4:6].isnan().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_model_is_named_with_its_row(fused_path, value):
    for model, broken in (("student", 0), ("teacher", 2)):
        pair, _ = on_device(example())
        pair[broken][9, 0] = value
        with pytest.raises(NonFiniteLossError, match=f"the {model}'s logits at row 9"):
            token_scores(*pair)
        unchecked = token_scores(*pair, defer_checks=True)
        with pytest.raises(NonFiniteLossError, match=f"the {model}'s logits at row 9"):
            require_sound_scores(TokenScores(*(column.cpu().numpy() for _, column in unchecked.items())))
        weights = torch.ones(T)
        weights[:5] = 0
        with pytest.raises(NonFiniteLossError, match=f"the {model}'s logits at row 9"):
            weighted_kl(*pair, weights, 1.0)


def with_bias(weight, index, value):
    bias = torch.zeros(len(weight), device=weight.device)
    bias[index] = value
    return LMHead(weight, bias)


def test_a_model_that_rules_out_every_token_is_named(fused_path):
    pair, _ = on_device(example())
    with pytest.raises(NonFiniteLossError, match="the teacher's logits at row 0"):
        token_scores(*pair[:3], with_bias(pair[3], slice(None), -math.inf), pair[4])


def test_an_infinite_divergence_is_named_with_its_remedy(fused_path):
    (h_s, w_s, h_t, w_t, ids), _ = on_device(example())
    ids, ruled_out = ids.clamp(min=1), with_bias(w_s, 0, -math.inf)
    with pytest.raises(NonFiniteLossError, match=r'row 0 is infinite.*"jsd"'):
        token_scores(h_s, w_s, h_t, with_bias(w_t, 0, -math.inf), ids)
    unchecked = token_scores(h_s, w_s, h_t, with_bias(w_t, 0, -math.inf), ids, defer_checks=True)
    with pytest.raises(NonFiniteLossError, match=r'row 0 is infinite.*"jsd"'):
        require_sound_scores(unchecked)
    scores = token_scores(h_s, ruled_out, h_t, w_t, ids)
    underrated = (scores.logp_teacher > scores.logp_student).float()
    arrays = (h_s, ruled_out, h_t, w_t, ids)
    loss, _ = weighted_kl(*arrays, underrated, 1.0, term="asymmetric")
    torch.testing.assert_close(loss, (scores.kl * underrated).sum())
    with pytest.raises(NonFiniteLossError, match=r"is infinite, .*: use another policy than asymmetric"):
        weighted_kl(*arrays, 1 - underrated, 1.0, term="asymmetric")


@pytest.mark.parametrize("where", ["cpu", DEVICE])
def test_a_token_outside_the_common_width_is_named(fused_path, where):
    pair, _ = on_device(example(v_teacher=V + 4))
    for bad in (V, -1):
        ids = pair[4].to(where, copy=True)
        ids[6] = bad
        with pytest.raises(RocktokensError, match=rf"token id {bad} is outside the {V} logits"):
            token_scores(*pair[:4], ids)
        with pytest.raises(RocktokensError, match=rf"token id {bad} is outside the {V} logits"):
            weighted_kl(*pair[:4], ids, torch.ones(T), 1.0)


def test_a_second_backward_is_refused_and_not_wrong(fused_path):
    pair, _ = on_device(example())
    loss, _ = weighted_kl(pair[0].requires_grad_(), *pair[1:], torch.ones(T), 1.0)
    loss.backward(retain_graph=True)
    with pytest.raises(RocktokensError, match="call weighted_kl again"):
        loss.backward()


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.nbytes)
        return result


def test_the_logits_of_all_positions_never_exist_at_once(fused_path, monkeypatch):
    n, width = 40, 3 * fused.BLOCK
    pair, _ = on_device(example(n=n, v_student=width, v_teacher=width))
    leaves = [x.requires_grad_() for x in pair[:2]]
    chunks_of(monkeypatch, 8, width)
    with LargestTensor() as largest:
        loss, _ = weighted_kl(*leaves, *pair[2:], torch.ones(n), float(n))
        loss.backward()
        token_scores(*pair)
    assert 4 * width * D < largest.bytes <= fused.SCRATCH_BYTES < 4 * n * width


# What only a GPU can show


@on_gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_the_fused_path_is_taken_and_agrees_with_the_torch_path_at_full_size(autocast, monkeypatch):
    generator = torch.Generator("cuda").manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    n, width = 700, 50_257
    head = LMHead(randn(width, 256) / 8, torch.zeros(width, device="cuda"))
    h_s, h_t, teacher = randn(n, 256), randn(n, 192), randn(width, 192) / 8
    ids = torch.randint(width, (n,), generator=generator, device="cuda")
    weights = torch.rand(n).where(torch.arange(n) % 4 > 0, 0.0)
    assert fused.takes(h_s, head, h_t, LMHead(teacher))
    chunks_of(monkeypatch, 256, width, 12)
    results = []
    for round_logits, takes in ((False, fused.takes), (True, fused.takes), (False, lambda *_: False)):
        monkeypatch.setattr(fused, "takes", takes)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            arguments = (h_s, head, h_t, teacher, ids, weights, "reverse", 1.0)
            results.append(loss_and_gradients(*arguments, round_logits=round_logits))
    wide, narrow, reference = results
    assert_all_close(wide[:1] + wide[4:], reference[:1] + reference[4:], rtol=1e-4, atol=1e-5)
    assert_all_close(narrow[:1] + narrow[4:], reference[:1] + reference[4:], rtol=5e-2, atol=5e-2)
    for ours, theirs in zip(wide[1:4], reference[1:4], strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= 2**-7 * theirs.abs().max()


@on_gpu
def test_the_host_waits_once_a_call():
    pair, _ = on_device(example(), torch.bfloat16)
    leaves = [x.requires_grad_() for x in pair[:2]]
    weights = torch.linspace(0, 1, T)
    calls = {
        "weighted_kl": lambda ids: weighted_kl(*leaves, *pair[2:4], ids, weights, 3.0)[0].backward(),
        "token_scores": lambda ids: token_scores(*pair[:4], ids),
    }
    for call in calls.values():
        for ids in (pair[4], pair[4].cpu()):
            call(ids)
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with pytest.warns(UserWarning, match="synchronizing") as found:
                    call(ids)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert len([warning for warning in found if "synchronizing" in str(warning.message)]) == 1


@on_gpu
def test_float64_is_left_to_the_torch_path():
    pair = [x.cuda() for x in example()]
    assert not fused.takes(pair[0], LMHead(pair[1]), pair[2], LMHead(pair[3]))
    assert token_scores(*pair).kl.dtype == torch.float64
