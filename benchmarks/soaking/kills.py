"""Kills a training at random moments, and checks after each kill that no checkpoint is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from soaking.children import forked, reports_of
from soaking.training import Commit, Ledger, Training

from dynaquant.store.run import Run


def train_and_save(folder: Path, seed: int, report: Callable[[Any], None]) -> None:
    """Train without end: save, save again, go back. Reports each save before it begins and after it has ended."""
    draw, training = random.Random(seed), Training()
    ckpt = training.checkpointer(folder)
    step = ckpt.restore() or 0
    report(["restored", step, training.digest()])
    while True:
        what = draw.choice(["on", "on", "on", "again", "back"])
        steps = [record.step for record in ckpt.records()]
        if what == "back" and steps:
            step = ckpt.restore(draw.choice(steps)) or 0
        for _ in range(draw.randint(1, 3)):
            training.step()
        if what != "again" or not steps:
            step += 1
        report(["saving", step, training.digest()])
        saving = ckpt.save(step)
        if draw.random() < 0.5:
            training.step()  # while it is written
        report(["committed", step, saving.result().identity])


def check(folder: Path, commits: list[Commit], begun: Commit | None, report: Callable[[Any], None]) -> None:
    """Report the commits that are known after a kill, and the errors that were found."""
    ledger = Ledger()
    ledger.commits = commits
    settled = ledger.settle(Run(folder), begun)
    errors = [*ledger.errors(folder), *ledger.errors_after_restore(folder), *ledger.errors(folder)]
    report([settled, [vars(commit) for commit in ledger.commits], list(dict.fromkeys(errors))])


def kills(folder: Path, count: int, seed: int, progress: Callable[[int], None]) -> tuple[Counter[str], list[str]]:
    """Kill a training ``count`` times. Returns how often each event occurred, and the errors that were found."""
    draw, counts, errors = random.Random(seed), Counter[str](), []
    ledger, seconds = Ledger(), 0.1  # between two commits, roughly
    for n in range(count):
        progress(n)
        child, reader = forked(lambda report: train_and_save(folder, draw.randrange(2**32), report))
        with os.fdopen(reader) as lines:
            reports, at = [json.loads(lines.readline() or '["raised", "it hung"]')], time.perf_counter()
            for _ in range(draw.choice([0, 0, 1, 2, 5])):
                while reports[-1][0] not in ("committed", "raised"):
                    reports.append(json.loads(lines.readline() or '["raised", "it hung"]'))
                seconds, at = 0.9 * seconds + 0.1 * (time.perf_counter() - at), time.perf_counter()
                reports.append(["going on"])
            time.sleep(draw.uniform(0, 1.5 * seconds))
            os.kill(child, signal.SIGKILL)
            reports += [json.loads(line) for line in lines]
        os.waitpid(child, 0)
        begun: Commit | None = None
        for word, *rest in reports:
            if word == "saving":
                begun = Commit(rest[0], None, rest[1])
            elif word == "committed" and begun is not None:
                ledger.add(replace(begun, identity=rest[1]))
                begun = None
                counts["commits"] += 1
            elif word == "raised":
                errors.append(f"kill {n}: the training: {rest[0]}")
        counts["kills"] += 1
        counts["kills during a save"] += begun is not None
        counts["kills that left a temporary file"] += any(folder.glob("*.tmp"))
        checker, reader = forked(lambda report: check(folder, ledger.commits, begun, report))  # noqa: B023
        answers = reports_of(reader)
        os.waitpid(checker, 0)
        if not answers or answers[0][0] == "raised":
            errors.append(f"kill {n}: {answers[0][1] if answers else 'the check hung'}")
            break
        settled, commits, found = answers[0]
        counts["kills after a commit that was not reported"] += settled
        errors += [f"kill {n}: {text}" for text in found]
        ledger.commits = [Commit(**commit) for commit in commits]
        if found:  # so that the same error is not found again
            ledger.commits = []
            for path in folder.glob("*.dqc"):
                path.unlink()
    return counts, errors
