"""What the explorer's page may ask, and the answers: one table of routes for the server and for a bundle.

1. A route is a method of ``Answers``; its parameters are everything a client may say there, path and query alike,
   checked by type and range. Runs are named by their number: no path of a client reaches the file system.
2. ``Answers.ask`` answers one route as JSON. ``address`` names what was asked: the server's URL, a bundle's block.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any
from urllib.parse import urlencode

from pydantic import Field, validate_call

from rocktokens.display.rocks import label_sentence, rock_table
from rocktokens.display.table import Table
from rocktokens.display.text import legible
from rocktokens.report.explorer.shelf import Listing, Shelf
from rocktokens.report.tables import class_table
from rocktokens.report.views.classes import class_views
from rocktokens.report.views.knockout_pairs import knockout_pairs, knockouts
from rocktokens.report.views.live import live
from rocktokens.report.views.rollout_list import PAGE_SIZE, SORTS, Filters, rollouts
from rocktokens.report.views.run_row import RunRow, run_list_table
from rocktokens.report.views.run_view import MAX_TOKEN_TEXT, RunView, to_json
from rocktokens.report.views.strips import rollout_strip
from rocktokens.report.views.type_card import history, type_card
from rocktokens.types import Category, of_teacher

Index = Annotated[int, Field(ge=0, lt=2**31)]
RolloutId = Annotated[int, Field(ge=0, lt=2**63)]
Nats = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]

ROUTES = {
    "runs": "runs",
    "runs/{run}": "overview",
    "runs/{run}/version": "version",
    "runs/{run}/rollouts": "rollouts",
    "runs/{run}/rollouts/{rollout}": "strip",
    "runs/{run}/rollouts/{rollout}/history": "history",
    "runs/{run}/types/{token_id}": "type_card",
    "runs/{run}/classes": "classes",
    "runs/{run}/knockouts": "bans",
    "runs/{run}/knockouts/{token_id}": "pairs",
    "runs/{run}/live": "live",
}
"""Names of methods by route."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of the runs is shown; a server shows everything."""

    rollouts: Mapping[int, Collection[int]] = field(default_factory=dict)
    """The rollouts that are shown, by the number of the run; all of a run that is not named."""
    pairs: int = PAGE_SIZE
    """Answers with and without a ban on a page."""


def address(route: str, **said: object) -> str:
    """Name what is asked: the route with its numbers, and the rest as a query in the order of names."""
    query = {name: said[name] for name in sorted(said) if f"{{{name}}}" not in route}
    path = route.format(**said)
    return f"{path}?{urlencode(query)}" if query else path


class Answers:
    """Answers to what clients ask; the types of the parameters say what a client may say."""

    def __init__(self, shelf: Shelf, extent: Extent | None = None) -> None:
        self._shelf = shelf
        self._extent = extent or Extent()
        self._checked = {route: validate_call(getattr(self, name)) for route, name in ROUTES.items()}

    def ask(self, route: str, **said: Any) -> str:
        """Answer a route as JSON."""
        return to_json(self._checked[route](**said))

    def runs(self) -> Any:
        """List the runs, looked for again."""
        return run_list(self._shelf.listing(time.time()), opens_a_run=self._shelf.n_given > 0)

    def overview(self, *, run: Index) -> Any:
        """Show the checkpoints and the rocks of a run."""
        version = self._shelf.version(run)
        return {"version": version, **_overview(self._shelf.view(run))}

    def version(self, *, run: Index) -> Any:
        """Name the present content of a run, so that a page knows whether it shows it."""
        return {"version": self._shelf.version(run)}

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
        among = self._extent.rollouts.get(run)
        filters = Filters(checkpoint, rock, token_id, category, kl_low, kl_high, text, correct, banned, sort, among)
        return rollouts(self._shelf.view(run), filters, page)

    def strip(self, *, run: Index, rollout: RolloutId, checkpoint: Index | None = None) -> Any:
        """Show one rollout, token by token."""
        return rollout_strip(self._shelf.view(run), rollout, checkpoint)

    def history(self, *, run: Index, rollout: RolloutId) -> Any:
        """Follow the kl of each token of a rollout through the checkpoints."""
        return history(self._shelf.view(run), rollout)

    def type_card(self, *, run: Index, token_id: Index) -> Any:
        """Show what is known of one type, and where it occurs."""
        return type_card(self._shelf.view(run), token_id, self._extent.rollouts.get(run))

    def classes(self, *, run: Index) -> Any:
        """List the classes of interchangeable tokens."""
        views = class_views(self._shelf.view(run))
        return {"classes": views, "table": _shown(class_table(views))}

    def bans(self, *, run: Index) -> Any:
        """List the bans, and α of their intervals."""
        view = self._shelf.view(run)
        return {"alpha": view.knockout and view.knockout.settings.alpha, "bans": knockouts(view)}

    def pairs(self, *, run: Index, token_id: Index, page: Index = 0) -> Any:
        """Show a page of the answers without and with the ban of a type."""
        return knockout_pairs(self._shelf.view(run), token_id, page, self._extent.pairs)

    def live(self, *, run: Index) -> Any:
        """Show where training stands."""
        return live(self._shelf.view(run))


def run_list(listing: Listing, opens_a_run: bool) -> dict[str, Any]:
    """Describe the runs of a list; ``opens_a_run`` says whether a page begins with one of them or with the list."""
    return {
        "opens_a_run": opens_a_run,
        "left_out": listing.left_out,
        "runs": [{"number": number, "name": row.name, "view": _first_view(row)} for number, row in listing.rows],
        "table": run_list_table([row for _, row in listing.rows]),
    }


def _first_view(row: RunRow) -> str:
    """Name the view that a run of the list leads to: the first that has something to show."""
    if "traces" in row.stages:
        return "rollouts"
    return "rocks" if row.step is None else "live"


def _overview(run: RunView) -> dict[str, Any]:
    rocks = run.rocks.tokens if run.rocks else ()
    return {
        "name": run.name,
        "teacher": of_teacher(run.teacher_label),
        "checkpoints": run.checkpoints,
        "checkpoint_names": run.checkpoint_names,
        "reference": run.reference,
        "ungraded": run.ungraded,
        "unmarked": run.unmarked,
        "summary": run.rocks and run.rocks.summary,
        "labels": label_sentence(run.rocks) if run.rocks else "",
        "table": run.rocks and _shown(rock_table(run.rocks, both_labels=True)),
        "rocks": [replace(rock, text=legible(rock.text, MAX_TOKEN_TEXT)) for rock in rocks],
    }


def _shown(table: Table) -> Table:
    """Leave out the records, which are for a spreadsheet."""
    return replace(table, records=())
