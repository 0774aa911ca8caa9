"""The embedded pair, and its teacher behind a stand-in for a vLLM server."""

from collections.abc import Iterator

import pytest

from fake_vllm import FakeVllm, serving
from rocktokens.models.load import LoadedModel, load_model


@pytest.fixture(scope="module")
def teacher() -> LoadedModel:
    return load_model("pebbles-teacher", device="cpu")


@pytest.fixture(scope="module")
def student() -> LoadedModel:
    return load_model("pebbles-student", device="cpu")


@pytest.fixture
def fake(teacher: LoadedModel) -> FakeVllm:
    return FakeVllm(teacher.model, name=teacher.name, tokenizer=teacher.tokenizer)


@pytest.fixture
def url(fake: FakeVllm) -> Iterator[str]:
    with serving(fake) as url:
        yield url
