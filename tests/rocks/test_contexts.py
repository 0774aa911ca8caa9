"""Windows, encodings, neighbours and kept sets equal naive oracles, ties included; samples keep their word."""

from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_oracle import random_trace, with_column, write_trace

from rocktokens.errors import RocktokensError
from rocktokens.rocks import contexts, encoders
from rocktokens.rocks.contexts import ContextResult, context_consistency, judged_sizes, neighbour_counts
from rocktokens.rocks.encoders import context_windows, embedding_encoder, encode_windows
from rocktokens.traces.store import TraceStore

FEW_EXAMPLES = settings(max_examples=60, deadline=None)


@pytest.fixture(scope="module")
def trace() -> pa.Table:
    return random_trace(3, prompts=15, vocabulary=12)


@pytest.fixture(scope="module")
def rows(tmp_path_factory, trace):
    return TraceStore(write_trace(tmp_path_factory.mktemp("run"), {7: trace}, rows_per_part=90)).table(7)


# Oracles


def responses_of(table: pa.Table) -> dict[int, list[int]]:
    """Token ids of each rollout in order of position; the trace's tables hold them in order."""
    found: dict[int, list[int]] = {}
    for row in table.select(["rollout_id", "token_id"]).to_pylist():
        found.setdefault(row["rollout_id"], []).append(row["token_id"])
    return found


def oracle_window(response: list[int], position: int, window: int) -> list[int]:
    around = [t for t in range(position - window, position + window + 1) if t != position]
    return [response[t] if 0 <= t < len(response) else -1 for t in around]


def oracle_vector(window: list[int], embeddings: np.ndarray) -> np.ndarray:
    known = [embeddings[token].astype(np.float64) for token in window if token >= 0]
    mean = np.mean(known, axis=0) if known else np.zeros(embeddings.shape[1])
    return mean / np.linalg.norm(mean) if mean.any() else mean


def oracle_neighbours(vectors: list[np.ndarray], gamma: float) -> list[int]:
    reached = [[float(a @ b) >= gamma - 1e-12 for b in vectors] for a in vectors]
    return [sum(row) - row[i] for i, row in enumerate(reached)]


def occurrences_by_type(table: pa.Table, seed: int, share: float = 0.7) -> tuple[np.ndarray, ...]:
    """columns, rollouts, positions and token ids of a random part of the scored rows, in order of type."""
    kept = np.random.default_rng(seed).random(table.num_rows) < share
    chosen = table.filter(pa.array(kept)).filter(pa.compute.is_valid(table.filter(pa.array(kept))["kl"]))
    ordered = chosen.sort_by([("token_id", "ascending"), ("rollout_id", "ascending"), ("position", "ascending")])
    token_ids, columns = np.unique(ordered["token_id"].to_numpy(), return_inverse=True)
    return columns, ordered["rollout_id"].to_numpy(), ordered["position"].to_numpy(), token_ids


class GivenVectors:
    """An encoder whose "rollout" is the row of a table of vectors; remembers what it was asked for."""

    def __init__(self, vectors: np.ndarray, at_once: int = 10**6) -> None:
        self.vectors, self.at_once = vectors, at_once
        self.asked: list[int] = []

    def look_up(self, rollout_ids_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
        self.asked.append(len(rollout_ids_N))
        return rollout_ids_N

    def encode(self, found_N: np.ndarray) -> np.ndarray:
        return self.vectors[found_N]


def one_type(vectors: np.ndarray, gammas: list[float], token_id: int = 5, **options) -> ContextResult:
    count = len(vectors)
    columns, ids = np.zeros(count, np.int64), np.arange(count)
    return context_consistency(columns, ids, ids, np.array([token_id]), GivenVectors(vectors), gammas, **options)


def unit_vectors(seed: int, count: int, width: int, spread: float = 1.0) -> np.ndarray:
    """Random directions around four centres."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((4, width))[rng.integers(0, 4, count)] + spread * rng.standard_normal((count, width))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


# Windows


@pytest.mark.parametrize("window", [1, 2, 5])
def test_windows_equal_the_oracle(rows, trace, window, monkeypatch):
    monkeypatch.setattr(encoders, "OCCURRENCES_PER_JOIN", 64)
    responses = responses_of(trace)
    shuffled = np.random.default_rng(0).permutation(trace.num_rows)
    rollouts, positions = (trace[name].to_numpy()[shuffled] for name in ("rollout_id", "position"))
    found = context_windows(rows, rollouts, positions, window)
    expected = [oracle_window(responses[r], p, window) for r, p in zip(rollouts, positions, strict=True)]
    assert found.dtype == np.int32
    assert found.tolist() == expected
    for shift in (-1, 1):  # the oracle tells windows that are off by one
        assert found.tolist() != [
            oracle_window(responses[r], p + shift, window) for r, p in zip(rollouts, positions, strict=True)
        ]


def test_unscored_tokens_are_context_and_the_order_of_rows_is_not(tmp_path, rows, trace):
    assert trace["kl"].null_count > 0
    backwards = write_trace(tmp_path, {7: trace.take(np.arange(trace.num_rows)[::-1])})
    rollouts, positions = trace["rollout_id"].to_numpy(), trace["position"].to_numpy()
    again = context_windows(TraceStore(backwards).table(7), rollouts, positions, 3)
    np.testing.assert_array_equal(context_windows(rows, rollouts, positions, 3), again)


def test_no_occurrences_have_no_windows(rows):
    assert context_windows(rows, np.array([], np.int64), np.array([], np.int32), 5).shape == (0, 10)


def test_large_rollout_ids_and_positions_are_exact(tmp_path):
    ids = [2**62 + 1] * 3 + [2**62 + 2] * 2
    table = random_trace(0, prompts=2, length=60).slice(0, 5)
    for name, values in (("rollout_id", ids), ("position", [0, 1, 2, 0, 1]), ("token_id", [4, 8, 5, 6, 7])):
        table = with_column(table, name, values)
    rows = TraceStore(write_trace(tmp_path, {0: table})).table(0)
    found = context_windows(rows, np.array(ids), np.array([0, 1, 2, 0, 1], np.int32), 1)
    assert found.tolist() == [[-1, 8], [4, 5], [8, -1], [-1, 7], [6, -1]]


# Encodings


@FEW_EXAMPLES
@given(
    tokens=st.integers(1, 4).flatmap(
        lambda w: st.lists(st.lists(st.integers(-1, 5), min_size=2 * w, max_size=2 * w), min_size=1, max_size=9)
    ),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_encodings_equal_the_oracle(tokens, dtype):
    embeddings = np.random.default_rng(1).standard_normal((6, 5)).astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoders, "WINDOWS_PER_SUM", 4)
        found = encode_windows(np.array(tokens, np.int32), embeddings)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [oracle_vector(window, embeddings) for window in tokens], atol=1e-14)


def test_a_context_without_tokens_or_that_cancels_is_similar_to_nothing():
    embeddings = np.array([[0.3, -0.7], [-0.3, 0.7], [1.0, 2.0]], np.float32)
    vectors = encode_windows(np.array([[-1, -1], [0, 1], [2, -1], [2, 2], [-1, -1]], np.int32), embeddings)
    assert not vectors[[0, 1, 4]].any()
    assert neighbour_counts(vectors, [1e-9, 1.0]).tolist() == [[0, 0, 1, 1, 0]] * 2


@pytest.mark.parametrize(
    ("embeddings", "words"),
    [
        (np.zeros(4), "float64 of shape (4,)"),
        (np.zeros((4, 0)), "shape (4, 0)"),
        (np.zeros((4, 2), np.int64), "int64"),
        (np.array([[1.0, np.nan]]), "NaN"),
        (np.array([[1.0, -np.inf]]), "infinity"),
    ],
)
def test_embeddings_that_are_none_are_refused(rows, embeddings, words):
    with pytest.raises(RocktokensError, match="embeddings") as refusal:
        embedding_encoder(rows, embeddings, 5)
    assert words in str(refusal.value)


def test_a_vocabulary_that_is_too_small_is_refused_by_the_id(rows, trace):
    largest = trace["token_id"].to_numpy().max()
    encoder = embedding_encoder(rows, np.ones((largest, 3)), 5)
    with pytest.raises(RocktokensError, match=rf"shape \({largest}, 3\) have no row for token id {largest} "):
        encoder.look_up(trace["rollout_id"].to_numpy(), trace["position"].to_numpy())
    fitting = embedding_encoder(rows, np.ones((largest + 1, 3)), 5)
    assert fitting.look_up(trace["rollout_id"].to_numpy(), trace["position"].to_numpy()).max() == largest


def test_a_window_of_nothing_is_refused(rows):
    with pytest.raises(RocktokensError, match="window = 0"):
        context_windows(rows, np.array([1]), np.array([0]), 0)


# Neighbours


@pytest.mark.parametrize("block", [1, 7, 64, 500])
def test_neighbours_equal_the_oracle_whatever_the_block(block):
    vectors = unit_vectors(0, 80, 12)
    vectors[::10] = vectors[0]
    vectors[5] = 0
    gammas = [0.1, 0.5, 0.9, 1.0]
    expected = [oracle_neighbours(list(vectors), gamma) for gamma in gammas]
    assert neighbour_counts(vectors, gammas, block=block).tolist() == expected


@pytest.mark.parametrize("few", [-1.0, 2.0])
def test_both_ways_of_deciding_close_pairs_agree_with_float64(monkeypatch, few):
    """Thresholds that are cosines of the sample: in float32 about half of these ties would fall on the wrong side."""
    monkeypatch.setattr(contexts, "FEW", few)
    vectors = unit_vectors(1, 120, 64)
    cosines = vectors @ vectors.T
    for i in range(0, 119, 7):
        gamma = float(cosines[i, i + 1])
        if gamma > 0:
            expected = np.count_nonzero(cosines >= gamma - 1e-12, axis=1) - 1
            np.testing.assert_array_equal(neighbour_counts(vectors, [gamma], block=50)[0], expected)


def test_a_hair_below_the_threshold_is_below_it():
    """Two cosines 2e-10 apart, one on each side: float32 cannot tell them from γ."""
    angles = np.arccos([0.8 + 1e-10, 0.8 - 1e-10])
    vectors = np.array([[1.0, 0.0], *np.stack([np.cos(angles), np.sin(angles)], 1) * [1, 1]])
    vectors[2, 1] *= -1
    assert neighbour_counts(vectors, [0.8]).tolist() == [[1, 1, 0]]


def test_pairs_gathered_in_parts_are_the_same(monkeypatch):
    vectors = np.repeat(unit_vectors(2, 40, 16), 2, axis=0)
    monkeypatch.setattr(contexts, "FEW", 2.0)
    monkeypatch.setattr(contexts, "GATHERED_BYTES", 16 * 16 * 3)
    assert neighbour_counts(vectors, [1.0], block=32).tolist() == [[1] * 80]


@FEW_EXAMPLES
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=2, max_size=12),
    st.sampled_from(["1/2", "4/5", "3/5", "1", "3/4", "2/3", "1/4"]),
)
def test_rational_ties_have_the_exact_answer(windows, gamma):
    """One-hot embeddings make cosines square roots of fractions: cos ≥ γ means dot² ≥ γ² · |a|² · |b|²."""
    threshold = Fraction(gamma)
    counts = [[window.count(token) for token in range(4)] for window in windows]

    def reaches(a: list[int], b: list[int]) -> bool:
        dot, lengths = (sum(x * y for x, y in zip(p, q, strict=True)) for p, q in ((a, b), (a, a)))
        return Fraction(dot) ** 2 >= threshold**2 * lengths * sum(y * y for y in b)

    expected = [sum(reaches(a, b) for j, b in enumerate(counts) if j != i) for i, a in enumerate(counts)]
    vectors = encode_windows(np.array(windows, np.int32), np.eye(4, dtype=np.float32))
    assert neighbour_counts(vectors, [float(threshold)])[0].tolist() == expected


def test_rational_ties_really_occur():
    """[0,0,1,1] with [0,0,2,2] has cosine 1/2 and [0,0,0,1] with [0,0,1,1] has 2/√5 > 4/5; [1,2,2] ∘ [2,2,1] is 4/5."""
    eye = np.eye(4, dtype=np.float32)
    half = encode_windows(np.array([[0, 0, 1, 1], [0, 0, 2, 2], [3, 3, 3, 3]], np.int32), eye)
    assert neighbour_counts(half, [0.5, 0.5 + 1e-9]).tolist() == [[1, 1, 0], [0, 0, 0]]
    four_fifths = encode_windows(np.array([[0, 1, 1, -1], [0, 0, 1, -1], [2, 3, -1, -1]], np.int32), eye)
    assert neighbour_counts(four_fifths, [0.8, 0.8 + 1e-9]).tolist() == [[1, 1, 0], [0, 0, 0]]


# Consistency


@pytest.mark.parametrize("at_once", [1, 60, 10**6])
def test_kept_occurrences_equal_the_oracle(rows, trace, at_once):
    embeddings = np.random.default_rng(4).standard_normal((12, 6)).astype(np.float32)
    columns, rollouts, positions, token_ids = occurrences_by_type(trace, seed=0)
    gammas, etas, responses = [0.3, 0.6, 0.9], [0.05, 0.25, 0.5], responses_of(trace)
    encoder = encoders.EmbeddingEncoder(rows, embeddings, 4, at_once)
    result = context_consistency(columns, rollouts, positions, token_ids, encoder, gammas)
    assert result.exact.all()
    kept_somewhere = set()
    for gamma in gammas:
        for eta in etas:
            expected = oracle_kept(columns, rollouts, positions, responses, embeddings, gamma, eta)
            assert set(result.occurrences[result.kept(gamma, eta)]) == expected
            per_type = [sum(columns[i] == column for i in expected) for column in range(len(token_ids))]
            assert result.kept_count(gamma, eta).tolist() == per_type
            shares = np.array(per_type) / np.bincount(columns)
            np.testing.assert_allclose(result.kept_share_interval(gamma, eta), np.stack([shares, shares], 1))
            kept_somewhere.add(len(expected))
    assert len(kept_somewhere) > 5


def oracle_kept(columns, rollouts, positions, responses, embeddings, gamma, eta) -> set[int]:
    kept = set()
    for column in set(columns.tolist()):
        members = np.flatnonzero(columns == column)
        windows = [oracle_window(responses[rollouts[i]], positions[i], 4) for i in members]
        counts = oracle_neighbours([oracle_vector(window, embeddings) for window in windows], gamma)
        kept |= {i for i, c in zip(members, counts, strict=True) if len(members) > 1 and c / (len(members) - 1) >= eta}
    return kept


def test_a_type_with_one_persistent_occurrence_keeps_nothing():
    vectors = np.ones((4, 1))
    columns, ids = np.array([1, 2, 2, 4]), np.arange(4)
    result = context_consistency(columns, ids, ids, np.arange(6), GivenVectors(vectors), [1.0])
    assert result.persistent.tolist() == [0, 1, 2, 0, 1, 0]
    assert result.judged.tolist() == [0, 0, 2, 0, 0, 0]
    assert result.kept_count(1.0, 1.0).tolist() == [0, 0, 2, 0, 0, 0]
    assert result.kept_share_interval(1.0, 1.0).tolist() == [[0, 0], [0, 0], [1, 1], [0, 0], [0, 0], [0, 0]]
    assert result.exact.all()


def test_nothing_persistent_is_no_failure():
    nothing = np.array([], np.int64)
    result = context_consistency(nothing, nothing, nothing, np.arange(3), GivenVectors(np.ones((0, 1))), [0.5])
    assert result.kept_count(0.5, 0.5).tolist() == [0, 0, 0]


def test_identical_contexts_are_consistent_and_orthogonal_ones_are_not():
    same = np.repeat(unit_vectors(3, 1, 300), 9, axis=0)
    assert one_type(same, [1.0]).kept(1.0, 1.0).all()
    assert not one_type(np.eye(9), [1e-6]).kept(1e-6, 1e-6).any()


def test_rho_at_eta_is_kept():
    """Five occurrences of which each of the first three has two of four others: ρ = 1/2, and 0.1 · 3 is not 0.3."""
    vectors = np.eye(3)[[0, 0, 0, 1, 2]]
    result = one_type(vectors, [0.9])
    assert result.rho(0.9).tolist() == [0.5, 0.5, 0.5, 0, 0]
    assert result.kept(0.9, 0.5).tolist() == [True, True, True, False, False]
    assert not result.kept(0.9, np.nextafter(0.5, 1)).any()


def test_other_types_change_nothing(rows, trace):
    embeddings = np.random.default_rng(4).standard_normal((12, 6)).astype(np.float32)
    columns, rollouts, positions, token_ids = occurrences_by_type(trace, seed=0)
    encoder = embedding_encoder(rows, embeddings, 4)
    whole = context_consistency(columns, rollouts, positions, token_ids, encoder, [0.5])
    for column in (0, 3):
        own = columns == column
        alone = context_consistency(
            np.zeros(own.sum(), np.int64), rollouts[own], positions[own], token_ids[[column]], encoder, [0.5]
        )
        np.testing.assert_array_equal(alone.rho(0.5), whole.rho(0.5)[whole.columns == column])


@pytest.mark.parametrize(
    ("options", "words"),
    [({"gammas": [0.5, 0.0]}, "gamma = 0.0"), ({"gammas": [1.5]}, "gamma = 1.5"), ({"max_pairs": 1}, "max_pairs = 1")],
)
def test_values_that_mean_nothing_are_refused(options, words):
    with pytest.raises(RocktokensError, match=words):
        one_type(np.eye(3), **{"gammas": [0.5], **options})


@pytest.mark.parametrize("eta", [0.0, -0.1, 1.01, float("nan")])
def test_an_eta_that_means_nothing_is_refused(eta):
    with pytest.raises(RocktokensError, match="eta = "):
        one_type(np.eye(3), [0.5]).kept(0.5, eta)


def test_types_out_of_order_are_a_bug():
    ids = np.arange(3)
    with pytest.raises(ValueError, match="ascend"):
        context_consistency(np.array([1, 0, 1]), ids, ids, np.arange(2), GivenVectors(np.eye(3)), [0.5])


# Samples


@FEW_EXAMPLES
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(2, 20_000))
def test_the_pair_budget_is_kept_and_used(persistent, max_pairs):
    sizes = judged_sizes(np.array(persistent), max_pairs).tolist()
    pairs = [m * (m - 1) for m in sizes]
    assert all(m == 0 if n < 2 else 2 <= m <= n for m, n in zip(sizes, persistent, strict=True))
    largest = max(sizes)
    sampled = [m for m, n in zip(sizes, persistent, strict=True) if n > 1 and m < n]
    assert all(m == largest for m in sampled)  # one cap for all, and no type above it
    assert sum(pairs) <= max_pairs or set(sizes) <= {0, 2}
    if sampled:  # one more for each of them would be too much
        more = sum(largest * (largest + 1) if m in sampled else m * (m - 1) for m in sizes)
        assert more > max_pairs


def test_the_budget_bounds_what_is_encoded_and_all_of_it_is_reported():
    vectors = unit_vectors(0, 300, 6)
    columns, ids = np.repeat([0, 1, 2], [100, 195, 5]), np.arange(300)
    encoder, done = GivenVectors(vectors), []
    result = context_consistency(
        columns, ids, ids, np.array([3, 8, 9]), encoder, [0.5], max_pairs=2000, on_done=done.append
    )
    assert result.judged.tolist() == [31, 31, 5]
    assert encoder.asked == [67]
    assert done == [31 * 30, 31 * 30, 20]
    assert result.exact.tolist() == [False, False, True]
    np.testing.assert_array_equal(columns[result.occurrences], result.columns)
    assert (np.diff(result.occurrences) > 0).all()


@pytest.mark.parametrize(
    ("at_once", "asked"), [(1, [31, 31, 5]), (40, [31, 36]), (62, [62, 5]), (66, [62, 5]), (67, [67])]
)
def test_no_more_is_looked_up_at_once_than_fits(at_once, asked):
    vectors = unit_vectors(0, 300, 6)
    columns, ids = np.repeat([0, 2, 5], [100, 195, 5]), np.arange(300)
    encoders = GivenVectors(vectors, at_once), GivenVectors(vectors)
    results = [context_consistency(columns, ids, ids, np.arange(7), each, [0.5], max_pairs=2000) for each in encoders]
    assert encoders[0].asked == asked
    np.testing.assert_array_equal(results[0].neighbours, results[1].neighbours)


def test_a_sample_depends_on_seed_and_token_id_and_grows_with_the_budget():
    vectors = unit_vectors(0, 200, 6)

    def sample(**options) -> set[int]:
        return set(one_type(vectors, [0.5], **{"max_pairs": 900, **options}).occurrences.tolist())

    assert sample() == sample()
    assert sample() != sample(seed=1)
    assert sample() != sample(token_id=6)
    assert len(sample()) < len(sample(max_pairs=4000))
    assert sample() < sample(max_pairs=4000)
    columns, ids = np.repeat([0, 1], [200, 200]), np.arange(400)
    beside = context_consistency(
        columns, ids, ids, np.array([2, 5]), GivenVectors(np.tile(vectors, (2, 1))), [0.5], max_pairs=1800
    )
    assert set(beside.occurrences[beside.columns == 1] - 200) == sample()


def test_sampled_occurrences_are_judged_among_themselves_and_scaled():
    vectors = unit_vectors(0, 200, 6)
    result = one_type(vectors, [0.5], max_pairs=900)
    chosen = result.occurrences
    counts = oracle_neighbours(list(vectors[chosen]), 0.5)
    assert result.neighbours[0].tolist() == counts
    kept = sum(count / (len(chosen) - 1) >= 0.3 for count in counts)
    assert 0 < kept < len(chosen)
    assert result.kept_count(0.5, 0.3)[0] == pytest.approx(kept * 200 / len(chosen), rel=1e-15)
    lower, upper = result.kept_share_interval(0.5, 0.3)[0]
    assert 0 <= lower < kept / len(chosen) < upper <= 1


def clustered(sizes: list[int]) -> np.ndarray:
    """Clusters of identical contexts, orthogonal to each other: ρ of a member is (size − 1)/(n − 1)."""
    return np.repeat(np.eye(len(sizes)), sizes, axis=0)


def estimates(vectors: np.ndarray, eta: float, max_pairs: int, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    results = [one_type(vectors, [0.9], max_pairs=max_pairs, seed=seed) for seed in range(seeds)]
    counts = np.array([result.kept_count(0.9, eta)[0] for result in results])
    return counts, np.array([result.kept_share_interval(0.9, eta)[0] for result in results])


def test_kept_counts_of_samples_are_unbiased_where_no_rho_is_close_to_eta():
    """240 of 400 are in a cluster with ρ = 0.6, the rest are alone."""
    counts, _ = estimates(clustered([240, *[1] * 160]), 0.2, max_pairs=40 * 39, seeds=300)
    standard_error = counts.std(ddof=1) / np.sqrt(len(counts))
    assert 0 < standard_error < 5
    assert abs(counts.mean() - 240) < 3.5 * standard_error


@pytest.mark.parametrize(
    ("sizes", "eta"),
    [
        ([240, *[1] * 160], 0.2),
        ([240, *[1] * 160], 0.5),
        ([130, 118, 90, 62], 0.2),
        ([130, 118, 90, 62], 0.3),
        ([200, 200], 0.5),
        ([396, 1, 1, 1, 1], 1.0),
        ([20, *[1] * 380], 0.04),
    ],
)
def test_intervals_cover_the_truth(sizes, eta):
    """Also where ρ of a whole cluster is as close to η as 118/400 or 199/399, so that every sample may get it wrong."""
    vectors = clustered(sizes)
    truth = one_type(vectors, [0.9]).kept_count(0.9, eta)[0] / len(vectors)
    _, intervals = estimates(vectors, eta, max_pairs=40 * 39, seeds=200)
    covered = (intervals[:, 0] <= truth) & (truth <= intervals[:, 1])
    assert covered.mean() >= 0.93


def test_intervals_are_not_the_whole_line():
    _, intervals = estimates(clustered([240, *[1] * 160]), 0.2, max_pairs=100 * 99, seeds=20)
    assert (np.diff(intervals, axis=1) < 0.25).all()
    _, wide = estimates(clustered([240, *[1] * 160]), 0.2, max_pairs=25 * 24, seeds=20)
    assert np.diff(wide, axis=1).mean() > 1.5 * np.diff(intervals, axis=1).mean()


@pytest.mark.parametrize("eta", [0.2, 0.59])
def test_a_sample_of_nearly_all_is_nearly_certain(eta):
    """The members of the cluster have ρ = 239/399; all but four of the 400 are judged."""
    result = one_type(clustered([240, *[1] * 160]), [0.9], max_pairs=396 * 395)
    lower, upper = result.kept_share_interval(0.9, eta)[0]
    assert not result.exact[0]
    assert lower < 0.6 < upper
    assert upper - lower < 0.02
