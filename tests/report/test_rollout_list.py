"""The explorer's questions, answered as plain loops over the rollouts answer them."""

import math
import shutil
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from view_run import CHECKPOINTS, log_line, probe_rollouts, rock_ids, tokenizer, under_ban, write_whole

from rocktokens.errors import RocktokensError
from rocktokens.report.views.knockout_pairs import knockout_pairs, knockouts
from rocktokens.report.views.live import MAX_POINTS, live
from rocktokens.report.views.rollout_list import Filters, rollouts, warm
from rocktokens.report.views.run_view import RunView
from rocktokens.report.views.strips import Strip, rollout_strip
from rocktokens.report.views.type_card import CONTEXT, history, type_card
from rocktokens.run_dir import RunDir


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(tmp_path_factory.mktemp("run")).path


@pytest.fixture(scope="module")
def run(path: Path) -> RunView:
    return RunView.open(path)


@pytest.fixture(scope="module")
def strips(run: RunView) -> dict[int, list[Strip]]:
    """Every rollout at every checkpoint."""
    return {step: [rollout_strip(run, rollout_id, step) for rollout_id in range(16)] for step in CHECKPOINTS}


def matches(strip: Strip, filters: Filters) -> bool:
    """The meaning of the filters, written out."""
    held = any(
        (not filters.rock or token.rock_rank is not None)
        and filters.token_id in (None, token.token_id)
        and filters.category in (None, token.category)
        and (filters.kl_low is None or token.kl >= filters.kl_low)
        and (filters.kl_high is None or token.kl <= filters.kl_high)
        for token in strip.tokens
    )
    has_rock = any(token.rock_rank is not None for token in strip.tokens)
    has_banned = any(token.token_id == rock_ids()[0] for token in strip.tokens)
    return (
        held
        and not (filters.rock is False and has_rock)
        and (filters.banned is None or filters.banned == has_banned)
        and (filters.correct is None or strip.correct == filters.correct)
        and (not filters.text or filters.text.lower() in strip.response_text.lower())
    )


CHOICES = [
    Filters(checkpoint, rock, token_id, category, low, high, text, correct, banned)
    for checkpoint, (rock, token_id, category), (low, high), text, (correct, banned) in product(
        (None, 10),
        (
            (None, None, None),
            (True, None, None),
            (False, None, None),
            (None, rock_ids()[2], None),
            (None, None, "digit"),
            (True, None, "discourse"),
            (None, None, "content_word"),
        ),
        ((None, None), (3.0, None), (None, 1e-3), (3.0, 3.5)),
        (None, "SO, THE", "Step 2"),
        ((None, None), (True, None), (False, True), (None, False)),
    )
]


def test_filters_mean_what_plain_loops_say(run: RunView, strips: dict[int, list[Strip]]):
    sizes = set()
    for filters in CHOICES:
        expected = [own.rollout_id for own in strips[filters.checkpoint or 20] if matches(own, filters)]
        page = rollouts(run, filters)
        assert ([row.rollout_id for row in page.rows], page.total) == (expected, len(expected)), filters
        sizes.add(len(expected))
    assert len(sizes) > 8  # the choices tell filters apart


def test_rows_describe_their_rollouts(run: RunView, strips: dict[int, list[Strip]]):
    for row, strip in zip(rollouts(run, Filters(checkpoint=10)).rows, strips[10], strict=True):
        kl = [token.kl for token in strip.tokens]
        assert row.mean_kl == pytest.approx(math.fsum(kl) / len(kl), rel=1e-7)
        assert np.float32(row.max_kl) == np.float32(max(kl))
        assert row.n_rocks == sum(token.rock_rank is not None for token in strip.tokens)
        assert (row.length, row.prompt_id) == (len(strip.tokens), strip.prompt_id)
        assert (row.correct, row.finished) == (strip.correct, strip.finished)
        assert strip.response_text.startswith(row.preview.removesuffix("…")) and len(row.preview) <= 160


@pytest.mark.parametrize("name", ["rollout_id", "mean_kl", "max_kl", "n_rocks", "length"])
def test_pages_in_order_are_the_whole_list(run: RunView, name: str):
    everything = rollouts(run, Filters()).rows
    for sort, sign in ((name, 1), (f"-{name}", -1)):
        expected = sorted(everything, key=lambda row: (sign * getattr(row, name), row.rollout_id))
        pages = [rollouts(run, Filters(sort=sort), page, size=5) for page in range(4)]
        assert [row for page in pages for row in page.rows] == expected
        assert [(page.total, len(page.rows)) for page in pages] == [(16, 5), (16, 5), (16, 5), (16, 1)]
    assert rollouts(run, Filters(), page=9).rows == ()


def test_warm_answers_are_the_same(path: Path, run: RunView):
    warmed = RunView.open(path)
    warm(warmed)
    assert rollouts(warmed, Filters(text="so", correct=False)) == rollouts(run, Filters(text="so", correct=False))


@pytest.mark.parametrize(
    ("filters", "page", "size", "sentence"),
    [
        (Filters(sort="kl; drop table"), 0, 10, "sort = 'kl; drop table' is not known: use one of rollout_id"),
        (Filters(category="verbs"), 0, 10, "category = 'verbs' is not known: use one of latex_math"),
        (Filters(kl_low=2.0, kl_high=1.0), 0, 10, "kl_low = 2 is above kl_high = 1: swap them"),
        (Filters(checkpoint=7), 0, 10, "checkpoint 7 has no traces"),
        (Filters(), -1, 10, "page = -1 is not valid"),
        (Filters(), 0, 100_000, "size = 100000 is not valid"),
    ],
)
def test_questions_without_an_answer_are_refused(run: RunView, filters: Filters, page: int, size: int, sentence: str):
    with pytest.raises(RocktokensError) as refusal:
        rollouts(run, filters, page, size)
    assert sentence in str(refusal.value)


def test_history_is_the_kl_of_each_occurrence(run: RunView, strips: dict[int, list[Strip]]):
    found = history(run, 6)
    assert list(found) == [token.position for token in strips[CHECKPOINTS[-1]][6].tokens]
    for place, known in enumerate(found.values()):
        assert known == [(step, strips[step][6].tokens[place].kl) for step in CHECKPOINTS]
    assert history(run, 2**62) == {}


def test_a_type_card_tells_all_of_a_type(run: RunView, strips: dict[int, list[Strip]]):
    so = rock_ids()[0]
    card = type_card(run, so)
    found = {
        step: [(own.rollout_id, token) for own in strips[step] for token in own.tokens if token.token_id == so]
        for step in CHECKPOINTS
    }
    assert (card.text, card.category, card.checkpoint) == ("So", "discourse", 20)
    assert card.n_occurrences == len(found[20]) and card.n_rollouts == len({own for own, _ in found[20]})
    assert card.rock is not None and (card.rock.id, card.rock.rank, card.rock.verdict) == (so, 1, "neutral")
    assert card.knockout is not None and card.knockout.verdict == "pillar"
    for step, mean_kl, count in card.losses:
        kl = [token.kl for _, token in found[step]]
        assert count == len(kl) and mean_kl == pytest.approx(sum(kl) / count, rel=1e-6)
    assert [step for step, _, _ in card.losses] == list(CHECKPOINTS)
    for occurrence, (rollout_id, token) in zip(card.occurrences, found[20], strict=False):
        assert (occurrence.rollout_id, occurrence.position) == (rollout_id, token.position)
        assert np.float32(occurrence.kl) == np.float32(token.kl)
        ids = probe_rollouts()[rollout_id].token_ids.tolist()
        at = token.position
        assert occurrence.before == tokenizer().decode(ids[max(at - CONTEXT, 0) : at])
        assert occurrence.after == tokenizer().decode(ids[at + 1 : at + 1 + CONTEXT])
    assert len(card.occurrences) == min(50, card.n_occurrences)


def test_a_type_that_never_occurs_has_an_empty_card(run: RunView):
    card = type_card(run, 1200)
    assert (card.n_occurrences, card.n_rollouts, card.occurrences, card.rock, card.knockout) == (0, 0, (), None, None)
    assert card.losses == ((10, None, 0), (20, None, 0))


def test_a_strip_is_that_of_its_checkpoint_and_of_the_reference_by_default(
    run: RunView, strips: dict[int, list[Strip]]
):
    assert (rollout_strip(run, 4, 10), rollout_strip(run, 4)) == (strips[10][4], strips[20][4])


# Knock-outs


def test_knockouts_are_those_of_the_record(run: RunView):
    [row] = knockouts(run)
    assert (row.ids, row.name, row.role, row.verdict) == ((rock_ids()[0],), "So", "tested", "pillar")
    assert (row.delta, row.interval, row.n_gained) == (-0.5, (-0.6, -0.4), 0)


def test_pairs_are_aligned_and_switched_answers_come_first(run: RunView):
    so, free = rock_ids()[0], probe_rollouts("evaluation prompts")
    page = knockout_pairs(run, so)
    holders = [place for place, own in enumerate(free) if so in own.token_ids]
    expected = [place for place in holders if place % 2 == 0] + [place for place in holders if place % 2]
    assert page.total == len(holders) and len({place % 2 for place in holders}) == 2
    for pair, place in zip(page.pairs, expected, strict=True):
        own, decoded = free[place], under_ban(free, place, so)
        assert (pair.prompt_id, pair.sample) == (own.prompt_id, own.sample)
        assert [token.token_id for token in pair.free] == own.token_ids.tolist()
        banned = [*own.token_ids[: decoded.start].tolist(), *decoded.token_ids.tolist()]
        assert [token.token_id for token in pair.banned] == banned
        assert pair.first_difference == decoded.start and not any(token.is_banned for token in pair.banned)
        assert [token.is_banned for token in pair.free] == [token == so for token in own.token_ids.tolist()]
        assert (pair.free_correct, pair.banned_correct) == (place % 2 == 0, False)
        assert "".join(token.text for token in pair.free[:-1]) == tokenizer().decode(own.token_ids.tolist())
    second = knockout_pairs(run, so, page=1, size=3)
    assert second.pairs == page.pairs[3:6]


def test_a_token_that_was_not_banned_is_named(run: RunView):
    with pytest.raises(RocktokensError, match=r"token 5 was not banned in .*: run `rocktokens knockout --id 5`"):
        knockout_pairs(run, 5)


def test_pairs_that_were_not_kept_are_none(path: Path, tmp_path: Path):

    copy = RunDir(shutil.copytree(path, tmp_path / "copy"))
    copy.drop([entry.path for entry in copy.files("knockout/")])
    page = knockout_pairs(RunView.open(copy.path), rock_ids()[0])
    assert (page.total, page.pairs, page.knockout.verdict) == (0, (), "pillar")


# Live


def test_live_follows_the_log(path: Path, tmp_path: Path):

    copy = shutil.copytree(path, tmp_path / "copy")
    run = RunView.open(copy)
    view = live(run)
    assert (view.run, view.step, view.max_steps, view.rocks) == ("copy", 2, 40, ())
    kl = {"name": "kl", "unit": "nats", "teacher": "", "steps": (0, 1, 2), "values": (1, 1 / 2, 1 / 3)}
    assert [asdict(curve) for curve in view.curves] == [kl]
    so, line_break, seven = rock_ids()
    with (copy / "logs.jsonl").open("a", encoding="utf-8") as log:
        log.write(log_line(3, kl=0.2, online_frozen=[so, seven], online_rocks=2))
        log.write(log_line(4, online_frozen=[line_break], online_tried=[seven], online_rocks=3))
        log.write('{"step": 5, "kl"')
    view = live(run)
    assert [(rock.text, rock.since) for rock in view.rocks] == [("So", 3), ("\n", 4)]
    assert view.step == 4 and {curve.name: curve.values for curve in view.curves} == {
        "kl": (1, 1 / 2, 1 / 3, 0.2, None),
        "online_rocks": (None, None, None, 2, 3),
    }


def test_curves_of_the_kl_say_what_the_teacher_gave(path: Path, tmp_path: Path):
    """By the config that the run trains with."""
    run = RunDir(shutil.copytree(path, tmp_path / "copy"))
    with run.lock():
        run.commit_text("config.toml", '[teacher]\nengine = "vllm"\nvalues = "top_k"\nurl = "http://127.0.0.1:9"\n')
    run.logs.write_text(log_line(0, kl=0.5, loss=0.5, grad_norm=1.0, entropy_student=0.1), encoding="utf-8")
    label = " (teacher: top-20 + tail)"
    said = {curve.name: curve.teacher for curve in live(RunView.open(run.path)).curves}
    assert said == {"kl": label, "loss": label, "grad_norm": label, "entropy_student": ""}


def test_long_curves_are_thinned_to_their_ends(path: Path, tmp_path: Path):

    copy = shutil.copytree(path, tmp_path / "copy")
    (copy / "logs.jsonl").write_text("".join(log_line(step, kl=step) for step in range(7001)), encoding="utf-8")
    [curve] = live(RunView.open(copy)).curves
    gaps = np.diff(curve.steps)
    assert (len(curve.steps), curve.steps[0], curve.steps[-1]) == (MAX_POINTS, 0, 7000)
    assert curve.values == curve.steps and gaps.max() - gaps.min() <= 1


def test_a_step_that_is_no_number_is_left_out(path: Path, tmp_path: Path):
    copy = shutil.copytree(path, tmp_path / "copy")
    (copy / "logs.jsonl").write_text('{"step": true, "kl": 1.0}\n' + log_line(1, kl=0.5), encoding="utf-8")
    view = live(RunView.open(copy))
    assert view.step == 1 and [curve.steps for curve in view.curves] == [(1,)]
