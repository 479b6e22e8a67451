"""What a report shows, from the run itself."""

import torch

import dynaquant as dq
from dynaquant.report.statistics import Numbers, numbers_of
from dynaquant.store.run import Run


def numbers(folder, **options) -> Numbers:
    run = Run(folder)
    summaries, broken = run.summaries()
    return numbers_of(run, [run.file(summary.step) for summary in summaries], broken, **options)


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
