"""``dynaquant demo``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dynaquant.errors import MissingPackageError
from dynaquant.save.presets import BALANCED


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs, the picture and the numbers.")] = Path("demo"),
    max_degradation: Annotated[
        float, typer.Option(help="Relative loss of quality that one checkpoint may cause.", min=0)
    ] = BALANCED.max_degradation,
    seed: Annotated[int, typer.Option(help="Of the trainings and of the crashes.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A much shorter training with two crashes, in less than a minute.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of tables.")] = False,
) -> None:
    """Train two small models, killing the training again and again, and compare with a training left alone.

    Takes about a quarter of an hour on one core. Writes the runs of checkpoints, demo.png and demo.json to OUT.
    """
    packages = {"matplotlib": "matplotlib", "sklearn": "scikit-learn"}
    if missing := [package for module, package in packages.items() if importlib.util.find_spec(module) is None]:
        raise MissingPackageError("The demo", " and ".join(missing), "demo")
    # Imported here: matplotlib is an extra, and the other commands do not need it.
    from dynaquant.demo import demo as demonstration  # noqa: PLC0415
    from dynaquant.demo.figure import draw  # noqa: PLC0415

    out.mkdir(parents=True, exist_ok=True)
    scale = demonstration.QUICK if quick else demonstration.FULL
    results = demonstration.run_demo(out, scale, max_degradation, seed, Console(stderr=True))
    numbers = json.dumps([result.to_json() for result in results], indent=1)
    (out / "demo.json").write_text(numbers + "\n")
    draw(results, out / "demo.png")
    if as_json:
        print(numbers)
        return
    console = Console()
    for result in results:
        console.print()
        console.print(demonstration.table_of(result))
        console.print(demonstration.summary_of(result), highlight=False, soft_wrap=True)
    console.print(f"\npicture: {out / 'demo.png'}\nnumbers: {out / 'demo.json'}", soft_wrap=True)
