"""``rocktokens init``: a commented config for a pair of models."""

from pathlib import Path
from typing import Annotated

import typer

from rocktokens.cli.common import AsJson, output, print_json, terminal
from rocktokens.errors import RocktokensError

STUDENT, TEACHER = "pebbles-student", "pebbles-teacher"


def init(
    path: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The file to write.")] = Path("run.toml"),
    student: Annotated[
        str | None, typer.Option("--student", metavar="MODEL", help="Hub id or folder of the model to train.")
    ] = None,
    teacher: Annotated[
        str | None, typer.Option("--teacher", metavar="MODEL", help="Hub id or folder of the model it learns from.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="FILE", help="Prompts, one JSON object per line.")
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train adapters instead of all weights.")] = False,
    small: Annotated[
        bool, typer.Option("--small", help="A first look: every stage within minutes on a CPU, no conclusions.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented config for your models and data, with defaults that fit their size.

    Reads only the models' configs and tokenizer, and downloads nothing. Without models, the config is for the embedded
    pair and runs as it is.

    Example: [bold]rocktokens init run.toml --student my/student --teacher my/teacher --data train.jsonl[/bold]
    """
    if (student is None) != (teacher is None):
        given, missing = ("--student", "--teacher") if teacher is None else ("--teacher", "--student")
        raise RocktokensError(f"{given} is given without {missing}: give both, or neither for the embedded pair")
    if data is not None and student is None:
        raise RocktokensError(f"--data {data} is given without models: give --student and --teacher too")
    with terminal.status("loading"):
        from rocktokens.preflight.starter_file import write_starter
    text = write_starter(path, student or STUDENT, teacher or TEACHER, data, lora=lora, small=small, force=force)
    if as_json:
        return print_json({"file": str(path), "text": text})
    output.print(
        f"wrote {path}; next: rocktokens check {path}, then rocktokens run {path}", soft_wrap=True, markup=False
    )
