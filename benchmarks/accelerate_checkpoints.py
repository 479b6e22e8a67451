"""Sizes of the folders of Accelerate's ``save_state``, and of dynaquant's, for the same training.

    python benchmarks/accelerate_checkpoints.py [--steps 200] [--width 256]

Trains a byte-level transformer on the source code of Python, once with Accelerate's own checkpoints and once with each
quality. Prints a table. The training is the same each time, so the weights at the end are, too.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from hashlib import blake2b
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dynaquant as dq
from dynaquant.integrations.accelerate import attach
from dynaquant.saving.presets import QualityName

LENGTH = 128
SAVES = 4


class Transformer(nn.Module):
    """Predicts the next byte, with a causal encoder of PyTorch's layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.head(self.layers(self.bytes(text) + self.places.weight[: text.shape[1]], mask, is_causal=True))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def train(folder: Path, quality: QualityName | None, steps: int, width: int, data: Tensor) -> str:
    """Train, saving four times. Returns the hash of the weights."""
    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model = Transformer(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    loader = DataLoader(TensorDataset(data[:-256]), batch_size=8, shuffle=True, generator=torch.Generator())
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if quality is not None:
        held_out = list(torch.split(data[-256:], 16))
        attach(accelerator, folder / "run", quality=quality, evaluate=dq.LossOn(held_out, loss_of))
    for step, (text,) in enumerate(loader, 1):
        accelerator.backward(loss_of(model, text))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % (steps // SAVES) == 0:
            accelerator.save_state(folder / f"step_{step}")
        if step == steps:
            break
    return blake2b(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=256)
    given = parser.parse_args()
    torch.set_num_threads(1)  # the same sums, however busy the machine is
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in files)[: 8192 * LENGTH]))
    data = text.view(-1, LENGTH)
    ends = set()
    whole = 0
    qualities: tuple[QualityName | None, ...] = (None, "lossless", "high", "balanced", "small")
    print("| | four checkpoints | smaller by |\n|---|---:|---:|")
    for quality in qualities:
        with tempfile.TemporaryDirectory() as folder:
            ends.add(train(Path(folder), quality, given.steps, given.width, data))
            stored = size_of(Path(folder))
        whole = whole or stored
        name = "Accelerate" if quality is None else f'`quality="{quality}"`'
        print(f"| {name} | {stored / 1e6:.2f} MB | {whole / stored:.1f}× |", flush=True)
    if len(ends) != 1:
        raise SystemExit("the trainings differ")


if __name__ == "__main__":
    main()
