"""A small training with everything that a report can show: a metric, searches, keyframes, a restore."""

import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import dynaquant as dq
from dynaquant.demo.models import GPT

CONTEXT, EVERY, SAVES, RESTORED_AFTER = 32, 20, 14, 9


def train_reported(folder: Path) -> None:
    """Train a GPT of 0.1 million weights on Python source text; 14 checkpoints, the last five after a restore."""
    text = torch.frombuffer(bytearray(Path(os.__file__).with_name("argparse.py").read_bytes()), dtype=torch.uint8)
    held_out = _windows(text[-20_000:], 64, torch.Generator().manual_seed(1))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def evaluate(model: nn.Module) -> float:
        model.eval()
        return loss(model, held_out).item()

    def train(until: int) -> None:
        torch.manual_seed(0)
        model = GPT(vocabulary=256, context=CONTEXT, width=48, layers=3, heads=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        order = torch.Generator().manual_seed(0)
        with dq.Checkpointer(
            folder,
            model,
            optimizer,
            extras={"order": order},
            evaluate=evaluate,
            keep=dq.Keep(keyframe_every=6),
            every=EVERY,
        ) as ckpt:
            step = ckpt.restore() or 0
            while step < until:
                model.train()
                loss(model, _windows(text[:-20_000], 16, order)).backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if ckpt.due(step):
                    ckpt.save(step)

    train(RESTORED_AFTER * EVERY)
    train(SAVES * EVERY)


def _windows(text: torch.Tensor, count: int, source: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=source)
    return text[starts + torch.arange(CONTEXT + 1)].long()
