"""The embedded pair: a teacher of 5 M and a student of 1 M parameters, trained on wordmath by ``train.py``."""

from pathlib import Path
from typing import Literal


def directory(which: Literal["teacher", "student"]) -> Path:
    """The folder of one of the two models, loadable by ``from_pretrained``."""
    return Path(__file__).parent / which
