"""The TRL adapter: TRL itself where all weights are 1, a naive loss of its own completions where they are not."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rocktokens.errors import ConfigError, TrainingStoppedError
from rocktokens.integrations import trl_seams
from rocktokens.policies import WeightPolicy, make_policy
from rocktokens.traces.store import TraceStore
from rocktokens.training.objective import LIKELY_K
from rocktokens.types import LikelyTokens

pytest.importorskip("trl", reason="the extra [trl] is not installed")

import trl_case
from trl import DistillationTrainer
from trl_case import (
    CLASSES,
    POLICIES,
    ROCKS,
    SHARED,
    Gradients,
    double_scores,
    largest_difference,
    losses,
    make_trainer,
    naive,
    tiny_model,
    trained,
    training_rows,
)

from ranks import run_two_ranks
from rocktokens.integrations.trl import RockDistillationTrainer
from rocktokens.integrations.trl_seams import HeadInputs


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
        ("coarse", "all", 2),
        ("coarse product", "kept", 1),
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
    if name not in ("asymmetric", "coarse"):
        assert largest_difference(seen.steps[0], naive(trainer._buffered_inputs, policy, other)) > 1e-2
    if name in ("frozen", "soft"):
        for shift in (-1, 1):
            assert largest_difference(seen.steps[0], naive(trainer._buffered_inputs, policy, denominator, shift)) > 1e-2


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo")
def test_processes_share_weights_and_denominator(tmp_path: Path):
    run_two_ranks(Path(trl_case.__file__), [str(tmp_path)], tmp_path)
    for policy, denominator in SHARED:
        folder = tmp_path / f"{policy}-{denominator}"
        gradients = [load_file(folder / f"gradients-{rank}.safetensors") for rank in range(2)]
        micros = [load_file(path) for path in sorted(folder.glob("micro-*.safetensors"))]
        assert len(micros) == 4
        assert largest_difference(gradients[0], naive(micros, POLICIES[policy](), denominator)) < 1e-5
        assert all(torch.equal(values, gradients[1][name]) for name, values in gradients[0].items())
        rows = training_rows(folder / "run")
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


def test_the_log_has_the_decision_where_there_are_classes(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(HeadInputs, "scores", None)  # the loss has them already
    policy = {"name": "coarse", "classes": [list(group) for group in CLASSES.groups]}
    folders = {"policy": policy, "trace_dir": tmp_path / "run"}
    trainer = make_trainer(RockDistillationTrainer, tokenizer, tmp_path / "trl", 2, **folders)
    trainer.train()
    student, teacher = tiny_model(1, 16).double(), tiny_model(2, 24).double()
    scores = [double_scores(student, teacher, micro)[0] for micro in trainer._buffered_inputs]
    kl, choice = (torch.cat([getattr(part, name) for part in scores]).mean().item() for name in ("kl", "kl_choice"))
    record = json.loads((tmp_path / "run" / "logs.jsonl").read_text())
    assert record["kl"] == pytest.approx(kl, rel=1e-5) and choice > 0.1
    assert record["kl_decision"] == pytest.approx(kl - choice, rel=1e-5)


def test_rocks_found_online_are_frozen_and_probed(tokenizer: Any, tmp_path: Path):
    section = {"name": "online_rocks", "window_steps": 2, "min_share": 0.04, "tolerance": 0.9, "probe": 0.5}
    still = {"learning_rate": 0.0, "top_k": 2}
    extra = {"policy": section, "settings": still, "trace_dir": tmp_path / "run"}
    trained(RockDistillationTrainer, tokenizer, tmp_path / "trl", 2, steps=8, **extra)
    log = [json.loads(line) for line in (tmp_path / "run" / "logs.jsonl").read_text().splitlines()]
    frozen_at, frozen = next((line["step"], line["online_frozen"]) for line in log if "online_frozen" in line)
    rows = training_rows(tmp_path / "run").to_pandas()
    before = rows["policy_step"] <= frozen_at
    after = rows[~before & rows["token_id"].isin(frozen)]
    assert (rows[before]["weight"] == 1).all() and (after["weight"] == 0).all()
    assert after["kl"].notna().any() and after["kl"].isna().any()
    assert rows[rows["weight"] == 1]["kl"].notna().all()


class Watching(WeightPolicy):
    """Weight 1, and 0 on the rocks; keeps what both models could have written."""

    name, sees_likely, likely = "watching", True, None

    def weigh(self, tokens: Any) -> np.ndarray:
        return np.where(np.isin(tokens.token_ids, ROCKS), 0.0, 1.0)

    def observe_likely(self, likely: LikelyTokens, step: int) -> dict[str, Any]:
        self.likely = likely
        return {}


def test_a_policy_sees_what_both_models_could_have_written(tokenizer: Any, tmp_path: Path):
    """At every token, frozen or not, in the order of the rollouts, whatever order TRL trained them in."""
    policy = Watching()
    trainer = make_trainer(RockDistillationTrainer, tokenizer, tmp_path, 2, policy=policy)
    trainer.train()
    models, seen = (tiny_model(1, 16).double(), tiny_model(2, 24).double()), 0
    for micro in trainer._buffered_inputs:
        kept, first = micro["completion_mask"].bool(), micro["prompt_ids"].shape[1] - 1
        places, written = micro["token_index"][kept], micro["completion_ids"][kept]
        ids, mask = (torch.cat([micro[f"prompt_{n}"], micro[f"completion_{n}"]], dim=1) for n in ("ids", "mask"))
        for number, model in enumerate(models):
            with torch.no_grad():
                logp = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)[:, first:-1][kept]
            top = torch.cat([written[:, None], logp.argsort(dim=-1, descending=True)[:, :LIKELY_K]], dim=1)
            np.testing.assert_array_equal(policy.likely.ids[places, number], top)
            np.testing.assert_allclose(policy.likely.logp[places, number], logp.gather(1, top), atol=1e-4)
        seen += len(places)
    assert len(policy.likely.rollout_ids) == seen and set(policy.likely.rollout_ids.tolist()) == {0, 1, 2, 3}


def test_classes_found_online_are_left_out_and_hold_no_end(tokenizer: Any, tmp_path: Path):
    section = {"name": "online_coarse", "window_steps": 3, "patience": 1, "min_freq": 1, "share": 0.001}
    still = {"learning_rate": 0.0, "top_k": 2}
    extra = {"policy": section, "settings": still, "trace_dir": tmp_path / "run"}
    trainer = trained(RockDistillationTrainer, tokenizer, tmp_path / "trl", 2, steps=4, **extra)
    log = [json.loads(line) for line in (tmp_path / "run" / "logs.jsonl").read_text().splitlines()]
    in_use = [False, *(line["online_classes"] > 0 for line in log[:-1])]
    assert any(in_use) and [("kl_decision" in line) for line in log] == in_use
    assert trainer.policy.tracker.protected.tolist() == sorted(trainer.eos_token_ids)


class Spoiling(WeightPolicy):
    """Gives one token a weight that no token may have."""

    name = "spoiling"

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def weigh(self, tokens: Any) -> np.ndarray:
        return np.where(np.arange(len(tokens.token_ids)) == 2, self.weight, 1.0)


@pytest.mark.parametrize("weight", [np.nan, np.inf, -3.0])
def test_weights_that_would_spoil_the_student_are_refused(tokenizer: Any, tmp_path: Path, weight: float):
    trainer = make_trainer(RockDistillationTrainer, tokenizer, tmp_path, policy=Spoiling(weight))
    with pytest.raises(TrainingStoppedError, match=rf"step 0: policy spoiling gives a token the weight {weight}: "):
        trainer.train()
    untrained = tiny_model(1, 16).state_dict()
    assert all(torch.equal(values, untrained[name]) for name, values in trainer.model.state_dict().items())


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


def call_loss(module: Any) -> Any:
    """TRL's loss function on two tokens that differ from the teacher's."""
    hidden = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    head = torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 0.0]])
    return module._chunked_divergence_loss(hidden, -hidden, head, head, torch.ones(1, 2), 1.0)


def test_trainers_in_threads_keep_their_own_loss():
    module = trl_seams.require_tested_trl()
    stock, expected = module._chunked_divergence_loss, call_loss(module)
    both_in, first_out = threading.Barrier(2), threading.Event()

    def first() -> Any:
        with trl_seams.through_heads(module, lambda heads: ("first", 0, heads.valid_N)):
            both_in.wait(10)
            found = call_loss(module)
        first_out.set()
        return found[0]

    def second() -> Any:
        with trl_seams.through_heads(module, lambda heads: ("second", 0, heads.valid_N)):
            both_in.wait(10)
            first_out.wait(10)
            trl_seams.require_tested_trl()
            elsewhere = pool.submit(call_loss, module).result(10)
            return call_loss(module)[0], elsewhere

    with ThreadPoolExecutor(3) as pool:
        ones, others = pool.submit(first), pool.submit(second)
        assert ones.result(10) == "first"
        found, elsewhere = others.result(10)
    assert found == "second" and all(torch.equal(a, b) for a, b in zip(elsewhere, expected, strict=True))
    assert module._chunked_divergence_loss is stock


def test_a_loss_that_weights_did_not_reach_is_refused():
    module = trl_seams.require_tested_trl()
    stock = module._chunked_divergence_loss
    with (
        pytest.raises(trl_seams.UntestedTRLError, match="in a thread of its own"),
        ThreadPoolExecutor(1) as pool,
        trl_seams.through_heads(module, lambda heads: ("ours", 0, heads.valid_N)),
    ):
        pool.submit(call_loss, module).result(10)
    with pytest.raises(KeyError), trl_seams.through_heads(module, lambda heads: {}["missing"]):
        call_loss(module)
    assert module._chunked_divergence_loss is stock
