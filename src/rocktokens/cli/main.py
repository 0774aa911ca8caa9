"""``rocktokens``: the verbs, and what happens to errors.

A mistake the user can fix is one sentence on standard error and exit code 2. An interrupt (SIGINT) is 130, SIGTERM is
143; everything committed until then stays, and the same command continues from there.
"""

import errno
import os
import re
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import rocktokens
from rocktokens.errors import RocktokensError
from rocktokens.interrupts import Terminated, obeying_terminate

INTERRUPTED, TERMINATED = 130, 143
AGAIN = "run the same command again (distill: with --resume)"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it readable and writable"),
}
"""What the system may refuse about a run directory that is no mistake in a command, and what helps."""
FAILING = (errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE)
"""What the system says of a disk that fails or is gone."""
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""How safetensors and tokenizers, which raise no OSError, name the cause."""

VERBS = {
    "demo": "Run everything on the embedded pair: which tokens hold the loss that is left, and do they matter?",
    "init": "Write a commented config for your models and data, with defaults that fit their size.",
    "run": "Do what is left of a run, from distill to knockout, and write one page with the answers.",
    "recipes": "List the configs that ship with the package, or write one to a file to change it.",
    "config": "Print every key with type, default and meaning, or a config as it will be used.",
    "check": "Look for what would go wrong in a run, and estimate its memory and time, before it starts.",
    "distill": "Distil a teacher into a student on the student's own rollouts, with every token traced.",
    "trace": "Score one probe set of rollouts under several checkpoints, without training.",
    "find": "Find the types that hold the loss training left, say how sure that is, and write RUN/rocks.json.",
    "gradients": "Show who owns the gradient: in logit space, in parameter space and in Adam's step.",
    "evaluate": "Measure accuracy; every model answers the same prompts with the same random numbers.",
    "knockout": "Ban tokens at every decoding step and measure what that does to accuracy.",
    "study": "Train several weight policies alike on several seeds, and say which is better and how sure that is.",
    "report": "Write one page: which tokens are rocks, how sure that is, whether they matter, what bypassing gains.",
    "verify": "Check every file of a run, and name the command that makes a damaged one again.",
    "explore": "Look at rollouts token by token, compare checkpoints and runs, and watch training, in a browser.",
}
"""Every verb with the first line of its help, in the order of ``rocktokens --help``.

A verb is the function of its name in the module of its name. It is imported when it is called or its own help is asked
for: the list of verbs should not take as long as the libraries behind them.
"""
STYLE: dict[str, Any] = {"rich_markup_mode": "rich", "pretty_exceptions_enable": False}
VALUES = {"int": "N", "float": "X", "Path": "PATH", "str": "TEXT"}
"""What the help calls the value of an option, by the name of its type."""


def plain(params: list[Any]) -> list[Any]:
    """Have the help name values by words, not by Python's types; flags have none, and arguments are words already."""
    for param in params:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
        elif param.is_flag:
            param.metavar = ""
        elif param.metavar is None and hasattr(param, "bare_type"):  # an older Typer has words of its own
            param.metavar = next((word for name, word in VALUES.items() if name in param.bare_type()), None)
    return params


class Verb(TyperCommand):
    """A command whose help is filled to the width of the terminal."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        paragraphs = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters as the help shows them."""
        return plain(super().get_params(ctx))


class Verbs(TyperGroup):
    """A group that lists its verbs by name and imports the one that is called."""

    def __init__(self, **settings: Any) -> None:
        listed = {name: TyperCommand(name, help=line) for name, line in VERBS.items()}
        super().__init__(**{**settings, "commands": listed})

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters as the help shows them."""
        return plain(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Put the command itself in the place of its entry in the list."""
        name, listed, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, listed, rest
        verb = typer.Typer(add_completion=False, **STYLE)
        verb.command(name, cls=Verb)(getattr(import_module(f"rocktokens.cli.{name}"), name))
        return name, typer.main.get_command(verb), rest


app = typer.Typer(name="rocktokens", cls=Verbs, no_args_is_help=True, **STYLE)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rocktokens {rocktokens.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Find, test and bypass the tokens that hold the loss on-policy distillation leaves behind."""


def main() -> None:
    """Run the command line; never show a traceback for something the user can fix."""
    quiet_libraries()
    try:
        with obeying_terminate():
            app(prog_name="rocktokens")
    except RocktokensError as error:
        _stop(str(error), 2)
    except Terminated:
        _stop(f"terminated; what was committed is kept, {AGAIN}", TERMINATED)
    except SystemExit as stop:
        if stop.code != INTERRUPTED:  # what Typer makes of a KeyboardInterrupt
            raise
        _stop(f"interrupted; what was committed is kept, {AGAIN}", INTERRUPTED)
    except Exception as error:
        rust = _RUST_ERROR.search(str(error))
        number = int(rust.group(1)) if rust else error.errno if isinstance(error, OSError) else None
        if number not in REMEDIES and number not in FAILING:
            raise
        reason = os.strerror(number).lower()
        if number in FAILING:
            what = getattr(error, "filename", None) or "a file"
            _stop(
                f"{what} cannot be read or written ({reason}): check the disk; what was committed is kept, {AGAIN}", 2
            )
        _stop(f"the run directory cannot be written ({reason}): {REMEDIES[number]}; nothing is lost, {AGAIN}", 2)


def quiet_libraries() -> None:
    """Tell libraries that are not imported yet to print nothing of their own."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries; ours are Rich's


def _stop(sentence: str, code: int) -> None:
    from rocktokens.display.text import printable

    print(f"rocktokens: {printable(sentence)}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
