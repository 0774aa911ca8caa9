"""Accuracy and its intervals: against formulas, naive loops and a real tiny model."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rocktokens.errors import RocktokensError
from rocktokens.evaluation.accuracy import measure_accuracy
from rocktokens.evaluation.records import EvaluationRecord
from rocktokens.inference.proportions import bootstrap_interval, wilson_interval
from rocktokens.rollouts.encode import Sampling
from rocktokens.rollouts.sampler import SampleRequest, TransformersSampler
from rocktokens.tasks.base import DatasetTask, Task
from rocktokens.tasks.wordmath import Wordmath
from rocktokens.types import Prompt, as_record

EOS_IDS = frozenset({12, 13})


def digits_tokenizer() -> PreTrainedTokenizerFast:
    """Digits, and two end tokens, one of which would read as a digit if it were left in the text."""
    vocabulary = {**{str(digit): digit for digit in range(10)}, "<pad>": 10, "?": 11, "<eos>": 12, "<|9|>": 13}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", extra_special_tokens=["<|9|>"]
    )


def digits_sampler() -> TransformersSampler:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=14, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return TransformersSampler(LlamaForCausalLM(config), EOS_IDS, 10, batch_size=8)


PROMPTS = [Prompt(f"p{n}", f"{n % 10} {n // 10}", str(n % 10)) for n in range(24)]
TASK = DatasetTask("digits", PROMPTS, "math")
SAMPLING = Sampling(temperature=1.0, max_new_tokens=6, seed=5, chat_template=False, max_prompt_length=8)


def run(num_samples: int, temperature: float = 1.0, seed: int = 5, task: Task = TASK):
    sampling = replace(SAMPLING, temperature=temperature, seed=seed)
    return measure_accuracy(digits_sampler(), digits_tokenizer(), task, PROMPTS, sampling, num_samples=num_samples)


@pytest.mark.parametrize(("num_samples", "temperature"), [(1, 0.0), (1, 1.0), (3, 1.0)])
def test_an_evaluation_is_what_grading_every_rollout_by_hand_gives(num_samples, temperature):
    result = run(num_samples, temperature)
    sampler, tokenizer = digits_sampler(), digits_tokenizer()
    lengths, truncated, correct = [], [], []
    for prompt in PROMPTS:
        ids = np.array(tokenizer(prompt.text)["input_ids"], np.int32)
        right = 0
        for number in range(num_samples):
            request = SampleRequest(prompt.id, ids, number)
            [completion] = sampler.sample([request], temperature=temperature, max_new_tokens=6, seed=5)
            digits = [token for token in completion.token_ids.tolist() if token < 10]
            right += bool(digits) and digits[-1] == int(prompt.answer or "")
            lengths.append(len(completion.token_ids))
            truncated.append(completion.token_ids[-1] not in EOS_IDS)
        correct.append(right)
    assert result.correct == correct
    right = [[answer == prompt.answer for answer in own] for prompt, own in zip(PROMPTS, result.answers, strict=True)]
    assert [sum(own) for own in right] == correct
    assert result.prompt_ids == [prompt.id for prompt in PROMPTS]
    assert result.accuracy == pytest.approx(sum(correct) / (24 * num_samples))
    assert result.mean_response_length == pytest.approx(np.mean(lengths))
    assert result.truncated_share == pytest.approx(np.mean(truncated))
    assert (result.n_prompts, result.n_samples) == (24, 24 * num_samples)
    assert result.wilson_interval == wilson_interval(sum(correct), 24 * num_samples)
    assert result.bootstrap_interval == (bootstrap_interval(correct, num_samples, 5) if num_samples > 1 else None)


def test_sampled_evaluations_are_neither_all_right_nor_all_wrong_and_follow_the_seed():
    first, again, other = run(3), run(3), run(3, seed=6)
    assert 0 < first.accuracy < 1
    assert 0 < first.truncated_share < 1
    assert first == again
    assert first.answers != other.answers


def test_answers_are_those_the_task_graded():
    """The model writes digits and never "the answer is": answers to one task, none to the other."""
    assert any(answer is not None for own in run(1).answers for answer in own)
    stated = run(1, task=Wordmath())
    assert (stated.accuracy, stated.answers) == (0, [[None]] * len(PROMPTS))


def test_the_record_is_json():
    result = run(2)
    filed = EvaluationRecord(name="step 4", settings={"seed": 5}, **asdict(result))
    record = json.loads(json.dumps(filed.to_record(), allow_nan=False))
    assert [*record][:4] == ["name", "settings", "task", "accuracy"]
    assert record["accuracy"] == result.accuracy
    assert record["answers"] == result.answers
    assert tuple(record["bootstrap_interval"]) == result.bootstrap_interval
    assert as_record(EvaluationRecord, record) == filed


def test_prompts_without_answers_or_no_prompts_are_refused():
    for prompts, message in (
        ([PROMPTS[0], Prompt("bare", "1")], "'bare' has no answer"),
        ([], "no prompts to evaluate"),
    ):
        with pytest.raises(RocktokensError, match=message):
            measure_accuracy(digits_sampler(), digits_tokenizer(), TASK, prompts, SAMPLING, num_samples=1)
