"""The sweep against the plain way of doing it, on the embedded student: every rollout, every verdict, every resume."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from rocktokens.config import WordmathTask
from rocktokens.errors import RocktokensError
from rocktokens.knockout import journal as journal_module
from rocktokens.knockout.journal import Decoded, Journal, RunJournal
from rocktokens.knockout.outcomes import NOTHING
from rocktokens.knockout.records import Ban, BanKey, KnockoutSweep
from rocktokens.knockout.sweep import SweepSettings, knockout_sweep
from rocktokens.knockout.verdicts import VerdictRule, paired_effects, verdict
from rocktokens.models.load import load_model
from rocktokens.rollouts.encode import Sampling, encode_prompt
from rocktokens.rollouts.sampler import Completion, SampleRequest, TransformersSampler
from rocktokens.rollouts.slots import fits
from rocktokens.run_dir import RunDir
from rocktokens.tasks import make_task
from rocktokens.types import Prompt

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="depends on how the library rounds")
STUDENT = load_model("pebbles-student", device="cpu")
TASK = make_task(WordmathTask(split="test"))
PROMPTS = TASK.prompts(50, 5)
SAMPLER = TransformersSampler(STUDENT.model, STUDENT.eos_ids, STUDENT.pad_id, threads=1)
SAMPLING: dict[str, Any] = {"max_new_tokens": 100, "seed": 3}
PLAIN: dict[str, Any] = {"matched": 0, "never": 0}


def token_id(text: str) -> int:
    [only] = STUDENT.tokenizer(text, add_special_tokens=False)["input_ids"]
    return only


def naive_rollouts(ban: int | Ban, temperature: float, num_samples: int = 1) -> list[np.ndarray]:
    """The plain sweep: one ban, every prompt, from its start."""
    [rollouts] = naive_sweep([ban], temperature, num_samples)
    return rollouts


def naive_sweep(bans: Sequence[int | Ban], temperature: float, num_samples: int = 1) -> list[list[np.ndarray]]:
    """The same for several bans, whose rows are decoded side by side: no batch ends half empty but the last."""
    keys = [ban.key if isinstance(ban, Ban) else BanKey((ban,)) for ban in bans]
    encoded = [(prompt.id, encode_prompt(STUDENT.tokenizer, prompt, True, 512)) for prompt in PROMPTS]
    requests = [
        SampleRequest(*own, sample, *map(frozenset, key))
        for key in keys
        for own in encoded
        for sample in range(num_samples)
    ]
    completions = SAMPLER.sample(requests, temperature=temperature, **SAMPLING)
    rows, each = [own.token_ids for own in completions], len(PROMPTS) * num_samples
    return [rows[first : first + each] for first in range(0, len(rows), each)]


def grade(prompt: Prompt, token_ids: np.ndarray) -> bool:
    return TASK.grade(prompt, STUDENT.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))


def sweep(bans, journal=None, temperature=1.0, prompts=PROMPTS, **settings) -> KnockoutSweep:
    sampling, own = Sampling(temperature, **SAMPLING), SweepSettings(**{**PLAIN, **settings})
    return knockout_sweep(
        SAMPLER, STUDENT.tokenizer, TASK, prompts, bans, sampling=sampling, settings=own, journal=journal
    )


def commonest(journal: Journal, count: int) -> list[int]:
    ids, counts = np.unique(np.concatenate([own.token_ids for own in journal.free() or []]), return_counts=True)
    ordered = ids[np.argsort(-counts, kind="stable")].tolist()
    return [token for token in ordered if token not in STUDENT.eos_ids][:count]


@pytest.fixture(scope="module")
def free() -> dict[float, Journal]:
    """The free rollouts, greedy and sampled, in journals that hold nothing else but their repetition."""
    journals = {temperature: Journal() for temperature in (0.0, 1.0)}
    for temperature, journal in journals.items():
        sweep([], journal, temperature=temperature)
    return journals


@needs_mkl
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_rollout_and_verdict_is_that_of_the_full_sweep(free, temperature):
    journal = free[temperature]
    tokens = list(dict.fromkeys([*commonest(journal, 22), *commonest(free[1.0], 40)]))[:22]
    rollouts = journal.free() or []
    found = sweep(tokens, journal, temperature=temperature)
    free_right = np.array([grade(prompt, own.token_ids) for prompt, own in zip(PROMPTS, rollouts, strict=True)])
    assert (len(tokens), len(PROMPTS)) == (22, 50)
    differences, reused = [], 0
    for token, naive in zip(tokens, naive_sweep(tokens, temperature), strict=True):
        for place, (whole, rollout) in enumerate(zip(naive, rollouts, strict=True)):
            own = journal.finished.get((BanKey((token,)), place))
            reused += own is None
            ours = rollout.token_ids if own is None else [*rollout.token_ids[: own.start], *own.token_ids]
            assert np.array_equal(ours, whole), (token, place)
        right = [grade(prompt, whole) for prompt, whole in zip(PROMPTS, naive, strict=True)]
        differences.append(np.array(right).astype(int) - free_right)
    assert 100 < reused < 1000
    effects = paired_effects(np.array(differences), 1, VerdictRule(seed=3))
    for knockout, effect in zip(found.knockouts, effects, strict=True):
        assert (knockout.delta, knockout.interval, knockout.p) == (effect.delta, effect.interval, effect.p)
        assert knockout.verdict == verdict(effect.delta, effect.interval, VerdictRule(seed=3))
    assert found.noise.differing == 0
    assert len({knockout.verdict for knockout in found.knockouts}) > 1


@needs_mkl
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_rollout_of_a_ban_with_alternatives_is_that_of_decoding_it_from_the_prompt(free, temperature):
    def ban(texts: str, alternatives: str) -> Ban:
        ids, others = (tuple(sorted(map(token_id, own.split(" ")))) for own in (texts, alternatives))
        return Ban(ids, texts, alternatives=others)

    bans = [ban("\n", "\n\n"), ban("So Now", "Wait"), ban("1 2 3", "4 5")]
    journal = Journal()
    rollouts = free[temperature].free() or []
    journal.keep_free(rollouts)
    found = sweep([*bans, bans[0]], journal, temperature=temperature)
    assert [own.ban for own in found.knockouts] == bans
    kinds = set()
    for ban, naive in zip(bans, naive_sweep(bans, temperature), strict=True):
        for place, (whole, rollout) in enumerate(zip(naive, rollouts, strict=True)):
            own = journal.finished.get((ban.key, place))
            assert (own is None) == set(ban.ids).isdisjoint(rollout.token_ids.tolist())
            ours = rollout.token_ids if own is None else np.concatenate([rollout.token_ids[: own.start], own.token_ids])
            assert np.array_equal(ours, whole), (ban.name, place)
            if own is not None and ban.alternatives:
                acts_at_once = int(own.token_ids[0]) not in ban.ids
                is_same = np.array_equal(whole, rollout.token_ids)
                kinds.add("at once" if acts_at_once else "never" if is_same else "later")
    assert {"at once", "later"} <= kinds
    assert found.noise.differing == 0


@needs_mkl
def test_a_ban_whose_alternatives_are_never_likely_changes_no_answer(free):
    counts = np.bincount(
        np.concatenate([own.token_ids for own in free[1.0].free() or []]), minlength=SAMPLER.vocab_size
    )
    unlikely = tuple(np.flatnonzero(counts == 0)[-15:].tolist())
    needed = token_id(" answer")
    never, everywhere = sweep([Ban((needed,), "never", alternatives=unlikely), needed], free[1.0]).knockouts
    assert (never.delta, never.changes.lost, never.changes.n_rollouts) == (0.0, [], 50)
    assert never.changes.replacements == [(needed, " answer", 1.0)]
    assert everywhere.verdict == "pillar"


@needs_mkl
def test_several_samples_are_paired_by_prompt_and_sample(free):
    journal = Journal()
    [token] = commonest(free[1.0], 12)[11:]
    [knockout] = sweep([token], journal, temperature=1.0, num_samples=3).knockouts
    naive = naive_rollouts(token, 1.0, num_samples=3)
    rollouts = journal.free() or []
    assert len(rollouts) == len(naive) == 150
    assert any(not np.array_equal(rollouts[0].token_ids, other.token_ids) for other in rollouts[1:3])
    places = range(len(naive))
    change = [grade(PROMPTS[i // 3], naive[i]) - grade(PROMPTS[i // 3], rollouts[i].token_ids) for i in places]
    assert knockout.delta == pytest.approx(np.mean(change), abs=1e-12)
    assert {(rollouts[i].prompt_id, rollouts[i].sample) for i in places if change[i] < 0} == set(knockout.changes.lost)
    assert {(rollouts[i].prompt_id, rollouts[i].sample) for i in places if change[i] > 0} == set(
        knockout.changes.gained
    )


@needs_mkl
def test_a_set_is_banned_at_once(free):
    digits = tuple(sorted(token_id(str(digit)) for digit in range(10)))
    journal = free[1.0]
    [knockout] = sweep([digits], journal, temperature=1.0).knockouts
    for own in (own for (banned, _), own in journal.finished.items() if banned == BanKey(digits)):
        assert not set(own.token_ids.tolist()) & set(digits)
    assert (knockout.ban.ids, knockout.verdict) == (digits, "pillar")
    assert knockout.delta == -sweep([], journal, temperature=1.0).baseline.accuracy


@needs_mkl
def test_a_token_the_answer_needs_is_a_pillar_and_placebos_are_beside_it(free):
    found = sweep([token_id(" answer")], free[1.0], temperature=1.0, matched=5, never=7)
    [needed] = found.of_role("tested")
    assert (needed.verdict, needed.changes.n_rollouts) == ("pillar", 50)
    assert needed.q is not None
    assert needed.q < 1e-6
    counts = np.bincount(np.concatenate([own.token_ids for own in free[1.0].free() or []]))
    for placebo in found.of_role("matched"):
        assert abs(counts[placebo.ban.ids[0]] - 50) <= 0.25 * 50
        assert placebo.ban.beside == needed.ban.ids[0]
    assert len(found.of_role("matched")) >= 1
    assert len(found.of_role("never")) == 7
    for placebo in found.of_role("never"):
        assert (placebo.delta, placebo.p) == (0.0, 1.0)
        assert placebo.interval == pytest.approx((-0.0713476, 0.0713476), abs=1e-6)  # z²/(50 + z²)
        assert (placebo.verdict, placebo.changes.n_rollouts) == ("undecided", 0)  # of 50 prompts
        assert placebo.ban.ids[0] >= len(counts) or counts[placebo.ban.ids[0]] == 0


@needs_mkl
def test_curtailed_verdicts_are_the_exact_ones_for_fewer_tokens(free):
    tokens = commonest(free[1.0], 14)
    exact, curtailed = (sweep(tokens, free[1.0], temperature=1.0, mode=mode) for mode in ("exact", "curtailed"))
    assert [own.verdict for own in curtailed.knockouts] == [own.verdict for own in exact.knockouts]
    stopped = [own for own in curtailed.knockouts if own.stopped == "curtailed"]
    assert len(stopped) >= 5
    assert all(own.delta is None and own.n_looked < len(PROMPTS) for own in stopped)
    assert curtailed.cost.decoded_tokens < 0.9 * exact.cost.decoded_tokens


@needs_mkl
def test_more_tokens_than_before_decode_only_the_new_ones(free, monkeypatch):
    journal = Journal()
    journal.keep_free(free[1.0].free() or [])
    first, second = commonest(free[1.0], 8)[:5], commonest(free[1.0], 8)
    sweep(first, journal, temperature=1.0)
    before = set(journal.finished)
    added: list[tuple] = []
    monkeypatch.setattr(journal, "add", lambda key, own: (added.append(key), Journal.add(journal, key, own)))
    grown = sweep(second, journal, temperature=1.0)
    assert added
    assert not before & set(added)
    assert {banned for banned, _ in added} == {BanKey((token,)) for token in second[5:]}
    assert grown == sweep(second, temperature=1.0)


def interrupted(run: RunDir, tokens: list[int], after: int, monkeypatch) -> None:
    """A sweep that dies when it has decoded so many continuations; every one of them is a part of its own."""
    monkeypatch.setattr(journal_module, "LEAST_TOKENS", 0)
    monkeypatch.setattr(journal_module, "SHARE_PER_PART", 0.0)
    journal, count = RunJournal(run, "here"), 0
    add = journal.add

    def dying(key, own) -> None:
        nonlocal count
        if count == after:
            raise KeyboardInterrupt
        count += 1
        add(key, own)

    monkeypatch.setattr(journal, "add", dying)
    with pytest.raises(KeyboardInterrupt):
        sweep(tokens, journal, temperature=1.0)


@needs_mkl
def test_an_interrupted_sweep_goes_on_to_the_same_result(free, tmp_path, monkeypatch):
    tokens = commonest(free[1.0], 4)
    expected = sweep(tokens, temperature=1.0)
    run = RunDir(tmp_path)
    with run.lock():
        for after in (0, 3, 60):
            interrupted(run, tokens, after, monkeypatch)
        kept = RunJournal(run, "here").finished
        assert 60 <= len(kept) < 50 + expected.cost.jobs
        assert sweep(tokens, RunJournal(run, "here"), temperature=1.0) == expected
        assert len(RunJournal(run, "here").finished) == 50 + expected.cost.jobs
        assert not RunJournal(run, "elsewhere").finished
        assert RunJournal(run, "elsewhere").free() is None


@needs_mkl
def test_the_second_time_every_never_ban_is_used_from_anywhere_and_nothing_differs(free):
    """Seven bans share the 50 rollouts; 50 get one each."""
    rollouts = free[1.0].free() or []
    for never in (7, 50):
        journal = Journal()
        journal.keep_free(rollouts)
        found = sweep(commonest(free[1.0], 1), journal, temperature=1.0, never=never)
        idle = [knockout.ban.key for knockout in found.of_role("never")]
        again = {key: own for key, own in journal.finished.items() if key[0] in idle}
        assert sorted(place for _, place in again) == list(range(50))
        assert {banned for banned, _ in again} == set(idle)
        assert len(idle) == never
        starts = np.array([own.start / len(rollouts[place].token_ids) for (_, place), own in again.items()])
        assert np.histogram(starts, bins=[0, 0.25, 0.5, 0.75, 1])[0].min() > 3
        noise = found.noise
        assert noise.tokens == sum(len(own.token_ids) for own in again.values())
        assert noise.tokens == sum(len(rollouts[place].token_ids) - own.start for (_, place), own in again.items())
        assert (noise.rollouts, noise.differing, noise.flips, noise.delta) == (50, 0, 0, 0.0)
        assert noise.interval == (0.0, 0.0)
        deepest = {
            place: max(own.start for (_, at), own in journal.finished.items() if at == place) for _, place in again
        }
        assert found.cost.retraced_tokens == sum(deepest.values())
        assert found.cost.jobs == len(journal.finished) - 50


class TamperingSampler(TransformersSampler):
    """Changes the first token of everything it continues from every third rollout."""

    def branch(self, trunks, branches, *, on_done, **settings) -> None:
        def done(index: int, completion: Completion) -> None:
            token_ids = completion.token_ids.copy()
            if branches[index].trunk % 3 == 0:
                token_ids[0] = 9 if token_ids[0] != 9 else 10
            on_done(index, replace(completion, token_ids=token_ids))

        super().branch(trunks, branches, on_done=done, **settings)


def sliding_window_model() -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=SAMPLER.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, sliding_window=8,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


@needs_mkl
@pytest.mark.parametrize(("make", "differing"), [(TransformersSampler, 0), (TamperingSampler, 4)])
def test_a_model_whose_cache_cannot_be_refilled_is_compared_too(make, differing):
    """Four of ten rollouts have a place that is a multiple of three."""
    model = sliding_window_model()
    assert not fits(model)
    sampler = make(model, STUDENT.eos_ids, STUDENT.pad_id, threads=1)
    found = knockout_sweep(
        sampler, STUDENT.tokenizer, TASK, PROMPTS[:10], [], sampling=Sampling(1.0, 20, 3),
        settings=SweepSettings(matched=0, never=3),
    )  # fmt: skip
    assert (found.noise.rollouts, found.noise.differing) == (10, differing)
    assert found.noise.tokens > 50
    assert any("the engine is not exact" in warning for warning in found.warnings) == (differing > 0)


def test_an_engine_that_is_not_exact_is_found_out_and_widens_the_intervals(free):
    """A second free run in which the first ten rollouts end at once."""
    journal = Journal()
    rollouts = free[1.0].free() or []
    journal.keep_free(rollouts)
    for place in range(50):
        own = free[1.0].finished[NOTHING, place]
        journal.add((NOTHING, place), Decoded(0, own.token_ids[-1:], True) if place < 10 else own)
    [token] = commonest(free[1.0], 25)[24:]
    noisy, exact = (sweep([token], kept, temperature=1.0) for kept in (journal, free[1.0]))
    assert noisy.noise.differing == 10
    right = [grade(prompt, own.token_ids) for prompt, own in zip(PROMPTS, rollouts, strict=True)]
    assert noisy.noise.flips == sum(right[:10]) > 2
    assert any("not exact: decoded a second time, 10 of 50" in warning for warning in noisy.warnings)
    low, high = noisy.noise.interval
    assert low < 0
    before, after = exact.knockouts[0].interval, noisy.knockouts[0].interval
    assert before is not None
    assert after == pytest.approx((before[0] + low, before[1] + max(0, high)))


@pytest.mark.parametrize(
    ("bans", "message"),
    [
        ([min(STUDENT.eos_ids)], "is an end token"),
        ([{7, 99_999}], "id 99999 is outside the vocabulary of 1301"),
        ([Ban((), "nothing")], "ban 'nothing' holds no ids"),
        ([-1], "id -1 is outside the vocabulary"),
    ],
)
def test_impossible_bans_are_refused_before_anything_is_decoded(bans, message):
    journal = Journal()
    with pytest.raises(RocktokensError, match=message):
        sweep(bans, journal)
    assert journal.free() is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"mode": "foo"}, "mode is 'foo': use one of exact, curtailed, sequential"),
        ({"num_samples": 0}, "num_samples is 0: "),
        ({"temperature": -1}, "temperature is -1: "),
        ({"temperature": float("nan")}, "temperature is nan: "),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_decoded(setting, message):
    journal = Journal()
    with pytest.raises(RocktokensError) as refused:
        sweep([9], journal, **setting)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
    assert journal.free() is None


@needs_mkl
def test_a_ban_that_is_given_twice_counts_once_and_placebos_say_whom_they_stand_beside(free):
    one, two = commonest(free[1.0], 20)[18:]
    bans = [two, one, two, np.int64(one), {one}, Ban((two,), "again"), {one, two}, (two, one)]
    found = sweep(bans, free[1.0], temperature=1.0, matched=5, never=2)
    assert [own.ban.ids for own in found.of_role("tested")] == [(two,), (one,), tuple(sorted([one, two]))]
    assert sum((found.counts["tested"].method or {}).values()) == 3
    counts = np.bincount(np.concatenate([own.token_ids for own in free[1.0].free() or []]))
    pairs = {own.ban.beside: own.ban.ids[0] for own in found.of_role("matched")}
    assert pairs.keys() == {one, two}
    for rock, placebo in pairs.items():
        assert rock != placebo
        assert abs(counts[placebo] - counts[rock]) <= 0.25 * counts[rock]
    assert {own.ban.beside for role in ("tested", "never") for own in found.of_role(role)} == {None}


def test_prompts_that_cannot_be_graded_or_come_twice_are_refused():
    for prompts, message in (
        ([replace(PROMPTS[0], answer=None)], "has no answer"),
        ([], "has no prompts"),
        ([PROMPTS[0], PROMPTS[0]], "is there more than once"),
    ):
        with pytest.raises(RocktokensError, match=message):
            knockout_sweep(SAMPLER, STUDENT.tokenizer, TASK, prompts, [9])


@pytest.mark.parametrize(("answer", "message"), [("no number", "wrong, so no ban can lose"), (None, None)])
def test_a_baseline_without_room_is_warned_of(answer, message):
    prompts = [replace(prompt, answer=answer or prompt.answer) for prompt in PROMPTS[:6]]
    found = sweep([], prompts=prompts)
    without_power = [own for own in found.warnings if "no power in that direction" in own]
    assert len(without_power) == (message is not None)
    assert message is None or message in without_power[0]
