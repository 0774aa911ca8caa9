"""The documentation agrees with the tree: links resolve; commands, modules and recipes exist; citations have a heading.

Every check is a function from a text to the list of what is wrong with it, so that each can be tried on a bad sample.
"""

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import typer

import rocktokens
from rocktokens.cli.main import VERBS, app

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rocktokens"
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
        *(ROOT / "docs").rglob("*.md"),
        *SOURCE.rglob("*.md"),
    ]
)
SOURCES = sorted(SOURCE.rglob("*.py"))
CODE_ROOTS = (ROOT, SOURCE)
"""Where a path in a page may start: the repository, or the package."""
SHELL = ("", "sh", "bash", "console", "text")
"""Languages of fenced blocks that may hold commands."""

MOST_FILES_OF_FIND = 18

_FENCE = re.compile(r"^(?P<fence>`{3,}|~{3,})(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.M | re.S)
_SPAN = re.compile(r"(?<!`)`(?P<code>[^`]+)`(?!`)")
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6} +(?P<text>.+?)(?: +#+)?[ \t]*$", re.M)
_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"(?P<id>[^\"]+)\"")
_COMMAND = re.compile(r"(?<![\w./-])rocktokens(?P<main>\.cli\.main)? (?P<verb>[a-z]\w*)(?P<rest>[^\n#&|;`]*)")
_FLAG = re.compile(r"(?<![\w-])(?P<flag>--?[a-z][a-z-]*)")
_RECIPE = re.compile(r"\b(?P<name>(?:pebbles|smollm2)[\w-]*\.toml)\b")
_MODULE = re.compile(r"(?<![\w/.])rocktokens(?!\.json)(?:\.[a-z_][a-z_0-9]*)+(?:\.[A-Za-z_]\w*)?")
_PATH = re.compile(r"(?<![\w/.:-])(?P<path>(?:[a-z_0-9]+/)+[a-z_0-9]+\.py)\b")
_CITATION = re.compile(
    r"\bmethod(?:\.md,)? (?:section )?(?P<numbers>\d+(?:\.\d)?(?:(?:, | and )\d+(?:\.\d)?)*)(?! ?[\d%])", re.I
)


def without_code(text: str) -> str:
    """A page without fenced blocks and code spans, in which nothing is a link."""
    return _SPAN.sub("", _FENCE.sub("", text))


def slug(heading: str) -> str:
    """The anchor GitHub gives a heading: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    text = re.sub(r"(?<!\w)[*_]+|[*_]+(?!\w)", "", text)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(page: Path, text: str | None = None) -> set[str]:
    """All that ``#…`` may name in a page; a repeated heading gets -1, -2, …"""
    text = page.read_text(encoding="utf-8") if text is None else text
    body, seen, found = _FENCE.sub("", text), Counter[str](), {m["id"] for m in _ANCHOR.finditer(text)}
    for match in _HEADING.finditer(body):
        name = slug(match["text"])
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links and images of a page that lead nowhere."""
    broken = []
    for match in _LINK.finditer(without_code(text)):
        target = match["target"]
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        is_there = file.exists() and file.is_relative_to(ROOT)
        if not is_there or (anchor and anchor not in anchors(file, text if file == page else None)):
            broken.append(target)
    return broken


def shell_texts(text: str) -> Iterator[str]:
    """Where commands stand: fenced blocks that are no program, and code spans."""
    for match in _FENCE.finditer(text):
        if match["language"].strip() in SHELL:
            yield match["body"]
    for match in _SPAN.finditer(_FENCE.sub("", text)):
        yield " ".join(match["code"].split())


def unknown_commands(text: str) -> list[str]:
    """Commands that name a verb or an option that does not exist."""
    group: Any = typer.main.get_command(app)
    context = group.context_class(group)
    unknown = []
    for match in (match for part in shell_texts(text) for match in _COMMAND.finditer(part)):
        if group.get_command(context, match["verb"]) is None:
            unknown.append(match["verb"])
            continue
        _, verb, _ = group.resolve_command(context, [match["verb"]])
        options = {option for param in verb.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
        unknown.extend(f"{match['verb']} {flag}" for flag in _FLAG.findall(match["rest"]) if flag not in options)
    return unknown


def unknown_recipes(text: str) -> list[str]:
    """Recipes that are named and not shipped."""
    shipped = {path.name for folder in (ROOT / "recipes", SOURCE / "recipes") for path in folder.glob("*.toml")}
    return [name for name in _RECIPE.findall(text) if name not in shipped]


def unknown_modules(text: str) -> list[str]:
    """Modules, names in modules, and paths of programs that do not exist."""
    names = [name for name in _MODULE.findall(text) if not _is_there(name)]
    paths = [path for path in _PATH.findall(text) if not any((folder / path).is_file() for folder in CODE_ROOTS)]
    return names + paths


def unknown_imports(text: str) -> list[str]:
    """What the Python examples of a page import from this package, and cannot."""
    blocks = [match["body"] for match in _FENCE.finditer(text) if match["language"].strip() == "python"]
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    names = [f"{node.module}.{alias.name}" for node in nodes for alias in node.names]
    return [name for name in names if name.startswith("rocktokens.") and not _is_there(name)]


def _is_there(name: str) -> bool:
    """Whether a dotted name is a module of this package, or a name at the top of one; without importing it."""
    *parents, last = name.split(".")[1:]
    if not parents and last in rocktokens.__all__:
        return True
    folder = SOURCE.joinpath(*parents)
    if (folder / last).is_dir() or (folder / f"{last}.py").is_file():
        return True
    for file in (folder / "__init__.py", folder.with_suffix(".py")):
        if parents and file.is_file() and last in _top_names(file):
            return True
    return False


def _top_names(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def words_of(file: Path) -> str:
    """The docstrings, comments and other texts of a program."""
    with file.open("rb") as source:
        kinds = (tokenize.STRING, tokenize.COMMENT, *filter(None, (getattr(tokenize, "FSTRING_MIDDLE", None),)))
        return "\n".join(token.string for token in tokenize.tokenize(source.readline) if token.type in kinds)


def cited_sections(text: str) -> list[str]:
    """Section numbers of docs/method.md that a text cites: "4.3" and "5" of "(method 4.3, 5)"."""
    return [number for match in _CITATION.finditer(text) for number in re.findall(r"\d+(?:\.\d)?", match["numbers"])]


def method_sections() -> set[str]:
    text = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    headings = (match["text"] for match in _HEADING.finditer(_FENCE.sub("", text)))
    return {found[1] for heading in headings if (found := re.match(r"(\d+(?:\.\d)?)\.? ", heading))}


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_resolve(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_exist(page: Path) -> None:
    assert unknown_commands(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_modules_and_recipes_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert unknown_recipes(text) + unknown_modules(text) + unknown_imports(text) == []


def test_recipes_that_programs_name_exist() -> None:
    missing = {page_id(file): names for file in SOURCES if (names := unknown_recipes(words_of(file)))}
    assert missing == {}


def test_citations_of_the_method_have_a_heading() -> None:
    sections, cited = method_sections(), {page_id(file): cited_sections(words_of(file)) for file in SOURCES}
    assert {file: missing for file, numbers in cited.items() if (missing := set(numbers) - sections)} == {}
    assert sum(map(len, cited.values())) > 20, "citations are no longer recognised"


def walks() -> dict[str, list[str]]:
    """The files that each walk of the architecture names, in order; not those of the tests."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("\n## Walks\n")[1]
    found = {}
    for section in text.split("\n### ")[1:]:
        title, body = section.split("\n", maxsplit=1)
        paths = [path for path in _SPAN.findall(body) if path.endswith(".py") and not path.startswith("tests/")]
        found[title] = paths
    return found


def test_every_command_has_a_walk_of_files_that_exist_none_twice() -> None:
    found = walks()
    assert set(VERBS) == {verb for title in found for verb in re.findall(r"rocktokens (\w+)", title)}
    for title, paths in found.items():
        assert paths and len(paths) == len(set(paths)), title
        assert [path for path in paths if not (SOURCE / path).is_file()] == [], title
    [finding] = [paths for title, paths in found.items() if "rocktokens find" in title]
    assert len(finding) <= MOST_FILES_OF_FIND


def test_the_method_has_its_sections() -> None:
    assert method_sections() >= {*"0123456789", *(f"4.{number}" for number in range(1, 10))}


def test_every_page_of_the_documentation_is_linked_from_the_readme() -> None:
    linked = {match["target"] for match in _LINK.finditer((ROOT / "README.md").read_text(encoding="utf-8"))}
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {target.partition("#")[0] for target in linked} == set()


SAMPLE = """# A title

## Two words: `code`, and *more*
## Two words: `code`, and *more*
<a id="here"></a>
"""


@pytest.mark.parametrize(
    ("target", "is_broken"),
    [
        ("#two-words-code-and-more", False),
        ("#two-words-code-and-more-1", False),
        ("#two-words-code-and-more-2", True),
        ("#here", False),
        ("#there", True),
        ("method.md#44-context-consistency", False),
        ("method.md#44-context-consistenc", True),
        ("../README.md", False),
        ("README.md", True),
        ("images/demo.svg", False),
        ("images/demo.gif", True),
        ("../../../etc/passwd", True),
        ("https://example.org/nothing", False),
    ],
)
def test_the_reader_of_links_sees_a_broken_one(target: str, is_broken: bool) -> None:
    page = ROOT / "docs" / "finding.md"
    assert broken_links(page, f"{SAMPLE}[text]({target})") == ([target] if is_broken else [])
    assert broken_links(page, f"{SAMPLE}![text]({target})") == ([target] if is_broken else [])
    assert broken_links(page, f"{SAMPLE}`[text]({target})`\n```\n[text]({target})\n```\n") == []


@pytest.mark.parametrize(
    ("command", "unknown"),
    [
        ("rocktokens find runs/a --k auto --json", []),
        ("rocktokens find runs/a --kay 3", ["find --kay"]),
        ("rocktokens report runs/a -o out.html", []),
        ("rocktokens report runs/a -x out.html", ["report -x"]),
        ("rocktokens fond runs/a", ["fond"]),
        ("OMP_NUM_THREADS=1 rocktokens find runs/a && rocktokens fond runs/a", ["fond"]),
        ("accelerate launch -m rocktokens.cli.main distil run.toml", ["distil"]),
        ("rocktokens trace run.toml   # --not-an-option in a comment", []),
        ("rocktokens explore runs/a --no-browser", []),
    ],
)
def test_the_reader_of_commands_sees_an_unknown_one(command: str, unknown: list[str]) -> None:
    assert unknown_commands(f"```\n{command}\n```\n") == unknown
    assert unknown_commands(f"Run `{command}`.") == unknown
    assert unknown_commands(f"```python\n# {command}\n```\n") == []


def test_the_reader_of_names_sees_unknown_ones() -> None:
    assert unknown_recipes("recipes/pebbles-paper.toml and recipes/pebbles-papers.toml") == ["pebbles-papers.toml"]
    assert unknown_modules("`rocktokens.types`, `rocktokens.types.RockSet`, `rocktokens.no_such`") == [
        "rocktokens.no_such"
    ]
    assert unknown_modules("`rocktokens.types.Rockset` in `tests/test_docs.py`, `policies/base.py`, `a/b.py`") == [
        "rocktokens.types.Rockset",
        "a/b.py",
    ]
    example = "```python\nfrom rocktokens import find_rocks, find_sand\nfrom rocktokens.types import Prompt\n```\n"
    assert unknown_imports(example) == ["rocktokens.find_sand"]


def test_the_reader_of_citations_sees_them() -> None:
    assert cited_sections("(method 4.3), as METHOD 6 says; methods 1 to 2") == ["4.3", "6"]
    assert cited_sections("docs/method.md, section 5; the method 4.6, 4.8 and 5; a method 30 % faster") == [
        "5", "4.6", "4.8", "5",
    ]  # fmt: skip
    assert cited_sections("docs/method.md, section 10") == ["10"]
    assert "4.0" not in method_sections()
