"""The explorer's list of runs, tables, curves and bundle in a real browser, over runs of hostile texts."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from explorer_run import LENGTH, N_ROLLOUTS, ROCK_IDS, log_line, make_other_run, make_run
from explorer_server import FOREIGN, Server, open_at, watched
from playwright.sync_api import Browser, Error, Locator, Page, ViewportSize, expect

from rocktokens.report.explorer import bundle
from rocktokens.report.explorer.bundle import write_bundle
from rocktokens.report.explorer.shelf import Shelf
from rocktokens.run_dir import RunDir

PHONE: ViewportSize = {"width": 420, "height": 850}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, and one of a name that would act if it could."""
    folder = tmp_path_factory.mktemp("runs")
    for make, name in ((make_run, "hostile"), (make_other_run, "deep/other")):
        make(folder / name)
    (folder / "hostile/logs.jsonl").write_text("".join(log_line(step) for step in range(9)), encoding="utf-8")
    odd = RunDir(folder / "<img src=x onerror=window.executed=1>")
    with odd.lock():
        odd.record_start("distill", student="<script>window.executed=1<\\script>", teacher="large")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the bundle of both runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "MAX_TYPES", 12)
        shelf = Shelf([folder / "hostile", folder / "deep/other"])
        return write_bundle(shelf, tmp_path_factory.mktemp("bundle") / "out").page.as_uri()


def watched_page(browser: Browser, url: str) -> Iterator[Page]:
    """A page on which, in the end, no text was executed, no one else was asked, and the console is empty."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    complaints = watched(page, url)
    yield page
    assert complaints == []
    expect(page.locator("#problem")).to_be_hidden()
    context.close()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    yield from watched_page(browser, server.url)


@pytest.fixture
def file_page(browser: Browser, packed: str) -> Iterator[Page]:
    yield from watched_page(browser, packed)


def column(page: Page, title: str, within: str) -> list[str]:
    """The texts below a title, once there are any."""
    page.locator(f"{within} tbody td").first.wait_for()
    titles = page.locator(f"{within} th").all_inner_texts()
    return page.locator(f"{within} tbody td:nth-child({titles.index(title) + 1})").all_inner_texts()


def rock_ranks(page: Page) -> list[int]:
    return [int(text) for text in column(page, "rank", "#rocks")]


def no_violations(page: Page) -> None:
    found = Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []


# The list of runs


def test_a_folder_opens_with_its_runs_and_each_leads_on(page: Page, server: Server):
    open_at(page, server)
    names = column(page, "run", "#home")
    assert names == ["<img src=x onerror=window.executed=1>", "hostile", "deep/other"]
    assert column(page, "rocks", "#home") == ["—", str(len(ROCK_IDS)), str(len(ROCK_IDS))]
    assert column(page, "state", "#home")[0] == "not trained here"
    page.get_by_role("link", name="deep/other").click()
    expect(page.locator("#rollout .strip-token")).to_have_count(LENGTH)
    expect(page.locator("#run")).to_have_value("2")
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator("#home tbody tr")).to_have_count(3)
    assert page.locator(FOREIGN).count() == 0


def test_a_new_run_is_listed_without_a_restart(page: Page, server: Server, folder: Path):
    open_at(page, server)
    expect(page.locator("#home tbody tr")).to_have_count(3)
    shutil.copytree(folder / "hostile", folder / "later")
    page.reload()
    expect(page.get_by_role("link", name="later")).to_be_visible()
    shutil.rmtree(folder / "later")
    page.reload()
    expect(page.locator("#home tbody tr")).to_have_count(3)


# Tables


def test_a_table_is_sorted_and_filtered_by_mouse(page: Page, server: Server):
    open_at(page, server, "view=rocks&run=1")
    head = page.locator("#rocks th", has_text="rank")
    assert rock_ranks(page) == list(range(1, len(ROCK_IDS) + 1)) and head.get_attribute("aria-sort") is None
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "descending")
    assert rock_ranks(page) == list(range(len(ROCK_IDS), 0, -1))
    page.locator("#rocks").get_by_role("searchbox").fill("###")
    expect(page.locator("#rocks [role=status]")).to_have_text(f"1 of {len(ROCK_IDS)}")
    assert column(page, "token", "#rocks") == ["###"]
    page.reload()
    expect(page.locator("#rocks tbody tr")).to_have_count(1)
    expect(head).to_have_attribute("aria-sort", "descending")
    page.get_by_role("link", name="Classes").click()
    expect(page.locator("#classes tbody tr")).to_have_count(2)
    page.get_by_role("combobox", name="members are").select_option("interchangeable")
    expect(page.locator("#classes tbody tr")).to_have_count(1)
    assert column(page, "of its kl, choice", "#classes") == ["25.0 %"]


def test_a_table_is_sorted_and_filtered_by_keyboard(page: Page, server: Server):
    open_at(page, server, "view=compare&run=1&rollout=0")
    table = page.locator("#compare-table")
    expect(table.locator("tbody tr")).to_have_count(LENGTH)
    table.get_by_role("button", name="left − right").focus()
    for order, key in (("descending", "Enter"), ("ascending", "Space")):
        page.keyboard.press(key)
        expect(table.locator("th[aria-sort]")).to_have_attribute("aria-sort", order)
        values = [float(text.replace("−", "-")) for text in column(page, "left − right", "#compare-table")]
        assert values == sorted(values, reverse=order == "descending")
        assert page.evaluate("document.activeElement.textContent") == "left − right"
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("step")
    expect(table.locator("tbody tr").first).to_contain_text("Step")
    shown = table.locator("tbody a")
    shown.first.focus()
    page.keyboard.press("ArrowDown")
    expect(shown.nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#compare-panels h3")).to_have_count(2)
    expect(table.locator("th[aria-sort]")).to_have_text("left − right")


def test_a_link_keeps_what_was_chosen_since_it_was_drawn(page: Page, server: Server):
    open_at(page, server, "view=rocks&run=1&order=nonsense&pick=verdict%3Dnonsense&find=")
    expect(page.locator("#rocks tbody tr")).to_have_count(len(ROCK_IDS))
    page.locator("#theme").click()
    page.locator("#rocks tbody a").first.click()
    expect(page.locator("#rollout .strip-token")).to_have_count(LENGTH)
    assert "theme=dark" in page.url and "order" not in page.url


def test_labels_of_both_halves_have_a_filter(page: Page, server: Server, restored: Path):
    """On a run whose rocks have labels; the shared one has none."""
    record = json.loads((restored / "rocks.json").read_text(encoding="utf-8"))
    labels = [("stuck", "stuck"), ("stuck", "unclear"), ("moving", "moving")]
    tokens = [
        {**token, "label": label, "held_out_label": other}
        for token, (label, other) in zip(record["tokens"], labels, strict=False)
    ]
    RunDir(restored).commit_text("rocks.json", json.dumps({**record, "schema_version": 2, "tokens": tokens}))
    open_at(page, server, "view=rocks&run=1")
    expect(page.locator("#rocks tbody tr")).to_have_count(3)
    page.get_by_role("combobox", name="label", exact=True).select_option("stuck")
    expect(page.locator("#rocks tbody tr")).to_have_count(2)
    page.get_by_role("combobox", name="label, other half").select_option("unclear")
    expect(page.locator("#rocks tbody tr")).to_have_count(1)
    assert column(page, "label, other half", "#rocks") == ["unclear"]


# Runs that change


@pytest.fixture
def restored(folder: Path) -> Iterator[Path]:
    """The hostile run, put back as it was when the test has changed its rocks."""
    run = folder / "hostile"
    before = (run / "rocks.json").read_text(encoding="utf-8")
    yield run
    RunDir(run).commit_text("rocks.json", before)


def test_a_changed_run_is_noticed_and_shown(page: Page, server: Server, restored: Path):
    open_at(page, server, "view=rocks&run=1")
    expect(page.locator("#rocks tbody tr")).to_have_count(len(ROCK_IDS))
    expect(page.locator("#stale")).to_be_hidden()
    record = json.loads((restored / "rocks.json").read_text(encoding="utf-8"))
    RunDir(restored).commit_text("rocks.json", json.dumps({**record, "tokens": record["tokens"][:2]}))
    expect(page.locator("#stale")).to_contain_text("This run has changed")
    expect(page.locator("#rocks tbody tr")).to_have_count(len(ROCK_IDS))
    page.get_by_role("button", name="Show the new data").click()
    expect(page.locator("#rocks tbody tr")).to_have_count(2)
    expect(page.locator("#stale")).to_be_hidden()


def test_a_run_that_is_damaged_then_says_so(browser: Browser, server: Server, restored: Path):
    page = browser.new_page()
    open_at(page, server, "view=rocks&run=1")
    expect(page.locator("#rocks tbody tr")).to_have_count(len(ROCK_IDS))
    RunDir(restored).commit_text("rocks.json", "no record")
    page.get_by_role("link", name="Rollouts").click()
    page.reload()
    expect(page.locator("#problem")).to_contain_text("rocks.json")
    page.close()


# Curves


def test_curves_of_several_runs_lie_over_each_other(page: Page, server: Server, folder: Path):
    open_at(page, server, "view=live&run=1")
    kl = page.locator("#curves .plot-panel").filter(has_text=re.compile("^kl"))
    expect(kl.locator(".mark-line")).to_have_count(1)
    expect(kl.locator(".plot-axis")).to_have_text(["↑ nats", "step →"])
    page.locator("#overlay-add").select_option("deep/other")
    expect(kl.locator(".mark-line")).to_have_count(2)
    assert "with=2" in page.url
    expect(page.locator("#curves .plot-legend button")).to_have_text(["hostile", "deep/other"])
    hover(kl.locator(".plot-body"))
    expect(page.locator(".plot-tip")).to_contain_text("nats")
    reach = kl.locator("svg text").all_inner_texts()
    page.get_by_role("button", name="Zoom in").click()
    assert kl.locator("svg text").all_inner_texts() != reach
    zoomed = kl.locator("svg text").all_inner_texts()
    kl.locator(".plot-body").focus()
    with (folder / "hostile/logs.jsonl").open("a", encoding="utf-8") as log:
        log.write(log_line(9))
    expect(page.locator("#live-status")).to_contain_text("10 steps")
    assert kl.locator("svg text").all_inner_texts() == zoomed
    expect(kl.locator(".plot-body")).to_be_focused()
    page.get_by_role("button", name="Remove deep/other").click()
    expect(kl.locator(".mark-line")).to_have_count(1)


def hover(chart: Locator) -> None:
    """Point at the first datum of a chart."""
    path = chart.locator(".mark-line").first.get_attribute("d") or ""
    x, y = re.findall(r"[-\d.]+", path)[:2]
    chart.hover(position={"x": float(x), "y": float(y)})


# A phone


def test_on_a_phone_the_rollout_comes_first(page: Page, server: Server):
    page.set_viewport_size(PHONE)
    open_at(page, server, "view=rollouts&run=1")
    expect(page.locator("#rollout .strip-token").first).to_be_in_viewport()
    expect(page.locator("#list")).to_be_hidden()
    page.get_by_role("button", name="Next rollout").click()
    expect(page.locator("#rollout h2")).to_have_text("Rollout 1")
    page.get_by_role("button", name="List and filters").click()
    page.locator(".row").nth(3).click()
    expect(page.locator("#rollout h2")).to_have_text("Rollout 3")
    expect(page.locator("#list")).to_be_hidden()
    page.locator("#rollout .strip-token").nth(2).click()
    expect(page.locator("#token-panel .facts")).to_be_visible()
    no_violations(page)


def test_a_wide_table_scrolls_in_its_place_on_a_phone(page: Page, server: Server):
    page.set_viewport_size(PHONE)
    for view in ("home", "rocks", "classes", "compare"):
        open_at(page, server, f"view={view}&run=1&rollout=0")
        page.locator(f"#view-{view} td").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        page.locator(f"#view-{view} th button").nth(1).click()
        expect(page.locator(f"#view-{view} th[aria-sort]")).to_have_count(1)


# The bundle


def test_the_bundle_opens_from_a_disk_with_every_view(file_page: Page, packed: str):
    file_page.goto(packed)
    expect(file_page.locator("#rollout .strip-token")).to_have_count(LENGTH)
    expect(file_page.locator("#count")).to_have_text(f"{N_ROLLOUTS} rollouts in this bundle")
    expect(file_page.get_by_role("searchbox")).to_have_count(0)
    file_page.get_by_role("combobox", name="Order").select_option("highest mean kl")
    expect(file_page.locator(".row").first).not_to_contain_text("#0")
    file_page.locator("#rollout .strip-rock").first.click()
    expect(file_page.locator("#token-history svg")).to_be_visible()
    expect(file_page.locator(".occurrences li").first).to_be_visible()
    for view, shown in {
        "Runs": "#home a",
        "Rocks": "#rocks td",
        "Classes": "#classes td",
        "Compare": "#strip-b .strip-token",
        "Knock-out": ".aligned",
        "Live": "#curves svg",
    }.items():
        file_page.get_by_role("link", name=view, exact=True).click()
        expect(file_page.locator(shown).first).to_be_visible()
        expect(file_page.locator("#problem")).to_be_hidden()
    expect(file_page.locator("#live-status")).not_to_contain_text("updates itself")


def test_in_a_bundle_tables_lead_on_and_two_runs_are_compared(file_page: Page, packed: str):
    file_page.goto(f"{packed}#view=rocks")
    file_page.locator("#rocks tbody a").first.click()
    expect(file_page.locator("#rollout .strip-token")).to_have_count(LENGTH)
    file_page.goto(f"{packed}#view=compare&rollout=2&run_b=1")
    expect(file_page.locator("#strip-b .strip-token")).to_have_count(LENGTH)
    expect(file_page.locator("#compare-note")).to_contain_text("The prompts differ")
    file_page.goto(f"{packed}#view=live&with=1")
    expect(file_page.locator("#curves .plot-legend button")).to_have_count(2)


def test_hostile_texts_in_a_bundle_are_only_ever_text(file_page: Page, packed: str):
    file_page.goto(packed)
    for rollout in range(N_ROLLOUTS):
        file_page.evaluate("hash => { location.hash = hash }", f"rollout={rollout}&position=1")
        expect(file_page.locator("#rollout h2")).to_have_text(f"Rollout {rollout}")
        assert file_page.locator("#rollout .strip-token").count() == LENGTH
    for token_id in ROCK_IDS:
        file_page.evaluate("hash => { location.hash = hash }", f"view=knockout&ban={token_id}")
        expect(file_page.locator("#pairs h2 .chip")).to_be_visible()
    assert file_page.locator(FOREIGN).count() == 0


def test_a_view_that_is_left_asks_for_nothing_more(file_page: Page, packed: str):
    """Left while a chosen token rests, before its history is asked for: the next view has no rollout to ask it of."""
    file_page.goto(f"{packed}#rollout=1")
    expect(file_page.locator("#rollout h2")).to_have_text("Rollout 1")
    file_page.evaluate(
        """() => new Promise((resolve) => {
            new MutationObserver((_, observer) => {
                observer.disconnect();
                location.hash = "view=knockout";
                setTimeout(resolve, 400);
            }).observe(document.getElementById("token-panel"), { childList: true });
            location.hash = "rollout=1&position=1";
        })"""
    )
    expect(file_page.locator("#pairs h2 .chip")).to_be_visible()
    expect(file_page.locator("#problem")).to_be_hidden()
    file_page.go_back()
    expect(file_page.locator("#token-history svg")).to_be_visible()


def test_what_a_bundle_does_not_hold_is_said(browser: Browser, packed: str):
    page = browser.new_page()
    page.goto(f"{packed}#rollout=99999")
    expect(page.locator("#problem")).to_contain_text("This is not in the bundle")
    with pytest.raises(Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")
    page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_for_axe_to_find_in_a_bundle(file_page: Page, packed: str, theme: str):
    file_page.goto(f"{packed}#view=home&theme={theme}")
    file_page.locator("#home td").first.wait_for()
    no_violations(file_page)
    background = file_page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(253, 253, 251)", "dark": "rgb(21, 23, 27)"}[theme]
