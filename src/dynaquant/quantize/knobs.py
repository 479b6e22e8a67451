"""Knobs: the configuration of a checkpoint's weights, for either quantizer, and its JSON form in a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from dynaquant.quantize.grid import SCALES_PER_OCTAVE, GridConfiguration
from dynaquant.quantize.partition import Configuration

Knobs = Configuration | GridConfiguration
"""The configuration of either quantizer."""
Method = Literal["grid", "kmeans", "published"]
"""How weights are quantized and coded:

- ``grid``: on a uniform grid, with conditional entropy coding;
- ``kmeans``: by k-means, with conditional entropy coding;
- ``published``: by k-means, with run lengths and Huffman codes, as in the paper.
"""


def knobs_to_json(knobs: Knobs | None) -> dict[str, Any] | None:
    """Return the knobs as plain JSON values."""
    return None if knobs is None else asdict(knobs)


def knobs_from_json(data: Mapping[str, Any]) -> Knobs:
    """Return the knobs that ``knobs_to_json`` wrote. Raises TypeError or ValueError if the data are not such knobs."""
    return GridConfiguration(**data) if "scale" in data else Configuration(**data)


def in_short(knobs: Knobs) -> str:
    """Return the most important knobs as text for people."""
    if isinstance(knobs, GridConfiguration):
        return f"grid 2^{knobs.scale / SCALES_PER_OCTAVE:.2f}" + (", stochastic rounding" if knobs.dithered else "")
    return f"{knobs.bins}/{knobs.embedding_bins} bins, {knobs.pruned:.0%} pruned"
