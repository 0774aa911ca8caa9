"""The matrix products that a model computes, for the tests of those that are joined."""

import pytest
from torch import nn


@pytest.fixture
def products(monkeypatch):
    """How many rows the matrix of each product has."""
    seen, linear = [], nn.functional.linear

    def counted(x, weight, bias=None):
        seen.append(len(weight))
        return linear(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", counted)
    return seen
