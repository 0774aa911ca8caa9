"""The site builds without a warning and loads nothing from elsewhere; its generated pages are up to date."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

import rocktokens

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path[:0] = [str(DOCS), str(DOCS / "reference")]

_FENCE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1[ \t]*$", re.M | re.S)
_ITEM = re.compile(r" *(?:[-*+]|\d+\.) ")
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}
"""Elements that make a browser fetch something, and the attribute that says what."""


class Loads(HTMLParser):
    """The addresses that a page loads."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(LOADED.get(tag, ""))
        self.found |= {address} if address else set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("material", "mkdocstrings"):
        pytest.importorskip(package, reason="the site is not built: its packages are not installed (extra docs)")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return out


def test_every_page_is_built_and_loads_nothing_from_elsewhere(site: Path):
    pages = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")}
    assert pages >= {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert "project/changelog.md" in pages
    loads = {address for path in site.rglob("*.html") for address in Loads(path.read_text(encoding="utf-8")).found}
    assert [address for address in loads if re.match(r"(?:[a-z]+:)?//", address)] == []
    assert any(address.endswith(".css") for address in loads), "nothing is loaded at all"


def test_every_public_name_is_in_the_reference(site: Path):
    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    headings = set(re.findall(r'<span class="doc doc-object-name[^"]*">(\w+)</span>', page))
    assert set(rocktokens.__all__) - headings == {"__version__"}


def test_the_page_of_the_command_line_is_up_to_date():
    from cli_page import PAGE, cli_page

    assert PAGE.read_text(encoding="utf-8") == cli_page(), "make it again: python docs/reference/cli_page.py"


def hidden_blocks(text: str) -> list[str]:
    """Lists and tables that GitHub shows and the site would not: right below a paragraph, or nested by too little."""
    lines = ["", *_FENCE.sub("", text).splitlines()]
    hidden = []
    for before, line in pairwise(lines):
        is_below_text = bool(before.strip()) and not before.startswith(("#", " ", "|")) and not _ITEM.match(before)
        if is_below_text and (_ITEM.match(line) or line.startswith("|")):
            hidden.append(line)
        if re.match(r" {1,3}(?:[-*+]|\d+\.) ", line):
            hidden.append(line)
    return hidden


def test_lists_and_tables_are_shown_as_on_github():
    assert hidden_blocks("text:\n- one\n\n1. two\n   - three\n\nmore\n| a |\n") == ["- one", "   - three", "| a |"]
    pages = [*DOCS.rglob("*.md"), *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]
    assert {page.name: hidden for page in pages if (hidden := hidden_blocks(page.read_text(encoding="utf-8")))} == {}


def test_links_follow_pages_to_where_the_site_has_them():
    pytest.importorskip("mkdocs", reason="the site's packages are not installed (extra docs)")
    from site_hooks import site_links

    from_docs = "[a](../CHANGELOG.md#x) [b](../recipes) [c](images/x.png) [d](#e) [e](https://x.y) `[f](../LICENSE)`"
    assert site_links(from_docs, "docs/demo.md", "demo.md") == (
        "[a](project/changelog.md#x) b [c](images/x.png) [d](#e) [e](https://x.y) `[f](../LICENSE)`"
    )
    outside = "[a](docs/demo.md#x) [b](README.md)\n```\n[c](docs/demo.md)\n```\n"
    assert site_links(outside, "CHANGELOG.md", "project/changelog.md") == (
        "[a](../demo.md#x) [b](../index.md)\n```\n[c](docs/demo.md)\n```\n"
    )
