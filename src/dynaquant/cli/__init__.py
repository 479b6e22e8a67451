"""The command line: ``dynaquant``."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer

from dynaquant.cli import demo, files, report, runs, upkeep
from dynaquant.errors import DynaquantError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(demo.demo)
_PANELS: dict[str, list[Callable[..., None]]] = {
    "Files of other programs": [files.compress, files.decompress, files.pack, files.unpack],
    "Runs of checkpoints": [
        *(runs.log, runs.show, runs.diff, runs.du, report.report, runs.verify, files.export),
        *(upkeep.tag, upkeep.branch, upkeep.compact, upkeep.prune),
    ],
}
for panel, commands in _PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"dynaquant {version('dynaquant')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Checkpoints of deep-learning training in a small fraction of their size.

    Exit codes: 0 all is well, 1 something is wrong, 2 the command line cannot be understood.
    """


def main() -> None:
    """Runs the command line; errors become one message and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no × is no reason to fail
    try:
        app()
    except (DynaquantError, OSError) as error:
        print(f"dynaquant: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", []):
            print(f"  ({note})", file=sys.stderr)
        sys.exit(1)
