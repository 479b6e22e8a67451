"""Printing text, tables, JSON and progress."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import rich.box
import rich.table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import track
from rich.segment import Segment
from rich.text import Text

from dynaquant.formatting import in_bytes

if TYPE_CHECKING:
    from dynaquant.saving.record import Size

T = TypeVar("T")


MOST_BY_RICH = 200
"""Rows of a table that rich draws. Larger ones are drawn here, without bold titles."""
WIDTH = 80
"""Columns of an output that has no width of its own, such as a pipe."""


class Table:
    """A table that fits the width that there is.

    columns: their titles. The first column, tags and a column without a title are text, the others are numbers.
    optional: titles of columns that are left out of a narrow table, the first ones first. If that is not enough, the
    widest text is cut in the middle, and then the last columns are left out: a number without its middle is another.
    """

    def __init__(self, *columns: str, optional: Sequence[str] = ()) -> None:
        self._columns, self._optional = columns, [columns.index(title) for title in optional]
        self._rows: list[tuple[str, ...]] = []

    def add(self, *cells: str) -> None:
        """Add a row."""
        self._rows.append(tuple(map(printable, cells)))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def narrowest(self) -> int:
        """The width without the optional columns."""
        return sum(self._width(i) for i in range(len(self._columns)) if i not in self._optional) + 1

    def _is_text(self, column: int) -> bool:
        return column == 0 or self._columns[column] in ("", "tags")

    def _width(self, column: int) -> int:
        """Return the width of a column with its padding and one border."""
        return 3 + max(cell_len(row[column]) for row in (self._columns, *self._rows))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = {column: self._width(column) for column in range(len(self._columns))}
        for column in self._optional:
            if sum(widths.values()) >= options.max_width:
                del widths[column]
        while True:
            excess = sum(widths.values()) + 1 - options.max_width
            widest = max(filter(self._is_text, widths), key=widths.__getitem__)
            longest = widths[widest] - 3
            most = min(longest, max(longest - max(excess, 0), 5))
            if (fits := longest - most >= excess) or len(widths) == 1:
                break
            del widths[max(widths)]
        if len(self._rows) > MOST_BY_RICH and fits:
            widths[widest] = most + 3
            yield from self._lines(widths, rich.box.HEAVY_HEAD.substitute(options))
            return
        shown = rich.table.Table(header_style="bold")
        for column in widths:
            justify: Literal["left", "right"] = "left" if self._is_text(column) else "right"
            shown.add_column(self._columns[column], justify=justify, no_wrap=True)
        for row in self._rows:
            # As Text, so that rich does not interpret names as markup.
            shown.add_row(*(Text(shortened(row[i], most) if i == widest else row[i]) for i in widths))
        yield shown

    def _lines(self, widths: dict[int, int], box: rich.box.Box) -> Iterator[Segment]:
        """Yield the lines that rich would draw. It takes a millisecond for each row."""
        inner = [width - 1 for width in widths.values()]

        def line(left: str, middle: str, right: str, row: Sequence[str]) -> str:
            cells = []
            for i, width in widths.items():
                text = shortened(row[i], width - 3)
                space = " " * (width - 3 - cell_len(text))
                cells.append(f" {text}{space} " if self._is_text(i) else f" {space}{text} ")
            return f"{left}{middle.join(cells)}{right}\n"

        yield Segment(box.get_top(inner) + "\n")
        yield Segment(line(box.head_left, box.head_vertical, box.head_right, self._columns))
        yield Segment(box.get_row(inner, "head") + "\n")
        for row in self._rows:
            yield Segment(line(box.mid_left, box.mid_vertical, box.mid_right, row))
        yield Segment(box.get_bottom(inner) + "\n")


def printable(text: str) -> str:
    """Return a text with escapes in place of characters that would control the terminal: a file may hold any name."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def print_error(text: str) -> None:
    """Print a message to stderr."""
    print(_printable_lines(text), file=sys.stderr)


def shortened(text: str, most: int) -> str:
    """Return a text of at most so many characters: names differ at their ends, so the middle is left out."""
    if cell_len(text) <= most:
        return text
    begin = (most - 1) // 3
    return f"{text[:begin]}…{text[begin + 1 - most :]}"


def width() -> int:
    """Return the width of the output: of the terminal, or what COLUMNS says; 80 for other pipes."""
    if sys.stdout.isatty():
        return Console().width
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) > 0 else WIDTH


def print_(what: str | Table) -> None:
    """Print text or a table. A table in a pipe without COLUMNS has whole names, however long."""
    console = Console(highlight=False, markup=False)
    if not sys.stdout.isatty():  # even if FORCE_COLOR makes rich take the output for a terminal
        console.width = width()
        if isinstance(what, Table) and "COLUMNS" not in os.environ:
            console.width = max(console.width, what.narrowest)
    if isinstance(what, str):
        console.print(_printable_lines(what), soft_wrap=True)
    else:
        console.print(what)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print labels and texts side by side. Long texts continue below their beginning."""
    for label, text in facts:
        lines = textwrap.wrap(text, max(width() - 16, 20), break_long_words=False, break_on_hyphens=False)
        for number, line in enumerate(lines or [""]):
            print_(f"  {'' if number else label:<14}{line}")


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


def change(before: int, after: int) -> str:
    """Format a size beside the earlier one: ``1.50 MB instead of 2.00 MB``, or ``2.00 MB as before``."""
    earlier, now = in_bytes(before), in_bytes(after)
    return f"{now} as before" if now == earlier else f"{now} instead of {earlier}"


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
