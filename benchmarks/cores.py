"""Speeds on one core and on all cores: run functions on chosen cores, and write the page with the results.

Libraries read the number of cores when they are loaded, so each choice of cores gets its own process.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from results import Table, sentence

Result = TypeVar("Result")


def on_cores(cores: set[int], function: Callable[..., Result], *arguments: Any) -> Result:
    """Return ``function(*arguments)``, called in a new process on these cores. The function must have a global name."""
    everything = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(function, arguments)
    finally:
        os.sched_setaffinity(0, everything)


def by_cores(results: Mapping[str, tuple[Sequence[Any], Sequence[Any]]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return rows (dataclasses) on one core and on all cores as JSON values, by what was measured."""
    return {
        name: {"1 core": [asdict(row) for row in one], "all cores": [asdict(row) for row in every]}
        for name, (one, every) in results.items()
    }


def page(
    heading: str,
    name: str,
    script: str,
    picture: str,
    described: dict[str, str | int],
    tables: list[Table],
    bars: list[str],
    notes: str,
) -> str:
    """Return the page of a report in Markdown.

    name: of the page. script: the file that makes it. picture: what it shows. bars: what was to be reached, on one core
    with synthetic values.
    """
    parts = [
        f"# {heading}\n\n```\nmake benchmark-setup\n.venv/bin/python benchmarks/{script}\n```\n",
        sentence(described) + "\n",
        f"![{picture}]({name}.png)\n",
        *(shown.in_markdown() + "\n" for shown in tables),
        "## Bars\n\nOn one core, synthetic values:\n\n" + "\n".join(f"- {bar}" for bar in bars) + "\n",
        "## How to read it\n\n" + notes,
    ]
    return "\n".join(parts)
