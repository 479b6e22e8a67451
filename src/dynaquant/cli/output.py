"""Printing text, tables, JSON and progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from dynaquant.formatting import in_bytes

if TYPE_CHECKING:
    from dynaquant.saving.record import Size

T = TypeVar("T")


def table(*columns: str) -> Table:
    """Return an empty table whose first column is text and whose other columns are numbers."""
    empty = Table(header_style="bold")
    for i, column in enumerate(columns):
        empty.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    return empty


def add(to: Table, *cells: str) -> None:
    """Add a row to a table."""
    to.add_row(*(Text(cell) for cell in cells))  # as Text, so that rich does not interpret names as markup


def print_(what: Any) -> None:
    """Print text or a table."""
    console = Console(highlight=False, markup=False)
    if not sys.stdout.isatty():  # even if FORCE_COLOR makes rich take the output for a terminal
        console.width = 1_000_000  # a pipe has no width, so no table is folded or cut
    console.print(what, soft_wrap=isinstance(what, str))


def print_json(value: Any) -> None:
    """Print JSON."""
    json.dump(value, sys.stdout, indent=1, allow_nan=False)
    print()


def print_result(as_json: bool, text: str, **facts: Any) -> None:
    """Print what a command did: the text, or with ``as_json`` the facts as JSON."""
    if as_json:
        print_json(facts)
    else:
        print_(text)


def with_progress(items: Iterable[T], description: str, count: int) -> Iterable[T]:
    """Iterate over the items and show a progress bar if stderr is a terminal."""
    console = Console(stderr=True)
    return track(items, description, total=count, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Give a function that shows a text as the current status if stderr is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _text: None
        return
    with console.status("") as status:
        yield status.update


def list_of(steps: Iterable[int]) -> str:
    """Format how many steps there are, and which: ``2 (100, 200)``."""
    listed = sorted(steps)
    return f"{len(listed)} ({', '.join(map(str, listed))})" if listed else "none"


def reduction(size: Size) -> str:
    """Format the stored size beside the size as tensors: ``12.42 MB instead of 90.86 MB (7.32×)``."""
    return f"{in_bytes(size.stored)} instead of {in_bytes(size.raw)} ({size.ratio:.2f}×)"


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
