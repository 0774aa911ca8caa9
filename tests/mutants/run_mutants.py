"""Are the tests able to fail? Plant faults one at a time, and see whether the test that should notice does.

1. ``mutants.toml`` lists the faults: a file of the package, text that occurs once in it, what takes its place, and the
   tests that notice.
2. The tree is copied to a temporary folder. The named tests must all pass there before anything is changed.
3. One fault at a time is planted and its tests are run, with a time limit. A test that fails, or does not end, has
   noticed: the mutant is killed. A mutant that breaks the collection of tests shows nothing, and counts as survived.
4. Every result is kept at once in build/mutants.jsonl, so an interrupted run goes on where it was. A result is of the
   text of the mutant, of its file and of the files of its tests; where one of them has changed, it is measured again.
5. In the end come a table by package and the survivors; below 97 % killed the exit code is 1.

    python tests/mutants/run_mutants.py                  # all of them
    python tests/mutants/run_mutants.py inference/ rocks/  # those whose file begins like this
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
RESULTS = ROOT / "build" / "mutants.jsonl"
COPIED = ("src", "tests", "docs", "examples", "recipes", "pyproject.toml")
"""What the tests read; links stay links."""
LEAST_KILLED = 0.97
TIME_LIMIT = 120
"""Seconds for the tests of one mutant: they take a few, and a fault may make a loop endless."""
PASSED, FAILED = 0, 1
"""Exit codes of pytest; others are of runs that tested nothing."""
Outcome = Literal["killed", "survived"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault."""

    file: str
    """Below src/rocktokens."""
    fault: str
    """What is wrong with it, in words."""
    old: str
    new: str
    tests: list[str]
    """As pytest takes them."""

    @property
    def place(self) -> Path:
        """Where the file is in a tree."""
        return Path("src", "rocktokens", self.file)

    @property
    def package(self) -> str:
        """The package of the file, or the module itself."""
        return self.file.partition("/")[0].removesuffix(".py")

    def planted(self, source: str) -> str:
        """The source with the fault; refused where the text is not there, or there twice."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.file} has {source.count(self.old)} times, not once: {self.old!r}")
        return source.replace(self.old, self.new)

    def key(self, root: Path) -> str:
        """What a result is of."""
        files = [self.place, *(Path(test.partition("::")[0]) for test in self.tests)]
        content = [self.old, self.new, *self.tests, *((root / file).read_text(encoding="utf-8") for file in files)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def load_mutants() -> list[Mutant]:
    """Read the list."""
    return [Mutant(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]]


def copied_tree(folder: Path) -> Path:
    """Copy what tests need into a folder."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name, follow_symlinks=False)
    return folder


def run_tests(tree: Path, tests: Sequence[str], limit: float | None, expected: Collection[int]) -> int | None:
    """Run tests on the package of a tree; the exit code of pytest, None where it ran out of time.

    What it said is shown where it ended in another way than expected.
    """
    options = ["-x", "-q", "--no-header", "--tb=line", "--durations=0", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    environment = {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        ended = subprocess.run(
            command, cwd=tree, env={**os.environ, **environment}, timeout=limit, capture_output=True, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    if ended.returncode not in expected:
        print(ended.stdout.decode()[-2000:], file=sys.stderr)
    return ended.returncode


def outcome_of(mutant: Mutant, tree: Path) -> Outcome:
    """Plant a fault in a tree, run its tests, and take it out again."""
    path = tree / mutant.place
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.planted(source), encoding="utf-8")
    try:
        return "killed" if run_tests(tree, mutant.tests, TIME_LIMIT, (PASSED, FAILED)) in (FAILED, None) else "survived"
    finally:
        path.write_text(source, encoding="utf-8")


def measure(mutants: Sequence[Mutant]) -> list[Outcome]:
    """The outcome of each, from an earlier run where that is known; the tree may change meanwhile."""
    known, keys = known_outcomes(), [mutant.key(ROOT) for mutant in mutants]
    left = [(key, mutant) for key, mutant in zip(keys, mutants, strict=True) if key not in known]
    print(f"{len(mutants)} mutants, {len(mutants) - len(left)} of them measured before", flush=True)
    if left:
        known |= _measured(left)
    return [known[key] for key in keys]


def _measured(left: Sequence[tuple[str, Mutant]]) -> dict[str, Outcome]:
    """Outcomes by key, each written down as soon as it is known."""
    found: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="rocktokens-mutants-") as folder:
        tree = copied_tree(Path(folder))
        tests = sorted({test for _, mutant in left for test in mutant.tests})
        print(f"running the {len(tests)} tests that must notice, without a fault", flush=True)
        if run_tests(tree, tests, None, (PASSED,)) != PASSED:
            raise SystemExit("a test fails without a fault, so it shows nothing: run it and repair that first")
        began = time.monotonic()
        for done, (key, mutant) in enumerate(left, start=1):
            found[key] = outcome_of(mutant, tree)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "outcome": found[key]}) + "\n")
            remaining = (time.monotonic() - began) / done * (len(left) - done)
            print(f"{done}/{len(left)}, {remaining / 60:.0f} min left: {found[key]:8} {label(mutant)}", flush=True)
    return found


def known_outcomes() -> dict[str, Outcome]:
    """What earlier runs found; a line that an interrupt has torn is measured again."""
    RESULTS.parent.mkdir(exist_ok=True)
    known: dict[str, Outcome] = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        known[record["key"]] = record["outcome"]
    return known


def label(mutant: Mutant) -> str:
    """Name a mutant in one line."""
    return f"{mutant.file}: {mutant.fault}"


def report(mutants: Sequence[Mutant], outcomes: Sequence[Outcome]) -> float:
    """Print the table and the survivors; the share killed."""
    survived = [mutant for mutant, outcome in zip(mutants, outcomes, strict=True) if outcome == "survived"]
    planted, alive = (Counter(mutant.package for mutant in some) for some in (mutants, survived))
    print(f"\n{'package':12} {'planted':>8} {'killed':>8}")
    for package in sorted(planted):
        print(f"{package:12} {planted[package]:8} {planted[package] - alive[package]:8}")
    for mutant in survived:
        print(f"survived: {label(mutant)} ({', '.join(mutant.tests)})")
    share = 1 - len(survived) / len(mutants)
    print(f"{len(mutants) - len(survived)} of {len(mutants)} killed, {100 * share:.1f} %")
    return share


def main() -> None:
    """Measure what is asked for, and say what survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="beginnings of files below src/rocktokens; default: all")
    files = tuple(parser.parse_args().files)
    mutants = [mutant for mutant in load_mutants() if not files or mutant.file.startswith(files)]
    if not mutants:
        raise SystemExit(f"no mutant is of a file that begins with {' or '.join(files)}: see {LIST.name}")
    if report(mutants, measure(mutants)) < LEAST_KILLED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
