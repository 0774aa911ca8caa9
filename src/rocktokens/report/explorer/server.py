"""The explorer's server: one page and the JSON it asks for, read-only, over the same views as the report.

1. The page is one document; its scripts and styles are inlined and allowed by their hash (csp.py).
2. A route has a query, the model of everything a client may say there, path and search alike, checked by type and
   range, and a view that answers it. Runs are named by their index: no path of a client reaches the file system.
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

from pydantic import BaseModel, ConfigDict, Field, ValidationError
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
from rocktokens.report.views.rollout_list import SORTS, Filters, compare, rollouts, warm
from rocktokens.report.views.run_view import RunView, to_json
from rocktokens.report.views.strips import MAX_TOKEN_TEXT, rollout_strip
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

Runs = Sequence[RunView]
Index = Annotated[int, Field(ge=0, lt=2**31)]
RolloutId = Annotated[int, Field(ge=0, lt=2**63)]
Nats = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Query(BaseModel):
    """What a client may say on one route: nothing that is not named here."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunQuery(Query):
    """Something of one run."""

    run: Index


class RolloutsQuery(RunQuery):
    """A page of the rollouts that pass the filters."""

    checkpoint: Index | None = None
    rock: bool | None = None
    token_id: Index | None = None
    category: Category | None = None
    kl_low: Nats | None = None
    kl_high: Nats | None = None
    text: Annotated[str, Field(max_length=200)] | None = None
    correct: bool | None = None
    banned: bool | None = None
    sort: Annotated[str, Field(pattern=rf"^-?({'|'.join(SORTS)})$")] = "rollout_id"
    page: Index = 0


class StripQuery(RunQuery):
    """One rollout, token by token."""

    rollout: RolloutId
    checkpoint: Index | None = None


class HistoryQuery(RunQuery):
    """The kl of one occurrence at every checkpoint."""

    rollout: RolloutId
    position: Index


class TypeQuery(RunQuery):
    """What is known of one type, and where it occurs."""

    token_id: Index


class PairsQuery(RunQuery):
    """A page of the answers without and with the ban of a type."""

    token_id: Index
    page: Index = 0


class CompareQuery(Query):
    """One rollout at two checkpoints, of one run or of two."""

    run_a: Index
    run_b: Index
    checkpoint_a: Index
    checkpoint_b: Index
    rollout: RolloutId


def _rollouts(runs: Runs, asked: RolloutsQuery) -> Any:
    filters = Filters(**asked.model_dump(exclude={"run", "page"}))
    return rollouts(_run(runs, asked.run), filters, asked.page)


def _compare(runs: Runs, asked: CompareQuery) -> Any:
    run_a, run_b = _run(runs, asked.run_a), _run(runs, asked.run_b)
    return compare(run_a, asked.checkpoint_a, run_b, asked.checkpoint_b, asked.rollout)


Answer = Callable[[Runs, Any], Any]
ANSWERS: dict[str, tuple[type[Query], Answer]] = {
    "/api/runs": (Query, lambda runs, _: [_overview(run) for run in runs]),
    "/api/compare": (CompareQuery, _compare),
    "/api/runs/{run}/rollouts": (RolloutsQuery, _rollouts),
    "/api/runs/{run}/rollouts/{rollout}": (
        StripQuery,
        lambda runs, asked: rollout_strip(_run(runs, asked.run), asked.rollout, asked.checkpoint),
    ),
    "/api/runs/{run}/rollouts/{rollout}/positions/{position}": (
        HistoryQuery,
        lambda runs, asked: history(_run(runs, asked.run), asked.rollout, asked.position),
    ),
    "/api/runs/{run}/types/{token_id}": (
        TypeQuery,
        lambda runs, asked: type_card(_run(runs, asked.run), asked.token_id),
    ),
    "/api/runs/{run}/knockouts": (RunQuery, lambda runs, asked: _bans(_run(runs, asked.run))),
    "/api/runs/{run}/knockouts/{token_id}": (
        PairsQuery,
        lambda runs, asked: knockout_pairs(_run(runs, asked.run), asked.token_id, asked.page),
    ),
    "/api/runs/{run}/live": (RunQuery, lambda runs, asked: live(_run(runs, asked.run))),
}
"""What a client may ask for: the path, what it may say, and the view that answers."""


def make_app(runs: Runs, token: str, hosts: Collection[str] = LOOPBACK) -> Starlette:
    """Make the explorer of these runs.

    Args:
        runs: what it shows; a client names them by their index.
        token: the secret first segment of every path.
        hosts: the names and addresses it may be called by.
    """
    routes = [Route("/", _page)]
    routes += [Route(path, _endpoint(query, answer, runs)) for path, (query, answer) in ANSWERS.items()]
    app = Starlette(
        routes=[Mount(f"/{token}", routes=routes)],
        middleware=[Middleware(Guard, token=token, hosts=hosts)],
        exception_handlers={HTTPException: _not_found},
        lifespan=lambda _: _warming(runs),
    )
    app.router.redirect_slashes = False
    return app


@asynccontextmanager
async def _warming(runs: Runs) -> AsyncIterator[None]:
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


def _endpoint(query: type[Query], answer: Answer, runs: Runs) -> Callable[[Request], Awaitable[Response]]:
    def body_of(record: dict[str, str]) -> str:
        return to_json(answer(runs, query.model_validate(record)))

    async def endpoint(request: Request) -> Response:
        try:
            body = await run_in_threadpool(body_of, _record(request))
        except ValidationError as error:
            return refused(400, _sentence(error))
        except RocktokensError as error:
            return refused(404, str(error))
        except Exception:
            _log.exception("no answer to %s", query.__name__)
            return refused(500, "the explorer failed to answer: its terminal says why")
        return Response(body, media_type="application/json")

    return endpoint


def _record(request: Request) -> dict[str, str]:
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
    if problem["type"] == "extra_forbidden":
        return f"{name} is not a parameter here: leave it out"
    if problem["type"] == "missing":
        return f"{name} is missing: give it"
    return f"{name} = {shown} is not valid: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def _run(runs: Runs, index: int) -> RunView:
    if index >= len(runs):
        raise RocktokensError(f"run {index} is not open: the runs are numbered from 0 to {len(runs) - 1}")
    return runs[index]


def _bans(run: RunView) -> dict[str, Any]:
    """List the bans, and α of their intervals."""
    return {"alpha": run.knockout and run.knockout.settings["alpha"], "bans": knockouts(run)}


def _overview(run: RunView) -> dict[str, Any]:
    rocks = run.rocks.tokens if run.rocks else ()
    return {
        "name": run.name,
        "checkpoints": run.checkpoints,
        "reference": run.reference,
        "summary": run.summary,
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
