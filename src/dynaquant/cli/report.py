"""``dynaquant report``."""

# ruff: noqa: PLC0415
# Each command imports what it needs when it runs, so that --help does not load PyTorch, which takes seconds.

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynaquant.cli import output
from dynaquant.cli.output import AsJson, RunFolder
from dynaquant.formatting import in_bytes, plural
from dynaquant.report.prices import S3_STANDARD
from dynaquant.store.files import replacing

if TYPE_CHECKING:
    from dynaquant.report.statistics import Numbers


def report(
    folder: RunFolder,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
    price: Annotated[
        float, typer.Option(help="Of storage, in USD per GB and month; by default what S3 Standard lists.", min=0)
    ] = S3_STANDARD,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a page about a run: sizes, loss of quality, configuration, bits of every layer, time, cost.

    One file that needs no network, for any browser.
    """
    from dynaquant.report.page import page_of
    from dynaquant.report.statistics import numbers_of
    from dynaquant.store.chain import until_settled

    output.must_not_exist(out, force)
    run, _ = output.open_run(folder)

    def read() -> Numbers:
        files, broken = run.files()
        return numbers_of(run, output.with_progress(files, "reading headers", len(files)), broken, price)

    numbers = until_settled(read)
    page = page_of(numbers).encode("utf-8", errors="replace")
    with replacing(out) as file:
        file.write(page)
    count = len(numbers.rows)
    text = f"{out}: {plural(count, 'checkpoint')}, {in_bytes(len(page))}"
    output.report(as_json, text, out=str(out), checkpoints=count, bytes=len(page))
