"""Measure where trainings that are restored many times end, on eight trainings of different kinds.

    python benchmarks/promise.py --data DIR
    python benchmarks/promise.py --data DIR --trainings gpt,gru --variants "default,high,0 restores" --seeds 0,1,2

Without a choice, runs everything and writes the page. With one, prints the table only. Runs are kept in the cache
folder, so a sweep that was stopped continues where it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import options
from promise_report import bars, page, plot, results, table
from promise_runs import QUICK, QUICK_VARIANTS, VARIANTS, Sweep
from promise_trainings import TRAININGS
from results import machine, publish, show


def sweep_of(
    data: Path, cache: Path, trainings: str | None, variants: str | None, seeds: str | None, quick: bool
) -> Sweep:
    """Return the sweep of these comma-separated names. None: all. Raises SystemExit for an unknown name."""
    chosen = chosen_of(variants, QUICK_VARIANTS if quick else VARIANTS)
    return Sweep(
        data,
        cache,
        chosen_of(trainings, TRAININGS),
        {name: replace(VARIANTS[name], plan=QUICK, seeds=1) if quick else VARIANTS[name] for name in chosen},
        None if seeds is None else [int(seed) for seed in seeds.split(",")],
    )


def chosen_of(names: str | None, known: Iterable[str]) -> list[str]:
    """Return the names in a comma-separated text, or all known ones. Raises SystemExit for an unknown name."""
    chosen = list(known) if names is None else [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in known]:
        raise SystemExit(f"{unknown[0]!r} is not known; choose from: {', '.join(known)}")
    return chosen


def main() -> None:
    made = options.parser(__doc__, data="shakespeare.txt and cifar10.zip")
    made.add_argument("--trainings", help=f"comma-separated: {', '.join(TRAININGS)}")
    made.add_argument("--variants", help=f"comma-separated: {', '.join(VARIANTS)}")
    made.add_argument("--seeds", help="comma-separated numbers, for every variant; by default 0 to 5 or 0 to 2")
    made.add_argument("--workers", type=int, default=2, help="runs at a time, one core each")
    made.add_argument("--show", action="store_true", help="run nothing, only show what the cache has")
    made.add_argument("--publish", action="store_true", help="write the page of what the cache has, in any case")
    arguments = options.parse(made)
    choice = arguments.trainings, arguments.variants, arguments.seeds
    sweep = sweep_of(arguments.data, arguments.cache, *choice, arguments.quick)
    missing = sweep.missing()
    minutes = sweep.estimate(missing) / 60
    show(f"{len(missing)} runs are missing in {sweep.cache}: about {minutes:.0f} minutes of one core", width=100)
    if not arguments.show:
        sweep.run(arguments.workers)
    found = results(sweep)
    show(table(found), width=120)
    if not arguments.publish and (arguments.show or choice != (None, None, None)):
        return
    show(bars(found), width=160)
    hours = sum(row.seconds * len(row.ends) for row in found.rows) / 3600
    hours += sum(one.training_seconds for alone in found.alone.values() for one in alone) / 3600
    described = machine("torch")
    numbers = {"machine": described, **asdict(found)}
    publish(
        arguments.out,
        "promise",
        numbers,
        lambda file: plot(found, file),
        page(found, described, hours, len(sweep.missing())),
    )


if __name__ == "__main__":
    main()
