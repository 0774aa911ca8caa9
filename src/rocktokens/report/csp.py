"""Pages of one document: shipped files inlined, and a policy that lets a browser run those and nothing else.

Scripts and styles are allowed by their hash. Trusted types make a browser refuse to parse any string as markup, so that
text can only ever be text. https://developer.mozilla.org/en-US/docs/Web/HTTP/Guides/CSP
"""

import base64
import hashlib
from collections.abc import Iterable
from importlib import resources

NOTHING_RUNS = ("default-src 'none'", "base-uri 'none'", "form-action 'none'")


def asset(*names: str) -> str:
    """Join shipped files."""
    folder = resources.files("rocktokens.report").joinpath("assets")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def page_policy(scripts: Iterable[str], styles: Iterable[str], *more: str) -> str:
    """Make the policy of a page with these inline scripts and styles: nothing else runs or is loaded.

    ``more`` is what a page may do besides: ``connect-src 'self'`` if it asks its own server.
    """
    allowed = (f"script-src {_hashes(scripts)}", f"style-src {_hashes(styles)}", "img-src data:")
    return "; ".join((*NOTHING_RUNS, *allowed, "require-trusted-types-for 'script'", "trusted-types 'none'", *more))


def _hashes(sources: Iterable[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in sources)
