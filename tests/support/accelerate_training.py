"""A training with Accelerate that a test may kill, for ``forked_trainings``."""

import os
import signal
import time
import warnings
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from forked_trainings import say, serve
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from where import on_cpu

from dynaquant.integrations.accelerate import attach

EPOCHS, BATCHES, ACCUMULATED = 4, 30, 2
STEPS = EPOCHS * BATCHES // ACCUMULATED
SAVE_EVERY = 5


def data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(16 * BATCHES + 128, 16, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, :4].sum(1) > 0).long()


def model_of() -> nn.Module:
    """Return a model whose dropout depends on random numbers."""
    return nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 2))


def validation_loss(model: nn.Module) -> float:
    model.eval()
    device = next(model.parameters()).device
    inputs, targets = (tensor.to(device) for tensor in data())
    return F.cross_entropy(model(inputs[-128:]), targets[-128:]).item()


def accelerator_of(folder: Any, loader: str = "seedable", limit: int | None = 3, automatic: bool = True) -> Accelerator:
    """loader: "seedable", or "stateful", which remembers its position."""
    return Accelerator(
        cpu=on_cpu(),
        gradient_accumulation_steps=ACCUMULATED,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, use_stateful_dataloader=loader == "stateful"
        ),
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=automatic, total_limit=limit),
    )


def prepared(accelerator: Accelerator) -> tuple[Any, Any, Any, Any]:
    """Return a model, an optimizer, a data loader and a scheduler, prepared."""
    set_seed(1)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = data()
    generator = torch.Generator().manual_seed(1)  # so that loaders draw none of the random numbers of the training
    dataset = TensorDataset(inputs[:-128], targets[:-128])
    batch_size = 16 // accelerator.num_processes
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS * accelerator.num_processes)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def hash_of(model: nn.Module) -> str:
    return blake2b(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()


def train(
    folder: str, loader: str = "seedable", kill_at: int = 0, pause: float = 0.0, **options: Any
) -> dict[str, Any]:
    """Train to the end, from the last checkpoint if there is one. Prints every step. Returns what it ends with.

    kill_at: the step at which all ranks are killed. pause: seconds that each step takes longer. options: for
    ``attach``; without ``quality``, nothing is saved.
    """
    accelerator = accelerator_of(folder, loader)
    model, optimizer, batches, scheduler = prepared(accelerator)
    progress: dict[str, Any] = {"epoch": 0, "batch": 0, "step": 0, "history": []}
    saves = "quality" in options
    if saves:
        options = {"evaluate": validation_loss, **options}
        attach(accelerator, Path(folder) / "run", extras={"progress": progress}, **options)
        if (Path(folder) / "checkpoints").exists():
            accelerator.load_state()
            say("resumed", progress["step"])
    for epoch in range(progress["epoch"], EPOCHS):
        batches.set_epoch(epoch)
        rest = batches
        if loader == "seedable" and progress["batch"]:
            rest = accelerator.skip_first_batches(batches, progress["batch"])
        for inputs, targets in rest:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress["batch"] = (progress["batch"] + 1) % BATCHES
            progress["epoch"] = epoch + (progress["batch"] == 0)
            if not accelerator.sync_gradients:
                continue
            progress["step"] += 1
            progress["history"].append(accelerator.gather(loss.detach()).mean().item())
            say("step", progress["step"])
            time.sleep(pause)
            if progress["step"] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if saves and progress["step"] % SAVE_EVERY == 0:
                accelerator.save_state()
    result = {"weights": hash_of(model), "history": progress["history"], "steps": progress["step"]}
    # PyTorch ends the threads of gloo while it holds the interpreter's lock if DDP is the last to hold the group, and
    # one of them may wait for that lock to forget the last reduction: so the group is destroyed last.
    model, optimizer, batches, scheduler = accelerator.free_memory(model, optimizer, batches, scheduler)
    del loss
    accelerator.end_training()
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # by torchdata
    serve(train)
