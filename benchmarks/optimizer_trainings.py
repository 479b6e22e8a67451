"""Short trainings of one small network with every optimizer of ``torch.optim`` and ``pytorch_optimizer``.

The network predicts the next character from sixteen. Runs without a schedule end in noise, so all learning rates fall
to zero over the second half.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytorch_optimizer
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from workloads import shakespeare

from dynaquant import LossOn

CONTEXT, BATCH = 16, 32
"""Characters that the network sees, and examples in a batch."""
SEARCH_BATCHES, FINAL = 16, 16384
"""Batches of the search metric, and examples at the end."""
FACTORS = (1, 10, 100)
"""By what the default learning rate is multiplied, if the one before does not train."""

Batch = tuple[Tensor, Tensor]
NewOptimizers = Callable[[nn.Module, float, int], Sequence[Optimizer]]
"""Makes the optimizers of a model, from a factor of the learning rate and the number of steps."""


class CharacterNet(nn.Module):
    """Embeds the characters of a window; two hidden layers; a linear layer. Six tensors, so that a step is short."""

    def __init__(self, characters: int, embedded: int = 16, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, embedded)
        self.layers = nn.Sequential(
            nn.Linear(CONTEXT * embedded, width),
            nn.GELU(),
            nn.Linear(width, width, bias=False),
            nn.GELU(),
            nn.Linear(width, characters),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids (batch, CONTEXT) to logits (batch, characters)."""
        logits: Tensor = self.layers(self.tokens(ids).flatten(1))
        return logits


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy in nats."""
    return F.cross_entropy(model(batch[0]), batch[1])


@lru_cache
def _text(data: Path) -> tuple[Tensor, Tensor, int]:
    return shakespeare(data)


def _examples(tokens: Tensor, starts: Tensor) -> Batch:
    window = tokens[starts[:, None] + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, -1]


class Training:
    """A training at its first step. Everything follows from the seed."""

    def __init__(self, data: Path, new: NewOptimizers, factor: float, steps: int, seed: int) -> None:
        self._tokens, self._held_out, characters = _text(data)
        torch.manual_seed(seed)
        self.model = CharacterNet(characters)
        self.optimizers = list(new(self.model, factor, steps))
        self.schedules = [LambdaLR(each, lambda step: min(1.0, 2 * (1 - step / steps))) for each in self.optimizers]
        self.generator = torch.Generator().manual_seed(seed)

    def step(self) -> None:
        """Train for one step."""
        starts = torch.randint(len(self._tokens) - CONTEXT - 1, (BATCH,), generator=self.generator)
        batch = _examples(self._tokens, starts)

        def closure() -> Tensor:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = loss_of(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        self._set_mode("train")
        needs_closure = [each for each in self.optimizers if "LBFGS" in type(each).__name__]
        if not needs_closure:
            closure()
        for optimizer in self.optimizers:
            optimizer.step(closure) if optimizer in needs_closure else optimizer.step()  # type: ignore[arg-type]
        for schedule in self.schedules:
            schedule.step()

    def loss(self) -> float:
        """Return the loss on held-out text."""
        self._set_mode("eval")
        starts = torch.linspace(len(self._held_out) // 5, len(self._held_out) - CONTEXT - 1, FINAL).long()
        with torch.no_grad():
            return float(loss_of(self.model, _examples(self._held_out, starts)))

    def search_loss(self) -> LossOn:
        """Return the metric of searches, on the first fifth of the held-out text."""
        starts = torch.linspace(0, len(self._held_out) // 5 - CONTEXT - 1, SEARCH_BATCHES * BATCH).long()
        inputs, targets = _examples(self._held_out, starts)
        return LossOn(list(zip(torch.split(inputs, BATCH), torch.split(targets, BATCH), strict=True)), loss_of)

    def _set_mode(self, mode: str) -> None:
        """Tell optimizers that keep an average of the weights (schedule-free) what the weights are needed for."""
        for optimizer in self.optimizers:
            if optimizer.state and callable(change := getattr(optimizer, mode, None)):
                change()


@dataclass(frozen=True)
class Entry:
    """An optimizer of the sweep. skipped: why it is left out, or ``""``."""

    name: str
    package: str
    new: NewOptimizers | None
    skipped: str = ""


def _simple(kind: Callable[..., Optimizer], **settings: Any) -> NewOptimizers:
    """Return a maker of an optimizer with its default settings, but for ``settings``."""
    known = inspect.signature(kind).parameters

    def new(model: nn.Module, factor: float, steps: int) -> Sequence[Optimizer]:
        chosen = dict(settings)
        rate = settings.get("lr", known["lr"].default if "lr" in known else None)
        if isinstance(rate, float | int):
            chosen["lr"] = rate * factor
        if "num_iterations" in known:
            chosen["num_iterations"] = steps
        if "num_data" in known:
            chosen["num_data"] = BATCH * steps
        return [kind(_parameters(kind, model), **chosen)]

    return new


def _parameters(kind: Callable[..., Optimizer], model: nn.Module) -> Any:
    """Return what the constructor wants: the model, groups by whether Muon is to be used, or the parameters."""
    if "model" in inspect.signature(kind).parameters:
        return model
    if kind.__name__ in HYBRIDS:
        matrices = [p for n, p in model.named_parameters() if _is_hidden_matrix(n, p)]
        rest = [p for n, p in model.named_parameters() if not _is_hidden_matrix(n, p)]
        return [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
    return list(model.parameters())


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and name.startswith(("layers.0", "layers.2"))


def _muon(model: nn.Module, factor: float, steps: int) -> Sequence[Optimizer]:  # noqa: ARG001
    """Return Muon for the hidden matrices and AdamW for everything else."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if _is_hidden_matrix(n, p)]
    rest = [p for n, p in named if not _is_hidden_matrix(n, p)]
    return torch.optim.Muon(matrices, lr=0.01 * factor), torch.optim.AdamW(rest, lr=2e-3 * factor)


def of_torch() -> list[Entry]:
    """Return the optimizers of ``torch.optim``."""
    kinds = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    own: dict[str, NewOptimizers] = {
        "SGD": _simple(torch.optim.SGD, lr=0.1, momentum=0.9),
        "RMSprop with momentum": _simple(torch.optim.RMSprop, lr=1e-3, momentum=0.9),
        "Adam, AMSGrad": _simple(torch.optim.Adam, amsgrad=True),
        "LBFGS": _simple(torch.optim.LBFGS, lr=0.1, max_iter=2),  # by default it evaluates twenty times in a step
        "Muon, AdamW": _muon,
    }
    found = {name: _simple(kind) for name, kind in kinds.items() if name not in ("SparseAdam", "Muon")} | own
    entries = [Entry(name, "torch.optim", new) for name, new in sorted(found.items())]
    return [*entries, Entry("SparseAdam", "torch.optim", None, "needs sparse gradients")]


HYBRIDS = ("AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon")
"""Optimizers of ``pytorch_optimizer`` that use Muon for some groups, and another update for the others."""
SPECIAL = {
    "adahessian": "needs second derivatives",
    "sophiah": "needs second derivatives",
    "alig": "needs the loss",
    "bsam": "needs a closure with two passes",
    "lomo": "updates within the backward pass",
    "adalomo": "updates within the backward pass",
    "distributedmuon": "needs several processes",
    "demo": "needs several processes",
    "kron": "a step takes seconds of a CPU",
}


def of_pytorch_optimizer() -> list[Entry]:
    """Return the optimizers of ``pytorch_optimizer`` that are not those of ``torch.optim``."""
    entries = []
    for name in pytorch_optimizer.get_supported_optimizers():
        kind: Any = pytorch_optimizer.load_optimizer(name)
        if kind.__module__.startswith("torch."):
            continue
        skipped = SPECIAL.get(name, "")
        entries.append(Entry(kind.__name__, "pytorch_optimizer", None if skipped else _simple(kind), skipped))
    return sorted(entries, key=lambda entry: entry.name.lower())


def named(entries: Iterable[Entry], names: Sequence[str]) -> list[Entry]:
    """Return the entries with these names; all if there are none."""
    return [entry for entry in entries if not names or entry.name in names]


def quietly() -> None:
    """Keep the optimizers' own warnings from the screen."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
