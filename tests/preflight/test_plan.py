"""What a run would take on GPUs, from two config.json: against counts by hand, real models and the other estimate."""

import json
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from rocktokens.cli.main import app
from rocktokens.config import Config, parse_config
from rocktokens.display.numbers import byte_size
from rocktokens.errors import RocktokensError
from rocktokens.models.head import hidden_states
from rocktokens.preflight.plan import USABLE, Plan, memory_items, plan_run
from rocktokens.preflight.resources import LOGIT_COPIES, Activations, activation_need, activations_of, memory_need
from rocktokens.preflight.shapes import FAKE_TOKENS, ModelShape, student_shape, teacher_shape
from rocktokens.preflight.step_time import step_time
from rocktokens.scoring.fused import SCRATCH_BYTES
from rocktokens.scoring.packed import checkpointing_kwargs

QWEN3_4B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40_960,
}
"""Public configs."""
V, D, INNER, LAYERS, HEADS, KEY_HEADS, HEAD_DIM = 96, 32, 48, 3, 4, 2, 8
LLAMA = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD_DIM,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
EXPERTS, PASSED, EXPERT_WIDTH = 8, 2, 16
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": PASSED,
    "moe_intermediate_size": EXPERT_WIDTH,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
ATTENTION = 2 * D * HEADS * HEAD_DIM + 2 * D * KEY_HEADS * HEAD_DIM
LAYER = ATTENTION + 3 * D * INNER + 2 * D
PARAMETERS = LAYERS * LAYER + D + V * D
WIDE = LLAMA | {"vocab_size": 4096}
"""Holds most in the loss."""


def write_config(folder: Path, config: dict[str, Any]) -> str:
    """A folder with a config.json and nothing else: whatever reads a weight fails."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make_config(folder: Path, student: dict[str, Any], teacher: dict[str, Any], *overrides: str) -> Config:
    names = write_config(folder / "student", student), write_config(folder / "teacher", teacher)
    text = f"""
        [run]
        directory = "run"
        [models]
        student = "{names[0]}"
        teacher = "{names[1]}"
        dtype = "bfloat16"
        [rollouts]
        max_prompt_length = 16
        max_completion_length = 48
        batch_size = 4
        [training]
        per_device_train_batch_size = 2
        gradient_accumulation_steps = 3
    """
    return parse_config(text, list(overrides))


def real_model(config: dict[str, Any], folder: Path) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(write_config(folder, config)))


def checkpointed(model: Any) -> Any:
    """As a run has it."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing_kwargs(model))
    return model


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that were made under it and still live, without the model's weights."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.now = self.most = 0
        self._storages: dict[int, Any] = {own.untyped_storage()._cdata: None for own in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for own in tree_leaves(made):
            if isinstance(own, torch.Tensor):
                self._note(own.untyped_storage())
        self.most = max(self.most, self.now)
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._storages:
            self.now += size
            self._storages[key] = weakref.ref(storage, lambda _: self._forget(key, size))

    def _forget(self, key: int, size: int) -> None:
        del self._storages[key]
        self.now -= size


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Qwen3-30B-A3B teaches Qwen3-4B: 4,096 tokens after prompts of 512, 128 rollouts on each GPU."""
    settings = [
        "rollouts.max_prompt_length=512",
        "rollouts.max_completion_length=4096",
        "rollouts.batch_size=64",
        "training.gradient_accumulation_steps=64",
        "training.gradient_checkpointing=true",
    ]
    config = make_config(tmp_path_factory.mktemp("large"), QWEN3_4B, QWEN3_30B_A3B, *settings)
    return plan_run(config, gpu_gigabytes=80)


def gigabytes(plan: Plan) -> dict[tuple[int, bool], float]:
    return {(own.gpus, own.is_sharded): own.total / 1e9 for own in plan.layouts}


def test_the_pair_of_30_and_4_billion_needs_three_gpus(large: Plan):
    """Totals of an independent count with micro-batches of 16,384 tokens and half-width activations."""
    found = gigabytes(large)
    expected = {(1, False): 143.7, (3, True): 64.4, (4, True): 53.9, (8, True): 38.2}
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=0.1)
    assert large.least_gpus == 3
    by_gpus = {own.gpus: own for own in large.layouts if own.is_sharded}
    assert by_gpus[2].verdict == "does not fit" and by_gpus[3].verdict == "fits, fewer at once"
    assert by_gpus[8].rollouts_at_once == pytest.approx(53, rel=0.1)
    eight = by_gpus[8].step
    assert eight is not None and eight.bottleneck == "sampling" and 120 < eight.total < 240
    assert large.conclusion.startswith("Whole, 147 GB per GPU of 80 GB: does not fit. Sharded: at least 3 GPUs; 3 ")


def test_the_recipe_of_that_pair_passes_the_plan(tmp_path: Path):
    """From two config.json alone, within 10 % of the independent count; rollouts are a server's."""
    folders = [write_config(tmp_path / name, own) for name, own in (("student", QWEN3_4B), ("teacher", QWEN3_30B_A3B))]
    models = (f"models.student={folders[0]}", f"models.teacher={folders[1]}")
    arguments = ["check", "qwen3-30b-a3b-to-4b", "--plan", "--gpu-memory", "80", "--json"]
    done = CliRunner().invoke(app, [*arguments, *(part for own in models for part in ("--set", own))])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    found = {(own["gpus"], own["is_sharded"]): own for own in plan["layouts"]}
    expected = {(1, False): 143.7, (3, True): 64.4, (4, True): 53.9, (8, True): 38.2}
    assert {key: found[key]["total"] / 1e9 for key in expected} == pytest.approx(expected, rel=0.1)
    assert plan["least_gpus"] == 3 and found[3, True]["verdict"] == found[8, True]["verdict"] == "fits"
    assert plan["conclusion"].endswith("Sharded: at least 3 GPUs; 3 leave 12.7 GB and 8 leave 38.8 GB.")
    assert any("rollouts are written by a server" in own for own in plan["assumptions"])


@pytest.mark.parametrize("gpus", [1, 4])
def test_of_a_served_teacher_only_the_head_is_counted(tmp_path: Path, gpus: int):
    config, served = (
        make_config(tmp_path, LLAMA, MOE, *own)
        for own in ((), ("teacher.engine=vllm", "teacher.url=http://127.0.0.1:8001"))
    )
    student, teacher = student_shape(config), teacher_shape(config)
    here, there = (memory_items(own, student, teacher, gpus=gpus, is_sharded=True) for own in (config, served))
    assert there.teacher == 2 * V * D and there.student == here.student
    assert here.activations == there.activations, "the teacher is done before the student starts"
    gathered = 2 * (2 * teacher.largest_layer + teacher.outside_layers) if gpus > 1 else 0
    assert here.working_weights - there.working_weights == pytest.approx(gathered)
    steps = [step_time(own, student, teacher, gpus=gpus, is_sharded=True, at_once=4) for own in (config, served)]
    sent = 3 * 2 * teacher.size.parameters * (gpus - 1) / gpus / 300e9
    assert steps[0].gathering - steps[1].gathering == pytest.approx(sent)


def test_of_a_teacher_that_names_tokens_nothing_is_counted(tmp_path: Path):
    server = ("teacher.engine=vllm", "teacher.url=http://127.0.0.1:8001", "models.dtype=float32")
    states, named = (make_config(tmp_path, LLAMA, MOE, *server, *own) for own in ((), ("teacher.values=top_k",)))
    student, teacher = student_shape(states), teacher_shape(states)
    head, none = (memory_items(own, student, teacher, gpus=1, is_sharded=False) for own in (states, named))
    assert (head.teacher, none.teacher) == (4 * V * D, 0)
    scratch = 10 * 2 * 48 * V, 4 * LOGIT_COPIES * 2 * 48 * V
    assert (head.logits - scratch[0]) - (none.logits - scratch[1]) == 2 * V * D, "nor is the head halved for autocast"


@pytest.mark.parametrize("chunk", [7, 1024])
def test_without_the_fused_kernel_the_logits_of_a_chunk_are_whole(tmp_path: Path, large: Plan, chunk: int):
    """A teacher that names tokens is scored in PyTorch: the scratch of the kernel bounds nothing."""
    server = ("teacher.engine=vllm", "teacher.url=http://127.0.0.1:8001", f"scoring.tokens_per_chunk={chunk}")
    server += ("rollouts.max_completion_length=512", "training.per_device_train_batch_size=4")
    states, named = (
        make_config(tmp_path, QWEN3_4B, QWEN3_30B_A3B, *server, *own) for own in ((), ("teacher.values=top_k",))
    )
    counted = {"gpus": 1, "is_sharded": False}
    fused, whole = (memory_items(own, large.student, large.teacher, **counted) for own in (states, named))
    head = (2 + 4) * 2560 * 151_936
    assert fused.logits == SCRATCH_BYTES + head
    assert whole.logits == 4 * LOGIT_COPIES * chunk * 151_936 + head


def test_a_teacher_on_another_device_leaves_its_head_and_one_process(tmp_path: Path):
    """What it takes there is said; a teacher too large for that GPU is named."""
    config, apart = (make_config(tmp_path, LLAMA, MOE, *own) for own in ((), ("models.teacher_device=cuda:1",)))
    student, teacher = student_shape(config), teacher_shape(config)
    here, there = (memory_items(own, student, teacher, gpus=1, is_sharded=False) for own in (config, apart))
    assert there.teacher == 2 * V * D
    assert replace(there, teacher=0) == replace(here, teacher=0)
    layer = teacher.activations.per_token / LAYERS * 2 * (16 + 48)
    plan = plan_run(apart, 80)
    assert [(own.gpus, own.is_sharded) for own in plan.layouts] == [(1, False)] and plan.least_gpus == 1
    need = 2 * teacher.size.parameters + layer
    taken = f" The teacher takes {byte_size(need)} on models.teacher_device = 'cuda:1'"
    assert plan.conclusion.endswith(f"{taken}.")
    small = plan_run(apart, need / 1e9)
    assert small.conclusion.endswith(f"{taken} of {byte_size(need)}: does not fit.")
    assert "a run with models.teacher_device cannot be sharded" in small.conclusion


def test_only_experts_are_counted_as_such(tmp_path: Path):
    """Not convolutions of a linear attention, which have three dimensions too."""
    mixed = MOE | {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
    shape = teacher_shape(make_config(tmp_path, LLAMA, mixed))
    model = real_model(mixed, tmp_path / "teacher")
    assert any("conv1d" in name for name, _ in model.named_parameters())
    stacked = [own for name, own in model.named_parameters() if ".mlp.experts." in name]
    assert shape.experts == sum(own.numel() for own in stacked) > 0
    assert shape.expert_share == PASSED / EXPERTS


def test_items_of_the_large_pair_by_hand(large: Plan):
    student, teacher = 4_022_468_096, 30_532_122_624
    whole = large.layouts[0].memory
    assert (large.student.size.parameters, large.teacher.size.parameters) == (student, teacher)
    assert [whole.student, whole.gradients, whole.moments] == [4 * student, 4 * student, 8 * student]
    assert [whole.teacher, whole.sampling_copy] == [2 * teacher, 2 * student]
    assert whole.logits == (793 << 20) + (4 + 2) * 151_936 * 2560
    assert large.cache_per_rollout == 36 * 2 * 8 * 128 * 2 * 4608
    assert large.teacher.experts == 48 * 128 * 3 * 2048 * 768 and large.teacher.expert_share == 8 / 128
    each = large.layouts[-1].memory.working_weights
    layers = 2 * (large.student.largest_layer + large.teacher.largest_layer)
    assert each == 2 * (layers + 151_936 * (2560 + 2 * 2048) + 2560 + 2048)


@pytest.mark.parametrize("config", [LLAMA, LLAMA | {"tie_word_embeddings": False}, MOE], ids=["tied", "untied", "moe"])
def test_parameters_are_those_of_the_real_model(tmp_path: Path, config: dict[str, Any]):
    shape = student_shape(make_config(tmp_path, config, LLAMA))
    model = real_model(config, tmp_path / "student")
    assert shape.size.parameters == sum(own.numel() for own in model.parameters())
    layers = [sum(own.numel() for own in layer.parameters()) for layer in model.model.layers]
    assert (shape.in_layers, shape.largest_layer) == (sum(layers), max(layers))
    experts = LAYERS * EXPERTS * 3 * D * EXPERT_WIDTH if config is MOE else 0
    assert shape.experts == experts
    assert shape.active_in_layers == sum(layers) - experts * (1 - PASSED / EXPERTS)


def test_tied_heads_count_once(tmp_path: Path):
    tied = plan_run(make_config(tmp_path / "a", LLAMA, LLAMA)).layouts[0].memory
    untied = plan_run(make_config(tmp_path / "b", LLAMA | {"tie_word_embeddings": False}, LLAMA)).layouts[0].memory
    assert tied.student == 4 * PARAMETERS and untied.student == 4 * (PARAMETERS + V * D)
    assert untied.moments - tied.moments == 8 * V * D and untied.sampling_copy - tied.sampling_copy == 2 * V * D
    assert untied.logits == tied.logits and untied.teacher == tied.teacher


@pytest.mark.parametrize("bf16", [True, False])
def test_a_fake_forward_keeps_what_a_real_one_keeps(tmp_path: Path, bf16: bool):
    """Beside it a mask, and keys and values once for every query head: fake tensors take transformers' slower path."""
    shape = student_shape(make_config(tmp_path, LLAMA, LLAMA, f"training.bf16={str(bf16).lower()}"))
    model = real_model(LLAMA, tmp_path / "student")
    real = activations_of(model, torch.zeros(FAKE_TOKENS, dtype=torch.long), bf16=bf16)
    repeated = 2 * (HEADS - KEY_HEADS) * HEAD_DIM
    beside = (2 if bf16 else 4) * LAYERS * (FAKE_TOKENS + repeated)
    assert shape.activations == replace(real, per_token=real.per_token + beside)


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("bf16", ["true", "false"])
def test_with_checkpointing_a_fake_forward_keeps_what_a_real_one_keeps(
    tmp_path: Path, config: dict[str, Any], bf16: str
):
    overrides = "training.gradient_checkpointing=true", f"training.bf16={bf16}"
    shape = student_shape(make_config(tmp_path, config, LLAMA, *overrides))
    model = checkpointed(real_model(config, tmp_path / "student"))
    real = activations_of(model, torch.zeros(FAKE_TOKENS, dtype=torch.long), bf16=bf16 == "true")
    assert shape.kept == real and real.per_token >= 4 * LAYERS * D, "the input of each layer, in float32"
    assert shape.activations == student_shape(make_config(tmp_path, config, LLAMA, overrides[1])).kept


def test_a_layer_that_is_computed_again_adds_its_inside_to_its_input(tmp_path: Path):
    """The inside is what one more layer makes autograd keep."""
    one, more = (
        student_shape(
            make_config(tmp_path, LLAMA | {"num_hidden_layers": layers}, LLAMA, "training.gradient_checkpointing=true")
        )
        for layers in (LAYERS, LAYERS + 1)
    )
    inside, layer_input = (
        getattr(more, own).per_token - getattr(one, own).per_token for own in ("activations", "kept")
    )
    assert (layer_input, one.again.per_token) == (4 * D, inside - layer_input)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_what_is_alive_after_the_forward_is_what_the_plan_counts(tmp_path: Path, checkpointing: bool):
    """Storages that live, not what autograd says: with checkpointing autocast alone has the copies, and drops them."""
    config = make_config(tmp_path, WIDE, WIDE, f"training.gradient_checkpointing={str(checkpointing).lower()}")
    planned = plan_run(config).layouts[0].memory
    model = real_model(WIDE, tmp_path / "student")
    model = checkpointed(model) if checkpointing else model
    ids, half = torch.zeros(2, 16 + 48, dtype=torch.long), 2 * LAYERS * (LAYER - 2 * D)
    with Alive(model) as alive:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h_RLD = hidden_states(model, ids)
            in_loss = alive.now - h_RLD.untyped_storage().nbytes()
        afterwards = alive.now - h_RLD.untyped_storage().nbytes()
    slower = 0 if checkpointing else 2 * LAYERS * (FAKE_TOKENS + 2 * (HEADS - KEY_HEADS) * HEAD_DIM) * ids.numel()
    assert planned.activations + planned.working_weights - slower == pytest.approx(in_loss, rel=0.05)
    assert in_loss - afterwards == (half if checkpointing else 0)
    assert planned.working_weights == pytest.approx(half, rel=0.02)


def test_a_teacher_has_less_alive_than_the_inside_of_a_layer(tmp_path: Path):
    shape = teacher_shape(make_config(tmp_path, LLAMA, LLAMA))
    model, ids = real_model(LLAMA, tmp_path / "teacher").bfloat16(), torch.zeros(2, 16 + 48, dtype=torch.long)
    with Alive(model) as alive, torch.no_grad():
        states = hidden_states(model, ids)
    assert alive.now < 2 * states.untyped_storage().nbytes(), "nothing but the states is left"
    assert 0.25 < alive.most / (shape.activations.per_token / LAYERS * ids.numel()) <= 1


@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_are_there_before_the_loss_only_after_a_micro_batch(tmp_path: Path, accumulation: int):
    config = make_config(tmp_path, LLAMA, LLAMA, f"training.gradient_accumulation_steps={accumulation}")
    memory = plan_run(config).layouts[0].memory
    assert memory.gradients == (4 * PARAMETERS if accumulation > 1 else 0)
    assert memory.activations == student_shape(config).activations.per_token * 2 * (16 + 48)


def test_as_the_backward_pass_ends_every_gradient_is_there(tmp_path: Path):
    """That is the most where activations are few and no micro-batch came before."""
    one = "rollouts.max_prompt_length=1", "rollouts.max_completion_length=1", "training.per_device_train_batch_size=1"
    config = make_config(tmp_path, QWEN3_4B, LLAMA, *one, "training.gradient_accumulation_steps=1")
    memory, shape = plan_run(config).layouts[0].memory, student_shape(config)
    assert memory.gradients == 4 * shape.size.parameters and memory.logits == 4 * 151_936 * 2560
    assert memory.activations == shape.activations.per_token / 36 * 2
    assert memory.working_weights == shape.activations.fixed / 36


def test_a_teacher_with_larger_layers_than_the_student_holds_most(tmp_path: Path):
    wide = LLAMA | {"intermediate_size": 400 * INNER}
    config = make_config(tmp_path, LLAMA, wide)
    memory = plan_run(config).layouts[0].memory
    layer = teacher_shape(config).activations.per_token / LAYERS * 2 * (16 + 48)
    assert (memory.activations, memory.working_weights, memory.logits) == (pytest.approx(layer), 0, 0)


def test_autocast_holds_copies_of_trained_weights_alone_where_layers_are_computed_again(tmp_path: Path):
    adapted = "lora.enabled=true", "lora.r=2", "training.gradient_checkpointing=true"
    config = make_config(tmp_path, WIDE, WIDE, *adapted)
    trained = student_shape(config).size.trainable
    assert plan_run(config).layouts[0].memory.working_weights == 2 * trained


def test_a_model_whose_layers_cannot_be_computed_again_is_refused(tmp_path: Path):
    config = LLAMA | {"model_type": "gpt_neox_japanese"}
    assert student_shape(make_config(tmp_path, config, LLAMA)).again == Activations(0, 0)
    with pytest.raises(RocktokensError, match="layers of a gpt_neox_japanese again: set"):
        student_shape(make_config(tmp_path, config, LLAMA, "training.gradient_checkpointing=true"))


def test_attention_that_keeps_all_pairs_of_tokens_is_counted_at_full_length(tmp_path: Path):
    gemma = LLAMA | {"model_type": "gemma2", "query_pre_attn_scalar": HEAD_DIM}
    shape = student_shape(make_config(tmp_path, gemma, LLAMA))
    model = real_model(gemma, tmp_path / "student")
    assert shape.activations == activations_of(model, torch.zeros(16 + 48, dtype=torch.long), bf16=True)
    longer = student_shape(make_config(tmp_path, gemma, LLAMA, "rollouts.max_completion_length=112"))
    pairs = HEADS * LAYERS * 64
    assert longer.activations.per_token - shape.activations.per_token >= 2 * pairs


def test_whole_and_sharded_over_one_are_the_same(tmp_path: Path):
    for overrides in ((), ("lora.enabled=true",), ("training.bf16=false",)):
        config = make_config(tmp_path, LLAMA, MOE, *overrides)
        student, teacher = student_shape(config), teacher_shape(config)
        whole, sharded = (memory_items(config, student, teacher, gpus=1, is_sharded=own) for own in (False, True))
        assert whole == sharded


def test_shards_add_up_to_the_whole_and_more_gpus_need_less(tmp_path: Path):
    config = make_config(tmp_path, LLAMA, MOE)
    student, teacher = student_shape(config), teacher_shape(config)
    whole = memory_items(config, student, teacher, gpus=1, is_sharded=False)
    sharded = {gpus: memory_items(config, student, teacher, gpus=gpus, is_sharded=True) for gpus in range(2, 20)}
    for gpus, own in sharded.items():
        for name in ("student", "gradients", "moments", "teacher"):
            assert gpus * getattr(own, name) == pytest.approx(getattr(whole, name))
        assert (own.activations, own.logits, own.sampling_copy) == (
            whole.activations,
            whole.logits,
            whole.sampling_copy,
        )
    totals = [own.total for own in sharded.values()]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == len(totals)


def test_data_parallelism_adds_what_gradients_are_summed_in(tmp_path: Path):
    config = make_config(tmp_path, LLAMA, MOE)
    student, teacher = student_shape(config), teacher_shape(config)
    one, four = (memory_items(config, student, teacher, gpus=own, is_sharded=False) for own in (1, 4))
    assert four == replace(one, reduction=4 * PARAMETERS) and one.reduction == 0


def test_with_adapters_only_they_have_gradients_and_moments(tmp_path: Path):
    rank = 3
    config = make_config(tmp_path, LLAMA, LLAMA, "lora.enabled=true", f"lora.r={rank}")
    memory = plan_run(config).layouts[0].memory
    widths = [(D, HEADS * HEAD_DIM), (D, KEY_HEADS * HEAD_DIM), (D, KEY_HEADS * HEAD_DIM), (HEADS * HEAD_DIM, D)]
    widths += [(D, INNER), (D, INNER), (INNER, D)]
    adapters = LAYERS * rank * sum(a + b for a, b in widths)
    assert memory.student == 4 * (PARAMETERS + adapters)
    assert (memory.gradients, memory.moments) == (4 * adapters, 8 * adapters)
    assert memory.logits == plan_run(make_config(tmp_path, LLAMA, LLAMA)).layouts[0].memory.logits - 4 * V * D


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_a_halved_student_has_a_master_copy_and_is_sampled_from_itself(tmp_path: Path, optim: str):
    whole, half = (
        plan_run(make_config(tmp_path, LLAMA, LLAMA, f"training.optim={optim}", f"models.student_dtype={dtype}"))
        for dtype in ("float32", "bfloat16")
    )
    before, after = whole.layouts[0].memory, half.layouts[0].memory
    assert (before.student, before.master_copy, before.sampling_copy) == (4 * PARAMETERS, 0, 2 * PARAMETERS)
    assert (after.student, after.master_copy, after.sampling_copy) == (2 * PARAMETERS, 4 * PARAMETERS, 0)
    assert after.working_weights == 0 < before.working_weights and after.moments == before.moments
    moments = 8 * PARAMETERS if optim == "adamw_torch" else 8 * V * D + (2 + 8 / 256) * (PARAMETERS - V * D)
    assert after.moments == moments
    kinds = {(own.gpus, own.is_sharded) for own in half.layouts}
    assert (2, False) not in kinds and ((2, True) in kinds) == (optim == "adamw_torch")
    assert (2, False) in {(own.gpus, own.is_sharded) for own in whole.layouts}


def test_8_bits_that_do_not_fit_one_gpu_are_not_offered_shards(tmp_path: Path):
    planned = plan_run(make_config(tmp_path, LLAMA, LLAMA, "training.optim=adamw_8bit"), 1e-6)
    assert planned.least_gpus is None and "'adamw_8bit' cannot be sharded" in planned.conclusion


@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_the_plan_of_one_gpu_is_the_estimate_of_check(tmp_path: Path, checkpointing: str):
    """Both count the same things by different code; ``check`` adds up the loss and a layer that is computed again."""
    config = make_config(tmp_path, LLAMA, LLAMA, f"training.gradient_checkpointing={checkpointing}")
    student, teacher = student_shape(config), teacher_shape(config)
    planned = plan_run(config)
    memory, tokens = planned.layouts[0].memory, 2 * (16 + 48)
    activations = activation_need(student.activations, student.size, tokens, checkpointing=checkpointing == "true")
    need = memory_need(
        student.size,
        teacher_bytes=2 * teacher.size.parameters,
        activation_bytes=activations,
        chunk_positions=0,
        vocab_size=V,
        sampled_tokens=5 * (16 + 48),
        on_gpu=True,
        bf16=True,
    )
    assert memory.student + memory.gradients + memory.moments == need.student
    assert memory.teacher == need.teacher
    assert memory.sampling_copy + 5 * planned.cache_per_rollout == need.sampling
    counted = memory.activations + memory.working_weights
    assert counted == pytest.approx(activations) if checkpointing == "false" else counted < activations


def test_room_is_counted_in_whole_rollouts(tmp_path: Path):
    config = make_config(tmp_path, LLAMA, LLAMA)
    first = plan_run(config)
    needed, cache = first.layouts[0].total, first.cache_per_rollout

    def planned(rollouts: float) -> tuple[int, str, int | None]:
        found = plan_run(config, (needed + rollouts * cache) / USABLE / 1e9)
        return found.layouts[0].rollouts_at_once, found.layouts[0].verdict, found.least_gpus

    assert planned(4.01) == (4, "fits", 1)
    assert planned(3.99) == (3, "fits, fewer at once", 1)
    assert planned(0.99)[:2] == (0, "does not fit")
    assert "rollouts.batch_size asks for 4" in plan_run(config, (needed + 3.5 * cache) / USABLE / 1e9).conclusion


def test_the_least_number_of_gpus_is_the_first_that_fits(tmp_path: Path):
    config = make_config(tmp_path, LLAMA, LLAMA | {"num_hidden_layers": 40})
    counted = plan_run(config)
    cache = counted.cache_per_rollout
    five = memory_items(config, counted.student, counted.teacher, gpus=5, is_sharded=True).total + cache
    plan = plan_run(config, five / USABLE / 1e9 * (1 + 1e-9))
    assert plan.least_gpus == 5 and 5 in [own.gpus for own in plan.layouts]
    assert [own.gpus for own in plan.layouts if own.rollouts_at_once] == [5, 8, 16]
    never = plan_run(config, cache / 1e9)
    assert never.least_gpus is None and "neither does it sharded" in never.conclusion


def test_a_step_by_hand(tmp_path: Path):
    config = make_config(tmp_path, LLAMA, LLAMA)
    student, teacher = student_shape(config), teacher_shape(config)
    step = step_time(config, student, teacher, gpus=1, is_sharded=False, at_once=4)
    rollouts, response, length = 6, 48, 64
    forward = 2 * LAYERS * LAYER + 4 * LAYERS * HEADS * HEAD_DIM * length / 2
    head = 2 * V * D
    speed = 989e12 * 0.4
    assert step.teacher == pytest.approx((rollouts * length * forward + rollouts * response * head) / speed)
    assert step.update == pytest.approx((rollouts * length * 3 * forward + rollouts * response * 3 * head) / speed)
    assert step.sampling == pytest.approx(2 * response * LAYERS * 0.2e-3), "two batches of layers that are too small"
    assert step.gathering == 0
    again = make_config(tmp_path, LLAMA, LLAMA, "training.gradient_checkpointing=true")
    longer = step_time(again, student, teacher, gpus=1, is_sharded=False, at_once=4)
    assert longer.update - step.update == pytest.approx(rollouts * length * forward / speed)


def test_sampling_a_large_student_is_reading_it(large: Plan):
    layout = next(own for own in large.layouts if own.is_sharded and own.gpus == 8)
    step, rows = layout.step, layout.rollouts_at_once
    assert step is not None and 0 < 128 - 2 * rows < rows
    per_token = large.cache_per_rollout / 4608

    def reading(batch: int) -> float:
        return 4096 * (2 * large.student.size.parameters + batch * (512 + 2048) * per_token) / (3.35e12 * 0.7)

    rest = max(reading(128 - 2 * rows), 4096 * 36 * 0.2e-3)
    assert step.sampling == pytest.approx(2 * reading(rows) + rest)


def test_a_batch_reads_the_experts_that_any_of_its_tokens_passes(tmp_path: Path):
    config = make_config(tmp_path, MOE, LLAMA)
    shape = student_shape(config)
    million = replace(shape.size, parameters=shape.size.parameters * 10**6, cache_per_token=0)
    large_shape: ModelShape = replace(shape, size=million, experts=shape.experts * 10**6)

    def sampled(rows: int) -> float:
        return step_time(config, large_shape, shape, gpus=1, is_sharded=False, at_once=rows).sampling

    one = 2 * (million.parameters - large_shape.experts * (1 - PASSED / EXPERTS))
    assert sampled(1) == pytest.approx(6 * 48 * one / (3.35e12 * 0.7))
    assert 6 * sampled(6) > sampled(1) > sampled(6)


def test_the_command_prints_and_returns_the_same_plan(tmp_path: Path):
    config = make_config(tmp_path, LLAMA, MOE)
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'[run]\ndirectory = "{tmp_path}/run"\n[models]\nstudent = "{config.models.student}"\n'
        f'teacher = "{config.models.teacher}"\n'
    )
    shown = CliRunner().invoke(app, ["check", str(toml), "--plan", "--gpu-memory", "24"])
    record = CliRunner().invoke(app, ["check", str(toml), "--plan", "--gpu-memory", "24", "--json"])
    assert shown.exit_code == record.exit_code == 0
    found = json.loads(record.stdout)
    assert found == json.loads(json.dumps(asdict(plan_run(parse_config(toml.read_text()), 24))))
    text = " ".join(shown.stdout.split())  # lines break where the path of the test says
    assert text.startswith(found["conclusion"][:60]) and "active per token" in text
    assert "a GPU has 24 GB, as given, of which 93% are usable" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--plan", "--gpu-memory", "0"], "--gpu-memory is 0: give the gigabytes of one GPU"),
        (["--plan", "--gpu-memory", "inf"], "--gpu-memory is inf: give the gigabytes of one GPU"),
        (["--gpu-memory", "24"], "which only --plan reads: add --plan"),
        (["--plan", "--set", "models.teacher=nobody/none"], "model 'nobody/none' has no config.json on this machine"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str):
    result = CliRunner().invoke(app, ["check", "pebbles", *arguments])
    assert isinstance(result.exception, RocktokensError) and sentence in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_model_without_attention_is_refused_at_once(tmp_path: Path):
    with pytest.raises(
        RocktokensError, match="is a mamba, which has no attention heads, so --plan cannot count its cache"
    ):
        plan_run(make_config(tmp_path, {"model_type": "mamba", "num_hidden_layers": 2}, LLAMA))


def test_without_a_gpu_its_size_is_named_as_an_assumption(tmp_path: Path):
    plan = plan_run(make_config(tmp_path, LLAMA, LLAMA, "models.device=cpu"))
    assert plan.gpu_memory == 80e9 and "80 GB (assumed: say --gpu-memory)" in plan.assumptions[0]
