"""Candidate classes against loops over rows, linkage against brute force, planted classes, and what a run keeps."""

import json
import shutil
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from class_traces import (
    DIGITS,
    GUEST,
    LOGPS,
    PLANTED,
    naive_links,
    planted_trace,
    probabilities,
    probability_trace,
    random_tops,
    rolled_tops,
)
from tokenizers import AddedToken, Tokenizer, models
from trace_oracle import random_trace, shuffled, write_trace

from rocktokens.classes import TokenClass, TokenClasses
from rocktokens.config import FindSection
from rocktokens.errors import RocktokensError, RunDirError
from rocktokens.progress import Silent
from rocktokens.rocks.classes import (
    candidate_links,
    choice_is_of,
    find_classes,
    find_run_classes,
    link_classes,
    summarise_classes,
    too_few_prompts,
)
from rocktokens.rocks.records import ChoiceShares
from rocktokens.run_dir import RunDir
from rocktokens.traces.store import TraceStore
from rocktokens.types import ONE, RockSet, RockToken

Pairs = dict[tuple[int, int], float]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("planted"), {0: planted_trace(1), 10: planted_trace(2)})


# Sums


def stated_probability(logp: np.ndarray) -> np.ndarray:
    """The formula of ``fixed_probability`` in numpy's float64."""
    x = np.clip(logp.astype(np.float64), -40.0, 0.0)
    n = np.floor(x * 1.4427 + 0.5)
    inner, r = np.ones_like(x), x - n * 0.693147180559945
    for k in range(8, 0, -1):
        inner = inner * r / k + 1
    return np.floor(inner * 2.0**n * 2**24 + 0.5).astype(np.int64)


def test_probabilities_are_exp_to_the_last_unit_and_the_stated_bits(tmp_path: Path):
    found = probabilities(TraceStore(probability_trace(tmp_path)))
    logp, p = found["logp_student"].to_numpy(), found["p"].to_numpy()
    known = ~np.isnan(logp)
    assert len(p) > len(LOGPS) and not p[~known].any() and (~known).any()
    assert np.array_equal(p[known], stated_probability(logp[known]))
    assert np.abs(p[known] / ONE - np.exp(np.minimum(logp[known].astype(np.float64), 0))).max() <= 0.501 / ONE


# Links


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("least", [{}, {"share": 0.2, "min_freq": 6, "min_prompts": 6}])
def test_links_are_those_of_a_loop_over_the_rows(tmp_path: Path, seed: int, least: dict):
    table = random_tops(seed)
    run = write_trace(tmp_path, {0: random_tops(seed + 50), 5: table})
    expected = naive_links(table, **least)
    found = candidate_links(find_classes(TraceStore(run), **least))
    assert expected and list(found) == sorted(expected)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found != pytest.approx(naive_links(rolled_tops(table), **least), rel=1e-5), "a shift by one would show"
    before = candidate_links(find_classes(TraceStore(run), reference=0, **least))
    assert before.keys() == naive_links(random_tops(seed + 50), **least).keys()


def test_types_in_few_prompts_are_not_linked(tmp_path: Path):
    table = random_tops(1)
    store = TraceStore(write_trace(tmp_path, {0: table}))
    for least in ({"min_prompts": 7}, {"min_freq": 12}):
        fewer = naive_links(table, **least)
        assert candidate_links(find_classes(store, **least)).keys() == fewer.keys() < naive_links(table).keys()
        assert fewer


def test_neither_order_nor_threads_nor_parts_change_a_byte(tmp_path: Path):
    table = random_tops(5)
    saved = set()
    for number, (threads, rows_per_part) in enumerate(product((1, 4), (1_000_000, 37))):
        run = write_trace(tmp_path / str(number), {0: shuffled(table, number)}, rows_per_part)
        classes = find_classes(TraceStore(run, threads=threads))
        classes.source["manifest_sha256"] = ""  # of the parts, which differ
        classes.save(tmp_path / "classes.json")
        saved.add((tmp_path / "classes.json").read_bytes())
    assert len(saved) == 1 and b'"links"' in saved.pop()


def test_the_file_has_what_another_linkage_needs(planted: Path, tmp_path: Path):
    store = TraceStore(planted)
    found = find_classes(store)
    found.save(tmp_path / "classes.json")
    loaded = TokenClasses.load(tmp_path / "classes.json")
    links = candidate_links(loaded)
    assert links == candidate_links(found) and link_classes(links) == loaded.groups
    assert store.made(loaded.source, "classes.json") and loaded.source["n_prompts"] == 60
    parameters = {"share": 0.1, "min_freq": 2, "min_prompts": 5, "max_members": 16}
    assert loaded.criterion == {"reference": 10, **parameters}
    with pytest.raises(RocktokensError, match="do not say which tokens are linked: find them with `rocktokens find"):
        candidate_links(TokenClasses([[1, 2]]))


@pytest.mark.parametrize(("name", "value"), [("share", 0.0), ("share", float("nan")), ("max_members", 1)])
def test_parameters_that_mean_nothing_are_refused(planted: Path, name: str, value: float):
    with pytest.raises(RocktokensError, match=f"{name} = {value} is not valid: give"):
        find_classes(TraceStore(planted), **{name: value})


def test_traces_without_tops_are_refused(tmp_path: Path):
    run = write_trace(tmp_path, {0: random_trace(1)})
    with pytest.raises(RocktokensError) as refused:
        find_classes(TraceStore(run))
    assert str(refused.value) == (
        "the traces have no top tokens: set trace.top_k = 8 and run `rocktokens trace --restart`"
    )


# Planted classes


def pairs_of(groups: list[tuple[int, ...]]) -> set[tuple[int, int]]:
    return {pair for ids in groups for pair in combinations(ids, 2)}


@pytest.mark.parametrize("checkpoint", [0, 10])
def test_planted_classes_are_found_and_decoys_are_not(planted: Path, checkpoint: int):
    classes = find_classes(TraceStore(planted), reference=checkpoint)
    found, true = pairs_of(classes.groups), pairs_of(PLANTED)
    precision, recall = len(found & true) / len(found), len(found & true) / len(true)
    assert precision >= 0.9 and recall >= 0.9
    assert classes.groups == PLANTED
    assert (GUEST, min(PLANTED[-1])) in {(max(pair), min(pair)) for pair in candidate_links(classes)}, "linked to one"
    assert not {token_id for pair in candidate_links(classes) for token_id in pair} & {*DIGITS}


def test_planted_classes_are_lost_when_tops_are_off_by_one(tmp_path: Path):
    store = TraceStore(write_trace(tmp_path, {0: rolled_tops(planted_trace(1, rollouts=30))}))
    assert len(pairs_of(find_classes(store).groups) & pairs_of(PLANTED)) < 0.2 * len(pairs_of(PLANTED))


def rock(token_id: int) -> RockToken:
    return RockToken(token_id, "", 1, 1, 1.0, 1.0, None, None, "other")


def test_summaries_say_what_a_class_amounts_to(planted: Path):
    store = TraceStore(planted)
    classes = find_classes(store)
    rocks = RockSet("", {}, {}, {}, [rock(token_id) for token_id in (*PLANTED[0], PLANTED[3][0])])
    links, rows = candidate_links(classes), store.table(10).to_pandas()
    summaries = summarise_classes(store, classes, rocks)
    assert [own.kl_share for own in summaries] == sorted((own.kl_share for own in summaries), reverse=True)
    for own in summaries:
        inside, strengths = rows[rows.token_id.isin(own.ids)], [links[pair] for pair in combinations(own.ids, 2)]
        assert (own.weakest, own.strongest) == (min(strengths), max(strengths))
        assert own.token_share == len(inside) / len(rows)
        assert own.kl_share == pytest.approx(inside.kl.astype(float).sum() / rows.kl.astype(float).sum(), rel=1e-5)
    assert [own.n_rocks for own in sorted(summaries, key=lambda own: own.ids)] == [2, 0, 0, 1, 0]


def test_few_prompts_are_said_to_be_few(planted: Path, tmp_path: Path):
    assert too_few_prompts(find_classes(TraceStore(planted))) == ""
    store = TraceStore(write_trace(tmp_path, {0: planted_trace(1, rollouts=19, length=20)}))
    assert too_few_prompts(find_classes(store)) == (
        "19 prompts are too few to find classes: trace at least 20 (trace.num_prompts)"
    )


# Special tokens


def test_special_and_end_tokens_are_in_no_class(planted: Path, tmp_path: Path):
    run = shutil.copytree(planted, tmp_path / "run")
    special, pair_end, end = PLANTED[3][0], PLANTED[0][1], PLANTED[4][5]
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(60)}, unk_token="w59"))
    tokenizer.add_special_tokens([AddedToken(f"w{special}", special=True)])
    RunDir(run).commit("tokenizer/tokenizer.json", lambda path: tokenizer.save(str(path)))
    RunDir(run).commit_text("checkpoints/step-10/generation_config.json", json.dumps({"eos_token_id": [end, 59]}))
    RunDir(run).commit_text("checkpoints/step-10/config.json", json.dumps({"text_config": {"eos_token_id": pair_end}}))
    RunDir(run).commit_text("checkpoints/step-0/config.json", json.dumps({"eos_token_id": PLANTED[1][0]}))
    left = [tuple(v for v in ids if v not in (special, pair_end, end)) for ids in PLANTED]
    classes = find_classes(TraceStore(run))
    assert classes.groups == [ids for ids in left if len(ids) > 1]
    assert all(each.texts == tuple(f"w{token_id}" for token_id in each.ids) for each in classes)


# Files of a run


class Notes(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(write_trace(tmp_path / "run", {0: planted_trace(1, rollouts=20, length=60)}))


def searched(run: RunDir, **settings: int) -> tuple[TokenClasses, list[str]]:
    notes = Notes()
    return find_run_classes(run, FindSection(**settings), progress=notes), notes.lines


def record_verdicts(run: RunDir, left: int = 2) -> bytes:
    """What a test of the classes writes: verdicts, and of some classes only what is left of them."""
    before = TokenClasses.load(run.classes)
    tested = [TokenClass(each.ids[:2], each.texts[:2], verdict="pillar", safe=True) for each in before][:left]
    criterion = {**before.criterion, "tested": {"n_prompts": 500}}
    about = {"tokenizer_sha256": before.tokenizer_sha256, "source": before.source}
    run.commit(run.classes.name, TokenClasses(tested, criterion=criterion, **about).save)
    return run.classes.read_bytes()


def test_a_search_is_listed_and_the_same_twice(run: RunDir):
    found, said = searched(run)
    content = run.classes.read_bytes()
    assert found == TokenClasses.load(run.verified("classes.json")) == find_classes(TraceStore(run)) and not said
    assert TraceStore(run).made(found.source, "classes.json")
    assert searched(run) == (found, []) and run.classes.read_bytes() == content


@pytest.mark.parametrize("left", [0, 2])
def test_verdicts_stay_where_links_and_traces_are_the_same(run: RunDir, left: int):
    searched(run)
    content = record_verdicts(run, left)
    kept, said = searched(run)
    assert [each.safe for each in kept] == [True] * left and run.classes.read_bytes() == content
    assert len(said) == 1 and "keeps its verdicts: the same links were found in the same traces" in said[0]


@pytest.mark.parametrize("change", ["traces", "settings"])
def test_verdicts_go_where_traces_or_settings_changed(run: RunDir, change: str):
    searched(run)
    record_verdicts(run)
    least = {"min_prompts": 6} if change == "settings" else {}
    if change == "traces":
        write_trace(run.path, {5: planted_trace(1, rollouts=20, length=60)})
    found, said = searched(run, **least)
    assert found == TokenClasses.load(run.classes) and all(each.verdict == "untested" for each in found)
    assert len(said) == 1 and "had verdicts on other traces or links: its classes are untested now" in said[0]


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text("{}")])
def test_a_file_that_is_gone_or_damaged_is_made_again(run: RunDir, damage: Callable[[Path], object]):
    searched(run)
    content = run.classes.read_bytes()
    damage(run.classes)
    assert searched(run)[1] == [] and run.classes.read_bytes() == content


def test_verdicts_in_a_file_that_the_run_does_not_list_are_not_its_own(run: RunDir):
    searched(run)
    content = record_verdicts(run)
    run.drop(["classes.json"])
    run.classes.write_bytes(content)
    found, said = searched(run)
    assert not said and {each.state for each in found} == {"untested"}
    assert TokenClasses.load(run.verified("classes.json")).classes == found.classes


def test_a_share_of_choice_is_of_the_classes_that_no_ban_has_refuted(run: RunDir):
    shares = ChoiceShares(TokenClasses([[1, 2]]).sha256, "all prompts", 0.5, None, None, None)
    assert choice_is_of(run, shares)  # whatever trace.classes named
    for refuted, expected in ((False, False), (True, True)):
        second = TokenClass((3, 4), safe=False if refuted else None)
        run.commit("classes.json", TokenClasses([TokenClass((1, 2)), second]).save)
        assert choice_is_of(run, shares) is expected


def test_classes_of_another_run_are_refused(run: RunDir, tmp_path: Path):
    searched(run)
    other = RunDir(write_trace(tmp_path / "other", {0: planted_trace(7, rollouts=20, length=60)}))
    found, _ = searched(other)
    with pytest.raises(RunDirError, match=r"classes.json was made from traces that this run never had"):
        TraceStore(run).made(found.source, "classes.json")
