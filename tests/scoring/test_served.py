"""A teacher behind a server: the scores of the one in memory, and every way in which a server can be another."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fake_vllm import FakeVllm, Reply, pooled
from rocktokens.config import Config, parse_config
from rocktokens.errors import ConfigError, RocktokensError
from rocktokens.models.head import hidden_states, lm_head
from rocktokens.models.load import LoadedModel
from rocktokens.run_dir import RunDir
from rocktokens.scoring.batch import collate, response_states
from rocktokens.scoring.score import score_rollouts
from rocktokens.scoring.served import SERVED, ServedModel
from rocktokens.scoring.teachers import load_teacher, note_teacher
from rocktokens.types import Rollout

NAME = "pebbles-teacher"


def config_of(url: str, *overrides: str) -> Config:
    text = f"""
        [run]
        directory = "r"
        [models]
        student = "pebbles-student"
        teacher = "{NAME}"
        [teacher]
        engine = "vllm"
        url = "{url}"
        timeout = 5
    """
    return parse_config(text, list(overrides))


def make_rollouts(count: int = 7) -> list[Rollout]:
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 1300, (2, rng.integers(1, 30)), dtype=np.int32) for _ in range(count)]
    return [
        Rollout(index, f"p{index}", 0, prompt, response, np.zeros(len(response), np.float32), 0, True)
        for index, (prompt, response) in enumerate(ids)
    ]


ROLLOUTS = make_rollouts()


# What it gives


def test_states_are_those_of_the_model_in_memory(url: str, teacher: LoadedModel):
    served = load_teacher(config_of(url), "cpu")
    batch = collate(ROLLOUTS, pad_id=0, device="cpu")
    with torch.no_grad():
        expected = response_states(teacher.model, batch)
    torch.testing.assert_close(response_states(served.model, batch), expected, rtol=0, atol=1e-4)
    assert torch.equal(lm_head(served.model).weight_VD, lm_head(teacher.model).weight_VD)
    assert (served.eos_ids, served.name) == (teacher.eos_ids, NAME)
    assert served.context_length == 128, "what the server sees, not what the config says"


def test_states_of_several_batches_are_those_of_each(url: str):
    model: Any = load_teacher(config_of(url), "cpu").model
    batches = [collate(own, pad_id=0, device="cpu") for own in (ROLLOUTS[:3], ROLLOUTS[3:])]
    together = model.states_of(batches)
    assert all(torch.equal(own, model.states(batch)) for own, batch in zip(together, batches, strict=True))


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_scores_are_those_of_the_model_in_memory(
    url: str, student: LoadedModel, teacher: LoadedModel, dtype: str, most: float
):
    served = load_teacher(config_of(url, f"teacher.dtype={dtype}"), "cpu")
    found, expected = (score_rollouts(student, own, ROLLOUTS) for own in (served, teacher))
    for (name, own), (_, other) in zip(found.items(), expected.items(), strict=True):
        gap = float(np.abs(own - other).max())
        assert gap <= most, f"{name}: {gap}"
        if dtype == "bfloat16" and name in ("kl", "logp_teacher"):
            assert gap > 1e-4, "what was rounded shows"


def test_only_the_head_is_in_memory(url: str):
    parameters = dict(load_teacher(config_of(url), "cpu").model.named_parameters())
    assert [*parameters] == ["head.weight"] and not parameters["head.weight"].requires_grad


# Servers that fail


def broken_at(path: str, reply: Reply, times: int = -1) -> Callable[..., Reply | None]:
    left = [times]

    def fault(fake: FakeVllm, asked: str, said: dict[str, Any]) -> Reply | None:
        if asked != path or left[0] == 0:
            return None
        left[0] -= 1
        return reply

    return fault


def refused(url: str, *overrides: str) -> str:
    with pytest.raises(RocktokensError) as error:
        load_teacher(config_of(url, *overrides), "cpu")
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


STATES = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
WHOLE: Any = pooled(STATES, "float32")
SHORT: Reply = (200, WHOLE[1][:-3], WHOLE[2])


@pytest.mark.parametrize("reply", [(429, b""), (503, b"later"), (500, b"oh"), (0, b""), SHORT])
def test_what_passes_costs_nothing(url: str, fake: FakeVllm, teacher: LoadedModel, reply: Reply):
    served = load_teacher(config_of(url), "cpu")
    batch = collate(ROLLOUTS, pad_id=0, device="cpu")
    expected = response_states(served.model, batch)
    fake.faults.append(broken_at("/pooling", reply, times=2))
    if reply is SHORT:  # of a sequence of its length
        ids = list(range(10, 74))
        with torch.no_grad():
            own = hidden_states(teacher.model, torch.tensor([ids]))[0]
        model: Any = served.model
        torch.testing.assert_close(model._persist(ids), own, rtol=0, atol=1e-4)
    else:
        assert torch.equal(response_states(served.model, batch), expected)
    assert fake.faults[-1](fake, "/pooling", {}) is None, "it has failed as often as it was to"


@pytest.mark.parametrize(
    ("path", "reply", "sentence"),
    [
        (
            "/pooling",
            (500, b'{"error": {"message": "engine is dead"}}'),
            r"\(engine is dead\): start it again, or raise",
        ),
        ("/pooling", SHORT, r"that is not whole: start it again, or raise teacher\.timeout"),
        ("/pooling", (429, b""), r"was busy for 1 seconds: start it again"),
        ("/pooling", (404, b""), "start vLLM with --runner pooling --convert embed, and name no path in teacher.url"),
        ("/pooling", (400, b"too long"), "serve the teacher of this run, with room for the student's prompts"),
        ("/pooling", (200, WHOLE[1]), r"in another form \(data: field required\): serve the teacher with vLLM"),
        ("/pooling", pooled(STATES, "float32", shape=[64]), r"in another form \(data\.0\.shape"),
        ("/pooling", pooled(STATES[:1], "float32"), r"states of 1 tokens for 64: start it with --pooler-config"),
        ("/pooling", pooled(STATES[:, :192], "float32"), "states of width 192 for a head of width 256"),
        ("/pooling", pooled(STATES, "bfloat16"), "sends little-endian bfloat16 numbers"),
        ("/pooling", pooled(STATES, "float32", endianness="big"), "sends big-endian float32 numbers"),
        ("/pooling", pooled(STATES.clone().fill_(torch.nan), "float32"), "NaN or infinite"),
        ("/pooling", pooled(STATES, "float32"), r"final norm of models\.teacher cannot have made"),
        ("/v1/models", (200, b'{"data": [{"id": "other"}]}'), "has 'other', not 'pebbles-teacher'"),
        ("/tokenize", (200, b'{"tokens": [1, 2]}'), r"splits .* as \[1, 2\], the tokenizer of models\.teacher"),
        ("/tokenize", (200, b"[]"), "answers /tokenize in another form"),
    ],
)
def test_servers_that_are_not_the_teachers_are_refused(
    url: str, fake: FakeVllm, path: str, reply: Reply, sentence: str
):
    fake.faults.append(broken_at(path, reply))
    said = refused(url, "teacher.timeout=1")
    assert said.startswith(f"the vLLM server at {url} ") and re.search(sentence, said), said


def test_nobody_there_is_one_sentence():
    assert "does not answer" in refused("http://127.0.0.1:9", "teacher.timeout=0.2")


def test_what_is_no_address_is_one_sentence():
    assert refused("http://127.0.0.1:port").startswith("teacher.url = 'http://127.0.0.1:port' is no address (")


def test_an_answer_that_drips_is_given_up(url: str, fake: FakeVllm):
    fake.drips = True
    assert "does not answer" in refused(url, "teacher.timeout=0.3")


# Mix-ups that a server says nothing of


def test_states_of_length_one_are_refused(url: str, fake: FakeVllm):
    def activated(own: FakeVllm, path: str, said: dict[str, Any]) -> Reply | None:
        return own._pool({**said, "use_activation": True}) if path == "/pooling" else None

    fake.faults.append(activated)
    assert '"use_activation": false' in refused(url)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_width_that_is_sent_as_whole_is_refused(url: str, fake: FakeVllm, half: torch.dtype):
    def rounded(own: FakeVllm, path: str, said: dict[str, Any]) -> Reply | None:
        if path != "/pooling":
            return None
        h_LE = own.model.base_model(input_ids=torch.tensor([said["input"]])).last_hidden_state[0]
        return pooled(h_LE.detach().to(half).float(), said["embed_dtype"])

    fake.faults.append(rounded)
    assert f"computes in {str(half)[6:]}, but teacher.dtype is 'float32'" in refused(url)
    load_teacher(config_of(url, "teacher.dtype=bfloat16"), "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_teacher_that_was_trained_further_is_refused(url: str, fake: FakeVllm, dtype: str):
    """By its final norm alone, moved by one percent."""
    norm = fake.model.model.norm.weight
    with torch.no_grad():
        norm.mul_(1 + 0.02 * torch.rand(norm.shape, generator=torch.Generator().manual_seed(0)))
    assert "final norm of models.teacher cannot have made" in refused(url, f"teacher.dtype={dtype}")


def other_layers(fake: FakeVllm) -> None:
    """Another model with the same norm and head."""
    with torch.no_grad():
        fake.model.model.layers[1].mlp.down_proj.weight.mul_(1.01)


def test_a_server_that_comes_back_as_another_is_refused(url: str, fake: FakeVllm):
    served = load_teacher(config_of(url), "cpu")
    batch = collate(ROLLOUTS, pad_id=0, device="cpu")
    response_states(served.model, batch)
    other_layers(fake)
    with pytest.raises(RocktokensError, match=r"is not what it was at first: log-probabilities .* teacher\.max_gap"):
        response_states(served.model, batch)


def test_a_run_knows_its_teacher_again(url: str, fake: FakeVllm, tmp_path: Path):
    run, config = RunDir(tmp_path / "run"), config_of(url)
    with run.lock():
        run.update_manifest()
        note_teacher(load_teacher(config, "cpu").model, run, config)
        before = run.manifest()[SERVED]
        note_teacher(load_teacher(config, "cpu").model, run, config)
        assert run.manifest()[SERVED] == before and [*before] == ["pebbles-teacher float32, head in float32"]
        halved = config_of(url, "models.dtype=bfloat16")  # whose head says other log-probabilities of the same states
        note_teacher(load_teacher(halved, "cpu").model, run, halved)
        assert len(run.manifest()[SERVED]) == 2
        other_layers(fake)
        model = load_teacher(config, "cpu").model
        with pytest.raises(RocktokensError, match=f"is not what the run {run.path} used before"):
            note_teacher(model, run, config)


@pytest.mark.parametrize("noted", [[0.5], "text", {"a": 1}, [[0.5, 1.0]], [None]])
def test_damaged_notes_of_a_teacher_are_refused_in_a_sentence(url: str, tmp_path: Path, noted: object):
    run, config = RunDir(tmp_path / "run"), config_of(url)
    model = load_teacher(config, "cpu").model
    with run.lock():
        run.update_manifest(**{SERVED: {"pebbles-teacher float32, head in float32": noted}})
        with pytest.raises(RocktokensError, match=r"manifest\.json has served_teachers that are no log-probabilities"):
            note_teacher(model, run, config)


def test_another_name_is_allowed_where_the_config_says_so(url: str, fake: FakeVllm):
    fake.name = "mine"
    assert "teacher.model" in refused(url)
    model = load_teacher(config_of(url, "teacher.model=mine"), "cpu").model
    assert isinstance(model, ServedModel) and model.name == "mine"


# Heads that cannot be read


def test_a_model_without_the_file_of_its_head_is_refused(url: str, tmp_path: Path, teacher: LoadedModel):
    teacher.model.save_pretrained(tmp_path / "whole", max_shard_size="2MB")
    teacher.tokenizer.save_pretrained(tmp_path / "whole")
    index = json.loads((tmp_path / "whole/model.safetensors.index.json").read_text())["weight_map"]
    needed = {index["model.embed_tokens.weight"], index["model.norm.weight"]}
    assert len(set(index.values())) > len(needed)
    for path in (tmp_path / "whole").glob("*.safetensors"):
        if path.name not in needed:
            path.unlink()  # of no use here
    named = (f"models.teacher={tmp_path / 'whole'}", f"teacher.model={NAME}")
    assert torch.equal(
        lm_head(load_teacher(config_of(url, *named), "cpu").model).weight_VD, lm_head(teacher.model).weight_VD
    )
    (tmp_path / "whole" / index["model.embed_tokens.weight"]).unlink()
    assert re.search(r"LM head of models\.teacher = .* cannot be read", refused(url, *named))


def test_an_adapter_is_refused(url: str, tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is an adapter" in refused(url, f"models.teacher={tmp_path}")


def test_an_engine_without_an_address_is_refused():
    with pytest.raises(ConfigError, match=r'engine = "vllm" needs the address of a server: set teacher\.url'):
        parse_config('[run]\ndirectory = "r"\n[models]\nstudent = "s"\nteacher = "t"\n[teacher]\nengine = "vllm"\n')
    with pytest.raises(ConfigError, match=r"models\.teacher_device = 'cpu' places a teacher in memory"):
        load_teacher(config_of("http://127.0.0.1:9", "models.teacher_device=cpu"), "cpu")
