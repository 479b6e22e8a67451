"""The file format is what docs/format.md says: a decoder written from that page alone agrees with dynaquant.

And it stays so: the files in golden/ were written once by the first version of each format, and are read for ever.
"""

import base64
import json
import math
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from format_decoder import decode
from golden.make import summary
from torch import nn
from training import bits

import dynaquant

GOLDEN = sorted((Path(__file__).parent / "golden").glob("v*"))
CHECKPOINTS = [(folder, int(file.stem[5:])) for folder in GOLDEN for file in sorted(folder.glob("step-*.dqc"))]
EVERY_CHECKPOINT = pytest.mark.parametrize(
    ("folder", "step"), CHECKPOINTS, ids=[f"{folder.name}-{step}" for folder, step in CHECKPOINTS]
)
QUANTIZED = {"float32", "float64", "bfloat16", "float16"}


def tensor_of(dtype, shape, values):
    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(values), dtype=kind).reshape(shape) if values else torch.empty(shape, dtype=kind)


def state_of(node, tensors):
    """The state that a tree stands for, according to docs/format.md."""
    if isinstance(node, list):
        return [state_of(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    kind, content = next(iter(node.items()))
    if kind in ("dict", "ordered_dict", "counter"):
        mapping = {"dict": dict, "ordered_dict": OrderedDict, "counter": Counter}[kind]()
        mapping.update((state_of(key, tensors), state_of(value, tensors)) for key, value in content)
        if "metadata" in node:
            mapping._metadata = state_of(node["metadata"], tensors)
        return mapping
    if kind in ("tuple", "set", "frozenset", "size"):
        build = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}[kind]
        return build(state_of(content, tensors))
    return {
        "tensor": lambda name: tensor_of(*tensors[name]),
        "parameter": lambda name: nn.Parameter(tensor_of(*tensors[name])),
        "ndarray": lambda name: tensor_of(*tensors[name]).numpy(),
        "scalar": lambda pair: np.frombuffer(base64.b64decode(pair[1]), pair[0])[0],
        "float": float,
        "complex": lambda pair: complex(*map(float, pair)),
        "bytes": base64.b64decode,
        "dtype": lambda name: getattr(torch, name),
        "device": torch.device,
    }[kind](content)


def assert_both_decode_alike(folder, step):
    header, tensors = decode(folder, step)
    second, first = state_of(header["tree"], tensors), dynaquant.load(folder, step)
    assert bits(second) == bits(first)
    assert bits(getattr(second["model"], "_metadata", {})) == bits(getattr(first["model"], "_metadata", {}))
    return header


@EVERY_CHECKPOINT
def test_the_second_decoder_reads_golden_files_as_they_were_written(folder, step):
    expected = json.loads((folder / "expected.json").read_text())
    assert summary(*decode(folder, step)) == expected[str(step)]


@EVERY_CHECKPOINT
def test_dynaquant_reads_golden_files_as_the_second_decoder_does(folder, step):
    assert_both_decode_alike(folder, step)


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_every_coding_occurs_in_the_golden_files(folder):
    headers = {step: decode(folder, step)[0] for f, step in CHECKPOINTS if f == folder}
    entries = {(step, entry["name"]): entry for step, header in headers.items() for entry in header["tensors"]}
    codings = {key: entry["coding"] for key, entry in entries.items()}
    above = {  # what each tensor was coded against
        (step, name): codings[header["parent"]["step"], name]
        for step, header in headers.items()
        if header["parent"] is not None
        for name in (entry["name"] for entry in header["tensors"])
    }

    arrangements = {(entry["dtype"], entry["coding"].get("arrangement")) for entry in entries.values()}
    assert {coding["kind"] for coding in codings.values()} == {"raw", "planes", "reference", "quantized"}
    assert arrangements >= {(dtype, how) for dtype in QUANTIZED for how in ("alone", "delta")}
    assert ("float32", "rearranged") in arrangements
    assert any(
        math.prod(e["shape"]) > 65_536 and e["coding"].get("arrangement") == "rearranged" for e in entries.values()
    )

    assert any(codings[key]["kind"] == above[key]["kind"] == "reference" for key in above)
    deltas = [key for key in above if codings[key].get("arrangement") in ("delta", "rearranged")]
    assert any(above[key]["kind"] == "reference" for key in deltas)
    changes = {np.sign(codings[key]["bins"] - above[key].get("bins", 0)) for key in deltas}
    assert changes == {-1, 0, 1}


class Wide(nn.Module):
    """Small, but for one tensor of more than one block."""

    def __init__(self, dtype):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.wide = nn.Linear(16, 4_100, dtype=dtype)
        self.head = nn.Linear(82, 32)

    def forward(self, tokens):
        x = self.wide(self.embedding(tokens).to(self.wide.weight.dtype)).float()
        return self.head(x.unflatten(1, (50, 82)).relu().sum(1))


@pytest.mark.parametrize(
    ("dtype", "bins"),
    [
        (torch.float32, (16, 16, 16)),
        (torch.bfloat16, (254, 1, 254)),
        (torch.float16, (3, 40, 7)),
        (torch.float64, (1, 1, 2)),
    ],
)
def test_both_decoders_agree_on_what_is_written_now(tmp_path, dtype, bins):
    model = Wide(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, count in enumerate(bins):
        configuration = dynaquant.Configuration(bins=count, embedding_bins=count)
        with dynaquant.Checkpointer(tmp_path, model, optimizer, configuration=configuration) as ckpt:
            ckpt.restore()
            for _ in range(3):
                tokens = torch.randint(0, 32, (16,))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(tokens), tokens).backward()
                optimizer.step()
            ckpt.save(step)
    header = assert_both_decode_alike(tmp_path, 2)
    assert header["parent"]["step"] == 1
    wide = next(entry for entry in header["tensors"] if entry["name"] == "model.wide.weight")
    assert wide["coding"]["arrangement"] == "rearranged"
