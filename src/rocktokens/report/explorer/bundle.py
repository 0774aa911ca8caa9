"""A bundle: the explorer's page with its data inside, in a folder that opens from a disk without a server.

1. The data are the server's answers (answers.py) to what the page may ask: each is JSON packed with zlib, in base64, in
   an element of a type that no browser executes, named by the address that a server would have answered.
2. What the views of a run open with is always there. Then come, as far as the run's share of the bundle has room: whole
   rollouts at all checkpoints, those that show most first; lists of these; answers with and without bans; cards of
   types. A run prefers the rollouts of those before it where the prompts are the same, so that they can be compared.
3. What was left out is said on the page and by the command.
4. The same runs give the same bytes: nothing depends on the clock or on where the runs lie.
"""

import base64
import html
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rocktokens.display.numbers import byte_size, count, listed
from rocktokens.errors import RocktokensError
from rocktokens.progress import SILENT, Progress
from rocktokens.report.explorer.answers import Answers, Extent, address, run_list
from rocktokens.report.explorer.page import DATA, HEAD, page, policy
from rocktokens.report.explorer.shelf import Listing, Shelf
from rocktokens.report.views.knockout_pairs import knockouts
from rocktokens.report.views.rollout_list import SORTS
from rocktokens.report.views.run_view import RunView, to_json
from rocktokens.report.views.strips import interesting_rollouts
from rocktokens.run_dir import write_atomically

MAX_BYTES = 32_000_000
MAX_RUNS = 20
MAX_ROLLOUTS, MAX_PAIRS, MAX_TYPES = 100, 10, 300
"""Of each run, of each ban, of each run."""
ROLLOUTS_SHARE = 0.7
"""Of the room of a run, what its rollouts may take, so that the rest finds some."""
ORDERS = [f"{sign}{name}" for name in SORTS for sign in ("", "-")]
LIST_ROOM = 1000
"""Bytes of a run in the list of runs, with what is said of it."""
MARK = "bundle.json"
"""The file that tells a bundle from a folder of something else."""
FORMAT = 1
LISTED_BY = {"sort": SORTS[0], "page": 0}

Asked = tuple[str, dict[str, Any]]
"""A route, and what is said there."""


@dataclass(frozen=True, slots=True)
class BundleSummary:
    """What was written."""

    page: Path
    bytes: int
    runs: tuple[str, ...]
    left_out: tuple[str, ...]
    """What the bundle does not show, a sentence each."""

    def to_record(self) -> dict[str, Any]:
        """Return plain values, as ``rocktokens explore --bundle --json`` prints them."""
        return {**asdict(self), "page": str(self.page)}


def write_bundle(shelf: Shelf, folder: Path, progress: Progress = SILENT, max_bytes: int = MAX_BYTES) -> BundleSummary:
    """Write the bundle of the runs on a shelf; an earlier bundle in the folder is replaced, and nothing else is.

    Args:
        shelf: the runs.
        folder: where to; a new or empty folder, or one that holds a bundle.
        progress: where to report what is going on.
        max_bytes: of the page.
    """
    _require_free(folder)
    listing = shelf.listing(now=None)
    for _, row in listing.rows:
        if row.problem:
            raise RocktokensError(row.problem)
    kept = listing.rows[:MAX_RUNS]
    left_out = [listing.left_out] if listing.left_out else []
    if len(listing.rows) > MAX_RUNS:
        left_out.append(f"The bundle shows the first {MAX_RUNS} of {count(len(listing.rows))} runs.")
    packing = _Packing(max_bytes - len(_document({}).encode()) - LIST_ROOM * (1 + len(kept)))
    with progress.bar("packing", len(kept)) as advance:
        for place, (number, row) in enumerate(kept):
            sentence = _pack_run(packing, shelf, number, packing.room - packing.room // (len(kept) - place))
            left_out += [f"{row.name}: {sentence}"] if sentence else []
            advance(1)
    names = tuple(row.name for _, row in kept)
    runs = run_list(Listing(kept, " ".join(left_out)), opens_a_run=shelf.n_given > 0)
    packing.blocks["runs"] = _packed(to_json(runs))
    text = _document(packing.blocks).encode()
    if len(text) > max_bytes:
        raise RocktokensError(f"the list of {len(kept)} runs does not fit into {byte_size(max_bytes)}: give fewer runs")
    mark = {"rocktokens_bundle": FORMAT, "runs": names, "left_out": left_out}
    try:
        _write(folder / MARK, json.dumps(mark, indent=2, ensure_ascii=False).encode() + b"\n")
        _write(folder / "index.html", text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RocktokensError(f"the bundle cannot be written to {folder} ({reason}): give another folder") from None
    return BundleSummary(folder / "index.html", len(text), names, tuple(left_out))


@dataclass(slots=True)
class _Packing:
    """The blocks of a bundle, and the bytes that are left for more."""

    room: int
    blocks: dict[str, str] = field(default_factory=dict)
    rollouts: dict[int, str] = field(default_factory=dict)
    """Prompts of the rollouts that are shown of runs so far, by rollout."""

    def add(self, answers: Answers, asked: Sequence[Asked], at_most: int) -> int:
        """Add the answers to all of these, or to none where they need more than ``at_most`` bytes; say how many."""
        new = {address(route, **said): _packed(answers.ask(route, **said)) for route, said in asked}
        size = sum(len(_block(name, packed)) + 1 for name, packed in new.items())
        if size > min(at_most, self.room):
            return 0
        self.blocks |= new
        self.room -= size
        return size


def _document(blocks: dict[str, str]) -> str:
    """Return the page with its policy and its data."""
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy())}">\n'
        '<meta name="referrer" content="no-referrer">'
    )
    data = "\n".join(_block(name, packed) for name, packed in blocks.items())
    return page().replace(HEAD, head).replace(DATA, data)


def _pack_run(packing: _Packing, shelf: Shelf, number: int, for_others: int) -> str:
    """Pack what a run shows, so that some room is left for the others, and say what was left out."""
    view, everything = shelf.view(number), Answers(shelf)
    opening = [(f"runs/{{run}}{part}", {"run": number}) for part in ("", "/classes", "/knockouts", "/live")]
    room = packing.room - for_others
    if not packing.add(everything, opening, room):
        raise RocktokensError(
            f"the bundle would be larger than it may be, for the tables of {view.name} alone need more than "
            f"{byte_size(room)}: give fewer runs"
        )
    if view.reference is None:
        return ""
    room = int(ROLLOUTS_SHARE * (packing.room - for_others))
    shown = _pack_rollouts(packing, everything, view, number, room)
    answers = Answers(shelf, Extent({number: shown}, MAX_PAIRS))
    for group in _about_rollouts(view, number, shown):
        packing.add(answers, group, packing.room - for_others)
    return _left_out(packing, view, number, shown)


def _pack_rollouts(packing: _Packing, answers: Answers, view: RunView, number: int, room: int) -> list[int]:
    """Pack whole rollouts until one does not fit, and list them."""
    shown, index = [], view.index()
    for rollout in _preferred(view, packing.rollouts):
        used = packing.add(answers, list(_whole_rollout(view, number, rollout)), room)
        if not used:
            break
        shown.append(rollout)
        packing.rollouts[rollout] = index.prompt_ids_R[index.place(rollout)]
        room -= used
    return shown


def _about_rollouts(view: RunView, number: int, shown: Sequence[int]) -> Iterator[list[Asked]]:
    """What is known besides the rollouts themselves, in groups that make sense only as a whole."""
    yield from ([own] for own in _lists(view, number))
    for token_id in _banned(view):
        yield [("runs/{run}/knockouts/{token_id}", {"run": number, "token_id": token_id, "page": 0})]
    marked = _marked_types(view)
    for token_id in [*marked, *_types_of(view, shown)][:MAX_TYPES]:
        yield list(_card(view, number, token_id, token_id in marked))


def _whole_rollout(view: RunView, number: int, rollout: int) -> Iterator[Asked]:
    """Everything of one rollout."""
    for step in view.checkpoints:
        if rollout in view.index(step).rollout_ids_R:
            yield "runs/{run}/rollouts/{rollout}", {"run": number, "rollout": rollout, "checkpoint": step}
    yield "runs/{run}/rollouts/{rollout}/history", {"run": number, "rollout": rollout}


def _lists(view: RunView, number: int) -> Iterator[Asked]:
    """The list of rollouts in every order."""
    for step in view.checkpoints:
        for order in ORDERS:
            yield "runs/{run}/rollouts", {"run": number, "checkpoint": step, "sort": order, "page": 0}


def _card(view: RunView, number: int, token_id: int, is_marked: bool) -> Iterator[Asked]:
    """What is known of a type; of one that tables lead to, the rollouts that hold it too."""
    yield "runs/{run}/types/{token_id}", {"run": number, "token_id": token_id}
    for step in view.checkpoints if is_marked else ():
        yield "runs/{run}/rollouts", {"run": number, "checkpoint": step, "token_id": token_id, **LISTED_BY}


def _preferred(view: RunView, shown: dict[int, str]) -> list[int]:
    """Choose rollouts: those that other runs show of the same prompts, then those that show most."""
    index = view.index()
    prompts = dict(zip(index.rollout_ids_R.tolist(), index.prompt_ids_R, strict=True))
    shared = [rollout for rollout, prompt in shown.items() if prompts.get(rollout) == prompt]
    return list(dict.fromkeys([*shared, *interesting_rollouts(view, MAX_ROLLOUTS)]))[:MAX_ROLLOUTS]


def _marked_types(view: RunView) -> list[int]:
    """Types that tables lead to: rocks, banned ones, members of classes."""
    members = [token_id for own in view.classes or () for token_id in own.ids]
    return list(dict.fromkeys([*view.rock_ranks, *_banned(view), *members]))


def _types_of(view: RunView, rollouts: Sequence[int]) -> list[int]:
    """The other types of some rollouts, frequent ones first."""
    index, marked = view.index(), set(_marked_types(view))
    tokens = [index.tokens(index.place(rollout)) for rollout in rollouts]
    ids, counts = np.unique(np.concatenate([*tokens, np.array([], np.int32)]), return_counts=True)
    ranked = sorted(zip((-counts).tolist(), ids.tolist(), strict=True))
    return [token_id for _, token_id in ranked if token_id not in marked]


def _banned(view: RunView) -> list[int]:
    """The types that stand for bans on the page: its own, or for a set one that was not banned alone."""
    bans = [ban.ids for ban in knockouts(view)]
    alone = [ids[0] for ids in bans if len(ids) == 1]
    sets = [next((own for own in ids if own not in alone), None) for ids in bans if len(ids) > 1]
    return [*alone, *(own for own in dict.fromkeys(sets) if own is not None)]


def _left_out(packing: _Packing, view: RunView, number: int, shown: Sequence[int]) -> str:
    """Say what of a run the bundle does not show; empty where it shows everything but searches."""
    n_rollouts, types = len(view.index().rollout_ids_R), _types_of(view, view.index().rollout_ids_R.tolist())
    wanted = [*_marked_types(view), *types]
    cards = sum(address("runs/{run}/types/{token_id}", run=number, token_id=own) in packing.blocks for own in wanted)
    said = []
    if len(shown) < n_rollouts:
        said.append(f"{count(len(shown))} of {count(n_rollouts)} rollouts")
    if cards < len(wanted):
        said.append(f"details of {count(cards)} of {count(len(wanted))} token types")
    if view.knockout is not None:
        said.append(f"at most {MAX_PAIRS} answers per ban")
    return f"the bundle holds {listed(said)}." if said else ""


def _packed(answer: str) -> str:
    return base64.b64encode(zlib.compress(answer.encode(), level=9)).decode()


def _block(name: str, packed: str) -> str:
    return f'<script type="application/zlib" data-ask="{html.escape(name)}">{packed}</script>'


def _require_free(folder: Path) -> None:
    """Refuse a folder that holds something else than a bundle."""
    if folder.exists() and not folder.is_dir():
        raise RocktokensError(f"{folder} is a file: give --bundle a new folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    try:
        is_bundle = "rocktokens_bundle" in json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        is_bundle = False
    if not is_bundle:
        raise RocktokensError(f"{folder} holds files that are no bundle: give --bundle a new or empty folder")


def _write(path: Path, content: bytes) -> None:
    write_atomically(path, lambda temporary: temporary.write_bytes(content))
