from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from chromium import CHROMIUM, launch

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """For the tests of pages; the other tests of reports need no playwright."""
    from playwright.sync_api import expect, sync_playwright

    if CHROMIUM is None:
        pytest.skip("there is no Chromium to test the pages with")
    expect.set_options(timeout=30_000)  # five seconds are not enough on a busy machine
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()
