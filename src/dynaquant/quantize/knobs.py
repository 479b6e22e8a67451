"""The knobs of either quantizer for one checkpoint, and how they stand in a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from dynaquant.quantize.grid import SCALES_PER_OCTAVE, GridConfiguration
from dynaquant.quantize.partition import Configuration

Knobs = Configuration | GridConfiguration
Method = Literal["grid", "kmeans", "published"]
"""How weights are quantized and coded: on a grid (method 2.1, 2.2); by k-means, coded in the same way; or by k-means,
coded with run lengths and Huffman codes (method part 1)."""


def knobs_to_json(knobs: Knobs | None) -> dict[str, Any] | None:
    """Plain JSON values."""
    return None if knobs is None else asdict(knobs)


def knobs_from_json(data: Mapping[str, Any]) -> Knobs:
    """The inverse of ``knobs_to_json``. Raises TypeError or ValueError for anything else."""
    return GridConfiguration(**data) if "scale" in data else Configuration(**data)


def in_short(knobs: Knobs) -> str:
    """The knobs that matter most, for people."""
    if isinstance(knobs, GridConfiguration):
        return f"grid 2^{knobs.scale / SCALES_PER_OCTAVE:.2f}" + (", dithered" if knobs.dithered else "")
    return f"{knobs.bins}/{knobs.embedding_bins} bins, {knobs.pruned:.0%} pruned"
