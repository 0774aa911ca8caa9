"""A real explorer in a thread, and a page that notes whatever it must not do."""

import threading
from pathlib import Path

import uvicorn
from playwright.sync_api import ConsoleMessage, Page, Request

from rocktokens.report.explorer.security import new_token
from rocktokens.report.explorer.server import make_app, server_config
from rocktokens.report.explorer.shelf import Shelf

FOREIGN = "#main :is(script, img, iframe, object, link, style, form:not(#filters))"
"""What no view is made of."""


class Server(uvicorn.Server):
    """The explorer of runs, by their number, in a thread of its own, on a free port."""

    def __init__(self, *runs: Path) -> None:
        self.run_path, token = runs[0], new_token()
        config = server_config(make_app(Shelf(runs), token))
        config.port = 0
        super().__init__(config)
        self._thread = threading.Thread(target=self.run)
        self._thread.start()
        while not self.started:
            assert self._thread.is_alive()
        port = self.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/{token}/"

    def stop(self) -> None:
        self.should_exit = True
        self._thread.join(timeout=10)


def watched(page: Page, url: str) -> list[str]:
    """What a page does that it must not, as it happens: a page that was left is not forgotten."""
    complaints: list[str] = []

    def note(message: ConsoleMessage) -> None:
        complaints.append(f"console {message.type}: {message.text}")

    def outside(request: Request) -> None:
        if not request.url.startswith((url, "data:")):
            complaints.append(f"request to {request.url}")

    page.on("console", note)
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("request", outside)
    page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    page.expose_function("noteExecution", lambda: complaints.append("a text was executed"))
    page.add_init_script("Object.defineProperty(window, 'executed', { set: () => window.noteExecution() })")
    return complaints


def open_at(page: Page, server: Server, choice: str = "") -> None:
    """Open the explorer again at a choice."""
    page.goto("about:blank")
    page.goto(f"{server.url}#{choice}")
    page.locator("nav [aria-current]").wait_for()
