"""Branches: the same, bit for bit, as decoding from the prompt under the ban, and nothing shared is decoded again."""

import numpy as np
import pytest
import torch
from tiny_sampling import EOS_IDS, PAD, VOCAB, make_llama, make_requests, same_completion

from rocktokens.errors import RocktokensError
from rocktokens.rollouts import sampler as sampler_module
from rocktokens.rollouts.sampler import Branch, Completion, SampleRequest, TransformersSampler
from rocktokens.rollouts.slots import fits
from rocktokens.types import Rollout

MODEL = make_llama()
REQUESTS = make_requests(17)
SAMPLING = {"max_new_tokens": 30, "seed": 7}
needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="depends on how the library rounds")


def make_sampler(model=MODEL, **settings) -> TransformersSampler:
    return TransformersSampler(model, EOS_IDS, PAD, **{"threads": 1, **settings})


def free_rollouts(sampler: TransformersSampler, temperature: float) -> list[Rollout]:
    completions = sampler.sample(REQUESTS, temperature=temperature, **SAMPLING)
    return [
        Rollout(place, request.prompt_id, 0, request.prompt_ids, own.token_ids, own.logprobs, 0, own.finished)
        for place, (request, own) in enumerate(zip(REQUESTS, completions, strict=True))
    ]


def all_branches(free: list[Rollout]) -> list[Branch]:
    """One at the first occurrence of every token that occurs anywhere, the very first and the last positions too."""
    return [
        Branch(place, rollout.token_ids.tolist().index(token), frozenset({token}))
        for place, rollout in enumerate(free)
        for token in sorted(set(rollout.token_ids.tolist()) - EOS_IDS)
    ]


def branch(sampler, free, branches, temperature) -> list[Completion]:
    found: dict[int, Completion] = {}
    sampler.branch(free, branches, temperature=temperature, on_done=found.__setitem__, **SAMPLING)
    assert sorted(found) == list(range(len(branches)))
    return [found[index] for index in range(len(branches))]


def from_the_prompt(sampler, free, branches, temperature) -> list[Completion]:
    requests = [SampleRequest(free[own.trunk].prompt_id, free[own.trunk].prompt_ids, 0, own.banned) for own in branches]
    return sampler.sample(requests, temperature=temperature, **SAMPLING)


def joined(rollout: Rollout, start: int, own: Completion) -> Completion:
    return Completion(
        np.concatenate([rollout.token_ids[:start], own.token_ids]),
        np.concatenate([rollout.logprobs[:start], own.logprobs]),
        own.finished,
    )


@needs_mkl
@pytest.mark.parametrize("batch_size", [12, 64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_branches_are_what_decoding_from_the_prompt_gives_bit_for_bit(temperature, batch_size):
    sampler = make_sampler(batch_size=batch_size)
    free = free_rollouts(sampler, temperature)
    branches = all_branches(free)[:: 64 // batch_size]
    starts = {own.start for own in branches}
    assert starts >= {0, 1, 2}
    assert max(starts) > 20
    expected = from_the_prompt(sampler, free, branches, temperature)
    for own, found, whole in zip(branches, branch(sampler, free, branches, temperature), expected, strict=True):
        assert same_completion(joined(free[own.trunk], own.start, found), whole, atol=0)


@needs_mkl
def test_states_that_do_not_fit_in_memory_wait_their_turn(monkeypatch):
    sampler = make_sampler(batch_size=16)
    free = free_rollouts(sampler, 1.0)
    branches = all_branches(free)
    expected = branch(sampler, free, branches, 1.0)
    monkeypatch.setattr(sampler_module, "TRUNK_MEMORY", 1)
    for found, before in zip(branch(sampler, free, branches, 1.0), expected, strict=True):
        assert same_completion(found, before, atol=0)


@needs_mkl
def test_a_ban_changes_nothing_before_it_bites_and_everything_depends_on_where():
    """Leaving earlier gives the same rollout; leaving one token too late keeps the banned token."""
    sampler = make_sampler()
    free = free_rollouts(sampler, 1.0)
    branches = [own for own in all_branches(free) if 1 <= own.start < len(free[own.trunk].token_ids) - 1]
    earlier = [Branch(own.trunk, own.start - 1, own.banned) for own in branches]
    later = [Branch(own.trunk, own.start + 1, own.banned) for own in branches]
    founds = [branch(sampler, free, shifted, 1.0) for shifted in (branches, earlier, later)]
    for own, found, before, behind in zip(branches, *founds, strict=True):
        rollout = free[own.trunk]
        right = joined(rollout, own.start, found).token_ids
        assert np.array_equal(joined(rollout, own.start - 1, before).token_ids, right)
        assert not np.array_equal(joined(rollout, own.start + 1, behind).token_ids, right)


def test_only_what_differs_is_decoded():
    """Tokens fed to the model: each trunk once as far as it is shared, then each branch from where it leaves."""
    model, fed = make_llama(), [0, 0]

    def count(_module, args, kwargs, _output):
        rows, width = kwargs["input_ids"].shape
        fed[width > 1] += rows * width

    sampler = make_sampler(model, batch_size=4)
    free = free_rollouts(sampler, 1.0)
    branches = all_branches(free)
    model.register_forward_hook(count, with_kwargs=True)
    found = branch(sampler, free, branches, 1.0)
    decoded = sum(len(own.token_ids) for own in found)
    retraced = sum(max(own.start for own in branches if own.trunk == place) for place in {o.trunk for o in branches})
    whole = sum(own.start + len(completion.token_ids) for own, completion in zip(branches, found, strict=True))
    assert decoded + retraced <= fed[0] <= 1.1 * (decoded + retraced)
    assert fed[0] < 0.75 * whole


def other_models():
    from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel, MistralConfig
    from transformers import MistralForCausalLM as Mistral

    torch.manual_seed(0)
    common = {"vocab_size": VOCAB, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
    narrow = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sliding = MistralConfig(**narrow, num_key_value_heads=1, max_position_embeddings=128, sliding_window=8, **common)
    learned = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, **common)
    return {
        "learned positions": (GPT2LMHeadModel(learned), True),
        "sliding window": (Mistral(sliding), False),
        "alibi": (BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=2, **common)), False),
    }


@pytest.mark.parametrize("name", ["learned positions", "sliding window", "alibi"])
def test_models_whose_cache_cannot_be_refilled_branch_too(name):
    model, refillable = other_models()[name]
    model.eval()
    assert fits(model) == refillable
    sampler = make_sampler(model)
    free = free_rollouts(sampler, 1.0)
    branches = all_branches(free)[::3]
    expected = from_the_prompt(sampler, free, branches, 1.0)
    for own, found, whole in zip(branches, branch(sampler, free, branches, 1.0), expected, strict=True):
        assert same_completion(joined(free[own.trunk], own.start, found), whole, atol=1e-4)


def test_the_generation_config_of_a_model_changes_nothing_and_is_kept():
    model, _ = other_models()["sliding window"]
    expected = free_rollouts(make_sampler(model), 1.0)
    own = model.generation_config
    own.repetition_penalty, own.eos_token_id = 5.0, int(expected[0].token_ids[0])
    for found, before in zip(free_rollouts(make_sampler(model), 1.0), expected, strict=True):
        assert np.array_equal(found.token_ids, before.token_ids)
        assert np.array_equal(found.logprobs, before.logprobs)
    assert model.generation_config is own and own.repetition_penalty == 5.0


def test_eager_attention_takes_the_same_mask():
    model = make_llama()
    model.set_attn_implementation("eager")
    assert fits(model)
    for own, expected in zip(free_rollouts(make_sampler(model), 1.0), free_rollouts(make_sampler(), 1.0), strict=True):
        assert np.array_equal(own.token_ids, expected.token_ids)


@pytest.mark.parametrize(
    ("impossible", "message"),
    [
        (Branch(0, 0, frozenset({2})), "end token 2 is banned"),
        (Branch(0, 0, frozenset({VOCAB})), "outside the vocabulary"),
        (Branch(0, 30, frozenset({9})), "'prompt-0': a branch leaves it at token 30 of"),
        (Branch(0, 4, frozenset({9})), "at most 3 may be written"),
    ],
)
def test_an_impossible_branch_is_refused_before_anything_is_decoded(impossible, message):
    free = free_rollouts(make_sampler(), 1.0)
    branches = [*all_branches(free)[:3], impossible]
    done: list[int] = []
    sampling = SAMPLING | ({"max_new_tokens": 3} if "at most 3" in message else {})
    with pytest.raises(RocktokensError, match=message):
        make_sampler().branch(free, branches, temperature=1.0, on_done=lambda index, _: done.append(index), **sampling)
    assert not done


@needs_mkl
def test_an_end_token_on_the_way_does_not_cut_a_retraced_rollout_short():
    """The rollouts are of a sampler for which nothing is an end."""
    whole = TransformersSampler(MODEL, frozenset(), PAD, threads=1)
    free = [rollout for rollout in free_rollouts(whole, 1.0) if EOS_IDS & set(rollout.token_ids[2:20].tolist())]
    assert free
    branches = [Branch(place, 25, frozenset({9})) for place in range(len(free))]
    expected = branch(whole, free, branches, 1.0)
    for found, whole_one in zip(branch(make_sampler(), free, branches, 1.0), expected, strict=True):
        shared = min(len(found.token_ids), len(whole_one.token_ids))
        assert shared and np.array_equal(found.logprobs[:shared], whole_one.logprobs[:shared])


def test_threads_are_given_back():
    before = torch.get_num_threads()
    make_sampler(threads=1).sample(REQUESTS[:1], temperature=1.0, **SAMPLING)
    assert torch.get_num_threads() == before
