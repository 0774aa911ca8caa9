"""A dataset of the Hugging Face Hub, or one that `datasets` reads from disk, as a task."""

import re
from pathlib import Path
from typing import Any

from rocktokens.config import HubTask
from rocktokens.errors import RocktokensError
from rocktokens.tasks.base import DatasetTask
from rocktokens.tasks.records import dataset_task

COMMIT = re.compile(r"[0-9a-f]{40}")
"""What `datasets` knows a dataset of the Hub by; others have hashes of another length."""


def load_hub(section: HubTask) -> DatasetTask:
    """Load one split of a dataset as a task: a hub id, or a local directory of Parquet, JSON or CSV files."""
    try:
        from datasets import load_dataset_builder
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise RocktokensError(
            "task.name is 'hub', which needs the package datasets: pip install 'rocktokens[hub]'"
        ) from None
    if section.revision is not None and Path(section.path).exists():
        raise RocktokensError(
            f"task.revision is {section.revision!r}, but task.path {section.path!r} is on this disk and has no "
            "revisions: leave it out"
        )
    try:
        builder = load_dataset_builder(section.path, section.subset, revision=section.revision)
        builder.download_and_prepare()
        dataset: Any = builder.as_dataset(split=section.split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = str(error).strip().splitlines()[0]
        pinned = f", revision {section.revision!r}" if section.revision else ""
        raise RocktokensError(
            f"task.path {section.path!r} (subset {section.subset!r}, split {section.split!r}{pinned}) cannot be loaded "
            f"({reason}): check the names and, for a hub id, the connection"
        ) from None
    records = ((f"row {index}", record) for index, record in enumerate(dataset))
    return dataset_task(section, records, builder.hash if COMMIT.fullmatch(builder.hash or "") else None)
