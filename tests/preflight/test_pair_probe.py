from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rocktokens.config import ScoringSection, TrainingSection
from rocktokens.models.load import LoadedModel
from rocktokens.preflight import pair_probe, resources
from rocktokens.preflight.pair_probe import PairProbe
from rocktokens.preflight.resources import Activations, ModelSize
from rocktokens.types import Rollout

V, EXTRA = 41, 3
STUDENT_ENDS, TEACHER_ENDS = frozenset({5}), frozenset({5, 7, V + 1})


def small_llama(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def small_gpt2():
    """A teacher whose head has three columns that the student's lacks; one of them is an end token of its own."""
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=V + EXTRA, n_embd=24, n_layer=1, n_head=2, n_positions=64, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def pair():
    return (
        LoadedModel(small_llama(), None, "student", STUDENT_ENDS),
        LoadedModel(small_gpt2(), None, "teacher", TEACHER_ENDS),
    )


def random_rollouts(n=7):
    """Every other one ended with the student's end token."""
    generator = np.random.default_rng(3)
    rollouts = []
    for i in range(n):
        prompt, response = (generator.integers(V, size=generator.integers(2, 12)).astype(np.int32) for _ in range(2))
        if finished := i % 2 == 0:
            response[-1] = min(STUDENT_ENDS)
        logprobs = generator.normal(size=len(response)).astype(np.float32)
        rollouts.append(Rollout(i, f"p{i}", 0, prompt, response, logprobs, 0, finished))
    return rollouts


@torch.no_grad()
def distributions(model, rollout):
    """Float64 probabilities (T, V) over the common columns, from the model's own logits, one row a response token."""
    ids = torch.tensor([[*rollout.prompt_ids.tolist(), *rollout.token_ids.tolist()]])
    first = len(rollout.prompt_ids) - 1
    return torch.softmax(model(ids).logits[0, first:-1, :V].double(), dim=-1).numpy()


def test_probe_is_what_a_loop_over_tokens_measures(pair):
    student, teacher = pair
    rollouts = random_rollouts()
    kl, overlap, mass, stop, gap = [], [], [], [], []
    for rollout in rollouts:
        rows = zip(distributions(student.model, rollout), distributions(teacher.model, rollout), strict=True)
        for t, (p, q) in enumerate(rows):
            kl.append(np.sum(p * np.log(p / q)))
            shared = set(np.argsort(-p)[:16]) & set(np.argsort(-q)[:16])
            overlap.append(len(shared) / 16)
            mass.append(sum(p[v] for v in shared))
            gap.append(abs(rollout.logprobs[t] - np.log(p[rollout.token_ids[t]])))
            if rollout.finished and t == len(rollout.token_ids) - 1:
                stop.append(q[5] + q[7])
    probe = pair_probe.probe_pair(student, teacher, rollouts, ScoringSection(tokens_per_batch=40, tokens_per_chunk=4))
    assert len(stop) == 4 and probe.tokens == len(kl)
    measured = [probe.kl, probe.overlap, probe.overlap_mass, probe.stop_mass, probe.sampler_gap]
    assert measured == pytest.approx([np.mean(x) for x in (kl, overlap, mass, stop, gap)], rel=1e-5)
    assert min(probe.seconds_student, probe.seconds_teacher, probe.seconds_heads) > 0


def test_what_cannot_be_measured_is_none_not_zero(pair):
    student, teacher = pair
    endless = [rollout for rollout in random_rollouts() if not rollout.finished]
    probe = pair_probe.probe_pair(student, teacher, endless, ScoringSection(temperature=2.0))
    assert probe.stop_mass is None and probe.sampler_gap is None
    assert pair_probe.probe_pair(student, teacher, endless[:1], ScoringSection()).kl_error is None


def test_the_error_of_the_mean_counts_rollouts_not_tokens():
    generator = np.random.default_rng(0)
    values = generator.normal(size=30)
    alone = pair_probe.clustered_error(values, np.ones(30, dtype=int))
    assert alone == pytest.approx(values.std(ddof=1) / np.sqrt(30))
    repeated = np.repeat(values, 4)
    assert pair_probe.clustered_error(repeated, np.full(30, 4)) == pytest.approx(alone)
    uneven = pair_probe.clustered_error(np.array([1.0, 3.0, 5.0]), np.array([1, 2]))
    assert uneven == pytest.approx(np.sqrt(((1 - 3) ** 2 + (0 + 2) ** 2) * 2) / 3)


class Exponential(torch.nn.Module):
    """Embedding, linear, exponential: autograd saves the ids, the linear layer's input and the exponential's output."""

    def __init__(self, width):
        super().__init__()
        self.embedding, self.linear = torch.nn.Embedding(V, width), torch.nn.Linear(width, width)
        self.device = torch.device("cpu")

    @property
    def base_model(self):
        return lambda input_ids, **_: SimpleNamespace(last_hidden_state=self.linear(self.embedding(input_ids)).exp())


def test_activations_are_the_bytes_autograd_saves_without_the_weights():
    rollout = random_rollouts()[1]
    activations = resources.measure_activations(Exponential(width=10), rollout)
    assert activations == Activations(fixed=0, per_token=8 + 4 * 10 + 4 * 10)


def test_activations_of_one_and_two_rows_foretell_those_of_five():
    model, rollout = small_llama(), random_rollouts()[1]
    ids = np.concatenate([rollout.prompt_ids, rollout.token_ids])
    activations = resources.measure_activations(model, rollout)
    five = resources._kept_bytes(model, torch.tensor(np.tile(ids, (5, 1)), dtype=torch.long), False)
    assert activations.fixed + activations.per_token * 5 * len(ids) == pytest.approx(five)
    model.requires_grad_(False)
    assert resources.measure_activations(model, rollout) == Activations(0, 0)


def test_size_is_read_off_the_model():
    model = small_llama()
    model.model.layers[0].requires_grad_(False)
    frozen = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 32 + 2 * 16  # q, o; k, v; mlp; norms
    whole = 2 * V * 16 + 2 * frozen + 16
    expected = ModelSize(
        whole, whole - frozen, layers=2, width=16, head=V * 16, cache_per_token=2 * 2 * 2 * 4, embeddings=V * 16
    )
    assert ModelSize.of(model) == expected
    model.lm_head.requires_grad_(False)
    assert ModelSize.of(model).head == 0


SIZE = ModelSize(parameters=1000, trainable=100, layers=4, width=10, head=60, cache_per_token=16)


def test_memory_arithmetic():
    need = resources.memory_need(
        SIZE, teacher_bytes=5000, activation_bytes=700, chunk_positions=8, vocab_size=50, sampled_tokens=3
    )
    assert need.student == 4 * 1000 + 12 * 100
    assert need.teacher == 5000
    assert need.update == 700 + 4 * 9 * 8 * 50 + 4 * 60
    assert need.sampling == 4 * 16 * 3
    assert need.checkpoint == 12 * 100
    assert need.peak == 5200 + 5000 + 1200 + need.update
    longer = resources.memory_need(
        SIZE, teacher_bytes=5000, activation_bytes=700, chunk_positions=8, vocab_size=50, sampled_tokens=1000
    )
    assert longer.peak == 5200 + 5000 + 1200 + 64_000


@pytest.mark.parametrize(
    ("trainable", "half", "optim", "student", "saved"),
    [
        (1000, True, "adamw_torch", 2000 + 4000 + 4000 + 8000, 12000),
        (100, True, "adamw_torch", 2 * 900 + 4 * 100 + 4 * 100 + 8 * 100, 1200),
        (1000, False, "adamw_8bit", 4000 + 4000 + 8 * 200 + 800 * (2 + 8 / 256), 4000 + 8 * 200 + 800 * (2 + 8 / 256)),
        (1000, True, "adamw_8bit", 2000 + 4000 + 4000 + 8 * 200 + 800 * (2 + 8 / 256), 4000 + 3225),
    ],
)
def test_bytes_of_halved_weights_and_of_moments_in_8_bits(trainable, half, optim, student, saved):
    """Adapters, which are a tenth here, are not halved; moments of embeddings are in full."""
    size = replace(SIZE, trainable=trainable, embeddings=200 if trainable == 1000 else 0)
    common = {"teacher_bytes": 0, "activation_bytes": 0, "chunk_positions": 0, "vocab_size": 0, "sampled_tokens": 3}
    need = resources.memory_need(size, **common, is_half=half, training=TrainingSection(optim=optim))
    assert need.student == student and need.checkpoint == saved
    assert need.sampling == (2 if half else 4) * 16 * 3
    on_gpu = resources.memory_need(size, **common, is_half=half, bf16=True, on_gpu=True)
    assert on_gpu.sampling == 2 * 16 * 3 + (0 if half else 2 * 1000)


def test_checkpointing_keeps_one_layer_and_the_inputs_of_all():
    activations = Activations(fixed=50, per_token=800)
    assert resources.activation_need(activations, SIZE, 30, checkpointing=False) == 50 + 24_000
    assert resources.activation_need(activations, SIZE, 30, checkpointing=True) == 50 + 30 * (200 + 4 * 4 * 10)


def test_time_arithmetic():
    probe = PairProbe(100, 1.0, None, 1.0, 1.0, None, None, 0.2, 0.5, 0.1)
    assert resources.update_seconds(probe, 400) == pytest.approx(4 * (0.5 + 3 * 0.2 + 2 * 0.1))
    step = {"rollouts": 48, "tokens": 400.0, "batch_size": 32}
    assert resources.sampling_seconds(3.0, 100, **step, fixed_batches=False) == pytest.approx(12.0)
    assert resources.sampling_seconds(3.0, 100, **step, fixed_batches=True) == pytest.approx(6.0)
