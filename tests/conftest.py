"""The order of the suite: files that take longest begin first, so that no worker is left alone with one at the end.

And what every test may take for granted: an interrupt is obeyed.
"""

import gc
import signal
from pathlib import Path

import pytest

from warm_process import start_server

HERE = Path(__file__).parent
LONGEST = (
    "test_pipeline.py",
    "knockout/test_sweep.py",
    "scoring/test_fused.py",
    "report/test_server_browser.py",
    "cli/test_cli_study.py",
    "crash/test_crash.py",
    "campaigns/test_campaigns.py",
    "integrations/test_trl.py",
    "traces/test_spark.py",
    "training/test_distill.py",
    "report/test_page_browser.py",
    "models/test_smollm2.py",
    "rocks/test_search.py",
    "studies/test_study_without_cli.py",
    "gradients/test_sharded_gradients.py",
    "cli/test_tutorial.py",
    "test_quickstart.py",
)
"""Files of half a minute or more on one of two busy cores."""


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """A script that starts the suite in the background has it ignore interrupts, which tests send to be obeyed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let every worker of a whole suite have its server of warm processes, which imports while tests are collected.

    Imports and collection make a million objects that stay: looking for garbage among them takes two seconds.
    """
    gc.set_threshold(0)
    if hasattr(session.config, "workerinput"):
        start_server()


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of later garbage collections, which are rarer too: both take less time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def pytest_sessionfinish() -> None:
    """Collect that too at the end: DuckDB counts what is left when the process ends as leaked, and prints it."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gone = [name for name in LONGEST if not (HERE / name).exists()]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py orders {', '.join(gone)}, which does not exist: remove it there")
    places = {HERE / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
