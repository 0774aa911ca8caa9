"""A process that is killed after a trace part was renamed into place and before the manifest lists it."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rocktokens import run_dir
from rocktokens.classes import TokenClasses
from rocktokens.run_dir import RunDir
from rocktokens.traces.writer import add_choice

KILLED = 9


def add_choice_and_die(run: RunDir, relative: str, kl_choice_T: np.ndarray, classes: TokenClasses) -> None:
    """Leave a part as ``add_choice`` leaves it when it is killed at the worst moment.

    In a fresh process: a fork of this one would have the locks of its threads, and not the threads.
    """
    arguments = (run.path, relative, kl_choice_T, classes.groups)
    process = multiprocessing.get_context("spawn").Process(target=_add_and_die, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == KILLED


def _add_and_die(path: Path, relative: str, kl_choice_T: np.ndarray, groups: list[tuple[int, ...]]) -> None:
    whole = run_dir.write_atomically

    def die_after_the_part(target: Path, fill: Callable[[Path], object]) -> None:
        whole(target, fill)
        if target.suffix == ".parquet":
            os._exit(KILLED)

    run_dir.write_atomically = die_after_the_part
    add_choice(RunDir(path), relative, kl_choice_T, TokenClasses(groups))
