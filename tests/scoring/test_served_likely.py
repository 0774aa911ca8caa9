"""A teacher behind a server that names its likeliest tokens: what it gives, and servers that give something else."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fake_vllm import FakeVllm, Reply
from rocktokens.config import Config, parse_config
from rocktokens.errors import ConfigError, NonFiniteLossError, RocktokensError
from rocktokens.models.head import lm_head, output_head
from rocktokens.models.load import LoadedModel
from rocktokens.run_dir import RunDir
from rocktokens.scoring.batch import collate, response_states
from rocktokens.scoring.score import score_pass, score_rollouts
from rocktokens.scoring.served import SERVED
from rocktokens.scoring.served_likely import RESOLUTION, ServedLikely, Tails
from rocktokens.scoring.teacher_pass import TeacherPass
from rocktokens.scoring.teachers import load_teacher, note_teacher
from rocktokens.scoring.top_tokens import TopTokens
from rocktokens.types import Rollout, TokenScores

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
        values = "top_k"
        url = "{url}"
        timeout = 5
    """
    return parse_config(text, list(overrides))


def make_rollouts(student: LoadedModel, count: int = 5) -> list[Rollout]:
    """Some that the student could have written, so that the teacher's likeliest tokens matter."""
    rng = np.random.default_rng(0)
    rollouts = []
    for index in range(count):
        ids = rng.integers(3, 1300, (1, rng.integers(2, 9)))
        written = student.model.generate(torch.tensor(ids), do_sample=True, max_new_tokens=int(rng.integers(1, 25)))
        response = written[0, ids.shape[1] :].numpy().astype(np.int32)
        prompt = ids[0].astype(np.int32)
        own = Rollout(index, f"p{index}", 0, prompt, response, np.zeros(len(response), np.float32), 0, True)
        rollouts.append(own)
    return rollouts


@pytest.fixture(scope="module")
def rollouts(student: LoadedModel) -> list[Rollout]:
    torch.manual_seed(0)
    return make_rollouts(student)


# What it gives


def summed(
    student: LoadedModel, teacher: LoadedModel, rollouts: list[Rollout], k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The divergence of the k likeliest tokens and the tail, by definition in float64, and how well it can be known.

    The server's numbers are float32, so that a tail Q is known to 1e-6 and the kl to P / Q times that.
    """
    batch = collate(rollouts, pad_id=0, device="cpu")
    with torch.no_grad():
        pairs = [(lm_head(own.model), response_states(own.model, batch)) for own in (student, teacher)]
        log_p, log_q = (head.logits(h).double().log_softmax(-1) for head, h in pairs)
    ids = log_q.topk(k, dim=-1).indices
    tails = [log.scatter(1, ids, -torch.inf).exp().sum(-1, keepdim=True) for log in (log_p, log_q)]
    p, q = (torch.cat([log.gather(1, ids).exp(), tail], 1) for log, tail in zip((log_p, log_q), tails, strict=True))
    return (p * (p / q).log()).sum(-1).numpy(), (1e-4 + RESOLUTION * tails[0] / tails[1]).flatten().numpy()


@pytest.mark.parametrize("k", [1, 5, 20])
def test_kl_is_that_of_the_tokens_and_the_tail(
    url: str, student: LoadedModel, teacher: LoadedModel, rollouts: list[Rollout], k: int
):
    served = load_teacher(config_of(url, f"teacher.top_k={k}", "trace.top_k=1"), "cpu")
    found, whole = (score_rollouts(student, own, rollouts) for own in (served, teacher))
    expected, error = summed(student, teacher, rollouts, k)
    assert (np.abs(found.kl - expected) <= error).all() and np.median(error) < 2e-4
    assert (found.kl <= whole.kl + error).all() and (whole.kl - found.kl).max() > 0.1
    for name in ("logp_student", "logp_teacher", "entropy_student"):
        np.testing.assert_allclose(getattr(found, name), getattr(whole, name), rtol=0, atol=1e-4)
    assert np.isnan(found.entropy_teacher).all()


def everything(fake: FakeVllm, teacher: LoadedModel) -> str:
    """Have the server name all tokens."""
    fake.max_logprobs = lm_head(teacher.model).width
    return f"teacher.top_k={fake.max_logprobs}"


def test_all_tokens_give_the_scores_of_the_model_in_memory(
    url: str, fake: FakeVllm, student: LoadedModel, teacher: LoadedModel, rollouts: list[Rollout]
):
    served = load_teacher(config_of(url, everything(fake, teacher)), "cpu")
    found, expected = (score_rollouts(student, own, rollouts[:2]) for own in (served, teacher))
    for name in ("kl", "logp_teacher", "grad_norm"):
        assert np.abs(getattr(found, name) - getattr(expected, name)).max() < 1e-5


def test_nothing_of_the_teacher_is_in_memory(url: str, teacher: LoadedModel):
    served = load_teacher(config_of(url), "cpu")
    assert not [*served.model.parameters()] and served.model.device.type == "cpu"
    assert (served.eos_ids, served.name) == (teacher.eos_ids, NAME)
    assert output_head(served.model).width == lm_head(teacher.model).width
    assert served.context_length == 127, "the server writes one token of its own"


def test_rows_of_several_batches_are_those_of_each(url: str, rollouts: list[Rollout]):
    model: Any = load_teacher(config_of(url), "cpu").model
    batches = [collate(own, pad_id=0, device="cpu") for own in (rollouts[:2], rollouts[2:])]
    together = model.states_of(batches)
    assert all(torch.equal(own, model.states(batch)) for own, batch in zip(together, batches, strict=True))


def test_the_likeliest_of_a_trace_are_those_of_the_model_in_memory(
    url: str, student: LoadedModel, teacher: LoadedModel, rollouts: list[Rollout]
):
    served = load_teacher(config_of(url), "cpu")
    tops = []
    for own in (served, teacher):
        pending = score_pass(student, TeacherPass(own, rollouts), tops=TopTokens(8))
        tops.append(pending.wait_tops()["teacher_top"])
    assert np.array_equal(tops[0][0], tops[1][0])
    np.testing.assert_allclose(tops[0][1], tops[1][1], rtol=0, atol=1e-4)


# Tails


def row_of(url: str, said: dict[int, float], written: int, k: int = 2) -> np.ndarray:
    model: Any = load_teacher(config_of(url, f"teacher.top_k={k}", "trace.top_k=1"), "cpu").model
    assert isinstance(model, ServedLikely)
    return model._row(written, {own: as_logprob(value) for own, value in said.items()})


def as_logprob(value: float) -> Any:
    from rocktokens.rollouts.vllm_client import Logprob

    return Logprob(logprob=value)


def test_the_written_token_is_one_of_the_likeliest_only_where_it_is(url: str):
    half, third, tenth = math.log(0.5), math.log(0.3), math.log(0.1)
    beside = row_of(url, {7: tenth, 4: half, 2: third}, written=7)
    np.testing.assert_allclose(beside, [4, 2, half, third, math.log(0.2), tenth], rtol=1e-12)
    among = row_of(url, {4: half, 2: third}, written=2)
    np.testing.assert_allclose(among, [4, 2, half, third, math.log(0.2), third], rtol=1e-12)
    tied = row_of(url, {9: third, 4: third}, written=9)
    assert tied[:2].tolist() == [4, 9], "of equal ones the smaller id comes first"


def test_a_tail_that_cannot_be_told_from_nothing_is_as_large_as_it_can_be(url: str, teacher: LoadedModel):
    width = lm_head(teacher.model).width

    def tail(first: float, second: float, written: dict[int, float] | None = None) -> float:
        said = {4: math.log(first), 2: math.log(second), **{v: math.log(q) for v, q in (written or {}).items()}}
        return math.exp(row_of(url, said, written=next(iter(written or {4: 0})))[4])

    assert tail(0.6, 0.39) == pytest.approx(0.01)
    assert tail(0.6, 0.4) == pytest.approx(RESOLUTION), "rounded to 1: no more than that is left"
    assert tail(0.7, 0.3001) == pytest.approx(RESOLUTION), "rounded above 1"
    assert tail(1 - 1e-11, 1e-12) == pytest.approx((width - 2) * 1e-12), "no other token is likelier than the last"
    assert tail(0.6, 0.4, {7: 3e-6}) == pytest.approx(3e-6), "the written token is one of the others"
    assert tail(1 - 1e-4 - 1e-7, 1e-7) == pytest.approx(1e-4, rel=1e-3), "what is left, which all others can have"


def test_tails_are_counted(url: str, rollouts: list[Rollout], student: LoadedModel):
    model: Any = load_teacher(config_of(url), "cpu").model
    assert model.tails == Tails(), "canaries are not counted"
    score_rollouts(student, model, rollouts)
    count = sum(len(own.token_ids) for own in rollouts)
    assert model.tails.tokens == count and 0 <= model.tails.unresolved <= count
    assert 0 < model.tails.mean_mass < 0.5


def test_a_token_that_was_written_and_that_the_teacher_rules_out_is_refused(
    url: str, fake: FakeVllm, rollouts: list[Rollout], student: LoadedModel
):
    """vLLM writes -9999 for minus infinity; in a prompt it is no matter, for nothing is scored there."""
    responses = {str(v) for own in rollouts for v in own.token_ids.tolist()}
    ruled_out = {"logprob": -9999.0}
    fake.faults.append(each(lambda own, v: own | {v: ruled_out} if len(own) > 20 and v not in responses else own))
    served = load_teacher(config_of(url), "cpu")
    assert np.isfinite(score_rollouts(student, served, rollouts).kl).all()
    fake.faults[:] = [each(lambda own, v: own | {v: ruled_out} if len(own) > 20 else own)]
    served = load_teacher(config_of(url), "cpu")
    with pytest.raises(NonFiniteLossError, match=r"is infinite, since .*: serve a teacher that rules out no token"):
        score_rollouts(student, served, rollouts)


def test_certain_tokens_count_as_unresolved(url: str):
    model: Any = load_teacher(config_of(url), "cpu").model
    said = {v: as_logprob(-40.0) for v in range(19)} | {31: as_logprob(0.0)}
    rows = torch.tensor(np.stack([model._row(v, {**said, v: as_logprob(-50.0)}) for v in (40, 41, 42)]))
    found = model._tails(rows)
    assert (found.tokens, found.unresolved) == (3, 3) and 0 < found.mean_mass < 1e-10


# Servers that fail


def changed(change: Callable[[list[Any], dict[str, Any]], Any]) -> Callable[..., Reply | None]:
    """Change what a server says of the tokens of a prompt."""

    def fault(fake: FakeVllm, path: str, said: dict[str, Any]) -> Reply | None:
        if path != "/v1/completions":
            return None
        known = fake._complete(said)["prompt_logprobs"]
        return 200, json.dumps({"choices": [{"prompt_logprobs": change(known, said)}]}).encode()

    return fault


def answered(reply: Reply, times: int = -1) -> Callable[..., Reply | None]:
    left = [times]

    def fault(fake: FakeVllm, path: str, said: dict[str, Any]) -> Reply | None:
        if path != "/v1/completions" or left[0] == 0:
            return None
        left[0] -= 1
        return reply

    return fault


def each(change: Callable[[dict[str, Any], str], dict[str, Any]]) -> Callable[..., Reply | None]:
    """Change what is said in the place of each token, which is given as text."""
    return changed(
        lambda known, said: [None, *(change(own, str(v)) for own, v in zip(known[1:], said["prompt"][1:], strict=True))]
    )


def refused(url: str, *overrides: str) -> str:
    with pytest.raises(RocktokensError) as error:
        load_teacher(config_of(url, *overrides), "cpu")
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def add(amount: float) -> Callable[[dict[str, Any], str], dict[str, Any]]:
    return lambda own, _: {v: {"logprob": said["logprob"] + amount} for v, said in own.items()}


WRONG = {
    "nan": (each(lambda own, v: {**own, v: {"logprob": math.nan}}), "log-probabilities that are none"),
    "infinite": (each(lambda own, v: {**own, v: {"logprob": -math.inf}}), "log-probabilities that are none"),
    "logits": (each(add(15.0)), "log-probabilities that are none"),
    "not normalised": (each(lambda own, _: {v: {"logprob": -0.5} for v in own}), r"\(together .*\): .*--logprobs-mode"),
    "unsorted": (
        each(lambda own, v: {**own, v: {"logprob": -1e-3}} if len(own) > 20 else own),
        r"other numbers than the log-probabilities of the 20 likeliest",
    ),
    "other ids": (
        each(lambda own, v: {w: said for w, said in own.items() if w != v}),
        r"gives (19|20) log-prob.* where",
    ),
    "too few": (each(lambda own, v: {v: own[v]}), "gives 1 log-probabilities where token .* --max-logprobs 20"),
    "too many": (
        each(lambda own, _: own | {str(v): {"logprob": -90.0} for v in range(40, 90)}),
        "log-probabilities where token",
    ),
    "ids beyond": (
        each(lambda own, _: {**dict([*own.items()][:-1]), "99999": {"logprob": -9.0}}),
        "of ids up to 99999",
    ),
    "missing entries": (changed(lambda known, _: known[:-3]), "gives log-probabilities for 61 tokens of 64"),
    "none": (changed(lambda known, _: [None] * len(known)), "gives 0 log-probabilities"),
    "no list": (changed(lambda *_: None), r"in another form \(choices\.0\.prompt_logprobs"),
    "no key": (answered((200, b'{"choices": [{"text": "a"}]}')), "prompt_logprobs: field required"),
    "a word": (each(lambda own, v: {**own, v: {"logprob": "likely"}}), "in another form"),
    "truncated": (
        answered((200, b'{"choices": [{"prompt_logpr')),
        "an answer to /v1/completions that is no JSON: start",
    ),
    "busy": (answered((429, b"")), "was busy for 1 seconds: start it again"),
    "dead": (answered((500, b'{"error": {"message": "engine is dead"}}')), r"\(engine is dead\): start it again"),
    "no such path": (answered((404, b"")), "start vLLM with --runner generate, and name no path in teacher.url"),
    "too long": (answered((400, b"too long")), "with room for the student's prompts and answers and one token more"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_answer_is_one_sentence(url: str, fake: FakeVllm, name: str):
    fault, sentence = WRONG[name]
    fake.faults.append(fault)
    said = refused(url, "teacher.timeout=1")
    assert said.startswith(f"the vLLM server at {url} ") and re.search(sentence, said), said


@pytest.mark.parametrize("reply", [(429, b""), (503, b"later"), (500, b"oh"), (0, b""), (200, b'{"choices": [{')])
def test_what_passes_costs_nothing(url: str, fake: FakeVllm, rollouts: list[Rollout], reply: Reply):
    served = load_teacher(config_of(url), "cpu")
    batch = collate(rollouts, pad_id=0, device="cpu")
    expected = response_states(served.model, batch)
    fake.faults.append(answered(reply, times=2))
    assert torch.equal(response_states(served.model, batch), expected)


def test_an_answer_that_drips_is_given_up(url: str, fake: FakeVllm):
    fake.drips = True
    assert "does not answer" in refused(url, "teacher.timeout=0.3")


def test_more_tokens_than_the_server_gives_are_refused(url: str, teacher: LoadedModel):
    assert "Requested prompt logprobs of 30" in (said := refused(url, "teacher.top_k=30"))
    assert "--max-logprobs where teacher.top_k exceeds 20" in said
    assert f"has {lm_head(teacher.model).width} tokens: ask for no more" in refused(url, "teacher.top_k=99999")


def test_the_look_is_that_at_any_teacher(url: str, fake: FakeVllm):
    assert "has 'pebbles-teacher', not 'other'" in refused(url, "teacher.model=other")
    fake.faults.append(lambda _, path, __: (200, b'{"tokens": [1, 2]}') if path == "/tokenize" else None)
    assert "splits" in refused(url)


def test_a_server_that_comes_back_as_another_is_refused(
    url: str, fake: FakeVllm, rollouts: list[Rollout], tmp_path: Path
):
    config, run = config_of(url), RunDir(tmp_path / "run")
    served = load_teacher(config, "cpu")
    batch = collate(rollouts, pad_id=0, device="cpu")
    response_states(served.model, batch)
    with run.lock():
        run.update_manifest()
        note_teacher(served.model, run, config)
        assert [*run.manifest()[SERVED]] == ["pebbles-teacher top-20 + tail"]
        with torch.no_grad():
            fake.model.model.layers[1].mlp.down_proj.weight.mul_(1.05)
        with pytest.raises(
            RocktokensError, match=r"is not what it was at first: log-probabilities .* teacher\.max_gap"
        ):
            response_states(served.model, batch)
        other = load_teacher(config, "cpu").model
        with pytest.raises(RocktokensError, match=f"is not what the run {run.path} used before"):
            note_teacher(other, run, config)


def test_no_weights_of_the_teacher_are_needed(url: str, teacher: LoadedModel, tmp_path: Path):
    teacher.model.config.save_pretrained(tmp_path / "alone")
    teacher.tokenizer.save_pretrained(tmp_path / "alone")
    named = (f"models.teacher={tmp_path / 'alone'}", f"teacher.model={NAME}")
    assert isinstance(load_teacher(config_of(url, *named), "cpu").model, ServedLikely)
    (tmp_path / "alone/config.json").unlink()
    assert "the config of models.teacher" in refused(url, *named)


# What a config may ask for


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["scoring.divergence=jsd"], r'scoring\.divergence = "jsd" needs the whole distribution'),
        (["scoring.temperature=0.5"], r"scoring\.temperature = 0\.5 tempers the whole distribution"),
        (["trace.classes=classes.json"], r"trace\.classes needs the teacher's mass of whole classes"),
        (["teacher.top_k=7"], r"trace\.top_k = 8 keeps more of the teacher's tokens"),
        (["find.stage=context"], r'find\.stage = "context" compares the kl of single tokens'),
        (["policy.name=teachable"], "needs the teacher's mass on the student's 16 likeliest"),
        (["policy.name=entropy_mix", "policy.alpha=1", "policy.beta=1"], "needs the teacher's entropy"),
        (["policy.name=asymmetric"], "needs the forward KL"),
        (["policy.name=online_coarse"], "needs the teacher's mass of classes of tokens"),
        (["policy.name=selectkd", "teacher.top_k=4", "trace.top_k=4"], "needs the teacher's 5 likeliest tokens"),
        (["policy.name=rocks", "policy.rocks=[1]", "policy.window=true"], r"policy\.window compares the kl of single"),
        (
            ["policy.name=product", 'policy.policies=[{name="tip"}, {name="asymmetric"}]'],
            r'policy\.policies\[1\]\.name = "asymmetric" needs the forward KL',
        ),
        (
            ["policy.name=product", 'policy.policies=[{name="rocks", rocks=[1], window=true}]'],
            r"policy\.policies\[0\]\.window compares the kl of single",
        ),
        (["teacher.dtype=bfloat16"], 'dtype = "bfloat16" is of states'),
        (["teacher.values=states", "teacher.top_k=9"], 'top_k = 9 is of values = "top_k"'),
        (["teacher.engine=local"], 'values = "top_k" is what a server gives, and engine is "local"'),
        (["teacher.top_k=0"], r"teacher\.top_k = 0 is not valid"),
    ],
)
def test_what_needs_the_whole_distribution_is_refused_before_anything_is_loaded(overrides: list[str], sentence: str):
    with pytest.raises(ConfigError, match=sentence) as error:
        config_of("http://127.0.0.1:9", *overrides)
    assert len(str(error.value).splitlines()) == 1


def test_the_rest_is_allowed():
    for overrides in (
        ["policy.name=tip"],
        ["policy.name=selectkd"],
        ["teacher.engine=local", "teacher.values=states", "scoring.divergence=jsd"],
    ):
        config_of("http://127.0.0.1:9", *overrides)
    assert config_of("http://127.0.0.1:9", "teacher.top_k=50").teacher.label == "top-50 + tail"
    assert config_of("http://127.0.0.1:9", "teacher.engine=local", "teacher.values=states").teacher.label == ""


def test_an_untold_column_is_none_of_the_scores(url: str, student: LoadedModel, rollouts: list[Rollout]):
    served = load_teacher(config_of(url), "cpu")
    with pytest.raises(RocktokensError, match="forward_kl is not known"):
        score_rollouts(student, served, rollouts, extras=["forward_kl"])
    found = score_rollouts(student, served, rollouts, extras=["student_top1_in_teacher_top5"])
    assert isinstance(found, TokenScores) and set(np.unique(found.student_top1_in_teacher_top5)) <= {0.0, 1.0}
