"""The report: one or several runs as one HTML file that needs nothing but a browser.

1. Each run begins with five tiles, then is shown section by section; two runs stand side by side, more follow each
   other below a table that compares them.
2. Charts are embedded as SVG images. What the page's script draws in their place, so that it can be touched, and their
   data as CSV, lie in a data block. Without the script everything can still be read.
3. Model output is hostile: the template escapes all text, the data block holds no ``<``, and the policy of the page
   (https://developer.mozilla.org/docs/Web/HTTP/Guides/CSP) lets it run its own two scripts, by their hashes, and
   nothing else.
4. The same runs give the same bytes.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from typing import Any

from jinja2 import Environment, StrictUndefined

from rocktokens.display.rocks import teacher_sentence
from rocktokens.display.text import MARKS_LEGEND
from rocktokens.errors import RocktokensError
from rocktokens.report.csp import asset, page_policy
from rocktokens.report.page.comparison import pair_of
from rocktokens.report.page.parts import part_of, table_file
from rocktokens.report.tables import runs_table
from rocktokens.report.views.run_view import RunView, to_json

STYLES = ("base.css", "plot.css", "report.css")
SCRIPTS = ("strip.js", "plot_scales.js", "plot_marks.js", "plot.js", "report_choice.js", "report.js")
STRIPS_LEAD = (
    "Answers of the student, token by token. A stronger colour and a thicker underline mean a larger kl to the "
    "teacher. A diamond marks a rock. Choose a token to see what student and teacher would have written."
)
KL = (
    "kl: divergence of the student from the teacher over the whole vocabulary, in nats, at each sampled token. "
    "Gradients are those of the kl in the logits unless stated otherwise."
)
METHOD = (
    "One set of rollouts is scored at every checkpoint, so before and after are the same tokens.",
    "R: occurrences of a type times its mean kl. Rocks are the top K types by a lower bound of R over prompts, without "
    "those whose loss is surely still falling, unless the parameters below say otherwise.",
    "Rocks are selected on one half of the prompts and described on the other. Intervals are bootstraps over prompts.",
    "A ban makes a token impossible at every decoding step. The random numbers stay the same, so answers that do not "
    "contain the token do not change. Intervals of the effect are score intervals of paired proportions (Tango).",
    "A study trains its arms on the same prompts in the same order. Intervals are over seeds and prompts, for its "
    "primary pairs together and for exploratory ones apart.",
    "Rock tokens were described in arXiv 2605.09253.",
)
_INSIDE_NUMBER = re.compile(r" (?=%)|(?<=[\d%]) (?=\[)|(?<=\d,) (?=[+−]?[\d.]+\])")


def _what_kl_is(runs: Sequence[RunView]) -> Iterator[str]:
    """Say what kl is in these runs, which may have teachers that did not say all."""
    if not all(run.teacher_label for run in runs):
        yield KL
    for label in dict.fromkeys(run.teacher_label for run in runs if run.teacher_label):
        yield f"Where the teacher is labelled {label}: {teacher_sentence(label)}"


def report_html(runs: Sequence[RunView]) -> str:
    """Render the whole page."""
    require_content(runs)
    vocabularies = list(dict.fromkeys(map(_vocabulary, runs)))
    parts = [
        part_of(run, f"run-{number}", vocabularies.index(_vocabulary(run))) for number, run in enumerate(runs, start=1)
    ]
    comparison, pair = runs_table(runs) if len(runs) > 1 else None, pair_of(runs, parts) if len(runs) == 2 else None
    shared = [*([comparison] if comparison else []), *(pair.tables if pair else [])]
    files = {file: content for part in parts for file, content in part.files.items()}
    files |= {f"table-{table.name}": table_file(table, "report") for table in shared}
    plots = {place: plot for part in parts for place, plot in part.plots.items()} | (pair.plots if pair else {})
    style, script, theme_script = asset(*STYLES), asset(*SCRIPTS), asset("theme.js")
    name = parts[0].name if len(parts) == 1 else f"{len(parts)} runs"
    return _template().render(
        title=f"Rock tokens in {name}",
        policy=page_policy([theme_script, script], [style]),
        style=style,
        theme_script=theme_script,
        script=script,
        data=to_json({"files": files, "strips": [part.strips for part in parts], "plots": plots}),
        parts=parts,
        comparison=comparison,
        pair=pair,
        strips_lead=STRIPS_LEAD,
        marks=MARKS_LEGEND,
        method=(*_what_kl_is(runs), *METHOD),
        version=metadata.version("rocktokens"),
    )


def require_content(runs: Sequence[RunView]) -> None:
    """Refuse a run that has nothing to show."""
    for run in runs:
        records = (run.rocks, run.find, run.gradients, run.knockout, run.study)
        if not run.checkpoints and not run.evaluations and all(record is None for record in records):
            raise RocktokensError(
                f"{run.path} has nothing to show yet (no traces, rocks, evaluations or study): run `rocktokens trace` "
                "and `rocktokens find` on it first"
            )


def unbroken(sentence: str) -> str:
    """Keep a number together with its unit and interval at line ends."""
    return _INSIDE_NUMBER.sub("\N{NO-BREAK SPACE}", sentence)


@cache
def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["unbroken"] = unbroken
    return environment.from_string(asset("report.html"))


def _vocabulary(run: RunView) -> str:
    """Tell apart runs whose token ids mean different things."""
    found_with = run.rocks.tokenizer_sha256 if run.rocks else ""
    return found_with or run.manifest.get("tokenizer_sha256") or str(run.path)
