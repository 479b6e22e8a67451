"""``dynaquant watch``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live

from dynaquant.cli import output
from dynaquant.cli.arguments import AsJson, RunFolder, run_of
from dynaquant.errors import CheckpointError, DynaquantError
from dynaquant.formatting import NONE, duration, in_bytes, in_seconds, percent, plural, times

if TYPE_CHECKING:
    from dynaquant.report.watched import Seen, WatchedRun

_EVERY = 1.0
"""Seconds between two looks at the folder."""
_OTHER_LINES = 7
"""Lines of the terminal that are not rows of the table."""
_ROWS = 20
"""Rows without a terminal."""


def watch(
    folder: RunFolder,
    once: Annotated[bool, typer.Option("--once", help="Print the table once and end, for scripts.")] = False,
    as_json: AsJson = False,
) -> None:
    """Follow a run in the terminal: its last checkpoints as they are saved, totals, time since the last.

    Ctrl-C ends it. RUN need not exist yet. With --once, or --json, what is there is printed once.
    """
    from dynaquant.report.watched import WatchedRun

    watched = WatchedRun(folder)
    if once or as_json:
        run_of(folder)  # raises the error if there is no run
        if as_json:
            output.print_json([seen.to_json() for seen in watched.look()[0]])
        else:
            for part in shown_of(watched, folder, _ROWS, time.time()):
                output.print_(part)
        return
    if not sys.stdout.isatty():
        raise DynaquantError("watch needs a terminal, and the output is a pipe or a file: give --once")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; give the folder that a Checkpointer writes to")
    console = Console(highlight=False, markup=False)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            rows = max(1, console.height - _OTHER_LINES)
            live.update(Group(*shown_of(watched, folder, rows, time.time())), refresh=True)
            time.sleep(_EVERY)


def shown_of(watched: WatchedRun, folder: Path, rows: int, now: float) -> list[Any]:
    """Return what is shown: a table of the last checkpoints, and lines of text. now: in seconds since 1970."""
    from dynaquant.saving.record import Size

    seen, broken = watched.look()
    if not seen:
        return [f"{folder}: waiting for the first checkpoint", *_problems(broken)]
    whole = sum((each.record.total for each in seen), Size())
    last = max(each.committed for each in seen)
    return [
        _table(seen[-rows:], now),
        f"{plural(len(seen), 'checkpoint')}: {output.reduction(whole)}; the last {duration(now - last)} ago",
        *_problems(broken),
    ]


def _table(seen: list[Seen], now: float) -> output.Table:
    table = output.Table(
        *("step", "age", "kind", "size", "ratio", "degradation", "seconds", "tags"),
        optional=("seconds", "kind", "ratio"),
    )
    for each in seen:
        record = each.record
        unmeasured = "exact" if record.configuration is None else NONE
        table.add(
            str(record.step),
            duration(now - each.committed),
            "keyframe" if record.parent is None else f"delta of {record.parent}",
            in_bytes(record.total.stored),
            times(record.ratio, 1),
            unmeasured if record.degradation is None else percent(record.degradation, sign=True),
            in_seconds(sum(record.seconds.values())),
            ", ".join(each.tags),
        )
    return table


def _problems(broken: list[CheckpointError]) -> list[str]:
    return [f"{plural(len(broken), 'file')} cannot be read: {broken[0]}"] if broken else []
