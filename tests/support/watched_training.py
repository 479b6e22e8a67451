"""A training that compares its whole state before and after a save, and helpers for saves that are being written."""

import random
import threading
from concurrent.futures import Future

import torch
from torch import nn
from training import bits

import dynaquant as dq
from dynaquant.store.commit import WritableRun


class Training:
    """A small training with all state that a save could disturb: batch norm, dropout, gradients, a generator."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 2))
        self.model[0].bias.requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.order = torch.Generator().manual_seed(1)
        self.evaluations = 0

    def step(self) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 6, generator=self.order)).square().mean().backward()
        self.optimizer.step()

    def evaluate(self, model: nn.Module) -> float:
        """A metric that uses the generators, and changes modes and gradients."""
        self.evaluations += 1
        torch.set_grad_enabled(True)
        model.eval()
        torch.randn(8, generator=self.order)
        inputs = torch.zeros(8, 6).uniform_() * 0 + 1
        loss = model(inputs.requires_grad_()).square().mean() + 1
        loss.backward()
        return loss.item()

    def checkpointer(self, folder, **options) -> dq.Checkpointer:
        options = {"evaluate": self.evaluate, "extras": {"order": self.order}} | options
        return dq.Checkpointer(folder, self.model, self.optimizer, **options)

    def everything(self):
        """Return all state that training depends on. It must be the same before and after a save."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return (
            bits(self.model.state_dict()),
            bits(self.optimizer.state_dict()),
            bits([p.grad for p in self.model.parameters()]),
            [(id(tensor), tensor._version, tensor.requires_grad) for tensor in tensors],
            [module.training for module in self.model.modules()],
            bits(self.order.get_state()),
            bits(torch.get_rng_state()),
            random.getstate(),
            torch.is_grad_enabled(),
        )


def writers() -> int:
    """Return the number of writing threads."""
    return sum(thread.name == "dynaquant" for thread in threading.enumerate())


def held(folder) -> bool:
    """Whether a Checkpointer holds the run."""
    try:
        with WritableRun(folder).locked():
            return False
    except dq.CheckpointError:
        return True


def while_it_writes(training, folder) -> tuple[dq.Checkpointer, Future, threading.Event]:
    """Return a Checkpointer whose first save is being written until the event is set, the save, and the event."""
    writing, go_on = threading.Event(), threading.Event()

    def log_to(_) -> None:
        writing.set()
        go_on.wait()

    ckpt = training.checkpointer(folder, log_to=log_to)
    saving = ckpt.save(1)
    writing.wait()
    return ckpt, saving, go_on
