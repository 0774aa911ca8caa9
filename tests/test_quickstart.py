"""The quickstart notebook runs from top to bottom, and is committed without outputs."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rocktokens import RockSet

nbformat = pytest.importorskip("nbformat", reason="the notebook is not run: nbclient is not installed (extra dev)")
nbclient = pytest.importorskip("nbclient", reason="the notebook is not run: nbclient is not installed (extra dev)")
pytest.importorskip("ipykernel", reason="the notebook is not run: ipykernel is not installed (extra dev)")

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebook_is_committed_without_outputs():
    cells = code_cells(nbformat.read(NOTEBOOK, as_version=4))
    assert [cell for cell in cells if cell.outputs or cell.execution_count] == []


def test_the_notebook_runs_to_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scripts = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    rocks = RockSet.load(tmp_path / "runs" / "quickstart" / "rocks.json")
    assert rocks.tokens and "<html" in (tmp_path / "quickstart.html").read_text(encoding="utf-8")
    results = [output for cell in code_cells(notebook) for output in cell.outputs]
    strips = [own.data["text/html"] for own in results if "<span" in own.get("data", {}).get("text/html", "")]
    assert len(strips) == 2 and strips[0] != strips[1], "one answer at two checkpoints"
