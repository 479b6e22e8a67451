"""Trains with Accelerate, whose save_state and load_state use a run of dynaquant.

    pip install 'PATH/TO/THE/CLONE[accelerate]'
    python examples/accelerate_loop.py [SECONDS]
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

Trains a small network for 300 steps. It needs no GPU and downloads nothing. SECONDS make every step longer, so that
there is time to kill it. Start it again, and it goes on. (On CPUs, ``accelerate launch --num_processes 2`` starts one
process, so torchrun starts several.)
"""

import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dynaquant as dq
from dynaquant.integrations.accelerate import attach

OUT = Path("runs/mlp")
PAUSE = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
set_seed(0)
inputs = torch.randn(3712, 64)
targets = (inputs[:, :8].sum(1) > 0).long()
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300 * accelerator.num_processes)
loader = DataLoader(
    TensorDataset(inputs[:3200], targets[:3200]),
    batch_size=32 // accelerator.num_processes,
    shuffle=True,
    generator=torch.Generator(),  # a loader without one draws from the random numbers of the training
)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)


def validation_loss(model):
    """Return the loss on data that is not trained on. The checkpoint may make it worse by 1 % at most."""
    model.eval()
    return F.cross_entropy(model(inputs[3200:]), targets[3200:]).item()


attach(accelerator, OUT / "dynaquant", evaluate=validation_loss, keep=dq.Keep(last=3))

step = 0
folders = sorted(OUT.glob("step_*"), key=lambda folder: int(folder.name.removeprefix("step_")))
if folders:
    accelerator.print("going on from", folders[-1])
    accelerator.load_state(folders[-1])
    step = int(folders[-1].name.removeprefix("step_"))

for epoch in range(step // len(loader), 3):
    loader.set_epoch(epoch)
    done = step % len(loader)
    for batch, labels in accelerator.skip_first_batches(loader, done) if done else loader:
        loss = F.cross_entropy(model(batch), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(PAUSE)
        step += 1
        if step % 50 == 0:
            accelerator.save_state(OUT / f"step_{step}")
            accelerator.print(f"saved {OUT}/step_{step}", flush=True)
accelerator.print(f"step {step}: loss {validation_loss(accelerator.unwrap_model(model)):.4f}")
accelerator.print(f"see also: dynaquant log {OUT}/dynaquant")
accelerator.end_training()
