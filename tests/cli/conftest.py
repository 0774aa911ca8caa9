from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import FinishedRun, Outcome, succeed, write_config
from transformers.utils import logging


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Equality to the last bit is promised for a fixed number of threads."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    """The command silences transformers before importing it, which here may have happened already."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(autouse=True, scope="session")
def _offline() -> Iterator[None]:
    """For all runs alike: transformers writes it into the tokenizer's files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A complete run; tests that write take a copy of it, or leave it as it was."""
    folder = tmp_path_factory.mktemp("finished")
    run, config = folder / "run", write_config(folder / "run.toml", folder / "run")
    outcomes: dict[str, Outcome] = {
        "distill": succeed("distill", config, "--json"),
        "trace": succeed("trace", config, "--json"),
        "find": succeed("find", run, "--json"),
        "evaluate": succeed("evaluate", run, "--checkpoint", "all", "--checkpoint", "teacher", "--json"),
    }
    return FinishedRun(run, config, outcomes)


@pytest.fixture(scope="session")
def replayed(finished: FinishedRun) -> Path:
    """The same training again, from nothing but the config the first run wrote."""
    other = finished.path.with_name("replayed")
    succeed("distill", finished.path / "config.toml", "--set", f"run.directory={other}")
    return other
