"""The browser of the tests: the headless shell where it is installed, which takes less time than a whole Chromium."""

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


def launch(playwright: "Playwright") -> "Browser":
    """Start it, also as root."""
    return playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
