import weakref

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rocktokens.errors import RocktokensError
from rocktokens.gradients.logit_space import (
    LEAST_SPLIT,
    SKETCH_WIDTH,
    GradientSums,
    TypeRows,
    logit_gradients,
    second_half,
)
from rocktokens.gradients.logit_summary import describe_groups
from rocktokens.gradients.sketch import count_sketch
from rocktokens.gradients.type_gradients import COLUMNS, describe_types, describe_whole, half_cosine
from rocktokens.models.head import LMHead
from rocktokens.scoring import divergence
from rocktokens.scoring.divergence import scored_chunks, token_scores
from rocktokens.scoring.score import score_rollouts
from rocktokens.types import Rollout

V, IDS = 41, 12
DIVERGENCES = ("reverse", "forward", "jsd")
SPACES = ("hidden", "vocabulary")


def pair(dtype=torch.float64):
    """A Llama and a GPT-2 with a wider, padded head: different widths, different trunks, one vocabulary."""
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    gpt2 = GPT2Config(vocab_size=V + 3, n_embd=24, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    return LlamaForCausalLM(llama).eval().to(dtype), GPT2LMHeadModel(gpt2).eval().to(dtype)


def random_rollouts(n=14):
    """Two rollouts a prompt, of few types, so that most occur several times and in both halves; one occurs once."""
    generator = np.random.default_rng(1)
    rollouts = []
    for i in range(n):
        prompt = generator.integers(V, size=generator.integers(1, 9)).astype(np.int32)
        response = (generator.integers(IDS, size=generator.integers(1, 14)) * 3).astype(np.int32)
        response[-1] = V - 1 if i == 0 else response[-1]
        zeros = np.zeros(len(response), np.float32)
        rollouts.append(Rollout(i, f"p{i // 2}", 0, prompt, response, zeros, 0, finished=True))
    return rollouts


def divergence_of(z_s, z_t, divergence, temperature):
    """The definitions, over the columns that both have."""
    width = min(len(z_s), len(z_t))
    p, q = (torch.softmax(z[:width] / temperature, -1) for z in (z_s, z_t))
    m = (p + q) / 2
    return {
        "reverse": (p * (p / q).log()).sum(),
        "forward": (q * (q / p).log()).sum(),
        "jsd": 0.5 * (q * (q / m).log()).sum() + 0.5 * (p * (p / m).log()).sum(),
    }[divergence]


def oracle_positions(student, teacher, rollouts, divergence="reverse", temperature=1.0):
    """(token, prompt, gradients by space) of every position, by autograd, one position at a time."""
    found = []
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_ids.tolist(), *rollout.token_ids.tolist()]])
        with torch.no_grad():
            states, z_t = student.model(ids).last_hidden_state[0], teacher(ids).logits[0]
        for t, token in enumerate(rollout.token_ids.tolist(), start=len(rollout.prompt_ids) - 1):
            h = states[t].detach().requires_grad_()
            z = student.lm_head(h)
            kl = divergence_of(z, z_t[t], divergence, temperature)
            hidden, vocabulary = torch.autograd.grad(kl, [h, z])
            found.append((token, rollout.prompt_id, {"hidden": hidden.numpy(), "vocabulary": vocabulary.numpy()}))
    return found


def cos(x, y):
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def oracle_types(positions, space):
    """Every column of the table by its definition: dictionaries by token."""
    of_type = {}
    for token, _, gradients in positions:
        of_type.setdefault(token, []).append(gradients[space])
    mean = {token: np.mean(gradients, axis=0) for token, gradients in of_type.items()}
    balanced = np.sum(list(mean.values()), axis=0)
    pooled = np.sum([gradients[space] for _, _, gradients in positions], axis=0)
    all_norms = sum(np.linalg.norm(gradients[space]) for _, _, gradients in positions)
    table = {}
    for token, own in of_type.items():
        norms = [np.linalg.norm(g) for g in own]
        pairs = [(cos(a, b), norms[i] * norms[j]) for i, a in enumerate(own) for j, b in enumerate(own) if i != j]
        to_balanced, size = cos(mean[token], balanced), np.linalg.norm(mean[token])
        table[token] = {
            "norm": size,
            "mean_norm": np.mean(norms),
            "share": sum(norms) / all_norms,
            "alignment": size / np.mean(norms),
            "coherence": np.average([c for c, _ in pairs], weights=[w for _, w in pairs]) if pairs else np.nan,
            "cos_balanced": to_balanced,
            "cos_pooled": cos(mean[token], pooled),
            "contribution": len(own) * size * to_balanced,
        }
    return table, pooled, balanced


def assert_table(table, expected, **tolerance):
    assert table.token_ids.tolist() == sorted(expected)
    for name in COLUMNS:
        column = [expected[token][name] for token in sorted(expected)]
        np.testing.assert_allclose(table.value(name), column, err_msg=name, **tolerance)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_every_number_of_every_type_is_its_definition(divergence, temperature):
    rollouts = random_rollouts()
    gradients = logit_gradients(*pair(), rollouts, divergence=divergence, temperature=temperature, tokens_per_batch=50)
    positions = oracle_positions(*pair(), rollouts, divergence, temperature)
    tokens = [token for token, _, _ in positions]
    assert gradients.freq.tolist() == [tokens.count(token) for token in gradients.token_ids]
    assert gradients.vocabulary.sketch is None and gradients.vocabulary.vectors_RW.shape[1] == V
    for space in SPACES:
        expected, pooled, balanced = oracle_types(positions, space)
        assert_table(describe_types(gradients, space), expected, rtol=1e-9, atol=1e-12)
        whole = describe_whole(gradients, space)
        sizes = np.linalg.norm(pooled), np.linalg.norm(balanced)
        lengths = sum(np.linalg.norm(gradient[space]) for _, _, gradient in positions)
        found = (whole.pooled_norm, whole.balanced_norm, whole.cosine, whole.alignment)
        np.testing.assert_allclose(found, (*sizes, cos(pooled, balanced), sizes[0] / lengths), rtol=1e-9)
    np.testing.assert_allclose(gradients.pooled_V, pooled, atol=1e-12)
    np.testing.assert_allclose(gradients.balanced_V, balanced, atol=1e-12)


def test_every_number_of_every_group_is_its_definition():
    rollouts = random_rollouts()
    gradients = logit_gradients(*pair(), rollouts)
    positions = oracle_positions(*pair(), rollouts)
    groups = {"few": [3, 9, 40], "many": np.arange(0, V, 6)}
    for space in SPACES:
        _, pooled, balanced = oracle_types(positions, space)
        all_norms = sum(np.linalg.norm(gradient[space]) for _, _, gradient in positions)
        for group in describe_groups(gradients, describe_types(gradients, space), groups).values():
            own = [gradient[space] for token, _, gradient in positions if token in groups[group.name]]
            total, norms = np.sum(own, axis=0), [np.linalg.norm(g) for g in own]
            assert group.n_occurrences == len(own)
            assert group.n_types == len({token for token, _, _ in positions} & set(groups[group.name]))
            found = (group.token_share, group.norm_share, group.mean_norm, group.norm.value, group.alignment.value)
            size = np.linalg.norm(total)
            expected = (len(own) / len(positions), sum(norms) / all_norms, np.mean(norms), size, size / sum(norms))
            np.testing.assert_allclose(found, expected, rtol=1e-9)
            found = (group.cos_pooled.value, group.cos_balanced.value, group.signed_share.value)
            expected = (cos(total, pooled), cos(total, balanced), total @ pooled / (pooled @ pooled))
            np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_single_precision_is_close_to_double():
    rollouts = random_rollouts()
    gradients = logit_gradients(*pair(torch.float32), rollouts)
    positions = oracle_positions(*pair(), rollouts)
    assert gradients.hidden.vectors_RW.dtype == np.float32 and gradients.pooled_V.dtype == np.float64
    for space in SPACES:
        assert_table(describe_types(gradients, space), oracle_types(positions, space)[0], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("shift", [-1, 1])
def test_types_are_keyed_by_the_predicted_token(shift):
    rollouts = random_rollouts()
    table = describe_types(logit_gradients(*pair(), rollouts), "vocabulary")
    positions = oracle_positions(*pair(), rollouts)
    tokens = np.roll([token for token, _, _ in positions], shift)
    shifted = [(int(token), prompt, g) for token, (_, prompt, g) in zip(tokens, positions, strict=True)]
    with pytest.raises(AssertionError):
        assert_table(table, oracle_types(shifted, "vocabulary")[0], rtol=1e-2)


@pytest.mark.parametrize("sketch_width", [None, 16])
def test_batches_chunks_and_order_change_nothing(sketch_width):
    student, teacher = pair(torch.float32)
    rollouts = random_rollouts()
    whole = logit_gradients(student, teacher, rollouts, sketch_width=sketch_width)
    for tokens_per_batch, tokens_per_chunk, order in ((1, 1024, 1), (50, 3, -1), (80, 1, 1)):
        done = []
        split = logit_gradients(
            student,
            teacher,
            rollouts[::order],
            sketch_width=sketch_width,
            tokens_per_batch=tokens_per_batch,
            tokens_per_chunk=tokens_per_chunk,
            on_done=done.append,
        )
        assert sum(done) == len(rollouts) and len(done) > 1
        assert split.rollouts_sha256 == whole.rollouts_sha256
        np.testing.assert_allclose(split.pooled_V, whole.pooled_V, atol=2e-6)
        for space in SPACES:
            np.testing.assert_allclose(split.sums(space).vectors_RW, whole.sums(space).vectors_RW, atol=2e-6)
            np.testing.assert_allclose(split.sums(space).square_U, whole.sums(space).square_U, rtol=2e-6)
    assert logit_gradients(student, teacher, rollouts[:-1]).rollouts_sha256 != whole.rollouts_sha256


def test_norms_are_those_that_scoring_reports():
    student, teacher = pair(torch.float32)
    rollouts = random_rollouts()
    gradients = logit_gradients(student, teacher, rollouts)
    norms_T = score_rollouts(student, teacher, rollouts).grad_norm.astype(np.float64)
    tokens_T = np.concatenate([rollout.token_ids for rollout in rollouts])
    expected = [norms_T[tokens_T == token].sum() for token in gradients.token_ids]
    np.testing.assert_allclose(gradients.vocabulary.norm_U, expected, rtol=1e-6)


def states_of(softcap, n=30, seed=0):
    """States and heads, padded and scaled and capped, of many positions; and their tokens."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((n, 7), (V + 5, 7), (n, 5), (V, 5), (V + 5,))
    h_s, w_s, h_t, w_t, bias = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    ids = torch.randint(IDS, (n,), generator=generator)
    return h_s, LMHead(w_s, bias, scale=0.7, softcap=softcap), h_t, LMHead(w_t), ids


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_hidden_space_is_reached_through_scale_and_cap(softcap):
    states = states_of(softcap)
    h_s, head, h_t, head_t, ids = states
    halves = np.zeros(len(ids), dtype=bool)
    sums = GradientSums.plan(ids.numpy(), halves, vocab_size=V, like=head.weight_VD)
    sums.add(states, halves, tokens_per_chunk=11)
    states_n = [h.clone().requires_grad_() for h in h_s]
    logits_n = [head.logits(h[None])[0] for h in states_n]
    teacher_n = head_t.logits(h_t)
    kl = sum(divergence_of(z, z_t, "reverse", 1.0) for z, z_t in zip(logits_n, teacher_n, strict=True))
    for space, own, width in (("hidden", states_n, 7), ("vocabulary", logits_n, V)):
        rows = torch.stack(torch.autograd.grad(kl, own, retain_graph=True)).numpy()[:, :width]
        found = sums.finish().sums(space)
        expected = [rows[ids.numpy() == token].sum(axis=0) for token in np.unique(ids)]
        np.testing.assert_allclose(found.vectors_RW, expected, atol=1e-12)
        lengths = np.linalg.norm(rows, axis=-1)
        np.testing.assert_allclose(found.norm_U, [lengths[ids.numpy() == token].sum() for token in np.unique(ids)])


def test_a_sketched_pass_sums_the_sketches_of_the_exact_one():
    rollouts = random_rollouts()
    exact, sketched = (logit_gradients(*pair(), rollouts, sketch_width=width, seed=5) for width in (None, 16))
    expected = count_sketch(V, 16, seed=5)(torch.from_numpy(exact.vocabulary.vectors_RW)).numpy()
    np.testing.assert_allclose(sketched.vocabulary.vectors_RW, expected, atol=1e-12)
    assert sketched.vocabulary.sketch == (16, 5) and sketched.hidden.sketch is None
    np.testing.assert_array_equal(sketched.hidden.vectors_RW, exact.hidden.vectors_RW)
    np.testing.assert_array_equal(sketched.vocabulary.norm_U, exact.vocabulary.norm_U)
    assert describe_whole(sketched, "vocabulary") == describe_whole(exact, "vocabulary")
    table, truth = describe_types(sketched, "vocabulary"), describe_types(exact, "vocabulary")
    assert (table.cos_pooled.error > 0).all() and (truth.cos_pooled.error == 0).all()
    np.testing.assert_array_equal(table.share, truth.share)


def test_halves_are_halves_of_the_prompts():
    rollouts = random_rollouts()
    later = second_half(rollouts, seed=3)
    assert later == second_half(rollouts[::-1], seed=3) != second_half(rollouts, seed=4)
    assert len(later) == 4 and later < {rollout.prompt_id for rollout in rollouts}
    gradients = logit_gradients(*pair(), rollouts, seed=3)
    positions = oracle_positions(*pair(), rollouts)
    halves = half_cosine(gradients, gradients, "vocabulary")
    for token, cosine in zip(gradients.token_ids, halves, strict=True):
        own = [(prompt in later, g["vocabulary"]) for other, prompt, g in positions if other == token]
        sums = [np.sum([g for second, g in own if second == half], axis=0) for half in (False, True)]
        both = all(np.ndim(part) for part in sums)
        assert both != np.isnan(cosine)
        assert not both or cosine == pytest.approx(cos(*sums), abs=1e-9)
    assert 0 < np.isnan(halves).sum() < len(halves)


def test_one_prompt_has_no_halves():
    rollouts = [rollout for rollout in random_rollouts() if rollout.prompt_id == "p1"]
    gradients = logit_gradients(*pair(), rollouts)
    assert (gradients.second_row == -1).all() and np.isnan(half_cosine(gradients, gradients, "hidden")).all()


def test_equal_models_have_no_direction():
    student, _ = pair()
    gradients = logit_gradients(student, student, random_rollouts())
    with np.errstate(all="raise"):
        table = describe_types(gradients, "vocabulary")
    assert (table.mean_norm == 0).all() and np.isnan(table.cos_pooled.value).all() and np.isnan(table.share).all()


def plan(n_types, memory, sketch_width=None, vocab_size=5000, width=8):
    """Sums for types that each occur in both halves."""
    ids, halves = np.tile(np.arange(n_types), 2), np.repeat([False, True], n_types)
    like = torch.zeros(vocab_size, width)
    return GradientSums.plan(ids, halves, vocab_size=vocab_size, like=like, memory=memory, sketch_width=sketch_width)


def test_the_vocabulary_is_exact_where_that_fits():
    memory = 2 * 100 * (5000 + 8) * 4 + 28 * 5000
    assert plan(100, memory).sketch is None
    sketched = plan(100, memory - 1).sketch
    assert sketched is not None and sketched.width == SKETCH_WIDTH
    asked = plan(100, memory, sketch_width=7).sketch
    assert asked is not None and asked.width == 7


def test_halves_take_the_memory_that_is_left():
    n_types, row = 3000, 4 * (SKETCH_WIDTH + 8)
    sums = plan(n_types, memory=28 * 5000 + (n_types + 1500) * row)
    assert sums.rows.n_rows == n_types + 1500
    assert plan(n_types, memory=1).rows.n_rows == n_types + LEAST_SPLIT


def test_the_types_best_covered_by_both_halves_are_split():
    ids = np.array([5, 5, 5, 5, 7, 7, 9, 9, 9, 2])
    halves = np.array([0, 0, 1, 1, 0, 1, 0, 0, 0, 1], dtype=bool)
    rows = TypeRows.of(ids, halves, max_split=1)
    assert rows.token_ids_U.tolist() == [2, 5, 7, 9] and rows.freq_U.tolist() == [1, 4, 2, 3]
    assert rows.second_row_U.tolist() == [-1, 4, -1, -1]
    assert TypeRows.of(ids, halves, max_split=9).second_row_U.tolist() == [-1, 4, 5, -1]
    types_T, rows_T = rows.locate(np.array([9, 5, 5, 7]), np.array([True, True, False, True]))
    assert types_T.tolist() == [3, 1, 1, 2] and rows_T.tolist() == [3, 4, 1, 2]
    for unknown in (3, 10):
        with pytest.raises(ValueError, match="no row"):
            rows.locate(np.array([unknown]), np.array([False]))


@pytest.mark.parametrize("take", ["token_scores", "add"])
def test_two_chunks_are_never_in_memory(take, monkeypatch):
    states = states_of(None)
    alive, most = weakref.WeakSet(), []

    target = {"token_scores": "scoring.divergence._Pair.chunks", "add": "gradients.logit_space.scored_chunks"}[take]
    chunks = divergence._Pair.chunks if take == "token_scores" else scored_chunks

    def watched(*arguments):
        for chunk in chunks(*arguments):
            alive.add(chunk.gradient_nV)
            most.append(len(alive))
            yield chunk
            del chunk

    monkeypatch.setattr(f"rocktokens.{target}", watched)
    if take == "token_scores":
        token_scores(*states, tokens_per_chunk=7)
    else:
        halves = np.zeros(30, dtype=bool)
        sums = GradientSums.plan(states[-1].numpy(), halves, vocab_size=V, like=states[1].weight_VD)
        sums.add(states, halves, tokens_per_chunk=7)
    assert len(most) == 5 and max(most) == 1


def test_no_rollouts_are_refused():
    with pytest.raises(RocktokensError, match="no rollouts"):
        logit_gradients(*pair(), [])
