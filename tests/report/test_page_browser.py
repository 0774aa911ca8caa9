"""The report in a real browser, opened from a file: what a reader does, and what must never happen."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from report_run import TEXTS, make_report_run

from rocktokens.report.page.render import report_html
from rocktokens.report.views.run_view import RunView


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    report = folder / "report.html"
    report.write_text(report_html([RunView.open(make_report_run(folder / "hostile"))]), encoding="utf-8")
    return report


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Page]:
    """The report, on which in the end nothing of a model was executed, no one was asked and nothing complained."""
    context = browser.new_context(accept_downloads=True)
    page = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    page.expose_function("noteExecution", lambda: complaints.append("a text was executed"))
    page.add_init_script("Object.defineProperty(window, 'executed', { set: () => window.noteExecution() })")
    page.goto(file.as_uri())
    yield page
    assert complaints == []
    assert [url for url in asked if not url.startswith(("data:", "blob:", file.as_uri()))] == []
    context.close()


def first_column(page: Page) -> list[str]:
    return page.locator("#run-1-table-rocks tbody tr:not([hidden]) td:first-child").all_inner_texts()


def test_every_text_is_on_the_page_and_none_acts(page: Page):
    assert page.locator("#run-1-table-rocks .chip").count() == len(TEXTS)
    assert page.locator("img").evaluate_all("images => images.every((image) => image.naturalWidth > 0)")


def test_a_title_sorts_both_ways_by_number_and_says_so(page: Page):
    header = page.locator("#run-1-table-rocks th", has_text="rank")
    header.get_by_role("button").click()
    expect(header).to_have_attribute("aria-sort", "ascending")
    assert first_column(page) == [str(rank) for rank in range(1, len(TEXTS) + 1)]
    header.get_by_role("button").press("Enter")
    expect(header).to_have_attribute("aria-sort", "descending")
    assert first_column(page)[0] == str(len(TEXTS))
    other = page.locator("#run-1-table-rocks th", has_text="if banned")
    other.get_by_role("button").press(" ")
    expect(other).to_have_attribute("aria-sort", "ascending")
    assert header.get_attribute("aria-sort") is None


def test_a_search_leaves_what_matches_and_counts_it(page: Page):
    page.get_by_role("searchbox").first.fill("STUMBLING")
    shown = page.locator("#run-1-table-rocks tbody tr:not([hidden])")
    expected = len(TEXTS[1::4])
    assert shown.count() == expected
    expect(page.locator(".search [role=status]").first).to_have_text(f"{expected} of {len(TEXTS)}")


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG\r\n"), ("svg", b"<svg"), ("csv", b"token_id,")])
def test_a_figure_can_be_downloaded(page: Page, tmp_path: Path, ending: str, start: bytes):
    with page.expect_download() as waiting:
        page.get_by_role("button", name=f"Download the figure funnel as {ending.upper()}").click()
    download = waiting.value
    assert download.suggested_filename == f"hostile-funnel.{ending}"
    download.save_as(tmp_path / "file")
    assert (tmp_path / "file").read_bytes().startswith(start)


def test_a_table_of_hostile_texts_is_data_to_a_spreadsheet(page: Page, tmp_path: Path):
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download the table rocks as CSV").click()
    waiting.value.save_as(tmp_path / "rocks.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "rocks.csv").read_bytes().decode(), newline="")))
    assert len(rows) == len(TEXTS)
    assert not [row["text"] for row in rows if row["text"].startswith(("=", "+", "-", "@", "\t", "\r"))]


def test_the_theme_is_the_systems_until_another_is_chosen_and_then_stays(page: Page):
    def paper() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page.emulate_media(color_scheme="light")
    light = paper()
    page.emulate_media(color_scheme="dark")
    dark = paper()
    assert light != dark
    page.locator("#theme").click()
    assert paper() == light
    page.reload()
    assert paper() == light
    page.locator("#theme").click()
    assert paper() == dark


def test_tokens_are_reached_by_keyboard_and_show_both_models(page: Page):
    strip = page.get_by_role("listbox").first
    strip.locator("[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    expect(strip.get_by_role("option").last).to_be_focused()
    panel = page.locator(".panel").first
    expect(panel.get_by_text("Student", exact=True)).to_be_visible()
    expect(panel.get_by_text("Teacher", exact=True)).to_be_visible()


def test_the_strips_are_coloured_again_by_another_measure(page: Page):
    classes = "options => options.map((option) => option.className).join()"
    options = page.get_by_role("listbox").first.get_by_role("option")
    by_kl = options.evaluate_all(classes)
    page.get_by_label("Colour by").select_option("grad_norm")
    assert options.evaluate_all(classes) != by_kl


def test_everything_can_be_read_without_a_script(browser: Browser, file: Path):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    expect(page.locator(".tile").filter(visible=True)).to_have_count(5)
    expect(page.locator(".next code")).to_be_visible()
    expect(page.locator("figure img").filter(visible=False)).to_have_count(0)
    expect(page.locator(".plot-host, figcaption, .chosen").filter(visible=True)).to_have_count(0)
    expect(page.locator("#run-1-table-rocks tbody tr")).to_have_count(len(TEXTS))
    expect(page.locator(".strip-host pre").first).to_be_visible()
    expect(page.locator(".downloads, .search, #theme").filter(visible=True)).to_have_count(0)
    context.close()


def test_a_narrow_screen_scrolls_tables_not_the_page(page: Page):
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_there_is_no_serious_barrier(page: Page, scheme: str):
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    found = Axe().run(page).response["violations"]
    serious = [(own["id"], len(own["nodes"])) for own in found if own["impact"] in ("serious", "critical")]
    assert serious == []
