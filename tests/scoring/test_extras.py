"""The optional columns against loops over the vocabulary: padded heads, ties, few tokens, infinities."""

import math

import numpy as np
import pytest
import torch
from pair_oracle import DIVERGENCES, D, E, V, example, heads, oracle_divergence, oracle_logits

from rocktokens.errors import RocktokensError
from rocktokens.models.head import LMHead
from rocktokens.scoring.divergence import token_scores
from rocktokens.scoring.formulas import likeliest
from rocktokens.types import EXTRA_COLUMNS, STANDARD_COLUMNS, TokenScores


def ranked(row: torch.Tensor) -> list[int]:
    """Ids from the likeliest on, equal ones by id."""
    values = row.tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def oracle_extras(z_s: torch.Tensor, z_t: torch.Tensor, temperature: float = 1.0) -> dict[str, list[float]]:
    """One row at a time; ``z`` of a padded head are cut by the caller."""
    p_nV, q_nV = (torch.softmax(z.double() / temperature, -1) for z in (z_s, z_t))
    masses = [sum(q[v].item() for v in ranked(p)[:16]) for p, q in zip(p_nV, q_nV, strict=True)]
    hits = [float(ranked(p)[0] in ranked(q)[:5]) for p, q in zip(p_nV, q_nV, strict=True)]
    forward = oracle_divergence(z_s.double(), z_t.double(), "forward", temperature).tolist()
    return dict(zip(EXTRA_COLUMNS, (masses, hits, forward), strict=True))


def assert_extras(scores: TokenScores, expected: dict[str, list[float]], atol: float = 1e-12) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(scores, name).numpy(), values, atol=atol, rtol=atol, err_msg=name)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_extras_are_their_definitions_and_change_no_other_column(divergence, temperature):
    h_s, w_s, h_t, w_t, ids = example(n=60)
    head_s, head_t = heads(w_s, w_t)
    arguments = (h_s, head_s, h_t, head_t, ids, divergence, temperature)
    scores = token_scores(*arguments, tokens_per_chunk=7, extras=EXTRA_COLUMNS)
    expected = oracle_extras(oracle_logits(h_s, head_s), oracle_logits(h_t, head_t), temperature)
    assert 0 < np.mean(expected["student_top1_in_teacher_top5"]) < 1
    assert_extras(scores, expected)
    alone = token_scores(*arguments, tokens_per_chunk=7)
    for (name, with_extras), (_, without) in zip(scores.items(), alone.items(), strict=True):
        assert torch.equal(with_extras, without), name
    if divergence == "forward":
        assert torch.equal(scores.forward_kl, scores.kl)


@pytest.mark.parametrize("widths", [(V, V + 6), (V + 6, V)])
def test_columns_that_one_head_lacks_are_nobodys_likeliest(widths):
    h_s, w_s, h_t, w_t, ids = example(v_student=widths[0], v_teacher=widths[1])
    for weight in (w_s, w_t):
        weight[V:] *= 10  # so that a padded column would be the likeliest of all
    scores = token_scores(h_s, w_s, h_t, w_t, ids, extras=EXTRA_COLUMNS)
    assert_extras(scores, oracle_extras(h_s @ w_s[:V].T, h_t @ w_t[:V].T))


def test_of_equally_likely_tokens_the_smaller_ids_count():
    """Logits of few distinct values, so that nearly every boundary is a tie."""
    generator = torch.Generator().manual_seed(2)
    z_s, z_t = (torch.randint(0, 3, (200, V), generator=generator).double() for _ in range(2))
    rows = torch.eye(len(z_s), dtype=torch.float64)
    scores = token_scores(rows, z_s.T, rows, z_t.T, torch.zeros(200, dtype=torch.long), extras=EXTRA_COLUMNS)
    assert_extras(scores, oracle_extras(z_s, z_t))
    for k in (1, 5, V - 1, V, V + 9):
        assert [set(ids) for ids in likeliest(z_s, k).tolist()] == [set(ranked(row)[:k]) for row in z_s]


def test_a_vocabulary_smaller_than_the_counts_has_all_the_mass():
    h_s, _, h_t, _, _ = example()
    w_s, w_t = torch.randn(4, D, dtype=torch.float64), torch.randn(4, E, dtype=torch.float64)
    scores = token_scores(h_s, w_s, h_t, w_t, torch.zeros(len(h_s), dtype=torch.long), extras=EXTRA_COLUMNS)
    np.testing.assert_allclose(scores.teacher_mass_top16, 1.0, atol=1e-12)
    assert (scores.student_top1_in_teacher_top5 == 1).all()


def test_a_forward_kl_that_is_infinite_says_so_beside_a_finite_reverse_kl():
    h_s, w_s, h_t, w_t, ids = example()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[0] = -math.inf
    scores = token_scores(h_s, LMHead(w_s, bias), h_t, w_t, ids.clamp(min=1), extras=["forward_kl"])
    assert scores.forward_kl.isposinf().all() and scores.kl.isfinite().all()


def test_only_the_columns_asked_for_are_there_and_only_known_ones_may_be():
    pair = example()
    scores = token_scores(*pair, extras={"forward_kl"})
    assert scores.forward_kl is not None and scores.teacher_mass_top16 is None
    assert tuple(name for name, _ in scores.items()) == STANDARD_COLUMNS
    assert token_scores(
        *(x if x.ndim == 2 and len(x) == V else x[:0] for x in pair), extras=EXTRA_COLUMNS
    ).kl.shape == (0,)
    with pytest.raises(RocktokensError, match="extras names 'teacher_mass_top8', which is no extra column: use some"):
        token_scores(*pair, extras=["teacher_mass_top8"])
