"""Output of the benchmarks: tables on the screen and in Markdown, files, and a description of the machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from rich.console import Console
from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """Columns and rows of text. The first column is aligned to the left, the others to the right."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def on_screen(self) -> RichTable:
        table = RichTable(title=self.title, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def in_markdown(self) -> str:
        lines = [self.columns, ["---"] + ["---:"] * (len(self.columns) - 1), *self.rows]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def machine(*packages: str) -> dict[str, str | int]:
    """Return processor, number of cores, and the versions of Python and of these packages."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    versions = {package: version(package) for package in packages}
    return {"cpu": model, "cores": os.cpu_count() or 1, "python": platform.python_version(), **versions}


def sentence(described: dict[str, str | int]) -> str:
    """Return the description of a machine, as ``machine`` returns it, as a sentence."""
    versions = ", ".join(f"{name} {value}" for name, value in described.items() if name not in ("cpu", "cores"))
    return f"Machine: {described['cores']} cores of an {described['cpu']}; {versions}."


def show(*shown: Table | str, width: int) -> None:
    """Print tables and texts. width: of the screen in characters, at least."""
    console = Console()
    console.width = max(console.width, width)
    for one in shown:
        console.print(one.on_screen() if isinstance(one, Table) else one)


def publish(out: Path, name: str, numbers: Any, plot: Callable[[Path], None] | None, page: str) -> None:
    """Write numbers as JSON, a picture if there is one, and a page in Markdown, side by side into a folder."""
    (out / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    if plot is not None:
        plot(out / f"{name}.png")
    (out / f"{name}.md").write_text(page)


def plain_ticks(axis: Axis) -> None:
    """Label a logarithmic axis with numbers like 20 and 50 instead of powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
