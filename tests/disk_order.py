"""What a process told the disk, in order: which files it flushed, and what it renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

Inode = tuple[int, int]


@dataclass
class DiskOrder:
    """Flushes since the start, and of every rename what had not been flushed before and whether its folder was after.

    A file is known by its inode: a rename changes its name, and a flush is of a descriptor.
    """

    renamed: list[Path] = field(default_factory=list)
    """Targets, in order."""
    unflushed: list[Path] = field(default_factory=list)
    """Files that were renamed, or lay in a folder that was, without having been flushed."""
    flushed: set[Inode] = field(default_factory=set)
    waiting: dict[Inode, Path] = field(default_factory=dict)
    """Folders that a name entered and that have not been flushed since."""


def inode(path: Path | int) -> Inode:
    status = os.fstat(path) if isinstance(path, int) else path.stat()
    return status.st_dev, status.st_ino


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskOrder]:
    """Record flushes and renames of this process; both still happen."""
    order, flush, rename = DiskOrder(), os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        order.flushed.add(inode(descriptor))
        order.waiting.pop(inode(descriptor), None)

    def replace(source: Path, target: Path) -> None:
        files = [Path(source), *(Path(source).rglob("*") if Path(source).is_dir() else ())]
        order.unflushed += [file for file in files if inode(file) not in order.flushed]
        rename(source, target)
        order.renamed.append(Path(target))
        order.waiting[inode(Path(target).parent)] = Path(target).parent

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "replace", replace)
        yield order
