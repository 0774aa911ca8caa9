"""The report: one or several runs as one HTML file that needs nothing but a browser.

1. Each run has five short answers, then is shown section by section; several runs get a table that compares them.
2. Charts are drawn here and embedded as SVG images; their data lie once, as CSV, in a data block, from which the page's
   script makes downloads. Without the script everything can still be read.
3. Model output is hostile: the template escapes all text, the data block holds no ``<``, and the policy of the page
   (https://developer.mozilla.org/docs/Web/HTTP/Guides/CSP) lets it run its own two scripts, by their hashes, and
   nothing else.
4. The same runs give the same bytes.
"""

import base64
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from typing import Any

from jinja2 import Environment, StrictUndefined

from rocktokens.display.numbers import listed
from rocktokens.display.table import Table, csv_text
from rocktokens.display.text import MARKS_LEGEND, legible, printable
from rocktokens.errors import RocktokensError
from rocktokens.report.charts.save import chart_bytes
from rocktokens.report.charts.theme import Figure, finite
from rocktokens.report.csp import asset, page_policy
from rocktokens.report.page.answers import Answer, five_answers
from rocktokens.report.page.sections import Section, sections
from rocktokens.report.tables import runs_table
from rocktokens.report.views.run_view import RunView, to_json
from rocktokens.report.views.strips import Strip, interesting_rollouts, rollout_strip

STRIPS, STRIP_TOKENS = 4, 1_000
"""Rollouts shown of each run, and tokens of each: a page must not grow with the length of answers."""
ROOM = 20
"""Pixels."""
RESULT_FILES = ("rocks.json", "find.json", "gradients.json", "knockout.json", "evaluations.json")
STUDY_FACTS = ("baseline", "seeds", "n_prompts", "alpha", "margin", "denominator")
METHOD = (
    "kl: divergence of the student from the teacher over the whole vocabulary, in nats, at each sampled token. "
    "Gradients are those of the kl in the logits unless stated otherwise.",
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
_SIZE = re.compile(r'width="([\d.]+)" height="([\d.]+)" viewBox="0 0 [\d.]+ [\d.]+"')


@dataclass(frozen=True, slots=True)
class Image:
    """A chart as the page holds it."""

    id: str
    source: str
    """A data URI."""
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Part:
    """What the page shows of one run."""

    id: str
    name: str
    answers: Sequence[Answer]
    sections: Sequence[Section]
    missing: dict[str, str]
    """Titles of sections that could not be made, by the command that makes their data."""
    images: dict[str, Image]
    strips: Sequence[Strip]
    facts: dict[str, dict[str, str]]
    config: str


def report_html(runs: Sequence[RunView]) -> str:
    """Render the whole page."""
    require_content(runs)
    parts = [_part(run, f"run-{number}") for number, run in enumerate(runs, start=1)]
    comparison = runs_table(runs) if len(runs) > 1 else None
    files = {file: content for part in parts for file, content in _files(part).items()}
    if comparison:
        files["table-runs"] = _table_file(comparison, "report")
    style, script, theme_script = asset("base.css", "report.css"), asset("strip.js", "report.js"), asset("theme.js")
    name = parts[0].name if len(parts) == 1 else f"{len(parts)} runs"
    return _template().render(
        title=f"Rock tokens in {name}",
        policy=page_policy([theme_script, script], [style]),
        style=style,
        theme_script=theme_script,
        script=script,
        data=to_json({"files": files, "strips": [part.strips for part in parts]}),
        parts=parts,
        comparison=comparison,
        marks=MARKS_LEGEND,
        method=METHOD,
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


def file_name(name: str) -> str:
    """Make a name that any file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"


@cache
def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["unbroken"] = unbroken
    return environment.from_string(asset("report.html"))


def _part(run: RunView, part_id: str) -> Part:
    try:
        made, answers, facts = sections(run), five_answers(run), _facts(run)
    except KeyError as error:
        raise RocktokensError(
            f"a result file of {run.path} lacks the field {error}, which the report needs: run the command that wrote "
            "it again"
        ) from error
    shown = [section for section in made if section.is_there]
    missing: dict[str, list[str]] = {}
    for section in made:
        if not section.is_there:
            missing.setdefault(section.verb, []).append(section.title)
    figures = [figure for section in shown for figure in section.figures]
    return Part(
        id=part_id,
        name=printable(run.name),
        answers=answers,
        sections=shown,
        missing={verb: listed(titles) for verb, titles in missing.items()},
        images={figure.name: _image(figure, f"{part_id}-figure-{figure.name}") for figure in figures},
        strips=[rollout_strip(run, own).first(STRIP_TOKENS) for own in interesting_rollouts(run, STRIPS)],
        facts=facts,
        config=legible(run.config_text),
    )


def _image(figure: Figure, image_id: str) -> Image:
    svg, width, height = with_room(chart_bytes(figure.chart, "svg").decode())
    return Image(image_id, f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}", width, height)


def with_room(svg: str) -> tuple[str, int, int]:
    """Give a chart more room at its sides, for browsers whose font is wider than the one it was drawn with."""
    head = _SIZE.search(svg)
    if head is None:
        raise ValueError("the SVG does not begin with its size")
    width, height = (float(side) for side in head.groups())
    wider = width + 2 * ROOM
    size = f'width="{wider:g}" height="{height:g}" viewBox="{-ROOM} 0 {wider:g} {height:g}"'
    return svg[: head.start()] + size + svg[head.end() :], round(wider), round(height)


def _files(part: Part) -> dict[str, dict[str, str]]:
    """Make what can be downloaded of a run, by the id of the image or table."""
    stem, files = file_name(part.name), {}
    for section in part.sections:
        for figure in section.figures:
            csv = csv_text(finite(figure.records))
            files[part.images[figure.name].id] = {"stem": f"{stem}-{figure.name}", "csv": csv}
        for table in section.tables:
            files[f"{part.id}-table-{table.name}"] = _table_file(table, stem)
    return files


def _table_file(table: Table, stem: str) -> dict[str, str]:
    return {"stem": f"{stem}-{table.name}", "csv": table.to_csv()}


def _facts(run: RunView) -> dict[str, dict[str, str]]:
    """List everything that is needed to reproduce the numbers."""
    manifest, replay = run.manifest, run.replay
    models = {"student": manifest.get("student"), "teacher": manifest.get("teacher") or (replay and replay.teacher)}
    source = run.rocks.source if run.rocks else {}
    files, steps = manifest["files"], replay.checkpoints if replay else {}
    banning = sorted(asdict(run.knockout.settings).items()) if run.knockout else []
    known = {
        "The run": {**models, **{name: manifest.get(name) for name in ("command", "seed", "started", "num_processes")}},
        "What makes a rock": run.rocks.criterion if run.rocks else {},
        "Knock-out": {name: value for name, value in banning if not isinstance(value, dict | list)},
        "Gradients": asdict(run.gradients.settings) if run.gradients else {},
        "Study": {name: getattr(run.study, name) for name in STUDY_FACTS} if run.study else {},
        "Versions": manifest.get("versions", {}),
        "SHA-256": {
            "tokenizer": manifest.get("tokenizer_sha256"),
            "trace parts": source.get("manifest_sha256"),
            **{f"checkpoint {step}": steps[step] for step in sorted(steps)},
            **{name: files[name]["sha256"] for name in RESULT_FILES if name in files},
        },
    }
    return {
        title: {name.replace("_", " "): printable(str(fact)) for name, fact in facts.items() if fact not in (None, "")}
        for title, facts in known.items()
    }
