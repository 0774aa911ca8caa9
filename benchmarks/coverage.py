"""Whether the 95 % intervals cover: find, knock-out and studies, by simulation (docs/method.md, sections 4.6, 6, 7).

``python benchmarks/coverage.py [runs/demo]`` runs ``coverage_find``, ``coverage_knockout`` and ``coverage_studies``,
prints their tables and ends with status 1 where a target is missed.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from printing import machine, print_table

PACKAGES = ("rocktokens", "numpy", "scipy")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/demo"))
    arguments = parser.parse_args()
    print(machine(PACKAGES, cores=1), end="\n\n", flush=True)
    reached = [report(name, part) for name, part in parts(arguments.run).items()]
    sys.exit(0 if all(reached) else 1)


def parts(run: Path) -> dict[str, Callable[[], list[Row]]]:
    from coverage_find import find_coverage
    from coverage_knockout import knockout_coverage
    from coverage_studies import study_coverage

    return {"find": lambda: find_coverage(run), "knockout": knockout_coverage, "studies": study_coverage}


def report(name: str, part: Callable[[], list[Row]]) -> bool:
    """Print one part's rows as a table; whether it reached every target that it has."""
    started = time.perf_counter()
    rows = part()
    print(f"{name} ({time.perf_counter() - started:.0f} s)")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    print_table(columns, [[_cell(row.get(column)) for column in columns] for row in rows])
    return all(row.get("reached") is not False for row in rows)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
