"""Rows of the kernels against float64, on a GPU or, with TRITON_INTERPRET=1, on the CPU; run by test_fused.py.

Rows of the identity as states make the logits exactly the transposed weight, and ∂W exactly the gradient's transpose.
"""

import math
import os

import pytest
import torch
from pair_oracle import DIVERGENCES
from transformers import AutoTokenizer

from rocktokens.models import pebbles
from rocktokens.models.head import LMHead, hidden_states, lm_head
from rocktokens.models.load import load_model
from rocktokens.scoring import fused, row_kernels
from rocktokens.types import STANDARD_COLUMNS

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
WIDTH = fused.BLOCK + 189
"""Two blocks, the second not full, and no multiple of anything."""
HALVES = (torch.bfloat16, torch.float16)


def logits(seed, n, width=WIDTH, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    z_s, z_t = (scale * torch.randn(n, width, generator=generator) for _ in range(2))
    return z_s, z_t, torch.randint(width, (n,), generator=generator)


def scored(z_s, z_t, ids, divergence="reverse", temperature=1.0, asymmetric=False, weights=None, **more):
    """The columns by name and the gradient (n, V) of exactly these logits, in float64 on the CPU.

    ``more``: students_ and teachers_ bias, scale, softcap; round_logits.
    """
    n = len(z_s)
    options = {"round_logits": more.pop("round_logits", True)}
    eye = torch.eye(n, dtype=z_s.dtype, device=DEVICE)
    weight = z_s.T.contiguous().to(DEVICE).requires_grad_()
    own = [
        {k.removeprefix(side): v for k, v in more.items() if k.startswith(side)} for side in ("student_", "teacher_")
    ]
    student, teacher = LMHead(weight, **own[0]), LMHead(z_t.T.contiguous().to(DEVICE), **own[1])
    weights = (torch.ones(n) if weights is None else weights).to(DEVICE)
    arrays = (eye, weight, None, student, eye, teacher, ids.to(DEVICE), weights)
    total, table = fused.weighted_sum(*arrays, divergence, temperature, asymmetric, **options)
    (gradient,) = torch.autograd.grad(total, weight)
    torch.testing.assert_close(total, (table[-1] * weights).sum())
    names = (*STANDARD_COLUMNS, "term")
    return dict(zip(names, table.double().cpu(), strict=True)), gradient.T.double().cpu()


def alone(z_s, z_t, ids, divergence="reverse", temperature=1.0):
    """The columns without gradient."""
    eye = torch.eye(len(z_s), dtype=z_s.dtype, device=DEVICE)
    heads_ = (LMHead(z.T.contiguous().to(DEVICE)) for z in (z_s, z_t))
    table = fused.scored(eye, next(heads_), eye, next(heads_), ids.to(DEVICE), divergence, temperature)
    return dict(zip((*STANDARD_COLUMNS, "term"), table.double().cpu(), strict=True))


def expected(z_s, z_t, ids, divergence="reverse", temperature=1.0, asymmetric=False, weights=None):
    """The same by their definitions, from logarithms, the gradient by autograd."""
    z = z_s.double().requires_grad_()
    log_p, log_q = (torch.log_softmax(x / temperature, -1) for x in (z, z_t.double()))
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)

    def relative(log_a, log_b):
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    values = {
        "reverse": relative(log_p, log_q),
        "forward": relative(log_q, log_p),
        "jsd": (relative(log_p, log_m) + relative(log_q, log_m)) / 2,
    }
    own = [log.gather(-1, ids.unsqueeze(-1)).squeeze(-1) for log in (log_p, log_q)]
    term = torch.where(own[1] > own[0], values["reverse"], values["forward"]) if asymmetric else values[divergence]
    (logit_gradient,) = torch.autograd.grad(values[divergence].sum(), z, retain_graph=True)
    weights = torch.ones(len(z)) if weights is None else weights
    (gradient,) = torch.autograd.grad((term * weights.double()).sum(), z)
    entropies = [-(log.exp() * log).sum(-1) for log in (log_p, log_q)]
    columns = (values[divergence], *own, *entropies, logit_gradient.norm(dim=-1), term)
    return dict(zip((*STANDARD_COLUMNS, "term"), (c.detach() for c in columns), strict=True)), gradient


def assert_scores(found, wanted, rtol=1e-5):
    """A divergence and the length of a gradient keep their digits where they are next to nothing."""
    for name, column in wanted.items():
        own_atol = {"kl": 1e-12, "term": 1e-12, "grad_norm": 5e-8}.get(name, 2e-6)
        torch.testing.assert_close(found[name], column, rtol=rtol, atol=own_atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_gradient(found, wanted, dtype):
    """Every entry within rounding of its dtype; what a half-width float cannot hold is 0."""
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    rounding = eps if DEVICE == "cpu" else eps / 2  # the interpreter cuts digits off where a GPU rounds
    largest = wanted.abs().amax(-1, keepdim=True)
    assert ((found - wanted).abs() <= (rounding + 2e-5) * wanted.abs() + 1e-6 * largest + tiny + 5e-8).all()


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_scores_and_gradients_on_the_same_logits(dtype, divergence, asymmetric):
    z_s, z_t, ids = logits(0, 6)
    z_s, z_t, weights = z_s.to(dtype), z_t.to(dtype), torch.linspace(0.25, 2.0, 6)
    settings = (divergence, 1.3, asymmetric, weights)
    wanted, gradient = expected(z_s, z_t, ids, *settings)
    for round_logits in (True, False):
        found, found_gradient = scored(z_s, z_t, ids, *settings, round_logits=round_logits)
        assert_scores(found, wanted)
        assert_gradient(found_gradient, gradient, dtype)
    if not asymmetric:
        assert_scores(alone(z_s, z_t, ids, divergence, 1.3), wanted)


def adversarial():
    """Rows by name: student's and teacher's logits and the sampled token."""
    z_s, z_t, _ = logits(1, 9)
    one_hot, ties = torch.zeros(WIDTH), torch.zeros(WIDTH)
    one_hot[7], ties[: WIDTH // 2] = 200.0, 4.0
    top = int(z_s[0].argmax())
    return {
        "one-hot teacher": (z_s[0], one_hot, 7),
        "one-hot student": (one_hot, z_t[1], 7),
        "both one-hot": (one_hot, one_hot.roll(1), 7),
        "huge logits": (3e3 * z_s[2], 3e3 * z_t[2], 11),
        "huge logits, token at the top": (3e3 * z_s[0], 3e3 * z_t[0], top),
        "huge and equal but for a little": (3e3 * z_s[3], 3e3 * z_s[3] + 0.01 * z_t[3], int(z_s[3].argmax())),
        "ties": (ties, ties.roll(5), 0),
        "flat": (torch.zeros(WIDTH), torch.full((WIDTH,), -3.0), 3),
        "teacher shifted": (z_s[4], z_s[4] + 7.0, 5),
        "close": (z_s[5], z_s[5] + 0.01 * z_t[5], 5),
        "improbable token": (z_s[6], z_t[6], int((z_s[6] + z_t[6]).argmin())),
        "token far below all others": (one_hot + 60.0 * (ties > 0), one_hot.roll(2), WIDTH - 1),
    }


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_adversarial_rows(divergence, asymmetric):
    rows = adversarial()
    z_s, z_t = (torch.stack([row[side] for row in rows.values()]) for side in (0, 1))
    ids = torch.tensor([row[2] for row in rows.values()])
    found, found_gradient = scored(z_s, z_t, ids, divergence, asymmetric=asymmetric)
    wanted, gradient = expected(z_s, z_t, ids, divergence, asymmetric=asymmetric)
    if not asymmetric:
        assert_scores(alone(z_s, z_t, ids, divergence), wanted)
    for index, name in enumerate(rows):
        one, other = ({key: column[index] for key, column in table.items()} for table in (found, wanted))
        assert_scores(one, other)
        assert (found_gradient[index] - gradient[index]).norm() <= 2e-5 * gradient[index].norm() + 1e-8, name


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("shift", [8.0, 47.0])
def test_a_constant_between_the_models_costs_no_digits(shift, temperature):
    """Differences of the logits are exact in float32, and of 1e-3."""
    z_s, z_t, _ = logits(8, 12)
    z_s, ids = (64 * z_s).round() / 64, z_s.argmax(-1)
    z_t = z_s + shift + (2 * z_t).round() / 1024
    found, found_gradient = scored(z_s, z_t, ids, temperature=temperature)
    wanted, gradient = expected(z_s, z_t, ids, temperature=temperature)
    assert_scores(found, wanted)
    assert ((found_gradient - gradient).norm(dim=-1) <= 1e-5 * gradient.norm(dim=-1)).all()


@pytest.mark.parametrize("depth", [3.0, 9.0, 11.5, 18.0])
def test_the_entropy_of_models_that_are_sure_of_another_token_keeps_its_digits(depth):
    z_s, z_t, _ = logits(9, 4, scale=1.0)
    z_s -= 22.0
    z_t = z_s + 0.1 * z_t
    z_s[:, 7], z_t[:, 7], z_s[:, 3], z_t[:, 3] = 0.0, 0.0, -depth, -depth
    ids = torch.full((4,), 3)
    wanted, _ = expected(z_s, z_t, ids)
    assert_scores(alone(z_s, z_t, ids), wanted)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_sampled_token_that_the_models_see_unlike_all_others_costs_no_digits(temperature):
    z_s, z_t, ids = logits(7, 24)
    z_t[range(24), ids] += torch.linspace(-60, 60, 24)
    found, found_gradient = scored(z_s, z_t, ids, temperature=temperature)
    wanted, gradient = expected(z_s, z_t, ids, temperature=temperature)
    assert_scores(found, wanted)
    assert ((found_gradient - gradient).norm(dim=-1) <= 1e-5 * gradient.norm(dim=-1)).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("spread", [1.0, 0.4, 0.25, 0.1, 0.01, 0.001])
def test_log_ratios_that_differ_little_but_for_that_of_the_sampled_token_keep_their_digits(spread, divergence):
    z_s, z_t, _ = logits(10, 4)
    ids = z_s.argmin(-1)
    z_t = z_s + 3.0 + spread * z_t
    z_t[range(4), ids] = z_s[range(4), ids]
    found, found_gradient = scored(z_s, z_t, ids, divergence)
    wanted, gradient = expected(z_s, z_t, ids, divergence)
    assert_scores(found, wanted)
    assert_scores(alone(z_s, z_t, ids, divergence), wanted)
    torch.testing.assert_close(found["grad_norm"], wanted["grad_norm"], rtol=1e-5, atol=0)
    assert ((found_gradient - gradient).norm(dim=-1) <= 1e-5 * gradient.norm(dim=-1)).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("shift", "distance"), [(9.7, 1e-4), (9.7, 1e-3), (9.7, 1e-2), (1e3, 0.3), (-1e4, 0.3)])
def test_log_ratios_keep_their_digits_where_the_difference_of_logits_does_not(shift, distance, divergence):
    """A constant between the models costs a difference of float32 logits the digits that log-ratios are made of."""
    z_s, z_t, ids = logits(11, 4)
    z_t = z_s + shift + distance * z_t
    found, found_gradient = scored(z_s, z_t, ids, divergence)
    wanted, gradient = expected(z_s, z_t, ids, divergence)
    assert_scores(found, wanted)
    assert_scores(alone(z_s, z_t, ids, divergence), wanted)
    assert ((found_gradient - gradient).norm(dim=-1) <= 1e-5 * gradient.norm(dim=-1)).all()


@pytest.mark.parametrize("distance", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize(("own", "gap", "above", "below"), [(0.3, 2.2, 0, 1), (0.3, 3.5, 0, 1), (0.5, 2.0, 1, 55)])
def test_log_ratios_keep_their_digits_where_the_sampled_logit_is_nearer_to_zero(own, gap, above, below, distance):
    """Relative to it others lose digits of their own, and few others are likely enough to hide that."""
    z_s, noise, _ = logits(13, 12)
    z_s -= 100.0
    z_s[:, 5] = own * (1 + torch.linspace(0, 0.3, 12))
    z_s[:, 10 : 10 + above] = z_s[:, 5:6] + gap + 0.007 * noise[:, :above]
    z_s[:, 30 : 30 + below] = z_s[:, 5:6] - gap + 0.007 * noise[:, 30 : 30 + below]
    z_t, ids = z_s + distance * noise, torch.full((12,), 5)
    found, found_gradient = scored(z_s, z_t, ids)
    wanted, gradient = expected(z_s, z_t, ids)
    assert_scores(found, wanted)
    torch.testing.assert_close(found["kl"], wanted["kl"], rtol=1e-5, atol=1e-15)  # the oracle has no more digits
    assert ((found_gradient - gradient).norm(dim=-1) <= 1e-5 * gradient.norm(dim=-1)).all()


class Never:
    """A kernel that is launched and does nothing."""

    def __getitem__(self, grid):
        return lambda *arguments, **settings: None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 9.7])
@pytest.mark.parametrize("distance", [0.0, 1e-4, 1e-2, 0.1, 1.0])
def test_tokens_that_the_student_samples_need_no_second_kernel(distance, shift, dtype, monkeypatch):
    """However near the models are: the gradient of a row that is left to that kernel would not be written."""
    z_s, noise, _ = logits(14, 8)
    z_s = (10 + z_s).to(dtype)
    z_t = (z_s.float() + shift + distance * noise).to(dtype)
    ids = torch.multinomial(z_s.double().softmax(-1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    _, gradient = expected(z_s, z_t, ids)
    monkeypatch.setattr(row_kernels, "score_rows", Never())
    _, found_gradient = scored(z_s, z_t, ids)
    assert_gradient(found_gradient, gradient, dtype)


@pytest.mark.parametrize("distance", [1e-4, 1e-3, 1e-2, 1.0])
@pytest.mark.parametrize("is_student_wide", [False, True])
def test_models_of_unequal_dtypes(is_student_wide, distance):
    z, noise, ids = logits(12, 8)
    narrow = z.bfloat16()
    wide = narrow.float() + 9.7 + distance * noise
    z_s, z_t = (wide, narrow) if is_student_wide else (narrow, wide)
    wanted, gradient = expected(z_s, z_t, ids)
    eyes = [torch.eye(8, dtype=z.dtype, device=DEVICE) for z in (z_s, z_t)]
    student, teacher = (LMHead(z.T.contiguous().to(DEVICE)) for z in (z_s, z_t))
    weight, ones = student.weight_VD.requires_grad_(), torch.ones(8, device=DEVICE)
    arrays = (eyes[0], weight, None, student, eyes[1], teacher, ids.to(DEVICE), ones)
    total, table = fused.weighted_sum(*arrays, "reverse", 1.0, round_logits=True)
    only = fused.scored(eyes[0], student, eyes[1], teacher, ids.to(DEVICE), "reverse", 1.0, round_logits=True)
    for columns in (table, only):
        assert_scores(dict(zip((*STANDARD_COLUMNS, "term"), columns.double().cpu(), strict=True)), wanted)
    assert_gradient(torch.autograd.grad(total, weight)[0].T.double().cpu(), gradient, z_s.dtype)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_equal_models_have_no_divergence(divergence):
    z, _, ids = logits(2, 3)
    found, gradient = scored(z, z, ids, divergence)
    assert (found["kl"] >= 0).all() and (found["kl"] <= 1e-12).all() and (found["grad_norm"] <= 1e-7).all()
    if divergence != "jsd":
        assert (found["kl"] == 0).all() and (gradient == 0).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("distance", [1e-6, 1e-4, 1e-2])
def test_the_divergence_of_nearly_equal_models_keeps_its_digits(divergence, distance):
    z_s, z_t, ids = logits(3, 3)
    z_t = z_s + distance * z_t
    found, _ = scored(z_s, z_t, ids, divergence)
    wanted, _ = expected(z_s, z_t, ids, divergence)
    assert_scores(alone(z_s, z_t, ids, divergence), wanted)
    assert (found["kl"] >= 0).all()
    torch.testing.assert_close(found["kl"], wanted["kl"], rtol=1e-5, atol=1e-14)
    torch.testing.assert_close(found["grad_norm"], wanted["grad_norm"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_bias_scale_softcap_and_temperature(divergence):
    z_s, z_t, ids = logits(4, 4)
    b_s, b_t = (2 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in (8, 9))
    student = {"student_bias_V": b_s.to(DEVICE), "student_scale": 0.7, "student_softcap": 4.0}
    teacher = {"teacher_bias_V": b_t.to(DEVICE), "teacher_scale": 1.9, "teacher_softcap": 30.0}
    found, gradient = scored(z_s, z_t, ids, divergence, 0.7, **student, **teacher)
    inner = 0.7 * (z_s.double() + b_s)
    own, other = 4 * torch.tanh(inner / 4), 30 * torch.tanh(1.9 * (z_t.double() + b_t) / 30)
    wanted, own_gradient = expected(own, other, ids, divergence, 0.7)
    assert_scores(found, wanted, rtol=2e-5)
    own_gradient = own_gradient * (1 - (own / 4) ** 2) * 0.7
    assert (gradient - own_gradient).abs().max() <= 1e-5 * own_gradient.abs().max()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_columns_ruled_out_by_both_models_count_for_nothing(divergence):
    z_s, z_t, ids = logits(5, 3)
    out = torch.zeros(WIDTH, device=DEVICE)
    out[0] = out[WIDTH - 1] = -math.inf
    ids = ids.clamp(1, WIDTH - 2)
    found, gradient = scored(z_s, z_t, ids, divergence, student_bias_V=out, teacher_bias_V=out)
    wanted, inner = expected(z_s[:, 1:-1], z_t[:, 1:-1], ids - 1, divergence)
    assert_scores(found, wanted)
    assert (gradient[:, [0, -1]] == 0).all()
    torch.testing.assert_close(gradient[:, 1:-1], inner, rtol=1e-4, atol=1e-7)


def test_a_column_that_one_model_rules_out_makes_only_its_own_divergence_infinite():
    z_s, z_t, ids = logits(6, 2)
    out = torch.zeros(WIDTH, device=DEVICE)
    out[0] = -math.inf
    ids = ids.clamp(min=1)
    finite = {
        (side, divergence): scored(z_s, z_t, ids, divergence, **{f"{side}_bias_V": out})[0]["kl"]
        .isfinite()
        .all()
        .item()
        for side in ("student", "teacher")
        for divergence in DIVERGENCES
    }
    assert finite == {key: key not in (("teacher", "reverse"), ("student", "forward")) for key in finite}


@pytest.mark.parametrize(
    ("side", "divergence", "asymmetric"),
    [
        ("student", "reverse", False),
        ("student", "jsd", False),
        ("teacher", "forward", False),
        ("teacher", "forward", True),
        ("teacher", "jsd", False),
    ],
)
def test_the_likeliest_token_of_one_model_may_be_ruled_out_by_the_other(side, divergence, asymmetric):
    z_s, z_t, _ = logits(15, 4)
    (z_t if side == "student" else z_s)[:3, 7] += torch.tensor([10.0, 15.0, 40.0])
    z_t[:, 9], ids = -30.0, torch.full((4,), 9)  # the teacher's doubt of the sampled token chooses the forward term
    out = torch.zeros(WIDTH, device=DEVICE)
    out[7] = -math.inf
    found, found_gradient = scored(z_s, z_t, ids, divergence, asymmetric=asymmetric, **{f"{side}_bias_V": out})
    (z_s if side == "student" else z_t)[:, 7] = -1e4  # nothing, but finite, in float64
    wanted, gradient = expected(z_s, z_t, ids, divergence, asymmetric=asymmetric)
    assert_scores(found, wanted)
    assert ((found_gradient - gradient).norm(dim=-1) <= 1e-5 * gradient.norm(dim=-1) + 1e-8).all()


def test_a_vanishing_probability_still_makes_the_divergence_infinite():
    z_s, z_t, ids = logits(6, 2)
    small, out = torch.zeros(WIDTH, device=DEVICE), torch.zeros(WIDTH, device=DEVICE)
    small[0], out[0] = -500.0, -math.inf
    found, _ = scored(z_s, z_t, ids.clamp(min=1), student_bias_V=small, teacher_bias_V=out)
    assert (found["kl"] == math.inf).all()


@pytest.fixture(scope="module")
def pebbles_logits():
    """Real logits (8, 1301) of the embedded pair, in float32, and the tokens that came next."""
    folders = [str(pebbles.directory(side)) for side in ("student", "teacher")]
    text = "Ann has 3 apples and buys 14 more. How many apples does she have? So, 3 + 14 = 17."
    tokens = torch.tensor([AutoTokenizer.from_pretrained(folders[0])(text)["input_ids"][:9]])
    with torch.no_grad():
        models = [load_model(folder, device="cpu", dtype="float32").model for folder in folders]
        z_s, z_t = (lm_head(model).logits(hidden_states(model, tokens)[0, :-1]) for model in models)
    return z_s, z_t, tokens[0, 1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_states_of_real_models(pebbles_logits, divergence, dtype):
    z_s, z_t, ids = pebbles_logits
    z_s, z_t = z_s.to(dtype), z_t.to(dtype)
    found, gradient = scored(z_s, z_t, ids, divergence)
    wanted, own_gradient = expected(z_s, z_t, ids, divergence)
    assert_scores(found, wanted)
    assert_scores(alone(z_s, z_t, ids, divergence), wanted)
    assert_gradient(gradient, own_gradient, dtype)
