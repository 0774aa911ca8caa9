"""A dataset of the Hugging Face Hub, or one that `datasets` reads from disk, as a task."""

from collections.abc import Iterator, Mapping
from typing import Any

from rocktokens.config import HubTask
from rocktokens.errors import RocktokensError
from rocktokens.tasks.base import DatasetTask
from rocktokens.tasks.jsonl import dataset_task


def load_hub(section: HubTask) -> DatasetTask:
    """The task over one split of a dataset: a hub id, or a local directory of Parquet, JSON or CSV files."""
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise RocktokensError(
            "task.name is 'hub', which needs the package datasets: pip install 'rocktokens[hub]'"
        ) from None
    try:
        dataset = load_dataset(section.path, section.subset, split=section.split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RocktokensError(
            f"task.path {section.path!r} (subset {section.subset!r}, split {section.split!r}) cannot be loaded "
            f"({reason}): check the names and, for a hub id, the connection"
        ) from None
    return dataset_task(section, _records(dataset))


def _records(dataset: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for index, record in enumerate(dataset):
        yield f"row {index}", record
