"""The explorer's server: one page and the JSON it asks for, read-only, over the same views as the report.

1. The page is one document; its scripts and styles are inlined and allowed by their hash (csp.py).
2. The routes are those of answers.py, below a secret and behind a guard (security.py).
3. What goes wrong is one sentence of JSON, never a traceback. Where files were replaced while they were read, the run
   is opened again as it is then.
4. A connection on which no whole request comes is closed after a few seconds.
5. What the first list and the first search of a run need is read in a thread: of the given runs from the start on, of
   any other once it is opened.
"""

import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any

import duckdb
import pyarrow as pa
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from rocktokens.errors import RocktokensError, RunDirError
from rocktokens.report.explorer.answers import ROUTES, Answers
from rocktokens.report.explorer.page import page, policy
from rocktokens.report.explorer.security import CSP, LOOPBACK, NO_FRAMES, Guard, refused
from rocktokens.report.explorer.shelf import Shelf
from rocktokens.report.views.rollout_list import warm

SHOWN = 40
"""Characters of what a client said that a sentence repeats."""
UNREADABLE = (OSError, duckdb.IOException, duckdb.InvalidInputException, pa.ArrowException)
"""What reading a file raises that was removed or damaged after it was verified."""
_log = logging.getLogger(__name__)


def make_app(shelf: Shelf, token: str, hosts: Collection[str] = LOOPBACK) -> Starlette:
    """Make the explorer of these runs; see ``Guard`` for the rest."""
    answers = Answers(shelf)
    routes = [Route("/", _page), *(Route(f"/api/{route}", _endpoint(answers, shelf, route)) for route in ROUTES)]
    app = Starlette(
        routes=[Mount(f"/{token}", routes=routes)],
        middleware=[Middleware(Guard, token=token, hosts=hosts)],
        exception_handlers={HTTPException: _not_found},
        lifespan=lambda _: _warming(shelf),
    )
    app.router.redirect_slashes = False
    return app


def server_config(app: Starlette) -> uvicorn.Config:
    """How the explorer is served, by whatever address; nothing is said that a client need not know."""
    return uvicorn.Config(
        app,
        http=_Impatient,
        log_level="warning",
        access_log=False,  # it would hold the secret
        server_header=False,
        proxy_headers=False,
        ws="none",
    )


class _Impatient(H11Protocol):
    """Closes idle connections; uvicorn itself waits forever for a request, or for the rest of one."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def _wait(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self.timeout_keep_alive_task is None and not is_answering:
            close = self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, close)


@asynccontextmanager
async def _warming(shelf: Shelf) -> AsyncIterator[None]:
    """Warm the runs that are opened, one after the other, for as long as the application lives."""
    ended = threading.Event()

    def warm_next() -> None:
        view = shelf.next_opened()
        if view is not None:
            with suppress(Exception):  # who asks for what cannot be read is told so
                warm(view, lambda: not ended.is_set() and shelf.is_open(view))

    def work() -> None:
        for number in range(shelf.n_given):
            with suppress(RocktokensError):
                shelf.view(number)
        while not ended.is_set():
            warm_next()

    thread = threading.Thread(target=work, name="warming")
    thread.start()
    yield
    ended.set()
    shelf.stop_waiting()
    await run_in_threadpool(thread.join)


def _endpoint(answers: Answers, shelf: Shelf, route: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            body = await run_in_threadpool(_answer, answers, shelf, route, _said(request))
        except ValidationError as error:
            return refused(400, _sentence(error))
        except RocktokensError as error:
            return refused(404, str(error))
        except UNREADABLE as error:
            return refused(
                404, f"a file of the run cannot be read ({_reason(error)}): restore it from a copy of the run"
            )
        except Exception:
            _log.exception("no answer to %s", route)
            return refused(500, "the explorer failed to answer: its terminal says why")
        return Response(body, media_type="application/json")

    return endpoint


def _answer(answers: Answers, shelf: Shelf, route: str, said: dict[str, str]) -> str:
    """Answer a route; where files went away or changed, from the run as it is now, which names what is damaged."""
    try:
        return answers.ask(route, **said)
    except (RunDirError, *UNREADABLE):
        if "run" in said:
            shelf.put_away(int(said["run"]))
        return answers.ask(route, **said)


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0][:200].rstrip(".")


def _said(request: Request) -> dict[str, str]:
    """Return what the client said, by name; a name given twice is refused."""
    said = [*request.path_params.items(), *request.query_params.multi_items()]
    [(name, times)] = Counter(name for name, _ in said).most_common(1) or [("", 0)]
    if times > 1:
        raise RocktokensError(f"{name[:SHOWN]} was given {times} times: give it once")
    return dict(said)


def _sentence(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=False)[0]
    name, value = str(problem["loc"][0])[:SHOWN], repr(problem["input"])
    shown = value if len(value) <= SHOWN else f"{value[:SHOWN]}…"
    if problem["type"] == "unexpected_keyword_argument":
        return f"{name} is not a parameter here: leave it out"
    if problem["type"] == "missing_keyword_only_argument":
        return f"{name} is missing: give it"
    return f"{name} = {shown} is not valid: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


async def _page(request: Request) -> Response:
    return HTMLResponse(page(), headers={CSP: policy("connect-src 'self'", NO_FRAMES)})


async def _not_found(request: Request, error: Exception) -> Response:
    return refused(404, "there is nothing here: the explorer's page is at /TOKEN/")
