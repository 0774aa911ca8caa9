"""The explorer in a real browser, over a run of hostile texts: what a user does, and what must never happen."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from explorer_run import (
    FROZEN_IDS,
    LENGTH,
    N_ROLLOUTS,
    ROCK_IDS,
    TOP_K,
    VOCABULARY,
    log_line,
    make_other_run,
    make_run,
)
from explorer_server import FOREIGN, Server, open_at, watched
from playwright.sync_api import Browser, Error, Page, Route, expect

from hostile_texts import HOSTILE
from replay_records import make_replay
from rocktokens.display.text import legible, visible
from rocktokens.run_dir import RunDir

VIEWS = ("home", "rollouts", "rocks", "classes", "compare", "knockout", "live")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("runs")
    hostile, other = make_run(folder / "hostile"), make_other_run(folder / "other")
    server = Server(hostile, hostile, other)
    yield server
    server.stop()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """A page on which, in the end, no text was executed, no one else was asked, and the console is empty."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    complaints = watched(page, server.url)
    yield page
    assert complaints == []
    expect(page.locator("#problem")).to_be_hidden()
    context.close()


def test_an_execution_is_noted_and_not_forgotten(browser: Browser, server: Server):
    """That nothing was noted means something: what the hostile texts would do is."""
    page = browser.new_page()
    complaints = watched(page, server.url)
    open_at(page, server)
    page.evaluate("window.executed=1")
    open_at(page, server)
    assert complaints == ["a text was executed"]
    page.close()


def selected(page: Page, within: str = "#rollout") -> str | None:
    return page.locator(f"{within} .strip-token[aria-selected=true]").get_attribute("data-position")


def test_opening_shows_the_first_rollout(page: Page, server: Server):
    open_at(page, server)
    expect(page.locator("#rollout .strip-token")).to_have_count(LENGTH)
    expect(page.locator("#count")).to_have_text(f"{N_ROLLOUTS} rollouts")
    expect(page.locator(".row").first).to_contain_text("#0")
    rocks = page.locator("#rollout .strip-rock").count()
    assert rocks == sum(token in ROCK_IDS for token in strip_ids(page))


def strip_ids(page: Page) -> list[int]:
    """The ids of the strip on show, from the server."""
    return page.evaluate(
        "async () => (await (await fetch('api/runs/0/rollouts/0')).json()).tokens.map((token) => token.token_id)"
    )


def test_filters_narrow_the_list_and_are_in_the_address(page: Page, server: Server):
    open_at(page, server)
    page.get_by_role("combobox", name="Rocks").select_option("without")
    expect(page.locator("#count")).not_to_have_text(f"{N_ROLLOUTS} rollouts")
    page.get_by_role("button", name="Clear filters").click()
    expect(page.locator("#count")).to_have_text(f"{N_ROLLOUTS} rollouts")
    page.get_by_role("searchbox").fill("no such text anywhere")
    expect(page.locator("#count")).to_have_text("No rollout matches.")
    assert "text=no+such+text" in page.url
    page.get_by_role("searchbox").fill("")
    page.get_by_role("combobox", name="Order").select_option("highest mean kl")
    expect(page.locator(".row").first).not_to_contain_text("#0")


def test_pointing_at_a_token_shows_what_both_models_would_say(page: Page, server: Server):
    open_at(page, server)
    page.locator("#rollout .strip-token").nth(2).hover()
    expect(page.locator("#token-panel dd").first).to_have_text("2")
    for who in ("Student", "Teacher"):
        table = page.locator(".tops table", has_text=who)
        expect(table.locator("tr")).to_have_count(TOP_K)
        expect(table.locator("td").first).to_contain_text("50.0 %")
        expect(table.locator("tr.sampled")).to_have_count(1)
    expect(page.locator("#token-history svg")).to_be_visible()
    expect(page.locator(".occurrences li").first).to_be_visible()
    # It is the second word, which is in a class; a quarter of every kl is choice.
    expect(page.locator("#token-panel dt", has_text="kl of the choice")).to_have_count(1)
    expect(page.locator(".token-class")).to_have_text(
        re.compile(r"^Class 1: ### So interchangeable; whole class banned: pillar; of its mean kl of .* decision\.$")
    )


def test_a_token_that_is_no_rock_and_was_not_banned(page: Page, server: Server):
    open_at(page, server, "rollout=0&position=0")
    page.locator(".occurrences a").first.wait_for()
    expect(page.locator(".facts dd").nth(3)).to_have_text("no")
    expect(page.locator("#token-type > *")).to_have_text([re.compile(".")] * 5)
    expect(page.locator("#token-type")).not_to_contain_text(re.compile("null|undefined|NaN"))


def test_an_occurrence_leads_to_where_it_is(page: Page, server: Server):
    open_at(page, server, "rollout=0&position=1")
    link = page.locator(".occurrences a").last
    href = link.get_attribute("href") or ""
    link.click()
    rollout, position = re.findall(r"rollout=(\d+)&position=(\d+)", href)[0]
    expect(page.locator("#rollout h2")).to_have_text(f"Rollout {rollout}")
    assert selected(page) == position


def test_keyboard_alone(page: Page, server: Server):
    open_at(page, server)
    expect(page.locator("#rollout .strip-token")).to_have_count(LENGTH)
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("n?/")  # letters here, not commands
    expect(page.get_by_role("searchbox")).to_have_value("n?/")
    expect(page.locator("#count")).to_have_text("No rollout matches.")
    page.get_by_role("searchbox").fill("")
    page.keyboard.press("Escape")
    expect(page.get_by_role("searchbox")).not_to_be_focused()
    expect(page.locator("#rollout .strip-token")).to_have_count(LENGTH)
    page.keyboard.press("j")
    expect(page.locator("#rollout h2")).to_have_text("Rollout 1")
    page.keyboard.press("k")
    expect(page.locator("#rollout h2")).to_have_text("Rollout 0")
    page.keyboard.press("n")
    first = page.locator("#rollout .strip-token:focus")
    expect(first).to_have_class(re.compile("strip-rock"))
    at = int(first.get_attribute("data-position") or "")
    page.keyboard.press("n")
    page.keyboard.press("N")
    assert selected(page) == str(at)
    page.keyboard.press("ArrowRight")
    assert selected(page) == str(at + 1)
    page.keyboard.press("End")
    assert selected(page) == str(LENGTH - 1)
    page.keyboard.press("ArrowRight")  # there is nothing behind the end
    page.keyboard.press("Home")
    assert selected(page) == "0"
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.locator("#rollout .strip-token[aria-selected=true]")).to_have_count(0)


def test_one_stop_of_tab_a_strip(page: Page, server: Server):
    open_at(page, server, "position=5")
    expect(page.locator("#rollout .strip-token[tabindex='0']")).to_have_count(1)
    page.locator("#rollout .strip-token[tabindex='0']").focus()
    page.keyboard.press("Tab")
    expect(page.locator("#rollout .strip-token:focus")).to_have_count(0)


def test_a_token_reached_by_tab_shows_its_panel(page: Page, server: Server):
    open_at(page, server, "rollout=0")
    expect(page.locator("#rollout .strip-token")).to_have_count(LENGTH)
    page.get_by_role("link", name="compare", exact=True).focus()
    page.keyboard.press("Tab")
    expect(page.locator("#rollout .strip-token:focus")).to_have_attribute("data-position", "0")
    expect(page.locator("#token-panel dd").first).to_have_text("0")
    assert selected(page) == "0"


def test_every_part_can_be_reached_by_tab(page: Page, server: Server):
    open_at(page, server, "rollout=0&position=3")
    page.locator(".occurrences a").first.wait_for()
    reached = set()
    for _ in range(45):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.closest('[id]')?.id"))
    assert {
        "skip",
        "views",
        "run",
        "checkpoint",
        "theme",
        "help-open",
        "filters",
        "list",
        "rollout",
        "token-type",
    } <= reached


def test_a_link_restores_everything_and_back_goes_back(page: Page, server: Server):
    choice = "run=1&checkpoint=0&rollout=5&position=7&measure=grad_norm&rock=true&sort=-max_kl"
    open_at(page, server, choice)
    expect(page.locator("#rollout h2")).to_have_text("Rollout 5")
    for _ in range(2):
        assert selected(page) == "7"
        assert page.locator("#run").input_value() == "1" and page.locator("#checkpoint").input_value() == "0"
        assert page.locator("#view-rollouts .measure").input_value() == "grad_norm"
        assert page.get_by_role("combobox", name="Rocks").input_value() == "true"
        page.reload()
        expect(page.locator("#rollout h2")).to_have_text("Rollout 5")
    page.get_by_role("link", name="Rocks").click()
    expect(page.locator("#rocks table")).to_be_visible()
    page.go_back()
    expect(page.locator("#rollout h2")).to_be_visible()
    page.go_forward()
    expect(page.locator("#rocks table")).to_be_visible()


@pytest.mark.parametrize(
    "choice",
    [
        "run=length&run_b=push",
        "view=nonsense&run=99&measure=__proto__&sort=x",
        "checkpoint=7&position=999",
        "%%%&rollout=0&theme=<b>",
    ],
)
def test_a_nonsense_link_opens_something_sensible(page: Page, server: Server, choice: str):
    open_at(page, server, choice)
    expect(page.locator("#rollout .strip-token")).to_have_count(LENGTH)


def test_the_list_holds_only_the_rows_in_sight(page: Page, server: Server):
    open_at(page, server)
    expect(page.locator(".row").first).to_be_visible()
    assert page.locator(".row").count() < 20
    page.locator("#list").focus()
    page.keyboard.press("End")
    expect(page.locator("#rollout h2")).to_have_text(f"Rollout {N_ROLLOUTS - 1}")
    expect(page.locator(".row[aria-selected=true]")).to_be_in_viewport()
    expect(page.locator(".row[aria-selected=true]")).to_have_attribute("aria-posinset", str(N_ROLLOUTS))
    assert page.locator(".row").count() < 20


def test_a_million_rollouts_fit_into_the_list(page: Page, server: Server):
    """Taller than a browser can lay out: rows as many as no test can write come from a stand-in for the server."""
    total, size = 1_000_000, 50

    def answer(route: Route) -> None:
        asked = int((re.findall(r"page=(\d+)", route.request.url) or ["0"])[0])
        row = {
            "prompt_id": "p",
            "length": 9,
            "mean_kl": 0.5,
            "max_kl": 1,
            "n_rocks": 1,
            "correct": None,
            "preview": "x",
        }
        rows = [{**row, "rollout_id": number % N_ROLLOUTS} for number in range(asked * size, (asked + 1) * size)]
        route.fulfill(json={"checkpoint": 10, "total": total, "page": asked, "size": size, "rows": rows})

    page.route(re.compile(r"/api/runs/0/rollouts\?"), answer)
    open_at(page, server)
    expect(page.locator("#count")).to_have_text("1,000,000 rollouts")
    listed = "[...document.querySelectorAll('.row')].map((row) => Number(row.ariaPosInSet))"
    for share in (0.5, 0.123, 1.0):
        page.evaluate(
            "share => { const list = document.getElementById('list'); "
            "list.scrollTop = share * (list.scrollHeight - list.clientHeight) }",
            share,
        )
        expect(page.locator(".row").nth(5)).to_be_in_viewport()
        page.wait_for_function(f"Math.abs({listed}[0] - {share * total}) < 30")
        rows = page.evaluate(listed)
        assert rows == list(range(rows[0], rows[0] + len(rows))) and 8 < len(rows) < 20
    assert rows[-1] == total


def test_comparing_two_checkpoints(page: Page, server: Server):
    open_at(page, server, "view=compare&rollout=2")
    for side, step in (("a", 10), ("b", 0)):
        expect(page.locator(f"#name-{side}")).to_have_text(f"hostile, step {step}")
        expect(page.locator(f"#strip-{side} .strip-token")).to_have_count(LENGTH)
    page.locator("#strip-a .strip-token").nth(4).click()
    assert selected(page, "#strip-a") == selected(page, "#strip-b") == "4"
    expect(page.locator("#compare-panels h3")).to_have_count(2)
    page.locator("#run-b").select_option("1")
    page.locator("#checkpoint-b").select_option("10")
    expect(page.locator("#name-b")).to_have_text("hostile, step 10")
    assert page.locator("#strip-a").inner_text() == page.locator("#strip-b").inner_text()


def test_comparing_runs_whose_prompts_differ(page: Page, server: Server):
    """The same number is another prompt there: both are shown, and no token is taken for the other's."""
    open_at(page, server, "view=compare&rollout=2")
    expect(page.locator("#strip-b .strip-token")).to_have_count(LENGTH)
    expect(page.locator("#compare-note")).to_be_hidden()
    expect(page.locator("#view-compare .prompt").filter(visible=True)).to_have_count(0)
    page.locator("#run-b").select_option("2")
    expect(page.locator("#name-b")).to_have_text("other, step 10")
    expect(page.locator("#compare-note")).to_have_text("The prompts differ, so tokens are not paired.")
    here, there = page.locator("#view-compare .prompt").all_inner_texts()
    assert here and there and here != there
    for side, other in (("a", "b"), ("b", "a")):
        page.locator(f"#strip-{side} .strip-token").nth(4).click()
        assert selected(page, f"#strip-{side}") == "4"
        expect(page.locator(f"#strip-{other} [aria-selected=true]")).to_have_count(0)
        expect(page.locator("#compare-panels h3")).to_have_count(1)
        page.locator(f"#strip-{other} .strip-token").nth(6).hover()
        expect(page.locator("#compare-panels dd").first).to_have_text("6")
        expect(page.locator("#compare-panels h3")).to_have_count(1)
    page.reload()
    expect(page.locator("#strip-b [aria-selected=true]")).to_have_attribute("data-position", "4")
    expect(page.locator("#strip-a [aria-selected=true]")).to_have_count(0)


def test_comparing_runs_whose_answers_differ(page: Page, server: Server):
    def answer(route: Route) -> None:
        strip = route.fetch().json()
        strip["tokens"][3]["token_id"] += 1
        route.fulfill(json=strip)

    page.route(re.compile(r"/rollouts/2\?checkpoint=0"), answer)
    open_at(page, server, "view=compare&rollout=2&position=4")
    expect(page.locator("#compare-note")).to_have_text("The answers differ, so tokens are not paired.")
    expect(page.locator("#compare-panels h3")).to_have_count(1)


LABEL = " (teacher: top-20 + tail)"


def name_teacher(page: Page) -> None:
    """Have the teacher of run 1 name its likeliest tokens alone."""

    def answer(route: Route) -> None:
        route.fulfill(json=route.fetch().json() | {"teacher": LABEL})

    page.route(re.compile(r"/runs/1$"), answer)


def test_comparing_kl_of_different_kinds(page: Page, server: Server):
    name_teacher(page)
    open_at(page, server, "view=compare&rollout=2&run_b=1")
    expect(page.locator("#name-b")).to_have_text(f"hostile, step 10{LABEL}")
    places = ("#compare-note", "#view-compare .legend", "#compare-table")
    note, legends, table = map(page.locator, places)
    expect(note).to_have_text("The teachers gave different kinds of kl, so each side has a scale of its own.")
    expect(legends).to_have_count(2)
    expect(table).to_be_hidden()
    page.locator("#view-compare .measure").select_option("log_ratio")
    expect(note).to_be_hidden()
    expect(legends).to_have_count(1)
    expect(table).to_be_visible()


def test_the_bar_says_what_the_teacher_gave(page: Page, server: Server):
    name_teacher(page)
    open_at(page, server, "run=1")
    expect(page.locator("#teacher")).to_have_text(LABEL.strip())
    page.locator("#run").select_option("0")
    expect(page.locator("#teacher")).to_be_hidden()


def test_curves_of_different_kinds_of_kl_are_drawn_apart(page: Page, server: Server):
    def answer(route: Route) -> None:
        said = route.fetch().json()
        said["curves"] = [{**own, "teacher": LABEL if own["name"] == "kl" else ""} for own in said["curves"]]
        route.fulfill(json=said)

    page.route(re.compile(r"/runs/2/live$"), answer)
    open_at(page, server, "view=live&with=1")
    panels = page.locator("#curves .plot-panel")
    kl, note = panels.filter(has_text=re.compile("^kl")), page.locator("#overlay-note")
    expect(kl).to_have_count(1)
    expect(kl.locator(".mark-line")).to_have_count(2)
    expect(note).to_be_hidden()
    open_at(page, server, "view=live&with=1,2")
    expect(kl).to_have_count(2)
    expect(kl.filter(has_text=LABEL.strip()).locator(".mark-line, .mark-point")).to_have_count(1)
    expect(panels.filter(has_text=re.compile("^grad norm"))).to_have_count(1)
    expect(note).to_contain_text("The teachers gave different kinds of kl")


def test_rocks_say_which_prompts_their_numbers_are_of(page: Page, server: Server):
    open_at(page, server, "view=rocks&run=2")
    expect(page.locator("#rocks .table-note")).to_contain_text("are of the prompts that selected the rocks")
    expect(page.locator("#rocks .table-note")).to_contain_text("Verdicts by the paper's rule")
    expect(page.locator("#shares .muted")).to_contain_text("held-out half (45 prompts)")
    titles = page.locator("#rocks th").all_inner_texts()
    cells = page.locator("#rocks tbody tr").first.locator("td").all_inner_texts()
    row = dict(zip(titles, cells, strict=True))
    assert (row["mean kl"], row["held out"], row["change"]) == ("1.500", "1.250", "−12.5 %")
    open_at(page, server, "view=rocks&run=0")
    expect(page.locator("#rocks .table-note")).to_contain_text("All prompts selected the rocks")
    assert "held out" not in page.locator("#rocks th").all_inner_texts()


def test_a_ban_has_the_interval_it_was_given(page: Page, server: Server):
    for run, level in ((0, "95 %"), (2, "90 %")):
        open_at(page, server, f"view=knockout&run={run}")
        expect(page.locator("#bans-note")).to_contain_text(f"with its {level} interval")


def test_a_knock_out_marks_the_first_difference(page: Page, server: Server):
    open_at(page, server, "view=knockout")
    expect(page.locator("#bans a")).to_have_count(len(ROCK_IDS) + 1)
    page.locator(".pair-block").first.wait_for()
    pairs = page.locator(".pair-block").count()
    assert pairs and page.locator(".aligned .first").count() == 2 * pairs
    free, banned = page.locator(".pair-block").first.locator(".aligned").all()
    assert free.locator(".same").all_inner_texts() == banned.locator(".same").all_inner_texts()
    expect(free.locator(".first")).to_have_class(re.compile("banned"))
    page.locator("#bans a").nth(1).click()
    expect(page.locator("#bans a").nth(1)).to_have_attribute("aria-current", "true")


def test_a_run_in_training_is_followed(page: Page, server: Server):
    open_at(page, server, "view=live")
    before = page.locator("#live-status").inner_text()
    with (server.run_path / "logs.jsonl").open("a", encoding="utf-8") as log:
        log.write(log_line(3))
    expect(page.locator("#live-status")).not_to_have_text(before)
    expect(page.locator("#live-status")).to_contain_text("4 steps")
    expect(page.locator("#curves .plot-title").filter(has_text=re.compile("^kl"))).to_have_text("kl: 0.250 nats")


def test_an_answer_after_a_silence_takes_the_alert_away(browser: Browser, server: Server):
    page = browser.new_page()
    page.route(re.compile("/live"), lambda route: route.abort())
    open_at(page, server, "view=live")
    expect(page.locator("#problem")).to_contain_text("does not answer")
    page.unroute(re.compile("/live"))
    expect(page.locator("#curves svg").first).to_be_visible()
    expect(page.locator("#problem")).to_be_hidden()
    page.close()


@pytest.mark.parametrize("wish", ["light", "dark"])
def test_the_theme_follows_the_system_and_can_be_switched(page: Page, server: Server, wish):
    page.emulate_media(color_scheme=wish)
    open_at(page, server)
    background = "getComputedStyle(document.body).backgroundColor"
    first = page.evaluate(background)
    assert first == {"light": "rgb(253, 253, 251)", "dark": "rgb(21, 23, 27)"}[wish]
    page.locator("#theme").click()
    assert page.evaluate(background) != first
    page.reload()
    page.locator("nav [aria-current]").wait_for()
    assert page.evaluate(background) != first


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_nothing_for_axe_to_find(page: Page, server: Server, view: str, theme: str):
    open_at(page, server, f"view={view}&theme={theme}&rollout=0&position=1")
    shown = {"rollouts": ".occurrences a", "compare": "#compare-panels h3", "knockout": ".aligned", "live": "svg"}
    page.locator(f"#view-{view} {shown.get(view, 'td')}").first.wait_for()
    found = Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []


def test_a_narrow_window_scrolls_one_way(page: Page, server: Server):
    page.set_viewport_size({"width": 390, "height": 800})
    for view in VIEWS:
        open_at(page, server, f"view={view}&rollout=0")
        page.locator(f"#view-{view} :is(svg, .strip-token, td, .aligned)").filter(visible=True).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


def test_the_browser_refuses_markup_and_foreign_scripts(browser: Browser, server: Server):
    """That nothing was executed means something: the page could not do it if it tried."""
    page = browser.new_page()
    page.goto(server.url)
    attacks = {
        "document.body.innerHTML = '<b>x</b>'": "TrustedHTML",
        "document.createElement('script').text = 'window.executed = 1'": "TrustedScript",
        "document.createElement('script').src = 'http://127.0.0.1:1/'": "TrustedScriptURL",
    }
    for attack, refusal in attacks.items():
        with pytest.raises(Error, match=refusal):
            page.evaluate(attack)
    violated = (
        "new Promise((done) => addEventListener('securitypolicyviolation', (event) => done(event.effectiveDirective)))"
    )
    assert page.evaluate(f"[fetch('http://127.0.0.1:1/').catch(() => 0), {violated}][1]") == "connect-src"
    page.evaluate("document.body.setAttribute('style', 'color: red')")
    assert page.evaluate("getComputedStyle(document.body).color") != "rgb(255, 0, 0)"
    page.close()


def test_hostile_texts_are_only_ever_text(page: Page, server: Server):
    """Every hostile text through strip, list and panel: the page's hooks see the rest."""
    open_at(page, server)
    for rollout in range(N_ROLLOUTS):
        page.evaluate("hash => { location.hash = hash }", f"rollout={rollout}&position={rollout % LENGTH}")
        expect(page.locator("#rollout h2")).to_have_text(f"Rollout {rollout}")
        texts = page.locator("#rollout .strip-token").all_inner_texts()
        assert len(texts) == LENGTH and all(0 < len(text) <= 70 for text in texts)
        assert not any(
            re.search("[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", text) for text in texts
        )
    assert page.locator(FOREIGN).count() == 0


def test_hostile_texts_in_cards_and_comparisons(page: Page, server: Server):
    for rollout in range(0, N_ROLLOUTS, 6):
        hostile = 2 * (rollout // 6 % (LENGTH // 2)) + 1  # words stand at even positions
        open_at(page, server, f"rollout={rollout}&position={hostile}")
        expect(page.locator(".occurrences li").first).to_be_visible()
        expect(page.locator(".tops td").first).to_be_visible()
        assert page.locator(FOREIGN).count() == 0
        open_at(page, server, f"view=compare&rollout={rollout}&run_b=2&position={hostile}")
        expect(page.locator("#compare-panels h3")).to_have_count(1)
        expect(page.locator("#view-compare .prompt").filter(visible=True)).to_have_count(2)
        assert page.locator(FOREIGN).count() == 0


def test_hostile_texts_in_tables_answers_and_searches(page: Page, server: Server):
    open_at(page, server, "view=rocks")
    expect(page.locator("#rocks tbody tr")).to_have_count(len(ROCK_IDS))
    for token_id in ROCK_IDS:
        open_at(page, server, f"view=knockout&ban={token_id}")
        expect(page.locator("#pairs h2 .chip")).to_be_visible()
    assert page.locator(FOREIGN).count() == 0
    page.get_by_role("link", name="Rollouts").click()
    for text in VOCABULARY[9:40]:
        page.get_by_role("searchbox").fill(text[:200])
    assert page.locator(FOREIGN).count() == 0


def test_hostile_texts_frozen_in_training(page: Page, server: Server):
    open_at(page, server, "view=live&run=2")
    expect(page.locator("#online .chip")).to_have_count(len(FROZEN_IDS))
    assert page.locator("#online .chip").all_inner_texts() == [
        page.evaluate("text => RockStrip.visible(text)", legible(VOCABULARY[token_id], 64)) for token_id in FROZEN_IDS
    ]
    assert page.locator(FOREIGN).count() == 0


def test_texts_have_the_same_marks_here_and_in_the_terminal(page: Page, server: Server):
    open_at(page, server)
    texts = [*(text for text in HOSTILE if len(text) < 1000), " a\n\tb\r\n", "·⏎⇥␍", "↵→", "e\u0301", "\u0301", ""]
    shown = page.evaluate(
        "texts => texts.map((text) => RockStrip.visible(text, 1e6))", [legible(text, 10**6) for text in texts]
    )
    assert dict(zip(texts, shown, strict=True)) == {text: visible(text, 10**6) for text in texts}


def test_a_line_breaks_only_where_the_text_does(page: Page, server: Server):
    def answer(route: Route) -> None:
        strip = route.fetch().json()
        strip["tokens"] = [{**strip["tokens"][0], "text": text, "position": at} for at, text in enumerate(texts)]
        route.fulfill(json=strip)

    texts = ("a\n", "⏎", "↵", "b")
    page.route(re.compile(r"/rollouts/0\?"), answer)
    open_at(page, server, "rollout=0")
    expect(page.locator("#rollout .strip-token")).to_have_count(len(texts))
    expect(page.locator("#rollout br")).to_have_count(1)


def test_a_run_without_answers_says_what_is_left_out(browser: Browser, tmp_path: Path):
    run, task = RunDir(make_run(tmp_path / "silent")), 'name = "jsonl"\npath = "p.jsonl"\nanswer_field = ""\n'
    with run.lock():
        run.drop([run.knockout.name])
        models = '[models]\nstudent = "s"\nteacher = "t"\n'
        run.commit_text("config.toml", f'[run]\ndirectory = "r"\n{models}[task]\n{task}[evaluation.task]\n{task}')
        run.update_manifest(replay=make_replay(task=tomllib.loads(task)).to_manifest())
    server, page = Server(run.path), browser.new_page()
    complaints = watched(page, server.url)
    open_at(page, server, "view=knockout")
    why = "Left out: evaluation.task.answer_field is empty, so there are no answers to measure accuracy by"
    expect(page.locator("#pairs")).to_contain_text(why)
    open_at(page, server)
    answer = page.locator("#filters select[name=correct]")
    expect(answer).to_be_disabled()
    expect(answer).to_have_attribute("title", "Not marked as right or wrong: the prompts have no answers.")
    assert complaints == []
    page.close()
    server.stop()
