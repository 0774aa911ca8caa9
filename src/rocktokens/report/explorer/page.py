"""The explorer's page: one document with its styles and scripts inlined, and the policy that allows just those."""

from functools import cache

from rocktokens.report.csp import asset, page_policy

STYLES = ("base.css", "plot.css", "explorer.css")
SCRIPTS = (
    "strip.js",
    "plot_scales.js",
    "plot_marks.js",
    "plot.js",
    "charts.js",
    "list.js",
    "table.js",
    "explorer_core.js",
    "explorer_home.js",
    "explorer_token.js",
    "explorer_rollouts.js",
    "explorer_rocks.js",
    "explorer_classes.js",
    "explorer_compare.js",
    "explorer_knockout.js",
    "explorer_live.js",
    "explorer.js",
)
HEAD, DATA = "<!-- head -->", "<!-- data -->"
"""Places of the page that only a bundle fills."""


@cache
def page() -> str:
    """Return the page."""
    styles, scripts = _sources()
    text = asset("explorer.html")
    text = text.replace("<!-- styles -->", "\n".join(f"<style>{style}</style>" for style in styles))
    return text.replace("<!-- scripts -->", "\n".join(f"<script>{script}</script>" for script in scripts))


def policy(*more: str) -> str:
    """Return the policy that allows the page's own styles and scripts, and ``more``."""
    styles, scripts = _sources()
    return page_policy(scripts, styles, *more)


@cache
def _sources() -> tuple[list[str], list[str]]:
    return [asset(name) for name in STYLES], [asset(name) for name in SCRIPTS]
