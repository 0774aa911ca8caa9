"""What the page shows of one run: its first screen, its sections, its charts as images, a few rollouts, its files."""

import base64
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocktokens.display.numbers import listed
from rocktokens.display.table import Table, csv_text
from rocktokens.display.text import legible, printable
from rocktokens.errors import RocktokensError
from rocktokens.report.charts.plots import Plot
from rocktokens.report.charts.save import chart_bytes
from rocktokens.report.charts.theme import Figure, finite
from rocktokens.report.next_steps import Step, step_after_report
from rocktokens.report.page.answers import five_answers
from rocktokens.report.page.facts import headline, reproduction_facts
from rocktokens.report.page.sections import Section, sections
from rocktokens.report.page.tiles import NAMED_ROCKS, NamedRock, Tile, five_tiles, named_rocks, terms_of
from rocktokens.report.views.run_view import RunView
from rocktokens.report.views.strips import Strip, interesting_rollouts, rollout_strip

STRIPS, STRIP_TOKENS = 4, 1_000
"""Rollouts shown of each run, and tokens of each: a page must not grow with the length of answers."""
ROOM = 20
"""Pixels."""
FILE_DIGITS = 6
"""Significant digits of the numbers in a figure's file."""
OFTEN = 20
"""Marks that are alike, from which on they are drawn once."""
_MARK = re.compile(r'<path transform="translate\((-?[\d.]+),(-?[\d.]+)\)" ([^<>]*)/>')
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
    vocabulary: int
    """The same for runs whose token ids mean the same."""
    headline: dict[str, str]
    tiles: Sequence[Tile]
    rocks: Sequence[NamedRock]
    """The first ones."""
    terms: str
    """What is said of them."""
    more_rocks: int
    """How many there are besides."""
    step: Step
    """What to do next."""
    sections: Sequence[Section]
    missing: dict[str, str]
    """Titles of sections that could not be made, by the command that makes their data."""
    images: dict[str, Image]
    strips: Sequence[Strip]
    unmarked: str
    """Why no strip says whether its answer is right; empty where they do."""
    facts: dict[str, dict[str, str]]
    config: str

    @property
    def figures(self) -> dict[str, Figure]:
        """All figures, by the ids of their images."""
        return {self.images[own.name].id: own for section in self.sections for own in section.figures}

    @property
    def plots(self) -> dict[str, Plot]:
        """What can be touched, by the id of the image it stands in for."""
        return {image: figure.plot for image, figure in self.figures.items() if figure.plot.panels}

    @property
    def files(self) -> dict[str, dict[str, str]]:
        """What can be downloaded, by the id of the image or table."""
        stem = file_name(self.name)
        figures = {
            image: {"stem": f"{stem}-{figure.name}", "csv": csv_text(map(_rounded, finite(figure.records)))}
            for image, figure in self.figures.items()
        }
        tables = [table for section in self.sections for table in (*section.tables, *section.more)]
        return {**figures, **{f"{self.id}-table-{table.name}": table_file(table, stem) for table in tables}}


def part_of(run: RunView, part_id: str, vocabulary: int) -> Part:
    """Make the part of a run."""
    try:
        answers = five_answers(run)
        tiles = five_tiles(run, answers)
        made, facts = sections(run, answers, tiles), reproduction_facts(run)
    except KeyError as error:
        raise RocktokensError(
            f"a result file of {run.path} lacks the field {error}, which the report needs: run the command that wrote "
            "it again"
        ) from error
    rocks = named_rocks(run.rocks) if run.rocks else []
    shown = [section for section in made if section.is_there]
    missing: dict[str, list[str]] = {}
    for section in made:
        if not section.is_there:
            missing.setdefault(section.verb, []).append(section.title)
    figures = [figure for section in shown for figure in section.figures]
    return Part(
        id=part_id,
        name=printable(run.name),
        vocabulary=vocabulary,
        headline=headline(run),
        tiles=tiles,
        rocks=rocks,
        terms=terms_of(rocks),
        more_rocks=max(0, len(run.rocks.tokens) - NAMED_ROCKS) if run.rocks else 0,
        step=step_after_report(run),
        sections=shown,
        missing={verb: listed(titles) for verb, titles in missing.items()},
        images={figure.name: _image(figure, f"{part_id}-figure-{figure.name}") for figure in figures},
        strips=[rollout_strip(run, own).first(STRIP_TOKENS) for own in interesting_rollouts(run, STRIPS)],
        unmarked=run.unmarked,
        facts=facts,
        config=legible(run.config_text),
    )


def _rounded(record: Mapping[str, Any]) -> dict[str, Any]:
    """Leave of numbers what a reader of a figure needs: the rest would be half of the bytes of a page's files."""
    return {
        name: float(f"{value:.{FILE_DIGITS}g}") if isinstance(value, float) and not value.is_integer() else value
        for name, value in record.items()
    }


def _image(figure: Figure, image_id: str) -> Image:
    # The page says once what an image shows; a label for every mark would be most of its bytes.
    config = figure.chart.config.copy()
    config["aria"] = False
    svg = with_shared_marks(chart_bytes(figure.chart.properties(config=config), "svg").decode())
    svg, width, height = with_room(svg)
    return Image(image_id, f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}", width, height)


def with_shared_marks(svg: str) -> str:
    """Draw marks that differ in nothing but their place once: thousands of points are most of a page's bytes."""
    counts = Counter(mark[3] for mark in _MARK.finditer(svg))
    ids = {drawn: f"m{place}" for place, (drawn, count) in enumerate(counts.items()) if count >= OFTEN}

    def placed(mark: re.Match[str]) -> str:
        if mark[3] not in ids:
            return mark[0]
        return f'<use href="#{ids[mark[3]]}" x="{round(float(mark[1]), 1):g}" y="{round(float(mark[2]), 1):g}"/>'

    head = _SIZE.search(svg)
    if head is None or not ids:
        return svg
    drawn_once = "".join(f'<path id="{own}" {drawn}/>' for drawn, own in ids.items())
    behind = svg.index(">", head.end()) + 1
    return f"{svg[:behind]}<defs>{drawn_once}</defs>{_MARK.sub(placed, svg[behind:])}"


def with_room(svg: str) -> tuple[str, int, int]:
    """Give a chart more room at its sides, for browsers whose font is wider than the one it was drawn with."""
    head = _SIZE.search(svg)
    if head is None:
        raise ValueError("the SVG does not begin with its size")
    width, height = (float(side) for side in head.groups())
    wider = width + 2 * ROOM
    size = f'width="{wider:g}" height="{height:g}" viewBox="{-ROOM} 0 {wider:g} {height:g}"'
    return svg[: head.start()] + size + svg[head.end() :], round(wider), round(height)


def table_file(table: Table, stem: str) -> dict[str, str]:
    """Make the download of a table."""
    return {"stem": f"{stem}-{table.name}", "csv": table.to_csv()}


def file_name(name: str) -> str:
    """Make a name that any file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
