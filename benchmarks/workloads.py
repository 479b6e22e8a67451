"""The training runs that benchmarks measure on, and their snapshots, kept in a cache folder.

A snapshot is what a plain ``torch.save`` checkpoint would hold (model, optimizer) plus the moving average of
gradients that sensitivity needs, so that every benchmark sees the same real checkpoints without training again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from dynaquant.demo.models import GPT
from dynaquant.importance import GradientRecorder

CONTEXT, BATCH = 128, 16


def shakespeare(data: Path) -> tuple[Tensor, Tensor, int]:
    """The text as token ids: training part (90 %), validation part (10 %), number of distinct characters."""
    file = data / "shakespeare.txt"
    if not file.exists():
        raise SystemExit(f"{file} not found: --data must name a folder that holds shakespeare.txt")
    text = np.frombuffer(file.read_bytes(), dtype=np.uint8)
    alphabet, ids = np.unique(text, return_inverse=True)
    tokens = torch.from_numpy(ids.astype(np.int64))
    split = int(0.9 * len(tokens))
    return tokens[:split], tokens[split:], len(alphabet)


def batch(tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random batch of windows and the same windows one token later, each of shape (BATCH, CONTEXT)."""
    starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH, 1), generator=generator)
    window = tokens[starts + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, 1:]


def gpt_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def gpt_validation(data: Path, batches: int = 20) -> Callable[[nn.Module], float]:
    """``evaluate`` for the GPT: its loss on fixed validation batches, lower is better."""
    _, held_out, _ = shakespeare(data)
    generator = torch.Generator().manual_seed(1)
    fixed = [batch(held_out, generator) for _ in range(batches)]

    def evaluate(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            return float(np.mean([float(gpt_loss(model, x, y)) for x, y in fixed]))

    return evaluate


def new_gpt(vocabulary: int) -> GPT:
    """The 3.2 M-weight GPT of the published figures."""
    return GPT(vocabulary, CONTEXT, width=256, layers=4, heads=8)


def gpt_snapshots(data: Path, cache: Path, steps: int, every: int, seed: int = 0) -> list[dict[str, Any]]:
    """Train the GPT with AdamW on Shakespeare and return its snapshots, oldest first.

    Each is ``{"step", "model", "optimizer", "gradients"}``. They are taken from ``cache`` where an earlier call
    left them; training takes about ten minutes on two cores otherwise.
    """
    key = hashlib.blake2s(repr((steps, every, seed, CONTEXT, BATCH, torch.__version__)).encode()).hexdigest()[:12]
    files = [cache / f"gpt-{key}-{step}.pt" for step in range(every, steps + 1, every)]
    if not all(file.exists() for file in files):
        cache.mkdir(parents=True, exist_ok=True)
        train, _, vocabulary = shakespeare(data)
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        model = new_gpt(vocabulary)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
        parameters = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
        recorder = GradientRecorder(parameters, optimizer, window=50, interval=every)
        for step in track(range(1, steps + 1), description="training the GPT"):
            loss = gpt_loss(model, *batch(train, generator))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % every == 0:
                snapshot = {
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "gradients": recorder.collect(),
                }
                torch.save(snapshot, files[step // every - 1])
    return [torch.load(file, weights_only=True) for file in files]
