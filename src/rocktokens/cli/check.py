"""stub"""


def check() -> None:
    """Check."""
