"""``rocktokens``: the verbs, and what happens to errors.

A mistake the user can mend is one sentence on standard error and exit code 2. An interrupt is 130; everything committed
until then stays, and the same command goes on from there.
"""

import errno
import os
import re
import sys

import typer

from rocktokens.cli import check, demo, distill, evaluate, find, trace
from rocktokens.errors import RocktokensError

INTERRUPTED = 130
AGAIN = "run the same command again (distill: with --resume)"
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""How safetensors and tokenizers, which raise no OSError, name the cause."""

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
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries; ours are Rich's
    try:
        app()
    except RocktokensError as error:
        _stop(str(error), 2)
    except SystemExit as stop:
        if stop.code != INTERRUPTED:  # what Typer makes of a KeyboardInterrupt
            raise
        _stop(f"interrupted; what was committed is kept, {AGAIN}", INTERRUPTED)
    except Exception as error:
        reason = _no_room(error)
        if reason is None:
            raise
        _stop(f"the run directory cannot be written ({reason}): free some space; nothing is lost, {AGAIN}", 2)


def _no_room(error: Exception) -> str | None:
    """What the system says when a file cannot grow, None for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if found := _RUST_ERROR.search(str(error)):
        number = int(found.group(1))
    return os.strerror(number).lower() if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else None


def _stop(sentence: str, code: int) -> None:
    print(f"rocktokens: {sentence}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
