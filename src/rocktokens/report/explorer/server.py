"""The explorer's server: one page and the JSON it asks for, read-only, over the same views as the report.

1. The page is one document; its scripts and styles are inlined and allowed by their hash (csp.py).
2. A route is a method of ``Answers``; its parameters are everything a client may say there, path and search alike,
   checked by type and range. Runs are named by their index: no path of a client reaches the file system.
3. What goes wrong is one sentence of JSON, never a traceback.
4. What the first list and the first search need is read from the start on, in a thread.
"""

import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Annotated, Any

from pydantic import Field, ValidationError, validate_call
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route

from rocktokens.display.rocks import rock_table
from rocktokens.display.text import legible
from rocktokens.errors import RocktokensError
from rocktokens.report.csp import asset, page_policy
from rocktokens.report.explorer.security import CSP, LOOPBACK, NO_FRAMES, Guard, refused
from rocktokens.report.views.knockout_pairs import knockout_pairs, knockouts
from rocktokens.report.views.live import live
from rocktokens.report.views.rollout_list import SORTS, Filters, rollouts, warm
from rocktokens.report.views.run_view import MAX_TOKEN_TEXT, RunView, to_json
from rocktokens.report.views.strips import rollout_strip
from rocktokens.report.views.type_card import history, type_card
from rocktokens.types import Category

STYLES = ("base.css", "explorer.css")
SCRIPTS = (
    "strip.js",
    "charts.js",
    "list.js",
    "explorer_core.js",
    "explorer_token.js",
    "explorer_rollouts.js",
    "explorer_rocks.js",
    "explorer_compare.js",
    "explorer_knockout.js",
    "explorer_live.js",
    "explorer.js",
)
SHOWN = 40
"""Characters of what a client said that a sentence repeats."""
_log = logging.getLogger(__name__)

Index = Annotated[int, Field(ge=0, lt=2**31)]
RolloutId = Annotated[int, Field(ge=0, lt=2**63)]
Nats = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Answers:
    """Answers to what clients ask; the types of the parameters say what a client may say."""

    def __init__(self, runs: Sequence[RunView]) -> None:
        self._runs = runs

    def _run(self, index: int) -> RunView:
        if index >= len(self._runs):
            raise RocktokensError(f"run {index} is not open: the runs are numbered from 0 to {len(self._runs) - 1}")
        return self._runs[index]

    def runs(self) -> Any:
        """List the runs, with their rocks."""
        return [_overview(run) for run in self._runs]

    def compare(
        self, *, run_a: Index, run_b: Index, checkpoint_a: Index, checkpoint_b: Index, rollout: RolloutId
    ) -> Any:
        """Show the rollouts of one number at two checkpoints, of one run or of two."""
        sides = ((run_a, checkpoint_a), (run_b, checkpoint_b))
        return [rollout_strip(self._run(run), rollout, checkpoint) for run, checkpoint in sides]

    def rollouts(
        self,
        *,
        run: Index,
        checkpoint: Index | None = None,
        rock: bool | None = None,
        token_id: Index | None = None,
        category: Category | None = None,
        kl_low: Nats | None = None,
        kl_high: Nats | None = None,
        text: Annotated[str, Field(max_length=200)] | None = None,
        correct: bool | None = None,
        banned: bool | None = None,
        sort: Annotated[str, Field(pattern=rf"^-?({'|'.join(SORTS)})$")] = SORTS[0],
        page: Index = 0,
    ) -> Any:
        """List a page of the rollouts that pass the filters."""
        filters = Filters(checkpoint, rock, token_id, category, kl_low, kl_high, text, correct, banned, sort)
        return rollouts(self._run(run), filters, page)

    def strip(self, *, run: Index, rollout: RolloutId, checkpoint: Index | None = None) -> Any:
        """Show one rollout, token by token."""
        return rollout_strip(self._run(run), rollout, checkpoint)

    def history(self, *, run: Index, rollout: RolloutId, position: Index) -> Any:
        """Follow the kl of one occurrence through the checkpoints."""
        return history(self._run(run), rollout, position)

    def type_card(self, *, run: Index, token_id: Index) -> Any:
        """Show what is known of one type, and where it occurs."""
        return type_card(self._run(run), token_id)

    def bans(self, *, run: Index) -> Any:
        """List the bans, and α of their intervals."""
        sweep = self._run(run).knockout
        return {"alpha": sweep and sweep.settings.alpha, "bans": knockouts(self._run(run))}

    def pairs(self, *, run: Index, token_id: Index, page: Index = 0) -> Any:
        """Show a page of the answers without and with the ban of a type."""
        return knockout_pairs(self._run(run), token_id, page)

    def live(self, *, run: Index) -> Any:
        """Show where training stands."""
        return live(self._run(run))


def make_app(runs: Sequence[RunView], token: str, hosts: Collection[str] = LOOPBACK) -> Starlette:
    """Make the explorer of these runs; see ``Guard`` for the rest."""
    answers = Answers(runs)
    asked = {
        "/api/runs": answers.runs,
        "/api/compare": answers.compare,
        "/api/runs/{run}/rollouts": answers.rollouts,
        "/api/runs/{run}/rollouts/{rollout}": answers.strip,
        "/api/runs/{run}/rollouts/{rollout}/positions/{position}": answers.history,
        "/api/runs/{run}/types/{token_id}": answers.type_card,
        "/api/runs/{run}/knockouts": answers.bans,
        "/api/runs/{run}/knockouts/{token_id}": answers.pairs,
        "/api/runs/{run}/live": answers.live,
    }
    routes = [Route("/", _page), *(Route(path, _endpoint(answer)) for path, answer in asked.items())]
    app = Starlette(
        routes=[Mount(f"/{token}", routes=routes)],
        middleware=[Middleware(Guard, token=token, hosts=hosts)],
        exception_handlers={HTTPException: _not_found},
        lifespan=lambda _: _warming(runs),
    )
    app.router.redirect_slashes = False
    return app


@asynccontextmanager
async def _warming(runs: Sequence[RunView]) -> AsyncIterator[None]:
    """Warm the runs, one after the other, for as long as the application lives."""
    ended = threading.Event()

    def work() -> None:
        for run in runs:
            with suppress(Exception):  # who asks for what cannot be read is told so
                warm(run, lambda: not ended.is_set())

    thread = threading.Thread(target=work, name="warming")
    thread.start()
    yield
    ended.set()
    await run_in_threadpool(thread.join)


def _endpoint(answer: Callable[..., Any]) -> Callable[[Request], Awaitable[Response]]:
    checked = validate_call(answer)

    async def endpoint(request: Request) -> Response:
        try:
            said = _said(request)
            body = await run_in_threadpool(lambda: to_json(checked(**said)))
        except ValidationError as error:
            return refused(400, _sentence(error))
        except RocktokensError as error:
            return refused(404, str(error))
        except Exception:
            _log.exception("no answer to %s", answer.__name__)
            return refused(500, "the explorer failed to answer: its terminal says why")
        return Response(body, media_type="application/json")

    return endpoint


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


def _overview(run: RunView) -> dict[str, Any]:
    rocks = run.rocks.tokens if run.rocks else ()
    return {
        "name": run.name,
        "checkpoints": run.checkpoints,
        "reference": run.reference,
        "summary": run.rocks and run.rocks.summary,
        "table": run.rocks and rock_table(run.rocks),
        "rocks": [replace(rock, text=legible(rock.text, MAX_TOKEN_TEXT)) for rock in rocks],
    }


async def _page(request: Request) -> Response:
    text, policy = _document()
    return HTMLResponse(text, headers={CSP: policy})


@cache
def _document() -> tuple[str, str]:
    """Return the page with its styles and scripts inlined, and the policy that allows just those."""
    styles, scripts = ([asset(name) for name in names] for names in (STYLES, SCRIPTS))
    text = asset("explorer.html")
    text = text.replace("<!-- styles -->", "\n".join(f"<style>{style}</style>" for style in styles))
    text = text.replace("<!-- scripts -->", "\n".join(f"<script>{script}</script>" for script in scripts))
    return text, page_policy(scripts, styles, "connect-src 'self'", NO_FRAMES)


async def _not_found(request: Request, error: Exception) -> Response:
    return refused(404, "there is nothing here: the explorer's page is at /TOKEN/")
