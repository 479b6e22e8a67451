"""Makes golden files: ``.venv/bin/python tests/support/make_golden.py v<format version>``.

They are made once for each version of the format and never again: later versions of dynaquant must read them unchanged.
They hold a training that uses every feature of the format.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from format_decoder import decode
from sharded_checkpoints import by_columns, by_rows, commit_sharded
from torch import nn
from torch.nn import functional as F

import dynaquant as dq
from dynaquant.engine.forms.external import External
from dynaquant.engine.quantize.knobs import GridConfiguration
from dynaquant.methods.named import METHODS
from dynaquant.store import commit
from dynaquant.store.commit import WritableRun

STEPS = range(10, 121, 10)
SHARDED = [(130, 20, by_rows, 3), (140, 10, by_columns, 2), (150, 110, by_columns, 2), (160, 50, by_rows, 4)]
"""Steps of checkpoints in parts, the step that has the same tensors, and how these are divided."""


class Model(nn.Module):
    """A model with all quantized dtypes, tied, frozen, slow and sparse weights, and buffers of many dtypes."""

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
        self.register_buffer("drift", torch.randn(3000))
        self.register_buffer("field", torch.randn(3, 40, 30).cumsum(1).cumsum(2))
        self.register_buffer("wide_field", torch.randn(50, 40, dtype=torch.float64))
        self.register_buffer("half_field", torch.randn(500).cumsum(0).bfloat16())
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
    """Returns values of all types that a state may hold, except tensors."""

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


class Masters:
    """Float32 master weights, which the half-precision weights are rounded from."""

    def __init__(self, *weights):
        self.copies = [weight.detach().float() for weight in weights]
        self.weights = weights

    @torch.no_grad()
    def step(self):
        for copy, weight in zip(self.copies, self.weights, strict=True):
            weight.copy_(copy.add_(0.003 * torch.randn(copy.shape)))

    def state_dict(self):
        return {"copies": self.copies}

    def load_state_dict(self, state):
        for copy, stored in zip(self.copies, state["copies"], strict=True):
            copy.copy_(stored)


PUBLISHED = {"quality": dq.Quality(configuration=dq.Configuration(bins=20, embedding_bins=12))}
MANNERS = [
    {"quality": dq.Quality("high", configuration=GridConfiguration(-128))},
    {"quality": dq.Quality("high", configuration=GridConfiguration(-136, dithered=True))},
    {"quality": dq.Quality(configuration=dq.Configuration(protected=0.02))},
    {"quality": dq.Quality(configuration=dq.Configuration(protected=0.02, bins=24))},
    PUBLISHED,
    {"quality": dq.Quality("small", configuration=GridConfiguration(-96))},
]
"""The options of the Checkpointers, each for two of the steps."""


def make(folder):
    """Train, and save with each set of options in turn."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    commit.MIN_FROZEN_BYTES = 0  # a golden file is small
    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, max(STEPS))
    masters = Masters(model.bfloat16_layer.weight)
    objects = {"scheduler": scheduler, "order": np.random.default_rng(0), "extra": Extra(), "masters": masters}
    objects["of_masters"] = torch.optim.SGD(masters.copies)  # parameters of an optimizer may be master weights
    model.slow[0, :2] = torch.tensor([300.0, -700.0])  # far outside every grid
    step = 0
    for manner in MANNERS:
        # The format lets either coder code centres. No method does so conditionally now, but older files have it.
        coder = "rearranged" if manner is PUBLISHED else "conditional"
        METHODS["published"] = replace(METHODS["published"], coder=coder)
        roles = {"model.slow": "weight", "model.sparse": "weight", "model.spectrum": "omit"}
        roles |= {"model.field": dq.Bound(absolute=1e-2), "model.*_field": dq.Bound(relative=1e-3)}
        with dq.Checkpointer(
            folder, model, optimizer, extras=objects, roles=roles, keep=dq.Keep(keyframe_every=5), **manner
        ) as ckpt:
            ckpt.restore()
            for _ in range(20):
                step += 1
                tokens = torch.randint(24, (8, 12))
                optimizer.zero_grad()
                F.cross_entropy(model(tokens).flatten(0, 1), (tokens * 5 % 24).flatten()).backward()
                optimizer.step()
                scheduler.step()
                masters.step()
                model.slow += 0.001 * torch.randn(96, 96)
                model.drift *= 1 + 0.001 * torch.randn(3000)
                model.field += 0.01 * torch.randn(3, 40, 30)
                model.wide_field *= 1 + 1e-4 * torch.randn(50, 40)
                model.half_field[step] = float("nan") if step % 4 else 3.0
                model.sparse[tokens[0], torch.randint(2800, (12,))] += 1
                if step > 20:  # no longer frozen
                    model.frozen.weight *= 1.01
                if step in STEPS:
                    ckpt.save(step)

    add_sharded(folder)
    expected = {step: summary(*decode(folder, step)) for step in [*STEPS, *(step for step, *_ in SHARDED)]}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def add_sharded(folder):
    """Add checkpoints in parts, conditioned on one file, on other boxes and on the same boxes."""
    run = WritableRun(folder)
    with run.locked():
        parent = run.file(max(STEPS))
        for step, of, places_of, parts in SHARDED:
            tensors = {n: t for n, t in run.load(run.file(of)).items() if not isinstance(t, External)}
            labels = {entry.name: entry.label for entry in parent.header.entries}
            parent = commit_sharded(run, step, tensors, places_of, parts, parent, labels)


def summary(header, tensors):
    """Return the expected result of a decoder: the identity, and a hash of every tensor's dtype, shape and values."""
    hashes = {
        name: blake3(f"{dtype}{shape}".encode() + values).hexdigest()
        for name, (dtype, shape, values) in tensors.items()
    }
    return {"identity": header["identity"], "tensors": hashes}


if __name__ == "__main__":
    folder = Path(__file__).parents[1] / "golden" / sys.argv[1]
    if folder.exists():
        sys.exit(f"{folder} exists already; golden files are never made again")
    make(folder)
