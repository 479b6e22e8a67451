"""Models of real size without values: names, shapes, and which rank holds what under FSDP2 and tensor parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dynaquant.engine.tensors.shard import Shard as Held

COLUMNS, ROWS, VECTOR, SCALAR = "columns", "rows", "vector", "scalar"
"""How tensor parallel divides a tensor: by its first dimension, by its second, or not. Scalars are not divided."""
Tensors = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and kind of each tensor, by name."""
TP = 8


@dataclass(frozen=True)
class Layout:
    """How ranks divide a model. replicas: of HSDP. tp: ranks of tensor parallel."""

    name: str
    replicas: int = 1
    tp: int = 1

    def mesh(self, ranks: int) -> tuple[int, ...]:
        """Return the sizes of the mesh."""
        if self.tp > 1:
            return ranks // self.tp, self.tp
        return (ranks,) if self.replicas == 1 else (self.replicas, ranks // self.replicas)

    def fits(self, ranks: int) -> bool:
        """Whether so many ranks can have this layout."""
        return ranks % (self.replicas * self.tp) == 0


LAYOUTS = (Layout("FSDP2"), Layout("FSDP2 × TP 8", tp=TP), Layout("HSDP, 2 replicas", replicas=2))


def llama(width: int, hidden: int, layers: int, words: int, key_values: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the weights of a Llama. key_values: width of the keys and of the values."""
    found: dict[str, tuple[tuple[int, ...], str]] = {"tok_embeddings.weight": ((words, width), COLUMNS)}
    for i in range(layers):
        for name, shape, kind in (
            ("attention_norm", (width,), VECTOR),
            ("attention.wq", (width, width), COLUMNS),
            ("attention.wk", (key_values, width), COLUMNS),
            ("attention.wv", (key_values, width), COLUMNS),
            ("attention.wo", (width, width), ROWS),
            ("ffn_norm", (width,), VECTOR),
            ("feed_forward.w1", (hidden, width), COLUMNS),
            ("feed_forward.w2", (width, hidden), ROWS),
            ("feed_forward.w3", (hidden, width), COLUMNS),
        ):
            found[f"layers.{i}.{name}.weight"] = shape, kind
    return {**found, "norm.weight": ((width,), VECTOR), "output.weight": ((words, width), COLUMNS)}


MODELS = {
    "7B": llama(4096, 11008, 32, 32000, 4096),
    "70B": llama(8192, 28672, 80, 128256, 1024),
    "quick": llama(16, 44, 2, 33, 8),
}


def state_of(model: Tensors) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return a state: the weights, and two moments and a step of Adam for each."""
    found = {f"model.{name}": tensor for name, tensor in model.items()}
    for name, tensor in model.items():
        at = f"optimizer.state.model.{name}"
        found |= {f"{at}.step": ((), SCALAR), f"{at}.exp_avg": tensor, f"{at}.exp_avg_sq": tensor}
    return found


def placements(kind: str, layout: Layout) -> list[Any]:
    """Return the placements that FSDP2 and tensor parallel give to a tensor."""
    if layout.replicas > 1:
        return [Replicate(), Shard(0)]
    if layout.tp == 1:
        return [Shard(0)]
    if kind == COLUMNS:
        return [_StridedShard(0, split_factor=layout.tp), Shard(0)]
    return [Shard(0), Shard(1) if kind == ROWS else Replicate()]


def alike(tensors: Tensors, layout: Layout) -> list[tuple[tuple[int, ...], str]]:
    """Return shape and kind of one of the DTensors that are divided alike, for each way."""
    found: dict[object, tuple[tuple[int, ...], str]] = {}
    for shape, kind in tensors.values():
        if kind != SCALAR:
            found.setdefault((shape, tuple(placements(kind, layout))), (shape, kind))
    return list(found.values())


def dtensors(tensors: Tensors, rank: int, ranks: int, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors as this rank of a fake process group holds them. Their elements share memory."""
    mesh: DeviceMesh = init_device_mesh("cpu", layout.mesh(ranks))
    found: dict[str, Tensor] = {}
    for name, (shape, kind) in tensors.items():
        local = torch.zeros(()).expand(held_by(rank, ranks, shape, kind, layout).local_shape)
        if kind == SCALAR:
            found[name] = local.clone()
        else:
            stride = torch.empty(shape, device="meta").stride()
            found[name] = DTensor.from_local(
                local, mesh, placements(kind, layout), run_check=False, shape=torch.Size(shape), stride=stride
            )
    return found


@cache
def held_by(rank: int, ranks: int, shape: tuple[int, ...], kind: str, layout: Layout) -> Held:
    """Return what a rank holds of a tensor, without a process group."""
    if kind == SCALAR:
        return Held.whole(shape)
    sizes = layout.mesh(ranks)
    first, last = (rank, 0) if len(sizes) == 1 else divmod(rank, sizes[1])
    spans = [(0, size) for size in shape]
    if layout.replicas > 1:
        spans[0] = _chunk(spans[0], sizes[1], last)
    elif layout.tp == 1:
        spans[0] = _chunk(spans[0], ranks, first)
    else:
        # Tensor parallel divides first, FSDP2 what each of its ranks holds.
        if kind != VECTOR:
            dimension = 0 if kind == COLUMNS else 1
            spans[dimension] = _chunk(spans[dimension], sizes[1], last)
        spans[0] = _chunk(spans[0], sizes[0], first)
    return Held(torch.Size(shape), tuple((span,) if span[1] > span[0] else () for span in spans))


def _chunk(span: Sequence[int], pieces: int, number: int) -> tuple[int, int]:
    """Return one piece of a range as ``torch.chunk`` divides it."""
    begin, end = span
    size = -(-(end - begin) // pieces)
    return min(begin + number * size, end), min(begin + (number + 1) * size, end)
