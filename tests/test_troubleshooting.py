"""Every message that docs/troubleshooting.md quotes is still one of the program's."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCES = sorted((ROOT / "src" / "rocktokens").rglob("*.py"))
_QUOTED = re.compile(r"^\| `(?P<message>[^`]+)`", re.M)


def texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a program, with … where an f-string holds a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


def unknown_messages(page: str, known: list[str]) -> list[str]:
    quoted = _QUOTED.findall(page)
    assert len(quoted) > 30, "the quotations are no longer recognised"
    return [message for message in quoted if not any(message in text for text in known)]


def known_texts() -> list[str]:
    return [text for file in SOURCES for text in texts(ast.parse(file.read_text(encoding="utf-8")))]


def test_quoted_messages_are_those_of_the_program():
    page, known = PAGE.read_text(encoding="utf-8"), known_texts()
    assert unknown_messages(page, known) == []
    changed = page.replace("is in use by another process (pid …)", "is used by another process (pid …)")
    assert unknown_messages(changed, known) == ["… is used by another process (pid …)"]
