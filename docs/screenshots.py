"""The pictures of the report and the explorer, made from a run of ``rocktokens demo`` by a headless Chromium.

1. The report is written to a temporary file, the explorer started as a user would; each picture is one choice in one of
   them, named by its address where it can be.
2. A picture of the report is cut below the last thing that fits whole, such as a row of a table.
3. A picture has twice the pixels of the page, or fewer where it would be larger than ``MOST_BYTES``.

``python docs/screenshots.py runs/demo`` writes docs/images/report-*.png and explorer-*.png.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from playwright.sync_api import Browser, FloatRect, Page, ViewportSize, sync_playwright

from rocktokens.report.page.render import report_html
from rocktokens.report.views.knockout_pairs import knockouts
from rocktokens.report.views.run_view import RunView
from rocktokens.report.views.strips import interesting_rollouts

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
IMAGES = Path(__file__).parent / "images"
EXPLORER, REPORT = (1360, 850), (1280, 1240)
"""Width and height: of the window, and of the largest picture."""
MARGIN = 20
SCALES = (2, 1.5, 1)
MOST_BYTES = 250_000

Prepare = Callable[[Page], FloatRect]
"""Opens a page, brings it to where it is shown, and returns which part of it."""


def main() -> None:
    """Make every picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("there is no Chromium to make pictures with: install Debian's package chromium")
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = RunView.open(arguments.run)
    with (
        tempfile.TemporaryDirectory() as folder,
        explorer(arguments.run.parent) as url,
        sync_playwright() as playwright,
    ):
        report = Path(folder, "report.html")
        report.write_text(report_html([run]), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--hide-scrollbars"])
        for window, pictures in ((REPORT, report_pictures(report.as_uri())), (EXPLORER, explorer_pictures(url, run))):
            for name, prepare in pictures.items():
                picture = smallest_enough(browser, window, prepare)
                (arguments.out / f"{name}.png").write_bytes(picture)
                print(f"{name}.png: {len(picture) / 1000:.0f} kB", flush=True)
        browser.close()


def report_pictures(url: str) -> dict[str, Prepare]:
    """By name: the first screen, a rock highlighted in the funnel, one in the forest plot, a token of a rollout."""
    funnel, forest = (f"[data-plot=run-1-figure-{name}] .plot-body" for name in ("funnel", "knockout"))

    def top(page: Page) -> FloatRect:
        page.goto(url)
        return _cut(page, "body", ".next, nav")

    def touched(chart: str, section: str, parts: str, *keys: str) -> Prepare:
        def prepare(page: Page) -> FloatRect:
            page.goto(url)
            page.locator(chart).focus()
            for key in keys:
                page.keyboard.press(key)
            return _cut(page, section, parts)

        return prepare

    def strip(page: Page) -> FloatRect:
        page.goto(url)
        page.locator(".rollout").first.locator(".strip-rock").nth(2).click()
        return _cut(page, "#run-1-strips", ".strip-controls, .rollout")

    return {
        "report-answers": top,
        "report-rocks": touched(funnel, "#run-1-rocks", "figure, .beside .table-block", "End", "Enter"),
        "report-forest": touched(forest, "#run-1-knockout", "figure", *["ArrowDown"] * 6, "Enter"),
        "report-strip": strip,
    }


def explorer_pictures(url: str, run: RunView) -> dict[str, Prepare]:
    """By name: every view of the run, a rollout by night too; curves with those of two arms of the run's study."""
    rich, rollout, ban = "view=rollouts&sort=-n_rocks", interesting_rollouts(run, 1)[0], _telling_ban(run)
    with urlopen(f"{url}api/runs") as response:
        numbers = {own["name"]: own["number"] for own in json.load(response)["runs"]}
    arms = [str(number) for name, number in numbers.items() if name.startswith(f"{run.name}/study/arms/")]
    choices = {
        "explorer-runs": ("view=home", "#home td", ""),
        "explorer-rollouts": (rich, "#rollout .strip-token", "#token-type .occurrences"),
        "explorer-dark": (
            f"{rich}&measure=entropy_teacher&theme=dark",
            "#rollout .strip-token",
            "#token-type .occurrences",
        ),
        "explorer-rocks": ("view=rocks", "#rocks td", ""),
        "explorer-classes": ("view=classes", "#classes td", ""),
        "explorer-compare": (f"view=compare&rollout={rollout}", "#strip-b .strip-token", "#compare-panels .facts"),
        "explorer-knockout": (f"view=knockout&ban={ban}", ".aligned", ""),
        "explorer-live": (f"view=live&with={','.join(arms[-2:])}", "#curves svg", ""),
    }

    def prepare(choice: str, shown: str, about_token: str) -> Prepare:
        def open_at(page: Page) -> FloatRect:
            page.goto(f"{url}#run={numbers[run.name]}&{choice}")
            page.locator(shown).first.wait_for()
            if about_token:
                for _ in range(3):
                    page.keyboard.press("n")
                page.locator(about_token).first.wait_for()
            return {"x": 0, "y": 0, "width": EXPLORER[0], "height": EXPLORER[1]}

        return open_at

    return {name: prepare(*choice) for name, choice in choices.items()}


def _telling_ban(run: RunView) -> int:
    """The single token whose ban turned the most answers."""
    alone = [ban for ban in knockouts(run) if ban.role == "tested" and len(ban.ids) == 1]
    return max(alone, key=lambda ban: ban.n_lost + ban.n_gained).ids[0]


def _cut(page: Page, whole: str, parts: str) -> FloatRect:
    """From the top of an element to the end of the last of its parts that fits."""
    top, *bottoms = page.evaluate(
        """([whole, parts]) => {
          const box = document.querySelector(whole);
          const ends = [...box.querySelectorAll(parts)].map((part) => part.getBoundingClientRect().bottom);
          return [box.getBoundingClientRect().top, ...ends].map((place) => place + scrollY);
        }""",
        [whole, parts],
    )
    top = max(0, top - MARGIN)
    bottom = max(bottom for bottom in bottoms if bottom - top <= REPORT[1])
    return {"x": 0, "y": top, "width": REPORT[0], "height": bottom + 4 - top}


def smallest_enough(browser: Browser, window: tuple[int, int], prepare: Prepare) -> bytes:
    """The picture with the most pixels that is small enough."""
    pictures = (_picture(browser, window, prepare, scale) for scale in SCALES)
    return next(picture for picture in pictures if len(picture) <= MOST_BYTES)


def _picture(browser: Browser, window: tuple[int, int], prepare: Prepare, scale: float) -> bytes:
    viewport: ViewportSize = {"width": window[0], "height": window[1]}
    with browser.new_context(viewport=viewport, device_scale_factor=scale, reduced_motion="reduce") as context:
        page = context.new_page()
        clip = prepare(page)
        return page.screenshot(clip=clip, full_page=True)


@contextmanager
def explorer(runs: Path) -> Iterator[str]:
    """The link of an explorer of the runs below a folder."""
    command = [sys.executable, "-m", "rocktokens.cli.main", "explore", str(runs), "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
