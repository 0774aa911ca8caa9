"""Two processes with a shard each of student, optimizer and teacher train as two whole ones and as one do."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import shard_worker
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_pair import tiny_config, tiny_llama, write_pair

from ranks import run_two_ranks
from rocktokens.config import Config, TrainingSection, dump_config
from rocktokens.errors import ConfigError
from rocktokens.evaluation.evaluate import evaluate
from rocktokens.models.load import load_model
from rocktokens.replay.replay import replay
from rocktokens.rollouts.store import read_rollouts
from rocktokens.run_dir import RunDir
from rocktokens.scoring.batch import split_by_tokens
from rocktokens.training.layout import fits, held_bytes
from rocktokens.training.loop import distill

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo")

STEPS, KILL_AT = 5, 3
ARMS = {
    "all weights": [],
    "tied heads": [],
    "lora": ["lora.enabled=true", "lora.r=2", "rollouts.num_generations=8"],
    "checkpointing": ["training.gradient_checkpointing=true"],
    "scores": ["policy.name=tip", "policy.rho=0.7"],
    "classes": ["policy.name=coarse", "policy.classes=[[60, 61, 62, 70], [64, 69, 80, 90], [200, 3]]"],
    "watched": [
        "policy.name=online_rocks",
        "policy.window_steps=2",
        "policy.patience=1",
        "policy.tolerance=0.9",
        "policy.min_share=0.0001",
        "policy.probe=0.2",
        "rollouts.temperature=0.2",
    ],
}
"""With eight answers to one prompt, one process has nothing to sample."""
LAYOUTS = {"one": (4, "auto"), "whole": (2, "false"), "sharded": (2, "true"), "auto": (2, "auto")}
"""Micro-batches of a process in an update of eight rollouts, and ``training.shard``."""


HALF = "models.student_dtype=bfloat16"


class Runs:
    """Where the runs of every arm in every layout are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, tied in (("pair", False), ("tied", True)):
            (folder / name).mkdir()
            write_pair(folder / name, tie_word_embeddings=tied)

    def config(self, arm: str, layout: str, name: str | None = None, more: tuple[str, ...] = ()) -> Config:
        pair = self.folder / ("tied" if arm == "tied heads" else "pair")
        micro_batches, shard = LAYOUTS[layout]
        settings = [f"training.gradient_accumulation_steps={micro_batches}", f"training.shard={shard}", *ARMS[arm]]
        sizes = ["training.per_device_train_batch_size=2", f"training.max_steps={STEPS}", "training.learning_rate=1e-3"]
        return tiny_config(pair, self.folder / (name or f"{layout} {arm}"), *sizes, *settings, *more)

    def run(self, arm: str, layout: str) -> RunDir:
        return RunDir(self.config(arm, layout).run.directory)

    def launch(self, configs: list[Config], **environment) -> None:
        """Distil one after the other in two processes."""
        files = [Path(f"{config.run.directory}.toml") for config in configs]
        for file, config in zip(files, configs, strict=True):
            file.write_text(dump_config(config))
        script = Path(shard_worker.__file__)
        run_two_ranks(script, map(str, files), self.folder, ACCELERATE_USE_CPU="true", **environment)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """All arms in all layouts."""
    runs = Runs(tmp_path_factory.mktemp("shard"))
    half = runs.config("all weights", "sharded", "sharded half", (HALF,))
    runs.launch([*(runs.config(arm, layout) for arm in ARMS for layout in ("whole", "sharded")), half])
    for arm in ARMS:
        distill(runs.config(arm, "one"))
    return runs


@pytest.fixture(scope="module")
def resumed(runs) -> Runs:
    """A run that was killed after ``KILL_AT`` steps goes on, and others, from a checkpoint, in the other layout.

    One more is sharded, since one of the processes has too little memory for a whole one.
    """
    killed = runs.config("all weights", "sharded", "killed")
    moves = [("tied heads", "sharded", "whole"), ("lora", "whole", "sharded")]
    before, after = (
        [runs.config(move[0], move[number], f"{move[1]} to {move[2]}") for move in moves] for number in (1, 2)
    )
    fewer = runs.config("all weights", "sharded", "two to one")
    runs.launch([*before, fewer, killed], ends_well=False, STOP_AT=str(STEPS - 1), KILL_AT=str(KILL_AT))
    assert [max(RunDir(own.run.directory).checkpoints()) for own in (*before, fewer, killed)] == [4, 4, 4, 2]
    distill(runs.config("all weights", "one", "two to one"), resume=True)
    with pytest.raises(KeyboardInterrupt):
        distill(runs.config("lora", "one", "one to two"), on_step=interrupt_at(STEPS))
    more = runs.config("lora", "sharded", "one to two")
    runs.launch([killed, *after, more, runs.config("tied heads", "auto")], SMALL_RANK="1")
    return runs


def interrupt_at(step: int):
    def on_step(done: int, *_: object) -> None:
        if done == step:
            raise KeyboardInterrupt

    return on_step


def weights(run: RunDir, step: int = STEPS) -> dict[str, torch.Tensor]:
    [file] = [path for path in run.checkpoint(step).glob("*.safetensors") if "model" in path.name]
    return load_file(file)


def require_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], atol=1e-6, rtol=0)


def log_records(run: RunDir) -> list[dict]:
    return [json.loads(line) for line in run.logs.read_text().splitlines()]


def trace(run: RunDir, source: str = "training") -> pd.DataFrame:
    rows = pq.ParquetDataset([run.path / entry.path for entry in run.files(f"traces/{source}/")]).read().to_pandas()
    return rows.sort_values(["rollout_id", "position"], ignore_index=True)


@pytest.mark.parametrize("layout", ["one", "whole"])
@pytest.mark.parametrize("arm", ARMS)
def test_shards_train_as_whole_models_do(runs, arm, layout):
    sharded, other = runs.run(arm, "sharded"), runs.run(arm, layout)
    require_close(weights(sharded), weights(other))
    assert any(not torch.equal(tensor, weights(sharded, 0)[name]) for name, tensor in weights(sharded).items())
    for ours, theirs in zip(log_records(sharded), log_records(other), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6, rel=0)
        for key in ("kl", "grad_norm", "overlap16", *(["kl_decision"] if arm == "classes" else [])):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), key
    columns = ["rollout_id", "token_id", "weight"]
    assert trace(sharded)[columns].equals(trace(other)[columns])
    np.testing.assert_allclose(trace(sharded).kl, trace(other).kl, atol=1e-5)


def held(runs: Runs, arm: str, layout: str) -> list[dict[str, int]]:
    """What each process held."""
    return [json.loads((runs.folder / f"{layout} {arm}.rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("arm", ["all weights", "tied heads", "lora"])
def test_a_process_holds_half_of_models_and_optimizer(runs, arm):
    whole, sharded = (held(runs, arm, layout) for layout in ("whole", "sharded"))
    assert whole[0] == whole[1]
    for part, count in whole[0].items():
        own, other = (each[part] for each in sharded)
        assert own + other == count and abs(own - other) < 0.1 * count, part


def micro_batches(step: int) -> list[tuple[range, range]]:
    """The rollouts that the two processes pass through the models at the same time, by number within the step."""
    return [(range(first, first + 2), range(first + 4, first + 6)) for first in (8 * step, 8 * step + 2)]


def test_the_processes_have_unequal_work(runs):
    """Groups of rows, and watched rows: in some micro-batch one process has some, or more of them, and one has not."""
    run = runs.run("all weights", "sharded")
    groups = set()
    for step in range(STEPS):
        rollouts = {each.rollout_id: each for each in read_rollouts(run, f"rollouts/training/step-{step}.parquet")}
        for pair in micro_batches(step):
            groups.add(
                tuple(len(split_by_tokens([rollouts[i] for i in own], shard_worker.GROUP_TOKENS)) for own in pair)
            )
    assert any(a != b for a, b in groups)

    rows = trace(runs.run("watched", "sharded"))
    watched = set(rows[(rows.weight == 0) & rows.kl.notna()].rollout_id)
    pairs = [pair for step in range(STEPS) for pair in micro_batches(step)]
    assert any(watched.isdisjoint(a) != watched.isdisjoint(b) for a, b in pairs)


def test_a_killed_run_ends_byte_for_byte_like_an_uninterrupted_one(resumed):
    whole, killed = resumed.run("all weights", "sharded"), RunDir(resumed.folder / "killed")
    parts = ("checkpoints/", "traces/", "rollouts/")
    one, other = ({e.path: e.sha256 for part in parts for e in run.files(part)} for run in (whole, killed))
    assert one == other and len(one) > STEPS
    assert [record["step"] for record in log_records(killed) if record.get("rollouts_reused")] == [2, KILL_AT]


@pytest.mark.parametrize(("arm", "name"), [("tied heads", "sharded to whole"), ("lora", "whole to sharded")])
def test_either_layout_goes_on_from_a_checkpoint_of_the_other(resumed, arm, name):
    run = RunDir(resumed.folder / name)
    assert [record["step"] for record in log_records(run)] == list(range(STEPS))
    require_close(weights(run), weights(resumed.run(arm, "one")))
    states = [load_file(own.checkpoint(STEPS) / "optimizer.safetensors") for own in (run, resumed.run(arm, "one"))]
    require_close(*states)


def described(file: Path) -> object:
    """The tensors of a file without their values, or its bytes."""
    if file.suffix != ".safetensors":
        return file.read_bytes()
    return {name: (tensor.shape, tensor.dtype) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("arm", ["all weights", "tied heads", "lora", "watched"])
@pytest.mark.parametrize("step", [0, STEPS])
def test_a_checkpoint_of_shards_has_the_files_and_tensors_of_a_whole_one(runs, arm, step):
    sharded, whole = (
        {path.name: described(path) for path in runs.run(arm, layout).checkpoint(step).iterdir()}
        for layout in ("sharded", "whole")
    )
    for files in (sharded, whole):
        files.pop("trainer_state.json")
    assert sharded == whole


def test_other_stages_read_a_run_of_shards(runs):
    """A checkpoint is evaluated and replayed, with the scores of the same one in a run of whole models."""
    held_out = f'evaluation.task={{name="jsonl", path="{runs.folder}/tied/task.jsonl"}}'
    more = (held_out, "evaluation.num_prompts=4", "trace.num_prompts=4")
    for layout in ("sharded", "whole"):
        config = runs.config("tied heads", layout, more=more)
        [record] = evaluate(config.run.directory, config, models=["last"])
        assert record.n_prompts == 4
        replay(config)
    sharded, whole = (trace(runs.run("tied heads", layout), f"checkpoint={STEPS}") for layout in ("sharded", "whole"))
    assert sharded.token_id.equals(whole.token_id)
    np.testing.assert_allclose(sharded.kl, whole.kl, atol=1e-5)
    run = runs.run("tied heads", "sharded")
    loaded = load_model(str(run.checkpoint(STEPS))).model
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    require_close(weights(run), {name: own.data for name, own in loaded.named_parameters()})


def test_shards_are_the_master_copies_of_a_student_in_bfloat16(runs):
    """They are saved in float32, and trained as by one process that holds them beside the weights."""
    distill(runs.config("all weights", "one", "one half", (HALF,)))
    one, sharded = (RunDir(runs.folder / f"{name} half") for name in ("one", "sharded"))
    float32 = runs.run("all weights", "sharded")
    assert {tensor.dtype for tensor in weights(sharded).values()} == {torch.float32}
    for name, tensor in weights(sharded).items():
        torch.testing.assert_close(tensor, weights(one)[name], atol=2 * STEPS * 1e-3, rtol=0)
    theirs, ours, others = ([record["loss"] for record in log_records(run)] for run in (one, sharded, float32))
    assert ours == pytest.approx(theirs, rel=0.05) and ours != others
    assert ours[0] == pytest.approx(theirs[0], rel=1e-3)


def test_auto_shards_only_what_does_not_fit():
    student, teacher = tiny_llama(16, 1, seed=1), tiny_llama(24, 2, seed=2).to(torch.bfloat16)
    own, other = (sum(parameter.numel() for parameter in model.parameters()) for model in (student, teacher))
    assert held_bytes(student, teacher, TrainingSection()) == 16 * own + 2 * other
    student.requires_grad_(False).lm_head.requires_grad_(True)
    assert held_bytes(student, teacher, TrainingSection()) == 4 * own + 12 * student.lm_head.weight.numel() + 2 * other
    assert fits(80, 100) and not fits(81, 100)


def test_auto_shards_on_every_process_where_one_has_too_little_memory(resumed):
    assert held(resumed, "tied heads", "auto") == held(resumed, "tied heads", "sharded")
    require_close(weights(resumed.run("tied heads", "auto")), weights(resumed.run("tied heads", "one")))


def test_a_run_goes_on_with_another_number_of_processes(resumed):
    """Two that were stopped after four steps go on as one, with as many rollouts per update; and one as two."""
    for name, arm in (("two to one", "all weights"), ("one to two", "lora")):
        run = RunDir(resumed.folder / name)
        assert [record["step"] for record in log_records(run)] == list(range(STEPS))
        require_close(weights(run), weights(resumed.run(arm, "one")))
        assert trace(run)["token_id"].equals(trace(resumed.run(arm, "one"))["token_id"])


def test_another_number_of_processes_is_refused_where_an_update_would_have_other_rollouts(runs):
    config = runs.config("all weights", "auto", "sharded all weights", ("training.max_steps=9",))
    with pytest.raises(ConfigError, match="1 processes were launched, but the run was started with 2, which its batch"):
        distill(config, resume=True)


def test_a_single_process_cannot_shard(runs, tmp_path):
    config = tiny_config(runs.folder / "pair", tmp_path / "run", "training.shard=true")
    with pytest.raises(ConfigError, match=r"training.shard = true, but a single process was launched: launch several"):
        distill(config)
    assert not (tmp_path / "run").exists()
