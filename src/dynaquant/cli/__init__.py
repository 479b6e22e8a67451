"""The command line: ``dynaquant``.

In reading order:

- ``arguments.py``: arguments that several commands take, and opening the runs and files that they name
- ``output.py``: printing text, tables, JSON and progress
- ``convert.py``: files of other programs: ``compress``, ``decompress``, ``pack``, ``unpack``, ``export``
- ``inspect.py``: looking into a run: ``log``, ``show``, ``diff``, ``verify``, ``du``, ``report``
- ``watch.py``: ``watch``
- ``maintain.py``: changing a run: ``tag``, ``branch``, ``compact``, ``prune``
- ``demo.py``: ``demo``
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core

from dynaquant.cli import convert, demo, inspect, maintain, output, watch
from dynaquant.errors import DynaquantError


class _Command(typer.core.TyperCommand):
    """A command whose help shows a flag as ``--force``, not as ``--force <bool>``."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))


class _Group(typer.core.TyperGroup):
    """The same for the options of the whole program."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))


def _without_type(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


app = typer.Typer(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")
app.command(cls=_Command, epilog="Example: dynaquant demo --quick")(demo.demo)
_PANELS: dict[str, dict[Callable[..., None], str]] = {
    "Files of other programs": {
        convert.compress: "compress model.safetensors -o model.dqc",
        convert.decompress: "decompress model.dqc -o model.safetensors",
        convert.pack: "pack old/ckpt-100.pt old/ckpt-200.pt -o runs/packed",
        convert.unpack: "unpack runs/packed -o again",
    },
    "Runs of checkpoints": {
        inspect.log: "log runs/gpt",
        watch.watch: "watch runs/gpt",
        inspect.show: "show runs/gpt 4000",
        inspect.diff: "diff runs/gpt 3000 4000",
        inspect.du: "du runs/gpt",
        inspect.report: "report runs/gpt -o report.html",
        inspect.verify: "verify runs/gpt",
        convert.export: "export runs/gpt 4000 -o model.safetensors",
        maintain.tag: "tag runs/gpt best 4000",
        maintain.branch: "branch runs/gpt best runs/other",
        maintain.compact: "compact runs/gpt --keyframe-every 8",
        maintain.prune: "prune runs/gpt --keep-last 3 --keep-every 1000",
    },
}
"""The commands in the order of the help, each with an example."""
for panel, commands in _PANELS.items():
    for command, example in commands.items():
        app.command(cls=_Command, rich_help_panel=panel, epilog=f"Example: dynaquant {example}")(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"dynaquant {version('dynaquant')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Store PyTorch training checkpoints in a small fraction of their size.

    Exit codes: 0 success, 1 error or damaged checkpoints, 2 invalid command line.
    """


def main() -> None:
    """Run the command line. An error becomes one message on stderr and exit code 1."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - closed by the shell: >&-
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × prints ? instead of failing
    try:
        app()
    except (DynaquantError, OSError) as error:
        output.print_error(f"dynaquant: {error}")
        for note in getattr(error, "__notes__", []):
            output.print_error(f"  ({note})")
        sys.exit(1)
    except MemoryError:
        output.print_error("dynaquant: out of memory; use a machine with more memory")
        sys.exit(1)
