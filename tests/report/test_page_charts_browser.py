"""The report's charts in a real browser: touched by pointer and keyboard, on texts that want to act."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, FloatRect, Locator, Page, expect
from report_run import TEXTS, make_report_run, make_rocks, rock_id

from hostile_texts import HOSTILE
from rocktokens.display.text import visible
from rocktokens.report.page.render import report_html
from rocktokens.report.page.tiles import NAMED_ROCKS, SIGNS
from rocktokens.report.views.run_view import RunView
from rocktokens.run_dir import RunDir

FUNNEL, FOREST, LOSS = (f"[data-plot=run-1-figure-{name}]" for name in ("funnel", "knockout", "loss"))
NARROW = 420
LABELS = "figcaption, .caption, .plot-text, .plot-axis, .plot-title, .tile p, .conclusion"
CLIPPED = """(labels) => [...document.querySelectorAll(labels)]
  .filter((own) => own.checkVisibility())
  .filter((own) => {
    const box = own.getBoundingClientRect();
    const isCut = !own.closest("svg") && own.scrollWidth > own.clientWidth + 1;
    return isCut || box.left < 0 || box.right > innerWidth;
  })
  .map((own) => own.textContent)"""


@pytest.fixture(scope="module")
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Path, list[str]]]:
    """One window for all tests; whatever a text makes happen, the page complains of or asks for is noted."""
    folder = tmp_path_factory.mktemp("charts")
    file, complaints = folder / "report.html", list[str]()
    run = RunDir(make_report_run(folder / "hostile"))
    shutil.rmtree(run.path / "study")
    run.drop(["gradients.json"])
    file.write_text(report_html([RunView.open(run.path)]), encoding="utf-8")
    run.drop(["knockout.json"])
    run.commit_text("rocks.json", json.dumps({"schema_version": 1, **asdict(make_rocks(TEXTS[:NAMED_ROCKS]))}))
    (folder / "both.html").write_text(report_html([RunView.open(run.path)] * 2), encoding="utf-8")
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    page.on(
        "request", lambda own: None if own.url.startswith(("data:", folder.as_uri())) else complaints.append(own.url)
    )
    page.expose_function("noteExecution", lambda: complaints.append("a text was executed"))
    page.add_init_script("Object.defineProperty(window, 'executed', { set: () => window.noteExecution() })")
    yield page, file, complaints
    context.close()


@pytest.fixture
def page(opened: tuple[Page, Path, list[str]]) -> Iterator[Page]:
    page, file, complaints = opened
    page.set_viewport_size({"width": 1280, "height": 800})
    page.emulate_media(color_scheme="light")
    page.goto(file.as_uri())
    yield page
    assert complaints == []


def body(page: Page, chart: str) -> Locator:
    return page.locator(f"{chart} .plot-body").first


def tip(page: Page, chart: str) -> Locator:
    return page.locator(f"{chart} .plot-tip")


def box_of(own: Locator) -> FloatRect:
    box = own.bounding_box()
    assert box is not None
    return box


def walk_to(page: Page, chart: str, key: str = "ArrowRight") -> tuple[float, float]:
    """Move to the first datum by keyboard and return where it is."""
    body(page, chart).focus()
    page.keyboard.press(key)
    ring = box_of(page.locator(f"{chart} .plot-focus"))
    assert 0 < ring["y"] < page.evaluate("innerHeight")  # it was scrolled into sight
    return ring["x"] + ring["width"] / 2, ring["y"] + ring["height"] / 2


def chosen(page: Page) -> list[str | None]:
    rows = page.locator("#run-1-table-rocks tr.is-chosen")
    return [row.get_attribute("data-token") for row in rows.all()]


def test_hover_shows_the_numbers_of_what_lies_there(page: Page):
    x, y = walk_to(page, FOREST, "ArrowDown")
    by_keyboard = tip(page, FOREST).inner_text()
    page.mouse.move(5, 5)
    body(page, FOREST).evaluate("own => own.blur()")
    expect(tip(page, FOREST)).to_be_hidden()
    page.mouse.move(x, y)
    expect(tip(page, FOREST)).to_be_visible()
    assert tip(page, FOREST).inner_text() == by_keyboard
    assert all(said in by_keyboard for said in ("change", "−25.0", "−37.5", "−12.5", "0.010"))


def test_every_hostile_text_goes_through_the_tip_as_text(page: Page):
    walk = """(body, steps) => Array.from({ length: steps }, () => {
      body.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
      return body.closest(".plot").querySelector(".plot-tip .chip").textContent;
    })"""
    shown = set(body(page, FUNNEL).evaluate(walk, len(TEXTS)))
    assert len(shown) == len(TEXTS) and shown >= {visible(text) for text in HOSTILE}


def test_a_click_highlights_everywhere_and_the_same_again_clears(page: Page):
    token = str(rock_id(0))
    x, y = walk_to(page, FOREST, "ArrowDown")
    page.mouse.click(x, y)
    [row] = chosen(page)
    assert row is not None
    assert page.locator(f"li.is-chosen[data-token='{row}']").count() == int(
        int(row) in map(rock_id, range(NAMED_ROCKS))
    )
    expect(page.locator(f"{FOREST} .mark-highlight")).to_have_count(1)
    page.mouse.click(x, y)
    assert chosen(page) == []
    page.locator(f"#run-1-table-rocks tr[data-token='{token}'] .chip").press("Enter")
    assert chosen(page) == [token]
    expect(page.locator(f"{FOREST} .mark-highlight")).to_have_count(1)
    strip = page.locator(f".strip-token[data-token='{token}']")
    assert strip.count() > 0 and page.locator(".strip-token.is-chosen").count() == strip.count()
    expect(page.locator(".first-rocks .is-chosen .chip")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Escape")
    assert chosen(page) == [] and page.locator(".is-chosen, .mark-highlight").count() == 0
    strip.first.click()
    assert chosen(page) == [token]
    page.get_by_role("button", name="Clear").click()
    page.locator(".first-rocks li").first.click()
    assert chosen(page) == [token]


def axis_texts(page: Page, chart: str) -> list[str]:
    return body(page, chart).locator(".plot-text").all_text_contents()


def test_a_box_a_wheel_and_the_buttons_zoom_and_reset_brings_all_back(page: Page):
    whole = axis_texts(page, LOSS)
    host = body(page, LOSS)
    host.scroll_into_view_if_needed()
    box = box_of(host)
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 120, steps=4)
    expect(page.locator(f"{LOSS} .plot-box")).to_have_count(1)
    page.mouse.up()
    boxed = axis_texts(page, LOSS)
    assert boxed != whole and chosen(page) == []
    tools = page.locator(f"{LOSS} .plot-tools")
    tools.get_by_role("button", name="Reset").click()
    assert axis_texts(page, LOSS) == whole
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    page.mouse.wheel(0, -100)
    assert axis_texts(page, LOSS) == whole  # a plain wheel scrolls the page
    host.scroll_into_view_if_needed()
    host.dispatch_event("wheel", {"deltaY": -100, "ctrlKey": True, "clientX": 300, "clientY": 300, "bubbles": True})
    assert axis_texts(page, LOSS) != whole
    host.focus()
    page.keyboard.press("0")
    assert axis_texts(page, LOSS) == whole
    tools.get_by_role("button", name="Zoom in").click()
    assert axis_texts(page, LOSS) != whole
    tools.get_by_role("button", name="Zoom out").click()
    assert axis_texts(page, LOSS) == whole


def test_the_keyboard_does_what_the_pointer_does(page: Page):
    host = body(page, FUNNEL)
    host.focus()
    for key in ("End", "ArrowLeft", "ArrowUp", "ArrowDown", "Home"):
        page.keyboard.press(key)
        expect(tip(page, FUNNEL)).to_be_visible()
    first = tip(page, FUNNEL).inner_text()
    page.keyboard.press("Enter")
    expect(page.locator(f"{FUNNEL} .mark-highlight")).to_have_count(1)
    assert tip(page, FUNNEL).inner_text() == first  # the datum stays the current one
    expect(page.locator(".chosen")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator(".chosen")).to_be_hidden()
    page.keyboard.press("Tab")
    expect(tip(page, FUNNEL)).to_be_hidden()


def test_a_group_can_be_switched_off_and_on(page: Page):
    toggle = page.locator(f"{FUNNEL} .plot-legend button").first
    marks = page.locator(f"{FUNNEL} .plot-marks .mark-symbol")
    before = marks.count()
    toggle.click()
    expect(toggle).to_have_attribute("aria-pressed", "false")
    assert marks.count() == before - 1 and not page.locator(f"{FUNNEL} .plot-names text").count()
    toggle.press("Enter")
    expect(toggle).to_have_attribute("aria-pressed", "true")
    assert marks.count() == before


@pytest.mark.parametrize("name", ["report", "both"])
def test_a_narrow_screen_clips_no_caption_and_no_label(page: Page, opened: tuple[Page, Path, list[str]], name: str):
    page.set_viewport_size({"width": NARROW, "height": 800})
    page.goto(opened[1].with_stem(name).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW
    assert page.evaluate(CLIPPED, LABELS) == []


def test_charts_follow_the_theme(page: Page):
    hue = "getComputedStyle(document.querySelector('.hue-vermillion .mark-symbol')).fill"
    light = page.evaluate(hue)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(hue) != light


def test_states_are_told_by_icon_and_word_as_well_as_by_colour(page: Page):
    shown = [state.split(maxsplit=1) for state in page.locator(".tile-state strong").all_inner_texts()]
    assert len(shown) == 5 and all(SIGNS[word] == sign for sign, word in shown)  # type: ignore[index]
    colors = page.locator(".tile").evaluate_all("all => all.map((own) => getComputedStyle(own).borderTopColor)")
    assert len(set(colors)) == len({word for _, word in shown}) > 1


def test_two_runs_share_a_highlight_and_have_no_serious_barrier(page: Page, opened: tuple[Page, Path, list[str]]):
    page.goto(opened[1].with_stem("both").as_uri())
    page.locator("#run-2-rocks tr[data-token] .chip").first.press(" ")
    token = page.locator("#run-2-rocks tr.is-chosen").first.get_attribute("data-token")
    marked = page.locator(f"tr.is-chosen[data-token='{token}']")
    assert marked.count() == page.locator(f"tr[data-token='{token}']").count() == 5
    over = page.locator("[data-plot=both-loss]")
    expect(over.locator(".plot-panel")).to_have_count(2)
    names = over.locator(".plot-legend button").all_text_contents()
    assert len(set(names)) == 6 and names[0] == "rock, hostile 1"
    found = Axe().run(page, context="main > section:first-of-type").response["violations"]
    assert [own["id"] for own in found if own["impact"] in ("serious", "critical")] == []
