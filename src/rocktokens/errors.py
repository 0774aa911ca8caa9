"""Errors a user can act on: one sentence that names the field, the value and the remedy; the command exits with 2."""

from collections.abc import Iterable

LONGEST = 2_000
"""Characters of a sentence."""
_END = 400
"""Of those, at its end, where the remedy is."""


class RocktokensError(Exception):
    """The input or the state of a run is wrong in a way the user can fix.

    A value that the sentence quotes may be long and have lines, since it comes from a file: the sentence is one line,
    and the middle of a long one is left out.
    """

    def __init__(self, message: str = "") -> None:
        message = " ".join(message.splitlines())
        left_out = len(message) - LONGEST
        if left_out > 0:
            message = f"{message[: LONGEST - _END]}… ({left_out:,} characters more) …{message[-_END:]}"
        super().__init__(message)


class ConfigError(RocktokensError):
    """A configuration file, key or value is not valid."""


class UnlistedStudentError(RocktokensError):
    """A checkpoint was traced, but the run's config no longer lists the student it was traced with."""


class RunDirError(RocktokensError):
    """A run directory is missing, in use, damaged or of a newer version."""


class TokenizerMismatchError(RocktokensError):
    """Two things that must share a tokenizer do not."""


class ControlMatchError(RocktokensError):
    """Types that are not rocks cannot stand in for the rocks at their frequencies.

    Args:
        message: the sentence.
        unmatched: ids of the rocks left without a partner; none when only the total is off.
    """

    def __init__(self, message: str, unmatched: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.unmatched = list(unmatched)


class TrainingStoppedError(RocktokensError):
    """Training cannot go on without producing nonsense."""


class NonFiniteLossError(TrainingStoppedError):
    """The loss, a logit or a gradient is NaN or infinite."""


class LengthExplosionError(TrainingStoppedError):
    """Nearly every rollout runs into the length limit: the student has stopped ending its answers."""
