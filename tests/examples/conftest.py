import json
import sys
from pathlib import Path

import pytest

from rocktokens.tasks.wordmath import make_problem, write_solution

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """Twenty word problems with worked answers in a plain style, as JSON lines."""
    import random

    path = tmp_path / "problems.jsonl"
    with path.open("w", encoding="utf-8") as lines:
        for index in range(20):
            problem = make_problem("train", 7, index)
            answer = write_solution(problem, "plain", "random", random.Random(index))
            lines.write(json.dumps({"question": problem.text, "answer": answer}) + "\n")
    return path
