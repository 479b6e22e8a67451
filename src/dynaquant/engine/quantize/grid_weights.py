"""Quantize all weights of a checkpoint on grids. The grid step of each tensor follows the sensitivity of the loss."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.quantize.grid import RoundedToGrid
from dynaquant.engine.quantize.knobs import SCALES_PER_OCTAVE, GridConfiguration
from dynaquant.engine.quantize.magnitude import magnitudes
from dynaquant.engine.quantize.step_limits import BALANCED_LIMITS, StepLimits
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.engine.tensors.codebook import HIGHEST_STEP_RUNG, LOWEST_RUNG, MAX_BINS, RUNGS_PER_OCTAVE, rung_value
from dynaquant.engine.tensors.lazy_mapping import LazyMapping

RUNG_HYSTERESIS = 0.8
"""A tensor keeps its previous rung while the wanted one is at most this far away. (0.5 would mean plain rounding.)"""
SMALLEST_MEAN_SQUARE = 1e-6
"""Lower limit of a mean squared gradient, as a share of the mean over all tensors."""


VECTOR_SENSITIVITY = 64.0
"""Sensitivity of the loss to vectors (biases, norms) relative to matrices, if no F is known. One value of a norm
multiplies a whole channel, and all vectors together are hardly a percent of a model."""


def effective_mean_squares(
    sizes: Mapping[str, int],
    squares: Mapping[str, float],
    mean_squares: Mapping[str, float],
    vectors: Collection[str] = (),
) -> dict[str, float]:
    """Return F, the mean squared gradient, for every weight.

    Where no positive F was measured, F is chosen so that the tensor counts as much as the average tensor. If none was
    measured at all, vectors count more.

    sizes: the number of elements of each weight. squares: the sum of squares of each, without outliers. mean_squares:
    measured mean squared gradients, for some or all weights. vectors: names of weights of less than two dimensions.
    """
    known = {
        name: mean_squares[name]
        for name in sizes
        if mean_squares.get(name, 0.0) > 0 and math.isfinite(mean_squares[name])
    }
    elements = sum(sizes[name] for name in known)
    mean = sum(known[name] * sizes[name] for name in known) / elements if known else 0.0
    result = {name: max(value, SMALLEST_MEAN_SQUARE * mean) for name, value in known.items()}
    if len(known) < len(sizes):
        loss = sum(known[name] * squares[name] for name in known) / elements if known else 0.0
        for name, size in sizes.items():
            if name not in known:
                weighted = 1.0 if known or name not in vectors else VECTOR_SENSITIVITY
                result[name] = weighted * (loss or 1.0) / (squares[name] / size or 1.0)
    return {name: result[name] for name in sizes}


def choose_rungs(
    mean_squares: Mapping[str, float],
    scale_exponent: int,
    previous_rungs: Mapping[str, int],
    largest_steps: Mapping[str, float] | None = None,
) -> dict[str, int]:
    """Return the rung of every tensor's grid step.

    previous_rungs: rungs of the previous checkpoint. A tensor keeps its rung if that is close to the wanted one.
    largest_steps: an upper limit of each tensor's step, as a float.
    """
    result = {}
    for name, value in mean_squares.items():
        octaves = scale_exponent / SCALES_PER_OCTAVE - math.log2(value) / 2
        if largest_steps is not None:
            octaves = min(octaves, math.log2(largest_steps[name]))
        wanted = RUNGS_PER_OCTAVE * octaves
        if name in previous_rungs and abs(wanted - previous_rungs[name]) <= RUNG_HYSTERESIS:
            result[name] = previous_rungs[name]
        else:
            result[name] = min(max(round(wanted), LOWEST_RUNG), HIGHEST_STEP_RUNG)
    return result


@dataclass(frozen=True)
class GridWeights:
    """The weights of a checkpoint, prepared to be quantized at any scale. All mappings are by name.

    Tensors that must be stored exactly are left out: empty and constant ones, those with infinities or NaNs, and uneven
    matrices (``magnitudes``). ``notes`` has a line for each tensor of the last two kinds.

    weights: what this rank holds of them. sizes: the number of elements of each, on all ranks together. mean_squares:
    F of each, from ``effective_mean_squares``. squares: the sum of squares of each, without outliers. largest_steps:
    the largest grid step of each. previous_rungs: rungs of the previous checkpoint. seed: for stochastic rounding. With
    the same seed, only weights that have moved change their level. on_access: whether weights are quantized only when
    they are written, one by one, so that they need not fit into memory. vectors: names of tensors of one row or column.
    """

    weights: Mapping[str, Tensor]
    sizes: Mapping[str, int]
    mean_squares: Mapping[str, float]
    squares: Mapping[str, float]
    largest_steps: Mapping[str, float]
    previous_rungs: Mapping[str, int]
    seed: int
    notes: list[str]
    shards: Shards = WHOLE
    on_access: bool = False
    vectors: Collection[str] = ()

    def rungs(self, configuration: GridConfiguration) -> dict[str, int]:
        """Return the rung of each tensor's grid step, but for vectors that this configuration stores exactly.

        Most of their values are larger than any level. 16 bits may hold these less precisely than the loss needs, as a
        bias of a thousand. Then no scale would be good enough for all tensors.
        """
        rungs = choose_rungs(self.mean_squares, configuration.scale, self.previous_rungs, self.largest_steps)
        return {
            name: rung
            for name, rung in rungs.items()
            if name not in self.vectors or self._root_mean_square(name) <= MAX_BINS / 2 * rung_value(rung)
        }

    def _root_mean_square(self, name: str) -> float:
        return math.sqrt(self.squares[name] / self.sizes[name])

    def candidate(self, configuration: GridConfiguration) -> dict[str, RoundedToGrid]:
        """Return the weights as ``quantize`` would store them, to be scored; a pure function.

        The candidate that is scored last is usually chosen, so it keeps the levels that scoring by errors makes.
        """
        rungs, shards, keeps_levels = self.rungs(configuration), self.shards.held, not self.on_access

        def rounded(name: str) -> RoundedToGrid:
            seed = zlib.crc32(name.encode(), self.seed & 0xFFFFFFFF) if configuration.dithered else None
            read = partial(self.weights.__getitem__, name)
            return RoundedToGrid(read, rungs[name], seed, shards.get(name), keeps_levels)

        return {name: rounded(name) for name in rungs}

    def quantize(self, configuration: GridConfiguration) -> Mapping[str, QuantizedTensor]:
        """Return the quantized weights; a pure function. With ``on_access``, every look-up quantizes again."""
        candidate = self.candidate(configuration)
        if self.on_access:
            return LazyMapping(candidate, lambda name: candidate[name].begin_quantize()())
        begun = {name: rounded.begin_quantize() for name, rounded in candidate.items()}
        return {name: begun.pop(name)() for name in list(begun)}  # pop: frees the pinned memory of finished tensors

    def predict(self, configuration: GridConfiguration) -> None:
        """Return no size: the search needs none, because a larger scale always takes fewer bytes."""

    def scale_exponent_for(self, distortion: float) -> int:
        """Return the scale exponent for which ``Σ F·δ² / Σ F·w²`` is about ``distortion``.

        δ is the error of a weight w, taken as evenly distributed over a grid step.
        """
        weighted = sum(self.mean_squares[name] * square for name, square in self.squares.items())
        if not weighted > 0:
            return 0
        elements = sum(self.sizes.values())
        return math.floor(SCALES_PER_OCTAVE * math.log2(12 * distortion * weighted / elements) / 2)

    @property
    def coarsest_scale(self) -> int:
        """The scale exponent from which on every tensor has its largest grid step."""
        octaves = [
            math.log2(self.largest_steps[name]) + math.log2(value) / 2 for name, value in self.mean_squares.items()
        ]
        return math.ceil(SCALES_PER_OCTAVE * max(octaves, default=0.0))


def grid_weights(
    weights: Mapping[str, Tensor],
    mean_squares: Mapping[str, float],
    previous_rungs: Mapping[str, int],
    seed: int,
    shards: Shards = WHOLE,
    step_limits: StepLimits = BALANCED_LIMITS,
    displaced: Mapping[str, float] | None = None,
    on_access: bool = False,
    vectors_count_more: bool = False,
) -> GridWeights:
    """Read the weights a few times, to prepare for quantizing them with any configurations. Collective with shards.

    weights: of ``QUANTIZABLE_DTYPES``, by name; looked up again whenever they are needed. mean_squares: mean squared
    gradients, for some or all weights. previous_rungs, seed: see ``GridWeights``. shards: of the weights.
    step_limits: of the preset. displaced: how far each weight has moved since the training began, as far as known.
    on_access: see ``GridWeights``. vectors_count_more: whether weights of less than two dimensions count more than
    others if no F is known (``VECTOR_SENSITIVITY``).
    """
    nonfinite: dict[str, int] = {}
    uneven: list[str] = []
    found = magnitudes(weights, shards, nonfinite, uneven)
    notes = [f"{name}: {count} infinite or NaN values, stored exactly" for name, count in nonfinite.items()]
    notes += [f"{name}: values far apart in size, as with a mask of constants, stored exactly" for name in uneven]
    usable = LazyMapping(found, weights.__getitem__) if on_access else {name: weights[name] for name in found}
    sizes = {name: shards.size(name, usable[name]) for name in found}
    squares = {name: sizes[name] * magnitude.mean_square for name, magnitude in found.items()}
    displaced = displaced or {}
    largest_steps = {name: step_limits.largest_step(each, displaced.get(name)) for name, each in found.items()}
    previous = {name: rung for name, rung in previous_rungs.items() if name in usable}
    vectors = {name for name in found if usable[name].ndim < 2} if vectors_count_more else ()
    known_or_assumed = effective_mean_squares(sizes, squares, mean_squares, vectors)
    return GridWeights(
        usable,
        sizes,
        known_or_assumed,
        squares,
        largest_steps,
        previous,
        seed,
        notes,
        shards,
        on_access,
        [name for name in found if sizes[name] <= max(shards.of(name, usable[name]).shape, default=1)],
    )
