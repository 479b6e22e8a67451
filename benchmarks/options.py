"""The command line that reports of the suite share: folders of data, cache and results, and a quick mode."""

from __future__ import annotations

import argparse
from pathlib import Path

RESULTS, CACHE, QUICK = Path("docs/results"), Path("build/benchmarks"), Path("build/bench-quick")
"""Folders of the results and of the cache; the last one is for both in a quick run, which only shows that all works."""


def parser(description: str | None, data: str | None) -> argparse.ArgumentParser:
    """Return a parser with ``--cache``, ``--out`` and ``--quick``.

    data: the files that the folder ``--data`` must hold; None if no data are needed.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data is not None:
        made.add_argument("--data", type=Path, required=True, help=f"folder that holds {data}")
    made.add_argument(
        "--cache",
        type=Path,
        help=f"folder of long trainings and of temporary files; by default {CACHE}",
    )
    made.add_argument("--out", type=Path, help=f"folder for JSON, picture and page; by default {RESULTS}")
    made.add_argument(
        "--quick", action="store_true", help=f"tiny sizes, only to see that it works; results go to {QUICK}"
    )
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments of this process. Makes the folders that they name."""
    arguments = made.parse_args()
    arguments.cache = arguments.cache or (QUICK if arguments.quick else CACHE)
    arguments.out = arguments.out or (QUICK if arguments.quick else RESULTS)
    for folder in (arguments.cache, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    return arguments
