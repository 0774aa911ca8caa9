"""Pages of a list, counted from 0."""

from typing import TypeVar

from rocktokens.errors import RocktokensError

PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
Item = TypeVar("Item")


def page_of(items: list[Item], page: int, size: int) -> list[Item]:
    """One page of items; nothing beyond the last."""
    if page < 0:
        raise RocktokensError(f"page = {page} is not valid: pages are counted from 0")
    if not 1 <= size <= MAX_PAGE_SIZE:
        raise RocktokensError(f"size = {size} is not valid: give 1 to {MAX_PAGE_SIZE} rows a page")
    return items[page * size : (page + 1) * size]
