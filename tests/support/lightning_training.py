"""A training with Lightning that a test may kill, for ``forked_trainings``."""

import random
import sys
import time
import warnings
from hashlib import blake2b
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from forked_trainings import say, serve
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from where import on_cpu

from dynaquant.integrations.lightning import CheckpointIO, Training

EPOCHS, STEPS_PER_EPOCH = 6, 8

WARNINGS = (
    "GPU available but not used",
    "The '.*_dataloader' does not have many workers",
    "Checkpoint directory .* exists and is not empty",
    "Experiment logs directory .* exists",
    "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
    "Using the same log directory",
    '.*ckpt_path="last".* is set, but there is no last checkpoint',
    "The number of training batches",
    "Starting from v1.9.0, `tensorboardX`",
    ".*does not have a .*dataloader",
)
"""What Lightning warns of in trainings as small as these."""


class Module(LightningModule):
    """A small classifier. Its dropout depends on random numbers. Its first layer can be frozen."""

    def __init__(self, width: int = 32, frozen: bool = False, **others: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        dropout = nn.Dropout(others.get("dropout", 0.2))
        self.net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), dropout, nn.Linear(width, 64), nn.Linear(64, 2))
        self.register_buffer("scale", torch.rand(16) + 0.5)
        self.net[0].requires_grad_(not frozen)
        self.validated = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs * self.scale)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated += 1
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))
        self.log_dict({"noise": torch.rand(()).item() + random.random() + np.random.rand()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


class Speaker(Callback):
    """Prints every step, and makes it longer."""

    def __init__(self, pause: float) -> None:
        self._pause = pause

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        say("step", trainer.global_step)
        time.sleep(self._pause)


def data(number: int, seed: int) -> TensorDataset:
    inputs = torch.randn(number, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def trainer_of(
    folder: Any,
    quality: str | None,
    *,
    asynchronous: bool = False,
    metric: str | None = None,
    callbacks: tuple[Callback, ...] = (),
    epochs: int = EPOCHS,
    devices: int = 1,
    io: dict[str, Any] | None = None,
    **changes: Any,
) -> Trainer:
    """Return a Trainer. quality: None for Lightning's own checkpoints. changes: for ``ModelCheckpoint``."""
    training = Training()
    plugin: Any = None
    if quality is not None:
        plugin = CheckpointIO(quality, metric=metric, training=training, **(io or {}))
        plugin = AsyncCheckpointIO(plugin) if asynchronous else plugin
    settings = {"monitor": "val_loss", "save_last": True, **changes}
    return Trainer(
        accelerator="cpu" if on_cpu(devices) else "auto",
        max_epochs=epochs,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        plugins=[plugin] if plugin else None,
        callbacks=[training, ModelCheckpoint(Path(folder) / "checkpoints", **settings), *callbacks],
        logger=CSVLogger(folder, name="logs", flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(trainer: Trainer, module: Module | None = None, resume: str | None = "last", **others: Any) -> Module:
    """Train to the end. others: for a new module."""
    lightning.seed_everything(1, verbose=False)
    module = module or Module(**others)
    loaders = DataLoader(data(256, 1), batch_size=32, shuffle=True), DataLoader(data(128, 2), batch_size=32)
    trainer.fit(module, *loaders, ckpt_path=resume)
    return module


def hash_of(module: nn.Module) -> str:
    return blake2b(b"".join(p.detach().cpu().numpy().tobytes() for p in module.parameters())).hexdigest()


def silence() -> None:
    warnings.simplefilter("error")
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message)


def train(folder: str, pause: float = 0.0, module: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Train to the end, from the last checkpoint if there is one.

    pause: seconds that each step takes longer. module: arguments of the module.
    """
    trainer = trainer_of(folder, callbacks=(Speaker(pause),), **changes)
    found = fit(trainer, **(module or {}))
    return {"weights": hash_of(found), "steps": trainer.global_step, "epochs": trainer.current_epoch}


if __name__ == "__main__":
    torch.set_num_threads(1)
    silence()
    if len(sys.argv) > 1:  # as one of several ranks
        warnings.simplefilter("ignore")
    serve(train)
