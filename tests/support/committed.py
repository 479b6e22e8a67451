"""Makes checkpoints of small tensors and commits them to a run."""

import torch
from torch import Tensor
from training import bits

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.scheme import Coder
from dynaquant.engine.forms.stored import values_of
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.kmeans_weights import kmeans_weights, quantize_weights
from dynaquant.engine.quantize.knobs import Configuration
from dynaquant.state.flatten import flatten
from dynaquant.store.commit import WritableRun
from dynaquant.store.container import CheckpointFile
from dynaquant.store.run import Run
from dynaquant.store.writing import Checkpoint


def checkpoint_of(
    step: int,
    weights: dict[str, Tensor],
    exact: dict[str, Tensor] | None = None,
    plain=None,
    bins: int = 16,
    coder: Coder = "conditional",
) -> Checkpoint:
    """Return a checkpoint of quantized weights, exact tensors and plain values."""
    exact = exact or {}
    labels = {name: Label("weight", "linear") for name in weights} | {name: Label("exact") for name in exact}
    quantized = quantize_weights(kmeans_weights(weights, labels, {}), Configuration(bins=bins, embedding_bins=bins))
    tree, _ = flatten([sorted(weights), sorted(exact), plain])
    return Checkpoint(step, tree, {**quantized, **exact}, labels, {"notes": ["a note"]}, coder)


def values(tensors: dict[str, StoredTensor]) -> dict[str, tuple]:
    return {name: bits(values_of(stored)) for name, stored in tensors.items()}


def assert_holds(run: Run, checkpoint: Checkpoint) -> CheckpointFile:
    """Assert that a new reader of the folder finds exactly this checkpoint. Returns its file."""
    run = Run(run.folder)
    file = run.file(checkpoint.step)
    assert values(run.load(file)) == values(dict(checkpoint.tensors))
    assert file.header.tree == checkpoint.tree
    assert file.header.record == {**checkpoint.record, "exact": None}
    assert {e.name: e.label for e in file.header.entries} == checkpoint.labels
    return file


def damage_levels(run: Run, step: int) -> bytes:
    """Flip a bit in the coded levels of the first tensor, at the end of its stream. Returns the file's new content."""
    content = bytearray(run.path(step).read_bytes())
    content[16 + run.file(step).header.entries[0].size - 20] ^= 1
    run.path(step).write_bytes(content)
    return bytes(content)


def series(run: WritableRun, steps, **options) -> list[Checkpoint]:
    """Commit a chain of checkpoints whose weights change a little from step to step. Returns them."""
    torch.manual_seed(1)
    weight, base, made = torch.randn(80, 50), None, []
    for step in steps:
        made.append(checkpoint_of(step, {"w": weight.clone()}, {"b": torch.full((3,), float(step))}, step, **options))
        _, base = run.commit(made[-1], base)
        weight += 0.02 * torch.randn_like(weight)
    return made
