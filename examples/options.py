"""What the example programs share: numbers on the command line that are checked, and errors as one sentence."""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rocktokens.errors import RocktokensError


def at_least(option: str, least: int) -> Callable[[str], int]:
    """Make the reader of a whole number that is not below ``least``."""

    def read(text: str) -> int:
        if text.strip().lstrip("-").isdecimal() and int(text) >= least:
            return int(text)
        raise RocktokensError(f"{option} is {text!r}: give a whole number from {least} on")

    return read


def between(option: str, low: float, high: float = math.inf, *, with_low: bool = False) -> Callable[[str], float]:
    """Make the reader of a finite number above ``low``, or from it on, and up to ``high``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and (value > low or (with_low and value == low)) and value <= high:
            return value
        range_words = f"{'from' if with_low else 'above'} {low:g}" + (f" to {high:g}" if high < math.inf else "")
        raise RocktokensError(f"{option} is {text!r}: give a number {range_words}")

    return read


def one_of(option: str, choices: Sequence[str]) -> Callable[[str], str]:
    """Make the reader of a word that must be one of these."""

    def read(text: str) -> str:
        if text in choices:
            return text
        raise RocktokensError(f"{option} is {text!r}: give {' or '.join(choices)}")

    return read


def new_folder(text: str) -> Path:
    """Read the folder of a model that is to be made, which no file may be in the place of."""
    if Path(text).exists() and not Path(text).is_dir():
        raise RocktokensError(f"{text} is a file: give the folder of the finished model")
    return Path(text)


def run_main(main: Callable[[], None]) -> None:
    """Run a program; bad input ends it with one sentence and code 2."""
    try:
        main()
    except RocktokensError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
