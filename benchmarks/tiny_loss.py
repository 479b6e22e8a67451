"""Train four small networks to tiny losses, and restore each six times: where do they end?

    python benchmarks/tiny_loss.py [--seeds 4]

All data are in every batch of three of them, so nothing but a restore disturbs these. Each restore happens in a new
model and a new optimizer, some steps after the checkpoint. The same is done without a metric, with one, and lossless.
"""

from __future__ import annotations

import logging
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import options
import torch
from results import Table, machine, publish, sentence, show
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LRScheduler, OneCycleLR

import dynaquant as dq

RESTORES = 6


class ExactFit:
    """Fits 256 points exactly: Adam, a rate that rises and falls, float32. The end is the loss."""

    title, steps, every, lost = "exact fit", 3000, 150, 40

    def __init__(self, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(8, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1)
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.schedule: LRScheduler | None = OneCycleLR(self.optimizer, 3e-3, total_steps=steps)
        self.inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(5))
        self.wanted = torch.sin(self.inputs[:, :1] * 2) * self.inputs[:, 1:2]

    def loss(self, model: nn.Module) -> Tensor:
        """Return what is minimized."""
        return F.mse_loss(model(self.inputs), self.wanted)

    def step(self) -> None:
        """Take one step of the optimizer."""

        def closure() -> float:
            self.optimizer.zero_grad()
            loss = self.loss(self.model)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item()

        self.optimizer.step(closure)
        if self.schedule is not None:
            self.schedule.step()

    def metric(self, model: nn.Module) -> float:
        """Return what searches see: the loss."""
        with torch.enable_grad():
            return self.loss(model).item()

    def end(self) -> float:
        """Return the decimal logarithm of the error at the end."""
        return math.log10(self.metric(self.model))


class Equation(ExactFit):
    """Solves a differential equation in float64: Adam, a rate that falls. The end is the error of the solution."""

    title, steps, every, lost = "equation, float64", 4000, 200, 50

    def __init__(self, seed: int, steps: int) -> None:  # noqa: ARG002 - the rate does not depend on them
        torch.manual_seed(seed)
        layers = nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        self.model = nn.Sequential(*layers).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.schedule = ExponentialLR(self.optimizer, 0.9985)
        self.inputs = torch.linspace(0, 1, 128, dtype=torch.float64)[:, None]

    def loss(self, model: nn.Module) -> Tensor:
        at = self.inputs.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), at, create_graph=True)
        source = math.pi**2 * (torch.sin(math.pi * at) + 4.5 * torch.sin(3 * math.pi * at))
        borders: Tensor = model(self.inputs[[0, -1]])
        return (curvature + source).square().mean() + 100 * borders.square().mean()

    def end(self) -> float:
        with torch.no_grad():
            solution = torch.sin(math.pi * self.inputs) + 0.5 * torch.sin(3 * math.pi * self.inputs)
            return math.log10((self.model(self.inputs) - solution).square().mean().sqrt().item())


class Lbfgs(ExactFit):
    """Fits 256 points by LBFGS in float64. The end is the loss."""

    title, steps, every, lost = "LBFGS, float64", 200, 15, 3

    def __init__(self, seed: int, steps: int) -> None:  # noqa: ARG002 - there is no schedule
        torch.manual_seed(seed)
        layers = nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
        self.model = nn.Sequential(*layers).double()
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), lr=0.5, max_iter=4, history_size=20)
        self.schedule = None
        self.inputs = torch.rand(256, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 2 - 1
        self.wanted = torch.sin(3 * self.inputs[:, :1]) * torch.cos(2 * self.inputs[:, 1:])


class Sine(nn.Linear):
    """A layer of a SIREN (Sitzmann et al., 2020), with its initial weights."""

    def __init__(self, inputs: int, outputs: int, *, is_first: bool = False) -> None:
        super().__init__(inputs, outputs)
        bound = 1 / inputs if is_first else math.sqrt(6 / inputs) / 30
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        """Map a batch of vectors to vectors."""
        return torch.sin(30 * super().forward(input))


class Picture(ExactFit):
    """A SIREN that fits 4,096 pixels, a quarter of them in each batch: Adam, a cosine, float32. The end is the loss."""

    title, steps, every, lost = "SIREN, batches", 1200, 40, 13

    def __init__(self, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(Sine(2, 128, is_first=True), Sine(128, 128), Sine(128, 128), nn.Linear(128, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-4)
        self.cosine = CosineAnnealingLR(self.optimizer, steps)
        self.schedule = self.cosine
        line, generator = torch.linspace(-1, 1, 64), torch.Generator().manual_seed(6)
        self.inputs = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
        coarse, fine = torch.randn(1, 3, 16, 16, generator=generator), torch.randn(4096, 3, generator=generator)
        picture = F.interpolate(coarse, size=64, mode="bicubic")[0].flatten(1).T
        self.wanted = (picture + 0.1 * fine) / 2

    def step(self) -> None:
        """Take one step of the optimizer. The step decides which pixels are in the batch."""
        chosen = torch.Generator().manual_seed(self.cosine.last_epoch)
        batch = torch.randint(len(self.inputs), (1024,), generator=chosen)
        self.optimizer.zero_grad()
        F.mse_loss(self.model(self.inputs[batch]), self.wanted[batch]).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.cosine.step()


TRAININGS = ExactFit, Equation, Lbfgs, Picture


@dataclass
class Row:
    """Results of a training with one kind of checkpoint.

    ends: by seed. worse: by how much they are above those of the same seeds undisturbed. ratio: raw over stored bytes.
    """

    training: str
    checkpoints: str
    ends: list[float]
    worse: list[float] | None = None
    ratio: float | None = None

    @property
    def cells(self) -> list[str]:
        worse = "" if self.worse is None else f"{statistics.mean(self.worse):+.3f}"
        if self.worse is not None and len(self.worse) > 1:
            worse += f" ± {statistics.stdev(self.worse) / math.sqrt(len(self.worse)):.3f}"
        ratio = "" if self.ratio is None else f"{self.ratio:.1f}×"
        return [self.training, self.checkpoints, f"{statistics.mean(self.ends):.2f}", worse, ratio]


VARIANTS: dict[str, Callable[[ExactFit], dict[str, Any]]] = {
    "no metric": lambda _training: {},
    "metric": lambda training: {"evaluate": training.metric},
    "lossless": lambda _training: {"quality": "lossless"},
}
"""Arguments of a Checkpointer."""


def undisturbed(kind: type[ExactFit], seed: int, steps: int) -> float:
    """Return the end of a training without restores."""
    training = kind(seed, steps)
    for _ in range(steps):
        training.step()
    return training.end()


def restored(
    kind: type[ExactFit], seed: int, steps: int, arguments: Callable[[ExactFit], dict[str, Any]]
) -> tuple[float, int, int]:
    """Return the end of a training that is restored ``RESTORES`` times, and raw and stored bytes of its checkpoints."""
    usable = range(kind.every, steps - kind.lost + 1, kind.every)
    crashes = [usable[int((k + 0.5) * len(usable) / RESTORES)] + kind.lost for k in range(RESTORES)]
    raw = stored = 0

    with tempfile.TemporaryDirectory() as name:

        def opened(seed: int) -> tuple[ExactFit, dq.Checkpointer]:
            training = kind(seed, steps)
            extras = {} if training.schedule is None else {"schedule": training.schedule}
            chosen = {"every": kind.every, "extras": extras, **arguments(training)}
            return training, dq.Checkpointer(Path(name), training.model, training.optimizer, **chosen)

        training, checkpointer = opened(seed)
        step = 0
        while step < steps:
            training.step()
            step += 1
            if checkpointer.due(step):
                total = checkpointer.save(step).result().total
                raw, stored = raw + total.raw, stored + total.stored
            if crashes and step == crashes[0]:
                crashes.pop(0)
                checkpointer.close()
                training, checkpointer = opened(seed + 1000 + step)
                step = checkpointer.restore() or 0
        checkpointer.close()
    return training.end(), raw, stored


def measure(seeds: int, part: float) -> list[Row]:
    """Return all results. part: of the steps of each training."""
    rows: list[Row] = []
    for kind in TRAININGS:
        steps = max(int(part * kind.steps), 8 * kind.every)
        alone = [undisturbed(kind, seed, steps) for seed in track(range(seeds), f"{kind.title}, undisturbed")]
        rows.append(Row(kind.title, "undisturbed", alone))
        for name, arguments in VARIANTS.items():
            found = [restored(kind, seed, steps, arguments) for seed in track(range(seeds), f"{kind.title}, {name}")]
            ends, raw, stored = ([each[i] for each in found] for i in range(3))
            worse = [end - before for end, before in zip(ends, alone, strict=True)]
            rows.append(Row(kind.title, name, ends, worse, sum(raw) / sum(stored)))
    return rows


def page(shown: Table, seeds: int, about: str) -> str:
    """Return the page."""
    return f"""# Tiny losses

```
.venv/bin/python benchmarks/tiny_loss.py
```

Four small networks are trained to very small losses, three of them on the same data in every step, so that nothing but
a restore disturbs them. Each is restored {RESTORES} times, in a new model and a new optimizer, {seeds} seeds.

{shown.in_markdown()}

- *End*: the decimal logarithm of the loss, of the equation that of the error of its solution. Lower is better; 0.01 is
  2.3 %. *Worse*: than the same seeds undisturbed, with the standard error.
- *Times smaller*: bytes of all checkpoints, beside those of the raw state.
- The estimate that stands in for a metric is trusted less where gradients have become far weaker
  ([how](../decisions.md#how-far-can-the-estimate-be-trusted)). Then the weights are exact as a rule.

{about}
"""


def main() -> None:
    made = options.parser(__doc__, data=None)
    made.add_argument("--seeds", type=int, default=4)
    arguments = options.parse(made)
    torch.set_num_threads(1)
    logging.getLogger("dynaquant").setLevel(logging.ERROR)  # it warns that weights are stored exactly
    seeds = 1 if arguments.quick else arguments.seeds
    rows = measure(seeds, 0.0 if arguments.quick else 1.0)
    title = f"{RESTORES} restores"
    shown = Table(title, ["training", "checkpoints", "end", "worse", "times smaller"], [row.cells for row in rows])
    described = machine("torch")
    about = f"One thread. {sentence(described)}"
    show(shown, about, width=100)
    numbers = {"machine": described, "rows": [asdict(row) for row in rows]}
    publish(arguments.out, "tiny_loss", numbers, None, page(shown, seeds, about))


if __name__ == "__main__":
    main()
