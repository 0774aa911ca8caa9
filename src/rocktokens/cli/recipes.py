"""``rocktokens recipes``: the configs that ship with the package."""

from pathlib import Path
from typing import Annotated

import typer

from rocktokens.cli.common import AsJson, output, print_json
from rocktokens.cli.tables import print_table
from rocktokens.display.table import Column, Table, text
from rocktokens.errors import RocktokensError
from rocktokens.recipes import Recipe
from rocktokens.recipes import recipes as shipped_recipes


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show this recipe; without it, list all.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the recipe to a file of your own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the configs that ship with the package, or write one to a file to change it.

    Commands that take a config take the name of a recipe too: [bold]rocktokens run pebbles[/bold]

    Example: [bold]rocktokens recipes pebbles -o run.toml[/bold]
    """
    known = shipped_recipes()
    if name is None:
        if out is not None:
            raise RocktokensError(f"--out {out} is given without a recipe: name one of {', '.join(known)}")
        if as_json:
            listed = [{"name": own.name, "kind": own.kind, "summary": own.summary} for own in known.values()]
            return print_json({"recipes": listed})
        columns: list[Column[Recipe]] = [
            Column("name", lambda own: text(own.name)),
            Column("kind", lambda own: text(own.kind)),
            Column("summary", lambda own: text(own.summary)),
        ]
        return print_table(Table.of("recipes", columns, known.values(), "recipes"))
    if name not in known:
        raise RocktokensError(f"there is no recipe {name!r}: use one of {', '.join(known)}")
    if out is not None:
        _write(out, known[name].text)
    if as_json:
        return print_json({"name": name, "text": known[name].text, "file": None if out is None else str(out)})
    if out is None:
        return typer.echo(known[name].text, nl=False)
    verb = "study" if known[name].kind == "study" else "run"
    output.print(f"wrote {out}; next: rocktokens {verb} {out}", soft_wrap=True, markup=False)


def _write(out: Path, text: str) -> None:
    """Create the file; one that is there already is left as it is."""
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        reason = "it exists" if isinstance(error, FileExistsError) else (error.strerror or str(error)).lower()
        raise RocktokensError(f"--out {out} cannot be written ({reason}): give another file") from None
