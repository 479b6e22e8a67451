"""A small training, and a ledger of the checkpoints that its run must hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dynaquant as dq
from dynaquant.state.flatten import flatten
from dynaquant.store.run import Run

KEEP_LAST = 3
"""Checkpoints that the run keeps."""


class Training:
    """A training with steps of less than a millisecond, each of which depends only on the state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Dropout(0.1), nn.Linear(24, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9999)
        self.order = torch.Generator().manual_seed(1)

    def step(self) -> None:
        """Train for one step."""
        self.model.train()
        inputs = torch.randn(8, 12, generator=self.order)
        loss = nn.functional.mse_loss(self.model(inputs), inputs[:, :4])
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.schedule.step()

    def evaluate(self, model: nn.Module) -> float:
        """Score a model. Draws random numbers and changes the mode; a save must restore both."""
        model.eval()
        inputs = torch.randn(32, 12, generator=self.order) + torch.randn(32, 12)
        with torch.no_grad():
            return 1 + nn.functional.mse_loss(model(torch.ones_like(inputs)), torch.ones(32, 4)).item()

    def checkpointer(self, folder: Path) -> dq.Checkpointer:
        """Return a Checkpointer for this training."""
        extras = {"order": self.order, "schedule": self.schedule}
        options: dict[str, Any] = {"keep": dq.Keep(lossless_copy=True, last=KEEP_LAST, keyframe_every=3)}
        return dq.Checkpointer(
            folder,
            self.model,
            self.optimizer,
            extras=extras,
            evaluate=self.evaluate,
            quality=dq.Quality(max_degradation=0.05),
            **options,
        )

    def state(self) -> dict[str, Any]:
        """Return everything that a step depends on."""
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
        """Return a hash of ``state``, and of the modes, which a save could change too."""
        tree, tensors = flatten(self.state())
        modes = [torch.is_grad_enabled(), *(module.training for module in self.model.modules())]
        digest = hashlib.sha256(json.dumps([tree, modes, list(tensors)], default=repr).encode())
        for tensor in tensors.values():
            digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Commit:
    """A checkpoint that was saved.

    identity: of its small form; None if it is not known yet. state: the digest of the training at that time.
    """

    step: int
    identity: str | None
    state: str


class Ledger:
    """The commits that a run must hold.

    commits: in their order, as in a run that keeps everything. If a step is saved again, its first commit is removed.
    """

    def __init__(self) -> None:
        self.commits: list[Commit] = []

    def add(self, commit: Commit) -> None:
        """Add a commit."""
        self.commits = [other for other in self.commits if other.step != commit.step] + [commit]

    def settle(self, run: Run, begun: Commit | None) -> bool:
        """Return whether a save that was cut short has committed its checkpoint. If so, add it."""
        newest = run.summaries()[0][-1:]
        # Two steps may be saved with the same state, which have the same identity.
        known = {(commit.step, commit.identity) for commit in self.commits[-1:]}
        if begun is None or not newest or newest[0].step != begun.step or (begun.step, newest[0].identity) in known:
            return False
        self.add(replace(begun, identity=newest[0].identity))
        return True

    def errors(self, folder: Path) -> Iterator[str]:
        """Yield what is lost, damaged or changed in a run, also of the lossless copy of its newest checkpoint.

        A writer may hold the run, but must not be writing.
        """
        yield from self.errors_of_steps(folder)
        run = Run(folder)
        newest = self.commits[-1] if self.commits else None
        there = run.steps()
        try:
            copy = run.lossless_copy(run.file(newest.step)) if newest and newest.step in there else None
            if newest and copy is None:
                yield f"the lossless copy of step {newest.step} is lost"
            elif copy is not None:
                run.load(copy)
        except dq.CheckpointError as error:
            yield f"the lossless copy of step {newest and newest.step}: {error}"

    def errors_of_steps(self, folder: Path) -> Iterator[str]:
        """Yield what is lost, damaged or changed in a run. See ``errors``."""
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
        if self.commits and summaries and summaries[-1].step != self.commits[-1].step:
            yield f"the newest is step {summaries[-1].step}, not {self.commits[-1].step}"

    def errors_after_restore(self, folder: Path) -> Iterator[str]:
        """Yield what differs after a new training has restored from the run, which no writer may hold."""
        training = Training()
        with training.checkpointer(folder) as ckpt:
            yield from (f"{path.name} was left" for path in folder.glob("*.tmp"))
            step = ckpt.restore()
            yield from (f"skipped: {error}" for error in ckpt.skipped)
            newest = self.commits[-1] if self.commits else None
            if step != (newest and newest.step):
                yield f"step {step} was restored, not {newest and newest.step}"
            elif newest and training.digest() != newest.state:
                yield f"step {step} was restored, but not bit for bit"
