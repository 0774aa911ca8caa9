"""``rocktokens config``: every key there is, and what a config comes to."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rocktokens.cli.common import AsJson, Overrides, print_json
from rocktokens.config import dump_config, load_config
from rocktokens.errors import RocktokensError


def config(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.TOML", help="With --show: the config, or a recipe's name.", show_default=False),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print a config with every default and override.")] = False,
    reference: Annotated[bool, typer.Option("--reference", help="Print every key with its meaning.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a config, for editors.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print every key with type, default and meaning, or a config as it will be used.

    Example: [bold]rocktokens config run.toml --show --set run.seed=1[/bold]

    All keys: [bold]rocktokens config --reference[/bold]
    """
    if show + reference + schema != 1:
        raise RocktokensError("config prints one thing: give --reference, --schema, or a file and --show")
    if show == (path is None):
        raise RocktokensError("--show and a file go together: give `rocktokens config run.toml --show`")
    if overrides and not show:
        raise RocktokensError(f"--set {overrides[0]} changes a config: give its file and --show, or leave --set out")
    if schema:
        from rocktokens.config.reference import json_schema

        return typer.echo(json.dumps(json_schema(), ensure_ascii=False, indent=2))
    if reference:
        from rocktokens.config.reference import reference_page
        from rocktokens.studies.config import StudyConfig

        page = reference_page(StudyConfig)
        return print_json({"text": page}) if as_json else typer.echo(page, nl=False)
    settings = load_config(path or "", overrides)
    if as_json:
        return print_json(settings.model_dump(mode="json"))
    typer.echo(dump_config(settings), nl=False)
