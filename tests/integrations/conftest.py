"""What every test of the TRL adapter stands on."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer

from rocktokens.models import pebbles


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(pebbles.directory("student"))


@pytest.fixture(autouse=True, scope="module")
def no_telemetry() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI", "1")
        yield
