"""Where prompts and their answers come from: one section per kind of task."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rocktokens.config.base import NamedSection, named_by_default


class _Task(NamedSection):
    kind: ClassVar[str] = "task"


class WordmathTask(_Task):
    """The embedded word problems; prompts are generated, train and test never share a problem."""

    name: Literal["wordmath"] = "wordmath"
    split: Literal["train", "test"] = "train"
    max_steps: int = Field(default=4, ge=1, le=4, description="problems need 1 to this many steps")


class JsonlTask(_Task):
    """Any dataset on disk, one JSON object a line."""

    name: Literal["jsonl"]
    path: str
    prompt_field: str = "question"
    answer_field: str = Field(default="answer", description="empty: the data has no answers")
    id_field: str | None = None
    template: str = Field(
        default="{prompt}", description="text of the user turn; {prompt} is replaced by the prompt field"
    )
    grading: Literal["math", "exact"] = Field(default="math", description="math: '#### N', \\boxed{} and equivalence")
    limit: int | None = Field(default=None, ge=1)


class HubTask(_Task):
    """A dataset of the Hugging Face Hub through `datasets` (extra `[hub]`), or one it can read from disk."""

    name: Literal["hub"]
    path: str
    subset: str | None = None
    split: str = "train"
    prompt_field: str = "question"
    answer_field: str = Field(default="answer", description="empty: the data has no answers")
    id_field: str | None = None
    template: str = "{prompt}"
    grading: Literal["math", "exact"] = "math"
    limit: int | None = Field(default=None, ge=1)


TaskSection = Annotated[WordmathTask | JsonlTask | HubTask, Field(discriminator="name"), named_by_default("wordmath")]
