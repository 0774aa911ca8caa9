"""``rocktokens``: the verbs, and what happens to errors.

A mistake the user can mend is one sentence on standard error and exit code 2. An interrupt is 130; everything committed
until then stays, and the same command goes on from there.
"""

import errno
import os
import sys

import typer

from rocktokens.cli import check, demo, distill, evaluate, find, trace
from rocktokens.errors import RocktokensError

app = typer.Typer(
    name="rocktokens",
    help="Find, test and bypass the tokens that on-policy distillation cannot move.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for verb in (demo.demo, check.check, distill.distill, trace.trace, find.find, evaluate.evaluate):
    app.command()(verb)


def main() -> None:
    """Run the command line; never show a traceback for something the user can mend."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except RocktokensError as error:
        _stop(str(error), 2)
    except KeyboardInterrupt:
        _stop("interrupted; what was committed is kept, run the same command again (distill: with --resume)", 130)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        where = error.filename or "the run directory"
        _stop(f"the disk is full while writing {where}: free some space and resume; nothing committed was lost", 2)


def _stop(sentence: str, code: int) -> None:
    print(f"rocktokens: {sentence}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
