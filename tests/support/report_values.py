"""Statistics of a run, and values of its records, for tests of the report."""

import torch

import dynaquant as dq
from dynaquant.report.statistics import Statistics, statistics_of
from dynaquant.store.run import Run


def statistics(folder, **options) -> Statistics:
    run = Run(folder)
    summaries, broken = run.summaries()
    return statistics_of(run, [run.file(summary.step) for summary in summaries], broken, **options)


def at(record: dict, field: str):
    for key in field.split("."):
        record = record.get(key) if record is not None else None
    return record


def save(folder, model, *steps, **options) -> None:
    with dq.Checkpointer(folder, model, **options) as ckpt:
        for step in steps:
            with torch.no_grad():
                next(model.parameters()).add_(0.01)
            ckpt.save(step).result()
