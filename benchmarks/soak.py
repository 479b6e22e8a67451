"""A training that is killed or interrupted again and again, at random: no checkpoint is lost, training is unchanged.

The training saves with exact="latest" and keeps three checkpoints; it saves steps twice, and goes back to older ones.

    python benchmarks/soak.py kills --count 1000
    python benchmarks/soak.py interrupts --count 1000

Prints what was found wrong, one line each, and exits with 1 if there was anything.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dynaquant as dq
from dynaquant.state.flatten import flatten
from dynaquant.store.run import Run

KEEP_LAST = 3
HANGS_AFTER = 60.0
"""Seconds without a word after which a training is taken to hang."""
PACKAGE = str(Path(dq.__file__).parent)


class Training:
    """A step takes less than a millisecond; what it does depends on its state only."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Dropout(0.1), nn.Linear(24, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9999)
        self.order = torch.Generator().manual_seed(1)

    def step(self) -> None:
        """Trains for one step."""
        self.model.train()
        inputs = torch.randn(8, 12, generator=self.order)
        loss = nn.functional.mse_loss(self.model(inputs), inputs[:, :4])
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.schedule.step()

    def evaluate(self, model: nn.Module) -> float:
        """Draws random numbers and changes modes, all of which a save must put back."""
        model.eval()
        inputs = torch.randn(32, 12, generator=self.order) + torch.randn(32, 12)
        with torch.no_grad():
            return 1 + nn.functional.mse_loss(model(torch.ones_like(inputs)), torch.ones(32, 4)).item()

    def checkpointer(self, folder: Path) -> dq.Checkpointer:
        """For this training."""
        extras = {"order": self.order, "schedule": self.schedule}
        options: dict[str, Any] = {"exact": "latest", "keep_last": KEEP_LAST, "keyframe_every": 3}
        return dq.Checkpointer(
            folder, self.model, self.optimizer, extras=extras, evaluate=self.evaluate, max_degradation=0.05, **options
        )

    def state(self) -> dict[str, Any]:
        """All that a step depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "order": self.order.get_state(),
            "torch": torch.get_rng_state(),
        }

    def put_back(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.order.set_state(state["order"])
        torch.set_rng_state(state["torch"])

    def digest(self) -> str:
        """A hash of ``state``, and of what else a save could change."""
        tree, tensors = flatten(self.state())
        modes = [torch.is_grad_enabled(), *(module.training for module in self.model.modules())]
        digest = hashlib.sha256(json.dumps([tree, modes, list(tensors)], default=repr).encode())
        for tensor in tensors.values():
            digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Commit:
    """A checkpoint that was saved. identity: of its small form, None where it is not known yet. state: a digest."""

    step: int
    identity: str | None
    state: str


class Ledger:
    """The commits that a run must hold.

    commits: in their order, as a run holds them that keeps everything; one of a step that is saved again goes.
    """

    def __init__(self) -> None:
        self.commits: list[Commit] = []

    def add(self, commit: Commit) -> None:
        """One more was committed."""
        self.commits = [other for other in self.commits if other.step != commit.step] + [commit]

    def settle(self, run: Run, begun: Commit | None) -> bool:
        """Whether a save that was begun and did not come to its end is there; it is added then."""
        newest = run.summaries()[0][-1:]
        # Two steps may be saved with the same state, which have the same identity.
        known = {(commit.step, commit.identity) for commit in self.commits[-1:]}
        if begun is None or not newest or newest[0].step != begun.step or (begun.step, newest[0].identity) in known:
            return False
        self.add(replace(begun, identity=newest[0].identity))
        return True

    def wrong(self, folder: Path) -> Iterator[str]:
        """What is wrong with a run: whatever is lost, damaged or changed. A writer may hold it, and be at rest."""
        run = Run(folder)
        summaries, broken = run.summaries()
        yield from (f"unreadable: {error}" for error in broken)
        there = {summary.step: summary.identity for summary in summaries}
        for commit in self.commits:
            if commit.step in there and there[commit.step] != commit.identity:
                yield f"step {commit.step} is not the checkpoint that was saved"
        for commit in self.commits[-KEEP_LAST:]:
            if commit.step not in there:
                yield f"step {commit.step} is lost"
        for step in there:
            try:
                run.load(run.file(step))
            except dq.CheckpointError as error:
                yield f"damaged: {error}"
        if not self.commits:
            return
        newest = self.commits[-1]
        if summaries and summaries[-1].step != newest.step:
            yield f"the newest is step {summaries[-1].step}, not {newest.step}"
        try:
            copy = run.lossless_copy(run.file(newest.step)) if newest.step in there else None
            if copy is None:
                yield f"the lossless copy of step {newest.step} is lost"
            else:
                run.load(copy)
        except dq.CheckpointError as error:
            yield f"the lossless copy of step {newest.step}: {error}"

    def wrong_when_restored(self, folder: Path) -> Iterator[str]:
        """What is wrong with what a new training restores from a run that nobody holds."""
        training = Training()
        with training.checkpointer(folder) as ckpt:
            yield from (f"{path.name} was left" for path in folder.glob("*.tmp"))
            step = ckpt.restore()
            yield from (f"passed over: {error}" for error in ckpt.skipped)
            newest = self.commits[-1] if self.commits else None
            if step != (newest and newest.step):
                yield f"step {step} was restored, not {newest and newest.step}"
            elif newest and training.digest() != newest.state:
                yield f"step {step} was restored, but not bit for bit"


def forked(action: Callable[[Callable[[Any], None]], None]) -> tuple[int, int]:
    """A child process that does something; its id, and where what it says (a JSON value a line) can be read.

    This process must not have begun any threads.
    """
    reader, out = os.pipe()
    child = os.fork()
    if child:
        os.close(out)
        return child, reader
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)

    def say(value: Any) -> None:
        os.write(out, json.dumps(value).encode() + b"\n")
        faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)

    try:
        action(say)
    except BaseException as error:
        say(["raised", f"{type(error).__name__}: {error}"])
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(0)


def heard(reader: int) -> list[Any]:
    """All that a child says until it ends."""
    with os.fdopen(reader) as lines:
        return [json.loads(line) for line in lines]


# Kills


def train_and_save(folder: Path, seed: int, say: Callable[[Any], None]) -> None:
    """Trains without end: saves, saves again, goes back; says what is about to be saved and what was."""
    draw, training = random.Random(seed), Training()
    ckpt = training.checkpointer(folder)
    step = ckpt.restore() or 0
    say(["restored", step, training.digest()])
    while True:
        what = draw.choice(["on", "on", "on", "again", "back"])
        steps = [record.step for record in ckpt.records()]
        if what == "back" and steps:
            step = ckpt.restore(draw.choice(steps)) or 0
        for _ in range(draw.randint(1, 3)):
            training.step()
        if what != "again" or not steps:
            step += 1
        say(["saving", step, training.digest()])
        saving = ckpt.save(step)
        if draw.random() < 0.5:
            training.step()  # while it is written
        say(["committed", step, saving.result().identity])


def check(folder: Path, commits: list[Commit], begun: Commit | None, say: Callable[[Any], None]) -> None:
    """Says the commits that are known after a kill, and what is wrong."""
    ledger = Ledger()
    ledger.commits = commits
    settled = ledger.settle(Run(folder), begun)
    wrong = [*ledger.wrong(folder), *ledger.wrong_when_restored(folder), *ledger.wrong(folder)]
    say([settled, [vars(commit) for commit in ledger.commits], list(dict.fromkeys(wrong))])


def kills(folder: Path, count: int, seed: int, progress: Callable[[int], None]) -> tuple[Counter[str], list[str]]:
    """Kills a training so many times. How often what was so, and what was wrong."""
    draw, counts, wrong = random.Random(seed), Counter[str](), []
    ledger, seconds = Ledger(), 0.1  # between two commits, about
    for n in range(count):
        progress(n)
        child, reader = forked(lambda say: train_and_save(folder, draw.randrange(2**32), say))
        with os.fdopen(reader) as lines:
            said, at = [json.loads(lines.readline() or '["raised", "it hung"]')], time.perf_counter()
            for _ in range(draw.choice([0, 0, 1, 2, 5])):
                while said[-1][0] not in ("committed", "raised"):
                    said.append(json.loads(lines.readline() or '["raised", "it hung"]'))
                seconds, at = 0.9 * seconds + 0.1 * (time.perf_counter() - at), time.perf_counter()
                said.append(["going on"])
            time.sleep(draw.uniform(0, 1.5 * seconds))
            os.kill(child, signal.SIGKILL)
            said += [json.loads(line) for line in lines]
        os.waitpid(child, 0)
        begun: Commit | None = None
        for word, *rest in said:
            if word == "saving":
                begun = Commit(rest[0], None, rest[1])
            elif word == "committed" and begun is not None:
                ledger.add(replace(begun, identity=rest[1]))
                begun = None
                counts["commits"] += 1
            elif word == "raised":
                wrong.append(f"kill {n}: the training: {rest[0]}")
        counts["kills"] += 1
        counts["kills during a save"] += begun is not None
        counts["kills that left a temporary file"] += any(folder.glob("*.tmp"))
        checker, reader = forked(lambda say: check(folder, ledger.commits, begun, say))  # noqa: B023
        answers = heard(reader)
        os.waitpid(checker, 0)
        if not answers or answers[0][0] == "raised":
            wrong.append(f"kill {n}: {answers[0][1] if answers else 'the check hung'}")
            break
        settled, commits, found = answers[0]
        counts["kills after a commit that nobody was told of"] += settled
        wrong += [f"kill {n}: {text}" for text in found]
        ledger.commits = [Commit(**commit) for commit in commits]
        if found:  # not to find it again and again
            ledger.commits = []
            for path in folder.glob("*.dqc"):
                path.unlink()
    return counts, wrong


# Interrupts


class Interrupts:
    """Has actions interrupted: by SIGINT whenever it comes, or at a point of their own code that is drawn.

    The points are where functions begin and where calls of built-in functions return: where Python looks for signals.
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
        """The action's result, None when it was interrupted."""
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
        self.wrong: list[str] = []
        self.counts = self._interrupts.counts

    def go_on(self) -> None:
        """Trains for one step, and does something that is interrupted."""
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
            self.wrong.append(f"step {self.counts['steps']}: {what} changed the training")
        self.wrong += [f"step {self.counts['steps']}, {what}: {text}" for text in self._ledger.wrong(self._folder)]

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
        """Restores the newest checkpoint; it must be the one that was saved last, bit for bit."""
        restored = self._interrupts.during("restore", self._ckpt.restore) or self._ckpt.restore()
        newest = self._ledger.commits[-1] if self._ledger.commits else None
        if restored != (newest and newest.step) or self._ckpt.skipped:
            self.wrong.append(f"step {restored} was restored, not {newest and newest.step}: {self._ckpt.skipped}")
        elif newest and self._training.digest() != newest.state:
            self.wrong.append(f"step {restored} was restored, but not bit for bit")

    def _go_back(self) -> None:
        """To an older step, trains on from there, saves; then comes back, as if it had not been."""
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
        """Closes, and goes on with another Checkpointer."""
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
        """Compares with a training that neither saves nor is interrupted, and checks the run once more."""
        self._ckpt.close()
        alone = Training()
        for _ in range(self.counts["steps"]):
            alone.step()
        self._training.model.train()
        if self._training.digest() != alone.digest():
            self.wrong.append("the training is not what it would have been without saves")
        self.wrong += self._ledger.wrong_when_restored(self._folder)


def interrupt(folder: Path, count: int, seed: int, say: Callable[[Any], None]) -> None:
    """Says how far it has come, and at the end what was how often, and what was wrong."""
    training = Interrupted(folder, seed)
    while training.counts["interrupts"] < count and len(training.wrong) < 20:
        training.go_on()
        say(["at", training.counts["interrupts"]])
    training.end()
    say(["ended", training.counts, training.wrong])


def interrupts(folder: Path, count: int, seed: int, progress: Callable[[int], None]) -> tuple[Counter[str], list[str]]:
    """Interrupts a training so many times. How often what was so, and what was wrong."""
    draw = random.Random(seed)
    last: list[Any] = []
    child, reader = forked(lambda say: interrupt(folder, count, seed, say))
    with os.fdopen(reader) as lines:
        while (word := (last := json.loads(lines.readline() or '["hung"]'))[0]) == "at":
            progress(last[1])
            time.sleep(draw.uniform(0, 0.05))
            os.kill(child, signal.SIGINT)
    os.waitpid(child, 0)
    return (Counter(last[1]), last[2]) if word == "ended" else (Counter(), [f"the training {' '.join(last)}"])


SOAKS = {"kills": kills, "interrupts": interrupts}


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("soak", choices=SOAKS)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    Training().step()  # imports what children would import each for itself

    def progress(n: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{n} of {arguments.count}", end="", file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        counts, wrong = SOAKS[arguments.soak](Path(folder) / "run", arguments.count, arguments.seed, progress)
    for name, n in sorted(counts.items()):
        print(f"{n:6} {name}")
    print(f"{time.perf_counter() - begin:6.0f} seconds")
    for text in wrong:
        print(f"WRONG: {text}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
