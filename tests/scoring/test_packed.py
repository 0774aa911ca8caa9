"""Sequences laid end to end have the states and gradients they have alone, and only models that can are packed."""

import copy
import itertools
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from rocktokens.errors import RocktokensError
from rocktokens.gradients.backward import _without_dropout
from rocktokens.models import layers
from rocktokens.scoring import batch as batches
from rocktokens.scoring import hidden, packed, teacher_pass
from rocktokens.scoring.batch import collate, response_states
from rocktokens.scoring.score import score_rollouts
from rocktokens.types import Rollout

V = 41
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LORA = {"target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def rollouts_of(*lengths: tuple[int, int], seed: int = 0) -> list[Rollout]:
    rng = np.random.default_rng(seed)
    return [
        Rollout(
            i,
            f"p{i}",
            0,
            rng.integers(V, size=prompt, dtype=np.int32),
            rng.integers(V, size=response, dtype=np.int32),
            np.zeros(response, np.float32),
            0,
            finished=True,
        )
        for i, (prompt, response) in enumerate(lengths)
    ]


ROLLOUTS = rollouts_of((3, 5), (1, 1), (7, 2), (2, 9), (4, 4))


def llama(**settings) -> LlamaForCausalLM:
    """Fewer key than query heads, and attention that is far from even."""
    torch.manual_seed(0)
    sizes = TINY | {"num_key_value_heads": 2, "vocab_size": V, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**(sizes | settings)))


def gpt2(**settings) -> GPT2LMHeadModel:
    """Learned positions."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": V, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(**(sizes | settings)))


def adapted(model):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**LORA))


MODELS = {"llama": llama, "gpt2": gpt2, "lora": lambda: adapted(llama())}


def one_sequence_at_a_time(q_NHd, k_NGd, v_NGd, starts, starts_k, longest, _longest_k, *, scale, window_size, **_):
    """What the kernel computes, by whole score matrices."""
    bounds = starts.tolist()
    assert starts.dtype == torch.int32 and bounds == starts_k.tolist() and bounds[-1] == len(q_NHd)
    assert longest == max(end - start for start, end in itertools.pairwise(bounds)) and window_size == (-1, 0)
    k_NHd, v_NHd = (x.repeat_interleave(q_NHd.shape[1] // x.shape[1], dim=1) for x in (k_NGd, v_NGd))
    parts = []
    for start, end in itertools.pairwise(bounds):
        q, k, v = (x_NHd[start:end].transpose(0, 1) for x_NHd in (q_NHd, k_NHd, v_NHd))
        later = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        scores = (q @ k.mT * (scale or q.shape[-1] ** -0.5)).masked_fill(later, -torch.inf)
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def any_device(monkeypatch):
    """Pack on the CPU and in any dtype, with an attention that needs no kernel."""
    monkeypatch.setattr(packed, "varlen_attn", one_sequence_at_a_time)
    for module in (batches, teacher_pass, hidden):
        monkeypatch.setattr(module, "packs", lambda model: packed.suits(packed.causal_lm(model), torch.bfloat16))


def states_and_gradients(model, rollouts, device="cpu"):
    """The states of the response tokens, and what the parameters get from a random function of them."""
    model.zero_grad()
    h_TD = response_states(model, collate(rollouts, 0, device))
    probe_TD = torch.randn(h_TD.shape, generator=torch.Generator().manual_seed(3)).to(h_TD)
    (h_TD.float() * probe_TD.float() if h_TD.dtype in packed.HALF else h_TD * probe_TD).sum().backward()
    named = model.named_parameters()
    return h_TD.detach(), {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def padded(monkeypatch, model, rollouts, device="cpu"):
    with monkeypatch.context() as patch:
        patch.setattr(batches, "packs", lambda _model: False)
        return states_and_gradients(model, rollouts, device)


def implementation(model) -> str:
    return model.config._attn_implementation


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("attention", "tolerance"), [("sdpa", 1e-9), ("eager", 1e-4)])
def test_a_packed_row_has_the_states_and_gradients_of_padded_rows(monkeypatch, any_device, name, attention, tolerance):
    """The eager softmax is float32 even in a float64 model."""
    model = MODELS[name]().double().eval()
    model.set_attn_implementation(attention)
    expected_h, expected = padded(monkeypatch, model, ROLLOUTS)
    seen = count_rows(monkeypatch)
    h_TD, found = states_and_gradients(model, ROLLOUTS)
    assert seen == [1], "the row was not packed"
    assert implementation(model) == attention
    torch.testing.assert_close((h_TD, found), (expected_h, expected), atol=tolerance, rtol=0)


def count_rows(monkeypatch) -> list[int]:
    """The leading dimension of every forward from here on."""
    return noted(monkeypatch, len)


def noted(monkeypatch, what) -> list:
    """Something about the ids of every forward from here on."""
    seen: list = []
    run = packed.hidden_states

    def counted(model, input_ids_RL, **layout):
        seen.append(what(input_ids_RL))
        return run(model, input_ids_RL, **layout)

    monkeypatch.setattr(packed, "hidden_states", counted)
    monkeypatch.setattr(batches, "hidden_states", counted)
    return seen


TOKENS = sum(len(rollout.prompt_ids) + len(rollout.token_ids) for rollout in ROLLOUTS)


@pytest.mark.parametrize(("budget", "forwards"), [(TOKENS, [TOKENS]), (TOKENS - 1, [TOKENS - 2, 2]), (20, [20, 18])])
def test_a_replay_fills_its_rows(monkeypatch, any_device, budget, forwards):
    """Padded, all of them need more."""
    student, teacher = llama(num_hidden_layers=1).double().eval(), llama().double().eval()
    encoder = hidden.hidden_encoder(student, ROLLOUTS, budget)
    last = [rollout.rollout_id for rollout in ROLLOUTS], [len(rollout.token_ids) - 1 for rollout in ROLLOUTS]

    def look():
        scores = score_rollouts(student, teacher, ROLLOUTS, tokens_per_batch=budget)
        return {**dict(scores.items()), "states": encoder.look_up(*map(np.array, last))}

    with monkeypatch.context() as patch:
        for module in (batches, teacher_pass, hidden):
            patch.setattr(module, "packs", lambda _model: False)
        expected = look()
    seen = noted(monkeypatch, lambda input_ids_RL: input_ids_RL.numel())
    found = look()
    assert seen == [tokens for tokens in forwards for _ in ("teacher", "student")] + forwards
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_no_sequence_sees_its_neighbours(any_device):
    model = llama().double().eval()
    together = states_and_gradients(model, ROLLOUTS)[0].split([len(rollout.token_ids) for rollout in ROLLOUTS])
    for order in ([4, 2, 0, 1, 3], [3], [1, 1]):
        chosen = [ROLLOUTS[index] for index in order]
        again = states_and_gradients(model, chosen)[0].split([len(rollout.token_ids) for rollout in chosen])
        for index, own in zip(order, again, strict=True):
            torch.testing.assert_close(own, together[index], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_layers_attend_again_as_they_did(monkeypatch, any_device, name):
    model = MODELS[name]().double().eval()
    plain = states_and_gradients(model, ROLLOUTS)
    for dropout in (module for module in model.modules() if isinstance(module, torch.nn.Dropout)):
        dropout.p = 0.0
    for key in packed.ATTENTION_DROPOUT:
        setattr(model.config, key, 0.0)
    model.train()
    model.gradient_checkpointing_enable(packed.checkpointing_kwargs(model))
    seen = count_rows(monkeypatch)
    checkpointed = states_and_gradients(model, ROLLOUTS)
    assert seen == [1] and implementation(model) == "sdpa"
    torch.testing.assert_close(checkpointed, plain, atol=1e-12, rtol=0)


def test_a_model_that_is_checkpointed_in_another_way_is_padded_for_gradients_only(any_device):
    model = llama().train()
    assert packed.suits(model, torch.bfloat16)
    for others in (None, {"use_reentrant": True}, {"use_reentrant": False}):
        model.gradient_checkpointing_enable(others)
        assert not packed.suits(model, torch.bfloat16)
        with torch.no_grad():
            assert packed.suits(model, torch.bfloat16)
        assert packed.suits(model.eval(), torch.bfloat16)
        model.train()
    model.gradient_checkpointing_enable(packed.checkpointing_kwargs(model))
    assert packed.suits(model, torch.bfloat16)


def test_under_autocast_the_kernel_gets_half_width(monkeypatch, any_device):
    dtypes = set()

    def noting(q, k, v, *rest, **settings):
        dtypes.update(x.dtype for x in (q, k, v))
        return one_sequence_at_a_time(q, k, v, *rest, **settings)

    monkeypatch.setattr(packed, "varlen_attn", noting)
    model = llama().eval()
    with torch.autocast("cpu", torch.bfloat16):
        h_TD, found = states_and_gradients(model, ROLLOUTS)
    assert dtypes == {torch.bfloat16}
    expected_h, expected = states_and_gradients(copy.deepcopy(model), ROLLOUTS)
    assert relative(h_TD, expected_h) < 0.02
    assert all(relative(found[name], expected[name]) < 0.1 for name in expected)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance as a share of the length."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_the_own_attention_is_back_after_an_error(any_device):
    model = llama().eval()
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        states_and_gradients(model, ROLLOUTS)
    handle.remove()
    assert implementation(model) == "sdpa"


def test_a_row_runs_with_quick_layers(monkeypatch, any_device):
    opened = []

    @contextmanager
    def noting(model):
        opened.append(model)
        hook = model.model.layers[0].register_forward_hook(lambda *_: opened.append("ran"))
        yield
        hook.remove()

    monkeypatch.setattr(packed, "quick_layers", noting)
    model = llama().eval()
    response_states(model, collate(ROLLOUTS, 0, "cpu"))
    assert opened == [model, "ran"]


def mistral(window):
    return MistralForCausalLM(MistralConfig(**TINY, num_key_value_heads=2, vocab_size=V, sliding_window=window))


def flash(model):
    model.config._attn_implementation = "flash_attention_2"
    return model


def latent():
    small = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**TINY, **small, **experts, vocab_size=V))


@pytest.mark.parametrize(
    ("model", "dtype", "expected"),
    [
        (llama, torch.bfloat16, True),
        (llama, torch.float16, True),
        (llama, torch.float32, False),
        (llama, torch.float64, False),
        (lambda: llama(head_dim=192), torch.bfloat16, True),
        (lambda: llama(head_dim=200), torch.bfloat16, False),
        (lambda: llama(head_dim=12), torch.bfloat16, False),
        (lambda: llama(attention_dropout=0.1).eval(), torch.bfloat16, True),
        (lambda: llama(attention_dropout=0.1).train(), torch.bfloat16, False),
        (lambda: gpt2().train(), torch.bfloat16, False),
        (lambda: gpt2(attn_pdrop=0.0).train(), torch.bfloat16, True),
        (lambda: mistral(None), torch.bfloat16, True),
        (lambda: mistral(4), torch.bfloat16, False),
        (lambda: flash(llama()), torch.bfloat16, False),
        (latent, torch.bfloat16, False),
        (lambda: BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=4)), torch.bfloat16, False),
    ],
)
def test_which_models_suit(model, dtype, expected):
    assert packed.suits(model(), dtype) is expected


def test_nothing_is_packed_on_a_cpu():
    model = llama().to(torch.bfloat16).eval()
    assert packed.suits(model, torch.bfloat16) and not packed.packs(model)


@pytest.mark.parametrize("name", ["attention_mask", "dropout", "sliding_window", "softcap", "s_aux", "position_bias"])
def test_attention_of_another_kind_is_refused_by_name(name):
    x = torch.zeros(1, 2, 3, 8)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    given = {"attention_mask": None, name: 0.5}
    with pytest.raises(RocktokensError, match=rf"Linear attends with {name}, .* training.bf16 = false"):
        packed.packed_attention(torch.nn.Linear(1, 1), x, x, x, cu_seq_lens_q=starts, max_length_q=3, **given)


def test_the_example_of_the_docstring():
    row = collate(rollouts_of((2, 1), (1, 1)), 0, "cpu").row
    assert row.position_ids_N.tolist() == [0, 1, 2, 0, 1]
    assert row.starts.tolist() == [0, 3, 5] and row.starts.dtype == torch.int32 and row.longest == 3


GPU_ROLLOUTS = rollouts_of((30, 100), (1, 1), (7, 2), (200, 90), (64, 64), (5, 300))
GPU_SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.05}


@needs_gpu
@pytest.mark.parametrize("mode", ["bf16", "fp16", "autocast", "lora", "checkpointed"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_and_padded_agree_on_a_gpu(monkeypatch, mode, head_dim):
    """Both are compared with float32: the packed row is no further from it than the padded rows are."""
    model = llama(**GPU_SIZES, head_dim=head_dim).cuda()
    if mode == "lora":
        model = adapted(model).cuda()
    exact_h, exact = padded(monkeypatch, model, GPU_ROLLOUTS, "cuda")
    if mode in ("bf16", "fp16"):
        model = model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[mode])
    if mode == "checkpointed":
        model.train()
        model.gradient_checkpointing_enable(packed.checkpointing_kwargs(model))
    with torch.autocast("cuda", torch.bfloat16, enabled=mode not in ("bf16", "fp16")):
        assert packed.packs(model)
        h_TD, found = states_and_gradients(model, GPU_ROLLOUTS, "cuda")
        padded_h, padded_found = padded(monkeypatch, model, GPU_ROLLOUTS, "cuda")
    assert implementation(model) == "sdpa"
    assert relative(h_TD, exact_h) <= 1.5 * relative(padded_h, exact_h)
    for name, gradient in exact.items():
        assert relative(found[name], gradient) <= 1.5 * relative(padded_found[name], gradient) + 1e-3, name


@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", packed.HALF)
def test_a_replay_with_quick_layers_is_that_of_the_plain_model(monkeypatch, dtype):
    model = llama(**GPU_SIZES).cuda().to(dtype).eval()
    batch = collate(GPU_ROLLOUTS, 0, "cuda")
    launched = []
    for kernel in (layers.normed, layers.rotated):
        name = kernel.__name__
        monkeypatch.setattr(layers, name, lambda *a, f=kernel, n=name: launched.append(n) or f(*a))
    response_states(model, batch)  # with its trials
    launched.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        quick = response_states(model, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (launched.count("normed"), launched.count("rotated")) == (5, 2)
    monkeypatch.setattr(packed, "quick_layers", lambda _: nullcontext())
    plain = response_states(model, batch)
    assert relative(quick, plain) < 2 * torch.finfo(dtype).eps


@needs_gpu
def test_no_sequence_sees_its_neighbours_on_a_gpu():
    model = llama(**GPU_SIZES).cuda().to(torch.bfloat16).eval()
    with torch.no_grad():
        together = response_states(model, collate(GPU_ROLLOUTS, 0, "cuda"))
        other = [*GPU_ROLLOUTS[:2], *rollouts_of((64, 64), (9, 300), seed=1)]
        changed = response_states(model, collate(other, 0, "cuda"))
    own = sum(len(rollout.token_ids) for rollout in GPU_ROLLOUTS[:2])
    assert relative(changed[:own], together[:own]) < 0.01


@needs_gpu
def test_a_batch_and_its_states_make_the_host_wait_for_nothing():
    model = llama(**GPU_SIZES).cuda().to(torch.bfloat16)
    states_and_gradients(model, GPU_ROLLOUTS, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        response_states(model, collate(GPU_ROLLOUTS, 0, "cuda")).float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_layers_checkpointed_by_others_are_padded_even_when_only_they_are_in_train_mode(use_reentrant):
    """As the gradients of a model in eval mode are made: its layers alone are told to train, so they checkpoint."""
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.train()
    assert packed._forgets(model)
    with _without_dropout(model):
        assert not model.training and packed._forgets(model)
        with torch.no_grad():
            assert not packed._forgets(model)
    model.eval()
    assert not packed._forgets(model)
