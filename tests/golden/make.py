"""Makes golden files: ``cd tests && ../.venv/bin/python -m golden.make v<format version>``.

They are made once for each version of the format and never again: later versions of dynaquant must read them as they
are. They hold a training in which everything occurs that the format knows.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from format_decoder import decode
from torch import nn
from torch.nn import functional as F

import dynaquant as dq

STEPS = 10, 20, 30, 40


class Model(nn.Module):
    """All dtypes that are quantized, tied weights, frozen ones, slow ones, sparse ones, and buffers of many dtypes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(24, 8)
        self.conv = nn.Conv1d(8, 12, 3, padding=1)
        self.norm = nn.BatchNorm1d(12)
        self.frozen = nn.Linear(12, 8).requires_grad_(False)
        self.float16_layer = nn.Linear(8, 8, dtype=torch.float16)
        self.bfloat16_layer = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.float64_layer = nn.Linear(8, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 24)
        self.head.weight = self.embedding.weight
        self.slow = nn.Parameter(torch.randn(96, 96), requires_grad=False)
        self.sparse = nn.Parameter(torch.zeros(24, 2800), requires_grad=False)
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("spectrum", torch.tensor([1 + 2j, complex(float("nan"), float("-inf"))]))
        self.register_buffer("transposed", torch.arange(6, dtype=torch.int16).reshape(2, 3).T)
        self.register_buffer("float8", torch.linspace(-2, 2, 9).to(torch.float8_e4m3fn))

    def forward(self, tokens):
        x = self.embedding(tokens).transpose(1, 2)
        x = self.frozen(self.norm(self.conv(x)).transpose(1, 2))
        for layer in (self.float16_layer, self.bfloat16_layer, self.float64_layer):
            x = x + layer(x.to(layer.weight.dtype)).relu().float()
        return self.head(x)


class Extra:
    """Values of all types that a state may hold, besides tensors."""

    def state_dict(self):
        return {
            "plain": [
                None,
                True,
                -(2**70),
                0.1,
                1e-300,
                -0.0,
                "é \x00\x7f \U0001f600 \ud800",
                (1, {2}, frozenset("a")),
            ],
            "floats": [float("nan"), float("inf"), float("-inf"), complex(-0.0, float("nan"))],
            "more": [b"\x00\xff", torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), np.float32(0.1)],
            (3, "key"): np.arange(4.0).reshape(2, 2),
        }

    def load_state_dict(self, state):
        pass


def make(folder):
    """A training that goes on with other bins, more and fewer, after its first checkpoint."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, max(STEPS))
    objects = {"scheduler": scheduler, "order": np.random.default_rng(0), "extra": Extra()}
    configuration = dq.Configuration(protected=0.02)
    for steps in (range(1, 11), range(11, 41)):
        with dq.Checkpointer(
            folder, model, optimizer, extras=objects, configuration=configuration, keyframe_every=3
        ) as ckpt:
            ckpt.restore()
            for step in steps:
                tokens = torch.randint(24, (8, 12))
                optimizer.zero_grad()
                F.cross_entropy(model(tokens).flatten(0, 1), (tokens * 5 % 24).flatten()).backward()
                optimizer.step()
                scheduler.step()
                model.slow += 0.001 * torch.randn(96, 96)
                model.sparse[tokens[0], torch.randint(2800, (12,))] += 1
                if step > 20:  # no longer frozen
                    model.frozen.weight *= 1.01
                if step in STEPS:
                    ckpt.save(step)
        configuration = replace(configuration, bins=20, embedding_bins=12)

    expected = {step: summary(*decode(folder, step)) for step in STEPS}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def summary(header, tensors):
    """What is expected of a decoded checkpoint: its identity, and the hash of every tensor's dtype, shape, values."""
    hashes = {
        name: blake3(f"{dtype}{shape}".encode() + values).hexdigest()
        for name, (dtype, shape, values) in tensors.items()
    }
    return {"identity": header["identity"], "tensors": hashes}


if __name__ == "__main__":
    folder = Path(__file__).parent / sys.argv[1]
    if folder.exists():
        sys.exit(f"{folder} is there, and must stay as it is")
    make(folder)
