from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_pair import tiny_config, write_pair
from update_oracle import make_rollout

from rocktokens.tasks import make_task
from rocktokens.training.session import Session, make_accelerator, make_session
from rocktokens.types import Rollout


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny student, teacher and task."""
    directory = tmp_path_factory.mktemp("pair")
    write_pair(directory)
    return directory


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Equality to the last bit is promised for a fixed number of threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def rollouts() -> list[Rollout]:
    """Eight, of all lengths."""
    rng = np.random.default_rng(5)
    return [make_rollout(index, rng) for index in range(8)]


@pytest.fixture
def open_session(pair, tmp_path):
    """Make the session of a tiny config with overrides."""

    def open_with(*overrides: str) -> Session:
        config = tiny_config(pair, tmp_path / "run", *overrides)
        return make_session(config, make_task(config.task), make_accelerator(config), None, None)

    return open_with
