"""The training with Lightning, from its last checkpoint if there is one."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from integrations.byte_model import (
    BATCH,
    CLIPPED,
    LOG_EVERY,
    OWN,
    VALIDATED,
    Ended,
    Training,
    Window,
    ended,
    loss_of,
    main,
    model_of,
    optimizer_of,
    tell_step,
    text_of,
)
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from dynaquant.integrations.lightning import CheckpointIO
from dynaquant.integrations.lightning import Training as TrainingCallback


class Module(LightningModule):  # type: ignore[misc]  # Lightning is not type-checked
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.model, self.training_plan = model_of(training), training

    def training_step(self, batch: Window, _: int) -> Tensor:
        loss = loss_of(self.model, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Window, _: int) -> None:
        self.log("val_loss", loss_of(self.model, batch), batch_size=BATCH)

    def configure_optimizers(self) -> Any:
        optimizer, schedule = optimizer_of(self.model, self.training_plan)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Teller(Callback):  # type: ignore[misc]  # Lightning is not type-checked
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        tell_step(trainer.global_step)


def logs_in(folder: Path) -> dict[str, str]:
    """Return what was logged, by step and name. What a resumed training logs replaces what was logged before."""
    found: dict[str, str] = {}
    for version in sorted(folder.glob("version_*"), key=lambda path: int(path.name.rpartition("_")[2])):
        if (version / "metrics.csv").exists():
            with (version / "metrics.csv").open() as file:
                for row in csv.DictReader(file):
                    found |= {f"{row['step']} {name}": value for name, value in row.items() if value}
    return found


def train(training: Training, folder: Path, saving: str) -> Ended:
    text, module, callback = text_of(training), Module(training), TrainingCallback()
    plugin: Any = None
    if saving == VALIDATED:
        plugin = CheckpointIO(metric="val_loss", training=callback)
    elif saving != OWN:
        plugin = CheckpointIO(saving, training=callback)  # type: ignore[arg-type]
    checkpoints = folder / "checkpoints"
    saves = ModelCheckpoint(checkpoints, save_top_k=-1, save_last="link")  # saves after each validation
    trainer = Trainer(
        max_steps=training.steps,
        accelerator="cpu",
        gradient_clip_val=CLIPPED,
        plugins=[plugin] if plugin else None,
        callbacks=[callback, saves, Teller()],
        logger=CSVLogger(folder, name="logs", flush_logs_every_n_steps=1),
        log_every_n_steps=LOG_EVERY,
        val_check_interval=training.every,
        check_val_every_n_epoch=None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(training.seed)  # draws the order of the data
    train_windows: Any = text.train
    loader = StatefulDataLoader(train_windows, batch_size=BATCH, shuffle=True)  # remembers its position in an epoch
    validation: Any = text.validation
    trainer.fit(module, loader, DataLoader(validation, batch_size=BATCH), ckpt_path="last")
    last = [path for path in checkpoints.glob(f"*step={training.steps}.ckpt") if not path.is_symlink()]
    if saving != OWN:
        last += [*(checkpoints / "dynaquant").glob(f"*{training.steps}.dqc")]
    history = logs_in(folder / "logs")
    return ended(module.model, training, text, trainer.global_step, history, last, checkpoints)


if __name__ == "__main__":
    main(train)
