"""Whole runs of ``distill`` over a server that speaks vLLM's protocol: the bytes of a run that samples in memory."""

from datetime import timedelta
from pathlib import Path

import pytest
import shard_worker
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_pair import tiny_config
from torch.distributed.constants import default_pg_timeout

from fake_vllm import FakeVllm, dying_at, serving
from ranks import run_two_ranks
from rocktokens.config import dump_config, parse_config
from rocktokens.errors import ConfigError
from rocktokens.models.load import load_model
from rocktokens.run_dir import RunDir
from rocktokens.training.loop import distill
from rocktokens.training.session import LEAST_PATIENCE, patience


def distilled(pair: Path, run: Path, *overrides: str, resume: bool = False) -> dict[str, str]:
    """Hashes of the weights and optimizer states of a run."""
    distill(tiny_config(pair, run, "training.max_steps=4", *overrides), resume=resume)
    return {own.path: own.sha256 for own in RunDir(run).files("checkpoints/") if own.path.endswith(".safetensors")}


@pytest.mark.parametrize("lora", [False, True])
def test_weights_are_those_of_a_run_that_samples_in_memory(pair: Path, tmp_path: Path, lora: bool):
    """Also where the server is started again, with the weights it had first, in the middle of a step."""
    settings = ["lora.enabled=true", "lora.r=2"] if lora else []
    expected = distilled(pair, tmp_path / "memory", *settings)
    fake = FakeVllm(load_model(str(pair / "student")).model)
    fake.faults.append(dying_at(21))
    with serving(fake) as url:
        server = ("rollouts.engine=vllm", f"rollouts.url={url}")
        assert distilled(pair, tmp_path / "served", *settings, *server) == expected
    assert fake.asked.count("/collective_rpc") == 5, "one a step, and one more for the restart"


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo")
@pytest.mark.parametrize("answers", [2, 8])
@pytest.mark.parametrize("shard", [False, True])
def test_two_processes_start_over_together(pair: Path, tmp_path: Path, answers: int, shard: bool):
    """Only one of them meets the restart. With eight answers to one prompt, one has nothing to sample."""
    settings = ("training.max_steps=2", f"rollouts.num_generations={answers}")
    distill(tiny_config(pair, tmp_path / "one", *settings))
    fake = FakeVllm(load_model(str(pair / "student")).model)
    fake.faults.append(dying_at(11))
    config = tmp_path / "two.toml"
    with serving(fake) as url:
        own = (f"training.shard={str(shard).lower()}", "training.gradient_accumulation_steps=1")
        server = ("rollouts.engine=vllm", f"rollouts.url={url}")
        config.write_text(dump_config(tiny_config(pair, tmp_path / "two", *settings, *own, *server)))
        run_two_ranks(Path(shard_worker.__file__), [str(config)], tmp_path, ACCELERATE_USE_CPU="true")
    assert fake.asked.count("/collective_rpc") == 3, "one a step, and one more for the restart"
    one, two = (load_file(tmp_path / run / "checkpoints/step-2/model.safetensors") for run in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=1e-6, rtol=0)


def test_processes_wait_longer_for_each_other_than_one_may_wait_for_a_server(pair: Path, tmp_path: Path):
    servers = [(f"{own}.engine=vllm", f"{own}.url=http://s", f"{own}.timeout=700") for own in ("rollouts", "teacher")]
    found = [patience(tiny_config(pair, tmp_path / "run", *settings)) for settings in ((), *servers)]
    assert found == [None, timedelta(seconds=7000), timedelta(seconds=7000)]
    soon = (*servers[0], "rollouts.timeout=2")
    assert patience(tiny_config(pair, tmp_path / "run", *soon)) == LEAST_PATIENCE >= default_pg_timeout


def test_a_run_goes_on_with_a_server_at_another_address(pair: Path, tmp_path: Path):
    expected = distilled(pair, tmp_path / "memory")
    for steps in ("training.max_steps=2", "training.max_steps=4"):
        with serving(FakeVllm(load_model(str(pair / "student")).model)) as url:
            server = ("rollouts.engine=vllm", f"rollouts.url={url}", "training.lr_scheduler_type=constant", steps)
            found = distilled(pair, tmp_path / "served", *server, resume=True)
    assert found.keys() == expected.keys()
    assert found == distilled(pair, tmp_path / "constant", "training.lr_scheduler_type=constant")


def test_an_engine_without_an_address_is_refused():
    with pytest.raises(ConfigError, match=r'engine = "vllm" needs the address of a server: set rollouts.url'):
        parse_config('[run]\ndirectory = "r"\n[models]\nstudent = "s"\nteacher = "t"\n[rollouts]\nengine = "vllm"\n')
