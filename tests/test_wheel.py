"""The wheel is whole, and its modules compile on every supported Python that is here, where the command line starts.

Bare interpreters have no torch, nor any other compiled package, so what runs there is what does without them: packages
of pure Python are lent to them from this environment.
"""

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from shutil import which

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rocktokens"
VERSIONS = ("3.11", "3.12", "3.13")
PROGRAM = """
import json, sys, warnings
from pathlib import Path

wheel, lent = sys.argv[1:]
warnings.simplefilter("error", SyntaxWarning)
compiled = [compile(path.read_bytes(), str(path), "exec") for path in Path(wheel).rglob("*.py")]
warnings.resetwarnings()
sys.path[:0] = [wheel, lent]
import rocktokens.errors, rocktokens.progress, rocktokens.run_dir
from rocktokens.cli.main import main
sys.argv = ["rocktokens", "--help"]
try:
    main()
except SystemExit as stop:
    code = stop.code
version = "%d.%d" % sys.version_info[:2]
print(json.dumps({"file": rocktokens.__file__, "version": version, "compiled": len(compiled), "code": code}))
"""


def interpreter(version: str) -> str:
    """Return an interpreter of this version; the test is skipped where there is none."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for python in [*filter(None, [which(f"python{version}")]), *map(str, installed)]:
        # a shim of pyenv may lead nowhere
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip(f"there is no Python {version} here")


def requirements(name: str) -> Iterator[str]:
    """Yield a package and all that it needs."""
    yield name
    for needed in map(Requirement, distribution(name).requires or []):
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            yield from requirements(needed.name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "-w", str(out), "-q"], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [file] = out.glob("rocktokens-*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(out / "unpacked")
    return out / "unpacked"


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Typer and those of its requirements that are of pure Python."""
    folder = tmp_path_factory.mktemp("lent")
    for name in set(requirements("typer")):
        own = distribution(name)
        files = [file for file in own.files or [] if ".." not in file.parts]
        is_pure = not any(file.suffix in {".so", ".pyd"} for file in files)
        for top in {file.parts[0] for file in files} - {"__pycache__"} if is_pure else ():
            (folder / top).symlink_to(Path(str(own.locate_file(top))).resolve())
    return folder


def test_the_wheel_holds_every_file_of_the_package(wheel: Path):
    tracked = subprocess.run(["git", "ls-files"], cwd=SOURCE, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("this is no git checkout")
    packed = {path.relative_to(wheel / "rocktokens").as_posix() for path in (wheel / "rocktokens").rglob("*")}
    assert set(tracked.stdout.split()) - packed == set()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_module_compiles_and_the_command_line_starts(version: str, wheel: Path, lent: Path):
    command = [interpreter(version), "-I", "-B", "-c", PROGRAM, str(wheel), str(lent)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    *help_lines, record = ran.stdout.splitlines()
    assert any("distill" in line for line in help_lines)
    modules = sum(1 for _ in wheel.rglob("*.py"))
    init = str(wheel / "rocktokens" / "__init__.py")
    assert json.loads(record) == {"file": init, "version": version, "compiled": modules, "code": 0}
