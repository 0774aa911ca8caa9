"""Where prompts and their answers come from: one section per kind of task."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rocktokens.config.base import NamedSection, named_by_default


def _grader(value: Any) -> Any:
    is_function = isinstance(value, str) and all(value.partition(":"))
    is_command = isinstance(value, list) and value and all(isinstance(own, str) and own for own in value)
    if value is not None and not is_function and not is_command:
        raise ValueError('give "module:function", or a command as a list of texts, for example ["python", "grade.py"]')
    return value


Grader = Annotated[str | list[str] | None, BeforeValidator(_grader)]
"""A Python function by its name, or the arguments of a command."""


def ends_with_reply(field: Any) -> bool:
    """Return whether a record's prompt field is a conversation that the assistant's last message answers."""
    match field:
        case [*_, {"role": "assistant"} | {"from": "gpt" | "assistant"}]:
            return True
    return False


class _Task(NamedSection):
    kind: ClassVar[str] = "task"


class WordmathTask(_Task):
    """The embedded word problems; prompts are generated, train and test never share a problem."""

    name: Literal["wordmath"] = "wordmath"
    split: Literal["train", "test"] = Field(default="train", description="which problems; the two share none")
    max_steps: int = Field(default=4, ge=1, le=4, description="problems need 1 to this many steps")


class DatasetSection(_Task):
    """What data sets of all kinds have in common: which fields of a record mean what, and who grades."""

    unwritten: ClassVar[frozenset[str]] = frozenset({"system_prompt", "grader", "grader_timeout"})
    """Keys that are written only where they are set: records of runs from before they existed stay equal to those of
    the same config now."""

    path: str
    prompt_field: str = Field(
        default="question", description="field of a record that holds the prompt: a text, or a list of messages"
    )
    answer_field: str = Field(
        default="answer",
        description="field that holds the answer, or a list of right ones; a conversation without it is answered by "
        "its last message if that is the assistant's; empty: the data has none",
    )
    id_field: str | None = Field(default=None, description="field that names a record; default: its place in the file")
    template: str = Field(
        default="{prompt}", description="text of the (last) user turn; {prompt} is replaced by the prompt field"
    )
    system_prompt: str | None = Field(
        default=None, min_length=1, description="system message before every prompt; needs a chat template that has one"
    )
    grading: Literal["math", "exact"] = Field(default="math", description="math: '#### N', \\boxed{} and equivalence")
    grader: Grader = Field(
        default=None,
        description='your code that grades instead: "module:function", or a command such as ["python", "grade.py"]',
    )
    grader_timeout: float = Field(default=60.0, gt=0, description="seconds that a command may take for one response")
    limit: int | None = Field(default=None, ge=1, description="read only this many records, from the start")

    @model_validator(mode="after")
    def _one_grader(self) -> Self:
        if self.grader is not None and self.grading != "math":
            raise ValueError(f"grading = {self.grading!r} and grader are both set: leave one of them out")
        return self

    @model_serializer(mode="wrap")
    def _without_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {
            key: value
            for key, value in dump(self).items()
            if key not in self.unwritten or value != fields[key].get_default()
        }


class JsonlTask(DatasetSection):
    """Any dataset on disk, one JSON object a line."""

    name: Literal["jsonl"]
    path: str = Field(description="the file")


class HubTask(DatasetSection):
    """A dataset of the Hugging Face Hub through `datasets` (extra `[hub]`), or one it can read from disk."""

    unwritten: ClassVar[frozenset[str]] = DatasetSection.unwritten | {"revision"}

    name: Literal["hub"]
    path: str = Field(description="id of the dataset, or its directory")
    subset: str | None = Field(default=None, description="configuration of the dataset, if it has several")
    split: str = Field(default="train", description="split of the dataset")
    revision: str | None = Field(
        default=None, min_length=1, description="commit, tag or branch of a dataset of the Hub; a commit pins the data"
    )


TaskSection = Annotated[WordmathTask | JsonlTask | HubTask, Field(discriminator="name"), named_by_default("wordmath")]
