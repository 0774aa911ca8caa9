"""The settings of a first run follow their rules and fit models and data; the table in docs/init.md is theirs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3Config

from rocktokens.config import JsonlTask, parse_config
from rocktokens.errors import RocktokensError
from rocktokens.models.facts import facts_of_config, model_facts, tokenizer_if_there
from rocktokens.preflight.starter_facts import MATH_TEMPLATE, data_facts
from rocktokens.preflight.starter_file import starter_text, write_starter
from rocktokens.preflight.starter_rules import DataFacts, PairFacts, fit_settings, memory_gigabytes
from rocktokens.rollouts.encode import encode_prompt
from rocktokens.types import Prompt

PAGE = Path(__file__).parents[2] / "docs" / "init.md"
QWEN3 = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen3-4B": (2560, 9728, 36, 32, True),
    "Qwen3-8B": (4096, 12288, 36, 32, False),
}
"""Public configs: width, inner width, layers, heads, whether embeddings and head are one."""


def qwen3(name: str) -> Qwen3Config:
    width, inner, layers, heads, tied = QWEN3[name]
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
        max_position_embeddings=40_960,
    )


def defaults_table() -> str:
    """What the rules give each student, with Qwen3-8B as teacher, as Markdown."""
    facts = {name: facts_of_config(name, qwen3(name)) for name in QWEN3}
    teacher = facts["Qwen3-8B"]
    pairs = [PairFacts(own.parameters, teacher.parameters, own.vocabulary, 40_960) for own in facts.values()]
    fitted = [fit_settings(pair) for pair in pairs]
    rows: dict[str, list[object]] = {
        "parameters": [f"{own.parameters / 1e9:.2f} B" for own in facts.values()],
        "`models.dtype`": [own.dtype for own in fitted],
        "`training.learning_rate`": [f"{own.learning_rate:.0e}".replace("e-0", "e-") for own in fitted],
        "`training.learning_rate` with `--lora`": [
            f"{fit_settings(pair, lora=True).learning_rate:.0e}".replace("e-0", "e-") for pair in pairs
        ],
        "`training.per_device_train_batch_size`": [own.per_device_train_batch_size for own in fitted],
        "`training.gradient_accumulation_steps`": [own.gradient_accumulation_steps for own in fitted],
        "`training.gradient_checkpointing`": [str(own.gradient_checkpointing).lower() for own in fitted],
        "`training.save_steps` of 200": [own.save_steps for own in fitted],
        "`rollouts.max_prompt_length`, no data seen": [own.max_prompt_length for own in fitted],
        "`rollouts.max_completion_length`": [own.max_completion_length for own in fitted],
        "`rollouts.batch_size`": [own.sampling_batch_size for own in fitted],
        "`trace.num_prompts`": [own.trace_prompts for own in fitted],
        "`find.k`": [own.find_k for own in fitted],
        "`knockout.top`": [own.knockout_top for own in fitted],
        "`knockout.num_prompts`": [own.knockout_prompts for own in fitted],
        "GB of both models while training": [
            f"{memory_gigabytes(*own):.0f}" for own in zip(pairs, fitted, strict=True)
        ],
        "the same with `--lora`": [
            f"{memory_gigabytes(*own, lora=True):.0f}" for own in zip(pairs, fitted, strict=True)
        ],
    }
    lines = [["student", *facts], ["---"] * (1 + len(facts)), *([name, *cells] for name, cells in rows.items())]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


def test_the_table_in_the_documentation_is_that_of_the_rules():
    assert defaults_table() in PAGE.read_text(encoding="utf-8"), defaults_table()


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_without_weights_tied_ones_once(tied: bool):
    width, inner, layers, vocabulary = 8, 12, 3, 31
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=77, tie_word_embeddings=tied,
    )  # fmt: skip
    attention = 2 * width * width + 2 * width * (width // 2)
    by_hand = layers * (attention + 3 * width * inner + 2 * width) + width + vocabulary * width * (1 if tied else 2)
    facts = facts_of_config("small", config)
    assert (facts.parameters, facts.vocabulary, facts.context_length) == (by_hand, vocabulary, 77)


def test_a_model_that_is_not_here_is_refused_at_once_in_one_sentence():
    for name in ("nobody/nothing-7b", "no/such/folder", ""):
        with pytest.raises(RocktokensError, match=r"has no config\.json on this machine .*`hf download"):
            model_facts(name)
    assert tokenizer_if_there("nobody/nothing-7b") is None


sizes = st.integers(10**5, 10**11)


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, st.integers(64, 200_000) | st.none(), st.none() | st.integers(1, 300), st.integers(1, 5000))
def test_every_pair_gets_a_config_that_loads_and_fits_its_context(student, teacher, context, longest, records):
    pair = PairFacts(student, teacher, 50_000, context)
    data = DataFacts(
        'odd "name".jsonl', records, "question", "answer", longest_prompt=longest, fields=("question", "a\nb = 1")
    )
    if context is not None and longest is not None and context - longest < 16:
        with pytest.raises(RocktokensError, match=f"{longest} tokens"):
            fit_settings(pair, data)
        return
    config = parse_config(starter_text(Path("run.toml"), "s", "t", pair, data))
    lengths = config.rollouts.max_prompt_length, config.rollouts.max_completion_length
    assert min(lengths) >= 16 and lengths[0] >= (longest or 0)
    assert context is None or sum(lengths) <= context
    assert config.training.rollouts_per_step == 64
    assert config.training.max_steps // config.training.save_steps >= 2, "find needs a first, a middle and a last"
    asked = config.trace.num_prompts, config.knockout.num_prompts, config.evaluation.num_prompts
    assert max(asked) <= records
    assert isinstance(config.task, JsonlTask) and config.task.path == data.path
    assert config.evaluation.task == config.task


@given(sizes, sizes)
@settings(max_examples=60, deadline=None)
def test_larger_students_never_get_larger_steps_batches_or_more_checkpoints(one, other):
    small, large = (fit_settings(PairFacts(own, 10**9, 50_000)) for own in sorted((one, other)))
    for name in ("learning_rate", "per_device_train_batch_size", "sampling_batch_size", "knockout_prompts"):
        if min(one, other) >= 2 * 10**7:  # the pebbles' settings are their own
            assert getattr(small, name) >= getattr(large, name), name
    assert small.gradient_checkpointing <= large.gradient_checkpointing


def test_adapters_are_trained_only_if_asked_for():
    pair = PairFacts(10**9, 10**10, 50_000)
    plain, lora = (
        parse_config(starter_text(Path("run.toml"), "s", "t", pair, None, lora=own)) for own in (False, True)
    )
    assert (plain.lora.enabled, lora.lora.enabled) == (False, True)
    assert lora.training.learning_rate == pytest.approx(10 * plain.training.learning_rate)
    fitted = fit_settings(pair)
    assert memory_gigabytes(pair, fitted) == pytest.approx(16 + 20)
    assert memory_gigabytes(pair, fitted, lora=True) == pytest.approx(4 + 20)


@given(sizes, st.integers(64, 200_000) | st.none(), st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_a_first_look_asks_for_no_more_of_anything_and_shows_every_stage(student, context, records):
    pair, data = PairFacts(student, 10**9, 50_000, context), DataFacts("d.jsonl", records, "question", "answer")
    full, small = (
        parse_config(starter_text(Path("run.toml"), "s", "t", pair, data, small=own)) for own in (False, True)
    )
    assert small.training.rollouts_per_step <= full.training.rollouts_per_step
    for section, key in [
        ("training", "max_steps"),
        ("rollouts", "max_completion_length"),
        ("trace", "num_prompts"),
        ("evaluation", "num_prompts"),
        ("knockout", "num_prompts"),
        ("knockout", "top"),
    ]:
        assert getattr(getattr(small, section), key) <= getattr(getattr(full, section), key), key
    assert small.training.max_steps // small.training.save_steps >= 2, "find needs a first, a middle and a last"
    assert small.trace.num_prompts >= min(records, 40), "find needs 20 prompts in each half"
    assert small.training.learning_rate == full.training.learning_rate


def write_lines(path: Path, *records: dict) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("records", "prompt", "answer", "grading", "template"),
    [
        ([{"question": "a?", "answer": "so\n#### 4"}], "question", "answer", "math", MATH_TEMPLATE),
        ([{"id": 1, "problem": "a?", "solution": r"\boxed{4}"}], "problem", "solution", "math", "{prompt}"),
        ([{"prompt": "a?", "label": 17}], "prompt", "label", "math", "{prompt}"),
        ([{"prompt": "a?", "answer": "Paris"}], "prompt", "answer", "exact", "{prompt}"),
        ([{"prompt": "a?", "answer": "4"}, {"prompt": "b?"}], "prompt", "answer", "math", "{prompt}"),
        ([{"n": 1, "riddle": "a?"}], "riddle", "", "math", "{prompt}"),
    ],
)
def test_fields_and_style_are_guessed_from_the_records(tmp_path, records, prompt, answer, grading, template):
    facts = data_facts(write_lines(tmp_path / "d.jsonl", *records), None)
    found = (facts.prompt_field, facts.answer_field, facts.grading, facts.template)
    assert found == (prompt, answer, grading, template)
    assert (facts.records, facts.longest_prompt) == (len(records), None)


def test_the_longest_prompt_is_measured_as_the_student_reads_it(tmp_path):
    tokenizer = tokenizer_if_there("pebbles-student")
    assert tokenizer is not None
    texts = ["one", "Tom has 3 apples, 4 pears and 17 plums. How many is that?", "two words"]
    path = write_lines(tmp_path / "d.jsonl", *({"question": own} for own in texts))
    read = [len(encode_prompt(tokenizer, Prompt(id="a", text=own, answer=None), True, 10**6)) for own in texts]
    assert data_facts(path, tokenizer).longest_prompt == max(read) == read[1]


@pytest.mark.parametrize(("line", "sentence"), [("", "holds no records"), ('{"n": 1}\n', "no field with a text")])
def test_data_without_prompts_is_refused_and_nothing_is_written(tmp_path, line, sentence):
    data, out = tmp_path / "d.jsonl", tmp_path / "run.toml"
    data.write_text(line, encoding="utf-8")
    with pytest.raises(RocktokensError, match=sentence):
        write_starter(out, "pebbles-student", "pebbles-teacher", str(data))
    assert not out.exists()


def test_prompts_that_leave_no_room_for_an_answer_are_refused():
    pair, data = PairFacts(10**9, 10**9, 50_000, 512), DataFacts("d", 9, "question", longest_prompt=496)
    assert fit_settings(pair, data).max_completion_length == 16
    with pytest.raises(RocktokensError, match="497 tokens and the shorter context of the models 512"):
        fit_settings(pair, replace(data, longest_prompt=497))
