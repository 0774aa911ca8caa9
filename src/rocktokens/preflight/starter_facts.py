"""What ``rocktokens init`` looks at: the configs of two models, and a file of prompts.

1. ``pair_facts`` reads both configs. Whether the tokenizers are the same is for ``rocktokens check`` to say.
2. ``data_facts`` guesses the fields of prompt and answer by their usual names, whether prompts are conversations, and
   how answers are written; it measures the longest prompts with the student's tokenizer where that loads.
"""

import heapq
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rocktokens.config import JsonlTask
from rocktokens.config.tasks import ends_with_reply
from rocktokens.errors import RocktokensError
from rocktokens.models.facts import model_facts
from rocktokens.preflight.starter_rules import DataFacts, PairFacts
from rocktokens.preflight.static_checks import PROMPT_SAMPLE
from rocktokens.rollouts.encode import encode_prompt
from rocktokens.tasks.jsonl import load_jsonl, read_lines
from rocktokens.tasks.records import is_conversation
from rocktokens.types import Prompt

PROMPT_FIELDS = (
    "messages",
    "conversations",
    "question",
    "prompt",
    "problem",
    "instruction",
    "query",
    "input",
    "text",
)
ANSWER_FIELDS = ("answer", "answers", "solution", "final_answer", "target", "output", "response", "completion", "label")
"""Usual names, the likeliest first."""
LONGEST_SHORT_ANSWER = 80
"""Characters; a longer answer in words is prose, which no comparison of texts can grade."""
MATH_TEMPLATE = "{prompt}\nThink step by step and end with '#### ' and the answer."
"""For answers in the style of GSM8K."""
_MATH = re.compile(r"####|\\boxed|^\s*-?[\d.,/]+\s*$")


def pair_facts(student: str, teacher: str) -> PairFacts:
    """Read the configs of both models."""
    facts = model_facts(student), model_facts(teacher)
    contexts = [own.context_length for own in facts if own.context_length is not None]
    return PairFacts(
        student_parameters=facts[0].parameters,
        teacher_parameters=facts[1].parameters,
        vocabulary=min(own.vocabulary for own in facts),
        context_length=min(contexts, default=None),
    )


def data_facts(path: str, tokenizer: Any | None) -> DataFacts:
    """Look at all records of a file of JSON lines; without a tokenizer the lengths of prompts stay unknown."""
    records = [record for _, record in read_lines(Path(path))]
    if not records:
        raise RocktokensError(f"--data {path} holds no records: give a file with one JSON object a line")
    fields = [name for name in records[0] if all(record.get(name) is not None for record in records)]
    prompts = [name for name in fields if isinstance(records[0][name], str) or is_conversation(records[0][name])]
    prompt = next((name for name in PROMPT_FIELDS if name in prompts), next(iter(prompts), None))
    if prompt is None:
        raise RocktokensError(
            f"--data {path} has no field with a text or a list of messages in every record (the first has "
            f"{', '.join(records[0]) or 'none'}): give each record a prompt, for example as question"
        )
    named, default = _answer_field(records, prompt), JsonlTask.model_fields["answer_field"].default
    is_replied = not named and any(ends_with_reply(record[prompt]) for record in records)
    section = JsonlTask(name="jsonl", path=path, prompt_field=prompt, answer_field=default if is_replied else named)
    facts = _with_style(section, len(records), tuple(records[0]), "reply" if is_replied else "field")
    return facts if tokenizer is None else replace(facts, longest_prompt=_longest(facts, tokenizer))


def _answer_field(records: Sequence[Mapping[str, Any]], prompt: str) -> str:
    """Return the likeliest field in which a record has an answer; empty where none has one."""
    others = [name for name in ANSWER_FIELDS if name != prompt]
    return next((name for name in others if any(own.get(name) not in (None, []) for own in records)), "")


def _with_style(section: JsonlTask, count: int, fields: tuple[str, ...], where: Literal["field", "reply"]) -> DataFacts:
    """Return how answers are graded and asked for, from how the first ones are written."""
    first = [prompt.answers[0] for prompt in islice(load_jsonl(section).items, 100) if prompt.answers]
    is_math = all(_MATH.search(own) for own in first)
    is_prose = not is_math and max(map(len, first)) > LONGEST_SHORT_ANSWER
    return DataFacts(
        path=section.path,
        records=count,
        prompt_field=section.prompt_field,
        answer_field="" if is_prose else section.answer_field,
        answers="prose" if is_prose else where if section.answer_field else "none",
        template=MATH_TEMPLATE if first and all("####" in own for own in first) else "{prompt}",
        grading="math" if is_math or is_prose else "exact",
        fields=fields,
    )


def _longest(facts: DataFacts, tokenizer: Any) -> int:
    """Return the tokens of the longest prompt, of those with the most characters."""
    section = JsonlTask(
        name="jsonl",
        path=facts.path,
        prompt_field=facts.prompt_field,
        answer_field=facts.answer_field,
        template=facts.template,
    )
    prompts = heapq.nlargest(PROMPT_SAMPLE, load_jsonl(section).items, key=_characters)
    return max(len(encode_prompt(tokenizer, prompt, True, sys.maxsize)) for prompt in prompts)


def _characters(prompt: Prompt) -> int:
    return sum(len(own.content) for own in prompt.messages) or len(prompt.text)
