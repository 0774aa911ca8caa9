"""The report as a file: self-contained, escaped, complete, and the same for the same runs."""

import base64
import csv
import hashlib
import io
import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import altair
import pytest
from explorer_run import LENGTH, make_run
from report_run import TEXTS, make_report_run

from replay_records import make_replay
from rocktokens.display.text import MARKS_LEGEND, visible
from rocktokens.errors import RocktokensError
from rocktokens.report.build import build_report
from rocktokens.report.charts.save import chart_bytes
from rocktokens.report.page.facts import RESULT_FILES
from rocktokens.report.page.parts import OFTEN, STRIPS, _rounded, file_name, with_room, with_shared_marks
from rocktokens.report.page.render import report_html, unbroken
from rocktokens.report.page.tiles import NAMED_ROCKS
from rocktokens.report.views.run_view import RunView
from rocktokens.run_dir import RunDir

FIGURES = {
    *("shares", "funnel", "categories", "cutoff", "sensitivity", "loss", "gradient_norm", "gradient_alignment"),
    *("gradient_kl", "gradient_blocks", "knockout", "study_curves", "study_comparisons"),
}
TABLES = {"rocks", "all-rocks", "accuracy", "claims", "verdicts", "classes", "arms", "comparisons"}
FETCHING = ("src", "href", "srcset", "action", "data", "poster", "background", "formaction", "ping")


VOID = {"meta", "img", "input", "br"}


class Page(HTMLParser):
    """What a browser would make of a page: its elements, and the text directly inside each."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self._texts: list[str] = []
        self._open: list[int] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self._texts.append("")
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self._texts[self._open[-1]] += data

    def of(self, tag: str) -> list[dict[str, str]]:
        return [own for name, own in self.elements if name == tag]

    def text_in(self, tag: str, **wanted: str) -> list[str]:
        texts = zip(self.elements, self._texts, strict=True)
        return [text for (name, own), text in texts if name == tag and wanted.items() <= own.items()]

    @property
    def policy(self) -> dict[str, str]:
        content = next(own["content"] for own in self.of("meta") if own.get("http-equiv") == "Content-Security-Policy")
        return {name: value for name, _, value in (part.partition(" ") for part in content.split("; "))}

    @property
    def data(self) -> dict[str, Any]:
        return json.loads("".join(self.text_in("script", type="application/json")))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_report_run(tmp_path_factory.mktemp("runs") / "hostile & <run>")


@pytest.fixture(scope="module")
def html(path: Path) -> str:
    return report_html([RunView.open(path)])


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_same_run_gives_the_same_bytes(path: Path, html: str):
    assert report_html([RunView.open(path)]) == html
    html.encode()


def test_the_policy_allows_the_scripts_and_styles_of_the_page_and_nothing_else(page: Page):
    policy = page.policy
    assert (policy["default-src"], policy["img-src"]) == ("'none'", "data:")
    scripts = [text for text in page.text_in("script") if not text.startswith("{")]
    for kind, texts in (("script-src", scripts), ("style-src", page.text_in("style"))):
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert policy[kind].split() == [f"'sha256-{own}'" for own in hashes]
    assert len(scripts) == 2 and "frame-ancestors" not in policy


def test_nothing_is_asked_of_anybody(page: Page):
    targets = [own[name] for _, own in page.elements for name in FETCHING if name in own]
    assert targets and all(target.startswith(("data:image/svg+xml;base64,", "#")) for target in targets)


def test_no_element_has_a_style_or_a_handler_of_its_own(page: Page):
    names = {name for _, own in page.elements for name in own}
    assert not [name for name in names if name == "style" or name.startswith("on")]
    assert {tag for tag, _ in page.elements}.isdisjoint({"iframe", "object", "embed", "base", "form", "link", "svg"})


def test_ids_are_unique_and_links_lead_to_them(page: Page):
    ids = Counter(own["id"] for _, own in page.elements if "id" in own)
    assert [own for own, count in ids.items() if count > 1] == []
    assert {own["href"].removeprefix("#") for own in page.of("a")} <= ids.keys()
    labels = {own["aria-labelledby"] for _, own in page.elements if "aria-labelledby" in own}
    assert labels <= ids.keys()


def test_all_figures_and_tables_are_there_with_their_files(page: Page):
    files = page.data["files"]
    images = {own["id"]: own for own in page.of("img")}
    assert images.keys() == {f"run-1-figure-{name}" for name in FIGURES}
    assert files.keys() == images.keys() | {f"run-1-table-{name}" for name in TABLES}
    for own in images.values():
        assert own["alt"] and int(own["width"]) > 0 and int(own["height"]) > 0
        assert base64.b64decode(own["src"].removeprefix("data:image/svg+xml;base64,")).startswith(b"<svg")
    assert all(file["csv"].endswith("\r\n") and re.fullmatch(r"[\w.-]+", file["stem"]) for file in files.values())
    assert {own["data-file"] for own in page.of("p") if "data-file" in own} == files.keys()


def test_every_hostile_text_is_shown_as_text(page: Page):
    chips, shown = page.text_in("span", **{"class": "chip"}), [visible(text) for text in TEXTS]
    assert chips == [*shown[:NAMED_ROCKS], *shown, *shown]  # first screen, first table, all columns


def test_no_data_can_end_its_script(html: str):
    blocks = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert len(blocks) == 1 and "<" not in blocks[0]


def test_the_page_holds_rollouts_and_reads_without_a_script(page: Page):
    (strips,) = page.data["strips"]
    assert len(strips) == STRIPS and all(strip["tokens"] for strip in strips)
    shown = page.text_in("pre")
    assert all(strip["response_text"] in shown for strip in strips)


def test_long_rollouts_are_cut_and_what_is_left_out_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rocktokens.report.page.parts.STRIP_TOKENS", 20)
    page = Page(report_html([RunView.open(path)]))
    assert [(len(strip["tokens"]), strip["more"]) for strip in page.data["strips"][0]] == [(20, LENGTH - 20)] * STRIPS
    assert page.text_in("p", **{"class": "note"}).count(f"… {LENGTH - 20} more tokens") == STRIPS


def test_the_marks_of_tokens_are_explained_once(page: Page):
    assert page.text_in("p", **{"class": "terms"}).count(MARKS_LEGEND) == 1


def test_facts_name_seeds_versions_and_hashes(page: Page, path: Path):
    shown = set(page.text_in("dd"))
    files = RunDir(path).manifest()["files"]
    assert {files[name]["sha256"] for name in RESULT_FILES} <= shown
    assert {"ab" * 32, "context", "step 10"} <= shown


def test_a_run_that_was_only_traced_says_what_to_run(tmp_path: Path):
    traced = make_run(tmp_path / "traced")
    RunDir(traced).drop(["rocks.json", "knockout.json", "classes.json"])
    page = Page(report_html([RunView.open(traced)]))
    assert not page.of("img") and not page.data["files"] and len(page.data["strips"][0]) == STRIPS
    commands = page.text_in("code")
    missing = [f"rocktokens {verb}" for verb in ("find", "gradients", "knockout", "study")]
    assert commands == [f"rocktokens find {traced.name}", *missing]


def test_a_study_alone_has_a_page(tmp_path: Path, path: Path):
    study = tmp_path / "study"
    RunDir(study).commit_text("study.json", (path / "study/study.json").read_text(encoding="utf-8"))
    page = Page(report_html([RunView.open(study)]))
    assert {own["id"] for own in page.of("img")} == {"run-1-figure-study_curves", "run-1-figure-study_comparisons"}


@pytest.fixture
def several(tmp_path: Path, path: Path) -> list[RunView]:
    """Runs with all rocks, with half of them under other labels, and with the same half in another vocabulary."""
    rocks = json.loads((path / "rocks.json").read_text(encoding="utf-8")) | {"tokenizer_sha256": "cd" * 32}
    half = [{**own, "label": "unclear", "verdict": "untested"} for own in rocks["tokens"][:4]]
    of_runs = {
        "all": {**rocks, "tokens": rocks["tokens"][:8]},
        "half": {**rocks, "tokens": half},
        "foreign": {**rocks, "tokens": half, "tokenizer_sha256": "ab" * 32},
    }
    for name, record in of_runs.items():
        RunDir(tmp_path / name).commit_text("rocks.json", json.dumps(record))
    return [RunView.open(tmp_path / name) for name in of_runs]


def test_several_runs_are_compared_and_shown_one_by_one(several: list[RunView]):
    page = Page(report_html(several))
    rows = [line.split(",") for line in page.data["files"]["table-runs"]["csv"].splitlines()]
    assert [row[:3] for row in rows] == [
        ["run", "rocks", "jaccard"],
        ["all", "8", "1.0"],
        ["half", "4", "0.5"],
        ["foreign", "4", ""],
    ]
    assert [own["id"] for own in page.of("article")] == ["run-1", "run-2", "run-3"]
    assert [own["data-vocabulary"] for own in page.of("article")] == ["0", "0", "1"]
    assert [own["id"] for own in page.of("img")] == [f"run-{number}-figure-shares" for number in (1, 2, 3)]


def test_two_runs_stand_side_by_side_and_what_differs_is_said(several: list[RunView]):
    page = Page(report_html(several[:2]))
    assert not page.of("article") and [own["id"] for own in page.of("img")] == [
        "run-1-figure-shares",
        "run-2-figure-shares",
    ]
    said = page.text_in("p", **{"class": "difference"})
    assert len(page.of("li")) > len(said) == 5
    assert "4 rocks in both, 4 only in all, 0 only in half (Jaccard 0.50)." in said[0]
    assert "4 of 4 rocks in both have another label" in said[2] and "have another verdict" in said[3]
    rows = list(csv.DictReader(io.StringIO(page.data["files"]["table-aligned"]["csv"], newline="")))
    assert [(row["rank, all"], row["rank, half"]) for row in rows[3:5]] == [("4.0", "4.0"), ("5.0", "—")]
    assert [row["differs in"] for row in rows] == ["label, verdict"] * 4 + ["being a rock"] * 4


def test_kl_of_different_kinds_is_not_compared(tmp_path: Path, path: Path):
    """A teacher in memory beside one that named 20 tokens; two of the second kind are compared as any others."""
    rocks = json.loads((path / "rocks.json").read_text(encoding="utf-8"))
    moved = {**rocks, "tokens": [{**own, "label": "moved", "held_out_label": "moved"} for own in rocks["tokens"]]}
    views = []
    for name, served in (("memory", ""), ("named", "top-20 + tail"), ("again", "top-20 + tail")):
        run = RunDir(shutil.copytree(path, tmp_path / name))
        with run.lock():
            run.update_manifest(tokenizer_sha256="cd" * 32, replay=make_replay(served=served).to_manifest())
            run.commit_text("rocks.json", json.dumps(rocks if name == "memory" else moved))
        views.append(RunView.open(run.path))
    for runs, is_alike in ((views[:2], False), (views[1:], True)):
        page = Page(report_html(runs))
        said = page.text_in("p", **{"class": "difference"})
        rows = list(csv.DictReader(io.StringIO(page.data["files"]["table-aligned"]["csv"], newline="")))
        assert ("both-loss" in page.data["plots"]) == is_alike
        assert any(title.startswith(("R,", "label,")) for title in rows[0]) == is_alike
        assert "rank, named" in rows[0] and not any(row["differs in"] for row in rows)
        why = "the teachers gave different kinds of kl (memory: the whole one; named: top-20 + tail)"
        assert any(f"Loss curves, R and labels are not compared: {why}." in own for own in said) != is_alike
        assert any("has the same label" in own for own in said) == is_alike
        assert any("has the same verdict" in own for own in said)
        [caption] = page.text_in("p", id="table-aligned-caption")
        assert caption.endswith("Teacher: top-20 + tail.") == is_alike


def test_ids_of_different_vocabularies_are_not_aligned(several: list[RunView]):
    page = Page(report_html(several[1:]))
    assert "Rocks cannot be aligned" in page.text_in("p", **{"class": "difference"})[0]
    assert "table-aligned" not in page.data["files"]


def test_nothing_to_show_is_refused(tmp_path: Path):
    RunDir(tmp_path / "empty").commit_text("config.toml", "")
    with pytest.raises(RocktokensError, match=r"empty has nothing to show yet .*: run `rocktokens trace`"):
        report_html([RunView.open(tmp_path / "empty")])


def test_a_record_without_a_field_is_refused_by_its_name(tmp_path: Path, path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(path, broken)
    record = json.loads((broken / "knockout.json").read_text(encoding="utf-8"))
    del record["baseline"]
    RunDir(broken).commit_text("knockout.json", json.dumps(record))
    with pytest.raises(RocktokensError, match=r"is no knockout\.json \(baseline: field required\): write it again"):
        RunView.open(broken)


def test_figures_are_written_as_pdf_with_their_data(tmp_path: Path, path: Path):
    page = tmp_path / "page.html"
    written = build_report([path], page, tmp_path / "one").figures
    assert {own.name for own in written} == {f"{name}.{ending}" for name in FIGURES for ending in ("pdf", "csv")}
    assert all(own.read_bytes().startswith(b"%PDF-") for own in written if own.suffix == ".pdf")
    assert (tmp_path / "one/shares.csv").read_text(encoding="utf-8").startswith("of,share,low,high")
    few = shutil.copytree(path, tmp_path / path.name, ignore=shutil.ignore_patterns("study"))
    RunDir(few).drop(["find.json", "gradients.json", "knockout.json"])
    folders = [own.parent.name for own in build_report([few, few], page, tmp_path / "two").figures]
    assert folders == 2 * ["1-hostile-run"] + 2 * ["2-hostile-run"]


def test_names_become_file_names_and_numbers_stay_together():
    assert [file_name(name) for name in ("demo", "../../x y", "<&>", ".")] == ["demo", "x-y", "run", "run"]
    assert unbroken("a 1.5 % [−1.0, +2.0] of b, 3") == "a 1.5\xa0%\xa0[−1.0,\xa0+2.0] of b, 3"


MARK = re.compile(r'<path transform="translate\(([\d.]+),([\d.]+)\)" ([^<>]*)/>')
USE = re.compile(r'<use href="#(\w+)" x="([\d.]+)" y="([\d.]+)"/>')


def test_marks_that_differ_in_their_place_alone_are_drawn_once_where_they_were():
    points = [{"x": x, "y": x * x % 7, "who": "ab"[x % 3 == 0]} for x in range(60)]
    chart = (
        altair.Chart(altair.Data(values=points))
        .mark_point()
        .encode(x="x:Q", y="y:Q", color="who:N")
        .configure(aria=False)
    )
    svg = chart_bytes(chart, "svg").decode()
    shared = with_shared_marks(svg)
    drawn = dict(re.findall(r'<path id="(\w+)" ([^<>]*)/>', shared))
    again = [(*map(float, place), drawn[own]) for own, *place in USE.findall(shared)]
    before = [(float(x), float(y), look) for x, y, look in MARK.findall(svg) if look in drawn.values()]
    assert len(again) == len(before) == 60
    assert len({look for *_, look in before}) == 2
    for (x, y, look), (x_again, y_again, look_again) in zip(before, again, strict=True):
        assert look == look_again
        assert abs(x - x_again) + abs(y - y_again) <= 0.1
    assert len(shared) < len(svg) / 1.5


def test_few_marks_are_left_as_they_are():
    chart = (
        altair.Chart(altair.Data(values=[{"x": x} for x in range(OFTEN - 1)]))
        .mark_point()
        .encode(x="x:Q")
        .configure(aria=False)
    )
    svg = chart_bytes(chart, "svg").decode()
    assert with_shared_marks(svg) == svg


def test_room_is_added_at_both_sides_and_nothing_else_changes():
    svg = '<svg class="x" width="100" height="50" viewBox="0 0 100 50"><text width="1" height="2"/></svg>'
    wider, width, height = with_room(svg)
    assert (width, height) == (140, 50)
    assert wider == '<svg class="x" width="140" height="50" viewBox="-20 0 140 50"><text width="1" height="2"/></svg>'
    with pytest.raises(ValueError, match="size"):
        with_room("<svg/>")


def test_numbers_of_a_figures_file_are_rounded_and_counts_are_not():
    record: dict[str, Any] = {
        "kl": 0.123456789,
        "freq": 12345678.0,
        "rank": 12345678,
        "token": "1.23456789",
        "ccr": None,
    }
    assert _rounded(record) == record | {"kl": 0.123457}
