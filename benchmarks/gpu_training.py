"""The training of ``gpu.py``: a GPT in bfloat16 with float32 master weights, on text from a random Markov chain."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynaquant as dq
from dynaquant.demo.models import GPT

SUCCESSORS = 16
"""Tokens that may follow a token; each is half as probable as the one before."""
BATCHES = 8
"""Held-out batches of the metric."""
AHEAD = 256
"""Batches of text that are drawn at a time."""


@dataclass(frozen=True)
class Size:
    """Sizes of a model, of its batches, and of the values that are clustered."""

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    batch: int
    values: int


SIZES = {
    "gpt2": Size(50_257, 256, 768, 12, 12, 16, 100_000_000),
    "tiny": Size(300, 16, 32, 2, 2, 4, 100_000),
}


class Text:
    """Batches of token ids from a Markov chain, the same for the same seed. Its state is the number of the next one."""

    def __init__(self, size: Size, device: str, seed: int) -> None:
        self._size, self._device, self._seed = size, device, seed
        shape = size.vocabulary, SUCCESSORS
        self._successors = torch.randint(size.vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(device)
        self._drawn: tuple[int, Tensor] | None = None
        self._next = 0

    def batch(self) -> Tensor:
        """Return token ids, int64 (batch, context + 1)."""
        part, number = divmod(self._next, AHEAD)
        if self._drawn is None or self._drawn[0] != part:
            self._drawn = part, self._draw(part)
        self._next += 1
        return self._drawn[1][number]

    def _draw(self, part: int) -> Tensor:
        """Return a part of the batches: (AHEAD, batch, context + 1)."""
        size, generator = self._size, torch.Generator().manual_seed(self._seed << 32 | part)
        many = AHEAD * size.batch
        draws = torch.rand(many, size.context, generator=generator).to(self._device)
        choices = (-(1 - draws).log2()).long().clamp(max=SUCCESSORS - 1)
        found = [torch.randint(size.vocabulary, (many,), generator=generator).to(self._device)]
        for at in range(size.context):
            found.append(self._successors[found[-1], choices[:, at]])
        return torch.stack(found, dim=1).view(AHEAD, size.batch, size.context + 1)

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch in nats."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


class Training:
    """A model in bfloat16, its float32 master weights, and AdamW on these."""

    def __init__(self, size: Size, device: str) -> None:
        torch.manual_seed(0)
        self.model = GPT(size.vocabulary, size.context, size.width, size.layers, size.heads).to(device, torch.bfloat16)
        self.weights: list[Tensor] = list(self.model.parameters())
        self.masters = nn.ParameterList(nn.Parameter(weight.detach().float()) for weight in self.weights)
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), 3e-4)
        self.text = Text(size, device, 1)
        held_out = Text(size, device, 2)
        self.held_out = [held_out.batch() for _ in range(BATCHES)]

    def step(self) -> None:
        loss_of(self.model, self.text.batch()).backward()  # type: ignore[no-untyped-call]
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, list(self.masters))

    def steps(self, count: int) -> float:
        """Return the seconds that a step takes."""
        synchronize()
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        synchronize()
        return (time.perf_counter() - began) / count

    def loss(self) -> float:
        with torch.no_grad():
            return statistics.fmean(loss_of(self.model, batch).item() for batch in self.held_out)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "masters": self.masters.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.masters.load_state_dict(state["masters"])
        self.optimizer.load_state_dict(state["optimizer"])

    def checkpointer(self, folder: Path, metric: bool = True, **options: Any) -> dq.Checkpointer:
        evaluate = dq.LossOn(self.held_out, loss_of) if metric else None
        extras = {"masters": self.masters, "text": self.text}
        return dq.Checkpointer(folder, self.model, self.optimizer, extras=extras, evaluate=evaluate, **options)


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
