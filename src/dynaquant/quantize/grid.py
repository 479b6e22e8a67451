"""Uniform quantization with a step for each tensor, by how much the loss minds (method 2.1)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dynaquant import kernels
from dynaquant.tensors.codebook import HIGHEST_STEP, LOWEST_RUNG, RUNGS_PER_OCTAVE, Grid, rung_value
from dynaquant.tensors.dequantize import protected_values
from dynaquant.tensors.lazy import Lazy
from dynaquant.tensors.stored import FIRST_BIN, MAX_BINS, QuantizedTensor

SCALES_PER_OCTAVE = 16
"""A scale is finer than a rung, so that from one to the next only a part of the tensors change their step."""
MOST_SCALE = 10_000
"""Beyond it 2^(scale/16) is no float64."""
STAY = 0.8
"""Rungs that a step may be off where it should be before it changes. Half a rung would be no reluctance at all."""
STEP_LIMIT = 2.5
"""Root mean squares of a tensor that a step is at most, up to a rung: where hardly anything is left of a tensor, the
second-order model of the loss, by which it would hardly matter, no longer holds."""
SMALLEST, LARGEST = 2.0**-126, 1e37
"""Weights beyond them do not survive arithmetic in float32, and are stored exactly. (Only float64 has larger ones.)"""
SMALLEST_FISHER = 1e-6
"""Mean squared gradients below this share of the mean over all tensors are taken for it."""


@dataclass(frozen=True)
class GridConfiguration:
    """The knob of the grid quantizer for one checkpoint: ``s = 2^(scale/16)`` in ``step = s / sqrt(F)``.

    F is the mean squared gradient of a tensor. Without gradients it is taken as the inverse of its mean squared weight.
    dithered: values are rounded up or down at random, right in the mean, instead of to the nearest level. Raises
    TypeError and ValueError for what is no such thing.
    """

    scale: int
    dithered: bool = False

    def __post_init__(self) -> None:
        if type(self.scale) is not int or type(self.dithered) is not bool:
            raise TypeError(f"scale is an integer and dithered a bool: {self}")
        if abs(self.scale) > MOST_SCALE:
            raise ValueError(f"scale must lie between -{MOST_SCALE} and {MOST_SCALE}: {self}")


def effective_fisher(
    weights: Mapping[str, Tensor], squares: Mapping[str, float], fisher: Mapping[str, float]
) -> dict[str, float]:
    """F of every weight: as measured, where that is above zero; otherwise as if its loss were that of the mean tensor.

    squares: the sums of the squares of the weights. fisher: mean squared gradients of as many of the weights as they
    are known of.
    """
    known = {name: fisher[name] for name in weights if fisher.get(name, 0.0) > 0 and math.isfinite(fisher[name])}
    elements = sum(weights[name].numel() for name in known)
    mean = sum(known[name] * weights[name].numel() for name in known) / elements if known else 0.0
    result = {name: max(value, SMALLEST_FISHER * mean) for name, value in known.items()}
    if len(known) < len(weights):
        loss = sum(known[name] * squares[name] for name in known) / elements if known else 0.0
        for name, tensor in weights.items():
            if name not in known:
                result[name] = (loss or 1.0) / (squares[name] / tensor.numel() or 1.0)
    return {name: result[name] for name in weights}


def rungs(
    fisher: Mapping[str, float], scale: int, last: Mapping[str, int], largest: Mapping[str, float] | None = None
) -> dict[str, int]:
    """The rung of every tensor's step. last: those of the checkpoint before, which are kept where they nearly fit.

    largest: the largest step of each tensor, as a float.
    """
    result = {}
    for name, value in fisher.items():
        octaves = scale / SCALES_PER_OCTAVE - math.log2(value) / 2
        wanted = RUNGS_PER_OCTAVE * (octaves if largest is None else min(octaves, math.log2(largest[name])))
        near = name in last and abs(wanted - last[name]) <= STAY
        result[name] = last[name] if near else min(max(round(wanted), LOWEST_RUNG), HIGHEST_STEP)
    return result


def quantize(tensor: Tensor, rung: int, random: int | None = None) -> QuantizedTensor:
    """The nearest multiples of the step; what lies more than 127 steps from zero is protected.

    tensor: float32, float64, bfloat16 or float16, finite, any shape, on any device. random: a seed; values are then
    rounded up with a probability of how far they have come from the multiple below to that above, so that they are
    right in the mean.
    """
    return begin(tensor, rung, random)()


def begin(tensor: Tensor, rung: int, random: int | None = None) -> Callable[[], QuantizedTensor]:
    """``quantize`` in two halves: the device works on until what this returns is called."""
    inverse = np.float32(1) / rung_value(rung)
    levels, highest = kernels.at(tensor.device).grid_levels(tensor, float(inverse), random)
    copied = kernels.to_host(levels)

    def finish() -> QuantizedTensor:
        wanted = int(highest) - FIRST_BIN + 1
        protected = protected_values(tensor, levels) if wanted > MAX_BINS else np.zeros(0, dtype=np.uint16)
        bins = min(max(wanted, 0), MAX_BINS)
        return QuantizedTensor(tensor.dtype, tensor.shape, copied(), Grid(rung, bins), protected)

    return finish


def _square(tensor: Tensor) -> float:
    return kernels.at(tensor.device).sums(tensor)[1]


@dataclass(frozen=True)
class GridWeights:
    """The weights of a checkpoint with what every scale needs to know of them, each by name.

    Missing are tensors that are to be stored exactly: those with infinities or NaNs, for each of which there is a note,
    empty and constant ones. fisher: as from ``effective_fisher``. squares: the sums of the squares of the weights.
    last: rungs of the checkpoint before. seed: of the dither; with the same one only weights that have moved change
    their level.
    """

    weights: Mapping[str, Tensor]
    fisher: Mapping[str, float]
    squares: Mapping[str, float]
    last: Mapping[str, int]
    seed: int
    notes: list[str]

    def steps(self, configuration: GridConfiguration) -> dict[str, int]:
        """The rungs of the steps of a scale, by name."""
        return rungs(self.fisher, configuration.scale, self.last, self._largest)

    def quantize(self, configuration: GridConfiguration) -> Mapping[str, QuantizedTensor]:
        """The weights with the steps of a scale, by name; a pure function."""
        steps = self.steps(configuration)

        def seed(name: str) -> int | None:
            return zlib.crc32(name.encode(), self.seed & 0xFFFFFFFF) if configuration.dithered else None

        begun = {name: begin(tensor, steps[name], seed(name)) for name, tensor in self.weights.items()}
        return {name: begun.pop(name)() for name in list(begun)}  # what is done needs its pinned memory no more

    def predict(self, configuration: GridConfiguration) -> None:
        """Nothing: the search goes by degradation alone, as a larger scale is always smaller."""

    def scale_for(self, distortion: float) -> int:
        """The scale with which ``Σ F·δ²`` is that share of ``Σ F·w²``, if errors are spread evenly over the steps."""
        elements = sum(tensor.numel() for tensor in self.weights.values())
        if not self._loss > 0:
            return 0
        return math.floor(SCALES_PER_OCTAVE * math.log2(12 * distortion * self._loss / elements) / 2)

    @cached_property
    def _loss(self) -> float:
        return sum(self.fisher[name] * square for name, square in self.squares.items())

    @cached_property
    def _largest(self) -> dict[str, float]:
        sizes = {name: tensor.numel() for name, tensor in self.weights.items()}
        return {name: STEP_LIMIT * math.sqrt(square / sizes[name]) for name, square in self.squares.items()}


def grid_weights(
    weights: Mapping[str, Tensor], fisher: Mapping[str, float], last: Mapping[str, int], seed: int
) -> GridWeights:
    """Looks through the weights once, ahead of quantizing them with one or many scales.

    weights: tensors of dtypes in ``sketch.SKETCHED``, by name. fisher: mean squared gradients, of as many as are known.
    last: rungs of the checkpoint before. The weights are asked for again whenever they are needed.
    """
    notes, kept, squares = [], [], {}
    for name, tensor in weights.items():
        if tensor.numel() == 0:
            continue
        lowest, highest = (float(extreme) for extreme in torch.aminmax(tensor.detach()))  # NaN where one value is
        if not (math.isfinite(lowest) and math.isfinite(highest)):
            nonfinite = int((~tensor.detach().isfinite()).sum())
            notes.append(f"{name}: {nonfinite} infinite or NaN values, stored exactly")
        elif lowest < highest and SMALLEST <= max(highest, -lowest) < LARGEST:
            kept.append(name)
            squares[name] = _square(tensor)
    usable = Lazy(kept, weights.__getitem__)
    before = {name: rung for name, rung in last.items() if name in usable}
    return GridWeights(usable, effective_fisher(usable, squares, fisher), squares, before, seed, notes)
