"""Tables of rocks by category and place equal row-by-row oracles."""

import json
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from tokenizers import Tokenizer, decoders, models
from trace_oracle import fixed, random_trace, with_column, write_trace

from rocktokens.errors import RocktokensError
from rocktokens.rocks.analysis import category_table, position_profile
from rocktokens.rocks.categories import CATEGORIES
from rocktokens.rocks.records import PositionProfile
from rocktokens.rocks.selectors import Sample
from rocktokens.traces.store import TraceStore

ONE = 2**24

# Categories


def make_sample(token_ids: list[int], freq: np.ndarray, kl: np.ndarray, grad_norm: np.ndarray) -> Sample:
    return Sample(np.array(token_ids), csr_array(freq), csr_array(kl), csr_array(grad_norm))


def share(values: np.ndarray, columns: list[int]) -> float | None:
    """Exact share of the whole held by some columns, in Python integers."""
    rows = values.tolist()
    total = sum(map(sum, rows))
    return float(Fraction(sum(row[column] for row in rows for column in columns), total)) if total else None


@st.composite
def samples(draw):
    clusters, types = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    freq = rng.integers(0, 3, (clusters, types))
    # Values beyond 2^53: a sum in float64 would round.
    kl, grad_norm = rng.integers(0, 2**57, (2, clusters, types)) * (freq > 0)
    categories = draw(st.lists(st.sampled_from(CATEGORIES), min_size=types, max_size=types))
    rocks = draw(st.lists(st.booleans(), min_size=types, max_size=types))
    return freq, kl, grad_norm, categories, rocks


@given(samples())
@settings(deadline=None)  # the first example may pay for an import
def test_category_table_equals_the_oracle(drawn):
    freq, kl, grad_norm, categories, rocks = drawn
    ids = [3 * index + 1 for index in range(len(rocks))]
    sample = make_sample(ids, freq, kl, grad_norm)
    expected = []
    for category in CATEGORIES:
        columns = [v for v in range(len(ids)) if categories[v] == category and freq[:, v].sum()]
        rock_columns = [v for v in columns if rocks[v]]
        if columns:
            record = {"category": category, "n_types": len(columns), "n_rock_types": len(rock_columns)}
            for prefix, chosen in (("", columns), ("rock_", rock_columns)):
                for name, values in (("token", freq), ("kl", kl), ("grad", grad_norm)):
                    record[f"{prefix}{name}_share"] = share(values, chosen)
            expected.append(record)
    table = category_table(np.array(ids), categories, sample, np.array(rocks))
    assert [asdict(row) for row in table] == expected
    assert json.loads(json.dumps(expected)) == expected


def test_categories_are_looked_up_by_token_id():
    one = np.array([[1, 1]])
    sample = make_sample([5, 9], one, one, 0 * one)
    table = category_table(
        np.array([2, 5, 7, 9]),
        ["other", "digit", "other", "discourse"],
        sample,
        np.array([True, False, True, True]),
    )
    assert [(row.category, row.n_types, row.n_rock_types) for row in table] == [
        ("discourse", 1, 1),
        ("digit", 1, 0),
    ]
    assert table[0].rock_token_share == table[0].token_share == 0.5
    assert table[0].grad_share is None
    with pytest.raises(ValueError, match="does not describe"):
        category_table(np.array([2, 5]), ["other", "digit"], sample, np.array([True, False]))


# Positions

PIECES = ["x", "\n", ".\n\n", "So", "\n ", "y", "a\n", "b", "\nc"]
ENDS_LINE = {1, 2, 6}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(PIECES)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def open_store(run: Path, table: pa.Table, tokenizer: Tokenizer, rows_per_part: int = 1_000_000) -> TraceStore:
    write_trace(run, {0: table}, rows_per_part)
    (run / "tokenizer").mkdir()
    tokenizer.save(str(run / "tokenizer" / "tokenizer.json"))
    return TraceStore(run)


def place(row: dict, responses: dict[int, list[int]]) -> dict[str, str]:
    """The bins of one row."""
    tokens, position = responses[row["rollout_id"]], row["position"]
    since = 0
    while since < position and tokens[position - since - 1] not in ENDS_LINE:
        since += 1
    decile = int(Fraction(2 * position + 1, 2 * len(tokens)) * 10)
    return {
        "line_start": "elsewhere" if since else "start of line",
        "since_newline": ["0", "1", *["2–4"] * 3, *["5–9"] * 5, "10+"][min(since, 10)],
        "relative_position": f"{10 * decile}–{10 * decile + 10} %",
    }


BINS = {
    "line_start": ["start of line", "elsewhere"],
    "since_newline": ["0", "1", "2–4", "5–9", "10+"],
    "relative_position": [f"{start}–{start + 10} %" for start in range(0, 100, 10)],
}


def oracle(table: pa.Table, rocks: set[int], prompts: set[str] | None = None, rollouts: set[int] | None = None) -> dict:
    """The profile, row by row."""
    rows = sorted(table.to_pylist(), key=lambda row: (row["rollout_id"], row["position"]))
    rows = [row for row in rows if prompts is None or row["prompt_id"] in prompts]
    rows = [row for row in rows if rollouts is None or row["rollout_id"] in rollouts]
    responses: dict[int, list[int]] = {}
    for row in rows:
        responses.setdefault(row["rollout_id"], []).append(row["token_id"])
    scored = [row | place(row, responses) for row in rows if row["kl"] is not None]
    return {
        name: [one_bin(scored, [row for row in scored if row[name] == label], label, rocks) for label in labels]
        for name, labels in BINS.items()
    }


def one_bin(everywhere: list[dict], here: list[dict], label: str, rocks: set[int]) -> dict:
    all_rocks, found = ([row for row in rows if row["token_id"] in rocks] for rows in (everywhere, here))
    ratio = lambda part, whole: part / whole if whole else None  # noqa: E731
    return {
        "bin": label,
        "n_tokens": len(here),
        "n_rock_tokens": len(found),
        "share_of_tokens": ratio(len(here), len(everywhere)),
        "share_of_rocks": ratio(len(found), len(all_rocks)),
        "rock_share": ratio(len(found), len(here)),
        "mean_kl_rocks": ratio(sum(fixed(row["kl"]) for row in found), len(found) * ONE),
    }


def bins_of(profile: PositionProfile) -> dict:
    return {name: [asdict(each) for each in getattr(profile, name)] for name in BINS}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rocks=st.sets(st.integers(0, 10), max_size=5), length=st.integers(2, 40))
def test_position_profile_equals_the_oracle(tmp_path_factory, tokenizer, seed, rocks, length):
    table = random_trace(seed, prompts=6, vocabulary=9, length=length)
    shuffled = table.take(np.random.default_rng(seed).permutation(table.num_rows))
    store = open_store(tmp_path_factory.mktemp("run"), shuffled, tokenizer, rows_per_part=37)
    for prompts in (None, ["p1", "p4"]):
        profile = position_profile(store, 0, np.array(sorted(rocks)), prompts)
        assert bins_of(profile) == oracle(table, rocks, set(prompts) if prompts else None)
        assert json.loads(json.dumps(asdict(profile))) == asdict(profile)
        assert profile.n_rollouts == profile.n_rollouts_available == (4 if prompts else 12)


def test_a_line_starts_behind_the_newline_not_at_it(tmp_path, tokenizer):
    """Of "So x \\n So \\n": a shift by one in either direction moves a rock out of its bin."""
    tokens = [3, 0, 1, 3, 1]
    table = with_column(random_trace(0, prompts=1, samples=1, length=30).slice(0, 5), "token_id", tokens)
    store = open_store(tmp_path, with_column(table, "kl", [1.0, 2, 3, 4, 5]), tokenizer)
    so, newline = (position_profile(store, 0, np.array([rock])) for rock in (3, 1))
    assert [row.n_rock_tokens for row in so.line_start] == [2, 0]
    assert [row.n_rock_tokens for row in newline.line_start] == [0, 2]
    assert [row.n_rock_tokens for row in newline.since_newline] == [0, 1, 1, 0, 0]
    assert so.line_start[0].mean_kl_rocks == 2.5
    assert [row.n_tokens for row in so.relative_position] == [0, 1] * 5


def test_unscored_rows_end_lines_and_fill_the_response_but_count_nowhere(tmp_path, tokenizer):
    table = with_column(random_trace(0, prompts=1, samples=1, length=30).slice(0, 4), "token_id", [0, 1, 3, 0])
    store = open_store(tmp_path, with_column(table, "kl", [None, None, 1.0, None]), tokenizer)
    profile = position_profile(store, 0, np.array([3]))
    assert (profile.n_occurrences, profile.n_rock_occurrences) == (1, 1)
    assert profile.line_start[0].n_tokens == 1
    assert profile.relative_position[6].n_tokens == 1  # (2 + 1/2) / 4


def test_above_the_limit_a_seeded_sample_of_rollouts_is_read(tmp_path, tokenizer):
    table = random_trace(3, prompts=40, vocabulary=9)
    store = open_store(tmp_path, table, tokenizer)
    profile = position_profile(store, 0, np.array([0, 3]), max_rollouts=7, seed=5)
    assert (profile.n_rollouts, profile.n_rollouts_available) == (7, 80)
    chosen = np.random.Generator(np.random.PCG64(5)).choice(np.arange(80), 7, replace=False)
    assert bins_of(profile) == oracle(table, {0, 3}, rollouts=set(chosen.tolist()))
    assert profile == position_profile(TraceStore(tmp_path, threads=1), 0, np.array([0, 3]), max_rollouts=7, seed=5)
    assert profile != position_profile(store, 0, np.array([0, 3]), max_rollouts=7, seed=6)
    with pytest.raises(RocktokensError, match="max_rollouts = 0"):
        position_profile(store, 0, np.array([0]), max_rollouts=0)


def test_prompts_without_rows_give_an_empty_profile(tmp_path, tokenizer):
    profile = position_profile(open_store(tmp_path, random_trace(0), tokenizer), 0, np.array([1]), ["absent"])
    assert profile.n_rollouts == profile.n_occurrences == 0
    assert bins_of(profile) == oracle(random_trace(0), {1}, prompts=set())
