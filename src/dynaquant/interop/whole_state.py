"""A whole state that was read from a file or folder, or handed over: its tree and tensors, whatever the format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

Format = Literal["safetensors", "huggingface", "torch", "dcp"]

DCP_METADATA = ".metadata"
"""The file that every folder of ``torch.distributed.checkpoint`` (DCP) has."""


@dataclass(frozen=True)
class WholeState:
    """A whole state: what another program has written, or what was handed over.

    tree, tensors: as ``flatten`` returns them. Tensors may be read on access, so a file need not fit into memory.
    Tensors that the tree does not name are files that are stored byte for byte. details: what else is needed to write
    the same file again, as JSON values.

    weights: names of the tensors that can be weights, None for all. averages: names of those that can be averages of
    weights. in_order: whether weights are in the order of the model; safetensors sorts them by name. notes: files of a
    folder that were left out or could not be read.
    """

    format: Format
    tree: Any
    tensors: Mapping[str, Tensor]
    details: dict[str, Any]
    weights: frozenset[str] | None = None
    averages: frozenset[str] = frozenset()
    in_order: bool = True
    notes: tuple[str, ...] = ()

    @property
    def origin(self) -> dict[str, Any]:
        """The entry ``source`` of the record, from which the same file can be written again."""
        return {"format": self.format, **self.details}
