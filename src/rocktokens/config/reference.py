"""Every key of a configuration with its type, default and meaning, read off the models that check it.

1. ``markdown_reference`` walks the sections of a config. A section becomes a heading, its docstring and a table with a
   row per key; a section that is one of several (a task, a policy) becomes a table per name, after the keys all have.
2. ``json_schema`` is what editors check a TOML file with while it is written.

docs/config.md is made by ``reference_page``, and a test says whether it is up to date.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rocktokens.config.base import NamedSection, Section
from rocktokens.config.sections import Config
from rocktokens.config.sentences import sections_of, tag_of

WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}
_BOUNDS = {"ge": "≥", "gt": "&gt;", "le": "≤", "lt": "&lt;"}
_MOST = 2**63
"""The bound of what a TOML file can hold, which needs no mention."""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a run's config, with the meaning of each key."""
    schema = Config.model_json_schema()
    schema["$defs"]["ModelsSection"]["required"].remove("student")  # it may follow from trace.checkpoints
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "rocktokens run"}


def reference_page(study: type[Section]) -> str:
    """Return the page of all keys, of a run and of a study, which is docs/config.md."""
    return f"""# Configuration

Made by `rocktokens config --reference`; do not edit. One TOML file describes a run; `rocktokens init` writes one for
your models ([how it chooses](init.md)). `--set section.key=value` overrides a key, and `rocktokens config run.toml
--show` shows what will be used. `rocktokens config --schema > run-schema.json` is for editors: a file that
starts with `#:schema run-schema.json` is completed and checked while you write it. A dash is a key that is not
set.

{markdown_reference()}
# Keys of a study

A file for `rocktokens study` ([how to read one](studies.md)) has the sections above under `[base]`, such as
`[base.training]`, but for `[run]` and `[policy]`, and these:

{markdown_reference(study, known=("base",))}"""


def markdown_reference(config: type[Section] = Config, known: Iterable[str] = ()) -> str:
    """Return all sections of a config as Markdown, headings of second level; ``known`` ones are left out."""
    parts = []
    for name, field in config.model_fields.items():
        if name not in known:
            parts.extend(_section(name, field))
    return "\n".join(parts)


def _section(name: str, field: FieldInfo) -> Iterator[str]:
    """Yield the lines of one section."""
    is_list = get_origin(field.annotation) is list
    choices = sections_of(get_args(field.annotation)[0] if is_list else field.annotation)
    yield f"## `[[{name}]]`\n" if is_list else f"## `[{name}]`\n"
    if len(choices) == 1:
        yield f"{_prose(choices[0])}\n"
        yield _table(choices[0].model_fields)
        return
    named = [choice for choice in choices if issubclass(choice, NamedSection)]
    default = field.get_default(call_default_factory=True)
    yield f"One of {len(named)}, chosen by `name`; default `{default.name}`.\n"
    common = {key: own for key, own in named[0].model_fields.items() if key in named[0].common}
    if common:
        yield f"Keys that all of them have:\n\n{_table(common)}"
    for choice in named:
        own = {key: value for key, value in choice.model_fields.items() if key not in {"name", *choice.common}}
        yield f'### `{name}.name = "{tag_of(choice)}"`\n'
        yield f"{_prose(choice)}\n"
        yield _table(own) if own else "No keys of its own.\n"


def _prose(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").replace("``", "`").split())


def _table(fields: Mapping[str, FieldInfo]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        cells = [cell.replace("|", "\\|") for cell in (f"`{name}`", _kind(field), _default(field), _meaning(field))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _meaning(field: FieldInfo) -> str:
    return (field.description or "").replace("<", "&lt;")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=True)
    return "–" if value is None else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _kind(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {limit}"
        for name, sign in _BOUNDS.items()
        for own in field.metadata
        if (limit := getattr(own, name, None)) is not None and limit != _MOST
    ]
    return ", ".join([_words(field.annotation), *bounds])


def _words(annotation: Any) -> str:
    """Name what a TOML file may hold there; types that only Python can give are left out."""
    if sections := sections_of(annotation):
        return f"a {sections[0].kind}" if issubclass(sections[0], NamedSection) else "a table"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is None:
        return WORDS.get(annotation, "")
    if origin is Literal:
        return " or ".join(f"`{_toml(own)}`" for own in arguments)
    words = list(dict.fromkeys(filter(None, map(_words, arguments))))
    if origin is tuple:
        return f"[{', '.join(map(_words, arguments))}]"
    if origin is list:
        return f"list of: {words[0]}"
    return words[0] if origin is Annotated else " or ".join(words)
