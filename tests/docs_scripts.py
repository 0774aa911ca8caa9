"""The programs beside the pages of docs/results, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

RESULTS = Path(__file__).parents[1] / "docs/results"


def docs_script(name: str) -> ModuleType:
    """Load docs/results/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"docs_results_{name}", RESULTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
