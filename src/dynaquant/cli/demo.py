"""``dynaquant demo``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dynaquant.errors import MissingPackageError


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs, the reports, the picture and the results.")] = Path(
        "demo"
    ),
    max_degradation: Annotated[
        float | None,
        typer.Option(
            help="Largest relative degradation of the metric that every checkpoint may cause. By default, checkpoints "
            "late in the training may cause less than the first ones, as with the preset balanced.",
            min=0,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    full: Annotated[
        bool, typer.Option("--full", help="Longer trainings with ten crashes each; takes about twice as long.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Very short trainings with two crashes each; takes about a minute.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of tables.")] = False,
) -> None:
    """Train two small models, kill the training processes again and again, and compare with undisturbed trainings.

    Takes a few minutes on two processors. Writes to OUT: a run of checkpoints and a report for each model, demo.png
    and demo.json.
    """
    packages = {"matplotlib": "matplotlib", "sklearn": "scikit-learn"}
    if missing := [package for module, package in packages.items() if importlib.util.find_spec(module) is None]:
        raise MissingPackageError("The demo", " and ".join(missing), "demo")
    if full and quick:
        raise typer.BadParameter("give --full or --quick, not both")
    from dynaquant.demo import comparison
    from dynaquant.demo.figure import draw
    from dynaquant.options import Quality

    try:
        Quality(max_degradation=max_degradation)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None

    out.mkdir(parents=True, exist_ok=True)
    plan = comparison.QUICK if quick else comparison.FULL if full else comparison.SHORT
    results = comparison.run_demo(out, plan, max_degradation, seed, Console(stderr=True))
    text = json.dumps([result.to_json() for result in results], indent=1)
    (out / "demo.json").write_text(text + "\n")
    draw(results, out / "demo.png")
    reports = _write_reports(out, [result.name for result in results])
    if as_json:
        print(text)
        return
    console = Console()
    for result in results:
        console.print()
        console.print(comparison.table_of(result))
        console.print(comparison.summary_of(result), highlight=False, soft_wrap=True)
    console.print(f"\npicture: {out / 'demo.png'}\nresults: {out / 'demo.json'}\n{reports}", soft_wrap=True)


def _write_reports(out: Path, workloads: list[str]) -> str:
    """Write the report of each run; return lines that say where, or how to get reports if plotly is missing."""
    from dynaquant.store.run import Run

    try:
        from dynaquant.report.page import write_report
    except MissingPackageError as error:
        return f"no reports: {error}"
    files = {name: out / f"{name}.html" for name in workloads}
    for name, file in files.items():
        write_report(Run(out / name), file)
    return "\n".join(f"report: {file}" for file in files.values())
