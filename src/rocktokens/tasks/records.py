"""Records of a dataset as prompts, whichever of the usual shapes they have.

1. The prompt field holds a text, or a conversation: a list of messages with role and content (OpenAI, TRL) or with from
   and value (ShareGPT).
2. A conversation that ends with the assistant's message is answered by it, and the messages before it are the prompt;
   any other is the prompt as a whole. A prompt ends with the user's message, which the template is applied to.
3. The answer field comes before the assistant's message. It holds a text, a number, a list of right ones, or messages
   of which the last counts; any other object is kept as JSON for a grader that can read it.
4. Some records may have no answer. If none has one, that is a mistake in the config, which can say so instead.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rocktokens.config import HubTask, JsonlTask
from rocktokens.errors import RocktokensError
from rocktokens.tasks.base import DatasetTask
from rocktokens.tasks.graders import make_grader
from rocktokens.types import Message, Prompt

SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""What ``from`` may say, and the role it means."""


def is_conversation(field: Any) -> bool:
    """Return whether a field of a record looks like a list of messages."""
    is_list = isinstance(field, list) and bool(field)
    return is_list and all(isinstance(own, dict) and own.keys() & {"role", "from"} for own in field)


def dataset_task(
    section: JsonlTask | HubTask, records: Iterable[tuple[str, Mapping[str, Any]]], revision: str | None = None
) -> DatasetTask:
    """Make a task over records, each with the words that name it in an error, such as "line 3"."""
    if "{prompt}" not in section.template:
        raise RocktokensError(
            f"task.template is {section.template!r}, which has no {{prompt}}: every prompt would be the same text"
        )
    items: list[Prompt] = []
    unanswered: RocktokensError | None = None
    for where, record in records:
        if section.limit is not None and len(items) == section.limit:
            break
        items.append(_prompt(section, len(items), f"{section.path}, {where}", record))
        if items[-1].answer is None and unanswered is None:
            unanswered = _missing(section, "answer_field", f"{section.path}, {where}", record)
    if not items:
        raise RocktokensError(f"task.path {section.path!r} holds no records: give a dataset with at least one")
    if section.answer_field and unanswered and all(prompt.answer is None for prompt in items):
        raise unanswered
    # Ids name the noise and group the statistics: two prompts may not share one.
    [(most_common, count)] = Counter(prompt.id for prompt in items).most_common(1)
    if count > 1:
        raise RocktokensError(
            f"{section.path} has the id {most_common!r} twice: set task.id_field to another field or leave it out"
        )
    name = f"{section.name}:{Path(section.path).name}"
    return DatasetTask(name, items, section.grading, make_grader(section), revision)


def _prompt(section: JsonlTask | HubTask, index: int, where: str, record: Mapping[str, Any]) -> Prompt:
    field = _field(section, "prompt_field", where, record)
    turns, reply = _turns(f"{where}, {section.prompt_field!r}", field)
    if section.system_prompt is not None:
        if turns[0].role == "system":
            raise RocktokensError(
                f"{where}, {section.prompt_field!r} begins with a system message of its own: leave out "
                "task.system_prompt, or remove that message"
            )
        turns = [Message("system", section.system_prompt), *turns]
    text = section.template.replace("{prompt}", turns[-1].content)
    messages = (*turns[:-1], Message("user", text)) if len(turns) > 1 else ()
    identifier = str(_field(section, "id_field", where, record)) if section.id_field else f"{section.name}-{index}"
    answer = _answer(section, where, record.get(section.answer_field), reply) if section.answer_field else None
    return Prompt(identifier, text, answer, messages)


def _field(section: JsonlTask | HubTask, key: str, where: str, record: Mapping[str, Any]) -> Any:
    value = record.get(getattr(section, key))
    if value is None:
        raise _missing(section, key, where, record)
    return value


def _missing(section: JsonlTask | HubTask, key: str, where: str, record: Mapping[str, Any]) -> RocktokensError:
    fields = ", ".join(map(repr, record)) or "no fields"
    empty = ', or leave it empty ("") if the data has no answers' if key == "answer_field" else ""
    return RocktokensError(f"{where} has no {getattr(section, key)!r} (it has {fields}): set task.{key}{empty}")


def _turns(where: str, field: Any) -> tuple[list[Message], str | None]:
    """Return the messages of a prompt, which end with the user's, and the assistant's message behind them, if any."""
    if not isinstance(field, list):
        return [Message("user", str(field))], None
    turns = [_message(f"{where}, message {number}", own) for number, own in enumerate(field, start=1)]
    reply = turns.pop().content if turns and turns[-1].role == "assistant" else None
    if not turns or turns[-1].role != "user":
        last = f"ends with a message of {turns[-1].role!r}" if turns else "has no message"
        before = " before the assistant's answer" if reply is not None else ""
        raise RocktokensError(f"{where} {last}{before}: a prompt ends with a message of the user")
    return turns, reply


def _message(where: str, message: Any) -> Message:
    match message:
        case {"role": str(role), "content": content}:
            text = _text_of(content)
        case {"from": str(speaker), "value": str(text)}:
            role = SHAREGPT_ROLES.get(speaker, "")
            if not role:
                raise RocktokensError(f"{where} is from {speaker!r}: use one of {', '.join(SHAREGPT_ROLES)}")
        case _:
            raise RocktokensError(f"{where} is no object with role and content: write each message as one")
    if text is None or message.get("tool_calls"):
        raise RocktokensError(f"{where} holds something other than text, such as a tool call or an image: remove it")
    return Message(role, text)


def _text_of(content: Any) -> str | None:
    """Return the text of a message, which may come in parts; None where a part is something else."""
    match content:
        case str():
            return content
        case [*parts] if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            return "".join(part["text"] for part in parts)
    return None


def _answer(section: JsonlTask | HubTask, where: str, value: Any, reply: str | None) -> str | tuple[str, ...] | None:
    """Return the reference of a record: its answer, one or several, else the assistant's message."""
    if value is None or value == []:
        return reply
    if not isinstance(value, list | dict):
        return str(value)
    if is_conversation(value):
        return _message(f"{where}, {section.answer_field!r}, last message", value[-1]).content
    if isinstance(value, list) and all(isinstance(own, str | int | float) for own in value):
        several = tuple(dict.fromkeys(map(str, value)))
        return several[0] if len(several) == 1 else several
    if section.grader is None:
        raise RocktokensError(
            f"{where}, {section.answer_field!r} is neither text nor number nor a list of them: name another "
            "task.answer_field, or a task.grader that reads JSON"
        )
    return json.dumps(value, ensure_ascii=False, default=str)
