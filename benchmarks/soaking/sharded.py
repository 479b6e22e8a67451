"""Kills ranks of a sharded training at random moments, and checks after each kill that no checkpoint is lost.

One to four ranks hold one model (FSDP2). Each launch has another number of ranks, and continues from the run.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from soaking.children import forked, reports_of
from soaking.ranks import Rank, Ranks, Report, import_for
from soaking.training import KEEP_LAST, Commit, Ledger
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dynaquant as dq
from dynaquant.saving import commit_stage
from dynaquant.saving.commit_stage import CommitStage
from dynaquant.store.run import Run
from dynaquant.store.verifying import verify_run

MOST_RANKS = 4
TIMEOUT = 20.0
"""Of the process group, in seconds."""
LIMIT = 60.0
"""Seconds in which the other ranks must end after a kill."""
MOMENTS = {
    "restoring": "restore",
    "saving": "save",
    "writing": "save",
    "written": "save",
    "pruning": "retention",
    "starting": "start",
}
"""During what a rank was killed, by the last word of its report."""


class CommunicationError(Exception):
    """The training itself could not communicate, as a rank was killed. That is no error of a Checkpointer."""


@contextmanager
def training_communicates() -> Iterator[None]:
    """Tell errors of the training's own communication from those of a Checkpointer."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError from error


class Training:
    """A training with small steps, whose parameters and moments the ranks hold in parts."""

    def __init__(self, ranks: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(12, 25), nn.GELU(), nn.Linear(25, 24), nn.GELU(), nn.Linear(24, 4))
        if ranks > 1:
            mesh = init_device_mesh("cpu", (ranks,))
            for layer in (self.model[0], self.model[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> None:
        """Train for one step. All ranks take the same batch, so that any number of ranks can take it."""
        inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(number))
        with training_communicates():
            loss = nn.functional.mse_loss(self.model(inputs), inputs[:, :4])
            self.optimizer.zero_grad()
            torch.autograd.backward(loss)
            self.optimizer.step()

    def evaluate(self, model: nn.Module) -> float:
        """Score a model, which the ranks do together."""
        inputs = torch.randn(32, 12, generator=torch.Generator().manual_seed(1))
        return float(nn.functional.mse_loss(model(inputs), inputs[:, :4]))

    def digest(self) -> str:
        """Return a hash of the weights and the moments, as whole tensors. Collective."""
        digest = hashlib.sha256()
        with training_communicates():
            for name, parameter in self.model.named_parameters():
                state = {"": parameter, **self.optimizer.state.get(parameter, {})}
                for key, tensor in sorted(state.items()):
                    digest.update(f"{name}.{key}".encode() + _whole(tensor).numpy().tobytes())
        return digest.hexdigest()


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def train_and_save(folder: Path, seed: int, ranks: int, rank: int, report: Report) -> None:
    """Train until a rank is killed: save, save again, go back. All ranks draw the same."""
    torch.set_num_threads(1)
    _report_moments(report)
    draw, training = random.Random(seed), Training(ranks)
    quality: Literal["lossless", "balanced"] = "lossless" if draw.random() < 0.5 else "balanced"
    scores = quality == "balanced" and draw.random() < 0.33
    ckpt = dq.Checkpointer(
        folder,
        training.model,
        training.optimizer,
        evaluate=training.evaluate if scores else None,
        quality=quality,
        keep=dq.Keep(last=KEEP_LAST, keyframe_every=5),
    )
    try:
        _save_and_go_back(folder, draw, training, ckpt, quality == "lossless", rank, report)
    except Exception as error:
        where = "".join(traceback.format_exception(error))
        report(["stopped", isinstance(error, dq.DynaquantError | CommunicationError), where])
    try:
        ckpt.close()
    except Exception as error:
        report(["closed", isinstance(error, dq.DynaquantError), f"{type(error).__name__}: {error}"])


def _save_and_go_back(
    folder: Path,
    draw: random.Random,
    training: Training,
    ckpt: dq.Checkpointer,
    exact: bool,
    rank: int,
    report: Report,
) -> None:
    left = [path.name for path in folder.glob("*.tmp")] + sorted(_unneeded(folder)) if rank == 0 else []
    report(["restoring"])
    step = ckpt.restore() or 0
    report(["restored", step, training.digest(), [*map(str, ckpt.skipped), *(f"{name} was left" for name in left)]])
    while True:
        what = draw.choice(["on", "on", "on", "again", "back"])
        steps = [record.step for record in ckpt.records()]
        if what == "back" and steps:
            report(["restoring"])
            step = ckpt.restore(draw.choice(steps)) or 0
            report(["went back"])
        for _ in range(draw.randint(1, 2)):
            training.step(step)
        if what != "again" or not steps:
            step += 1
        digest = training.digest()
        report(["saving", step, digest if exact else ""])
        saving = ckpt.save(step)
        if draw.random() < 0.5:
            training.step(step)  # while it is written
        report(["committed", step, saving.result().identity])


def _unneeded(folder: Path) -> set[str]:
    needed = {part.address for file in Run(folder).files()[0] for part in file.header.parts}
    return {path.stem for path in folder.glob("parts/*.dqc")} - needed


def _report_moments(report: Report) -> None:
    """Report when this rank begins and ends to write its part, and when rank 0 deletes what is not kept."""
    stage: Any = CommitStage
    module: Any = commit_stage
    write, prune = module.write_part, stage._prune

    def writing(*args: Any, **kwargs: Any) -> Any:
        report(["writing"])
        result = write(*args, **kwargs)
        report(["written"])
        return result

    def pruning(*args: Any) -> Any:
        report(["pruning"])
        result = prune(*args)
        report(["pruned"])
        return result

    module.write_part = writing
    stage._prune = pruning


def check(folder: Path, commits: list[Commit], begun: Commit | None, report: Report) -> None:
    """Report the commits that are known after a kill, and the errors that were found."""
    ledger = Ledger()
    ledger.commits = commits
    settled = ledger.settle(Run(folder), begun)
    errors = [*ledger.errors_of_steps(folder)]
    errors += [f"verify: {error}" for _, error in verify_run(Run(folder)) if error is not None]
    report([settled, [vars(commit) for commit in ledger.commits], errors])


class Kills:
    """Launches trainings on a run, kills ranks of them, and collects counts and errors."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._draw = folder, random.Random(seed)
        self.counts, self.errors = Counter[str](), list[str]()
        self.slowest = 0.0
        """The longest time in which the other ranks have ended, in seconds."""
        self._ledger = Ledger()
        self._typical: dict[str, float] = {}  # seconds from each word of a report to the next

    def launch(self, n: int) -> None:
        """Launch a training, kill one or several of its ranks, and check the run."""
        count = self._draw.randint(1, MOST_RANKS)
        self.counts[f"launches of {count} ranks"] += 1
        act = partial(train_and_save, self._folder, self._draw.randrange(2**32), count)
        launched = Ranks(count, act, TIMEOUT)
        ranks = launched.ranks
        self._wait_for_a_moment(launched)
        victims = self._draw.sample(ranks, self._draw.choice([1, 1, 1, 1, count, self._draw.randint(1, count)]))
        early = [rank for rank in ranks if rank.ended or rank.last("stopped")]
        at = time.perf_counter()
        words = [rank.reports[-1][0] if rank.reports else "" for rank in ranks]
        for victim in victims:
            victim.kill()
        late = launched.end(LIMIT)
        self.slowest = max(self.slowest, time.perf_counter() - at)
        if early:
            texts = [" ".join(map(str, report)) for rank in early for report in rank.reports[-3:]]
            self.errors.append(f"kill {n}: ranks ended before it: " + "\n".join(texts))
        self.errors += [f"kill {n}: rank {number} did not end: {ranks[number].reports[-1:]}" for number in late]
        self._count(ranks, victims, words)
        for number, rank in enumerate(ranks):
            self.errors += [f"kill {n}: rank {number}: {text}" for text in _unexpected(rank)]
        self._check(n, ranks)

    def _wait_for_a_moment(self, launched: Ranks) -> None:
        """Wait until rank 0 has begun to do something, for the first or a later time, and for a part of that."""
        word = self._draw.choice(
            ["restoring", "saving", "writing", "pruning", "pruning", "written", "committed", "restored"]
        )
        if len(launched.ranks) == 1 and word in ("writing", "written"):
            word = "saving"
        times, rank = 1 if word in ("restoring", "restored") else self._draw.choice([1, 1, 2, 3]), launched.ranks[0]
        if not launched.wait(lambda: sum(report[0] == word for report in rank.reports) >= times, LIMIT):
            self.errors.append(f"rank 0 was not {word} {times} times in {LIMIT:.0f} seconds: {rank.reports[-3:]}")
        for (before, *_), begin, end in zip(rank.reports, rank.seconds, rank.seconds[1:], strict=False):
            self._typical[before] = 0.8 * self._typical.get(before, 0.0) + 0.2 * (end - begin)
        launched.wait(lambda: False, self._draw.uniform(0, 1.3 * self._typical.get(word, 0.02)))

    def _count(self, ranks: list[Rank], victims: list[Rank], words: list[str]) -> None:
        counts = self.counts
        counts["kills"] += 1
        counts["killed ranks"] += len(victims)
        counts["kills of rank 0"] += ranks[0] in victims
        counts["kills of all ranks"] += len(victims) == len(ranks)
        word = victims[0].reports[-1][0] if victims[0].reports else "starting"
        deleting = words[0] == "pruning" and word in ("written", "pruning")  # while the others wait for rank 0
        counts[f"kills during {'retention' if deleting else MOMENTS.get(word, 'training')}"] += 1
        counts["kills that left unneeded parts"] += bool(_unneeded(self._folder)) if self._folder.exists() else 0

    def _check(self, n: int, ranks: list[Rank]) -> None:
        newest = self._ledger.commits[-1] if self._ledger.commits else None
        for rank in ranks:
            if (restored := rank.last("restored")) is not None:
                _, step, digest, problems = restored
                self.errors += [f"kill {n}: restored {step}: {text}" for text in problems]
                if step != (newest.step if newest else 0):
                    self.errors.append(f"kill {n}: step {step} was restored, not {newest and newest.step}")
                elif newest and newest.state and digest != newest.state:
                    self.errors.append(f"kill {n}: step {step} was restored, but not bit for bit")
        self.counts["restores that were compared"] += ranks[0].last("restored") is not None
        begun: Commit | None = None
        for word, *rest in max((rank.reports for rank in ranks), key=_progress):
            if word == "saving":
                begun = Commit(rest[0], None, rest[1])
            elif word == "committed" and begun is not None:
                self._ledger.add(replace(begun, identity=rest[1]))
                begun = None
                self.counts["commits"] += 1
        checker, reader = forked(lambda report: check(self._folder, self._ledger.commits, begun, report))
        answers = reports_of(reader)
        os.waitpid(checker, 0)
        if not answers or answers[0][0] == "raised":
            self.errors.append(f"kill {n}: {answers[0][1] if answers else 'the check hung'}")
            return
        settled, commits, found = answers[0]
        self.counts["kills after a commit that was not reported"] += settled
        self.errors += [f"kill {n}: {text}" for text in found]
        self._ledger.commits = [Commit(**commit) for commit in commits]


def _progress(reports: list[Any]) -> tuple[int, int]:
    words = [word for word, *_ in reports]
    return words.count("committed"), words.count("saving")


def _unexpected(rank: Rank) -> list[str]:
    """Return the errors of a rank that are not about a rank that has stopped."""
    wrong = [text for word, text, *_ in (r for r in rank.reports if r[0] == "raised")]
    return wrong + [r[2] for r in rank.reports if r[0] in ("stopped", "closed") and not r[1]]


def sharded(folder: Path, count: int, seed: int, progress: Callable[[int], None]) -> tuple[Counter[str], list[str]]:
    """Kill ranks ``count`` times. Returns how often each event occurred, and the errors that were found."""
    import_for(lambda: Training(64).step(1))
    kills = Kills(folder, seed)
    for n in range(count):
        progress(n)
        kills.launch(n)
        if len(kills.errors) >= 20:
            break
    kills.counts["seconds until the other ranks had ended, at most"] = round(kills.slowest)
    return kills.counts, kills.errors
