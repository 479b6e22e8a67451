"""What the commands share: how they open a run, and how they print."""

# ruff: noqa: PLC0415
# Each command imports what it needs when it runs, so that --help does not load PyTorch, which takes seconds.

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from dynaquant.errors import CheckpointError
from dynaquant.formatting import in_bytes
from dynaquant.store.files import kind_of

if TYPE_CHECKING:
    from dynaquant.restore.load import Stored
    from dynaquant.save.record import Size
    from dynaquant.store.container import CheckpointFile
    from dynaquant.store.run import Run

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of checkpoints.", show_default=False)]
Step = Annotated[
    str | None, typer.Argument(metavar="STEP", help="Which checkpoint, a step or a tag; the newest unless given.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
T = TypeVar("T")


def run_of(folder: Path) -> tuple[Run, list[CheckpointError]]:
    """The run in a folder and what is wrong with files in it. Raises CheckpointError when it is no run."""
    from dynaquant.store.run import Run

    if not folder.is_dir():
        what = f"is {kind_of(folder) or 'a file'}" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}; give the folder that a Checkpointer writes to")
    run = Run(folder)
    summaries, broken = run.summaries()
    if not summaries and not broken:
        raise CheckpointError(f"{folder}: there are no checkpoints in this folder (files named step-….dqc)")
    return run, broken


def open_run(folder: Path) -> tuple[Run, list[CheckpointFile]]:
    """The run and its sound checkpoints, of which there is one at least; the others are warned of."""
    run = run_of(folder)[0]
    files, broken = run.files()
    for error in broken:
        print(f"dynaquant: skipped {error}", file=sys.stderr)
    if not files:
        raise CheckpointError(f"{folder}: no checkpoint of this run can be read")
    return run, files


def checkpoint(folder: Path, step: str | None) -> CheckpointFile:
    """A checkpoint of a run, by its step or a tag, the newest without; or a file alone, which has no steps."""
    from dynaquant.store.container import CheckpointFile
    from dynaquant.store.tags import file_of

    if folder.is_file():
        if step is not None:
            raise CheckpointError(f"{folder} is one checkpoint, and no run with steps")
        return CheckpointFile(folder)
    run, files = open_run(folder)
    return files[-1] if step is None else file_of(run, _step_or_tag(step))


def stored(folder: Path, step: str | None) -> Stored:
    """The same, opened for its tensors to be read."""
    from dynaquant.restore.load import Stored

    if folder.is_file():
        checkpoint(folder, step)
        return Stored(folder)
    open_run(folder)
    return Stored(folder, None if step is None else _step_or_tag(step))


def _step_or_tag(step: str) -> int | str:
    return int(step) if re.fullmatch(r"[0-9]{1,19}", step) else step


def table(*columns: str) -> Table:
    """An empty table; all columns but the first are numbers."""
    empty = Table(header_style="bold")
    for i, column in enumerate(columns):
        empty.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    return empty


def add(to: Table, *cells: str) -> None:
    """Adds a row to a table."""
    to.add_row(*(Text(cell) for cell in cells))  # a name is no markup


def print_(what: Any) -> None:
    """Prints text or a table."""
    console = Console(highlight=False, markup=False)
    if not sys.stdout.isatty():  # even where colours are asked for, with FORCE_COLOR
        console.width = 1_000_000  # a pipe has no width; tables are not to be folded or cut for it
    console.print(what, soft_wrap=isinstance(what, str))


def print_json(value: Any) -> None:
    """Prints JSON for other programs."""
    json.dump(value, sys.stdout, indent=1, allow_nan=False)
    print()


def report(as_json: bool, text: str, **facts: Any) -> None:
    """Prints what was done: as text, or the facts in it as JSON."""
    if as_json:
        print_json(facts)
    else:
        print_(text)


def with_progress(items: Iterable[T], description: str, count: int) -> Iterable[T]:
    """The items, with a progress bar on a terminal."""
    console = Console(stderr=True)
    return track(items, description, total=count, console=console, transient=True, disable=not console.is_terminal)


def steps(listed: Iterable[int]) -> str:
    """How many steps, and which."""
    listed = sorted(listed)
    return f"{len(listed)} ({', '.join(map(str, listed))})" if listed else "none"


def smaller(size: Size) -> str:
    """How much smaller something is than the tensors, and the files carried along, that are in it."""
    return f"{in_bytes(size.stored)} instead of {in_bytes(size.raw)} ({size.ratio:.2f}×)"


def must_not_exist(path: Path, force: bool) -> None:
    """Raises CheckpointError for an output that is there, unless it may be replaced."""
    if path.exists() and not force:
        advice = "" if path.is_dir() else ", or --force to replace it"
        raise CheckpointError(f"{path} exists; give another name{advice}")


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what goes on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _text: None
        return
    with console.status("") as status:
        yield status.update
