"""Whether Triton's kernels can run."""

from functools import cache


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
