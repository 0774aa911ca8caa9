from pathlib import Path

import pytest
import torch
from tiny_pair import write_pair


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
