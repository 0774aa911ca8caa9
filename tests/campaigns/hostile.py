"""Show hostile texts in every place that shows a text, and see that they are only ever text.

1. Texts are drawn: markup, scripts, breakouts, escapes of terminals, formulas, bidi and invisible characters, lone
   surrogates, any of Unicode; alone, joined, and very long. A case is a batch of them in one sink.
2. A sink is a place that shows text: the terminal, JSON, CSV, notebooks, figures, the report's page, the explorer's
   answers, its pages and bundles, sentences about errors and notes, and configs. A finished run is dressed in the
   texts (``dressed_run``) and shown.
3. Inert is judged by the medium: no control or bidi character on a terminal, one JSON value that holds the text as it
   was, no cell that a spreadsheet would evaluate, and no element or attribute in a page or figure that the same page of
   harmless words does not have. Pages are also opened in a browser, in which the texts try to set a variable.
"""

import csv
import io
import json
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from attacked_run import finished
from command_line import rocktokens
from dressed_run import dressed_run, folder_name, vocabulary_of
from frame import BrokenPromiseError, Campaign, Judge, chance
from starlette.testclient import TestClient

from chromium import CHROMIUM, launch
from hostile_texts import HOSTILE, SURROGATES
from rocktokens.config import parse_config
from rocktokens.config.files import dump_toml
from rocktokens.display.strip import Piece, strip_html
from rocktokens.display.table import Column, Table, csv_text, text, token
from rocktokens.report.charts.figures import run_figures
from rocktokens.report.charts.save import chart_bytes
from rocktokens.report.explorer.answers import ROUTES
from rocktokens.report.explorer.bundle import write_bundle
from rocktokens.report.explorer.server import make_app
from rocktokens.report.explorer.shelf import Shelf
from rocktokens.report.page.render import report_html
from rocktokens.report.views.run_view import RunView
from rocktokens.traces.store import TraceStore

NAME = "hostile"
BATCH = 50
"""Texts of a case."""
LONG = 1000
"""Characters; the longest of all are tried once in a batch."""
FORMULA = tuple("=+-@\t\r＝＋－＠")
TOKEN = "secret-token"
HARMLESS = [f"word{number}" for number in range(BATCH)]


def batch_of(rng: random.Random) -> list[str]:
    """Different hostile texts."""
    atoms = [own for own in (*HOSTILE, *SURROGATES) if len(own) < LONG]
    found: dict[str, None] = {}
    while len(found) < BATCH:
        drawn = rng.random()
        if drawn < 0.4:
            own = rng.choice(atoms)
        elif drawn < 0.8:
            own = "".join(rng.choices(atoms, k=rng.randint(2, 5)))
        else:
            own = "".join(
                chr(rng.choice((rng.randrange(0x300), rng.randrange(0x10000), rng.randrange(0x110000))))
                for _ in range(9)
            )
        found[own] = None
    return [*list(found)[1:], rng.choice(atoms) * rng.choice((1, 500, 20_000))]


@dataclass(frozen=True, slots=True)
class Stage:
    """What the sinks of one batch show."""

    run: Path
    texts: Sequence[str]
    folder: Path
    browser: Any
    """None where there is no Chromium."""


# Judging


def require_inert(shown: str, where: str) -> None:
    """Refuse text for a terminal in which a character acts."""
    if bad := next((own for own in shown if own != "\n" and not own.isprintable()), None):
        at = shown.index(bad)
        raise BrokenPromiseError(f"{where} shows {bad!r} as it is: {shown[max(0, at - 40) : at + 40]!r}")


class Structure(HTMLParser):
    """Elements of a page with the names of their attributes, and with the values of those that act."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: set[tuple[str, ...]] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        acting = [value or "" for name, value in attrs if name in ("href", "src", "action", "type", "http-equiv")]
        named = sorted(own for own in acting if not own.startswith(("#", "data:image/")))
        self.found.add((tag, *sorted(name for name, _ in attrs), *named))


def require_structure(shown: str, harmless: str, where: str) -> None:
    """Refuse HTML with an element that the same HTML of harmless words has not."""
    if more := Structure(shown).found - Structure(harmless).found - {("br",)}:
        raise BrokenPromiseError(f"{where} has elements of a text: {sorted(more)[:3]}")


# Sinks


def to_terminal(stage: Stage) -> str:
    """Tables, as commands print them."""
    outcome = rocktokens("find", stage.run, "--verbose")
    if outcome.code:
        raise BrokenPromiseError(f"find: {outcome.stderr[-600:]}")
    require_inert(outcome.stdout + outcome.stderr.replace("\r", ""), "find")
    table = _table(stage.texts)
    from rich.console import Console

    buffer = io.StringIO()
    Console(file=buffer, width=200, color_system=None).print(table.to_rich(200))
    require_inert(buffer.getvalue(), "a table")
    return buffer.getvalue()


def to_json(stage: Stage) -> str:
    """One JSON object that holds the texts of tokens as they are."""
    outcome = rocktokens("find", stage.run, "--json")
    if outcome.code or outcome.stdout.count("\n") != 1:
        raise BrokenPromiseError(f"find --json: {outcome.stdout[:300]!r} {outcome.stderr[-600:]}")
    require_inert(outcome.stdout, "find --json")
    known = vocabulary_of(stage.texts)
    for own in json.loads(outcome.stdout)["tokens"]:
        if own["text"] != known[own["id"]]:
            raise BrokenPromiseError(f"find --json has {own['text']!r} for {known[own['id']]!r}")
    return outcome.stdout


def to_csv(stage: Stage) -> str:
    """Cells that no spreadsheet evaluates, as many as there are values."""
    content = csv_text([{"text": own, "number": -1.5, own: own} for own in stage.texts])
    shown = [*csv.reader(io.StringIO(content, newline=""))]
    outcome = rocktokens("report", stage.run, "-o", stage.folder / "page.html", "--figures", stage.folder / "figures")
    if outcome.code or len(shown) != BATCH + 1 or {len(row) for row in shown} != {BATCH + 2}:
        raise BrokenPromiseError(
            f"CSV has {len(shown)} rows of {[len(row) for row in shown][:5]}; {outcome.stderr[-500:]}"
        )
    for path in sorted((stage.folder / "figures").rglob("*.csv")):
        shown += csv.reader(io.StringIO(path.read_text(encoding="utf-8"), newline=""))
    for cell in (cell for row in shown for cell in row):
        if cell.lstrip().startswith(FORMULA) and not _is_number(cell):
            raise BrokenPromiseError(f"a cell begins like a formula: {cell[:60]!r}")
    return content


def to_notebook(stage: Stage) -> str:
    """HTML of tables, stores and strips."""
    html, harmless = ("".join(_notebook(stage.run, own)) for own in (stage.texts, HARMLESS))
    require_structure(html, harmless, "a notebook")
    require_inert(html, "a notebook")
    return html


def _notebook(run: Path, texts: Sequence[str]) -> Iterator[str]:
    store = TraceStore(run, threads=1)
    yield store._repr_html_()
    yield _table(texts).to_html(most=2 * BATCH)
    yield strip_html(texts[0], [Piece(place, own, 0.5, place or None) for place, own in enumerate(texts)])
    rollout_id = int(store.table(4).rollout_id.min().to_pyarrow().as_py())
    yield store.rollout(rollout_id, 4)._repr_html_()


def to_figures(stage: Stage) -> str:
    """Drawings without a script, a link or anything from elsewhere."""
    shown = ""
    for figure in run_figures(RunView.open(stage.run)).values():
        shown = chart_bytes(figure.chart, "svg").decode()
        for element in ElementTree.fromstring(shown).iter():
            tag = element.tag.rpartition("}")[2]
            acting = [name for name in element.attrib if name.lower().startswith("on") or name.endswith("href")]
            if tag in ("script", "foreignObject", "image", "a", "use", "iframe") or acting:
                raise BrokenPromiseError(f"figure {figure.name} has {tag} with {acting}")
    return shown


def to_page(stage: Stage) -> str:
    """The report, parsed and opened in a browser."""
    html, harmless = (report_html([RunView.open(own)]) for own in (stage.run, _harmless(stage)))
    require_structure(html, harmless, "the report")
    page = stage.folder / "report.html"
    page.write_text(html, encoding="utf-8")
    _open_in_browser(stage, page.as_uri(), ["#rocks"])
    return html


def to_answers(stage: Stage) -> str:
    """What the explorer's server says, to every route."""
    client = TestClient(make_app(Shelf([stage.run]), TOKEN), base_url="http://127.0.0.1")
    said = []
    for route in ROUTES:
        path = route.format(run=0, rollout=_first_rollout(stage.run), token_id=65)
        for query in ({}, {"text": stage.texts[1].encode("utf-8", "replace").decode()[:80]}):
            answer = client.get(f"/{TOKEN}/api/{path}", params=query if route.endswith("rollouts") else {})
            if answer.status_code not in (200, 400, 404, 422):
                raise BrokenPromiseError(f"{path} answers {answer.status_code}: {answer.text[:300]}")
            if "<" in answer.text or answer.headers["x-content-type-options"] != "nosniff":
                raise BrokenPromiseError(f"{path} answers with markup: {answer.text[:300]!r}")
            json.loads(answer.text)
            said.append(answer.text)
    return "".join(said)


def to_explorer(stage: Stage) -> str:
    """A bundle, which is the explorer's page with its answers, parsed and opened in a browser."""
    pages = []
    for own, name in ((stage.run, "bundle"), (_harmless(stage), "harmless-bundle")):
        pages.append(write_bundle(Shelf([own]), stage.folder / name).page)
    html, harmless = (page.read_text(encoding="utf-8") for page in pages)
    require_structure(html, harmless, "a bundle")
    rollout = _first_rollout(stage.run)
    hashes = [
        "#view=runs",
        f"#rollout={rollout}&position=1",
        "#view=rocks",
        "#view=knockout",
        "#view=classes",
        "#view=live",
    ]
    _open_in_browser(stage, pages[0].as_uri(), hashes)
    return html


def to_sentences(stage: Stage) -> str:
    """Errors and notes about folders, keys and values that are called like the texts."""
    said = []
    for place, own in enumerate(stage.texts):
        argument, name = own.replace("\0", "")[:LONG], folder_name(own)
        commands = [("verify", stage.folder / name), ("find", stage.run, "--set", f"{argument}=1")]
        if place == 0:  # these take longer
            commands.append(("report", stage.run, "-o", stage.run.parent / f"{name}-missing" / name))
            commands.append(("evaluate", stage.run, "--checkpoint", argument))
        for command in commands:
            outcome = rocktokens(*(str(part) for part in command))
            if outcome.code not in (0, 2) or "Traceback" in outcome.stderr:
                raise BrokenPromiseError(
                    f"{command[0]} about {own[:60]!r}: code {outcome.code}, {outcome.stderr[-600:]}"
                )
            require_inert(outcome.stdout + outcome.stderr.replace("\r", ""), f"{command[0]} about {own[:40]!r}")
            said.append(outcome.stderr)
    return "".join(said)


def to_config(stage: Stage) -> str:
    """Values of a config, which come back as they were."""
    said = []
    for own in stage.texts:
        encodable = own.encode("utf-8", "replace").decode()
        record = {"run": {"directory": encodable}, "models": {"student": encodable, "teacher": "t"}}
        dumped = dump_toml(record)
        if tomllib.loads(dumped) != record or parse_config(dumped).run.directory != encodable:
            raise BrokenPromiseError(f"a config has another value for {own[:60]!r}")
        said.append(dumped)
    return "".join(said)


SINKS: dict[str, Callable[[Stage], str]] = {
    "terminal": to_terminal,
    "json": to_json,
    "csv": to_csv,
    "notebook": to_notebook,
    "figures": to_figures,
    "page": to_page,
    "answers": to_answers,
    "explorer": to_explorer,
    "sentences": to_sentences,
    "config": to_config,
}


def _table(texts: Sequence[str]) -> Table:
    columns = [Column("token", token), Column(texts[0], text), Column("name", text)]
    return Table.of("hostile", columns, texts, texts[1], texts[2:4])


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _harmless(stage: Stage) -> Path:
    """The same run in harmless words; made once, since it is the same for every batch."""
    [own] = (stage.folder.parent / "harmless").iterdir()
    return own


def _first_rollout(run: Path) -> int:
    return int(RunView.open(run).index().rollout_ids_R[0])


def _open_in_browser(stage: Stage, url: str, hashes: Sequence[str]) -> None:
    """Refuse a page in which a text has set its variable, opened a dialog or asked for something from elsewhere."""
    if stage.browser is None:
        return
    context = stage.browser.new_context()
    page, acted = context.new_page(), []
    page.on("dialog", lambda dialog: (acted.append("a dialog"), dialog.dismiss()))
    page.on("request", lambda request: acted.append(request.url) if request.url.startswith("http") else None)
    page.goto(url)
    for own in hashes:
        page.evaluate("hash => { location.hash = hash }", own)
        page.wait_for_timeout(150)
    if acted or page.evaluate("window.executed !== undefined"):
        raise BrokenPromiseError(
            f"a text acted in a browser: {acted[:3]}, executed: {page.evaluate('window.executed')}"
        )
    context.close()


@contextmanager
def opened(folder: Path) -> Iterator[Judge]:
    """Judge sinks on copies of one finished run, with a browser where there is one."""
    source, numbers = finished(folder), count()
    dressed_run(source, folder / "harmless", HARMLESS)
    with ExitStack() as stack:
        browser: list[Any] = []

        def judge(sink: str, number: int) -> str:
            texts = batch_of(chance(NAME, "texts", number))  # the same in every sink
            place = folder / f"case-{next(numbers)}"
            place.mkdir()
            run = dressed_run(source, place / "runs", texts)
            if sink in ("page", "explorer") and CHROMIUM and not browser:
                browser.append(_launched(stack))
            SINKS[sink](Stage(run, texts, place, browser[0] if browser else None))
            shutil.rmtree(place)
            return "inert"

        yield judge


def _launched(stack: ExitStack) -> Any:
    from playwright.sync_api import sync_playwright

    return launch(stack.enter_context(sync_playwright()))


SAMPLE = dict.fromkeys(("terminal", "csv", "notebook", "answers", "sentences", "config"), 1)
CAMPAIGN = Campaign(NAME, dict.fromkeys(SINKS, 1000 // BATCH), SAMPLE, limit=120.0, opened=opened)
"""A thousand texts in each of ten sinks."""
