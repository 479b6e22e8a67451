"""Ranks of a training as forks of this process, which has imported everything: they start in a fraction of a second."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import torch.distributed as dist
from soaking.children import forked
from torch._C._distributed_c10d import FileStore
from torch.testing._internal.distributed.fake_pg import FakeStore

Report = Callable[[Any], None]


@dataclass
class Rank:
    """A rank: its process, what it has reported so far, and whether it was killed or has ended."""

    process: int
    reader: int
    reports: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """When it made each report."""
    killed: bool = False
    ended: bool = False
    _partial: bytes = b""

    def read(self) -> None:
        """Take in what the rank has reported. Blocks until there is something, or the rank has ended."""
        block = os.read(self.reader, 1 << 16)
        *lines, self._partial = (self._partial + block).split(b"\n")
        self.reports += [json.loads(line) for line in lines]
        self.seconds += [time.perf_counter()] * len(lines)
        if not block:
            os.close(self.reader)
            status = os.waitpid(self.process, 0)[1]
            self.ended, self.killed = True, self.killed or os.WIFSIGNALED(status)

    def kill(self) -> None:
        """Kill the rank, unless it has ended."""
        if not self.ended:
            os.kill(self.process, signal.SIGKILL)
            self.killed = True

    def last(self, word: str) -> Any:
        """Return the last report that begins with a word; None if there is none."""
        return next((report for report in reversed(self.reports) if report[0] == word), None)


def import_for(work: Callable[[], Any]) -> None:
    """Run work of a rank once, without other ranks, so that its forks need not import what it uses.

    The group that it sees communicates nothing, and needs no threads. It has more ranks than any launch, since PyTorch
    remembers what this rank holds in a group of that size.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    work()
    dist.destroy_process_group()


class Ranks:
    """The ranks of one launch. ``action`` gets the number of its rank, and a function that reports a JSON value.

    timeout: of the process group, in seconds. This process must not have started threads.
    """

    def __init__(self, count: int, action: Callable[[int, Report], None], timeout: float) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"

        def run(rank: int, report: Report) -> None:
            # One rank has no process group, as without torchrun.
            if count > 1:
                shared = FileStore(str(store), count)
                limit = timedelta(seconds=timeout)
                dist.init_process_group("gloo", store=shared, rank=rank, world_size=count, timeout=limit)
            action(rank, report)

        self.ranks = [Rank(*forked(partial(run, rank))) for rank in range(count)]
        self._selector = DefaultSelector()
        for rank in self.ranks:
            self._selector.register(rank.reader, EVENT_READ, rank)

    @property
    def running(self) -> list[Rank]:
        """The ranks that have not ended."""
        return [rank for rank in self.ranks if not rank.ended]

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Take in reports until a condition holds, all ranks have ended, or the time is over.

        Returns whether the condition holds.
        """
        end = time.perf_counter() + seconds
        while not until() and self.running and (left := end - time.perf_counter()) > 0:
            for key, _ in self._selector.select(left):
                key.data.read()
                if key.data.ended:
                    self._selector.unregister(key.fd)
        return until()

    def end(self, seconds: float) -> list[int]:
        """Wait until all ranks have ended. Kills those that have not in time, and returns their numbers."""
        self.wait(lambda: not self.running, seconds)
        late = [number for number, rank in enumerate(self.ranks) if not rank.ended]
        for number in late:
            self.ranks[number].kill()
        self.wait(lambda: not self.running, 60)
        self._selector.close()
        self._folder.cleanup()
        return late
