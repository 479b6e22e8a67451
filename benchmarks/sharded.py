"""Train a GPT under FSDP2 and tensor parallel, kill ranks at random moments, resume on other numbers of ranks.

    python benchmarks/sharded.py --data DIR
    python benchmarks/sharded.py --data DIR --quick

Launches its ranks by torchrun, on CPUs (Gloo). Writes the page. What was trained or measured is kept in the cache
folder by its settings, so a sweep that was stopped continues there; delete its files sharded-*.json to measure again.
"""

from __future__ import annotations

from dataclasses import asdict

import options
from results import machine, publish, show
from sharding.page import ends, goals, memory, page, plot, sizes
from sharding.sweep import Sweep, plan_of


def main() -> None:
    arguments = options.parse(options.parser(__doc__, data="shakespeare.txt"))
    plan = plan_of(arguments.data, arguments.quick)
    found = Sweep(plan, arguments.cache, lambda what: show(what, width=100)).run()
    show(goals(found), ends(found), sizes(found), memory(found), width=140)
    described = machine("torch", "zstandard")
    numbers = {"machine": described, **asdict(found)}
    publish(arguments.out, "sharded", numbers, lambda file: plot(found, file), page(found, plan, described))


if __name__ == "__main__":
    main()
