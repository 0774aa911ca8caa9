"""The share of the loss that is choice is that of loops over rows, on prompts that did not select."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from class_traces import CLASSES, split_trace
from sample_oracle import random_occurrences
from scipy.sparse import csr_array
from trace_oracle import ANY, fixed, naive_split, occurrences_of, shuffled, write_trace

from rocktokens.inference.bootstrap import bootstrap_counts, share_interval
from rocktokens.rocks.analysis import analyse
from rocktokens.rocks.find import find_rocks, rock_set, search_traces
from rocktokens.rocks.records import ChoiceShares, FindRecord
from rocktokens.rocks.search import Criterion
from rocktokens.rocks.selectors import Sample
from rocktokens.rocks.sums import HELD_OUT, NOT_SPLIT
from rocktokens.rocks.uncertainty import choice_share
from rocktokens.run_dir import derive_seed
from rocktokens.traces.schema import with_choice
from rocktokens.traces.store import TraceStore

SETTINGS = {"k": 4, "seed": 2, **ANY}


def found_in(run: Path, **options) -> FindRecord:
    store = TraceStore(run)
    result = search_traces(store, Criterion(**{**SETTINGS, **options}))
    return analyse(store, result, rock_set(store, result))


def rocks_share_in(run: Path) -> tuple:
    result = search_traces(TraceStore(run), Criterion(**SETTINGS))
    return choice_share(result.sums.measuring, result.is_rock)


def naive_share(rows: list[dict]) -> float:
    """In float64, row after row."""
    return math.fsum(row["kl_choice"] for row in rows) / math.fsum(row["kl"] for row in rows)


@pytest.mark.parametrize("split", [0.5, None])
def test_the_share_is_that_of_the_measuring_rows(tmp_path, split):
    tables = split_trace(1)
    choice = found_in(write_trace(tmp_path, tables, rows_per_part=200), split=split).choice
    _, measuring = naive_split(tables[8], split, SETTINGS["seed"])
    rows = occurrences_of(tables[8], set(measuring))
    rocks = {token.id for token in find_rocks(TraceStore(tmp_path), **SETTINGS, split=split).tokens}
    assert choice is not None and rocks
    assert choice.classes_sha256 == CLASSES.sha256 and choice.half == (HELD_OUT if split else NOT_SPLIT)
    assert choice.share == pytest.approx(naive_share(rows), abs=1e-6)
    rock_rows = [row for row in rows if row["token_id"] in rocks]
    assert choice.rock_share == pytest.approx(naive_share(rock_rows), abs=1e-6)
    assert choice.share_interval == pytest.approx(naive_interval(rows, measuring))
    assert choice.rock_share_interval == pytest.approx(naive_interval(rock_rows, measuring))
    low, high = choice.share_interval
    assert 0 < low < choice.share < high < 1


def naive_interval(rows: list[dict], prompts: list[str]) -> tuple[float, float]:
    """Bootstrap-t on the logit scale over prompts, in the order of the sums that ``find`` makes of them."""
    sums = {name: dict.fromkeys(prompts, 0) for name in ("kl", "kl_choice")}
    for row in rows:
        for name, by_prompt in sums.items():
            by_prompt[row["prompt_id"]] += fixed(row[name])
    kl_C, choice_C = (np.array(list(sums[name].values())) for name in ("kl", "kl_choice"))
    counts = bootstrap_counts(len(prompts), 1000, derive_seed(SETTINGS["seed"], "analysis"))
    return share_interval(choice_C, kl_C - choice_C, counts)


def test_a_choice_of_the_token_before_is_another_share(tmp_path):
    """The share of rocks is keyed by the predicted token: shifted by one row either way it is another number."""
    tables = split_trace(1)
    own, _ = rocks_share_in(write_trace(tmp_path / "own", tables))
    choice = tables[8]["kl_choice"].to_numpy(zero_copy_only=False)
    kl = tables[8]["kl"].to_numpy(zero_copy_only=False)
    for shift in (1, -1):
        moved = np.where(np.isnan(kl), np.nan, np.minimum(np.nan_to_num(np.roll(choice, shift)), kl))
        shifted = {**tables, 8: with_choice(tables[8], moved, CLASSES)}
        assert abs(rocks_share_in(write_trace(tmp_path / str(shift), shifted))[0] - own) > 0.02


def test_traces_without_the_column_say_nothing_of_it_and_have_the_same_rocks(tmp_path):
    tables = split_trace(1)
    plain = {**tables, 8: tables[8].drop(["kl_choice"])}
    own, other = (write_trace(tmp_path / name, given) for name, given in (("own", tables), ("other", plain)))
    found, without = found_in(own), found_in(other)
    assert without.choice is None and "choice" not in without.to_record()
    rocks = [find_rocks(TraceStore(run), **SETTINGS) for run in (own, other)]
    assert rocks[0].tokens == rocks[1].tokens and rocks[0].summary == rocks[1].summary
    same = {name: value for name, value in found.to_record().items() if name not in ("choice", "source")}
    assert same == {name: value for name, value in without.to_record().items() if name != "source"}
    for record in (found, without):
        record.save(tmp_path / "find.json")
        assert FindRecord.load(tmp_path / "find.json") == record
        assert ("choice" in json.loads((tmp_path / "find.json").read_text())) == (record.choice is not None)


def test_the_order_of_rows_and_parts_does_not_matter(tmp_path):
    tables = split_trace(2)
    own = rocks_share_in(write_trace(tmp_path / "own", tables))
    mixed = {0: tables[0], 8: shuffled(tables[8], 5)}
    assert rocks_share_in(write_trace(tmp_path / "mixed", mixed, rows_per_part=97)) == own


def sample_with(choice_of_kl: float) -> Sample:
    drawn = random_occurrences(3)
    whole = drawn.sample()
    part = csr_array((whole.kl.toarray() * choice_of_kl).astype(np.int64))
    return Sample(whole.token_ids, whole.freq, whole.kl, whole.grad_norm, kl_choice=part)


@pytest.mark.parametrize(("choice_of_kl", "share"), [(0.0, 0.0), (1.0, 1.0), (1.001, 1.0), (-0.001, 0.0), (0.25, 0.25)])
def test_all_nothing_and_rounding_beyond_either(choice_of_kl, share):
    sample = sample_with(choice_of_kl)
    everything = np.ones(len(sample.token_ids), dtype=bool)
    found, ends = choice_share(sample, everything)
    assert found == pytest.approx(share, abs=1e-6)
    assert ends == pytest.approx((share, share), abs=1e-5)  # the same share in every prompt: nothing is uncertain
    assert choice_share(sample, ~everything) == (None, None)


def test_the_sentence_says_share_interval_and_prompts():
    known = ChoiceShares("ab", HELD_OUT, 0.341, (0.302, 0.38), 0.52, None)
    assert known.sentence.startswith("34.1 % [30.2, 38.0] of the remaining loss is choice: ")
    assert known.sentence.endswith("Of the loss of rocks it is 52.0 % (held-out half).")
    none_found = replace(known, rock_share=None)
    assert none_found.sentence.endswith("not whether one of them does (held-out half).")
    assert replace(none_found, share=None).sentence == "There is no loss left that could be choice (held-out half)."
