"""Interrupts saves, restores and closes of a training, and checks that neither it nor its run is changed by that."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from soaking.children import forked
from soaking.training import KEEP_LAST, Commit, Ledger, Training

import dynaquant as dq
from dynaquant.store.run import Run

PACKAGE = str(Path(dq.__file__).parent)


class Interrupts:
    """Interrupts actions, either by SIGINT when it arrives or at a random point of the package's code.

    The points are those where Python checks for signals: where a function begins, and where the call of a built-in
    function returns.
    """

    def __init__(self, draw: random.Random) -> None:
        self.counts = Counter[str]()
        self._draw = draw
        self._armed = False
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, *_: Any) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt

    def during(self, name: str, action: Callable[[], Any]) -> Any:
        """Return the action's result, or None if it was interrupted."""
        try:
            if self._draw.random() < 0.5:
                return self._at_a_point(action)
            self._armed = True
            return action()
        except KeyboardInterrupt:
            self.counts[f"interrupts of {name}"] += 1
            self.counts["interrupts"] += 1
            return None
        finally:
            self._armed = False

    def _at_a_point(self, action: Callable[[], Any]) -> Any:
        left = int(10 ** self._draw.uniform(0, 4.2))

        def profile(frame: Any, event: str, _: Any) -> None:
            nonlocal left
            if event in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE):
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt

        sys.setprofile(profile)
        try:
            return action()
        finally:
            sys.setprofile(None)


class Interrupted:
    """A training whose saves, restores and closes are interrupted."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._draw = folder, random.Random(seed)
        self._interrupts = Interrupts(self._draw)
        self._training, self._ledger = Training(), Ledger()
        self._ckpt = self._training.checkpointer(folder)
        self.errors: list[str] = []
        self.counts = self._interrupts.counts

    def go_on(self) -> None:
        """Train for one step, then save, restore or close, which may be interrupted."""
        self._training.step()
        self.counts["steps"] += 1
        before = self._training.digest()
        what = self._draw.choice(["save", "save", "save", "save twice", "go back", "close"])
        if what == "go back":
            self._go_back()
        elif what == "close":
            self._close()
        else:
            self._save(self.counts["steps"])
            if what == "save twice":
                self._save(self.counts["steps"])
        if self._training.digest() != before:
            self.errors.append(f"step {self.counts['steps']}: {what} changed the training")
        self.errors += [f"step {self.counts['steps']}, {what}: {text}" for text in self._ledger.errors(self._folder)]

    def _save(self, step: int) -> None:
        begun = Commit(step, None, self._training.digest())
        record = self._interrupts.during("save", lambda: self._ckpt.save(step).result())
        self._ckpt.wait()
        if record is not None:
            self._ledger.add(replace(begun, identity=record.identity))
            self.counts["commits"] += 1
        elif self._ledger.settle(Run(self._folder), begun):
            self.counts["commits by an interrupted save"] += 1

    def _restore_newest(self) -> None:
        """Restore the newest checkpoint. It must be the one that was saved last, bit for bit."""
        restored = self._interrupts.during("restore", self._ckpt.restore) or self._ckpt.restore()
        newest = self._ledger.commits[-1] if self._ledger.commits else None
        if restored != (newest and newest.step) or self._ckpt.skipped:
            self.errors.append(f"step {restored} was restored, not {newest and newest.step}: {self._ckpt.skipped}")
        elif newest and self._training.digest() != newest.state:
            self.errors.append(f"step {restored} was restored, but not bit for bit")

    def _go_back(self) -> None:
        """Restore an older step, train on from there and save. Then put the training back to where it was."""
        state = deepcopy(self._training.state())
        if not self._ledger.commits:
            return
        self._restore_newest()
        step = self._draw.choice(self._ledger.commits[-KEEP_LAST:]).step
        if self._interrupts.during("restore", lambda: self._ckpt.restore(step)) is None:
            self._ckpt.restore(step)
        self._training.step()
        self._save(step + self._draw.randint(0, 1))
        self._training.put_back(state)

    def _close(self) -> None:
        """Close, and continue with another Checkpointer."""
        state = deepcopy(self._training.state())
        self._ckpt.save(self.counts["steps"])
        self._ledger.add(Commit(self.counts["steps"], None, self._training.digest()))
        self._interrupts.during("close", self._ckpt.close)
        self._ckpt.close()
        newest = Run(self._folder).summaries()[0][-1]
        self._ledger.add(replace(self._ledger.commits[-1], identity=newest.identity))
        ckpt = self._interrupts.during("construction", lambda: self._training.checkpointer(self._folder))
        self._ckpt = ckpt or self._training.checkpointer(self._folder)
        self._restore_newest()
        self._training.put_back(state)

    def end(self) -> None:
        """Compare with a training that neither saves nor is interrupted, and check the run once more."""
        self._ckpt.close()
        alone = Training()
        for _ in range(self.counts["steps"]):
            alone.step()
        self._training.model.train()
        if self._training.digest() != alone.digest():
            self.errors.append("the training is not what it would have been without saves")
        self.errors += self._ledger.errors_after_restore(self._folder)


def interrupt(folder: Path, count: int, seed: int, report: Callable[[Any], None]) -> None:
    """Report the number of interrupts; at the end, how often each event occurred and the errors that were found."""
    training = Interrupted(folder, seed)
    while training.counts["interrupts"] < count and len(training.errors) < 20:
        training.go_on()
        report(["at", training.counts["interrupts"]])
    training.end()
    report(["ended", training.counts, training.errors])


def interrupts(folder: Path, count: int, seed: int, progress: Callable[[int], None]) -> tuple[Counter[str], list[str]]:
    """Interrupt a training ``count`` times. Returns how often each event occurred, and the errors that were found."""
    draw = random.Random(seed)
    last: list[Any] = []
    child, reader = forked(lambda report: interrupt(folder, count, seed, report))
    with os.fdopen(reader) as lines:
        while (word := (last := json.loads(lines.readline() or '["hung"]'))[0]) == "at":
            progress(last[1])
            time.sleep(draw.uniform(0, 0.05))
            os.kill(child, signal.SIGINT)
    os.waitpid(child, 0)
    return (Counter(last[1]), last[2]) if word == "ended" else (Counter(), [f"the training {' '.join(last)}"])
