"""The command line that all reports of the suite share: where data, cache and results are, and a short form."""

from __future__ import annotations

import argparse
from pathlib import Path

RESULTS, CACHE, QUICK = Path("docs/results"), Path("build/benchmarks"), Path("build/bench-quick")
"""Results, what is cached, and both of them for a run that only shows that everything works."""


def parser(description: str | None, data: str | None) -> argparse.ArgumentParser:
    """With ``--cache``, ``--out`` and ``--quick``. data: the files that ``--data`` has to hold; None: not needed."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data is not None:
        made.add_argument("--data", type=Path, required=True, help=f"folder that holds {data}")
    made.add_argument("--cache", type=Path, help=f"folder of what is trained once: {CACHE}")
    made.add_argument("--out", type=Path, help=f"folder of JSON, picture and page: {RESULTS}")
    made.add_argument("--quick", action="store_true", help=f"tiny sizes, to see that it works; in {QUICK}")
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of this process, with folders, which are made."""
    arguments = made.parse_args()
    arguments.cache = arguments.cache or (QUICK if arguments.quick else CACHE)
    arguments.out = arguments.out or (QUICK if arguments.quick else RESULTS)
    for folder in (arguments.cache, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    return arguments
