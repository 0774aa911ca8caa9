"""What all campaigns share: cases by number, a judge in a process of its own, a journal, a budget and a table.

1. A case is a kind and a number. All that is random about it comes from its id, such as ``fuzzing/config/17``, so the
   id makes it again: ``python tests/campaigns/run_campaigns.py --case fuzzing/config/17``.
2. Cases are judged by a process that is forked from a server which has imported everything. What ends that process, or
   takes longer than a case may, is a failure of the case it was at; another process goes on with the next.
3. Every result is appended to a journal, build/campaigns/NAME.jsonl: an interrupted campaign goes on where it was, and
   judges again what failed.
4. A campaign stops at its budget, and says how many cases are left.
5. In the end come a table of kinds and outcomes, and every failing case by its id.

``make test`` judges the first few cases of every kind, ``make campaign`` all of them; there is no other difference.
"""

import hashlib
import json
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

from warm_process import SERVER

ROOT = Path(__file__).parents[2]
JOURNALS = ROOT / "build" / "campaigns"
PREPARATION = 900.0
"""Seconds that making what the cases need may take."""
TOLD = 1500
"""Characters of a failure that are kept."""
READY = None
"""What a process says when it has made what the cases need."""
Judge = Callable[[str, int], str]
"""Tries a case, by kind and number: the outcome in a word. Raises where a promise is broken."""


class BrokenPromiseError(Exception):
    """What a case found that must not be."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """One way of attacking, with its cases."""

    name: str
    full: Mapping[str, int]
    """Cases of every kind."""
    sample: Mapping[str, int]
    """Cases of some kinds that every run of the test suite tries."""
    limit: float
    """Seconds after which a case hangs."""
    opened: Callable[[Path], AbstractContextManager[Judge]]
    """Makes what the cases need in a folder, where an earlier process has not, and gives the judge."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one case."""

    case: str
    outcome: str
    """In a word; "failed" where a promise was broken."""
    failure: str = ""
    seconds: float = 0.0
    source: str = ""
    """Names the code that was attacked."""

    @property
    def kind(self) -> str:
        """The kind of the case."""
        return self.case.split("/")[1]


def case_id(campaign: str, kind: str, number: int) -> str:
    """The name of a case, which is also its seed."""
    return f"{campaign}/{kind}/{number}"


def chance(campaign: str, kind: str, number: int) -> random.Random:
    """All the randomness of a case."""
    return random.Random(case_id(campaign, kind, number))


def cases_of(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Kinds and numbers, the kinds in turn: whenever a campaign stops, it has tried all of them."""
    longest = max(counts.values())
    return [(kind, number) for number in range(longest) for kind, count in counts.items() if number < count]


@cache
def source_sha256() -> str:
    """Names the code of the package."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


# Judging


def judged(campaign: Campaign, cases: Sequence[tuple[str, int]], folder: Path, until: float) -> Iterator[Result]:
    """Judge cases one after the other, each as soon as it is asked for, until a moment of ``time.monotonic``."""
    left = list(cases)
    while left and time.monotonic() < until:
        own, other = SERVER.Pipe()
        process = SERVER.Process(target=_work, args=(campaign, left, folder, other))
        process.start()
        other.close()
        try:
            for result in _heard(own, campaign, left):
                left.pop(0)
                yield result
                if time.monotonic() >= until:
                    return
        finally:
            process.kill()
            process.join()
            own.close()


def _heard(connection: Connection, campaign: Campaign, left: Sequence[tuple[str, int]]) -> Iterator[Result]:
    """Yield results until all are there or the process has ended or hung, which is the last result then."""
    prepared = _answer(connection, PREPARATION)
    for kind, number in list(left):
        began = time.monotonic()
        answer = _answer(connection, campaign.limit) if prepared is READY else prepared
        if isinstance(answer, Result):
            yield answer
            continue
        seconds = time.monotonic() - began
        yield Result(case_id(campaign.name, kind, number), "failed", answer, round(seconds, 2), source_sha256())
        return


def _answer(connection: Connection, limit: float) -> "Result | str | None":
    """What a process says next, or why it says nothing."""
    try:
        return connection.recv() if connection.poll(limit) else "hangs"
    except EOFError:
        return "ended the process"


def _work(campaign: Campaign, cases: Sequence[tuple[str, int]], folder: Path, connection: Connection) -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()  # as the command does, before it is imported
    logging.disable_progress_bar()
    with campaign.opened(folder) as judge:
        connection.send(READY)
        for kind, number in cases:
            connection.send(_result(campaign.name, judge, kind, number))


def _result(campaign: str, judge: Judge, kind: str, number: int) -> Result:
    began, failure = time.monotonic(), ""
    try:
        outcome = judge(kind, number)
    except BrokenPromiseError as error:
        outcome, failure = "failed", str(error)
    except BaseException:
        outcome, failure = "failed", f"traceback: {traceback.format_exc()[-TOLD:]}"
    seconds = round(time.monotonic() - began, 2)
    return Result(case_id(campaign, kind, number), outcome, failure[:TOLD], seconds, source_sha256())


# The journal


def journal_of(campaign: Campaign) -> Path:
    """Where the results of a campaign are kept."""
    return JOURNALS / f"{campaign.name}.jsonl"


def known_results(journal: Path) -> dict[str, Result]:
    """The latest result of every case; a line that an interrupt has torn is none."""
    known: dict[str, Result] = {}
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() else ():
        try:
            result = Result(**json.loads(line))
        except (ValueError, TypeError):
            continue
        known[result.case] = result
    return known


def run_campaign(
    campaign: Campaign, counts: Mapping[str, int], folder: Path, journal: Path, budget: float
) -> list[Result]:
    """Judge what the journal does not know or has as failed; the results of all cases that have one."""
    known, cases = known_results(journal), cases_of(counts)
    names = {case_id(campaign.name, *case): case for case in cases}
    left = [case for name, case in names.items() if name not in known or known[name].failure]
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a", encoding="utf-8") as file:
        if journal.stat().st_size and not journal.read_bytes().endswith(b"\n"):
            file.write("\n")  # behind what an interrupt has torn
        for result in judged(campaign, left, folder, time.monotonic() + budget):
            known[result.case] = result
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
    return [known[name] for name in names if name in known]


# The table


def table_of(campaign: Campaign, counts: Mapping[str, int], results: Iterable[Result]) -> str:
    """Kinds, cases and outcomes in columns; then what is left, what is old, and every failing case."""
    found = list(results)
    tried, outcomes = Counter(own.kind for own in found), sorted({own.outcome for own in found} - {"failed"})
    by_kind = Counter((own.kind, own.outcome) for own in found)
    columns = [*outcomes, "failed"]
    width = max(map(len, (*counts, campaign.name)))
    lines = ["  ".join([f"{campaign.name:{width}}", f"{'tried':>8}", *(f"{name:>12}" for name in columns)])]
    for kind in counts:
        cells = (f"{by_kind[kind, name]:12,}" for name in columns)
        lines.append("  ".join([f"{kind:{width}}", f"{tried[kind]:8,}", *cells]))
    totals = (f"{sum(own.outcome == name for own in found):12,}" for name in columns)
    lines.append("  ".join([f"{'all':{width}}", f"{len(found):8,}", *totals]))
    old = sum(own.source != source_sha256() for own in found)
    lines.append(
        f"{sum(counts.values()) - len(found):,} cases left, {old:,} judged on other sources than now, "
        f"{sum(own.seconds for own in found) / 60:.1f} minutes of cases"
    )
    lines += [f"FAILED {own.case}: {own.failure.strip()}" for own in found if own.failure]
    return "\n".join(lines)
