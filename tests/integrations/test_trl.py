"""The TRL adapter: TRL itself where all weights are 1, a naive loss of its own completions where they are not."""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoTokenizer, TrainerCallback

from rocktokens.errors import ConfigError, RunDirError
from rocktokens.integrations import trl_seams
from rocktokens.models import pebbles
from rocktokens.policies import WeightPolicy, make_policy
from rocktokens.traces.store import TraceStore

pytest.importorskip("trl", reason="the extra [trl] is not installed")

import trl_case
from trl import DistillationTrainer
from trl_case import (
    POLICIES,
    ROCKS,
    Gradients,
    double_scores,
    largest_difference,
    make_trainer,
    naive,
    tiny_model,
)

from rocktokens.integrations.trl import RockDistillationTrainer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(pebbles.directory("student"))


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")


def trained(*args: Any, **extra: Any) -> Any:
    trainer = make_trainer(*args, **extra)
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    """Of training and evaluation."""
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_of_one_are_trl_bit_for_bit(tokenizer: Any, tmp_path: Path, accumulate: int):
    settings = {"gradient_checkpointing": accumulate == 2, "eval_strategy": "steps", "eval_steps": 2}
    common = {"accumulate": accumulate, "steps": 5, "settings": settings}
    soft = {"policy": make_policy("rocks", rocks=ROCKS, lam=1.0), "denominator": "kept", "trace_dir": tmp_path / "run"}
    made = [
        trained(DistillationTrainer, tokenizer, tmp_path / "stock", **common),
        trained(RockDistillationTrainer, tokenizer, tmp_path / "a", **common),
        trained(RockDistillationTrainer, tokenizer, tmp_path / "b", **common, **soft),
    ]
    assert len(losses(made[0])) > 5
    stock = made[0].model.state_dict()
    for trainer in made[1:]:
        assert losses(trainer) == losses(made[0])
        assert all(torch.equal(values, stock[name]) for name, values in trainer.model.state_dict().items())
    assert not torch.equal(stock["lm_head.weight"], tiny_model(1, 16).lm_head.weight)


@pytest.mark.parametrize(
    ("name", "denominator", "accumulate"),
    [
        ("frozen", "all", 1),
        ("frozen", "kept", 2),
        ("soft", "all", 2),
        ("soft", "kept", 1),
        ("asymmetric", "all", 2),
        ("tip", "kept", 2),
        ("product", "all", 1),
    ],
)
def test_gradient_is_that_of_the_weighted_loss(
    tokenizer: Any, tmp_path: Path, name: str, denominator: str, accumulate: int
):
    seen, policy = Gradients(), POLICIES[name]()
    trainer = make_trainer(
        RockDistillationTrainer,
        tokenizer,
        tmp_path,
        accumulate,
        policy=policy,
        denominator=denominator,
        callbacks=[seen],
    )
    trainer.train()
    assert largest_difference(seen.steps[0], naive(trainer._buffered_inputs, policy, denominator)) < 1e-5
    other = {"all": "kept", "kept": "all"}[denominator]
    if name not in ("asymmetric",):
        assert largest_difference(seen.steps[0], naive(trainer._buffered_inputs, policy, other)) > 1e-2
    if name in ("frozen", "soft"):
        for shift in (-1, 1):
            assert largest_difference(seen.steps[0], naive(trainer._buffered_inputs, policy, denominator, shift)) > 1e-2


def free_port() -> int:
    """A port below those the system hands to outgoing connections, so that none of them takes it meanwhile."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no free port")


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo")
def test_processes_share_weights_and_denominator(tmp_path: Path):
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, trl_case.__file__, "tip", "kept", str(tmp_path)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(trl_case.__file__).parent,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    gradients = [load_file(tmp_path / f"gradients-{rank}.safetensors") for rank in range(2)]
    micros = [load_file(path) for path in sorted(tmp_path.glob("micro-*.safetensors"))]
    assert len(micros) == 4
    assert largest_difference(gradients[0], naive(micros, POLICIES["tip"](), "kept")) < 1e-5
    assert all(torch.equal(values, gradients[1][name]) for name, values in gradients[0].items())
    rows = training_rows(tmp_path / "run")
    assert rows.num_rows == sum(int(micro["completion_mask"].sum()) for micro in micros)
    assert rows.column("rollout_id").unique().to_pylist() == list(range(8))


def test_traces_hold_every_token_of_every_update(tokenizer: Any, tmp_path: Path):
    trainer = make_trainer(
        RockDistillationTrainer,
        tokenizer,
        tmp_path / "trl",
        2,
        policy={"name": "rocks", "rocks": ROCKS, "denominator": "kept"},
        trace_dir=tmp_path / "run",
    )
    assert trainer.denominator == "kept"
    trainer.train()
    store = TraceStore(tmp_path / "run", source="training")
    rows = store.table().order_by(["rollout_id", "position"]).to_pyarrow().to_pandas()
    student, teacher = tiny_model(1, 16).double(), tiny_model(2, 24).double()
    for micro in trainer._buffered_inputs:
        scores, tokens, _ = double_scores(student, teacher, micro)
        places = micro["token_index"][micro["completion_mask"].bool()].numpy()
        found = rows.iloc[places]
        frozen = np.isin(tokens, ROCKS)
        assert np.array_equal(found["token_id"], tokens)
        assert np.array_equal(found["weight"], np.where(frozen, 0, 1))
        for name, column in scores.items():
            assert found[name].isna().to_numpy().tolist() == frozen.tolist()
            np.testing.assert_allclose(found[name][~frozen], column.detach()[~frozen], rtol=1e-4, atol=1e-5)
    assert len(rows) == sum(int(micro["completion_mask"].sum()) for micro in trainer._buffered_inputs)
    assert rows["position"].tolist() == [
        place for length in rows.groupby("rollout_id").size() for place in range(length)
    ]
    assert rows["prompt_id"].nunique() == 4 and store.token_texts([5]) == [tokenizer.decode([5])]
    (line,) = (tmp_path / "run" / "logs.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["head_rows_skipped"] == pytest.approx(float((rows["weight"] == 0).mean()))
    assert record["kl"] == pytest.approx(rows["kl"].mean())


class Counting(WeightPolicy):
    """Weighs the more, the more tokens it has seen scored; probes every frozen token."""

    name = "counting"

    def __init__(self) -> None:
        self.seen = np.zeros(1)
        self.calls: list[tuple[int, int]] = []

    def weigh(self, tokens: Any) -> np.ndarray:
        return np.where(tokens.token_ids % 2, 0.0, 1.0 + self.seen)

    def probe(self, weights_T: Any, *arrays: Any) -> Any:
        return weights_T == 0

    def observe(self, scores: Any, token_ids_T: np.ndarray, step: int) -> dict[str, Any]:
        self.calls.append((step, int(np.isfinite(scores.kl).sum())))
        self.seen = self.seen + len(token_ids_T) / 100
        return {"seen": float(self.seen[0]), "steps_seen": [step]}

    def state(self) -> dict[str, np.ndarray]:
        return {"seen": self.seen}

    def restore(self, state: Any) -> None:
        self.seen = state["seen"]


class StopAt(TrainerCallback):
    """What an interruption looks like from inside."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def training_rows(run: Path) -> Any:
    return TraceStore(run, source="training").table().order_by(["rollout_id", "position"]).to_pyarrow()


def test_an_interrupted_run_keeps_its_traces_and_goes_on_as_if_nothing_had_been(tokenizer: Any, tmp_path: Path):
    settings = {"save_strategy": "steps", "save_steps": 2}

    def trainer(name: str, **extra: Any) -> Any:
        return make_trainer(
            RockDistillationTrainer,
            tokenizer,
            tmp_path / name,
            2,
            steps=4,
            settings=settings,
            policy=Counting(),
            trace_dir=tmp_path / f"{name}-run",
            **extra,
        )

    whole = trainer("whole")
    whole.train()
    stopped = trainer("stopped", callbacks=[StopAt(3)])
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    policy_steps = training_rows(tmp_path / "stopped-run").column("policy_step").to_pylist()
    assert set(policy_steps) == {0, 1, 2}
    with pytest.raises(RunDirError, match="already holds training traces"):
        trainer("stopped").train()
    resumed = trainer("stopped")
    resumed.train(resume_from_checkpoint=True)
    assert training_rows(tmp_path / "stopped-run").equals(training_rows(tmp_path / "whole-run"))
    logs = [(tmp_path / name / "logs.jsonl").read_text() for name in ("whole-run", "stopped-run")]
    assert logs[0] == logs[1] and json.loads(logs[0].splitlines()[3])["steps_seen"] == [3]
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))
    tokens = [json.loads(line)["seen"] for line in logs[0].splitlines()]
    assert [count for _, count in whole.policy.calls] == np.diff([0, *tokens] * np.array(100)).round().astype(
        int
    ).tolist()
    with pytest.raises(RunDirError, match=r"has no rocktokens\.json"):
        resumed.train(resume_from_checkpoint=str(tmp_path))


def test_a_policy_with_state_of_its_own_runs(tokenizer: Any, tmp_path: Path):
    section = {"name": "online_rocks", "window_steps": 2, "patience": 1, "min_share": 1e-4, "tolerance": 0.9}
    trainer = make_trainer(RockDistillationTrainer, tokenizer, tmp_path, 2, steps=6, policy=section)
    trainer.train()
    logged = [entry["online_rocks"] for entry in trainer.state.log_history if "online_rocks" in entry]
    assert len(logged) == 6 and logged[0] == 0


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"policy": {"name": "rocks"}}, r"policy\.rocks is missing"),
        ({"policy": "rock"}, r"'rock' is not a policy: did you mean rocks\?"),
        ({"denominator": "some"}, "denominator = 'some' is not valid: use 'all' or 'kept'"),
        ({"settings": {"beta": 0.3}, "policy": "tip"}, "beta = 0.3 has no scores .* use 1 "),
        ({"settings": {"beta": 0.3}, "policy": "asymmetric"}, "beta = 0.3 has no scores"),
        ({"teacher_model": None}, "teacher_model is not set"),
    ],
)
def test_what_cannot_be_done_is_refused_at_construction(
    tokenizer: Any, tmp_path: Path, extra: dict[str, Any], sentence: str
):
    def kind(**given: Any) -> Any:
        return RockDistillationTrainer(**{**given, **without_teacher})

    without_teacher = {"teacher_model": extra.pop("teacher_model")} if "teacher_model" in extra else {}
    with pytest.raises(ConfigError, match=sentence):
        make_trainer(kind, tokenizer, tmp_path, **extra)


def test_any_beta_carries_weights(tokenizer: Any, tmp_path: Path):
    settings = {"beta": 0.3}
    made = [
        trained(kind, tokenizer, tmp_path / str(kind), settings=settings)
        for kind in (DistillationTrainer, RockDistillationTrainer)
    ]
    assert losses(made[0]) == losses(made[1])


@pytest.mark.parametrize("version", ["1.15.2", "1.17.0", "2.0", "1.160.0"])
def test_another_version_of_trl_is_refused(
    version: str, monkeypatch: pytest.MonkeyPatch, tokenizer: Any, tmp_path: Path
):
    monkeypatch.setattr(trl_seams.metadata, "version", lambda _: version)
    with pytest.raises(trl_seams.UntestedTRLError, match=rf"TRL {version} .* tested with TRL 1\.16\.x .*pip install"):
        make_trainer(RockDistillationTrainer, tokenizer, tmp_path)


@pytest.mark.parametrize("seam", sorted(trl_seams.SEAMS))
def test_a_seam_that_has_moved_is_refused(seam: str, monkeypatch: pytest.MonkeyPatch):
    module = trl_seams.require_tested_trl()
    owner, _, name = seam.rpartition(".")
    monkeypatch.setattr(getattr(module, owner) if owner else module, name, lambda something_else: None)
    with pytest.raises(trl_seams.UntestedTRLError, match=rf"{seam}\(something_else\)"):
        trl_seams.require_tested_trl()


def test_a_loss_computed_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch):
    module = trl_seams.require_tested_trl()

    def _compute_loss(self: Any, unwrapped_student: Any, inputs: Any, num_items_in_batch: Any) -> None: ...

    monkeypatch.setattr(module.DistillationTrainer, "_compute_loss", _compute_loss)
    with pytest.raises(trl_seams.UntestedTRLError, match="does not compute its loss with _chunked_divergence_loss"):
        trl_seams.require_tested_trl()


def test_without_trl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    def missing(_: str) -> str:
        raise trl_seams.metadata.PackageNotFoundError

    monkeypatch.setattr(trl_seams.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"pip install 'rocktokens\[trl\]'"):
        trl_seams.require_tested_trl()
