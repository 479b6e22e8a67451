"""``dynaquant report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynaquant.cli import output
from dynaquant.cli.arguments import AsJson, RunFolder, must_not_exist, open_run
from dynaquant.formatting import in_bytes, plural


def report(
    folder: RunFolder,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the report of a run: size, degradation, configuration, bits of every tensor, and time.

    The report is one HTML file that any browser shows offline.
    """
    from dynaquant.report.page import write_report

    must_not_exist(out, force)
    run, _ = open_run(folder)
    statistics = write_report(run, out, lambda files: output.with_progress(files, "reading headers", len(files)))
    count, size = len(statistics.rows), output.size_of(out)
    text = f"{out}: {plural(count, 'checkpoint')}, {in_bytes(size)}"
    output.print_result(as_json, text, out=str(out), checkpoints=count, bytes=size)
