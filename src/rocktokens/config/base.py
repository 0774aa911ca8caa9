"""What every section of a configuration has in common."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

Divergence = Literal["reverse", "forward", "jsd"]


def _whole_or_auto(value: Any) -> Any:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError("give a whole number of at least 1, or auto")
    return value


def _bool_or_auto(value: Any) -> Any:
    if value != "auto" and not isinstance(value, bool):
        raise ValueError("give true, false or auto")
    return value


BoolOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(_bool_or_auto)]
WholeOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_whole_or_auto)]


class Section(BaseModel):
    """Unknown keys are refused, values are never silently changed after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class NamedSection(Section):
    """A section that is one of several, told apart by its ``name``."""

    kind: ClassVar[str]
    """What errors call it: a task, a policy."""
    common: ClassVar[frozenset[str]] = frozenset()
    """Keys all sections of the kind have; they stay when another one is chosen."""

    name: Any
    """Each section narrows it to its own; declared here so that it comes first in a written file."""


def named_by_default(name: str) -> BeforeValidator:
    """Take a table without a name for the section of this name, so that one key of it can be set alone."""
    return BeforeValidator(lambda value: {"name": name, **value} if isinstance(value, dict) else value)
