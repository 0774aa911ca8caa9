"""Whether Triton kernels can run here."""

from functools import cache
from importlib import import_module


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    try:
        import_module("triton.language")
    except ImportError:
        return False
    return True
