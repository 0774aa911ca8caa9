"""The list of verbs: as its functions say, quick, and with recipes that a wheel has too."""

import json
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
from command_line import refuse, rocktokens, succeed

from rocktokens.cli.main import VERBS
from rocktokens.config import load_config
from rocktokens.recipes import recipes

ROOT = Path(__file__).parents[2]
NO_VERBS = {"__init__", "main", "common", "tables"}


@pytest.mark.parametrize("verb", VERBS)
def test_the_list_has_the_first_line_of_each_docstring(verb: str):
    function = getattr(import_module(f"rocktokens.cli.{verb}"), verb)
    assert function.__doc__.splitlines()[0] == VERBS[verb]


def test_no_verb_is_left_out():
    files = {path.stem for path in (ROOT / "src/rocktokens/cli").glob("*.py")}
    assert {name for name in files - NO_VERBS if not name.endswith("_tables")} == VERBS.keys()


def test_help_takes_less_than_a_second_and_imports_no_verb():
    program = (
        "import sys, time\n"
        "from rocktokens.cli.main import main\n"
        "sys.argv = ['rocktokens', '--help']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    known = [name for name in sys.modules if name.startswith('rocktokens.')]\n"
        "    print(time.process_time(), *known, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    seconds, *modules = done.stderr.split()
    assert all(verb in done.stdout for verb in VERBS)
    assert set(modules) == {"rocktokens.cli", "rocktokens.cli.main", "rocktokens.errors", "rocktokens.interrupts"}
    assert float(seconds) < 1


def test_a_verb_that_is_misspelt_is_named():
    outcome = rocktokens("distil")
    assert outcome.code == 2 and "distill" in outcome.stderr


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_help_fits_80_columns_and_names_values_by_words(verb: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = succeed(*([verb] if verb else []), "--help").stdout
    assert "rocktokens" in shown and max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown and "<bool>" not in shown and "<str>" not in shown and "list[" not in shown


@pytest.mark.parametrize(
    ("words", "completed"), [("rocktokens kno", "knockout"), ("rocktokens find --thr", "--threads")]
)
def test_a_shell_completes_verbs_and_options(words: str, completed: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("_ROCKTOKENS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert rocktokens().stdout.split() == [completed]


def test_version():
    assert succeed("--version").stdout == "rocktokens 0.1.0\n"


def test_recipes_are_listed_shown_and_written(tmp_path: Path):
    listed = succeed("recipes", "--json").record["recipes"]
    assert [own["name"] for own in listed] == list(recipes())
    assert {own["kind"] for own in listed} == {"run", "study"} and all(own["summary"] for own in listed)
    text = (ROOT / "recipes/pebbles.toml").read_text(encoding="utf-8")
    assert succeed("recipes", "pebbles").stdout == text
    own = tmp_path / "run.toml"
    assert f"rocktokens run {own}" in succeed("recipes", "pebbles", "-o", own).stdout
    assert own.read_text(encoding="utf-8") == text
    refuse("recipes", "pebbles", "-o", own, naming=("--out", str(own), "it exists"))
    refuse("recipes", "peebles", naming=("'peebles'", "pebbles-paper"))


def test_a_config_is_a_file_or_the_name_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("pebbles", ["run.seed=3"]).run.seed == 3
    (tmp_path / "pebbles").write_text(
        '[run]\ndirectory = "mine"\n[models]\nstudent = "a"\nteacher = "b"\n', encoding="utf-8"
    )
    assert load_config("pebbles").run.directory == "mine"
    refuse("distill", "peebles", naming=("peebles", "`rocktokens recipes`"))


def test_the_wheel_holds_everything_that_commands_read(tmp_path: Path):
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=300)
    [wheel] = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src/rocktokens"
    needed = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(package.parent).as_posix() for path in needed} <= held
    assert {f"rocktokens/{name}" for name in ("py.typed", "recipes/pebbles.toml", "recipes/demo-study.toml")} <= held
    assert any(name.startswith("rocktokens/report/assets/") for name in held)
    assert json.loads(zipfile.ZipFile(wheel).read("rocktokens/models/pebbles/student/config.json"))["vocab_size"] > 0
