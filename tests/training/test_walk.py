"""The walk of docs/architecture.md from a prompt to a trace row is what a step really calls."""

import re
import sys
from pathlib import Path
from types import FrameType

from tiny_pair import tiny_config

import rocktokens
from rocktokens.traces.writer import TraceWriter
from rocktokens.training import loop

SOURCE = Path(rocktokens.__file__).parent
DOC = SOURCE.parents[1] / "docs" / "architecture.md"
MOST_FILES = 24
_FILE = re.compile(r"`((?:[a-z_]+/)?[a-z_]+\.py)`")


def test_the_walk_from_a_prompt_to_a_trace_row_is_that_of_a_step(pair, tmp_path, monkeypatch):
    steps, beside = walk(DOC.read_text(encoding="utf-8"))
    assert len(steps) == len(set(steps)) <= MOST_FILES
    called: dict[str, None] = {}

    def note(frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_name != "<module>" and path.is_relative_to(SOURCE):
            called.setdefault(path.relative_to(SOURCE).as_posix())

    def sampled(session, run, step, own=loop._rollouts_of_step):
        sys.setprofile(note if step == 0 else None)
        return own(session, run, step)

    def flushed(self, own=TraceWriter.flush):
        own(self)
        sys.setprofile(None)

    monkeypatch.setattr(loop, "_rollouts_of_step", sampled)
    monkeypatch.setattr(TraceWriter, "flush", flushed)
    loop.distill(tiny_config(pair, tmp_path / "run", "training.max_steps=1", "training.save_steps=1"))
    assert set(steps) | set(beside) == called.keys()
    in_order = [file for file in called if file in steps and file != "run_dir.py"]  # asked first for stored rollouts
    assert [file for file in steps if file != "run_dir.py"] == in_order


def walk(text: str) -> tuple[list[str], list[str]]:
    """The files of the numbered steps of the first walk, and those that a step runs beside them."""
    section = text.split("### `rocktokens distill`")[1].split("\n### ", maxsplit=1)[0]
    numbered, others = section[section.index("\n1. ") :].split("\n\nThe step also runs ")
    return _FILE.findall(numbered), _FILE.findall(others.split("which the datum does not pass")[0])
