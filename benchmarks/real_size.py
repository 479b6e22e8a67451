"""Train a GPT of 33 M weights on a CPU, kill it three times, and compare with the same training undisturbed.

    python benchmarks/real_size.py --data DIR
    python benchmarks/real_size.py --data DIR --quick

Measures sizes, seconds, memory, and the loss at the end: of dynaquant with two qualities, and of ``torch.save``. Every
training runs in processes of its own with one thread. Four trainings of 480 steps take about 50 minutes on one core.

Writes the page after each run, as soon as it has the first two: those of ``torch.save`` and of the default quality. The
cache folder keeps runs by their settings, so a benchmark that was stopped continues with the run that was interrupted.
Delete its files real_size-*.json to train again.
"""

from __future__ import annotations

import time
from functools import partial

import options
from real_size_page import numbers, page, plot, tables
from real_size_runs import DEFAULT, Run, Sweep, plan_of
from results import machine, publish, show


def main() -> None:
    made = options.parser(__doc__, data="shakespeare.txt")
    made.add_argument("--steps", type=int, default=480, help="of each training")
    arguments = options.parse(made)
    plan = plan_of(arguments.data, arguments.steps, arguments.quick)
    sweep = Sweep(plan, arguments.cache, lambda text: print(time.strftime("%H:%M:%S"), text, flush=True))
    described = machine("torch", "tokenizers")
    found: dict[str, Run] = {}
    for name in plan.names:
        found[name] = sweep.run(name)
        if DEFAULT in found:
            show(*tables(found), width=140)
            results = {"machine": described, **numbers(found, plan)}
            publish(arguments.out, "real_size", results, partial(plot, found, plan), page(found, plan, described))


if __name__ == "__main__":
    main()
