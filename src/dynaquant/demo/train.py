"""The demo's training process, run as ``python -m dynaquant.demo.train``; it may be killed at any moment.

Comments mark the three lines that dynaquant adds to a training loop. Without ``--run`` there are no checkpoints. The
process reports what it does as lines of JSON on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import dynaquant as dq
from dynaquant.demo.workloads import WORKLOADS


def report(event: str, **details: Any) -> None:
    """Report an event to the parent process, in a single write, because two threads report."""
    os.write(1, json.dumps({"event": event, **details}).encode() + b"\n")


def train(name: str, run: str | None, steps: int, every: int, max_degradation: float | None, seed: int) -> None:
    """Train to the end, starting from the newest checkpoint of the run if there is one."""
    work = WORKLOADS[name](steps, seed)
    checkpointer = None
    step = 0
    if run is not None:
        checkpointer = dq.Checkpointer(  # line 1
            run,
            work.model,
            work.optimizer,
            extras={"scheduler": work.scheduler, "data": work.generator},
            evaluate=work.evaluate,
            higher_is_better=work.higher_is_better,
            quality=dq.Quality(max_degradation=max_degradation),
            every=every,
        )
        step = checkpointer.restore() or 0  # line 2
    report("start", step=step)

    start, saving = time.perf_counter(), 0.0
    work.model.train()
    while step < steps:
        inputs, targets = work.next_batch()
        loss = work.loss(work.model, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        work.optimizer.step()
        work.optimizer.zero_grad()
        work.scheduler.step()
        step += 1
        if checkpointer and checkpointer.due(step):
            report("saving", step=step)
            began = time.perf_counter()
            saved = checkpointer.save(step)  # line 3
            saved.add_done_callback(partial(_report_committed, step))
            saving += time.perf_counter() - began
        elif step % every == 0:
            report("quality", step=step, quality=_scored(work.model, work.evaluate))
        report("step", step=step, seconds=time.perf_counter() - start, saving=saving)
    if checkpointer:
        checkpointer.close()
    report("end", quality=_scored(work.model, work.evaluate))


def _report_committed(step: int, saved: Future[dq.Record]) -> None:
    if saved.exception() is None:
        report("committed", step=step)


def _scored(model: Any, evaluate: Callable[[Any], float]) -> float:
    quality = evaluate(model)
    model.train()
    return quality


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("--run")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--max-degradation", type=float)
    parser.add_argument("--seed", type=int, required=True)
    train(**vars(parser.parse_args()))
