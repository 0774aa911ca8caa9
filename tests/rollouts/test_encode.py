"""From prompts to numbered rollouts."""

import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_sampling import EOS_IDS, PAD, make_llama, word_tokenizer

from rocktokens.errors import RocktokensError
from rocktokens.rollouts.encode import Sampling, encode_prompt, make_rollouts
from rocktokens.rollouts.sampler import SampleRequest, TransformersSampler
from rocktokens.types import Message, Prompt

TEMPLATE = "{% for m in messages %}w90 {{ m['content'] }} w91 {% endfor %}{% if add_generation_prompt %}w92{% endif %}"
PROMPT = Prompt("p", "w5 w6 w7")


def test_plain_text_is_tokenised_as_it_is():
    for tokenizer, chat_template in ((word_tokenizer(), True), (word_tokenizer(chat_template=TEMPLATE), False)):
        ids = encode_prompt(tokenizer, PROMPT, chat_template, 10)
        assert ids.tolist() == [5, 6, 7]
        assert ids.dtype == np.int32


def test_the_chat_template_ends_with_the_generation_prompt():
    assert encode_prompt(word_tokenizer(chat_template=TEMPLATE), PROMPT, True, 10).tolist() == [90, 5, 6, 7, 91, 92]


def test_a_prompt_of_just_the_longest_length_passes_and_one_more_is_named():
    assert len(encode_prompt(word_tokenizer(), PROMPT, True, 3)) == 3
    with pytest.raises(RocktokensError, match=r"prompt 'p' has 3 tokens, rollouts.max_prompt_length is 2"):
        encode_prompt(word_tokenizer(), PROMPT, True, 2)


def test_an_empty_prompt_is_named():
    with pytest.raises(RocktokensError, match="prompt 'empty' has no tokens"):
        encode_prompt(word_tokenizer(), Prompt("empty", " "), True, 2)


ROLES = "{% set role = {'system': 'w93', 'user': 'w94', 'assistant': 'w95'} %}"
CHATML = (
    ROLES + "{% for m in messages %}{{ role[m['role']] }} {{ m['content'] }} w91 {% endfor %}"
    "{% if add_generation_prompt %}w95{% endif %}"
)
GEMMA = (  # folds the system message into the user's turn
    ROLES + "{% if messages[0]['role'] == 'system' %}{% set first, rest = messages[0]['content'], messages[1:] %}"
    "{% else %}{% set first, rest = '', messages %}{% endif %}{% for m in rest %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ role[m['role']] }} {{ first if loop.first }} {{ m['content'] }} {% endfor %}w95"
)
REFUSING = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
DROPPING = "{% for m in messages if m['role'] != 'system' %}w94 {{ m['content'] }} {% endfor %}w95"
MISTAKING = "{% for m in messages %}{{ 'w94' if m['role'] == 'user' else 'w95' }} {{ m['content'] }} {% endfor %}w95"
words = st.lists(st.integers(5, 80), min_size=1, max_size=4).map(lambda own: " ".join(f"w{n}" for n in own))


def conversation(system: str | None, earlier: list[tuple[str, str]], text: str) -> Prompt:
    pairs = [own for asked, replied in earlier for own in (Message("user", asked), Message("assistant", replied))]
    first = [] if system is None else [Message("system", system)]
    messages = (*first, *pairs, Message("user", text))
    return Prompt("c", text, messages=messages if len(messages) > 1 else ())


@settings(max_examples=40, deadline=None)
@given(st.none() | words, st.lists(st.tuples(words, words), max_size=2), words, st.sampled_from([CHATML, GEMMA]))
def test_a_conversation_is_what_the_template_makes_of_it(system, earlier, text, template):
    tokenizer, prompt = word_tokenizer(chat_template=template), conversation(system, earlier, text)
    messages = [{"role": own.role, "content": own.content} for own in prompt.messages]
    messages = messages or [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert isinstance(rendered, str) and rendered.endswith("w95")
    assert all(own["content"] in rendered for own in messages)
    assert encode_prompt(tokenizer, prompt, True, 100).tolist() == [int(word[1:]) for word in rendered.split()]


@pytest.mark.parametrize(
    ("template", "used", "sentence"),
    [
        (None, True, r"a conversation of 2 messages, the first of 'system', .* and the tokenizer has none: use models"),
        (CHATML, False, r"only a chat template can render, and rollouts.chat_template is false"),
        (REFUSING, True, r"refuses the messages \(System role not supported\) in prompt 'c': leave out task.system_pr"),
        (DROPPING, True, r"chat template drops the system message in prompt 'c'"),
        (MISTAKING, True, r"chat template takes the system message for the assistant's in prompt 'c'"),
    ],
)
def test_a_template_without_a_place_for_the_system_message_is_named(template, used, sentence):
    tokenizer = word_tokenizer(chat_template=template)
    with pytest.raises(RocktokensError, match=sentence):
        encode_prompt(tokenizer, conversation("w7 w8", [], "w5"), used, 100)
    assert encode_prompt(tokenizer, Prompt("p", "w5"), used, 100).size, "plain prompts go on as before"


def test_rollouts_are_prompt_major_numbered_and_what_the_sampler_gives():
    sampler = TransformersSampler(make_llama(), EOS_IDS, PAD)
    prompts = [Prompt("a", "w9 w8 w7 w6"), Prompt("b", "w5"), Prompt("c", "w40 w41")]
    rollouts = make_rollouts(
        sampler, word_tokenizer(), prompts, Sampling(1.0, 9, 3, max_prompt_length=4),
        num_generations=2, policy_step=4, first_rollout_id=30,
    )  # fmt: skip
    assert [(r.rollout_id, r.prompt_id, r.sample) for r in rollouts] == [
        (30, "a", 0), (31, "a", 1), (32, "b", 0), (33, "b", 1), (34, "c", 0), (35, "c", 1),
    ]  # fmt: skip
    assert not np.array_equal(rollouts[0].token_ids, rollouts[1].token_ids)
    for rollout in rollouts:
        request = SampleRequest(rollout.prompt_id, rollout.prompt_ids, rollout.sample)
        [alone] = sampler.sample([request], temperature=1.0, max_new_tokens=9, seed=3)
        assert np.array_equal(rollout.token_ids, alone.token_ids)
        assert np.allclose(rollout.logprobs, alone.logprobs, atol=1e-5)
        assert (rollout.finished, rollout.policy_step) == (alone.finished, 4)
    assert rollouts[4].prompt_ids.tolist() == [40, 41]


def test_a_prompt_that_comes_again_is_answered_anew_and_shares_add_up_to_the_whole():
    sampler = TransformersSampler(make_llama(), EOS_IDS, PAD)
    prompts = [Prompt("a", "w9 w8"), Prompt("b", "w5"), Prompt("a", "w9 w8"), Prompt("a", "w9 w8"), Prompt("b", "w5")]

    def rollouts(share: range | None):
        return make_rollouts(
            sampler, word_tokenizer(), prompts, Sampling(1.0, 20, 3, max_prompt_length=4),
            num_generations=2, first_rollout_id=10, share=share,
        )  # fmt: skip

    whole = rollouts(None)
    assert [(r.prompt_id, r.sample) for r in whole] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 2), ("a", 3), ("a", 4), ("a", 5), ("b", 2), ("b", 3),
    ]  # fmt: skip
    assert len({tuple(r.token_ids) for r in whole if r.prompt_id == "a"}) == 6
    shared = rollouts(range(2)) + rollouts(range(2, 5))
    assert [(r.rollout_id, r.prompt_id, r.sample, r.token_ids.tolist()) for r in shared] == [
        (10 + index, r.prompt_id, r.sample, r.token_ids.tolist()) for index, r in enumerate(whole)
    ]


# Templates that are no templates


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 1 + 'x' }}", "TypeError: unsupported operand"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "does not end within 0.2"),
    ],
)
def test_a_template_that_fails_or_does_not_end_is_one_sentence(
    template: str, problem: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rocktokens.rollouts.encode.TEMPLATE_SECONDS", 0.2)
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(RocktokensError, match=r"chat template fails on prompt 'p' \(.*chat_template\.jinja") as refused:
        encode_prompt(word_tokenizer(chat_template=template), PROMPT, True, 10)
    assert problem in str(refused.value) and len(str(refused.value).splitlines()) == 1
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.parametrize("template", ["{% if %}", "{{ nope.nope }}", "{{ ''.__class__.__mro__ }}"])
def test_a_template_that_is_wrong_itself_is_to_be_corrected(template: str):
    with pytest.raises(RocktokensError, match=r"in prompt 'p': correct chat_template\.jinja beside the model"):
        encode_prompt(word_tokenizer(chat_template=template), PROMPT, True, 10)


def test_a_template_that_leaves_its_sandbox_is_refused():
    template = "{{ ''.__class__.__mro__ }}"
    with pytest.raises(RocktokensError, match=r"refuses the messages \(access to attribute '__class__'"):
        encode_prompt(word_tokenizer(chat_template=template), PROMPT, True, 10)
