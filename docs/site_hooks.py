"""What the site does beside MkDocs: pages of the repository outside docs/ become pages, and links follow them.

1. ``on_files`` adds the changelog and its like under ``project/``.
2. ``on_page_markdown`` rewrites each relative link from where its target lies in the repository to where the site has
   it. What the site does not have, such as a recipe or the licence, keeps its text and loses its link.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "src/rocktokens/models/pebbles/CARD.md": "project/pebbles.md",
}
"""Pages that are not in docs/, and where the site has them."""
_CODE_OR_LINK = re.compile(
    r"^(?P<fence>`{3,})[^\n]*\n.*?^(?P=fence)[ \t]*$|`[^`\n]+`"
    r"|(?P<label>!?\[(?:[^\]\[]|\[[^\]]*\])*\])\((?P<target>[^)\s:]+)\)",
    re.M | re.S,
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository that are not in docs/."""
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page that leave docs/, or come from outside of it."""
    place = page.file.src_uri
    source = next((own for own, moved in OUTSIDE.items() if moved == place), f"docs/{place}")
    return site_links(markdown, source, place)


def site_links(markdown: str, source: str, place: str) -> str:
    """Return a page with links as the site needs them.

    Args:
        markdown: The page.
        source: Its path in the repository.
        place: Its path on the site.
    """

    def rewritten(match: re.Match[str]) -> str:
        if match["target"] is None or match["target"].startswith("#"):
            return match[0]
        path, _, anchor = match["target"].partition("#")
        target = site_place(os.path.normpath(Path(source).parent / path))
        if target is None:
            return match["label"][1:-1]
        return f"{match['label']}({os.path.relpath(target, Path(place).parent)}{'#' + anchor if anchor else ''})"

    return _CODE_OR_LINK.sub(rewritten, markdown)


def site_place(path: str) -> str | None:
    """Return where the site has a file of the repository; None where it has not."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return OUTSIDE.get(path)
