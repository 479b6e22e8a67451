"""The command line: ``dynaquant``."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from dynaquant.cli import demo, files, report, runs, upkeep
from dynaquant.errors import DynaquantError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.command(epilog="Example: dynaquant demo --quick")(demo.demo)
_PANELS: dict[str, dict[Callable[..., None], str]] = {
    "Files of other programs": {
        files.compress: "compress model.safetensors -o model.dqc",
        files.decompress: "decompress model.dqc -o model.safetensors",
        files.pack: "pack old/ckpt-100.pt old/ckpt-200.pt -o runs/packed",
        files.unpack: "unpack runs/packed -o again",
    },
    "Runs of checkpoints": {
        runs.log: "log runs/gpt",
        runs.show: "show runs/gpt 4000",
        runs.diff: "diff runs/gpt 3000 4000",
        runs.du: "du runs/gpt",
        report.report: "report runs/gpt -o report.html",
        runs.verify: "verify runs/gpt",
        files.export: "export runs/gpt 4000 -o model.safetensors",
        upkeep.tag: "tag runs/gpt best 4000",
        upkeep.branch: "branch runs/gpt best runs/other",
        upkeep.compact: "compact runs/gpt --keyframe-every 8",
        upkeep.prune: "prune runs/gpt --keep-last 3 --keep-every 1000",
    },
}
"""The commands as help lists them, and an example of each."""
for panel, commands in _PANELS.items():
    for command, example in commands.items():
        app.command(rich_help_panel=panel, epilog=f"Example: dynaquant {example}")(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415  (slow, and only this needs it)

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
    except MemoryError:
        print("dynaquant: there is not enough memory; use a machine that has more", file=sys.stderr)
        sys.exit(1)
