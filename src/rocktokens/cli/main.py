"""``rocktokens``: the verbs, and what happens to errors.

A mistake the user can mend is one sentence on standard error and exit code 2. An interrupt is 130; everything committed
until then stays, and the same command goes on from there.
"""

import errno
import os
import re
import sys

import typer

from rocktokens.cli import check, demo, distill, evaluate, explore, find, gradients, knockout, report, study, trace
from rocktokens.errors import RocktokensError

INTERRUPTED = 130
AGAIN = "run the same command again (distill: with --resume)"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it readable and writable"),
}
"""What the system may refuse about a run directory that is no mistake in a command, and what helps."""
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
VERBS = (
    demo.demo,
    check.check,
    distill.distill,
    trace.trace,
    find.find,
    gradients.gradients,
    evaluate.evaluate,
    knockout.knockout,
    study.study,
    report.report,
    explore.explore,
)
for verb in VERBS:
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
        number = _system_error(error)
        if number not in REMEDIES:
            raise
        reason = os.strerror(number).lower()
        _stop(f"the run directory cannot be written ({reason}): {REMEDIES[number]}; nothing is lost, {AGAIN}", 2)


def _system_error(error: Exception) -> int | None:
    """The system's number for what went wrong, None for an error that did not come from the system."""
    if found := _RUST_ERROR.search(str(error)):
        return int(found.group(1))
    return error.errno if isinstance(error, OSError) else None


def _stop(sentence: str, code: int) -> None:
    print(f"rocktokens: {sentence}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
