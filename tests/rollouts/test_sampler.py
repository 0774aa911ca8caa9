"""The sampler: independence of batch mates, greedy as transformers has it, bans, ends, errors."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tiny_sampling import EOS_IDS, PAD, VOCAB, make_llama, make_requests, same_completion
from transformers import AutoConfig, AutoModelForCausalLM

from rocktokens.config import load_config
from rocktokens.errors import NonFiniteLossError, RocktokensError
from rocktokens.models.head import hidden_states, lm_head
from rocktokens.models.load import LoadedModel
from rocktokens.rollouts.generate import require_hidden_padding
from rocktokens.rollouts.noise import gumbel_noise, stream_key
from rocktokens.rollouts.rows import DecodingRows
from rocktokens.rollouts.sampler import Completion, SampleRequest, SamplingCopy, TransformersSampler, make_sampler

MODEL = make_llama()
REQUESTS = make_requests(21)


def sampler(**settings: object) -> TransformersSampler:
    return TransformersSampler(**{"model": MODEL, "eos_ids": EOS_IDS, "pad_id": PAD, **settings})  # pyright: ignore


def sample(requests, *, temperature: float = 1.0, max_new_tokens: int = 30, **settings: object) -> list[Completion]:
    return sampler(**settings).sample(requests, temperature=temperature, max_new_tokens=max_new_tokens, seed=7)


def naive_completion(request: SampleRequest, temperature: float, max_new_tokens: int) -> Completion:
    """One request, no batch, no padding, no cache: the whole sequence again for every token."""
    ids, response, logprobs = list(request.prompt_ids), [], []
    key = torch.tensor([stream_key(7, request.prompt_id, request.sample)])
    while len(response) < max_new_tokens:
        with torch.no_grad():
            logits = MODEL(input_ids=torch.tensor([ids])).logits[0, -1]
        scores = logits.double()
        scores[list(request.banned)] = -torch.inf
        if temperature > 0:
            scores = scores / temperature + gumbel_noise(key, torch.tensor([len(response)]), VOCAB)[0]
        token = int(scores.argmax())
        ids.append(token)
        response.append(token)
        logprobs.append(float(logits.log_softmax(0)[token]))
        if token in EOS_IDS:
            break
    return Completion(np.array(response, np.int32), np.array(logprobs, np.float32), response[-1] in EOS_IDS)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_batched_equals_naive_one_by_one(temperature):
    requests = [*REQUESTS[:6], SampleRequest("prompt-0", REQUESTS[0].prompt_ids, 1, frozenset({5, 50}))]
    batched = sample(requests, temperature=temperature)
    for request, completion in zip(requests, batched, strict=True):
        assert same_completion(completion, naive_completion(request, temperature, 30))


def test_responses_end_at_different_lengths():
    """What the other tests compare is not all the same length, and some rollouts never end."""
    completions = sample(REQUESTS)
    assert len({len(completion.token_ids) for completion in completions}) > 4
    assert {completion.finished for completion in completions} == {True, False}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rollout_does_not_depend_on_its_batch(temperature):
    reference = sample(REQUESTS, temperature=temperature)
    alone = [sample([request], temperature=temperature)[0] for request in REQUESTS]
    backwards = sample(REQUESTS[::-1], temperature=temperature)[::-1]
    small_batches = sample(REQUESTS, temperature=temperature, batch_size=5)
    long_mates = sample([*REQUESTS, *make_requests(3, seed=9, longest=90)], temperature=temperature)
    for index, expected in enumerate(reference):
        for other in (alone, backwards, small_batches, long_mates):
            assert same_completion(other[index], expected)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="depends on how the matrix library rounds")
def test_a_rollout_is_the_same_bit_for_bit_on_one_thread():
    reference = sample(REQUESTS)
    for others in ([sample([request])[0] for request in REQUESTS], sample(REQUESTS, batch_size=9)):
        for other, expected in zip(others, reference, strict=True):
            assert np.array_equal(other.logprobs, expected.logprobs)


def test_greedy_is_what_generate_gives():
    requests = make_requests(8, seed=3)
    width = max(len(request.prompt_ids) for request in requests)
    input_ids = torch.full((len(requests), width), PAD)
    mask = torch.zeros_like(input_ids)
    for row, request in enumerate(requests):
        input_ids[row, width - len(request.prompt_ids) :] = torch.from_numpy(request.prompt_ids)
        mask[row, width - len(request.prompt_ids) :] = 1
    generated = MODEL.generate(
        input_ids=input_ids, attention_mask=mask, do_sample=False, max_new_tokens=25, eos_token_id=sorted(EOS_IDS)
    )
    for row, completion in zip(
        generated[:, width:].tolist(), sample(requests, temperature=0, max_new_tokens=25), strict=True
    ):
        assert row[: len(completion.token_ids)] == completion.token_ids.tolist()
        assert completion.finished == (row[len(completion.token_ids) - 1] in EOS_IDS)
        assert all(token == PAD for token in row[len(completion.token_ids) :])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_gpu_writes_what_the_cpu_writes(temperature):
    on_gpu = sample(REQUESTS, temperature=temperature, model=copy.deepcopy(MODEL).cuda(), batch_size=16)
    for ours, expected in zip(on_gpu, sample(REQUESTS, temperature=temperature), strict=True):
        assert same_completion(ours, expected, atol=1e-4)


def test_only_the_last_token_of_a_finished_response_is_an_end():
    for completion in sample(REQUESTS, max_new_tokens=40):
        ends = np.isin(completion.token_ids, sorted(EOS_IDS))
        assert not ends[:-1].any()
        assert ends[-1] == completion.finished
        assert completion.finished or len(completion.token_ids) == 40
        assert (completion.token_ids.dtype, completion.logprobs.dtype) == (np.int32, np.float32)


def test_first_tokens_follow_the_softmax_at_the_temperature():
    prompt = REQUESTS[0].prompt_ids
    requests = [SampleRequest("p", prompt, number) for number in range(3000)]
    completions = sample(requests, temperature=1.3, max_new_tokens=1, batch_size=512)
    observed = np.bincount([completion.token_ids[0] for completion in completions], minlength=VOCAB)
    with torch.no_grad():
        expected = (
            torch.softmax(MODEL(input_ids=torch.tensor(prompt[None])).logits[0, -1] / 1.3, 0).double().numpy() * 3000
        )
    common = expected >= 5
    observed, expected = [np.append(counts[common], counts[~common].sum()) for counts in (observed, expected)]
    assert common.sum() > 5
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.frozensets(st.integers(4, VOCAB - 1), max_size=VOCAB - 5), min_size=1, max_size=6),
    st.sampled_from([0.0, 1.0]),
)
def test_banned_ids_are_never_written(bans, temperature):
    requests = [SampleRequest(r.prompt_id, r.prompt_ids, 0, ban) for r, ban in zip(REQUESTS, bans, strict=False)]
    for request, completion in zip(requests, sample(requests, temperature=temperature, max_new_tokens=12), strict=True):
        assert not request.banned & set(completion.token_ids.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ban_changes_nothing_before_the_token_first_occurs(temperature):
    free = sample(REQUESTS, temperature=temperature)
    changed = 0
    for token in sorted({int(completion.token_ids[len(completion.token_ids) // 2]) for completion in free} - EOS_IDS):
        banned = sample(
            [SampleRequest(r.prompt_id, r.prompt_ids, 0, frozenset({token})) for r in REQUESTS], temperature=temperature
        )
        for with_ban, without in zip(banned, free, strict=True):
            first = int(np.argmax(without.token_ids == token)) if token in without.token_ids else None
            assert np.array_equal(with_ban.token_ids[:first], without.token_ids[:first])
            changed += first is not None
            assert (first is None) == np.array_equal(with_ban.token_ids, without.token_ids)
    assert changed > 5


def test_samples_seeds_and_prompts_have_noise_of_their_own():
    prompt = REQUESTS[0].prompt_ids
    first, again, other_sample, other_id = sample(
        [
            SampleRequest("a", prompt),
            SampleRequest("a", prompt),
            SampleRequest("a", prompt, 1),
            SampleRequest("b", prompt),
        ]
    )
    [other_seed] = sampler().sample([SampleRequest("a", prompt)], temperature=1.0, max_new_tokens=30, seed=8)
    assert same_completion(first, again, atol=0)
    for other in (other_sample, other_id, other_seed):
        assert not np.array_equal(first.token_ids, other.token_ids)


def test_padded_head_columns_do_not_exist():
    """A head widened by columns of large logits samples as before once vocab_size excludes them."""
    wide = make_llama(vocab_size=VOCAB + 31)
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            own = MODEL.get_parameter(name)
            parameter[: len(own)] = own
        wide.lm_head.weight[VOCAB:] = 20.0
    assert any((completion.token_ids >= VOCAB).any() for completion in sample(REQUESTS[:8], model=wide))
    for cut, expected in zip(sample(REQUESTS[:8], model=wide, vocab_size=VOCAB), sample(REQUESTS[:8]), strict=True):
        assert same_completion(cut, expected)


def test_learned_positions_and_sliding_windows_are_independent_of_padding_too():
    from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    common = {"vocab_size": VOCAB, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, **common))
    mistral = MistralForCausalLM(
        MistralConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=128, sliding_window=8, **common,
        )
    )  # fmt: skip
    for model in (gpt2, mistral):
        together = sample(REQUESTS[:9], model=model)
        for request, completion in zip(REQUESTS[:9], together, strict=True):
            assert same_completion(sample([request], model=model)[0], completion)


def test_modes_are_restored_module_by_module_even_after_an_error():
    model = make_llama(attention_dropout=0.5).train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    first, second = sample(REQUESTS[:2], model=model), sample(REQUESTS[:2], model=model)
    assert all(same_completion(*pair, atol=0) for pair in zip(first, second, strict=True))
    assert [module.training for module in model.modules()] == modes
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(NonFiniteLossError):
        sample(REQUESTS[:2], model=model)
    assert [module.training for module in model.modules()] == modes


def test_progress_counts_every_request_once():
    reports: list[int] = []
    sampler(batch_size=8).sample(REQUESTS, temperature=1.0, max_new_tokens=30, seed=7, on_done=reports.append)
    assert sum(reports) == len(REQUESTS)
    assert len(reports) > 3
    assert min(reports) > 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_logits_stop_with_a_named_error(value):
    broken = copy.deepcopy(MODEL)
    broken.lm_head.weight.data[40] = value
    for temperature in (0.0, 1.0):
        with pytest.raises(NonFiniteLossError, match=r"'prompt-0'.*position 0"):
            sample(REQUESTS[:1], model=broken, temperature=temperature)


def test_a_head_that_only_likes_banned_ids_stops_with_a_named_error():
    class OnlyZero(torch.nn.Module):
        def forward(self, hidden):
            logits = hidden.new_full((*hidden.shape[:-1], VOCAB), -torch.inf)
            logits[..., 0] = 0
            return logits

    model = copy.deepcopy(MODEL)
    model.lm_head = OnlyZero()
    [completion] = sample(REQUESTS[:1], model=model, max_new_tokens=3)
    assert completion.token_ids.tolist() == [0, 0, 0]
    with pytest.raises(NonFiniteLossError, match="ban less"):
        sample([SampleRequest("p", REQUESTS[0].prompt_ids, 0, frozenset({0}))], model=model, max_new_tokens=3)


@pytest.mark.parametrize(
    ("request_", "settings", "message"),
    [
        (SampleRequest("q", np.array([5]), 0, frozenset({2, 9})), {}, "'q': end token 2 is banned"),
        (SampleRequest("q", np.array([5]), 0, frozenset({VOCAB})), {}, "banned id 97 is outside the vocabulary of 97"),
        (SampleRequest("q", np.array([5]), 0, frozenset({90})), {"vocab_size": 90}, "outside the vocabulary of 90"),
        (SampleRequest("q", np.array([5]), 0, frozenset({-1})), {}, "banned id -1"),
        (
            SampleRequest("q", np.array([5]), 0, frozenset(range(VOCAB))),
            {"eos_ids": frozenset()},
            "all 97 ids are banned",
        ),
        (SampleRequest("q", np.array([], np.int32)), {}, "'q' has no tokens"),
        (SampleRequest("q", np.full(99, 5)), {}, "'q' has 99 tokens.*30 more.*the model sees only 128.*max_completion"),
        (SampleRequest("q", np.full(71, 5)), {"max_length": 100}, "'q' has 71 tokens.*the teacher sees only 100"),
        (SampleRequest("q", np.full(99, 5)), {"max_length": 200}, "'q' has 99 tokens.*the model sees only 128"),
    ],
)
def test_impossible_requests_are_refused_in_one_sentence(request_, settings, message):
    with pytest.raises(RocktokensError, match=message):
        sample([REQUESTS[0], request_], **settings)


def test_a_prompt_that_just_fits_is_sampled():
    for length, limit in ((98, None), (70, 100)):
        [completion] = sample([SampleRequest("q", np.full(length, 5))], eos_ids=frozenset(), max_length=limit)
        assert len(completion.token_ids) == 30


def test_a_sampling_copy_follows_the_trained_weights_and_keeps_its_tensors():
    source = make_llama()
    source.model.embed_tokens.requires_grad_(False)
    shadow = SamplingCopy(source, torch.bfloat16)
    before = {name: parameter.data_ptr() for name, parameter in shadow.model.named_parameters()}
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.5)
    from_copy = sampler(model=shadow.model, refresh=shadow.refresh)
    from_copy.sample(REQUESTS[:1], temperature=1.0, max_new_tokens=2, seed=7)
    given = dict(source.named_parameters())
    for name, parameter in shadow.model.named_parameters():
        assert parameter.data_ptr() == before[name]
        assert (parameter.dtype, parameter.requires_grad) == (torch.bfloat16, False)
        assert torch.equal(parameter, given[name].to(torch.bfloat16)) == given[name].requires_grad
    assert all(buffer.dtype == torch.float32 for buffer in shadow.model.buffers())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_greedy_is_what_generate_gives_and_captured_steps_stay_valid():
    model = copy.deepcopy(MODEL).cuda()
    ours = sampler(model=model, batch_size=8)
    for _ in range(2):
        first, again = (
            ours.sample(REQUESTS, temperature=0.0, max_new_tokens=25, seed=7, on_done=None) for _ in range(2)
        )
        for request, completion, same in zip(REQUESTS, first, again, strict=True):
            ids = torch.from_numpy(request.prompt_ids).cuda().long()[None]
            row = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=25,
                eos_token_id=sorted(EOS_IDS),
            )[0, ids.shape[1] :]  # fmt: skip
            assert row.tolist() == completion.token_ids.tolist() == same.token_ids.tolist()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    assert ours._rows is not None
    assert ours._rows._graphs


def test_rows_that_no_rollout_is_in_look_at_one_slot(monkeypatch):
    """On a CPU every step is looked at, so that a row is free from the step on that follows its last."""
    free, step = [], DecodingRows._step

    def stepping(rows, count, width):
        free.append(rows.state_FR[1:3, :count][:, ~rows.live_R[:count]].clone())
        step(rows, count, width)

    monkeypatch.setattr(DecodingRows, "_step", stepping)
    sample(REQUESTS, batch_size=16)
    assert sum(slots.numel() for slots in free) > 16
    assert not any(slots.any() for slots in free)


# Families without plain attention


RECURRENT = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1}
ATTENTION = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "mamba": {"state_size": 4, "initializer_range": 0.5},
    "qwen3_next": {
        **ATTENTION,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "llama4_text": {**ATTENTION, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 64},
}


def of_family(family: str, **settings: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **RECURRENT, **settings)).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_samples_is_what_it_scores(family: str):
    """The log-probabilities of sampling are those of one forward over the whole text, without padding."""
    model, requests = of_family(family, **FAMILIES[family]), make_requests(5, longest=12)
    require_hidden_padding(model, PAD)
    for own, request in zip(sample(requests, model=model, max_new_tokens=6), requests, strict=True):
        ids_RL = torch.tensor(np.concatenate([request.prompt_ids, own.token_ids]))[None].long()
        with torch.inference_mode():
            scored_TV = lm_head(model).logits(hidden_states(model, ids_RL)[0]).log_softmax(-1)
        places = range(len(request.prompt_ids) - 1, ids_RL.shape[1] - 1)
        expected = [scored_TV[place, ids_RL[0, place + 1]].item() for place in places]
        np.testing.assert_allclose(own.logprobs, expected, atol=2e-4)


def test_a_student_that_reads_padding_as_text_is_refused():
    model = of_family("rwkv", context_length=64)
    loaded = LoadedModel(model, SimpleNamespace(pad_token_id=PAD), "rwkv", EOS_IDS)
    with pytest.raises(RocktokensError, match=r"RwkvForCausalLM reads padding as text .*: use a student of another"):
        make_sampler(load_config("pebbles"), loaded)
