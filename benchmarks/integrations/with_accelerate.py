"""The training with Accelerate, from its last checkpoint if there is one."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from integrations.byte_model import (
    BATCH,
    CLIPPED,
    LOG_EVERY,
    OWN,
    Ended,
    Training,
    batches,
    ended,
    loss_of,
    main,
    model_of,
    optimizer_of,
    tell_step,
    text_of,
)
from torch import Tensor
from torch.utils.data import DataLoader

import dynaquant as dq
from dynaquant.integrations.accelerate import attach
from dynaquant.store.run import Run


class Progress:
    """How far the training is, and the losses that it has logged, by step. Registered for checkpointing."""

    def __init__(self) -> None:
        self.step = 0
        self.losses: dict[str, float] = {}

    def log(self, loss: Tensor) -> None:
        self.step += 1
        if self.step % LOG_EVERY == 0:
            self.losses[str(self.step)] = float(loss.detach())
        tell_step(self.step)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.losses = state["step"], state["losses"]


def train(training: Training, folder: Path, saving: str) -> Ended:
    text, model = text_of(training), model_of(training)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True),
    )
    optimizer, schedule = optimizer_of(model, training)
    order = torch.Generator().manual_seed(training.seed)
    windows: Any = text.train
    loader = DataLoader(windows, batch_size=BATCH, shuffle=True, generator=order)
    prepared, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    checkpoints = folder / "checkpoints"
    run = Run(checkpoints / "dynaquant")
    if saving != OWN:
        attach(accelerator, run.folder, quality=saving, evaluate=dq.LossOn(batches(text.validation), loss_of))
    if any(checkpoints.glob("checkpoint_*")):
        accelerator.load_state()
    for epoch in count(progress.step // training.epoch):
        loader.set_epoch(epoch)
        done = progress.step % training.epoch
        for batch in accelerator.skip_first_batches(loader, done) if done else loader:
            if progress.step == training.steps:
                number = training.steps // training.every - 1
                last = [checkpoints / f"checkpoint_{number}"] + ([] if saving == OWN else [run.path(training.steps)])
                return ended(model, training, text, progress.step, progress.losses, last, checkpoints)
            prepared.train()
            loss = loss_of(prepared, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), CLIPPED)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.log(loss)
            if progress.step % training.every == 0:
                accelerator.save_state()
    raise AssertionError("the training has no end")


if __name__ == "__main__":
    main(train)
