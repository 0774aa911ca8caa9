"""Bans that act only where an alternative is likely: against a loop that decodes one rollout after another."""

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tiny_sampling import EOS_IDS, PAD, VOCAB, make_llama, make_requests, same_completion
from transformers import MistralConfig, MistralForCausalLM

from rocktokens.errors import RocktokensError
from rocktokens.rollouts.decoding import LIKELY, choose
from rocktokens.rollouts.noise import gumbel_noise, stream_key
from rocktokens.rollouts.sampler import Branch, Completion, SampleRequest, TransformersSampler
from rocktokens.types import Rollout

SAMPLING: dict[str, Any] = {"max_new_tokens": 16, "seed": 7}
REQUESTS = make_requests(8, longest=20)
needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="depends on how the library rounds")


def make_sliding() -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, sliding_window=8, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


MODELS = {"refilled": make_llama(), "generate": make_sliding()}


def make_sampler(model, **settings) -> TransformersSampler:
    return TransformersSampler(model, EOS_IDS, PAD, **{"threads": 1, "batch_size": 8, **settings})


def free_rollouts(sampler: TransformersSampler, temperature: float) -> list[Rollout]:
    completions = sampler.sample(REQUESTS, temperature=temperature, **SAMPLING)
    return [
        Rollout(place, request.prompt_id, 0, request.prompt_ids, own.token_ids, own.logprobs, 0, own.finished)
        for place, (request, own) in enumerate(zip(REQUESTS, completions, strict=True))
    ]


def commonest(free: list[Rollout], count: int) -> list[int]:
    counts = Counter(token for rollout in free for token in rollout.token_ids.tolist() if token not in EOS_IDS)
    return [token for token, _ in counts.most_common(count)]


def conditional(request: SampleRequest, banned: list[int], alternatives: list[int]) -> SampleRequest:
    return SampleRequest(request.prompt_id, request.prompt_ids, 0, frozenset(banned), frozenset(alternatives))


def written_one_by_one(model, request: SampleRequest, temperature: float, shift: int = 0, tempered: bool = False):
    """Decode one rollout by whole forwards: its ids, and whether the ban acted at each; in float64 behind the model.

    ``shift`` takes the condition from that many positions before, ``tempered`` from the distribution that is sampled.
    """
    banned, alternatives = sorted(request.banned), sorted(request.alternatives)
    key = torch.tensor([stream_key(SAMPLING["seed"], request.prompt_id, request.sample)])
    written: list[int] = []
    acted: list[bool] = []
    while len(written) < SAMPLING["max_new_tokens"] and not EOS_IDS & set(written[-1:]):
        ids = torch.tensor([[*request.prompt_ids.tolist(), *written]])
        with torch.no_grad():
            logits_LV = model(input_ids=ids).logits[0].double()
        looked_at_V = logits_LV[max(-1 - shift, -len(logits_LV))] / (temperature if tempered else 1.0)
        is_likely = float(looked_at_V.softmax(0)[alternatives].max()) >= LIKELY if alternatives else True
        scores_V = logits_LV[-1].clone()
        if is_likely:
            scores_V[banned] = -torch.inf
        if temperature > 0:
            scores_V = scores_V / temperature + gumbel_noise(key, torch.tensor([len(written)]), VOCAB)[0]
        written.append(int(scores_V.argmax()))
        acted.append(is_likely)
    return written, acted


@pytest.mark.parametrize(("path", "temperature"), [("refilled", 0.0), ("refilled", 0.5), ("generate", 1.0)])
def test_what_is_written_is_what_a_plain_loop_writes(path, temperature):
    """Rows with a condition stand beside rows without one and rows without a ban; a batch is refilled from them."""
    model = MODELS[path]
    sampler = make_sampler(model)
    free = free_rollouts(sampler, temperature)
    common = commonest(free, 8)
    with_alternatives = [(common[:2], common[2:4]), (common[:4], common[4:8]), (common[:1], common[1:2])]
    bans = [*with_alternatives, (common[:2], []), ([], [])]
    requests = [conditional(request, *ban) for request in REQUESTS for ban in bans]
    found = [own.token_ids.tolist() for own in sampler.sample(requests, temperature=temperature, **SAMPLING)]
    loops = [written_one_by_one(model, request, temperature) for request in requests]
    assert found == [written for written, _ in loops]
    with_condition = [acted for request, (_, acted) in zip(requests, loops, strict=True) if request.alternatives]
    assert {True, False} == {act for acted in with_condition for act in acted}
    assert found != [written_one_by_one(model, request, temperature, shift=1)[0] for request in requests]
    if (path, temperature) == ("refilled", 0.5):
        assert found != [written_one_by_one(model, request, temperature, tempered=True)[0] for request in requests]


@needs_mkl
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_branch_at_the_first_banned_token_is_what_decoding_from_the_prompt_gives(temperature):
    model = MODELS["refilled"]
    sampler = make_sampler(model, batch_size=64)
    free = free_rollouts(sampler, temperature)
    common = commonest(free, 9)
    pairs = [(a, b) for a in common for b in common if a != b]
    branches = [
        Branch(place, rollout.token_ids.tolist().index(a), frozenset({a}), frozenset({b}))
        for place, rollout in enumerate(free)
        for a, b in pairs
        if a in rollout.token_ids
    ]
    requests = [conditional(REQUESTS[own.trunk], [*own.banned], [*own.alternatives]) for own in branches]
    whole = sampler.sample(requests, temperature=temperature, **SAMPLING)
    found: dict[int, Completion] = {}
    sampler.branch(free, branches, temperature=temperature, on_done=found.__setitem__, **SAMPLING)
    kinds = set()
    for index, (own, expected) in enumerate(zip(branches, whole, strict=True)):
        rollout, [a] = free[own.trunk], own.banned
        ours = Completion(
            np.concatenate([rollout.token_ids[: own.start], found[index].token_ids]),
            np.concatenate([rollout.logprobs[: own.start], found[index].logprobs]),
            found[index].finished,
        )
        assert same_completion(ours, expected, atol=0)
        is_same = np.array_equal(ours.token_ids, rollout.token_ids)
        acts_at_once = int(found[index].token_ids[0]) != a
        kinds.add("never" if is_same else "at once" if acts_at_once else "later")
    assert kinds == {"never", "at once", "later"}


def test_a_ban_whose_alternatives_are_never_likely_changes_nothing():
    sampler = make_sampler(MODELS["refilled"])
    free = free_rollouts(sampler, 1.0)
    banned = commonest(free, 5)
    seen = {token for request in REQUESTS for token in written_tops(request, free)}
    unlikely = sorted(set(range(VOCAB)) - seen - set(banned))[:15]
    assert len(unlikely) == 15
    found = sampler.sample([conditional(own, banned, unlikely) for own in REQUESTS], temperature=1.0, **SAMPLING)
    for ours, rollout in zip(found, free, strict=True):
        assert np.array_equal(ours.token_ids, rollout.token_ids)
        assert np.array_equal(ours.logprobs, rollout.logprobs)


def written_tops(request: SampleRequest, free: list[Rollout]) -> set[int]:
    """Return every id that is likely at some position of a free rollout."""
    rollout = next(own for own in free if own.prompt_id == request.prompt_id)
    ids = np.concatenate([rollout.prompt_ids, rollout.token_ids])[:-1]
    with torch.no_grad():
        logits_LV = MODELS["refilled"](input_ids=torch.tensor(ids[None])).logits[0, len(rollout.prompt_ids) - 1 :]
    return set((logits_LV.softmax(-1) >= LIKELY).nonzero()[:, 1].tolist())


@pytest.mark.parametrize(("share", "chosen"), [(LIKELY * 1.001, 1), (LIKELY * 0.999, 0)])
def test_an_alternative_is_likely_from_five_percent_on(share, chosen):
    """Id 0 is banned, id 2 its alternative; the second row has no alternatives, the third no ban."""
    probabilities_V = torch.tensor([0.6, 0.4 - share, share])
    banned_RV = torch.tensor([[True, False, False], [True, False, False], [False, False, False]])
    alternatives_RA = torch.tensor([[2, -1], [-1, -1], [-1, -1]])
    zeros_R = torch.zeros(3, dtype=torch.long)
    ids_R, logprobs_R = choose(
        probabilities_V.log().expand(3, 3) + 4.0, banned_RV, alternatives_RA, zeros_R, zeros_R, 0.0
    )
    assert ids_R.tolist() == [chosen, 1, 0]
    assert torch.allclose(logprobs_R.exp(), probabilities_V[ids_R])


@pytest.mark.parametrize("path", MODELS)
def test_a_branch_of_some_length_is_the_beginning_of_the_whole_one(path):
    sampler = make_sampler(MODELS[path])
    free = free_rollouts(sampler, 1.0)
    common = commonest(free, 8)
    places = [(place, token) for place, own in enumerate(free) for token in common if token in own.token_ids]
    found: list[dict[int, Completion]] = []
    for length in (None, 1, 3):
        branches = [
            Branch(place, free[place].token_ids.tolist().index(token), frozenset({token}), length=length)
            for place, token in places
        ]
        found.append({})
        sampler.branch(free, branches, temperature=1.0, on_done=found[-1].__setitem__, **SAMPLING)
    whole, *short = found
    assert len(whole) == len(places)
    for length, cut in zip((1, 3), short, strict=True):
        for index, own in cut.items():
            assert own.token_ids.tolist() == whole[index].token_ids[:length].tolist()
            assert own.finished == (int(own.token_ids[-1]) in EOS_IDS)


def test_an_alternative_outside_the_vocabulary_is_refused():
    with pytest.raises(RocktokensError, match="alternative id 97 is outside the vocabulary of 97: remove it"):
        make_sampler(MODELS["refilled"]).sample(
            [conditional(REQUESTS[0], [5], [VOCAB])], temperature=1.0, max_new_tokens=4, seed=0
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_gpu_with_captured_steps_writes_what_the_cpu_writes(temperature):
    """Rows and their graphs are kept from call to call: with fewer alternatives they serve, without any they do not."""
    on_cpu = make_sampler(MODELS["refilled"])
    on_gpu = make_sampler(copy.deepcopy(MODELS["refilled"]).cuda())
    common = commonest(free_rollouts(on_cpu, temperature), 9)
    for alternatives in (common[1:], common[1:3], [], common[1:3]):
        requests = [conditional(own, [token], alternatives) for own in REQUESTS for token in common[:1]] * 3
        ours, expected = (own.sample(requests, temperature=temperature, **SAMPLING) for own in (on_gpu, on_cpu))
        assert all(same_completion(*both, atol=1e-4) for both in zip(ours, expected, strict=True))
    assert on_gpu._rows is not None
    assert on_gpu._rows._graphs
