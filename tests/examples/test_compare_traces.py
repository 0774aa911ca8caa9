import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path: Path):
    command = [sys.executable, str(EXAMPLES / "compare_traces.py"), str(tmp_path), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        ended.stderr
        == f"error: {tmp_path} is not a run directory (it has no manifest.json): give the folder of a run\n"
    )
