"""A dataset of the Hugging Face Hub, or one that `datasets` reads from disk, as a task."""

from typing import Any

from rocktokens.config import HubTask
from rocktokens.errors import RocktokensError
from rocktokens.tasks.base import DatasetTask
from rocktokens.tasks.jsonl import dataset_task


def load_hub(section: HubTask) -> DatasetTask:
    """Load one split of a dataset as a task: a hub id, or a local directory of Parquet, JSON or CSV files."""
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise RocktokensError(
            "task.name is 'hub', which needs the package datasets: pip install 'rocktokens[hub]'"
        ) from None
    try:
        dataset: Any = load_dataset(section.path, section.subset, split=section.split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RocktokensError(
            f"task.path {section.path!r} (subset {section.subset!r}, split {section.split!r}) cannot be loaded "
            f"({reason}): check the names and, for a hub id, the connection"
        ) from None
    return dataset_task(section, ((f"row {index}", record) for index, record in enumerate(dataset)))
