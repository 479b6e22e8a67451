"""Sizes of Lightning's own checkpoints, and of dynaquant's, for the same training.

    python benchmarks/lightning_checkpoints.py [--steps 100] [--width 128]

Trains a byte-level transformer on the source code of Python, once with Lightning's own files and once with each
quality. Prints a table. The training is the same each time, so the weights at the end are, too.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dynaquant.integrations.lightning import CheckpointIO, Training

LENGTH = 128
SAVES = 4


class Transformer(LightningModule):  # type: ignore[misc]
    """Predicts the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 3 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def loss(self, batch: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH - 1)
        hidden = self.layers(self.embedding(batch[:, :-1]) + self.positions[:-1], mask, is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, _: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def timed(io: Any) -> tuple[Any, list[float]]:
    """Return a plugin that notes how long each save takes, and these seconds."""
    seconds: list[float] = []
    save = io.save_checkpoint

    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        start = perf_counter()
        save(*args, **kwargs)
        seconds.append(perf_counter() - start)

    io.save_checkpoint = save_checkpoint
    return io, seconds


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=128)
    given = parser.parse_args()
    torch.set_num_threads(1)  # the same sums, however busy the machine is
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text: Any = torch.tensor(list(b"".join(path.read_bytes() for path in files)[: 8192 * LENGTH])).view(-1, LENGTH)
    ends = set()
    whole = 0
    print("| | four checkpoints | smaller by | the Trainer waits, each save |\n|---|---:|---:|---:|")
    for quality, metric in (
        (None, None),
        ("lossless", None),
        ("high", None),
        ("balanced", None),
        ("balanced", "val_loss"),
    ):
        seed_everything(0, verbose=False)
        training = Training()
        io: Any = TorchCheckpointIO()
        if quality is not None:
            io = CheckpointIO(quality, metric=metric, training=training)  # type: ignore[arg-type]
        io, seconds = timed(io)
        with tempfile.TemporaryDirectory() as folder:
            saves = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=given.steps // SAVES)
            trainer = Trainer(
                max_steps=given.steps,
                accelerator="cpu",
                plugins=[io],
                callbacks=[training, saves],
                logger=False,
                limit_val_batches=16,
                val_check_interval=given.steps // SAVES,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            model = Transformer(given.width)
            order = torch.Generator().manual_seed(0)
            train: Any = DataLoader(text[:-256], batch_size=8, shuffle=True, generator=order)
            trainer.fit(model, train, DataLoader(text[-256:], batch_size=8))
            stored = size_of(Path(folder))
        ends.add(blake2b(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
        whole = whole or stored
        name = "Lightning" if quality is None else f'`"{quality}"`' + (f', `metric="{metric}"`' if metric else "")
        print(f"| {name} | {stored / 1e6:.2f} MB | {whole / stored:.1f}× | {sum(seconds) / SAVES:.2f} s |", flush=True)
    if len(ends) != 1:
        raise SystemExit("the trainings differ")


if __name__ == "__main__":
    main()
