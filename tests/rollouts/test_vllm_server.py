"""A real vLLM server on a CPU, in the environment that ``make vllm`` makes: what a stand-in cannot show."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rocktokens.config import WordmathTask, load_config
from rocktokens.errors import RocktokensError
from rocktokens.models.load import LoadedModel, load_model
from rocktokens.models.plain_weights import plain_weights
from rocktokens.rollouts.encode import encode_prompt
from rocktokens.rollouts.sampler import Branch, Completion, SampleRequest, TransformersSampler
from rocktokens.rollouts.vllm import VllmSampler
from rocktokens.rollouts.vllm_client import VllmClient
from rocktokens.run_dir import RunDir
from rocktokens.tasks import make_task
from rocktokens.training.loop import distill
from rocktokens.types import Rollout
from vllm_server import NEEDS_VLLM, ROOT, Server, running

HOW = {"temperature": 1.0, "max_new_tokens": 120, "seed": 7}
NOISE = ("--logprobs-mode", "raw_logprobs", "--logits-processors", "rocktokens.integrations.vllm_noise:RockNoise")
pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server") / "student"
    subprocess.run([sys.executable, ROOT / "examples/serve_student.py", "pebbles-student", folder], check=True)
    with running(folder, "student", folder.with_name("log"), *NOISE) as server:
        yield server


@pytest.fixture
def student() -> LoadedModel:
    return load_model("pebbles-student", dtype="float32", device="cpu")


def served(server: Server, student: LoadedModel, folder: Path) -> VllmSampler:
    of_student = {"model": student.model, "eos_ids": student.eos_ids, "pad_id": student.pad_id, "batch_size": 32}
    return VllmSampler(VllmClient(server.url, 300, 32), folder, "plugin", 1e-3, **of_student)


def test_rollouts_and_branches_are_those_of_the_model_in_memory(server: Server, student: LoadedModel, tmp_path: Path):
    """64 and 32 of them, half of the bans conditional, before and after an update."""
    local = TransformersSampler(student.model, student.eos_ids, student.pad_id, batch_size=16, threads=1)
    there = served(server, student, tmp_path)
    prompts = make_task(WordmathTask(name="wordmath")).batch(0, 16, 5)
    requests = [
        SampleRequest(prompt.id, encode_prompt(student.tokenizer, prompt, True, 300), sample)
        for prompt in prompts
        for sample in range(4)
    ]
    for _ in range(2):
        here, away = local.sample(requests, **HOW), there.sample(requests, **HOW)
        assert [own.token_ids.tolist() for own in here] == [own.token_ids.tolist() for own in away]
        assert max(np.abs(own.logprobs - other.logprobs).max() for own, other in zip(here, away, strict=True)) < 1e-4
        trunks = [
            Rollout(index, own.prompt_id, own.sample, own.prompt_ids, done.token_ids, done.logprobs, 0, done.finished)
            for index, (own, done) in enumerate(zip(requests, here, strict=True))
        ]
        banned = int(np.bincount(np.concatenate([own.token_ids for own in here])).argsort()[-3])
        leaving = [own for own in trunks if banned in own.token_ids][:32]
        branches = [
            Branch(
                own.rollout_id,
                int(np.flatnonzero(own.token_ids == banned)[0]),
                frozenset({banned}),
                frozenset(range(10, 14)) if own.rollout_id % 2 else frozenset(),
            )
            for own in leaving
        ]
        found: list[dict[int, Completion]] = [{}, {}]
        for sampler, into in zip((local, there), found, strict=True):
            sampler.branch(trunks, branches, on_done=into.__setitem__, **HOW)
        assert len(branches) == 32
        assert all(np.array_equal(found[0][index].token_ids, found[1][index].token_ids) for index in range(32))
        with torch.no_grad():
            for parameter in student.model.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))


def test_a_server_killed_in_a_step_costs_nothing(server: Server, tmp_path: Path):
    """Four steps end with the bytes of a run that samples in memory."""

    def distilled(name: str, *overrides: str) -> dict[str, str]:
        settings = ("training.max_steps=4", "training.save_steps=4", "training.per_device_train_batch_size=16")
        place = (f"run.directory={tmp_path / name}", "models.device=cpu", "rollouts.max_completion_length=80")
        distill(load_config("demo", [*settings, *place, *overrides]))
        entries = RunDir(tmp_path / name).files("checkpoints/step-4/")
        return {own.path: own.sha256 for own in entries if own.path.endswith(".safetensors")}

    def kill_in_a_step() -> None:
        log = tmp_path / "served/logs.jsonl"
        while not log.exists() or len(log.read_text().splitlines()) < 2:
            time.sleep(0.01)
        server.kill()
        server.start()

    torch.set_num_threads(1)
    expected = distilled("memory")
    killing = Thread(target=kill_in_a_step)
    killing.start()
    assert distilled("served", "rollouts.engine=vllm", f"rollouts.url={server.url}") == expected
    killing.join()


def test_a_head_that_stays_is_refused(server: Server, student: LoadedModel, tmp_path: Path):
    """The server says that it has loaded everything, and so it has: a file with the head of before."""
    head = student.model.get_output_embeddings().weight.detach().clone()  # pyright: ignore
    with torch.no_grad():
        student.model.get_input_embeddings().weight.mul_(1.2)  # pyright: ignore
    save_file({**plain_weights(student.model), "lm_head.weight": head}, tmp_path / "model.safetensors")
    sampler = served(server, student, tmp_path / "sync")
    load = sampler.client.load_weights
    sampler.client.load_weights = lambda folder: load(str(tmp_path))
    with pytest.raises(RocktokensError, match="its log-probabilities differ by"):
        sampler.sample([SampleRequest("a", np.arange(10, 20, dtype=np.int32))], **HOW)
