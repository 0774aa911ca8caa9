"""What the benchmarks share: the line about the machine, tables as Markdown, and sizes such as 1e5."""

import datetime
import os
import platform
from collections.abc import Sequence

import psutil

from rocktokens.run_dir import package_versions


def machine(packages: Sequence[str], cores: int | None = None) -> str:
    """Date, machine and versions; ``cores`` are those the benchmark uses, where that is fewer than there are."""
    used = f"{cores} of {os.cpu_count()} cores" if cores else f"{os.cpu_count()} cores"
    memory = psutil.virtual_memory().total / (1 << 30)
    versions = ", ".join(f"{name} {version}" for name, version in package_versions(packages).items())
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"{today}, {platform.system()} {platform.machine()}, {used}, {memory:.0f} GiB, load {os.getloadavg()[0]:.1f}\n"
        f"{versions}"
    )


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As Markdown."""
    lines = [header, ["---:"] * len(header), *rows]
    print("".join(f"| {' | '.join(line)} |\n" for line in lines), flush=True)


def whole(text: str) -> int:
    """A whole number, also one such as 1e5."""
    return int(float(text))
