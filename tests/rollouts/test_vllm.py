"""The sampler over a vLLM server: the same rollouts as in memory, weights that follow, and every way to fail."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from tiny_sampling import EOS_IDS, PAD, VOCAB, make_llama, make_requests, same_completion

from fake_vllm import FakeVllm, MoveDirectionality, Params, Update, dying_at, plug_in, serving
from rocktokens.errors import RocktokensError
from rocktokens.models.plain_weights import plain_weights
from rocktokens.rollouts import vllm
from rocktokens.rollouts.noise import stream_key
from rocktokens.rollouts.noisy_choice import XARG, NoisyChoice
from rocktokens.rollouts.sampler import Branch, Completion, SampleRequest, TransformersSampler
from rocktokens.rollouts.vllm import VllmSampler
from rocktokens.rollouts.vllm_client import VllmClient
from rocktokens.types import Rollout

REQUESTS = [
    *make_requests(6, longest=12),
    SampleRequest("banned", np.array([5, 6], np.int32), 2, frozenset({8, 50})),
    SampleRequest("conditional", np.array([7], np.int32), 1, frozenset({9, 20, 31}), frozenset({11, 12})),
]
HOW: dict[str, Any] = {"max_new_tokens": 12, "seed": 7}


@pytest.fixture
def student() -> torch.nn.Module:
    return make_llama()


@pytest.fixture
def fake(student: torch.nn.Module) -> FakeVllm:
    """A server that was started with other weights than the student's."""
    return FakeVllm(make_llama(seed=1))


@pytest.fixture
def url(fake: FakeVllm) -> Iterator[str]:
    with serving(fake) as url:
        yield url


def in_memory(model: Any) -> TransformersSampler:
    return TransformersSampler(model, EOS_IDS, PAD, batch_size=4)


def served(url: str, model: Any, folder: Path, timeout: float = 60, **settings: Any) -> VllmSampler:
    given = {"noise": "plugin", "max_gap": 1e-3, "batch_size": 4, **settings}
    client = VllmClient(url, timeout, 4)
    return VllmSampler(client, folder, model=model, eos_ids=EOS_IDS, pad_id=PAD, **given)


def all_equal(left: list[Completion], right: list[Completion]) -> bool:
    return len(left) == len(right) and all(map(same_completion, left, right))


# What it writes


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_rollouts_are_those_of_the_model_in_memory(url: str, student: Any, tmp_path: Path, temperature: float):
    ended: list[int] = []
    own = served(url, student, tmp_path).sample(REQUESTS, temperature=temperature, on_done=ended.append, **HOW)
    assert all_equal(own, in_memory(student).sample(REQUESTS, temperature=temperature, **HOW))
    assert sum(ended) == len(REQUESTS)
    assert not frozenset({8, 50}).intersection(own[6].token_ids.tolist())


def test_weights_follow_the_student_and_are_sent_only_when_they_change(
    url: str, fake: FakeVllm, student: Any, tmp_path: Path
):
    sampler = served(url, student, tmp_path)
    first = sampler.sample(REQUESTS, temperature=1.0, **HOW)
    assert all_equal(first, sampler.sample(REQUESTS, temperature=1.0, **HOW))
    assert fake.asked.count("/collective_rpc") == 1
    with torch.no_grad():
        student.lm_head.weight.mul_(1.01)
        student.model.layers[0].mlp.up_proj.weight.add_(0.01)
    changed = sampler.sample(REQUESTS, temperature=1.0, **HOW)
    assert fake.asked.count("/collective_rpc") == 2
    assert all_equal(changed, in_memory(student).sample(REQUESTS, temperature=1.0, **HOW))
    assert not all_equal(changed, first)
    with torch.no_grad():
        student.lm_head.weight.mul_(1 + 1e-6)  # less than the canary notices
    sampler.sample(REQUESTS, temperature=1.0, **HOW)
    assert fake.asked.count("/collective_rpc") == 3


def test_branches_are_those_of_the_model_in_memory(url: str, student: Any, tmp_path: Path):
    sampler, local = served(url, student, tmp_path), in_memory(student)
    written = local.sample(REQUESTS[:6], temperature=1.0, **HOW)
    trunks = [
        Rollout(index, own.prompt_id, own.sample, own.prompt_ids, done.token_ids, done.logprobs, 0, done.finished)
        for index, (own, done) in enumerate(zip(REQUESTS[:6], written, strict=True))
    ]
    branches = [
        Branch(index, start, frozenset({int(trunk.token_ids[start])}), alternatives, length)
        for index, trunk in enumerate(trunks)
        for start, alternatives, length in ((0, frozenset(), None), (1, frozenset(), 3), (1, frozenset({4, 5}), None))
        if start < len(trunk.token_ids) and int(trunk.token_ids[start]) not in EOS_IDS
    ]
    assert len(branches) > 8
    found: list[dict[int, Completion]] = [{}, {}]
    for own, into in zip((sampler, local), found, strict=True):
        own.branch(trunks, branches, temperature=1.0, on_done=into.__setitem__, **HOW)
    assert all_equal(*([into[index] for index in range(len(branches))] for into in found))


def test_a_tied_head_and_merged_adapters_arrive(tmp_path: Path):
    tied = make_llama(tie_word_embeddings=True)
    adapted = get_peft_model(copy.deepcopy(tied), LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    merged = copy.deepcopy(adapted).merge_and_unload()  # pyright: ignore[reportCallIssue]
    weights = plain_weights(adapted)
    assert weights.keys() == merged.state_dict().keys()
    for name, own in merged.state_dict().items():
        torch.testing.assert_close(weights[name], own, rtol=0, atol=1e-6)
    fake = FakeVllm(make_llama(seed=1, tie_word_embeddings=False))
    with serving(fake) as url:
        own = served(url, adapted, tmp_path).sample(REQUESTS, temperature=1.0, **HOW)
    assert all_equal(own, in_memory(merged).sample(REQUESTS, temperature=1.0, **HOW))


# The plug-in in a batch


def test_rows_of_a_batch_enter_leave_and_change_places():
    processor = plug_in().RockNoise(None, "cpu", False)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    wanted = [NoisyChoice(stream_key(7, name, 0), tau, 2, (4,), ()) for name, tau in (("a", 1.0), ("b", 0.5))]
    added = [(place, Params({XARG: own.to_json()}), [], []) for place, own in enumerate(wanted)]

    def chosen(update: Update | None = None) -> list[int]:
        processor.update_state(update)
        rows = processor.apply(torch.stack([logits] * 3))
        return [int(row.argmax()) if torch.isinf(row).any() else -1 for row in rows]

    a, b, nothing = chosen(Update([*added, (2, Params(None), [], [])]))
    assert a >= 0 and b >= 0 and nothing == -1 and a != b
    assert chosen(Update(moved=[(0, 1, MoveDirectionality.SWAP)])) == [b, a, -1]
    assert chosen(Update(moved=[(1, 2, MoveDirectionality.UNIDIRECTIONAL)])) == [b, -1, a]
    assert chosen(Update(removed=[0])) == [-1, -1, a]
    added[0][3].append(6)  # a token was written: the noise of the next position
    assert chosen()[2] != a


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": 1}', '{"key": [], "banned": 3}'])
def test_what_nobody_wrote_is_a_value_error(text: str):
    with pytest.raises(ValueError):
        NoisyChoice.parse(text)


def test_what_is_asked_survives_json():
    own = NoisyChoice(-(2**63) + 1, 0.7, 3, (1, 2), (5,))
    assert NoisyChoice.parse(own.to_json()) == own


# Servers that fail


def refused(sampler: VllmSampler, requests: list[SampleRequest] | None = None) -> str:
    """The one sentence that sampling ends with."""
    with pytest.raises(RocktokensError) as error:
        sampler.sample(requests or REQUESTS, temperature=1.0, **HOW)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def times(count: int, path: str, status: int, content: bytes = b""):
    """A fault that happens this often; where it is about completions, to those that are rollouts."""
    left = [count]

    def fault(fake: FakeVllm, asked: str, said: dict[str, Any]) -> tuple[int, bytes] | None:
        if asked != path or (path == "/v1/completions" and "logprobs" not in said) or left[0] == 0:
            return None
        left[0] -= 1
        return status, content

    return fault


@pytest.mark.parametrize(
    ("status", "content"), [(429, b""), (503, b"later"), (200, b'{"choices": [{"tok'), (500, b"oh"), (0, b"")]
)
def test_what_passes_costs_nothing(url: str, fake: FakeVllm, student: Any, tmp_path: Path, status: int, content: bytes):
    sampler, ended = served(url, student, tmp_path), list[int]()
    fake.faults.append(times(2, "/v1/completions", status, content))
    own = sampler.sample(REQUESTS, temperature=1.0, on_done=ended.append, **HOW)
    assert all_equal(own, in_memory(student).sample(REQUESTS, temperature=1.0, **HOW)) and sum(ended) == len(REQUESTS)


@pytest.mark.parametrize(
    ("status", "content", "sentence"),
    [
        (500, b'{"error": {"message": "engine is dead"}}', r"with 500 \(engine is dead\): start it again"),
        (200, b'{"choices": [', "that is no JSON: start it again"),
        (400, b'{"error": {"message": "too long"}}', r"with 400 \(too long\): serve the student of this run"),
        (200, b'{"choices": []}', "in another form"),
        (200, b'{"choices": [{"token_ids": ["x"]}]}', r"in another form \(choices.0.token_ids.0"),
        (200, b"[]", "in another form"),
    ],
)
def test_what_stays_wrong_is_one_sentence(
    url: str, fake: FakeVllm, student: Any, tmp_path: Path, status: int, content: bytes, sentence: str
):
    fake.faults.append(times(-1, "/v1/completions", status, content))
    said = refused(served(url, student, tmp_path))
    assert said.startswith(f"the vLLM server at {url} ")
    assert re.search(sentence, said), said


def test_nobody_there_is_one_sentence(student: Any, tmp_path: Path):
    assert "does not answer" in refused(served("http://127.0.0.1:9", student, tmp_path, timeout=0.2))


def test_an_answer_that_drips_is_given_up(url: str, fake: FakeVllm, student: Any, tmp_path: Path):
    fake.drips = True
    assert "does not answer" in refused(served(url, student, tmp_path, timeout=0.3))


def test_a_server_without_development_endpoints_is_told_apart(url: str, fake: FakeVllm, student: Any, tmp_path: Path):
    fake.faults.append(times(-1, "/collective_rpc", 404))
    assert "VLLM_SERVER_DEV_MODE=1" in refused(served(url, student, tmp_path))
    assert fake.asked[-1] == "/resume", "it is not left paused"


def choice(token_ids: list[int], logprobs: list[float] | None = None) -> bytes:
    own = [-0.5] * len(token_ids) if logprobs is None else logprobs
    return json.dumps({"choices": [{"token_ids": token_ids, "logprobs": {"token_logprobs": own}}]}).encode()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (choice([5, VOCAB]), f"id {VOCAB}, which is outside the vocabulary of {VOCAB}"),
        (choice([-1]), "id -1, which is outside"),
        (choice([5] * 13), "13 tokens where at most 12 were asked for"),
        (choice([]), "0 tokens"),
        (choice([8, 1]), "id 8, which is banned"),
        (choice([5, 6]), "stops without one"),
        (choice([1, 5, 1]), "goes on behind its end token"),
        (choice([5, 1], [-0.5]), "1 log-probabilities for 2 tokens"),
        (choice([5, 1], [float("nan"), 0.0]).replace(b"NaN", b"1e999"), "NaN or infinite"),
    ],
)
def test_answers_that_cannot_be_are_refused(
    url: str, fake: FakeVllm, student: Any, tmp_path: Path, content: bytes, sentence: str
):
    sampler = served(url, student, tmp_path)
    sampler.sample(REQUESTS[:1], temperature=1.0, **HOW)
    fake.faults.append(times(-1, "/v1/completions", 200, content))
    said = refused(sampler, [REQUESTS[6]])
    assert "prompt 'banned'" in said and sentence in said


# Servers with other weights


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_stay_are_refused(url: str, fake: FakeVllm, student: Any, tmp_path: Path, kept: str):
    fake.keeps = frozenset({kept})
    said = refused(served(url, student, tmp_path))
    assert "its log-probabilities differ by" in said and "untied copy" in said


def test_processes_that_wait_for_weights_are_told_that_these_cannot_be_written(
    url: str, student: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Safetensors says it by an error of its own."""
    told = list[Any]()
    monkeypatch.setattr(vllm, "_of_all", lambda own: told.append(own) or [own])
    monkeypatch.setattr(vllm, "write_atomically", lambda path, write: write(tmp_path / "gone" / path.name))
    with pytest.raises(SafetensorError, match="os error 2"):
        served(url, student, tmp_path / "sync").sample(REQUESTS, temperature=0.0, **HOW)
    assert isinstance(told[-1], SafetensorError)


def test_another_vocabulary_is_refused(student: Any, tmp_path: Path):
    fake = FakeVllm(make_llama(vocab_size=VOCAB + 3))
    fake.faults.append(times(-1, "/collective_rpc", 400, b'{"error": {"message": "size mismatch for lm_head"}}'))
    with serving(fake) as url:
        assert "size mismatch for lm_head" in refused(served(url, student, tmp_path))


def test_a_server_that_is_started_again_meanwhile_gets_its_weights_and_decodes_again(
    url: str, fake: FakeVllm, student: Any, tmp_path: Path
):
    """Without a word, between two requests: only the canary notices."""
    sampler, ended = served(url, student, tmp_path), list[int]()
    sampler.sample(REQUESTS, temperature=1.0, **HOW)
    restarts = [3]

    def restart(own: FakeVllm, path: str, said: dict[str, Any]) -> None:
        restarts[0] -= "vllm_xargs" in said
        if restarts[0] == 0:
            own.start_again()

    fake.faults.append(restart)
    own = sampler.sample(REQUESTS, temperature=1.0, on_done=ended.append, **HOW)
    assert restarts[0] < 0 and sum(ended) == len(REQUESTS)
    assert all_equal(own, in_memory(student).sample(REQUESTS, temperature=1.0, **HOW))


def test_a_server_that_dies_while_it_decodes_comes_back(url: str, fake: FakeVllm, student: Any, tmp_path: Path):
    fake.faults.append(dying_at(4))
    own = served(url, student, tmp_path).sample(REQUESTS, temperature=1.0, **HOW)
    assert fake.asked.count("/collective_rpc") == 2
    assert all_equal(own, in_memory(student).sample(REQUESTS, temperature=1.0, **HOW))


# Servers without the plug-in


def test_a_missing_plug_in_is_noticed(student: Any, tmp_path: Path):
    with serving(FakeVllm(student, has_plug_in=False)) as url:
        said = refused(served(url, student, tmp_path))
    assert "--logits-processors rocktokens.integrations.vllm_noise:RockNoise" in said


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_plug_in_that_is_missing_after_a_restart_is_noticed(
    url: str, fake: FakeVllm, student: Any, tmp_path: Path, factor: float
):
    """Between two steps; without it every answer would be greedy, also where the weights are right."""
    sampler = served(url, student, tmp_path)
    sampler.sample(REQUESTS[:1], temperature=1.0, **HOW)
    fake.start_again()
    fake.has_plug_in = False
    with torch.no_grad():
        student.lm_head.weight.mul_(factor)
    assert "does not draw with our noise" in refused(sampler)


def test_without_the_plug_in_the_server_draws_and_branches_are_refused(student: Any, tmp_path: Path):
    fake, asked = FakeVllm(student, has_plug_in=False), list[dict[str, Any]]()
    fake.faults.append(lambda own, path, said: asked.append(said))
    with serving(fake) as url:
        sampler = served(url, student, tmp_path, noise="server")
        done = sampler.sample([REQUESTS[0]], temperature=0.5, **HOW)
        trunk = Rollout(0, "prompt-0", 0, REQUESTS[0].prompt_ids, done[0].token_ids, done[0].logprobs, 0, True)
        with pytest.raises(RocktokensError, match=r'rollouts\.noise = "server" shares no random numbers'):
            branch = Branch(0, 0, frozenset({5}))
            sampler.branch([trunk], [branch], temperature=0.5, on_done=lambda *_: None, **HOW)
    [drawn] = [own for own in asked if "seed" in own]
    assert drawn["temperature"] == 0.5 and drawn["seed"] == stream_key(7, "prompt-0", 0) % 2**31
    assert "vllm_xargs" not in drawn
    assert (drawn["top_p"], drawn["top_k"], drawn["repetition_penalty"]) == (1.0, 0, 1.0), "not the model's own"


def test_a_head_wider_than_the_teachers_cannot_be_served(student: Any, tmp_path: Path):
    with pytest.raises(RocktokensError, match=f"{VOCAB} columns and shares 90 of them"):
        served("http://127.0.0.1:9", student, tmp_path, vocab_size=90)
