"""Compare the selectors; ``selector_agreement`` says how. ``python benchmarks/selectors.py RUN --k 5 10 20``.

The standard library has a module of this name too. A script's own folder comes first on the path, so whatever imports
``selectors`` from a benchmark gets this file: it then stands in for the standard one.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path


def load_standard() -> None:
    """Put the standard library's module where ``import selectors`` looks first."""
    path = Path(sysconfig.get_path("stdlib"), "selectors.py")
    spec = importlib.util.spec_from_file_location("selectors", path)
    assert spec is not None and spec.loader is not None, f"Python's own selectors.py is not at {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules["selectors"] = module
    spec.loader.exec_module(module)


load_standard()
if __name__ == "__main__":
    from selector_agreement import main

    main()
