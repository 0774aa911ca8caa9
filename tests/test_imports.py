"""Who may import whom: read from the sources, and checked in a fresh interpreter where torch must stay out."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rocktokens

SOURCE = Path(rocktokens.__file__).parent
BASE = {
    *("errors", "types", "classes", "config", "run_dir", "parsing", "parts", "windows", "progress", "interrupts"),
    *("display", "recipes", "splitmix", "provenance"),
}
"""Every module may import these."""
MODELS = BASE | {"tasks", "models", "rollouts", "scoring"}
MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    "tasks": BASE,
    "models": BASE,
    "rollouts": BASE | {"tasks", "models"},
    "scoring": BASE | {"tasks", "models", "rollouts"},
    "traces": BASE,
    "inference": BASE,
    "replay": MODELS | {"traces"},
    "rocks": BASE | {"traces", "inference"},
    "policies": BASE,
    "training": MODELS | {"traces.writer", "traces.schema", "policies"},
    "gradients": MODELS | {"traces", "inference", "rocks", "training.checkpoint", "training.optim"},
    "evaluation": BASE | {"tasks", "models", "rollouts", "inference"},
    "knockout": BASE | {"tasks", "models", "rollouts", "traces", "inference", "rocks", "evaluation"},
    "preflight": MODELS | {"policies", "training.session", "training.length", "training.optim", "training.retention"},
    "studies": MODELS
    | {"traces", "training", "replay", "rocks", "knockout", "evaluation", "inference", "policies", "preflight"},
    "report": BASE
    | {"traces", "rocks", "tasks", "rollouts.store", "knockout.journal", "knockout.records", "policies.online_rocks"}
    | {"gradients.records", "studies.records", "evaluation.records"},
    "integrity": BASE
    | {"traces", "rocks", "rollouts.store", "models.fingerprints", "gradients.records", "studies.records"}
    | {"evaluation.records", "knockout.journal", "knockout.records", "knockout.class_records"},
}
REACHES_ACROSS = {"cli", "integrations", "pipeline", "demo", "__init__"}
"""The command line, the adapters to other trainers, the pipeline and the demo join the stages; the package's own
namespace names the public functions, resolved on first use."""
EXCEPTIONS = {
    "classes": {"models.fingerprints"},
    "models.pebbles.train": {"tasks.wordmath"},
    "rocks.encoders": {"models.load", "models.fingerprints", "rollouts.store", "scoring.hidden"},
}
"""Classes made from texts name the vocabulary of their tokenizer.
Training the embedded models needs the corpus they are made from; nothing that loads a model imports that script.
Contexts can be encoded by the student itself; the models are imported by the functions that need one, so that whoever
imports the module does not import them."""
PLOTTING = {"report.charts"}
"""A typed result draws itself: its methods called ``plot_…`` import these when they are called; nothing else may."""
WITHOUT_TORCH = (*sorted(BASE), "rocks", "inference", "policies", "traces", "report", "integrity", "cli")
LIGHT_MODULES = (
    "rocktokens",
    "rocktokens.types",
    "rocktokens.classes",
    "rocktokens.config",
    "rocktokens.run_dir",
    "rocktokens.windows",
    "rocktokens.policies",
    "rocktokens.traces.writer",
    "rocktokens.traces.store",
    "rocktokens.rocks.find",
    "rocktokens.rocks.classes",
    "rocktokens.rocks.controls",
    "rocktokens.report.views.rollout_list",
    "rocktokens.integrity",
    "rocktokens.gradients.claims",
    "rocktokens.gradients.logit_summary",
    "rocktokens.studies.plan",
    "rocktokens.studies.study",
    "rocktokens.gradients.held_out",
    "rocktokens.gradients.records",
    "rocktokens.cli.gradients_tables",
    "rocktokens.cli.main",
)
HEAVY = ("torch", "transformers", "accelerate", "peft")


def module_name(path: Path) -> str:
    """``training.loop`` for ``src/rocktokens/training/loop.py``."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


SOURCES = {module_name(path): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Full names of what import statements name; a relative import keeps its leading dot."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def at_module_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that run on import: not those in functions, nor under ``if TYPE_CHECKING``."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending.extend(node.orelse)
            continue
        pending.extend(ast.iter_child_nodes(node))


def is_within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def forbidden_imports(module: str, source: str) -> list[str]:
    """What a module imports from this package and may not."""
    package = module.split(".", maxsplit=1)[0]
    allowed = {package} | MAY_IMPORT[package] | EXCEPTIONS.get(module, set())
    nodes = list(ast.walk(ast.parse(source)))
    plots = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("plot_")]
    drawing = {id(node) for plot in plots for node in ast.walk(plot)}
    own = [
        (name.removeprefix("rocktokens."), allowed | PLOTTING if id(node) in drawing else allowed)
        for node in nodes
        for name in imported(iter([node]))
        if name.split(".")[0] in ("rocktokens", "")
    ]
    return [name for name, permitted in own if not is_within(name, permitted)]


@pytest.mark.parametrize("module", [name for name in SOURCES if name.split(".")[0] not in REACHES_ACROSS])
def test_imports_go_one_way(module: str):
    assert forbidden_imports(module, SOURCES[module]) == []


@pytest.mark.parametrize("module", [name for name in SOURCES if name.split(".")[0] in WITHOUT_TORCH])
def test_light_modules_do_not_import_torch(module: str):
    names = imported(at_module_level(ast.parse(SOURCES[module])))
    assert [name for name in names if name.split(".")[0] in HEAVY] == []


@pytest.mark.parametrize("module", EXCEPTIONS)
def test_an_exception_is_still_needed_and_stays_alone(module: str):
    names = set(imported(ast.walk(ast.parse(SOURCES[module]))))
    assert all(any(is_within(name, {f"rocktokens.{target}"}) for name in names) for target in EXCEPTIONS[module])
    at_import = imported(at_module_level(ast.parse(SOURCES[module])))
    if not any(is_within(name.removeprefix("rocktokens."), EXCEPTIONS[module]) for name in at_import):
        return
    importers = [
        other
        for other, source in SOURCES.items()
        if any(is_within(name, {f"rocktokens.{module}"}) for name in imported(ast.walk(ast.parse(source))))
    ]
    assert importers == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("training.loop", "from rocktokens.rocks.find import find_rocks"),
        ("training.loop", "from rocktokens.traces import store"),
        ("training.loop", "def late():\n    import rocktokens.traces.store"),
        ("tasks.base", "from rocktokens.rollouts.sampler import Sampler"),
        ("policies.rocks", "from rocktokens.policies_extra import anything"),
        ("rocks.find", "from ..models import load"),
        ("rocks.find", "from rocktokens import token_scores"),
        ("models.load", "from rocktokens.tasks.wordmath import make_problem"),
        ("rocks.find", "def late():\n    from rocktokens.report.charts import forest"),
        ("rocks.find", "def plot_types():\n    from rocktokens.report.page import page"),
    ],
)
def test_the_reader_sees_a_forbidden_import(module: str, source: str):
    assert len(forbidden_imports(module, source)) == 1


def test_only_a_plot_method_may_draw():
    plot = "class A:\n    def plot_types(self):\n        from rocktokens.report.charts.forest import forest_chart"
    assert forbidden_imports("rocks.find", plot) == []
    assert len(forbidden_imports("rocks.find", plot.replace("plot_types", "types"))) == 1


@pytest.mark.parametrize(
    ("source", "runs"),
    [
        ("import torch", True),
        ("class A:\n    from torch import nn", True),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    pass", False),
        ("def f():\n    import torch", False),
    ],
)
def test_the_reader_knows_what_runs_on_import(source: str, runs: bool):
    assert any(name.startswith("torch") for name in imported(at_module_level(ast.parse(source)))) == runs


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def test_importing_a_light_module_leaves_torch_out():
    program = (
        "import importlib, json, sys\n"
        "found = {}\n"
        f"for name in {LIGHT_MODULES!r}:\n"
        "    importlib.import_module(name)\n"
        f"    found[name] = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]\n"
        "print(json.dumps(found))\n"
    )
    assert json.loads(python(program)) == {name: [] for name in LIGHT_MODULES}


def test_help_leaves_torch_out():
    program = (
        "import sys\n"
        "from rocktokens.cli.main import main\n"
        "sys.argv = ['rocktokens', '--help']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        f"    print('code', stop.code, [heavy for heavy in {HEAVY!r} if heavy in sys.modules])\n"
    )
    shown = python(program)
    assert "code 0 []" in shown and "distill" in shown
