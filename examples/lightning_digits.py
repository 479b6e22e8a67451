"""Trains with Lightning, which saves to a run of dynaquant.

    pip install 'PATH/TO/THE/CLONE[lightning]'
    python examples/lightning_digits.py [SECONDS]

Trains a small network on made-up digits, for 300 steps. It needs no GPU and downloads nothing. SECONDS make every step
longer, so that there is time to kill it. Start it again, and it goes on.
"""

import sys
import time

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dynaquant as dq
from dynaquant.integrations.lightning import CheckpointIO, Training

OUT = "runs/digits"
PAUSE = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0


class Classifier(LightningModule):
    """Tells ten noisy patterns apart."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))

    def training_step(self, batch, _):
        """Return the loss of a batch."""
        time.sleep(PAUSE)
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, _):
        """Log the loss of a batch."""
        self.log("val_loss", F.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self):
        """Return AdamW and a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)]


seed_everything(0, verbose=False)
digits = torch.randint(10, (4224,))
images = torch.randn(10, 256)[digits] + 3 * torch.randn(4224, 256)
train = DataLoader(TensorDataset(images[:3200], digits[:3200]), batch_size=64, shuffle=True)
validation = DataLoader(TensorDataset(images[3200:], digits[3200:]), batch_size=128)

training = Training()
trainer = Trainer(
    max_epochs=6,
    accelerator="cpu",
    logger=CSVLogger("runs/logs"),
    callbacks=[training, ModelCheckpoint(OUT, monitor="val_loss", save_top_k=2, save_last=True)],
    plugins=[CheckpointIO("high", metric="val_loss", training=training)],
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Classifier()
trainer.fit(model, train, validation, ckpt_path="last")  # begins anew if there is no checkpoint
print(f"{trainer.global_step} steps, loss: {trainer.validate(model, validation, verbose=False)[0]['val_loss']:.3f}")

best = dq.load(trainer.checkpoint_callback.best_model_path)  # for use without a Trainer
Classifier(**best["hyper_parameters"]).load_state_dict(best["state_dict"])
print(f"the checkpoints are in {OUT}; see also: dynaquant log {OUT}/dynaquant")
