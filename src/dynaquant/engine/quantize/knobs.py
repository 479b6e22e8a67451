"""Knobs: the configuration of a checkpoint's weights, for either quantizer, and its JSON form in a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dynaquant.engine.tensors.codebook import MAX_BINS

SCALES_PER_OCTAVE = 16
"""Scale exponents per octave. There are more of them than rungs, so the next scale changes the step of some tensors
only."""
MAX_SCALE = 10_000
"""Limit of the scale exponent. ``2^(scale/16)`` stays a normal float64."""
Metric = Literal["magnitude", "sensitivity"]


@dataclass(frozen=True)
class GridConfiguration:
    """The configuration of the grid quantizer for one checkpoint.

    scale: an exponent. The grid step of a tensor is ``2^(scale/16) / sqrt(F)``, where F is the mean squared gradient of
    the tensor. Without gradients, F is the inverse of the mean squared weight.
    dithered: use stochastic rounding instead of rounding to the nearest level. Stochastic rounding is right on average.

    Raises TypeError or ValueError if a field has the wrong type or is out of range.
    """

    scale: int
    dithered: bool = False

    def __post_init__(self) -> None:
        if type(self.scale) is not int or type(self.dithered) is not bool:
            raise TypeError(f"scale must be an integer and dithered a bool: {self}")
        if abs(self.scale) > MAX_SCALE:
            raise ValueError(f"scale must lie between -{MAX_SCALE} and {MAX_SCALE}: {self}")


@dataclass(frozen=True)
class Configuration:
    """The configuration of the k-means quantizer for one checkpoint.

    bins: clusters per tensor, 1 to 254. embedding_bins: the same for embedding layers.
    pruned: fraction of the weights of a layer type that become zero, in [0, 1).
    pruning_metric: prune the weights of the lowest magnitude, or of the lowest sensitivity ``|gradient · weight|``.
    protected: fraction of the weights of a layer type that stay in 16 bits, in [0, 1).
    protection_metric: protect the weights of the highest magnitude, or of the highest sensitivity. ``"both"`` gives
    half of the fraction to each.

    Gradients are recorded only if one of the metrics is sensitivity. docs/decisions.md says why the default is 32 bins.

    Raises ValueError if a field is out of range.
    """

    bins: int = 32
    embedding_bins: int = 32
    pruned: float = 0.1
    pruning_metric: Metric = "magnitude"
    protected: float = 0.005
    protection_metric: Metric | Literal["both"] = "both"

    def __post_init__(self) -> None:
        if not (1 <= self.bins <= MAX_BINS and 1 <= self.embedding_bins <= MAX_BINS):
            raise ValueError(f"bins must be 1 to {MAX_BINS}: {self}")
        if not (0 <= self.pruned < 1 and 0 <= self.protected < 1):
            raise ValueError(f"pruned and protected are fractions from 0 to below 1: {self}")
        if self.pruning_metric not in ("magnitude", "sensitivity"):
            raise ValueError(f"pruning_metric must be 'magnitude' or 'sensitivity', not {self.pruning_metric!r}")
        if self.protection_metric not in ("magnitude", "sensitivity", "both"):
            raise ValueError(
                f"protection_metric must be 'magnitude', 'sensitivity' or 'both', not {self.protection_metric!r}"
            )

    @property
    def uses_sensitivity(self) -> bool:
        """Whether the configuration needs gradients."""
        return self.pruning_metric == "sensitivity" or self.protection_metric != "magnitude"


Knobs = Configuration | GridConfiguration
"""The configuration of either quantizer."""
MethodName = Literal["grid", "published"]
"""How weights are quantized and coded:

- ``grid``: on a uniform grid, with conditional entropy coding;
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
