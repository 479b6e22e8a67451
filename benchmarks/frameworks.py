"""Train with Transformers, Accelerate and Lightning, undisturbed and killed, and compare with their own checkpoints.

    python benchmarks/frameworks.py --data DIR
    python benchmarks/frameworks.py --data DIR --quick

Every training runs in processes of its own. Writes the page. What was trained is kept in the cache folder by its
settings, so a sweep that was stopped continues there; delete its files frameworks-*.json to train again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import options
from integrations.page import each, lossless, lossy, page, saving_changes_nothing, tables_of_sizes
from integrations.runs import FRAMEWORKS, Run, Sweep, plan_of
from results import machine, show
from workloads import key_of


def _short(run: Run) -> dict[str, Any]:
    """Return a run as JSON values, with a hash in place of its logs."""
    return asdict(replace(run, ended=replace(run.ended, history=key_of(run.ended.history))))


def main() -> None:
    made = options.parser(__doc__, data="shakespeare.txt")
    made.add_argument("--workers", type=int, default=2, help="trainings at a time, one core each")
    arguments = options.parse(made)
    plan = plan_of(arguments.data, arguments.quick)
    sweep = Sweep(plan, arguments.cache)
    sweep.run(arguments.workers)
    found = sweep.found()
    tables = [*tables_of_sizes(found), saving_changes_nothing(found), lossless(found), lossy(found), each(found)]
    show(*tables, width=140)
    described = machine("torch", *FRAMEWORKS, "torchdata")
    numbers = {"machine": described, "runs": {kind.name: _short(run) for kind, run in found.items()}}
    (arguments.out / "frameworks.json").write_text(json.dumps(numbers, indent=1) + "\n")
    (arguments.out / "frameworks.md").write_text(page(found, plan, described))


if __name__ == "__main__":
    main()
