"""A real vLLM server on a CPU, in the environment that ``make vllm`` makes: what a stand-in cannot show."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
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

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
HOW = {"temperature": 1.0, "max_new_tokens": 120, "seed": 7}
MORE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT / "src"),
}
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM: make vllm installs it")


class Server:
    """A server of a folder, which can be killed and started again."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self._folder, self._log = f"http://127.0.0.1:{self.port}", folder, log
        self.start()

    def start(self) -> None:
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", self._folder, "--dtype", "float32"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--max-model-len", "384", "--enforce-eager"]
        command += ["--logprobs-mode", "raw_logprobs", "--served-model-name", "student"]
        command += ["--logits-processors", "rocktokens.integrations.vllm_noise:RockNoise"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **MORE}, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        while True:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            try:
                return urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)

    def kill(self) -> None:
        os.killpg(self._process.pid, 9)
        self._process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server") / "student"
    subprocess.run([sys.executable, ROOT / "examples/serve_student.py", "pebbles-student", folder], check=True)
    server = Server(folder, folder.with_name("log"))
    server.wait()
    yield server
    server.kill()


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
