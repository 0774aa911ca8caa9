"""The page docs/reference/cli.md, from the commands themselves.

Run ``python docs/reference/cli_page.py`` after a command or an option has changed; a test compares the page with this.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from rocktokens.cli.main import VERBS, app

PAGE = Path(__file__).with_name("cli.md")
HEAD = """# Command line

Every command, argument and option, as `rocktokens COMMAND --help` shows them. This page is made from the program by
`python docs/reference/cli_page.py`.

A mistake that you can fix ends with one sentence on standard error and exit code 2
([troubleshooting](../troubleshooting.md)).
An interrupt (Ctrl-C) ends with 130, SIGTERM with 143; the same command continues where it was.
"""


def cli_page() -> str:
    """Return the page as Markdown."""
    return "\n".join([HEAD, _overview(), *map(_section, VERBS)])


def _overview() -> str:
    rows = [f"| [`{name}`](#rocktokens-{name}) | {line} |" for name, line in VERBS.items()]
    return "\n".join(["| command | what it does |", "|---|---|", *rows, ""])


def _section(name: str) -> str:
    group: Any = typer.main.get_command(app)
    _, verb, _ = group.resolve_command(group.context_class(group), [name])
    context = verb.context_class(verb, info_name=f"rocktokens {name}")
    usage = f"rocktokens {name} {' '.join(verb.collect_usage_pieces(context))}".replace("{", "").replace("}", "")
    params = [param for param in verb.get_params(context) if "--help" not in param.opts]
    return "\n".join(
        [f"## rocktokens {name}", "", _code(verb.help), "", "```", usage, "```", "", *_rows(params, context)]
    )


def _rows(params: list[Any], context: Any) -> Iterator[str]:
    yield from ("| | meaning | default |", "|---|---|---|")
    for param in params:
        is_argument = param.param_type_name == "argument"
        is_flag = not is_argument and param.is_flag
        names = [param.metavar] if is_argument else [*param.opts, *param.secondary_opts]
        value = "" if is_argument or is_flag else f" {param.metavar or _choices(param, context)}"
        is_unset = is_flag or param.default is None or not param.show_default
        default = "required" if param.required else "" if is_unset else f"`{param.default}`"
        yield f"| `{', '.join(names)}{value}` | {_code(param.help or '')} | {default} |"
    yield ""


def _choices(param: Any, context: Any) -> str:
    """Return the values of an option that takes one of a few words; a bar would end the cell of the table."""
    return str(param.display_type_rich(context)).strip("<>").replace("|", " or ")


def _code(text: str) -> str:
    """Return a help text with its examples as code."""
    return re.sub(r"\[bold\](.*?)\[/bold\]", r"`\1`", text)


if __name__ == "__main__":
    PAGE.write_text(cli_page(), encoding="utf-8")
